"""DeepSpeed's ZeRO-3, with parameters and optimizer on the CPU, in the job of the other benchmarks.

Usage::

    python docs/benchmarks/zero3.py --layers 14 --dim 4096 --tokens 16384 --checkpointed

The options are those of ``fsdp-offload bench``, but for ``--rows``, ``--micro-batches`` and
``--deterministic``. Settings are those that DeepSpeed's documentation
gives for offload: page-locked memory, its CPU Adam, and sizes that follow the width as "auto" does.
Needs ``deepspeed``; its CPU Adam is compiled at the first use.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fsdp_offload.bench import machine
from fsdp_offload.bench.iteration import ITERATIONS, markdown_table, measure
from fsdp_offload.bench.machine import Row
from fsdp_offload.bench.model import Job, initialize, meta_model, synthetic_batches
from fsdp_offload.bench.rows import LEARNING_RATE, MAX_NORM
from fsdp_offload.cli.main import parser


def settings(job: Job, *, clips: bool) -> dict[str, Any]:
    """DeepSpeed's configuration."""
    to_cpu = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    square = job.dim * job.dim
    return {
        "train_micro_batch_size_per_gpu": job.tokens // job.seq,
        "bf16": {"enabled": True},
        "gradient_clipping": MAX_NORM if clips else 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": to_cpu,
            "offload_param": to_cpu,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": square,
            "stage3_prefetch_bucket_size": int(0.9 * square),
            "stage3_param_persistence_threshold": 10 * job.dim,
        },
    }


class Loss:
    """A loss whose ``backward`` is DeepSpeed's."""

    def __init__(self, engine: Any, value: Tensor) -> None:
        self._engine, self._value = engine, value

    def backward(self) -> None:
        """Compute gradients, and move them."""
        self._engine.backward(self._value)

    def detach(self) -> Tensor:
        """Return the value."""
        return self._value.detach()


def train(job: Job, device: torch.device, warm_up: int, iterations: int, *, clips: bool) -> Row:
    """Measure one row."""
    import deepspeed

    model = initialize(meta_model(job).to_empty(device="cpu"), job, device)
    config = settings(job, clips=clips)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    optimizer = SimpleNamespace(step=engine.step, zero_grad=lambda: None)
    trainer: Any = SimpleNamespace(  # engine.step() clips
        model=lambda *batch: Loss(engine, engine(*batch)), optimizer=optimizer, clip=lambda: None
    )
    row = measure(trainer, synthetic_batches(job, device), warm_up, iterations)
    name, clip = ("zero3-clip", "torch") if clips else ("zero3", "none")
    row |= {"name": name, "kind": "zero3", "clip": clip, "config": config}
    return machine.merged(row) | {"status": "ok"}


def main(words: Sequence[str]) -> Row:
    """Run a row without clipping, and one with."""
    options = parser().parse_args(["bench", *words])
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    for name, value in (("LOCAL_RANK", "0"), ("RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    report: Row = {}
    with machine.process_group(options.device) as device:
        job, rows = Job.of(options), list[Row]()
        link = machine.measure_link(device, 5) if device.type == "cuda" else {}
        for clips in (False, True):
            machine.free_everything(device)
            rows.append(train(job, device, options.warm_up, options.iterations, clips=clips))
            report = machine.publish(device, job, rows, link, options.json)
        print(markdown_table(report, ITERATIONS))
    return report


if __name__ == "__main__":
    main(sys.argv[1:])
