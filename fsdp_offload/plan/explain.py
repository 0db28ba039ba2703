"""A plan as a table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from ..config import LANES, Lane
from .lanes import Candidate
from .prediction import Load, Prediction, load_of, predict
from .rates import Rates

_HEADER: Final = ("lane", "parameters", "count", "state MB", "link MB", "predicted ms", "measured")
_LEFT: Final = 2  # columns of text; numbers stand to the right


@dataclass(frozen=True)
class _Run:
    """Neighbours in update order that share a lane and a block of the model."""

    lane: Lane
    name: str
    members: tuple[Candidate, ...]

    @property
    def load(self) -> Load:
        return sum((load_of(c, self.lane) for c in self.members), Load())


def block_of(fqn: str) -> str:
    """The block that a parameter belongs to, by its name.

    Up to the first number (``layers.3.wq.weight`` is of ``layers.3``), or all but the last word.
    """
    words = fqn.split(".")
    for i, word in enumerate(words[:-1]):
        if word.isdigit():
            return ".".join(words[: i + 1])
    return ".".join(words[:-1]) or fqn


def explain(
    candidates: Sequence[Candidate],
    lanes: Sequence[Lane],
    rates: Rates | None,
    measured_ms: Mapping[str, float],
) -> str:
    """The table of :meth:`Plan.explain`. Bytes are those of the rank with the largest shards."""
    pairs = zip(candidates, lanes, strict=True)
    runs = [
        _Run(lane, name, tuple(candidate for candidate, _ in members))
        for (lane, name), members in groupby(pairs, key=lambda p: (p[1], block_of(p[0].fqn)))
    ]
    rows = [_row(run, rates, _measured_of(run, measured_ms)) for run in runs]
    for lane in LANES:
        members = tuple(c for c, each in zip(candidates, lanes, strict=True) if each == lane)
        if members:
            total = _Run(lane, "all", members)
            rows.append(_row(total, rates, measured_ms.get(lane, _measured_of(total, measured_ms))))
    total_load = sum((run.load for run in runs), Load())
    prediction = None if rates is None else predict(total_load, rates)
    lines = [*_align([_HEADER, *rows]), _summary(prediction, measured_ms.get("step"))]
    return "\n".join(lines if rates is None else [*lines, _rates_line(rates)])


def _measured_of(run: _Run, measured_ms: Mapping[str, float]) -> float | None:
    if all(candidate.fqn in measured_ms for candidate in run.members):
        return sum(measured_ms[candidate.fqn] for candidate in run.members)
    return None


def _row(run: _Run, rates: Rates | None, measured: float | None) -> tuple[str, ...]:
    held = [c.host_state_bytes if run.lane == "host" else c.max_local_bytes for c in run.members]
    return (
        run.lane,
        run.name,
        str(len(run.members)),
        f"{sum(held) / 1e6:.1f}",
        f"{run.load.link_bytes / 2e6:.1f}",
        _ms(None if rates is None else _alone_ms(run, rates)),
        _ms(measured),
    )


def _alone_ms(run: _Run, rates: Rates) -> float:
    """What the run adds to its lane: the busiest part, without the host lane's latency."""
    predicted = predict(run.load, rates)
    busy_ms = predicted.host_ms - (rates.host_latency_ms if run.load.host_numel else 0.0)
    return max(predicted.link_ms, busy_ms, predicted.dram_ms, predicted.device_ms)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _summary(prediction: Prediction | None, step_ms: float | None) -> str:
    measured = "" if step_ms is None else f", measured {step_ms:.1f} ms"
    if prediction is None:
        return f"step: not predicted, no rates were measured{measured}"
    busy = ", ".join(f"{part} {busy_ms:.1f}" for part, busy_ms in prediction.busy_ms.items())
    text = (
        f"step: predicted {prediction.step_ms:.1f} ms{measured}, "
        f"limited by the {prediction.limit}; busy ms: {busy}"
    )
    if step_ms:
        text += f"; predicted / measured {prediction.step_ms / step_ms:.2f}"
    return text


def _rates_line(rates: Rates) -> str:
    return (
        f"rates: link {rates.h2d_gbps:.1f} up, {rates.d2h_gbps:.1f} down, "
        f"{rates.both_ways_gbps:.1f} GB/s both; host {rates.host_numel_per_s / 1e9:.2f} G "
        f"parameters/s; together {rates.beside_gbps:.1f} GB/s and "
        f"{rates.beside_numel_per_s / 1e9:.2f} G parameters/s; "
        f"dram {rates.host_dram_gbps:.0f}, device {rates.device_gbps:.0f} GB/s"
    )


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i < _LEFT else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
