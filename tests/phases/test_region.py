"""Regions and pages on the CPU: addresses, memory, contents, failures."""

from __future__ import annotations

import copy
import gc
import mmap
import pickle
import subprocess
import sys
import weakref

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
from fsdp_offload.link.address_range import AddressRange, HostDriver
from fsdp_offload.phases import FixedAddressRegion

CPU = torch.device("cpu")
CHUNK = 1 << 16
PAGE = mmap.PAGESIZE
DTYPES = (torch.float32, torch.float8_e4m3fn, torch.bool, torch.complex64)


def region(**options: object) -> FixedAddressRegion:
    return FixedAddressRegion("kv", CPU, chunk_bytes=f"{CHUNK}B", **options)  # type: ignore[arg-type]


def taken_bytes(tensor: torch.Tensor) -> int:
    """Of the memory pages that ``tensor`` touches; what else the process does has no part in it."""
    first, last = tensor.data_ptr() // PAGE, (tensor.data_ptr() + tensor.nbytes - 1) // PAGE
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(8 * first)  # 8 bytes a page, whose top bits say "present" and "swapped"
        entries = pagemap.read(8 * (last + 1 - first))
    return PAGE * sum(byte >> 6 > 0 for byte in entries[7::8])


def test_a_chunk_frees_its_memory_and_no_other() -> None:
    made = AddressRange(HostDriver(), "kv", (3 << 24) + 1, 1 << 24)
    chunks = made.chunks()
    assert [chunk.n_bytes for chunk in chunks] == [1 << 24] * 3 + [PAGE]
    tensor = made.tensor(0, made.n_bytes).fill_(7)
    assert taken_bytes(tensor) == made.n_bytes
    chunks[0].release()
    assert taken_bytes(tensor) == made.mapped_bytes == made.n_bytes - (1 << 24)
    assert not made.is_present
    assert [int(tensor[0]), int(tensor[1 << 24])] == [0, 7]
    chunks[0].restore()
    assert made.is_present
    tensor[:100] = 3
    assert tensor.data_ptr() == made.address


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_are_ordinary_ones(dtype: torch.dtype) -> None:
    tensor = region().empty((5, 7), dtype=dtype)
    assert tensor.shape == (5, 7)
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    assert tensor.data_ptr() % 256 == 0
    assert tensor._base is None
    assert tensor.untyped_storage().nbytes() == tensor.nbytes
    tensor.copy_(torch.ones(5, 7))
    assert bool((tensor.view(-1)[3:].to(torch.complex64) == 1).all())


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
    addresses = weakref.ref(next(iter(made._memory.ranges)))
    made.close()
    del made
    gc.collect()
    assert int(tensor.sum()) == 5000
    del tensor
    assert addresses() is None


# ---------------------------------------------------------------------- pause and resume


def test_pause_frees_memory_and_resume_brings_it_back() -> None:
    made = FixedAddressRegion("kv", CPU, chunk_bytes=1 << 20)
    tensor = made.empty(16 << 20, dtype=torch.uint8).fill_(9)
    view, address = tensor[5:50], tensor.data_ptr()
    made.reserve()
    assert made.statistics().pinned_bytes >= 16 << 20
    for _ in range(3):
        assert taken_bytes(tensor) == 16 << 20
        handle = made.pause()
        assert made.is_paused
        assert handle.n_bytes == made.n_bytes == 16 << 20
        assert made.statistics().device_bytes == 0
        assert taken_bytes(tensor) == 0
        assert made.pause(save=False) is handle
        assert made.resume().n_bytes == 16 << 20
        assert not made.is_paused
        made.resume()
        assert tensor.data_ptr() == address
        assert bool((tensor == 9).all())
        assert int(view.sum()) == 45 * 9
    statistics = made.statistics()
    assert statistics.offloaded.n_bytes == statistics.reloaded.n_bytes == 16 << 20


def test_growth_after_a_pause_and_contents_that_are_not_saved() -> None:
    made = region()
    a = made.empty(CHUNK, dtype=torch.uint8).fill_(1)
    made.pause(save=False)
    made.pause()  # too late to save
    with pytest.raises(AwayError, match="resume"):
        made.empty(1, dtype=torch.uint8)
    made.resume()
    assert made.statistics().pinned_bytes == 0
    b = made.empty(9 * CHUNK, dtype=torch.uint8).fill_(2)
    a.fill_(3)
    made.pause()
    made.resume()
    assert bool((a == 3).all())
    assert bool((b == 2).all())


def test_repr_says_what_is_where() -> None:
    made = region()
    made.empty(1 << 20, dtype=torch.uint8)
    assert repr(made) == "FixedAddressRegion('kv', cpu, 1.00 MiB present)"
    made.pause()
    assert repr(made) == "FixedAddressRegion('kv', cpu, 1.00 MiB paused, 1.00 MiB saved)"
    made.resume()
    made.pause(save=False)
    assert repr(made) == "FixedAddressRegion('kv', cpu, 1.00 MiB paused, not saved)"
    made.close()
    assert repr(made) == "FixedAddressRegion('kv', cpu, closed)"


# ---------------------------------------------------------------------- failures


def full(*_: object) -> None:
    raise torch.OutOfMemoryError("full")


def test_without_device_memory_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    made = region()
    tensor = made.empty(10 * CHUNK, dtype=torch.uint8).fill_(3)
    before = made.n_bytes
    with monkeypatch.context() as patch:
        patch.setattr(HostDriver, "map", full)
        with pytest.raises(DeviceMemoryError, match="has not changed"):
            made.empty(CHUNK, dtype=torch.uint8)
    assert made.n_bytes == before
    made.pause()
    with monkeypatch.context() as patch:
        patch.setattr(HostDriver, "map", full)
        with pytest.raises(DeviceMemoryError, match=r"full.*call it again"):
            made.resume()
    assert made.is_paused
    assert made.statistics().device_bytes == 0
    made.resume()
    assert bool((tensor == 3).all())


def test_no_host_memory_to_save_leaves_all_on_the_device() -> None:
    made = region(transfer=TransferConfig(host_memory=f"{11 * CHUNK}B"))
    tensor = made.empty(10 * CHUNK, dtype=torch.uint8).fill_(3)
    made.pause()
    made.resume()
    made.empty(2 * CHUNK, dtype=torch.uint8)
    with pytest.raises(HostMemoryError):
        made.pause()
    assert not made.is_paused
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


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="non-empty"):
        FixedAddressRegion("", CPU)
    with pytest.raises(ConfigError, match="must be positive"):
        FixedAddressRegion("kv", CPU, chunk_bytes=0)
    with pytest.raises(ConfigError, match="negative"):
        region().empty((2, -1))
    with pytest.raises(DeviceError):
        FixedAddressRegion("kv", "meta")
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(ConfigError, match="copy"):
            copied(region())


@pytest.mark.long
def test_at_exit_nothing_is_printed() -> None:
    code = (
        "import torch; from fsdp_offload import FixedAddressRegion as R\n"
        "r = R('kv', 'cpu'); t = r.empty(1000); r.pause()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
