"""What reduced moments cost in accuracy: loss curves of a real training run, beside fp32.

Usage::

    python -m fsdp_offload.bench.accuracy [--steps 2000] [--seeds 0,1,2] [--json out.json]

A byte-level GPT with bf16 shards is trained on the Python standard library once per precision of
the moments and per seed (weights and batches), everything else alike: AdamW, warm-up and cosine,
clipping, ``overlap="step"``. Runs are processes of one rank, ``--jobs`` of them on the same device
at once. The validation text is the last twentieth, the same in all runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from ..config import PrecisionConfig, TransferConfig
from ..errors import ConfigError
from ..optimizer import HybridDeviceOptimizer
from . import text
from .machine import environment, process_group
from .model import Job, sharded_model

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16-stochastic": {"moments": torch.bfloat16, "rounding": "stochastic"},
    "bf16-nearest": {"moments": torch.bfloat16, "rounding": "nearest"},
    "int8": {"moments": "int8"},
}
FIELDS = ("steps", "layers", "dim", "batch", "seq", "evaluate_every", "lr", "beta2")
VALIDATION_BATCHES = 8
POLL_S = 0.05


@dataclass(frozen=True)
class Training:
    """One run; only ``precision`` and ``seed`` differ between runs."""

    precision: str = "fp32"
    seed: int = 0
    steps: int = 2000
    layers: int = 6
    dim: int = 256
    batch: int = 32
    seq: int = 256
    lr: float = 2e-3
    beta2: float = 0.999
    weight_decay: float = 0.1
    max_norm: float = 1.0
    evaluate_every: int = 100

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ConfigError(
                f"precision {self.precision!r}",
                reason="unknown choice",
                remedy=f"use {', '.join(PRECISIONS)}",
            )
        for name in ("steps", "evaluate_every"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name}={getattr(self, name)}", reason="not positive", remedy="use 1 or more"
                )

    @property
    def job(self) -> Job:
        """The model."""
        tokens = self.batch * self.seq
        return Job(
            layers=self.layers,
            dim=self.dim,
            tokens=tokens,
            seq=self.seq,
            vocabulary=text.VOCABULARY,
            seed=self.seed,
            rotary=True,
            fp32_loss=True,
        )

    def factor(self, step: int) -> float:
        """Learning rate over ``lr``: linear warm-up over a twentieth, cosine to a tenth."""
        warm_up = max(1, self.steps // 20)
        if step < warm_up:
            return (step + 1) / warm_up
        done = min(1.0, (step - warm_up) / max(1, self.steps - warm_up))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def evaluate(model: Any, batches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Mean loss, on the device."""
    with torch.no_grad():
        loss = torch.stack([model(*rows) for rows in batches]).mean()
    model.reshard()  # FSDP2 leaves the root gathered after a forward without a backward
    return loss


def train(training: Training, device: torch.device) -> dict[str, Any]:
    """Losses of one run: ``train`` is the mean of each stretch, ``validation`` at its end."""
    learned, held_out = text.split(text.standard_library().to(device))
    starts = text.random_starts(
        learned, training.steps, training.batch, training.seq, 1000 + training.seed
    )
    tests = text.even_starts(held_out, VALIDATION_BATCHES * training.batch, training.seq)
    validation = [
        text.windows(held_out, part, training.seq) for part in tests.split(training.batch)
    ]
    model = sharded_model(training.job, device)
    optimizer = HybridDeviceOptimizer(
        AdamW(
            model.parameters(),
            lr=training.lr,
            betas=(0.9, training.beta2),
            weight_decay=training.weight_decay,
            fused=True,
        ),
        model=model,
        update_on="device",
        precision=PrecisionConfig(**PRECISIONS[training.precision]),
        transfer=TransferConfig(slots=3),
    )
    scheduler = LambdaLR(optimizer, training.factor)
    parameters = list(model.parameters())
    losses = torch.zeros(training.steps, device=device)
    validated: list[tuple[int, Tensor]] = []
    began = time.perf_counter()
    for step in range(training.steps):
        loss = model(*text.windows(learned, starts[step], training.seq))
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, training.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses[step].copy_(loss.detach())
        if (step + 1) % training.evaluate_every == 0 or step + 1 == training.steps:
            validated.append((step + 1, evaluate(model, validation)))
    found = {"steps": [step for step, _ in validated]}
    edges = [0, *found["steps"]]
    stretches = [losses[a:b].mean() for a, b in itertools.pairwise(edges)]
    result = {
        "precision": training.precision,
        "seed": training.seed,
        **found,
        "train": torch.stack(stretches).tolist(),
        "validation": torch.stack([loss for _, loss in validated]).tolist(),
        "host_bytes": optimizer.statistics().host_state_bytes,
    }
    result["seconds"] = time.perf_counter() - began
    optimizer.close()
    return result


def summary(report: Mapping[str, Any]) -> str:
    """Markdown: final validation loss per precision over the seeds, beside fp32."""
    runs, training = report["runs"], report["training"]
    names = list(dict.fromkeys(run["precision"] for run in runs))
    finals = {
        n: {r["seed"]: r["validation"][-1] for r in runs if r["precision"] == n} for n in names
    }
    base = finals.get("fp32", {})
    lines = [
        f"{training['layers']} layers of {training['dim']}, {training['batch']} x "
        f"{training['seq']} bytes per step, {training['steps']} steps, "
        f"{report['environment'].get('gpu', 'CPU')}, torch {report['environment']['torch']}.",
        "",
        "| moments | final validation loss: mean | min | max | mean difference from fp32 | "
        "state, bytes |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in names:
        values = list(finals[name].values())
        apart = [value - base[seed] for seed, value in finals[name].items() if seed in base]
        cells = [f"{fmean(values):.4f}", f"{min(values):.4f}", f"{max(values):.4f}"]
        cells.append(f"{fmean(apart):+.4f}" if apart and name != "fp32" else "")
        held = next(run["host_bytes"] for run in runs if run["precision"] == name)
        lines.append(f"| {' | '.join([name, *cells, f'{held:,}'])} |")
    failed = [f"- {f['precision']}, seed {f['seed']}: {f['reason']}" for f in report["failed"]]
    return "\n".join([*lines, *([""] if failed else []), *failed])


def plot_curves(report: Mapping[str, Any], path: Path) -> None:
    """Validation loss over steps, one line per run, one colour per precision.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (whole, end) = pyplot.subplots(1, 2, figsize=(11, 4.5))
    names = list(dict.fromkeys(run["precision"] for run in report["runs"]))
    for run in report["runs"]:
        label = run["precision"] if run["seed"] == report["runs"][0]["seed"] else None
        style = {"color": f"C{names.index(run['precision'])}", "label": label, "linewidth": 1}
        whole.plot(run["steps"], run["validation"], **style)
        last = len(run["steps"]) // 4 or 1
        end.plot(run["steps"][-last:], run["validation"][-last:], **style)
    for axes in (whole, end):
        axes.set_xlabel("step")
        axes.set_ylabel("validation loss")
    whole.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--precisions", default=",".join(PRECISIONS))
    add("--seeds", default="0,1,2")
    for name in FIELDS:
        default = getattr(Training, name)
        add(f"--{name.replace('_', '-')}", type=type(default), default=default)
    add("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--jobs", type=int, default=6, help="runs at once on all devices")
    add("--time-limit-s", type=float, default=240, help="runs that are not done by then are ended")
    add("--json", type=Path)
    add("--plot", type=Path, help="needs matplotlib")
    add("--one", type=Path, help=argparse.SUPPRESS)  # one run, its result into that file
    return parser.parse_args(argv)


def trainings_of(options: argparse.Namespace) -> list[Training]:
    """All seeds of a precision, then the next precision.

    Raises:
        ConfigError: a precision is unknown.
    """
    shared = {name: getattr(options, name) for name in FIELDS}
    seeds = [int(seed) for seed in options.seeds.split(",")]
    names = options.precisions.split(",")
    return [Training(precision=n, seed=s, **shared) for n in names for s in seeds]


class _Process:
    """A run in a process of its own."""

    def __init__(
        self, training: Training, options: argparse.Namespace, folder: Path, number: int
    ) -> None:
        self.training = training
        name = f"{training.precision}-{training.seed}"
        self._result, self._log = folder / f"{name}.json", folder / f"{name}.log"
        words = [f"--{n.replace('_', '-')}={getattr(training, n)}" for n in FIELDS]
        words += [f"--precisions={training.precision}", f"--seeds={training.seed}"]
        words += [f"--device={options.device}", f"--one={self._result}"]
        threads = max(1, len(os.sched_getaffinity(0)) // options.jobs)
        outer = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK")}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fsdp_offload.bench.accuracy", *words],
                env=outer | {"OMP_NUM_THREADS": str(threads)} | _device_of(number),
                stdout=log,
                stderr=log,
            )

    def is_done(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    def end(self) -> None:
        """Stop it."""
        self._process.kill()
        self._process.wait()

    def result(self) -> dict[str, Any]:
        """What it found; with a ``reason`` if it failed."""
        if self._process.returncode == 0:
            found: dict[str, Any] = json.loads(self._result.read_text())
            return found
        lines = self._log.read_text().strip().splitlines() or ["no output"]
        reason = f"exit status {self._process.returncode}: {lines[-1][:300]}"
        names = {"precision": self.training.precision, "seed": self.training.seed}
        return names | {"reason": reason}


def _device_of(number: int) -> dict[str, str]:
    """The environment in which run ``number`` sees one device; they take turns."""
    count = torch.cuda.device_count()
    if count < 2:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(count)]
    return {"CUDA_VISIBLE_DEVICES": names[number % count]}


def run_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Results of all runs, ``--jobs`` at a time, each told as soon as it is there."""
    order = trainings_of(options)
    waiting, running = order[::-1], list[_Process]()
    found: dict[Training, dict[str, Any]] = {}
    ends = time.perf_counter() + options.time_limit_s
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < options.jobs:
                number = len(order) - len(waiting)
                running.append(_Process(waiting.pop(), options, Path(folder), number))
            if time.perf_counter() > ends:
                for process in running:
                    process.end()
                break
            for process in [p for p in running if p.is_done()]:
                running.remove(process)
                found[process.training] = result = process.result()
                told = result.get("reason") or f"{result['validation'][-1]:.4f}"
                print(result["precision"], result["seed"], told, flush=True)
            time.sleep(POLL_S)
    late = {"reason": "not done when the time limit was reached"}
    return [found.get(t, {"precision": t.precision, "seed": t.seed} | late) for t in order]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """All runs; prints the summary, writes JSON and a picture where asked."""
    options = parse(argv)
    if options.one:
        with process_group(options.device) as device:
            found = train(trainings_of(options)[0], device)
        options.one.write_text(json.dumps(found))
        return found
    began = time.perf_counter()
    results = run_all(options)
    shared = trainings_of(options)[0].__dict__
    report = {
        "environment": environment(options.device),
        "training": {k: v for k, v in shared.items() if k not in ("precision", "seed")},
        "seconds": time.perf_counter() - began,
        "runs": [result for result in results if "reason" not in result],
        "failed": [result for result in results if "reason" in result],
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(summary(report), flush=True)
    if options.plot:
        try:
            plot_curves(report, options.plot)
        except ImportError as error:
            print(f"no plot: {error}", file=sys.stderr)
    return report


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads can abort the interpreter while it shuts down
