"""Storages get other memory: by a swap, and through a pool of torch's CUDA allocator (stood in)."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fsdp_offload import storages
from fsdp_offload.storages import AddressPool

MIB = 1 << 20
CUDA = torch.device("cuda", 0)


class Allocator:
    """torch's: segments by their callback, blocks out of what is left of them."""

    small = 2 * MIB

    def __init__(self) -> None:
        self.callback = 0
        self.active = False
        self.free: list[tuple[int, int]] = []

    def take(self, n: int) -> int:
        assert self.active
        for place, (address, left) in enumerate(self.free):
            if left >= n:
                self.free[place] = (address + n, left - n)
                return address
        size = self.small if n <= MIB else 20 * MIB if n < 10 * MIB else n
        function = ctypes.CFUNCTYPE(
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
        )(self.callback)
        address = function(size, 0, None)
        if address is None:
            raise torch.OutOfMemoryError("the callback gave nothing")
        self.free.append((address + n, size - n))
        return address


class Storage:
    def __init__(self, allocator: Allocator, n: int) -> None:
        self.allocator, self.n, self.address = allocator, n, 7

    def nbytes(self) -> int:
        return self.n

    def data_ptr(self) -> int:
        return self.address

    def resize_(self, n: int) -> None:
        self.address = self.allocator.take(n)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    made = Allocator()

    def custom(allocate: int, release: int) -> object:
        made.callback = allocate
        return object()

    @contextlib.contextmanager
    def use(pool: object, device: object) -> Iterator[None]:
        made.active = True
        yield
        made.active = False

    monkeypatch.setattr(torch._C, "_cuda_customAllocator", custom, raising=False)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: object())
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return made


def test_the_pool_takes_memory_where_it_is_told(allocator: Allocator) -> None:
    given: dict[int, int] = {}

    def memory(n: int) -> int:
        address = (len(given) + 1) << 32
        given[address] = n
        return address

    pool: Any = AddressPool(CUDA, memory)
    moved = [Storage(allocator, n * MIB) for n in (30, 3, 12, 1, 1, 40)]
    assert all(pool.move(storage) for storage in moved)
    assert list(given.values()) == [30 * MIB, 20 * MIB, 12 * MIB, 2 * MIB, 40 * MIB]
    first, second, third, _, fifth = given
    addresses = [storage.address for storage in moved]
    # The third, and what follows while there is room, lies behind the second.
    assert addresses[:3] == [first, second, second + 3 * MIB]
    assert addresses[5] == fifth
    assert third in pool.forget_spare()
    assert not pool.forget_spare()


def test_a_segment_of_unknown_size_is_refused_and_nothing_moves(allocator: Allocator) -> None:
    allocator.small = 4 * MIB
    pool: Any = AddressPool(CUDA, lambda n: 1 << 32)
    storage = Storage(allocator, 100)
    assert not pool.move(storage)
    assert storage.address == 7
    assert pool.forget_spare() == {1 << 32}


@pytest.mark.skipif(not storages.can_swap(), reason="this torch cannot swap storages")
def test_renewed_storages_keep_their_content() -> None:
    for made in (torch.arange(10.0), torch.frombuffer(bytearray(40), dtype=torch.float32)):
        before, address = made.clone(), made.data_ptr()
        view = made[2:]
        storages.renew(made.untyped_storage())
        assert made.data_ptr() != address
        assert made.untyped_storage().resizable()
        assert torch.equal(made, before)
        assert view.data_ptr() == made.data_ptr() + 8


@pytest.mark.parametrize(
    ("variable", "setting", "cuts"),
    [
        ("PYTORCH_ALLOC_CONF", "", True),
        ("PYTORCH_ALLOC_CONF", "garbage_collection_threshold:0.8", True),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:128", False),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", False),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments: false", True),
        ("PYTORCH_ALLOC_CONF", "roundup_power2_divisions:4", False),
    ],
)
def test_settings_under_which_segments_are_not_cut(
    monkeypatch: pytest.MonkeyPatch, variable: str, setting: str, cuts: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "", raising=False)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, setting)
    assert storages.cuts_segments(CUDA) == cuts
    monkeypatch.delenv(variable)
    monkeypatch.setattr(
        torch._C, "_accelerator_getAllocatorSettings", lambda: setting, raising=False
    )
    assert storages.cuts_segments(CUDA) == cuts
    assert not storages.cuts_segments(torch.device("cpu"))


def test_another_backend_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert not storages.cuts_segments(CUDA)
