"""Where each parameter is updated, chosen so that the predicted step is shortest.

[Note: which parameters the host lane gets]
The streamed lane is limited by the link, the host lane by CPU cores, both together by host memory.
Run side by side they share the work, so the planner looks for the cut where neither waits for the
other. The host lane gets one run of the update order, at its end: the last layers' gradients come
first in backward and their parameters are needed last in forward, so the lane with the longest way
(gradient out, update, parameter in) has the most time there. One run per lane also keeps buckets
large. Only a parameter with more than a tenth of all bytes is passed over at the end, because with
it the cut could be far from the best.

[Note: why not all of a gain is taken]
Rates scatter by a few per cent from run to run, and two lanes disturb each other in more ways than
a prediction knows. So the host lane alone has to save ``MIN_GAIN`` of the streamed lane's step,
and both lanes together ``MIN_GAIN_OF_BOTH`` of the better one's. Where host memory is slow two
lanes are predicted to lose, and win nothing that can be told from scatter; where it is faster they
win a third of what is predicted or more. Besides, the host lane may be busy for no more than
``HOST_BUSY`` of the step: with half of the state there a step was longer than with none.
Measured: docs/planner.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from typing import Any, Final

from ..config import LANES, MIB, Lane, OffloadConfig
from ..errors import ConfigError
from .explain import explain
from .lanes import Candidate, checked_lane, choose_lanes
from .prediction import Load, Prediction, load_of, predict
from .rates import Rates

FORMAT: Final = 2
MIN_GAIN: Final = 0.02
MIN_GAIN_OF_BOTH: Final = 0.03
HOST_BUSY: Final[Mapping[str, float]] = {"step": 0.55}
"""Shares of the predicted step, the last one by ``overlap``; see the notes above."""
MIN_BYTES: Final = 256 * MIB
"""State below which nothing is measured: it is streamed in 6 ms over the links of today, as long
as the host lane takes for one unit."""
LARGE_SHARE: Final = 0.1
"""Share of the streamed bytes above which a parameter may be passed over by the host lane."""


@dataclass(frozen=True)
class Plan:
    """The lane of every parameter, and the rates that it was chosen by. All of it is the same on
    every rank.

    Raises:
        ConfigError: a parameter cannot live in its lane.
    """

    candidates: tuple[Candidate, ...]  # in update order
    lanes: tuple[Lane, ...]
    rates: Rates | None = None
    """``None``: nothing was measured, because nothing depended on it."""

    def __post_init__(self) -> None:
        assert len(self.candidates) == len(self.lanes), (len(self.candidates), len(self.lanes))
        for candidate, lane in zip(self.candidates, self.lanes, strict=True):
            checked_lane(candidate, lane)

    def lane(self, fqn: str) -> Lane:
        """The lane of one parameter; ``KeyError`` if there is none of that name."""
        return dict(zip((c.fqn for c in self.candidates), self.lanes, strict=True))[fqn]

    def joined(self, later: Plan) -> Plan:
        """This plan and that of parameters which were added later."""
        return Plan(
            self.candidates + later.candidates,
            self.lanes + later.lanes,
            later.rates or self.rates,
        )

    def predict(self, rates: Rates | None = None) -> Prediction | None:
        """The predicted step by ``rates``, or else by the plan's own; ``None`` without any."""
        known = rates or self.rates
        return None if known is None else predict(_total(self.candidates, self.lanes), known)

    def explain(
        self,
        measured_ms: Mapping[str, float] | float | None = None,
        *,
        rates: Rates | None = None,
    ) -> str:
        """A table for people: lane, bytes, predicted and measured ms of each run of parameters.

        Args:
            measured_ms: the whole step, or a mapping: ``"step"``, a lane's name, or the names of
                all parameters of a run (their sum is shown).
            rates: by which to predict, instead of the plan's own.
        """
        known = {"step": measured_ms} if isinstance(measured_ms, int | float) else measured_ms
        return explain(self.candidates, self.lanes, rates or self.rates, known or {})

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON; :meth:`from_dict` gives an equal plan."""
        return {
            "format": FORMAT,
            "rates": None if self.rates is None else self.rates.to_dict(),
            "parameters": [
                {**asdict(candidate), "lane": lane}
                for candidate, lane in zip(self.candidates, self.lanes, strict=True)
            ],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """The plan that :meth:`to_dict` gave.

        Raises:
            ConfigError: another format, or not a plan.
        """
        found = values.get("format") if isinstance(values, Mapping) else None
        if found != FORMAT:
            raise ConfigError(
                f"a plan of format {found!r}",
                reason=f"this version reads format {FORMAT}",
                remedy="pass what Plan.to_dict() gave, or plan anew",
            )
        try:
            rows = [dict(row) for row in values["parameters"]]
            lanes = tuple(row.pop("lane") for row in rows)
            candidates = tuple(map(_candidate, rows))
            if unknown := set(lanes) - set(LANES):
                raise ValueError(f"unknown lanes {unknown}")
            rates = values["rates"]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                "a plan that cannot be read",
                reason=f"{type(error).__name__}: {error}",
                remedy="pass what Plan.to_dict() gave",
            ) from None
        return cls(candidates, lanes, None if rates is None else Rates.from_dict(rates))


def make_plan(
    candidates: Sequence[Candidate],
    config: OffloadConfig,
    rates: Rates | None = None,
    *,
    used_bytes: int = 0,
) -> Plan:
    """The plan for ``candidates``: a pure function of values that are the same on all ranks.

    Args:
        candidates: in update order, or as ``config.update_on`` lists lanes.
        config: the user's choices.
        rates: of this machine; needed by ``update_on="auto"`` only, which streams without them.
        used_bytes: of a device budget that earlier parameters take.

    Raises:
        ConfigError: see :func:`choose_lanes`.
    """
    lanes = choose_lanes(candidates, config, used_bytes=used_bytes)
    if config.update_on == "auto" and rates is not None:
        on_host = _host_run(candidates, lanes, rates, config.overlap)
        lanes = tuple("host" if i in on_host else lane for i, lane in enumerate(lanes))
    return Plan(tuple(candidates), lanes, rates)


def wants_rates(candidates: Sequence[Candidate], config: OffloadConfig, *, used_bytes: int) -> bool:
    """Whether :func:`make_plan` has a choice that is worth measuring for."""
    if config.update_on != "auto" or config.overlap not in HOST_BUSY:
        return False  # beside forward and backward two lanes are not faster (docs/planner.md)
    lanes = choose_lanes(candidates, config, used_bytes=used_bytes)
    pairs = zip(candidates, lanes, strict=True)
    return sum(c.max_local_bytes for c, lane in pairs if _can_move(c, lane)) >= MIN_BYTES


def lanes_from(plan: Plan, candidates: Sequence[Candidate]) -> tuple[Lane, ...]:
    """The lanes of a saved plan for the parameters of this job, in the order of ``candidates``.

    The number of ranks may differ: lanes belong to whole parameters.

    Raises:
        ConfigError: the plan is of another model: a parameter is missing or unknown, has other
            bytes of state, or cannot live in its lane.
    """
    planned = {c.fqn: (c, lane) for c, lane in zip(plan.candidates, plan.lanes, strict=True)}
    names = [candidate.fqn for candidate in candidates]
    if len(set(names)) != len(names):
        raise ConfigError(
            f"a plan for parameters of which {_twice(names)!r} is the name of two",
            reason="lanes are found by name",
            remedy="give the optimizer its model, or param_names that differ",
        )
    remedy = "use the plan of this model, optimizer and precision, or plan anew without plan="
    for fqn, where in [
        *((c.fqn, "the plan does not have it") for c in candidates if c.fqn not in planned),
        *((fqn, "the optimizer does not have it") for fqn in planned if fqn not in names),
    ]:
        raise ConfigError(f"a plan for parameter {fqn}", reason=where, remedy=remedy)
    for candidate in candidates:
        before = planned[candidate.fqn][0]
        if before.global_bytes != candidate.global_bytes:
            raise ConfigError(
                f"a plan for parameter {candidate.fqn} with {before.global_bytes} bytes of state",
                reason=f"here it has {candidate.global_bytes}",
                remedy=remedy,
            )
    return tuple(checked_lane(c, planned[c.fqn][1]) for c in candidates)


def replay(plan: Plan, candidates: Sequence[Candidate]) -> Plan:
    """``plan`` for the parameters of this job, in their order; raises as :func:`lanes_from`."""
    return Plan(tuple(candidates), lanes_from(plan, candidates), plan.rates)


def _twice(names: Sequence[str]) -> str:
    return next(name for i, name in enumerate(names) if name in names[:i])


def _candidate(row: Mapping[str, Any]) -> Candidate:
    candidate = Candidate(**row)
    for field in fields(candidate):
        value, wanted = getattr(candidate, field.name), type(getattr(_EXAMPLE, field.name))
        if type(value) is not wanted:
            raise TypeError(f"{field.name}={value!r} is no {wanted.__name__}")
    return candidate


_EXAMPLE: Final = Candidate("", 0, 0)


def _can_move(candidate: Candidate, lane: Lane) -> bool:
    return lane == "streamed" and candidate.movable


def _total(candidates: Sequence[Candidate], lanes: Sequence[Lane]) -> Load:
    return sum(map(load_of, candidates, lanes), Load())


def _host_run(
    candidates: Sequence[Candidate], lanes: Sequence[Lane], rates: Rates, overlap: str
) -> set[int]:
    """Which candidates leave the streamed for the host lane; see the notes above.

    Args:
        candidates: in update order.
        lanes: without a host lane.
        rates: of this machine.
        overlap: beside forward and backward the host lane is never alone: it would be what they
            wait for.
    """
    movable = [i for i, pair in enumerate(zip(candidates, lanes, strict=True)) if _can_move(*pair)]
    streamed = _total(candidates, lanes)
    moves = (load_of(candidates[i], "host") - load_of(candidates[i], "streamed") for i in movable)
    prefix = list(accumulate(moves, initial=Load()))

    def step(start: int, stop: int) -> Prediction:
        return predict(streamed + prefix[stop] - prefix[start], rates)

    count = len(movable)
    chosen, chosen_ms = (count, count), step(count, count).step_ms  # nothing on the host
    may_be_alone = overlap == "step" and not (streamed + prefix[count]).streamed_bytes
    if may_be_alone and (all_ms := step(0, count).step_ms) < (1 - MIN_GAIN) * chosen_ms:
        chosen, chosen_ms = (0, count), all_ms
    total_bytes = sum(candidates[i].max_local_bytes for i in movable)
    large = LARGE_SHARE * total_bytes
    stops = [count, *(j for j, i in enumerate(movable) if candidates[i].max_local_bytes > large)]
    busy = HOST_BUSY.get(overlap, 0.0)
    options = [(step(start, stop), start, stop) for stop in stops for start in range(stop)]
    best_ms, start, stop = min(
        ((p.step_ms, a, b) for p, a, b in options if p.host_ms <= busy * p.step_ms),
        # Of equal ones the run that ends last, then the shortest.
        key=lambda option: (option[0], -option[2], -option[1]),
        default=(chosen_ms, *chosen),
    )
    if best_ms < (1 - MIN_GAIN_OF_BOTH) * chosen_ms:
        chosen = (start, stop)
    return set(movable[chosen[0] : chosen[1]])
