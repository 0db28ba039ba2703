"""Ways for tensors to leave the device and come back, for :mod:`.phases` to time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import shards
from ..device import release_cached
from ..optimizer import HybridDeviceOptimizer
from ..phases import PhaseOffloader, swap
from .machine import free_everything, synchronize
from .model import Job, sharded_model

STATE = ("exp_avg", "exp_avg_sq")


class Way:
    """Leaves the device and comes back, any number of times."""

    tensors: list[Tensor]
    """What moves, each storage once: present after construction and after ``come_back``."""
    construction_s = 0.0
    """Seconds before the first cycle, page-locking included; 0.0 where nothing is done."""
    directions = 1
    """Directions in use at once: 1, or 2 where something else comes as this leaves."""

    def leave(self) -> None:
        """The device memory of ``tensors`` is free when this returns."""
        raise NotImplementedError

    def come_back(self) -> None:
        """``tensors`` can be used when this returns."""
        raise NotImplementedError

    def host_bytes(self) -> int:
        """Host memory held for it; 0 where that is not known."""
        return 0

    def pin_seconds(self) -> float:
        """Of ``construction_s``, what touching and page-locking host memory took."""
        return 0.0

    def close(self) -> None:
        """Give host memory back."""
        self.tensors.clear()


def fill(tensors: Sequence[Tensor], device: torch.device, *, seed: int = 0) -> None:
    """Random bytes that :func:`same_bits` makes again. Bytes, so that NaNs are among them."""
    generator = torch.Generator(device)
    for index, tensor in enumerate(tensors):
        _words(tensor).random_(generator=generator.manual_seed(seed + index))


def same_bits(tensors: Sequence[Tensor], device: torch.device) -> bool:
    """Whether each byte is what :func:`fill` wrote."""
    generator = torch.Generator(device)
    same = torch.ones((), dtype=torch.bool, device=device)
    for index, tensor in enumerate(tensors):
        words = _words(tensor)
        wanted = torch.empty_like(words).random_(generator=generator.manual_seed(index))
        same &= (words == wanted).all()
    return bool(same)


def _words(tensor: Tensor) -> Tensor:
    flat = tensor.view(-1)
    return flat.view(torch.int32 if flat.nbytes % 4 == 0 else torch.uint8)


@dataclass(frozen=True)
class Payload:
    """A model under FSDP2 with bf16 shards and an AdamW with fp32 state, which never stepped."""

    model: nn.Module
    optimizer: Optimizer

    @classmethod
    def make(cls, job: Job, device: torch.device) -> Payload:
        """State is as large as that of a real run; the values do not matter."""
        model = sharded_model(job, device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        for parameter in model.parameters():
            state: dict[str, Any] = {"step": torch.tensor(1.0)}
            for name in STATE:
                state[name] = torch.zeros_like(parameter, dtype=torch.float32)
            optimizer.state[parameter] = state
        return cls(model, optimizer)

    def tensors(self) -> list[Tensor]:
        """Shards of all parameters, then of all state."""
        states = (s[name] for s in self.optimizer.state.values() for name in STATE)
        every = map(shards.local, (*self.model.parameters(), *states))
        return [tensor for tensor in every if tensor.numel()]


def adopt(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The same tensors after everybody else has dropped them."""
    kept = list(tensors)
    free_everything(device)
    return kept


class Offloader(Way):
    """``PhaseOffloader``: parameters and state."""

    def __init__(
        self, job: Job, device: torch.device, *, fixed_address: bool | str = "state"
    ) -> None:
        payload = Payload.make(job, device)
        synchronize(device)
        began = time.perf_counter()
        self.phases = PhaseOffloader(payload.model, payload.optimizer, fixed_address=fixed_address)
        synchronize(device)
        self.construction_s = time.perf_counter() - began
        self.tensors = payload.tensors()

    def leave(self) -> None:
        """See :class:`Way`."""
        self.phases.offload()

    def come_back(self) -> None:
        """See :class:`Way`."""
        self.phases.reload()

    def host_bytes(self) -> int:
        """See :class:`Way`."""
        return self.phases.statistics().host_bytes

    def pin_seconds(self) -> float:
        """See :class:`Way`."""
        return self.phases.statistics().pin_seconds

    def close(self) -> None:
        """See :class:`Way`."""
        self.phases.close()


class OptimizerAlone(Way):
    """``HybridDeviceOptimizer.offload()``: state that is resident, with its masters."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self.model = sharded_model(job, device)
        plain = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.optimizer = HybridDeviceOptimizer(plain, model=self.model, offload_fraction=0.0)
        synchronize(device)
        began = time.perf_counter()
        self.optimizer.reserve_offload()
        self.construction_s = time.perf_counter() - began
        values = [v for s in self.optimizer.state.values() for v in s.values()]
        found = [shards.local(v) for v in values if isinstance(v, Tensor) and v.dim()]
        self.tensors = [shard for shard in found if shard.numel() and shard.device == device]

    def leave(self) -> None:
        """See :class:`Way`."""
        self.optimizer.offload()
        release_cached(self.optimizer.device)

    def come_back(self) -> None:
        """See :class:`Way`."""
        self.optimizer.reload()

    def host_bytes(self) -> int:
        """See :class:`Way`."""
        return self.optimizer.statistics().offload_reserved_bytes

    def pin_seconds(self) -> float:
        """See :class:`Way`."""
        return self.construction_s

    def close(self) -> None:
        """See :class:`Way`."""
        self.optimizer.close()


class Swap(Way):
    """``swap``: one offloader's tensors leave while those of another, as many, come."""

    directions = 2

    def __init__(
        self, job: Job, device: torch.device, *, fixed_address: bool | str = "state"
    ) -> None:
        self.one = Offloader(job, device, fixed_address=fixed_address)
        self.one.leave()
        self.other = Offloader(job, device, fixed_address=fixed_address)
        fill(self.other.tensors, device, seed=1 << 20)
        self.other.leave()
        self.one.come_back()
        self.tensors = self.one.tensors
        self.construction_s = self.one.construction_s + self.other.construction_s

    def leave(self) -> None:
        """See :class:`Way`."""
        swap(out=self.one.phases, in_=self.other.phases)

    def come_back(self) -> None:
        """See :class:`Way`."""
        swap(out=self.other.phases, in_=self.one.phases)

    def host_bytes(self) -> int:
        """Of one of them."""
        return self.one.host_bytes()

    def pin_seconds(self) -> float:
        """Of one of them."""
        return self.one.pin_seconds()

    def close(self) -> None:
        """See :class:`Way`."""
        self.one.close()
        self.other.close()


class Loop(Way):
    """What jobs do by hand: ``tensor.to("cpu")`` and back, one tensor after the other.

    Args:
        non_blocking: of the copies; torch then takes page-locked memory for those to the host and
            keeps it.
    """

    def __init__(self, job: Job, device: torch.device, *, non_blocking: bool) -> None:
        self.device, self.non_blocking = device, non_blocking
        self.tensors = adopt(Payload.make(job, device).tensors(), device)

    def leave(self) -> None:
        """See :class:`Way`."""
        self._move(torch.device("cpu"))
        release_cached(self.device)

    def come_back(self) -> None:
        """See :class:`Way`."""
        self._move(self.device)

    def _move(self, device: torch.device) -> None:
        for index, tensor in enumerate(self.tensors):
            self.tensors[index] = tensor.to(device, non_blocking=self.non_blocking, copy=True)
        synchronize(self.device)


class PinnedLoop(Loop):
    """The same with a page-locked buffer per tensor, taken at first and kept."""

    def __init__(self, job: Job, device: torch.device) -> None:
        super().__init__(job, device, non_blocking=True)
        self.buffers: list[Tensor] = []

    def leave(self) -> None:
        """See :class:`Way`."""
        pin = self.device.type == "cuda"
        if not self.buffers:
            kept = [torch.empty_like(t, device="cpu", pin_memory=pin) for t in self.tensors]
            self.buffers = kept
        for index, buffer in enumerate(self.buffers):
            self.tensors[index] = buffer.copy_(self.tensors[index], non_blocking=True)
        synchronize(self.device)
        release_cached(self.device)

    def close(self) -> None:
        """See :class:`Way`."""
        super().close()
        self.buffers.clear()


class MemorySaver(Way):
    """``torch_memory_saver`` with a backup in host memory: it keeps addresses."""

    def __init__(self, job: Job, device: torch.device) -> None:
        from torch_memory_saver import torch_memory_saver  # type: ignore[import-not-found]

        self.saver = torch_memory_saver
        self.saver.hook_mode = "torch"
        shapes = [(t.shape, t.dtype) for t in Payload.make(job, device).tensors()]
        free_everything(device)
        with self.saver.region(tag="bench", enable_cpu_backup=True):
            self.tensors = [torch.empty(s, dtype=d, device=device) for s, d in shapes]

    def leave(self) -> None:
        """See :class:`Way`."""
        self.saver.pause("bench")

    def come_back(self) -> None:
        """See :class:`Way`."""
        self.saver.resume("bench")


def all_ways() -> dict[str, Callable[[Job, torch.device], Way]]:
    """All of them by name, in the order in which they are measured."""
    return {
        "offloader": Offloader,
        "fixed": partial(Offloader, fixed_address=True),
        "resized": partial(Offloader, fixed_address=False),
        "optimizer": OptimizerAlone,
        "swap": Swap,
        "swap-fixed": partial(Swap, fixed_address=True),
        "swap-resized": partial(Swap, fixed_address=False),
        "loop": partial(Loop, non_blocking=False),
        "loop-nonblocking": partial(Loop, non_blocking=True),
        "loop-pinned": PinnedLoop,
        "memory-saver": MemorySaver,
    }
