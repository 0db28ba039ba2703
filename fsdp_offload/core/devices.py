"""Backends for torch's accelerators, and for the CPU in place of one.

Also calls to driver and kernel for a device: free memory, page-locking, nearby cores.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from .backend import (
    AllocatorFigures,
    Backend,
    Event,
    PendingEvent,
    Stream,
    TimedEvent,
    Turns,
    copy_all,
)
from .config import brief
from .cuda_driver import Commands as DriverCommands
from .errors import DeviceError, PinningError

# --------------------------------------------------------------------------- accelerator


class _TorchCommands:
    """As :class:`.cuda_driver.Commands`, for any accelerator, through torch's own calls."""

    def here(self) -> AbstractContextManager[object]:
        return nullcontext()

    def copy(
        self, stream: Any, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> None:
        with stream:
            copy_all(targets, sources)

    def wait(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def record(self, event: Any, stream: Any) -> None:
        event.record(stream)


_Commands = _TorchCommands | DriverCommands


def _recorded(event: Event) -> Event:
    return event.recorded() if isinstance(event, PendingEvent) else event


class _AcceleratorStream:
    def __init__(self, raw: Any, module: Any, name: str, commands: _Commands) -> None:
        self.raw, self._module, self.name = raw, module, name
        self._commands = commands

    def launch(self, fn: Callable[..., None], *operands: Any) -> None:
        with self.raw:
            fn(*operands)

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        with self._commands.here():
            self._commands.copy(self.raw, targets, sources)

    def copy_in_turns(self, targets: Turns, sources: Turns) -> None:
        for some, others in zip(targets, sources, strict=True):
            self.copy(some, others)

    def keep_order(self) -> None:
        return None  # one stream's copies never overtake each other

    def wait(self, event: Event) -> None:
        self.raw.wait_event(_recorded(event))

    def record(self) -> Event:
        event = self._module.Event()
        event.record(self.raw)
        return event  # type: ignore[no-any-return]

    def record_timed(self) -> TimedEvent:
        event = self._module.Event(enable_timing=True)
        event.record(self.raw)
        return event  # type: ignore[no-any-return]

    def synchronize(self) -> None:
        self.raw.synchronize()


class _TakingTurns(_AcceleratorStream):
    """Bulk copies on three streams that take turns, so that copies of others get through.

    A copy engine stays with a hardware queue as long as that has copies ready, and a kernel that
    follows a copy in a stream waits that long. So bulk copies are cut into turns; turn ``k`` runs
    on stream ``k % 3`` and waits for turn ``k - 2``: one runs and one is ready at any time. A copy
    in another queue then waits for about four turns: 3 ms instead of 21 ms for all of 1 GiB,
    measured on an H200 (docs/internals/ring.md, which also says how streams share queues).

    Launches, records and waits come after all earlier copies.
    """

    def __init__(self, raws: list[Any], module: Any, name: str, commands: _Commands) -> None:
        super().__init__(raws[0], module, name, commands)
        self._raws, self._turn = raws, 0
        self._ends: list[Any] = [module.Event() for _ in raws]  # of the last turn on each
        for end, raw in zip(self._ends, raws, strict=True):
            end.record(raw)  # so that it exists for the driver, too

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        self.copy_in_turns([targets], [sources])

    def copy_in_turns(self, targets: Turns, sources: Turns) -> None:
        raws, ends, commands = self._raws, self._ends, self._commands
        count = len(raws)
        with commands.here():
            for some, others in zip(targets, sources, strict=True):
                turn = self._turn
                raw = raws[turn]
                commands.wait(raw, ends[turn - 2])  # turn k - 2; -1 and -2 count from the end
                commands.copy(raw, some, others)
                commands.record(ends[turn], raw)  # waiters have taken the last record already
                self._turn = (turn + 1) % count

    def keep_order(self) -> None:
        self.wait(self.record())

    def wait(self, event: Event) -> None:
        recorded = _recorded(event)
        for raw in self._raws:
            raw.wait_event(recorded)

    def launch(self, fn: Callable[..., None], *operands: Any) -> None:
        self._join()
        super().launch(fn, *operands)
        self.wait(super().record())  # the next turn runs on another of the streams

    def record(self) -> Event:
        self._join()
        return super().record()

    def record_timed(self) -> TimedEvent:
        self._join()
        return super().record_timed()

    def synchronize(self) -> None:
        for raw in self._raws:
            raw.synchronize()

    def _join(self) -> None:
        """Let :attr:`raw` follow all turns: each began after the last but one before it."""
        count = len(self._raws)
        last = (self._turn - 1) % count
        self.raw = self._raws[last]
        self.raw.wait_event(self._ends[(last - 1) % count])


class AcceleratorBackend:
    """Streams and events of ``torch.cuda`` (or another device module with the same surface)."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "meta":
            raise DeviceError(
                "parameters on the meta device",
                reason="they have no memory yet",
                remedy="load them first with checkpoint.load(path, model), or call "
                "model.to_empty(...) and initialise them",
            )
        self._module = torch.get_device_module(device)
        if not self._module.is_available():
            raise DeviceError(
                f"device {device}",
                reason=f"torch sees no usable {device.type} device in this process",
                remedy="run on a machine with one, or keep the parameters on the CPU",
            )
        index = device.index if device.index is not None else self._module.current_device()
        self.device = torch.device(device.type, index)
        self.can_pin = device.type == "cuda"
        self._commands = _commands_for(self.device)

    def stream(self, name: str, *, is_urgent: bool = False) -> Stream:
        raw = self._module.Stream(device=self.device, priority=-int(is_urgent))
        return self._wrapped(raw, name)

    def bulk_stream(self, name: str) -> Stream:
        raws = [self._module.Stream(device=self.device) for _ in range(3)]
        return _TakingTurns(raws, self._module, name, self._commands)

    def _wrapped(self, raw: Any, name: str) -> _AcceleratorStream:
        return _AcceleratorStream(raw, self._module, name, self._commands)

    def current_stream(self) -> Stream:
        raw = self._module.current_stream(self.device.index)  # torch is slow if given a device
        return self._wrapped(raw, "current")

    def adopt_stream(self, raw: Any) -> Stream:
        return self._wrapped(raw, "adopted")

    def adopt_event(self, raw: Any) -> Event:
        return raw  # type: ignore[no-any-return]

    def is_capturing(self) -> bool:
        if self.device.type != "cuda":
            return False
        with torch.cuda.device(self.device.index):
            return torch.cuda.is_current_stream_capturing()

    def executor(self, name: str, set_up: Callable[[], None]) -> Executor:
        return ThreadPoolExecutor(1, name, set_up)

    def allocate(self, n_bytes: int) -> torch.Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8, device=self.device)

    def allocator(self) -> AllocatorFigures | None:
        if self.device.type != "cuda":
            return None
        # Runs in every step; memory_stats() would flatten and sort some 200 figures.
        figures = torch.cuda.memory_stats_as_nested_dict(self.device)
        reserved, allocated = (
            figures[f"{kind}_bytes"]["all"] for kind in ("reserved", "allocated")
        )
        peak = allocated["peak"]
        unused, retries = reserved["peak"] - peak, figures["num_alloc_retries"]
        return AllocatorFigures(reserved["current"], peak, unused, retries)

    def free_and_total(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self.device)
        fraction = torch.cuda.get_per_process_memory_fraction(self.device)
        if fraction == 1:
            return free, total
        limit = int(fraction * total)  # for torch's allocator
        return max(0, min(free, limit - torch.cuda.memory_reserved(self.device))), limit


@functools.cache
def _commands_for(device: torch.device) -> _Commands:
    if device.type == "cuda" and torch.version.hip is None:
        with contextlib.suppress(DeviceError):  # an unusual driver
            return DriverCommands(device)
    return _TorchCommands()


# --------------------------------------------------------------------------- CPU


class _DoneEvent:
    def __init__(self) -> None:
        self._seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def elapsed_time(self, end_event: _DoneEvent) -> float:
        return (end_event._seconds - self._seconds) * 1e3


class _CpuStream:
    _done = _DoneEvent()

    def __init__(self, name: str) -> None:
        self.name = name

    def launch(self, fn: Callable[..., None], *operands: Any) -> None:
        fn(*operands)

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        copy_all(targets, sources)

    def copy_in_turns(self, targets: Turns, sources: Turns) -> None:
        for some, others in zip(targets, sources, strict=True):
            copy_all(some, others)

    def keep_order(self) -> None:
        return None

    def wait(self, event: Event) -> None:
        event.synchronize()

    def record(self) -> Event:
        return self._done  # nothing is ever late here, so one event serves all

    def record_timed(self) -> TimedEvent:
        return _DoneEvent()

    def synchronize(self) -> None:
        return None


class CpuBackend:
    """CPU tensors as the "device": every launch runs at once, on the calling thread."""

    can_pin = False

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cpu")

    def stream(self, name: str, *, is_urgent: bool = False) -> Stream:
        return _CpuStream(name)

    def bulk_stream(self, name: str) -> Stream:
        return _CpuStream(name)

    def current_stream(self) -> Stream:
        return _CpuStream("current")

    def is_capturing(self) -> bool:
        return False

    def adopt_stream(self, raw: Any) -> Stream:
        return _CpuStream("adopted")

    def adopt_event(self, raw: Any) -> Event:
        return _CpuStream._done

    def executor(self, name: str, set_up: Callable[[], None]) -> Executor:
        return ThreadPoolExecutor(1, name, set_up)

    def allocate(self, n_bytes: int) -> torch.Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8)

    def allocator(self) -> AllocatorFigures | None:
        return None

    def free_and_total(self) -> tuple[int, int]:
        return 0, 0


# --------------------------------------------------------------------------- choosing one


def backend_for(device: torch.device) -> Backend:
    """Return the backend for ``device``.

    Raises:
        DeviceError: the device type is not usable in this process.
    """
    return CpuBackend(device) if device.type == "cpu" else AcceleratorBackend(device)


# --------------------------------------------------------------------------- device memory


def default_device() -> torch.device:
    """Return the current accelerator, else the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def free_bytes(device: torch.device) -> int | None:
    """Return the driver's free bytes on ``device``; ``None`` if unknown.

    CUDA's context and other processes count as used.
    """
    module = None if device.type == "cpu" else torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return None
    return int(module.mem_get_info(device)[0])  # type: ignore[union-attr]


def release_cached(device: torch.device) -> None:
    """Release torch's unused cached memory to the driver, for other processes."""
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


# --------------------------------------------------------------------------- pinning and NUMA


def pin(address: int, n_bytes: int, device: torch.device) -> None:
    """Register ``[address, address + n_bytes)`` with the CUDA driver as page-locked.

    Args:
        address: first byte; a multiple of the page size.
        n_bytes: length in bytes.
        device: the call uses the context of this device.

    Raises:
        PinningError: the driver refused; nothing stays registered.
    """
    if n_bytes == 0:
        return
    with torch.cuda.device(device):
        code = int(torch.cuda.cudart().cudaHostRegister(address, n_bytes, 0))
        if code != 0:
            _clear_last_error()
    if code != 0:
        raise PinningError(
            f"{brief(n_bytes)} of host memory",
            reason=f"cudaHostRegister answered {code}",
            remedy="offload less, give the container or WSL 2 more memory, or allow "
            'pageable memory with TransferConfig(pin="prefer")',
        )


def unpin(address: int, n_bytes: int, device: torch.device) -> None:
    """Undo :func:`pin`. Never raises, because it runs in finalizers, when the context may be
    gone."""
    if n_bytes == 0:
        return
    try:
        with torch.cuda.device(device):
            if int(torch.cuda.cudart().cudaHostUnregister(address)) != 0:
                _clear_last_error()
    except Exception:  # a failed device or a closing interpreter: nothing is left to undo
        return


def _clear_last_error() -> None:
    """Clear the runtime's last error, so that no later check reports it.

    torch does not bind ``cudaGetLastError``, but calls it after each kernel launch, which then
    raises the old code. A synchronisation does not clear it.
    """
    try:
        torch.ones(1, device="cuda")
    except RuntimeError:
        return


def cores_near(device: torch.device) -> frozenset[int]:
    """Find this process's cores next to ``device``; all of its cores if that is unknown.

    Reads Linux' ``/sys/bus/pci/devices/<id>/local_cpulist``.
    """
    allowed = frozenset(os.sched_getaffinity(0))
    address = pci_address(device)
    try:
        text = Path(f"/sys/bus/pci/devices/{address}/local_cpulist").read_text()
    except OSError:
        return allowed
    return (allowed & parse_cpu_list(text)) or allowed


def pci_address(device: torch.device) -> str:
    """Return the address of a CUDA device on the PCI bus, as Linux writes it; empty if unknown."""
    if device.type != "cuda":
        return ""
    properties = torch.cuda.get_device_properties(device)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    if not all(hasattr(properties, name) for name in names):
        return ""  # an older torch; zeros would name the host bridge
    domain, bus, slot = (int(getattr(properties, name)) for name in names)
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def parse_cpu_list(text: str) -> frozenset[int]:
    """Parse a kernel list of cores such as ``"0-3,8"``."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)
