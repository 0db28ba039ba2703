"""Places of blocks whose sizes change: what is taken, what is served, what is given back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_offload import PhaseOffloader
from fsdp_offload.config import TransferConfig
from fsdp_offload.device import CpuGateway
from fsdp_offload.errors import HostMemoryError, PinningError
from fsdp_offload.memory import HostArena
from fsdp_offload.moving import Mover, Places, StorageBlock, collect
from fsdp_offload.moving import mover as mover_module
from fsdp_offload.moving import places as places_module
from fsdp_offload.testing import ADVERSARIES, StreamSimulator

CPU = torch.device("cpu")
LARGE = places_module.OWN_ARENA_BYTES


def places(host_budget: int | None = None) -> Places:
    return Places(CpuGateway(CPU), TransferConfig(host_budget=host_budget))


def block(key: str, n_bytes: int, value: int = 0) -> StorageBlock:
    (made,) = collect([(key, torch.full((n_bytes,), value, dtype=torch.uint8))], CPU)
    return made


def tensor_of(made: StorageBlock) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(made.storage)


@pytest.mark.parametrize("sizes", [(1000, 1001), (64, 640), (LARGE, LARGE + 1)])
@pytest.mark.parametrize("policy", ADVERSARIES)
def test_sizes_that_alternate_take_no_more_than_the_largest(
    sizes: tuple[int, int], policy: str
) -> None:
    with StreamSimulator(policy) as simulator:
        kept = Places(simulator, TransferConfig())
        move, taken = Mover(simulator, kept), []
        for cycle in range(6):
            made = block("t", sizes[cycle % 2], cycle + 1)
            move.out([made]).wait()
            assert made.storage.nbytes() == 0
            assert kept.of(made).numel() == made.n_bytes
            assert kept.of(made).untyped_storage().nbytes() == made.n_bytes
            move.back([made]).wait()
            assert bool((tensor_of(made) == cycle + 1).all())
            taken.append(kept.n_bytes)
    assert taken[1:] == [places_module.aligned(sizes[1])] * 5
    assert sum(arena.n_bytes for arena in kept.statistics()) == taken[-1]


def test_a_place_is_never_anothers_although_that_fits() -> None:
    kept, large, small = places(), block("t", 4096), block("t", 100)
    kept.reserve([large])
    kept.of(large).fill_(1)
    assert not kept.has(small)
    kept.reserve([small])
    assert kept.of(small).numel() == 100
    assert not kept.has(large)
    with pytest.raises(AssertionError):
        kept.of(large)
    kept.reserve([large])
    assert kept.has(large)
    assert kept.n_bytes == 4096


def test_large_places_that_are_outgrown_are_given_back() -> None:
    kept = places()
    kept.reserve([block("a", LARGE), block("b", LARGE)])
    views = []
    for extra in range(1, 5):
        made = [block("a", LARGE + 64 * extra), block("b", LARGE + (extra == 2) * 64)]
        kept.reserve(made)
        views.append(kept.of(made[0]))
        views[-1].fill_(extra)
    # The first arena is b's no more, either.
    assert kept.n_bytes == 2 * LARGE + 5 * 64
    assert len(kept.statistics()) == 2
    assert [int(view[0]) for view in views] == [1, 2, 3, 4]  # mapped for who holds them


def test_small_places_that_are_outgrown_lie_side_by_side() -> None:
    kept = places()
    kept.reserve([block("a", 100), block("b", 100)])
    made = [block("a", 200), block("b", 300)]
    kept.reserve(made)
    joined = kept.joined(made)
    assert joined is not None
    assert kept.n_bytes == joined.numel() == 256 + 320


def test_places_with_a_gap_are_not_joined() -> None:
    kept = places()
    kept.reserve([block("a", 300), block("b", 300)])
    kept.reserve(made := [block("a", 300), block("b", 10)])
    joined = kept.joined(made)
    assert joined is not None
    assert joined.numel() == 320 + 64
    assert kept.n_bytes == 640
    kept.reserve(made := [block("a", 100), block("b", 300)])
    assert kept.joined(made) is None


@pytest.mark.parametrize("policy", ADVERSARIES)
def test_packs_of_blocks_whose_sizes_change_keep_their_bytes(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mover_module, "PACK_BYTES", 4096)
    with StreamSimulator(policy) as simulator:
        kept = Places(simulator, TransferConfig())
        move, taken = Mover(simulator, kept), []
        for cycle in range(9):
            sizes = [700 - 300 * ((i + cycle) % 3 == 0) + i for i in range(20)]
            made = [block(f"t{i}", n_bytes, i + cycle) for i, n_bytes in enumerate(sizes)]
            move.out(made).wait()
            move.back(made).wait()
            assert all(bool((tensor_of(b) == i + cycle).all()) for i, b in enumerate(made))
            taken.append(kept.n_bytes)
    assert len(set(taken[2:])) == 1


def test_without_memory_for_what_grew_places_are_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = places(host_budget=5 * LARGE)
    before = [block("a", LARGE), block("b", LARGE), block("c", 100)]
    kept.reserve(before)
    kept.of(before[0]).fill_(7)
    grown = [block("a", 2 * LARGE), block("b", 2 * LARGE), block("c", 10)]
    with pytest.raises(HostMemoryError):
        kept.reserve(grown)
    assert all(map(kept.has, before))
    arenas: list[HostArena] = []

    def refused_once(*args: Any, **options: Any) -> HostArena:
        if arenas:
            raise PinningError("memory", reason="refused", remedy="none")
        arenas.append(HostArena(*args, **options))
        return arenas[0]

    monkeypatch.setattr(places_module, "HostArena", refused_once)
    with pytest.raises(PinningError):
        kept.reserve([block("a", LARGE + 1), block("b", LARGE + 1), block("c", 10)])
    assert all(map(kept.has, before))
    assert kept.n_bytes == 2 * LARGE + 128
    assert int(kept.of(before[0])[-1]) == 7
    with pytest.raises(AssertionError, match="closed"):
        arenas[0].tensor(0, 1, torch.uint8)


def test_gradients_in_buffers_of_other_sizes_take_no_more_in_each_cycle() -> None:
    """As FSDP2 makes them: views of one buffer per reduction."""
    module = nn.ParameterList([nn.Parameter(torch.zeros(8)) for _ in range(2)])
    phases, taken = PhaseOffloader(module, grads="save"), []
    for cycle in range(8):
        buffer = torch.full(((1 << 12) + 512 * (cycle % 3),), float(cycle))
        module[0].grad, module[1].grad = buffer[:8], buffer[-8:]
        with phases.away():
            assert buffer.untyped_storage().nbytes() == 0
        assert bool((buffer == cycle).all())
        taken.append(phases.statistics().host_bytes)
    assert len(set(taken[2:])) == 1, taken
    phases.close()
    assert phases.statistics().host_bytes == 0
