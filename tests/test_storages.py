"""Storages get other memory: by a swap, and through a pool of torch's CUDA allocator (stood in)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp_offload import storages
from fsdp_offload.storages import AddressPool
from tests.pooling import MIB, Allocator, Storage, allocator_in_place

CUDA = torch.device("cuda", 0)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    return allocator_in_place(monkeypatch)


def test_the_pool_takes_memory_where_it_is_told(allocator: Allocator) -> None:
    given: dict[int, int] = {}

    def memory(n: int) -> int:
        address = (len(given) + 1) << 32
        given[address] = n
        return address

    pool: Any = AddressPool(CUDA, memory)
    moved = [Storage(allocator, n * MIB) for n in (30, 3, 12, 1, 1, 40)]
    assert all(pool.move(storage) for storage in moved)
    assert list(given.values()) == [n * MIB for n in (30, 20, 12, 2, 2, 40)]
    first, second, third, _, fifth, sixth = given
    addresses = [storage.address for storage in moved]
    # The third lies behind the second, and one small storage behind the other.
    assert addresses[:3] == [first, second, second + 3 * MIB]
    assert addresses[4] == addresses[3] + MIB
    assert addresses[5] == sixth
    assert pool.forget_spare() == {third, fifth}
    assert not pool.forget_spare()


def test_a_segment_of_unknown_size_is_refused_and_nothing_moves(allocator: Allocator) -> None:
    allocator.small_segment = 4 * MIB
    pool: Any = AddressPool(CUDA, lambda n: 1 << 32)
    storage = Storage(allocator, 100)
    before = storage.address
    assert not pool.move(storage)
    assert storage.address == before
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


def test_cached_blocks_are_those_that_a_large_request_could_be_cut_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def segment(sizes: dict[str, int], **other: object) -> dict[str, object]:
        blocks = [{"state": state, "size": size} for state, size in sizes.items()]
        usual = {"device": 0, "stream": 7, "segment_pool_id": (0, 0), "segment_type": "large"}
        return {**usual, **other, "total_size": sum(sizes.values()), "blocks": blocks}

    snapshot = [
        segment({"active_allocated": 50, "inactive": 60, "active_pending_free": 70}),
        segment({"inactive": 39, "active_allocated": 1}),
        segment({"inactive": 40, "active_allocated": 1}),
        segment({"inactive": 41}),  # nobody's: it can be given back
        segment({"inactive": 61, "active_allocated": 1}, stream=8),
        segment({"inactive": 62, "active_allocated": 1}, device=1),
        segment({"inactive": 63, "active_allocated": 1}, segment_pool_id=(0, 1)),
        segment({"inactive": 64, "active_allocated": 1}, segment_type="small"),
    ]
    stream = SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: snapshot)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1040)
    assert storages.cached_blocks(CUDA, 40) == [60, 40]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: pytest.fail("it is slow"))
    assert storages.cached_blocks(CUDA, 41) == []
