"""One iteration of each kind of row, in three parts: forward, backward, update."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from ..config import PrecisionConfig, TransferConfig
from ..optimizer import HybridDeviceOptimizer
from ..report import Statistics
from .cases import MAX_NORM, Case
from .model import Job, sharded_model

Batch = tuple[Tensor, Tensor]


class Trainer:
    """A model and an optimizer that has torch's interface.

    Args:
        model: called with inputs and targets, gives the loss.
        optimizer: stepped and cleared after each backward.
        clip: called between backward and step; ``None``: no clipping.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        clip: Callable[[], object] | None = None,
    ) -> None:
        self.model, self.optimizer, self.clip = model, optimizer, clip

    def forward(self, batch: Batch) -> Tensor:
        """The loss."""
        loss: Tensor = self.model(*batch)
        return loss

    def backward(self, loss: Tensor) -> None:
        """Gradients."""
        loss.backward()

    def update(self) -> None:
        """Clip, step, clear."""
        if self.clip is not None:
            self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def device_state_bytes(self) -> int:
        """Optimizer state that lies on an accelerator (or, without one, anywhere)."""
        return state_bytes(self.optimizer)

    def statistics(self) -> Statistics | None:
        """Ours only."""
        return None

    def plan(self) -> str | None:
        """What the planner says; ours only."""
        return None

    def settle(self) -> None:
        """Wait for threads of its own; the device is waited for by the caller."""

    def close(self) -> None:
        """Give memory back."""


class OursTrainer(Trainer):
    """With :class:`HybridDeviceOptimizer`."""

    optimizer: HybridDeviceOptimizer

    def device_state_bytes(self) -> int:
        return self.optimizer.statistics().device_state_bytes

    def statistics(self) -> Statistics:
        return self.optimizer.statistics()

    def plan(self) -> str | None:
        explain = getattr(getattr(self.optimizer, "plan", None), "explain", None)
        return None if explain is None else str(explain())

    def settle(self) -> None:
        self.optimizer.synchronize()

    def close(self) -> None:
        self.optimizer.close()


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of this rank's state tensors that are not on the CPU, unless all of them are."""
    values = (v for state in optimizer.state.values() for v in state.values())
    locals_ = [getattr(v, "_local_tensor", v) for v in values if isinstance(v, Tensor)]
    away = [v for v in locals_ if v.device.type != "cpu"]
    return sum(v.numel() * v.itemsize for v in away or locals_)


def torch_clip(model: nn.Module) -> Callable[[], object]:
    """``torch.nn.utils.clip_grad_norm_`` of all parameters."""
    parameters = list(model.parameters())
    return lambda: nn.utils.clip_grad_norm_(parameters, MAX_NORM)


def plain_trainer(case: Case, job: Job, device: torch.device) -> Trainer:
    """Fused AdamW on the device; bf16 shards without a master."""
    model = sharded_model(job, device)
    optimizer = AdamW(model.parameters(), lr=job.lr, fused=True)
    return Trainer(model, optimizer, torch_clip(model) if case.clip != "none" else None)


def _lanes(model: nn.Module, host_share: float) -> list[str]:
    """The last blocks' parameters, up to ``host_share`` of all elements, go to the host lane.

    Never those outside of blocks: theirs is FSDP's root group, whose gradients come last and which
    the forward needs first.
    """
    parameters = list(model.parameters())
    limit = host_share * sum(parameter.numel() for parameter in parameters)
    on_host: set[Tensor] = set()
    taken = 0
    for parameter in reversed(list(model.get_submodule("blocks").parameters())):
        taken += parameter.numel()
        if taken > limit:
            break
        on_host.add(parameter)
    return ["host" if parameter in on_host else "streamed" for parameter in parameters]


def our_trainer(case: Case, job: Job, device: torch.device) -> Trainer:
    """The same wrapped.

    Raises:
        ConfigError, TypeError, AttributeError: this version does not know the configuration.
    """
    transfer, precision = TransferConfig(**case.transfer), PrecisionConfig(**case.precision)
    model = sharded_model(job, device)
    optimizer = HybridDeviceOptimizer(
        AdamW(model.parameters(), lr=job.lr, fused=True),
        model=model,
        offload_fraction=case.offload_fraction,
        update_on=case.update_on if not case.host_share else _lanes(model, case.host_share),
        overlap=case.kind,
        precision=precision,
        transfer=transfer,
    )
    clip: Callable[[], object] | None = None
    if case.clip == "ours":
        clip = functools.partial(optimizer.clip_grad_norm_, MAX_NORM)  # type: ignore[attr-defined,unused-ignore]
    elif case.clip == "torch":
        clip = torch_clip(model)
    return OursTrainer(model, optimizer, clip)


def make_trainer(case: Case, job: Job, device: torch.device) -> Trainer:
    """The trainer of any row.

    Raises:
        ImportError: the peer is not installed.
    """
    if case.kind == "plain":
        return plain_trainer(case, job, device)
    if case.is_ours:
        return our_trainer(case, job, device)
    from .peers import peer_trainer

    return peer_trainer(case, job, device)
