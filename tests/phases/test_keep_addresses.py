"""Addresses that stay: storages swapped into a region, or moved through a pool of torch's allocator
(stood in)."""

from __future__ import annotations

import copy
import gc
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_offload import FixedAddressRegion, PhaseOffloader, TransferConfig
from fsdp_offload.core import storage as storages
from fsdp_offload.core.errors import (
    AwayError,
    ConfigError,
    DeviceError,
    DeviceMemoryError,
    HostMemoryError,
)
from fsdp_offload.core.storage import AddressPool, can_swap
from fsdp_offload.link import address_range
from fsdp_offload.link.address_range import HostDriver
from fsdp_offload.link.block import StorageBlock
from fsdp_offload.link.transfer import Transfer
from fsdp_offload.phases import region as fixed
from tests.away import has_memory
from tests.helpers.pooling import MIB, Allocator, Storage, allocator_in_place, memory_in_place
from tests.phases.twins import Job, failing

CUDA = torch.device("cuda", 0)
CHUNK = 4096
FULL = torch.OutOfMemoryError("full")
SWAPS = pytest.mark.skipif(not can_swap(), reason="this torch cannot swap CPU storages")


@pytest.fixture(autouse=True)
def _small_rows(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "allocator" not in request.fixturenames:
        monkeypatch.setattr(fixed, "ROW_BYTES", 6000)
        monkeypatch.setattr(address_range, "CHUNK_BYTES", CHUNK)


@SWAPS
@pytest.mark.parametrize("offload_fraction", [None, 0.5])
def test_addresses_stay_and_so_do_bits(offload_fraction: float | None) -> None:
    job = Job(offload_fraction)
    tensors, before = list(job.model.parameters()), job.addresses()
    phases = PhaseOffloader(job.model, job.optimizer, keep_addresses=True)
    job.check()
    found = job.addresses()
    assert sum(a != b for a, b in zip(before, found, strict=True)) > 5  # the arena's stay
    for _ in range(3):
        with phases.away():
            assert not any(map(has_memory, job.model.parameters()))
            job.check()
            with pytest.raises(AwayError):
                job.optimizer.step()
        assert job.addresses() == found
        job.check()
        job.train()
    assert all(a is b for a, b in zip(tensors, job.model.parameters(), strict=True))
    assert job.view.data_ptr() == job.model[0].weight.data_ptr() + 3 * 40 * 4
    payload = sum({t.data_ptr(): t.nbytes + 512 for t in job.tensors()}.values())
    assert phases.statistics().host_bytes <= payload + 20 * CHUNK
    phases.close()
    job.check()
    job.train()
    job.check()
    assert not set(job.addresses()) & set(found) - set(before)
    with PhaseOffloader(job.model, job.optimizer).away():
        assert not any(map(has_memory, job.model.parameters()))
    job.check()


@SWAPS
def test_one_offloader_at_a_time_keeps_addresses() -> None:
    """One that does not exist any more does not count."""
    job = Job()
    first = PhaseOffloader(job.model, job.optimizer, keep_addresses=True)
    with pytest.raises(ConfigError, match=r"another PhaseOffloader keeps its address.*close\(\)"):
        PhaseOffloader(job.model, job.optimizer)
    with first.away():
        pass
    del first
    gc.collect()
    second = PhaseOffloader(job.model, job.optimizer)
    with second.away():
        assert not any(tensor.untyped_storage().nbytes() for tensor in job.model.parameters())
    job.check()


@SWAPS
def test_state_that_a_load_replaces_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []
    monkeypatch.setattr(HostDriver, "close", lambda driver, at, n_bytes, _: freed.append(n_bytes))
    job = Job()
    phases = PhaseOffloader(job.model, job.optimizer, keep_addresses=True)
    state_bytes = sum(each["exp_avg"].nbytes * 2 for each in job.optimizer.state.values())
    job.optimizer.load_state_dict(copy.deepcopy(job.optimizer.state_dict()))
    for _ in range(2):
        with phases.away():
            job.check()
        gc.collect()
        assert state_bytes <= sum(freed) < 2 * state_bytes + 10 * CHUNK
    job.train()
    job.check()


@SWAPS
def test_tensors_of_a_region_are_left_to_it() -> None:
    region = FixedAddressRegion("own", "cpu")
    model = nn.Linear(8, 8)
    model.register_buffer("cache", region.empty((4, 4)).fill_(3))
    for keep_addresses in (False, True):
        phases = PhaseOffloader(model, keep_addresses=keep_addresses)
        with phases.away():
            assert not has_memory(model.weight)
            assert bool((model.cache == 3).all())
        phases.close()


@SWAPS
@pytest.mark.parametrize("at", [0, 2, None])
def test_without_memory_nothing_moves(at: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device, or (None) on the host."""
    job, options = Job(), {} if at is not None else {"transfer": TransferConfig(host_memory="100B")}
    with monkeypatch.context() as patch:
        if at is not None:
            reserve = failing(HostDriver.reserve, at, FULL, onwards=True)
            patch.setattr(HostDriver, "reserve", reserve)
        with pytest.raises(
            (DeviceMemoryError, HostMemoryError), match=r"nothing has changed|100 byte"
        ):
            PhaseOffloader(job.model, job.optimizer, keep_addresses=True, **options)
    job.check()
    assert all(storages.owner_of(t.untyped_storage()) is None for t in job.tensors())
    with PhaseOffloader(job.model, job.optimizer).away():
        pass
    job.check()


@SWAPS
def test_a_close_that_found_no_memory_goes_on_later(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    phases = PhaseOffloader(job.model, job.optimizer, keep_addresses=True)
    with monkeypatch.context() as patch:
        patch.setattr(storages, "renew", failing(storages.renew, 3, FULL, onwards=True))
        with pytest.raises(DeviceMemoryError, match="everything is on the device"):
            phases.close()
    job.check()
    with phases.away():
        assert not any(map(has_memory, job.model.parameters()))
    job.check()
    phases.close()
    job.train()
    job.check()


def test_a_torch_that_cannot_swap_is_refused_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storages, "can_swap", lambda: False)
    with pytest.raises(DeviceError, match=r"torch 2\.13 or later"):
        PhaseOffloader(nn.Linear(2, 2), keep_addresses=True)


# ---------------------------------------------------------------- through torch's allocator


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    return allocator_in_place(monkeypatch)


def test_the_pool_takes_memory_where_it_should(allocator: Allocator) -> None:
    given: dict[int, int] = {}

    def memory(n: int) -> int:
        address = (len(given) + 1) << 32
        given[address] = n
        return address

    pool: Any = AddressPool(CUDA, memory)
    moved = [Storage(allocator, n * MIB) for n in (30, 3, 12, 1, 1, 40)]
    for storage in moved:
        pool.move([storage])
    assert list(given.values()) == [n * MIB for n in (30, 20, 12, 2, 2, 40)]
    first, second, _, _, _, sixth = given
    addresses = [storage.address for storage in moved]
    # The third lies behind the second, and one small storage behind the other.
    assert addresses[:3] == [first, second, second + 3 * MIB]
    assert addresses[4] == addresses[3] + MIB
    assert addresses[5] == sixth


@pytest.mark.parametrize("cuts", [True, False])
@pytest.mark.parametrize("sizes", [(29, 60), (7, 200), (0.3, 50)])
def test_storages_move_through_the_pool(
    allocator: Allocator, sizes: Any, cuts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None lies on another one, each in memory that is counted, and nothing unused is kept."""
    monkeypatch.setattr(storages, "cuts_segments", lambda device: cuts)
    memory, driver = memory_in_place(monkeypatch)
    size, count = int(sizes[0] * MIB), sizes[1]
    moved: list[Any] = [Storage(allocator, size) for _ in range(count)]
    memory.move_in(StorageBlock(str(i), storage) for i, storage in enumerate(moved))
    starts = sorted(storage.address for storage in moved)
    assert all(b - a >= size for a, b in itertools.pairwise(starts))
    assert len([place for chunk in memory.blocks() for place in chunk.storages]) == count
    assert sum(each.n_bytes for each in memory.ranges) == driver.held_bytes
    if cuts and size > MIB:
        assert driver.held_bytes <= 1.005 * count * size + 4 * MIB
    memory.move_out()
    assert not memory.blocks()
    gc.collect()
    assert driver.held_bytes == 0


def test_an_allocator_that_rounds_is_refused(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator.rounds = True
    memory, driver = memory_in_place(monkeypatch)
    moved: list[Any] = [Storage(allocator, 29 * MIB) for _ in range(3)]
    with pytest.raises(DeviceError, match="roundup_power2_divisions"):
        memory.move_in(StorageBlock(str(i), storage) for i, storage in enumerate(moved))
    memory.move_out()
    gc.collect()
    assert driver.held_bytes == 0


@pytest.mark.parametrize(("setting", "taken"), [("", [512]), ("max_split_size_mb:256", [])])
def test_a_segment_that_is_not_cut_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, setting: str, taken: list[int]
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", setting)
    found: list[int] = []
    transfer: Any = SimpleNamespace(_backend=SimpleNamespace(device=CUDA, allocate=found.append))
    Transfer._take_segment(transfer, 512)
    assert found == taken


@pytest.mark.parametrize(
    ("setting", "cuts"),
    [
        ("garbage_collection_threshold:0.8", True),
        ("expandable_segments: false", True),
        ("max_split_size_mb:128", False),
        ("expandable_segments:True", False),
        ("roundup_power2_divisions:4", False),
    ],
)
def test_settings_under_which_segments_are_not_cut(
    monkeypatch: pytest.MonkeyPatch, setting: str, cuts: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "", raising=False)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, setting)
        assert storages.cuts_segments(CUDA) == cuts
        monkeypatch.delenv(name)
    monkeypatch.setattr(
        torch._C, "_accelerator_getAllocatorSettings", lambda: setting, raising=False
    )
    assert storages.cuts_segments(CUDA) == cuts
    assert not storages.cuts_segments(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert not storages.cuts_segments(CUDA)
