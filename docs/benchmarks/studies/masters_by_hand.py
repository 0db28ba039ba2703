"""Losses of the benchmark's job with fp32 masters kept by hand, beside those of this package.

    python docs/benchmarks/studies/masters_by_hand.py by-hand,step-torchclip,forward-torchclip

Both clip with torch's ``clip_grad_norm_``. ``by-hand`` uses nothing of the package but the model.
With ``--deterministic`` rows of the package have to agree in all digits.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

from fsdp_offload.bench import machine
from fsdp_offload.bench.model import Job, sharded_model, synthetic_batches
from fsdp_offload.bench.rows import LEARNING_RATE, MAX_NORM, Case, Trainer, make_trainer


class MastersByHand:
    """AdamW over fp32 copies; weights are rounded to nearest after each step."""

    def __init__(self, parameters: list[Any]) -> None:
        self._parameters = parameters
        self._masters = [nn.Parameter(p.to_local().detach().float()) for p in parameters]
        self._inner = torch.optim.AdamW(self._masters, lr=LEARNING_RATE, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            master.grad = parameter.grad.to_local().float()
        self._inner.step()
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            parameter.to_local().copy_(master)

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def by_hand(job: Job, device: torch.device) -> Trainer:
    model = sharded_model(job, device)
    parameters = list(model.parameters())

    def clip() -> object:
        return nn.utils.clip_grad_norm_(parameters, MAX_NORM)

    return Trainer(model, MastersByHand(parameters), clip)


def losses(trainer: Trainer, batches: Any, iterations: int) -> list[float]:
    found = torch.zeros(iterations, device=batches[0][0].device)
    for index in range(iterations):
        loss = trainer.model(*batches[index % len(batches)])
        loss.backward()
        found[index].copy_(loss.detach())
        trainer.clip()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    return found.tolist()  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows")
    parser.add_argument("--iterations", type=int, default=28)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--small", action="store_true", help="two layers on the CPU")
    options = parser.parse_args()
    if options.deterministic:  # with CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    job = Job(2, 128, 1000, 256, 128) if options.small else Job()
    with machine.process_group("cpu" if options.small else "cuda") as device:
        batches = synthetic_batches(job, device)
        for name in options.rows.split(","):
            machine.free_everything(device)
            if name == "by-hand":
                trainer = by_hand(job, device)
            else:
                trainer = make_trainer(Case.parse(name), job, device)
            print(name, *(f"{loss:.4f}" for loss in losses(trainer, batches, options.iterations)))
            if hasattr(trainer.optimizer, "close"):
                trainer.optimizer.close()
            del trainer


if __name__ == "__main__":
    main()
