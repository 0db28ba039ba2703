"""Memory of the CUDA driver, with a stand-in for the driver: nothing leaks when a call fails."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from fsdp_offload.core import cuda_driver as driver_module
from fsdp_offload.core.cuda_driver import Commands, Driver
from fsdp_offload.core.errors import DeviceError
from fsdp_offload.link.address_range import AddressRange

CUDA = torch.device("cuda", 1)
UNIT = 2 << 20


class Library:
    """Counts handles, mappings and ranges; ``fail`` names calls and their codes."""

    def __init__(self) -> None:
        self.fail: dict[str, int] = {}
        self.left = 1 << 40  # bytes
        self.handles: dict[int, int] = {}  # bytes, of those that were not released
        self.mapped: dict[int, int] = {}
        self.memory: dict[int, int] = {}  # handle of what is mapped where
        self.ranges: dict[int, int] = {}
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(type(self), "_" + name)

        def call(*arguments: Any) -> int:
            return self.fail.get(name, 0) or method(self, *arguments) or 0

        return call

    def _cuInit(self, flags: int) -> None: ...

    def _cuDeviceGetAttribute(self, out: Any, attribute: int, index: int) -> None:
        assert index == 1
        out._obj.value = 1

    def _cuMemGetAllocationGranularity(self, out: Any, properties: Any, flag: int) -> None:
        assert properties._obj.location_id == 1
        out._obj.value = UNIT

    def _cuMemAddressReserve(self, out: Any, n: int, *rest: int) -> None:
        self.calls += 1
        out._obj.value = self.calls << 40
        self.ranges[self.calls << 40] = n

    def _cuMemAddressFree(self, address: int, n: int) -> None:
        assert self.ranges.pop(address) == n

    def _cuMemCreate(self, out: Any, n: int, properties: Any, flags: int) -> int:
        assert n % UNIT == 0
        assert properties._obj.rdma == 1
        if n > self.left:
            return driver_module.OUT_OF_MEMORY
        self.left -= n
        self.calls += 1
        out._obj.value = self.calls
        self.handles[self.calls] = n
        return 0

    def _cuMemRelease(self, handle: int) -> None:
        n = self.handles.pop(handle)
        if handle not in self.memory.values():
            self.left += n

    def _cuMemMap(self, address: int, n: int, offset: int, handle: int, flags: int) -> None:
        assert self.handles[handle] == n
        self.mapped[address], self.memory[address] = n, handle

    def _cuMemUnmap(self, address: int, n: int) -> None:
        assert self.mapped.pop(address) == n
        if self.memory.pop(address) not in self.handles:
            self.left += n

    def _cuMemSetAccess(self, address: int, n: int, access: Any, count: int) -> None:
        assert access._obj.location_id == 1


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(driver_module, "_library", lambda *kind: made)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


def range_of(n_bytes: int, chunk_bytes: int) -> AddressRange:
    return AddressRange(Driver(CUDA), "kv", n_bytes, chunk_bytes)


def test_structures_have_the_drivers_sizes() -> None:
    assert ctypes.sizeof(driver_module._Properties) == 32
    assert ctypes.sizeof(driver_module._Access) == 12


def test_chunks_come_and_go(library: Library) -> None:
    made = range_of(3 * UNIT + 1, 2 * UNIT)
    first, second = made.chunks()
    assert library.mapped == {made.address: 2 * UNIT, made.address + 2 * UNIT: 2 * UNIT}
    assert not library.handles
    second.release()
    assert not made.is_present
    assert library.mapped == {made.address: 2 * UNIT}
    second.restore()
    first.release()
    del made, first, second
    assert not library.mapped
    assert not library.ranges


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_a_failed_call_leaks_nothing(library: Library, call: str) -> None:
    made = range_of(2 * UNIT, UNIT)
    chunk = made.chunks()[0]
    chunk.release()
    library.fail[call] = 999
    before = (library.left, dict(library.mapped))
    with pytest.raises(DeviceError, match="answered 999"):
        chunk.restore()
    assert not made.is_present
    assert not library.handles
    assert (library.left, library.mapped) == before
    library.fail.clear()
    chunk.restore()


def test_no_memory_gives_everything_back(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    library.left = 5 * UNIT
    emptied: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    with pytest.raises(torch.OutOfMemoryError):
        range_of(6 * UNIT, UNIT)
    assert emptied
    assert not library.mapped
    assert not library.ranges
    assert library.left == 5 * UNIT


def test_memory_from_torchs_cache(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    library.left = 0
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(library, "left", UNIT))
    assert range_of(UNIT, UNIT).is_present


def test_a_refused_unmapping_leaves_the_chunk(library: Library) -> None:
    made = range_of(UNIT, UNIT)
    library.fail["cuMemUnmap"] = 1
    with pytest.raises(DeviceError, match="unmapping"):
        made.chunks()[0].release()
    assert made.is_present
    library.fail.clear()


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError("no such file")

    load = driver_module._library.__wrapped__
    monkeypatch.setattr(driver_module, "_library", lambda: load(missing))
    with pytest.raises(DeviceError, match=r"libcuda\.so\.1.*without fixed addresses"):
        Driver(CUDA)


class Queue:
    """The part of the driver that enqueues; ``current``: this thread's context."""

    def __init__(self, current: int) -> None:
        self.contexts = [current]
        self.calls: list[tuple[Any, ...]] = []
        self.code = 0

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDevicePrimaryCtxRetain(self, out: Any, index: int) -> int:
        assert index == 1
        out._obj.value = 77
        return 0

    def cuCtxGetCurrent(self, out: Any) -> int:
        out._obj.value = self.contexts[-1]
        return 0

    def cuCtxPushCurrent_v2(self, context: int) -> int:
        self.contexts.append(context)
        return 0

    def cuCtxPopCurrent_v2(self, out: Any) -> int:
        out._obj.value = self.contexts.pop()
        return 0

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            assert self.contexts[-1] == 77, "another device's context"
            self.calls.append((name, *arguments))
            return self.code

        return call


class Handle:
    cuda_stream, cuda_event = 11, 22


@pytest.mark.parametrize("current", [0, 5, 77])
def test_commands_run_in_the_devices_own_context(
    monkeypatch: pytest.MonkeyPatch, current: int
) -> None:
    queue = Queue(current)
    monkeypatch.setattr(driver_module, "_library", lambda *kind: queue)
    commands = Commands(CUDA)
    targets = [torch.empty(n, dtype=torch.uint8) for n in (3, 0, 8)]
    sources = [torch.empty(n, dtype=torch.uint8) for n in (3, 0, 8)]
    with commands.here():
        commands.wait(Handle(), Handle())
        commands.copy(Handle(), targets, sources)
        commands.record(Handle(), Handle())
    assert queue.contexts == [current]
    assert queue.calls == [
        ("cuStreamWaitEvent", 11, 22, 0),
        ("cuMemcpyAsync", targets[0].data_ptr(), sources[0].data_ptr(), 3, 11),
        ("cuMemcpyAsync", targets[2].data_ptr(), sources[2].data_ptr(), 8, 11),
        ("cuEventRecord", 22, 11),
    ]


def test_a_refused_command_raises_and_leaves_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(5)
    monkeypatch.setattr(driver_module, "_library", lambda *kind: queue)
    commands, tensor, queue.code = Commands(CUDA), torch.empty(4, dtype=torch.uint8), 700
    calls = {
        "a copy of 4 bytes": lambda: commands.copy(Handle(), [tensor], [tensor]),
        "cuStreamWaitEvent": lambda: commands.wait(Handle(), Handle()),
        "cuEventRecord": lambda: commands.record(Handle(), Handle()),
    }
    for what, call in calls.items():
        with pytest.raises(DeviceError, match=f"{what}.*answered 700"), commands.here():
            call()
        assert queue.contexts == [5]
