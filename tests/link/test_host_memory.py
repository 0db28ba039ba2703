from __future__ import annotations

import ctypes
import gc
import itertools
import mmap
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fsdp_offload.core import devices
from fsdp_offload.core.config import MIB, TransferConfig
from fsdp_offload.core.errors import HostMemoryError, PinningError
from fsdp_offload.link import HostRange

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.int16, torch.int64, torch.float8_e4m3fn, torch.bool)
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
needs_huge_pages = pytest.mark.skipif(
    not THP.exists() or "[never]" in THP.read_text(), reason="no transparent huge pages here"
)


def make(n_bytes: int, *, can_pin: bool = False, **transfer: object) -> HostRange:
    config = TransferConfig(**transfer)  # type: ignore[arg-type]
    return HostRange(n_bytes, device=CPU, can_pin=can_pin, transfer=config)


def smaps_of(address: int) -> dict[str, str] | None:
    """Fields of the mapping that holds ``address``, or None if nothing is mapped there."""
    fields: dict[str, str] | None = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if not head.endswith(":"):
            first, last = (int(end, 16) for end in head.split("-"))
            if fields is not None:
                break
            fields = {} if first <= address < last else None
        elif fields is not None:
            fields[head[:-1]] = line.split(":", 1)[1].strip()
    return fields


def flags_of(tensor: torch.Tensor) -> list[str]:
    fields = smaps_of(tensor.data_ptr())
    assert fields is not None
    return fields["VmFlags"].split()


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def in_child(check: Callable[[], None]) -> int:
    """Run ``check`` in a forked child; its wait status, 0 if all was well."""
    sys.stdout.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads: wanted here
        pid = os.fork()
    if pid == 0:
        try:
            check()
        except BaseException as error:
            os.write(2, f"child: {error!r}\n".encode())
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


class Driver:
    """Stands in for the CUDA driver's registration."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, refuse: bool = False) -> None:
        self.pinned: list[tuple[int, int]] = []
        self.refuse = refuse
        monkeypatch.setattr(devices, "pin", self.pin)
        monkeypatch.setattr(devices, "unpin", self.unpin)

    def pin(self, address: int, n_bytes: int, device: torch.device) -> None:
        if self.refuse:
            raise PinningError(f"{n_bytes} bytes", reason="the driver said 801")
        self.pinned.append((address, n_bytes))

    def unpin(self, address: int, n_bytes: int, device: torch.device) -> None:
        assert smaps_of(address) is not None, "unmapped before it was unregistered"
        self.pinned.remove((address, n_bytes))


# --------------------------------------------------------------------------- tensors


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_is_a_zeroed_zero_copy_view_with_a_storage_of_its_own_size(
    dtype: torch.dtype,
) -> None:
    arena = make(1 << 16)
    base = arena.tensor(0, 1 << 16, torch.uint8)
    offset, numel = 4096 + 64, 100
    view = arena.tensor(offset, numel, dtype)
    assert view.shape == (numel,)
    assert view.dtype == dtype
    assert view.storage_offset() == 0
    assert view.untyped_storage().nbytes() == numel * dtype.itemsize
    assert view.data_ptr() == base.data_ptr() + offset
    assert not base.any()
    view.view(torch.uint8).fill_(1)
    assert int(base.sum()) == numel * dtype.itemsize
    assert int(base[offset : offset + numel * dtype.itemsize].sum()) == numel * dtype.itemsize


def test_empty_arena_and_empty_tensors() -> None:
    empty, arena = make(0), make(64)
    for owner, offset in ((empty, 0), (arena, 0), (arena, 64)):
        view = owner.tensor(offset, 0, torch.bfloat16)
        assert view.shape == (0,)
        assert view.dtype == torch.bfloat16
    assert (empty.n_bytes, empty.threads, empty.pinned) == (0, 0, False)
    empty.close()


@pytest.mark.parametrize(
    ("offset", "numel"), [(-4, 1), (0, 26), (100, 1), (96, 2), (2, 1), (0, -1)]
)
def test_what_lies_outside_or_askew_is_our_own_bug(offset: int, numel: int) -> None:
    with pytest.raises(AssertionError):
        make(100).tensor(offset, numel, torch.float32)


# --------------------------------------------------------------------------- memory


def test_every_page_is_in_place_and_not_one_more() -> None:
    n_bytes = 67 * MIB + 12_345
    before = rss_bytes()
    arena = make(n_bytes)
    grown = rss_bytes() - before
    assert n_bytes <= grown + 128 * 1024  # the kernel counts a thread's last pages late
    assert grown <= n_bytes * 1.01 + MIB
    view = arena.tensor(0, n_bytes, torch.uint8)
    arena.close()
    assert rss_bytes() - before >= n_bytes - 128 * 1024  # a tensor still lies on it
    del view
    assert rss_bytes() - before <= MIB


def test_a_closed_arena_gives_out_nothing() -> None:
    arena = make(4096)
    arena.close()
    with pytest.raises(AssertionError, match="closed"):
        arena.tensor(0, 1, torch.float32)
    assert arena.n_bytes == 4096


@needs_huge_pages
def test_huge_pages_are_asked_for() -> None:
    gc.collect()  # the kernel joins adjacent mappings, and earlier tests may have left one
    arena = make(8 * MIB)
    assert arena.huge_pages
    fields = smaps_of(arena.tensor(0, 1, torch.uint8).data_ptr())
    assert fields is not None
    assert "hg" in fields["VmFlags"].split()
    assert fields["Size"] == "8192 kB"  # a larger mapping could get a huge page beyond the payload


@needs_huge_pages
def test_huge_pages_that_stall_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(seconds)))  # 1 s from call to call
    arena = make(8 * MIB)
    assert not arena.huge_pages
    view = arena.tensor(0, 8 * MIB, torch.uint8)
    assert "nh" in flags_of(view)
    assert not view.any()


def test_a_refused_mapping_is_a_host_memory_error() -> None:
    with pytest.raises(HostMemoryError, match=str(1 << 60)):
        make(1 << 60)


# --------------------------------------------------------------------------- threads


def test_no_thread_setting_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_new_thread() -> tuple[int, set[int]]:
        seen: list[tuple[int, set[int]]] = []
        thread = threading.Thread(
            target=lambda: seen.append((torch.get_num_threads(), os.sched_getaffinity(0)))
        )
        thread.start()
        thread.join()
        return seen[0]

    torch.set_num_threads(2)  # also what threads started later inherit, whatever ran before
    here = torch.get_num_threads(), os.sched_getaffinity(0)
    there = in_new_thread()
    one_core = frozenset([min(here[1])])
    monkeypatch.setattr(devices, "cores_near", lambda device: one_core)
    arena = make(200 * MIB)
    assert arena.threads == 1
    assert (torch.get_num_threads(), os.sched_getaffinity(0)) == here
    assert in_new_thread() == there


def test_memory_is_touched_from_the_cores_near_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    near = frozenset([min(os.sched_getaffinity(0))])
    bound: list[tuple[int, frozenset[int]]] = []
    monkeypatch.setattr(devices, "cores_near", lambda device: near)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: bound.append((pid, cores)))
    make(MIB)
    assert bound == [(0, near)]


def test_threads_are_this_ranks_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: None)
    for ranks, near, expected in (("1", 64, 32), ("8", 32, 8), ("8", 4, 4), ("64", 32, 4)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        cores = frozenset(range(near))
        monkeypatch.setattr(devices, "cores_near", lambda device, cores=cores: cores)
        assert make(64 * MIB).threads == expected  # 64 MiB is 32 huge pages


# --------------------------------------------------------------------------- pinning


def test_pinned_until_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    arena = make(100_000, can_pin=True)
    view = arena.tensor(0, 100_000, torch.uint8)
    assert driver.pinned == [(view.data_ptr(), 100_000)]
    assert arena.pinned
    arena.close()
    assert driver.pinned == []
    assert not arena.pinned
    arena.close()
    assert not view.any()


def test_nothing_is_pinned_without_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    for arena in (make(4096, can_pin=True, pin="never"), make(4096), make(0, can_pin=True)):
        assert driver.pinned == []
        assert not arena.pinned


def test_a_refused_pin_is_an_error_and_keeps_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch, refuse=True)
    before = rss_bytes()
    with pytest.raises(PinningError, match="801") as caught:
        make(64 * MIB, can_pin=True)
    assert caught.value.__traceback__ is not None  # what a debugger holds on to
    assert rss_bytes() - before <= MIB


def test_a_refused_pin_is_a_warning_when_pinning_is_preferred(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Driver(monkeypatch, refuse=True)
    with pytest.warns(RuntimeWarning, match=r"3145728 bytes.*pageable.*801"):
        arena = make(3 * MIB, can_pin=True, pin="prefer")
    assert not arena.pinned
    arena.tensor(0, 3, torch.float32).fill_(1)


# --------------------------------------------------------------------------- processes


def test_a_forked_child_does_not_get_the_memory() -> None:
    arena = make(16 * MIB)
    view = arena.tensor(0, 16, torch.float32)
    assert "dc" in flags_of(view)

    def check() -> None:
        assert smaps_of(view.data_ptr()) is None

    assert in_child(check) == 0
    assert smaps_of(view.data_ptr()) is not None

    def touch() -> None:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # pytest's fault handler would report it
        ctypes.memset(view.data_ptr(), 1, 1)  # torch may wait for lost threads

    assert os.WTERMSIG(in_child(touch)) == signal.SIGSEGV
    assert not view.any()


def test_a_forked_child_does_not_unmap_what_came_in_the_place_of_the_memory() -> None:
    arena = make(MIB)
    address = arena.tensor(0, 16, torch.float32).data_ptr()
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p

    def check() -> None:
        nonlocal arena
        anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED
        place = ctypes.c_void_p(address)
        assert libc.mmap(place, ctypes.c_size_t(MIB), 3, anonymous, -1, 0) == address
        arena = make(0)  # no gc.collect(): what else is garbage may wait for lost threads
        assert smaps_of(address) is not None

    assert in_child(check) == 0


def test_a_forked_child_does_not_unregister(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    arena = make(4096, can_pin=True)

    def check() -> None:
        arena.close()
        assert len(driver.pinned) == 1

    assert in_child(check) == 0
    assert arena.pinned
