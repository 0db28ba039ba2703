"""Offloaders whose state, or all of it, stays at its addresses: what is replaced, what does not
fit, and what is exchanged in a swap. Without FSDP2."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_offload import HybridDeviceOptimizer, PhaseOffloader, swap
from fsdp_offload.errors import ConfigError, DeviceError, DeviceMemoryError
from fsdp_offload.moving import (
    FixedAddressRegion,
    Mover,
    PageBlock,
    Spares,
    StorageBlock,
    mover,
    pages,
    region,
    settling,
)
from fsdp_offload.moving.pages import HostPages
from fsdp_offload.phases import offloader
from fsdp_offload.phases.handle import Handle
from fsdp_offload.storages import can_swap, is_tied
from tests.away import has_memory

pytestmark = pytest.mark.skipif(not can_swap(), reason="this torch cannot swap CPU storages")
FIXED = pytest.mark.parametrize("fixed_address", ["state", True])
CHUNK = 4096


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FixedAddressRegion.__init__.__kwdefaults__, "chunk_bytes", CHUNK)


class Job:
    """A model that has made a step, and its offloader."""

    def __init__(self, seed: int = 0, *, layers: int = 3, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(*[nn.Linear(40, 40) for _ in range(layers)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.step()
        self.phases = PhaseOffloader(self.model, self.optimizer, **options)

    def step(self) -> None:
        self.model(torch.randn(5, 40)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def moments(self) -> list[Tensor]:
        states = self.optimizer.state.values()
        return [s[name] for s in states for name in ("exp_avg", "exp_avg_sq")]

    def values(self) -> Any:
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()["state"]))

    def cycle(self) -> None:
        """Nothing is lost in one."""
        before = self.values()
        with self.phases.away():
            assert not any(map(has_memory, [*self.model.parameters(), *self.moments()]))
            assert_same(self.values(), before)
        assert all(map(has_memory, [*self.model.parameters(), *self.moments()]))
        assert_same(self.values(), before)

    @property
    def region(self) -> FixedAddressRegion:
        """Of the state."""
        found = self.phases._contents._seats["state"]._region  # type: ignore[attr-defined]
        assert isinstance(found, FixedAddressRegion)
        return found


def assert_same(first: Any, second: Any) -> None:
    torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)


# ---------------------------------------------------------------------- what is fixed


@pytest.mark.parametrize(
    ("options", "fixed"),
    [
        ({}, (False, True)),
        ({"fixed_address": "state"}, (False, True)),
        ({"fixed_address": True}, (True, True)),
        ({"fixed_address": False}, (False, False)),
        ({"state": "keep"}, (False, False)),
        ({"params": "keep", "fixed_address": True}, (False, True)),
    ],
    ids=str,
)
def test_what_stays_at_its_address(options: dict[str, Any], fixed: tuple[bool, bool]) -> None:
    job = Job(**options)
    tensors = (job.model[0].weight, job.moments()[0])
    assert tuple(is_tied(tensor.untyped_storage()) for tensor in tensors) == fixed
    before = [tensor.data_ptr() for tensor in tensors]
    for _ in range(3):
        with job.phases.away():
            pass
        now = [tensor.data_ptr() for tensor in tensors]
        assert all(a == b for a, b, f in zip(before, now, fixed, strict=True) if f)
        job.step()
    job.phases.close()
    assert not any(is_tied(tensor.untyped_storage()) for tensor in tensors)


@pytest.mark.parametrize("wrong", ["params", "all", None, 2, 1, 0])
def test_wrong_choices(wrong: Any) -> None:
    with pytest.raises(ConfigError, match='use "state" or True or False'):
        Job(fixed_address=wrong)


# ---------------------------------------------------------------------- what is replaced


@FIXED
def test_loads_while_it_is_here_take_no_more_room(fixed_address: Any) -> None:
    job = Job(fixed_address=fixed_address)
    job.cycle()
    held, n_bytes = job.phases.statistics().host_bytes, job.region.n_bytes
    for _ in range(4):
        mine, content = job.moments()[0], job.moments()[0].clone()
        job.step()
        content.copy_(mine)
        job.optimizer.load_state_dict(copy.deepcopy(job.optimizer.state_dict()))
        assert job.region.n_bytes == 0  # what was there is gone before anything leaves
        assert not is_tied(mine.untyped_storage())
        job.cycle()
        assert job.region.n_bytes == n_bytes
        assert job.phases.statistics().host_bytes == held
        assert torch.equal(mine, content)  # whoever kept it has it
        job.step()


@FIXED
@pytest.mark.parametrize("count", [1, 6])
def test_state_replaced_by_hand_takes_no_more_room(fixed_address: Any, count: int) -> None:
    """``count`` parameters' of six; the others' moves out with it, and in again."""
    job = Job(fixed_address=fixed_address)
    job.cycle()
    held, n_bytes = job.phases.statistics().host_bytes, job.region.n_bytes
    for _ in range(4):
        for parameter in list(job.optimizer.state)[:count]:
            del job.optimizer.state[parameter]
        job.step()
        job.cycle()
        assert job.region.n_bytes == n_bytes
        assert job.phases.statistics().host_bytes == held


def test_parameters_replaced_by_hand_take_no_more_room() -> None:
    job = Job(fixed_address=True)
    job.cycle()
    held = job.phases.statistics().host_bytes
    for _ in range(3):
        found = job.model.state_dict()
        job.model.load_state_dict({k: v.clone() for k, v in found.items()}, assign=True)
        job.cycle()
        assert job.phases.statistics().host_bytes == held


@FIXED
def test_a_load_that_fails_leaves_addresses(fixed_address: Any) -> None:
    job = Job(fixed_address=fixed_address)
    before = [tensor.data_ptr() for tensor in job.moments()]
    wrong = copy.deepcopy(job.optimizer.state_dict())
    wrong["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match="parameter group"):
        job.optimizer.load_state_dict(wrong)
    job.cycle()
    assert [tensor.data_ptr() for tensor in job.moments()] == before


@pytest.mark.parametrize("at", [1, 4])
def test_no_room_for_what_was_replaced_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """It moves out of the region storage by storage; the rest does so the next time."""
    job, renew, calls = Job(), region.renew, 0
    kept = job.moments()
    contents = [tensor.clone() for tensor in kept]

    def short(storage: torch.UntypedStorage) -> None:
        nonlocal calls
        calls += 1
        if calls >= at:
            raise torch.OutOfMemoryError("taken")
        renew(storage)

    with monkeypatch.context() as patch:
        patch.setattr(region, "renew", short)
        job.optimizer.load_state_dict(copy.deepcopy(job.optimizer.state_dict()))
        job.cycle()
    assert sum(is_tied(tensor.untyped_storage()) for tensor in kept) > 0
    assert_same(kept, contents)
    job.step()
    job.cycle()
    assert not any(is_tied(tensor.untyped_storage()) for tensor in kept)
    assert_same(kept, contents)
    assert job.region.n_bytes <= Job().region.n_bytes + CHUNK


@pytest.mark.parametrize("at", [1, 5])
def test_moving_out_goes_on_where_it_has_failed(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    job, renew, calls = Job(), region.renew, 0
    del job.optimizer.state[job.model[0].weight]
    job.step()

    def broken(storage: torch.UntypedStorage) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise RuntimeError("broken")
        renew(storage)

    with monkeypatch.context() as patch:
        patch.setattr(region, "renew", broken)
        with pytest.raises(RuntimeError, match="broken"):
            job.phases.offload()
    assert not job.phases.is_away
    job.cycle()  # in which all leaves
    assert job.region.n_bytes <= Job().region.n_bytes + CHUNK
    job.step()
    job.cycle()


# ---------------------------------------------------------------------- several offloaders


@pytest.mark.parametrize("second", ["state", True, False])
@FIXED
def test_another_offloader_takes_over(fixed_address: Any, second: Any) -> None:
    """While the first one is still there, and back again."""
    job = Job(fixed_address=fixed_address)
    job.cycle()
    lies_in = [weakref.ref(each) for each in job.phases._contents.pages()]
    first, job.phases = job.phases, PhaseOffloader(job.model, job.optimizer, fixed_address=second)
    gc.collect()
    assert not first._contents.pages()
    assert not any(each() for each in lies_in)  # nor is their memory kept
    held = job.phases.statistics().host_bytes
    for _ in range(2):
        job.cycle()
        job.step()
        first, job.phases = job.phases, first
        job.cycle()
        job.step()
        first, job.phases = job.phases, first
    assert job.phases.statistics().host_bytes == held
    job.cycle()
    first.close()
    job.cycle()
    job.phases.close()
    assert not any(is_tied(tensor.untyped_storage()) for tensor in job.moments())


@pytest.mark.parametrize("second", ["state", True, False])
@FIXED
def test_an_offloader_that_was_dropped_without_close(fixed_address: Any, second: Any) -> None:
    job = Job(fixed_address=fixed_address)
    job.cycle()
    del job.phases
    gc.collect()
    assert is_tied(job.moments()[0].untyped_storage())  # it lies there on its own
    job.step()
    job.phases = PhaseOffloader(job.model, job.optimizer, fixed_address=second)
    job.cycle()
    job.step()
    job.cycle()


def test_what_another_offloader_has_away_is_left_to_it() -> None:
    job = Job()
    before = job.values()
    job.phases.offload()
    other = PhaseOffloader(job.model, job.optimizer)
    with other.away():
        assert_same(job.values(), before)
    assert_same(job.values(), before)
    job.phases.reload()
    assert_same(job.values(), before)
    other.offload()
    assert not any(map(has_memory, [*job.model.parameters(), *job.moments()]))
    assert_same(job.values(), before)
    other.reload()
    assert_same(job.values(), before)
    job.cycle()


def test_a_region_of_the_users_is_left_alone() -> None:
    kept = FixedAddressRegion("kept", "cpu")
    model = nn.Linear(40, 40)
    model.register_buffer("cache", kept.empty((3, 5)).fill_(7.0))
    phases = PhaseOffloader(model, fixed_address=True)
    address = model.cache.data_ptr()
    with phases.away():
        assert has_memory(model.cache)
        assert not has_memory(model.weight)
    assert model.cache.data_ptr() == address
    assert bool((model.cache == 7).all())


# ---------------------------------------------------------------------- what does not fit


def failing(monkeypatch: pytest.MonkeyPatch, after: int, error: Exception) -> None:
    """Each row has a range of pages; no more than ``after`` of them can be had."""
    make, calls = pages.make, 0

    def short(device: torch.device, n_bytes: int, chunk_bytes: int) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise error
        return make(device, n_bytes, chunk_bytes)

    monkeypatch.setattr(settling, "ROOM_BYTES", 8000)
    monkeypatch.setattr(pages, "make", short)


@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("none"),
        DeviceError("a range", reason="", remedy=""),
        RuntimeError("torch is another one"),
    ],
)
def test_state_that_cannot_stay_at_its_address_leaves_all_the_same(
    monkeypatch: pytest.MonkeyPatch, after: int, error: Exception
) -> None:
    with monkeypatch.context() as patch:
        failing(patch, after, error)
        job = Job()
        assert len(job.region.blocks()) == after
        job.step()
        job.cycle()
        with pytest.raises(RuntimeError):  # ours are such
            Job(fixed_address=True)
    for _ in range(2):  # nor is it asked for again
        job.step()
        job.cycle()
        assert len(job.region.blocks()) == after
    job.phases.close()
    assert not any(is_tied(tensor.untyped_storage()) for tensor in job.moments())


def test_a_device_that_keeps_no_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(device: torch.device) -> None:
        raise DeviceError("memory at a fixed address", reason="", remedy="")

    monkeypatch.setattr(pages, "check", refused)
    job = Job()
    job.cycle()
    assert not is_tied(job.moments()[0].untyped_storage())
    with pytest.raises(DeviceError):
        Job(fixed_address=True)


# ---------------------------------------------------------------------- swap


def limited(monkeypatch: pytest.MonkeyPatch, count: Callable[[], int], most: int) -> list[int]:
    """No more than ``most`` chunks have memory, those included that nobody has yet; gives how many
    were mapped from what the system has."""
    fresh: list[int] = []
    take, kept = Spares.take, 0
    put = Spares.put

    def counted(spares: Spares, n_bytes: int, handle: int, drop: Callable[[int], None]) -> None:
        nonlocal kept
        kept += 1

        def dropped(handle: int) -> None:
            nonlocal kept
            kept -= 1
            drop(handle)

        put(spares, n_bytes, handle, dropped)

    def taken(spares: Spares, n_bytes: int) -> int | None:
        nonlocal kept
        handle = take(spares, n_bytes)
        kept -= handle is not None
        if handle is None:
            asked(n_bytes)
        return handle

    def asked(n_bytes: int) -> None:
        if count() + kept >= most:
            raise torch.OutOfMemoryError("the device is full")
        fresh.append(n_bytes)

    def mapped(block: PageBlock, index: int) -> None:
        if block.pages.spares is None:
            asked(CHUNK)
        restore(block, index)

    restore = PageBlock.restore
    monkeypatch.setattr(Spares, "put", counted)
    monkeypatch.setattr(Spares, "take", taken)
    monkeypatch.setattr(PageBlock, "restore", mapped)
    return fresh


@FIXED
@pytest.mark.parametrize("spare_chunks", [0, 1000])
def test_a_swap_exchanges_memory(
    monkeypatch: pytest.MonkeyPatch, fixed_address: Any, spare_chunks: int
) -> None:
    """Chunks of what leaves are those of what comes, whether there would be others or not. (All
    parameters begin to come before anything has left, where there is room.)"""
    jobs = [Job(seed, fixed_address=fixed_address) for seed in (1, 2)]
    before = [job.values() for job in jobs]
    out, in_ = jobs
    in_.phases.offload()
    found = [p for job in jobs for p in job.phases._contents.pages()]

    def count() -> int:
        return sum(each.is_mapped(index) for each in found for index in range(len(each.chunks)))

    state = len(out.region.blocks()[0].pieces)
    fresh = limited(monkeypatch, count, count() + spare_chunks)
    if fixed_address is True and not spare_chunks:
        # What begins early finds no room, and comes with the rest.
        monkeypatch.setattr("fsdp_offload.phases.offloader.available_bytes", lambda device: 0)
    for _ in range(4):
        swap(out=out.phases, in_=in_.phases)
        assert (out.phases.is_away, in_.phases.is_away) == (True, False)
        assert not any(map(has_memory, [*out.model.parameters(), *out.moments()]))
        assert all(map(has_memory, [*in_.model.parameters(), *in_.moments()]))
        assert all(p.spares is None for p in found)
        out, in_ = in_, out
    early = len(found) and fixed_address is True and spare_chunks
    assert (len(fresh) > 0) == bool(early)
    assert len(fresh) <= 4 * (count() - state)
    monkeypatch.undo()
    for job, values in zip(jobs, before, strict=True):
        job.phases.reload()
        assert_same(job.values(), values)


@pytest.mark.parametrize("layers", [(2, 5), (5, 2)])
def test_a_swap_of_different_sizes(layers: tuple[int, int]) -> None:
    out, in_ = (Job(seed, layers=n) for seed, n in enumerate(layers))
    before = [job.values() for job in (out, in_)]
    in_.phases.offload()
    for _ in range(3):
        swap(out=out.phases, in_=in_.phases)
        out, in_ = in_, out
        before.reverse()
        assert_same([out.values(), in_.values()], [before[0], before[1]])
    assert all(map(has_memory, out.moments()))
    assert not any(map(has_memory, in_.moments()))


def test_a_swap_that_cannot_fit_gives_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    out, in_ = (Job(seed) for seed in range(2))
    before = [job.values() for job in (out, in_)]
    in_.phases.offload()
    found = in_.phases._contents.pages()

    def full(each: HostPages, index: int) -> None:
        if each in found and index == 3:
            raise torch.OutOfMemoryError("taken")
        restore(each, index)

    restore, dropped, put = HostPages.map, [], Spares.put

    def noted(spares: Spares, n_bytes: int, handle: int, drop: Any) -> None:
        put(spares, n_bytes, handle, lambda _: dropped.append(n_bytes))

    with monkeypatch.context() as patch:
        patch.setattr(HostPages, "map", full)
        patch.setattr(Spares, "put", noted)
        with pytest.raises(DeviceMemoryError):
            swap(out=out.phases, in_=in_.phases)
    assert out.phases.is_away
    assert in_.phases.is_away
    assert sum(dropped) == out.region.n_bytes  # nobody keeps any of it
    for job, values in zip((out, in_), before, strict=True):
        job.phases.reload()
        assert_same(job.values(), values)


def test_parameters_are_storages_and_state_is_chunks() -> None:
    job = Job()
    kinds = {kind: {type(b) for b in found} for kind, found in job.phases._contents.blocks.items()}
    assert kinds == {"params": {StorageBlock}, "grads": set(), "state": {PageBlock}}
    figures = job.phases.offload().transfers()
    assert figures["state"].n_bytes == job.region.n_bytes
    job.phases.reload()


class FullDevice:
    """No memory but what the jobs have: ``log`` says who has given some up or got some."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.free_bytes, self.log = 0, list[str]()
        release, restore = StorageBlock.release, StorageBlock.restore
        unmap, fetch = HostPages.unmap, HostPages.map
        put, take = Spares.put, Spares.take

        def released(block: StorageBlock, index: int) -> None:
            release(block, index)
            self._gave(block.n_bytes)

        def restored(block: StorageBlock, index: int) -> None:
            self._asked(block.n_bytes)
            restore(block, index)
            self.log.append("in")

        def unmapped(each: HostPages, index: int) -> None:
            unmap(each, index)
            start, stop = each.chunks[index]
            self._gave(0 if each.spares is not None else stop - start)

        def mapped(each: HostPages, index: int) -> None:
            if each.spares is None:
                start, stop = each.chunks[index]
                self._asked(stop - start)
            fetch(each, index)
            self.log.append("in")

        def kept(spares: Spares, n_bytes: int, handle: int, drop: Any) -> None:
            put(spares, n_bytes, handle, lambda _: self._gave(n_bytes))

        def taken(spares: Spares, n_bytes: int) -> int | None:
            handle = take(spares, n_bytes)
            if handle is None:
                self._asked(n_bytes)
            return handle

        patch.setattr(StorageBlock, "release", released)
        patch.setattr(StorageBlock, "restore", restored)
        patch.setattr(HostPages, "unmap", unmapped)
        patch.setattr(HostPages, "map", mapped)
        patch.setattr(Spares, "put", kept)
        patch.setattr(Spares, "take", taken)
        patch.setattr(offloader, "available_bytes", lambda device: self.free_bytes)
        # Copies are done at once here: they look unfinished until they are waited for.
        patch.setattr(mover.Mover, "_advance", lambda self: None)
        patch.setattr(mover, "PACK_BELOW_BYTES", 0)

    def _gave(self, n_bytes: int) -> None:
        self.free_bytes += n_bytes
        self.log.append("out")

    def _asked(self, n_bytes: int) -> None:
        if n_bytes > self.free_bytes:
            raise torch.OutOfMemoryError("the device is full")
        self.free_bytes -= n_bytes


@pytest.mark.parametrize("fixed_address", ["state", True, False])
def test_on_a_full_device_one_comes_while_the_other_leaves(
    monkeypatch: pytest.MonkeyPatch, fixed_address: Any
) -> None:
    out, in_ = (Job(seed, fixed_address=fixed_address) for seed in range(2))
    before = [job.values() for job in (out, in_)]
    in_.phases.offload()
    with monkeypatch.context() as patch:
        device = FullDevice(patch)
        swap(out=out.phases, in_=in_.phases)
    assert "out" in device.log[:4]
    assert "in" in device.log[:4]  # not after all that leaves
    assert all(map(has_memory, [*in_.model.parameters(), *in_.moments()]))
    assert not any(map(has_memory, [*out.model.parameters(), *out.moments()]))
    out.phases.reload()
    assert_same([job.values() for job in (out, in_)], before)


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_the_order_in_which_a_swap_without_room_brings_back(
    monkeypatch: pytest.MonkeyPatch, is_wrapped: bool
) -> None:
    """State first, which finds what leaves first; a wrapper's comes as a whole, so not before."""
    out, in_ = Job(1), Job(2)
    if is_wrapped:
        in_.phases.close()
        plain = torch.optim.AdamW(in_.model.parameters(), lr=0.01)
        wrapper = HybridDeviceOptimizer(plain, model=in_.model, offload_fraction=0.0)
        in_.phases = PhaseOffloader(in_.model, wrapper)
    in_.phases.offload()
    order: list[str] = []
    moves = type(in_.phases._moves)
    for name in ("_bring_state", "_bring_model"):
        bring = getattr(moves, name)
        monkeypatch.setattr(
            moves, name, lambda self, room, n=name, b=bring: (order.append(n), b(self, room))[1]
        )
    monkeypatch.setattr(offloader, "available_bytes", lambda device: 0)
    swap(out=out.phases, in_=in_.phases)
    assert order == sorted(order, reverse=not is_wrapped)
    assert len(order) == 2


@pytest.mark.parametrize("after", ["begin_exchange", "come"])
def test_a_swap_that_fails_keeps_no_memory(monkeypatch: pytest.MonkeyPatch, after: str) -> None:
    out, in_ = (Job(seed) for seed in range(2))
    before = [job.values() for job in (out, in_)]
    in_.phases.offload()
    original = getattr(offloader._Coming, after)

    def fail(*args: Any) -> None:
        original(*args)
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(offloader._Coming, after, fail)
        with pytest.raises(RuntimeError, match="broken"):
            swap(out=out.phases, in_=in_.phases)
    for job in (out, in_):
        assert all(each.spares is None for each in job.phases._contents.pages())
    for job, values in zip((out, in_), before, strict=True):
        job.phases.reload()
        assert_same(job.values(), values)
        job.cycle()


# ---------------------------------------------------------------------- ends


def test_a_closed_offloader_keeps_no_storages() -> None:
    job = Job()
    job.cycle()
    storages = [weakref.ref(job.phases._contents.blocks["state"][0])]
    job.phases.close()
    gc.collect()
    assert not any(each() for each in storages)
    seats: Any = job.phases._contents._seats["state"]
    assert not seats._storages
    assert not seats._seats


def test_a_close_without_room_leaves_all_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    job, renew, calls = Job(), region.renew, 0

    def short(storage: torch.UntypedStorage) -> None:
        nonlocal calls
        calls += 1
        if calls >= 3:
            raise torch.OutOfMemoryError("taken")
        renew(storage)

    with monkeypatch.context() as patch:
        patch.setattr(region, "renew", short)
        with pytest.raises(DeviceMemoryError):
            job.phases.close()
        for _ in range(3):
            job.cycle()
            held = job.phases.statistics().host_bytes
        job.cycle()
        assert job.phases.statistics().host_bytes == held
    job.step()
    job.cycle()
    job.phases.close()
    assert not any(is_tied(tensor.untyped_storage()) for tensor in job.moments())


def test_a_close_without_room_goes_on_where_it_has_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, renew, calls = Job(fixed_address=True), region.renew, 0
    before = job.values()

    def short(storage: torch.UntypedStorage) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise torch.OutOfMemoryError("taken")
        renew(storage)

    monkeypatch.setattr(region, "renew", short)
    with pytest.raises(DeviceMemoryError, match=r"call close\(\) again"):
        job.phases.close()
    job.phases.close()
    assert not any(is_tied(t.untyped_storage()) for t in [*job.moments(), *job.model.parameters()])
    assert job.phases.statistics().host_bytes == 0
    assert_same(job.values(), before)
    job.phases.close()


def test_a_swap_without_room_leaves_both_away(monkeypatch: pytest.MonkeyPatch) -> None:
    out, in_ = (Job(seed) for seed in range(2))
    before = [job.values() for job in (out, in_)]
    in_.phases.offload()
    back = Mover.back

    def full(self: Mover, blocks: Any, **options: Any) -> Any:
        if self is in_.phases._moves._mover:
            raise torch.OutOfMemoryError("no room")
        return back(self, blocks, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Mover, "back", full)
        with pytest.raises(DeviceMemoryError):
            swap(out=out.phases, in_=in_.phases)
    for job, values in zip((out, in_), before, strict=True):
        assert job.phases.is_away
        job.phases.reload()
        assert_same(job.values(), values)


def test_loads_without_room_to_move_out_take_room_once(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()

    def short(storage: torch.UntypedStorage) -> None:
        raise torch.OutOfMemoryError("taken")

    n_bytes = job.region.n_bytes
    with monkeypatch.context() as patch:
        patch.setattr(region, "renew", short)
        for _ in range(3):
            job.optimizer.load_state_dict(copy.deepcopy(job.optimizer.state_dict()))
            job.cycle()
            assert job.region.n_bytes == n_bytes
    job.step()
    job.cycle()
    assert job.region.n_bytes <= n_bytes + CHUNK


def test_a_load_by_torchs_own_method_waits_for_a_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    job.phases.offload()
    order: list[str] = []
    handle = job.phases.reload(wait=False)
    wait, vacate = Handle.wait, FixedAddressRegion.vacate
    monkeypatch.setattr(Handle, "wait", lambda self: (order.append("wait"), wait(self))[1])
    monkeypatch.setattr(
        FixedAddressRegion, "vacate", lambda self: (order.append("vacate"), vacate(self))[1]
    )
    loaded = copy.deepcopy(torch.optim.Optimizer.state_dict(job.optimizer))
    torch.optim.Optimizer.load_state_dict(job.optimizer, loaded)
    assert order[0] == "wait"
    assert "vacate" in order
    handle.wait()


def test_nothing_new_waits_for_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    job.cycle()
    monkeypatch.setattr(FixedAddressRegion, "synchronize", lambda self: pytest.fail("it waits"))
    job.phases.offload(wait=False).wait()
    job.phases.reload()
