"""Regions and pages on the CPU: addresses, memory, contents, failures."""

from __future__ import annotations

import copy
import gc
import mmap
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable

import pytest
import torch

from fsdp_offload.core.config import TransferConfig
from fsdp_offload.core.errors import (
    AwayError,
    ClosedError,
    ConfigError,
    DeviceError,
    DeviceMemoryError,
    HostMemoryError,
)
from fsdp_offload.phases import FixedAddressRegion
from fsdp_offload.phases.pages import Chunk, HostPages, make
from fsdp_offload.testing import ADVERSARIES, StreamSimulator

CPU = torch.device("cpu")
CHUNK = 1 << 16
PAGE = mmap.PAGESIZE
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.bool,
    torch.complex64,
    torch.int64,
    torch.uint8,
)


def region(**options: object) -> FixedAddressRegion:
    return FixedAddressRegion("kv", CPU, chunk_bytes=CHUNK, **options)  # type: ignore[arg-type]


def taken_bytes(tensor: torch.Tensor) -> int:
    """Of the pages that ``tensor`` touches; what else the process does has no part in it."""
    first, last = tensor.data_ptr() // PAGE, (tensor.data_ptr() + tensor.nbytes - 1) // PAGE
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(8 * first)  # 8 bytes a page, whose top bits say "present" and "swapped"
        entries = pagemap.read(8 * (last + 1 - first))
    return PAGE * sum(byte >> 6 > 0 for byte in entries[7::8])


# ---- pages


def test_pages_are_cut_into_chunks_and_the_last_is_shorter() -> None:
    pages = HostPages(3 * CHUNK + 1, CHUNK)
    assert pages.n_bytes == 3 * CHUNK + 4096
    assert [stop - start for start, stop in pages.chunks] == [CHUNK] * 3 + [4096]


def test_unmapping_a_chunk_frees_its_memory_and_no_other() -> None:
    pages = HostPages(64 << 20, 32 << 20)
    tensor = pages.tensor(0, pages.n_bytes)
    tensor.fill_(7)
    assert taken_bytes(tensor) == 64 << 20
    pages.unmap(0)
    assert taken_bytes(tensor) == 32 << 20
    assert not pages.is_mapped(0)
    assert pages.is_mapped(1)
    assert int(tensor[0]) == 0
    assert int(tensor[32 << 20]) == 7
    pages.map(0)
    tensor[:100] = 3
    assert tensor.data_ptr() == pages.address


def test_other_devices_are_refused() -> None:
    with pytest.raises(DeviceError, match="only the CUDA driver"):
        make(torch.device("meta"), 1)


# ---- tensors


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_are_ordinary_ones(dtype: torch.dtype) -> None:
    made = region()
    tensor = made.empty((5, 7), dtype=dtype)
    assert tensor.shape == (5, 7)
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    assert tensor.data_ptr() % 256 == 0
    assert tensor._base is None
    assert tensor.untyped_storage().nbytes() == tensor.nbytes
    tensor.copy_(torch.ones(5, 7))
    assert tensor.view(-1)[3:].float().sum() == 32 if dtype != torch.complex64 else True


def test_tensors_do_not_overlap_and_share_chunks() -> None:
    made = region()
    tensors = [made.empty(n, dtype=torch.uint8) for n in (1, 600, 3 * CHUNK, 100, 0, 40_000)]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    assert all(bool((t == v).all()) for v, t in enumerate(tensors))
    assert made.n_bytes <= 4096 + 3 * CHUNK + 40_960
    assert made.empty((), dtype=torch.float32).shape == ()
    assert made.empty((0, 3), dtype=torch.float32).shape == (0, 3)


def test_a_tensor_keeps_its_memory_when_the_region_is_gone() -> None:
    made = region()
    tensor = made.empty(1000, dtype=torch.int64).fill_(5)
    pages = weakref.ref(next(iter(made._extents)).pages)
    made.close()
    del made
    gc.collect()
    assert int(tensor.sum()) == 5000
    del tensor
    assert pages() is None


# ---- pause and resume


def test_pause_frees_memory_and_resume_brings_it_back() -> None:
    made = FixedAddressRegion("kv", CPU, chunk_bytes=1 << 20)
    tensor = made.empty(64 << 20, dtype=torch.uint8)
    tensor.fill_(9)
    view, address = tensor[5:50], tensor.data_ptr()
    made.reserve()
    assert made.statistics().pinned_bytes >= 64 << 20
    for _ in range(3):
        assert taken_bytes(tensor) == 64 << 20
        trip = made.pause()
        assert made.is_paused
        assert trip.n_bytes == made.n_bytes == 64 << 20
        assert made.statistics().device_bytes == 0
        assert taken_bytes(tensor) == 0
        assert made.pause(save=False) is trip
        assert made.resume().n_bytes == 64 << 20
        assert not made.is_paused
        made.resume()
        assert tensor.data_ptr() == address
        assert bool((tensor == 9).all())
        assert int(view.sum()) == 45 * 9
    statistics = made.statistics()
    assert statistics.out_bytes == statistics.back_bytes == 64 << 20
    assert statistics.out_gbps > 0
    assert statistics.back_gbps > 0


def test_without_saving_no_host_memory_is_taken() -> None:
    made = region()
    tensor = made.empty(1000, dtype=torch.int64).fill_(5)
    made.pause(save=False)
    made.pause()  # too late to save
    made.resume()
    assert made.statistics().pinned_bytes == 0
    tensor.fill_(6)
    made.pause()
    made.resume()
    assert int(tensor.sum()) == 6000
    made.pause(save=False)
    made.resume()
    assert made.statistics().out_bytes == made.n_bytes


def test_growth_after_a_pause() -> None:
    made = region()
    a = made.empty(CHUNK, dtype=torch.uint8).fill_(1)
    made.pause()
    with pytest.raises(AwayError, match="resume"):
        made.empty(1, dtype=torch.uint8)
    made.resume()
    b = made.empty(9 * CHUNK, dtype=torch.uint8).fill_(2)
    made.pause()
    made.resume()
    assert bool((a == 1).all())
    assert bool((b == 2).all())


def test_no_memory_at_resume_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = region()
    tensor = made.empty(10 * CHUNK, dtype=torch.uint8).fill_(3)
    made.pause()
    map_chunk, left = HostPages.map, [6]

    def map_some(self: HostPages, index: int) -> None:
        if not left[0]:
            raise torch.OutOfMemoryError("full")
        left[0] -= 1
        map_chunk(self, index)

    monkeypatch.setattr(HostPages, "map", map_some)
    for _ in range(2):
        left[0] = 6
        with pytest.raises(DeviceMemoryError, match=r"full.*resume\(\) again"):
            made.resume()
        assert made.is_paused
        assert made.statistics().device_bytes == 0
    monkeypatch.undo()
    made.resume()
    assert bool((tensor == 3).all())


def test_no_memory_to_grow_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = region()
    made.empty(10, dtype=torch.uint8)

    def refuse(*arguments: object) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(HostPages, "__init__", refuse)
    before = made.n_bytes
    with pytest.raises(DeviceMemoryError, match="as before"):
        made.empty(CHUNK, dtype=torch.uint8)
    assert made.n_bytes == before
    made.pause()
    made.resume()


def test_no_host_memory_leaves_all_on_the_device() -> None:
    made = region(transfer=TransferConfig(host_budget=1000))
    tensor = made.empty(CHUNK, dtype=torch.uint8).fill_(3)
    with pytest.raises(HostMemoryError):
        made.pause()
    assert not made.is_paused
    assert bool((tensor == 3).all())


def test_an_error_mid_way_leaves_all_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made = region()
    tensor = made.empty(10 * CHUNK, dtype=torch.uint8).fill_(3)
    view, left = Chunk.view, [4]

    def some(chunk: Chunk) -> torch.Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("broken")
        return view(chunk)

    monkeypatch.setattr(Chunk, "view", some)
    with pytest.raises(RuntimeError, match="broken"):
        made.pause()
    monkeypatch.undo()
    assert not made.is_paused
    assert made.statistics().device_bytes == 10 * CHUNK
    made.pause()
    made.resume()
    assert bool((tensor == 3).all())


def test_close() -> None:
    made = region()
    made.empty(10, dtype=torch.uint8)
    made.pause()
    made.close()
    made.close()
    for call in (made.pause, made.resume, lambda: made.empty(1), made.reserve):
        with pytest.raises(ClosedError):
            call()


def test_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="no name"):
        FixedAddressRegion("", CPU)
    with pytest.raises(ConfigError, match="no size"):
        FixedAddressRegion("kv", CPU, chunk_bytes=0)
    with pytest.raises(ConfigError, match="negative"):
        region().empty((2, -1))


@pytest.mark.parametrize("policy", ADVERSARIES)
def test_copies_wait_for_the_caller_and_the_caller_for_them(policy: str) -> None:
    with StreamSimulator(policy) as simulator:
        made, out = region(), torch.zeros(1)
        tensor = made.empty(3 * CHUNK // 4, dtype=torch.float32)
        current = simulator.current_stream()
        for value in (3, 4):
            current.launch(lambda t, v=value: (t.fill_(v), None)[-1], tensor)
            made.pause()
            trip = made.resume(wait=False)
            current.launch(lambda o, t: (o.copy_(t.sum()), None)[-1], out, tensor)
            current.synchronize()
            assert float(out) == value * tensor.numel()
            trip.wait()


@pytest.mark.parametrize("policy", ADVERSARIES)
def test_without_saving_memory_goes_after_the_callers_work(policy: str) -> None:
    with StreamSimulator(policy) as simulator:
        made, out = region(), torch.zeros(1)
        tensor = made.empty(1000, dtype=torch.float32)
        current = simulator.current_stream()
        current.launch(lambda t: (t.fill_(2), None)[-1], tensor)
        current.launch(lambda o, t: (o.copy_(t.sum()), None)[-1], out, tensor)
        made.pause(save=False)
        assert float(out) == 2000


@pytest.mark.long
def test_at_exit_nothing_is_printed() -> None:
    code = (
        "import torch; from fsdp_offload import FixedAddressRegion as R\n"
        "r = R('kv', 'cpu'); t = r.empty(1000); r.pause()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_region_is_not_copied(copied: Callable[[object], object]) -> None:
    region = FixedAddressRegion("kv", "cpu")
    region.empty(8)
    with pytest.raises(ConfigError, match="copy"):
        copied(region)
