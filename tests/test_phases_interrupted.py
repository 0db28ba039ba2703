"""Moves that are interrupted at any line: nothing is lost, and what is away is known to be."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import fsdp_offload
from fsdp_offload import HybridDeviceOptimizer, PhaseOffloader, swap
from fsdp_offload.errors import AwayError, DeviceMemoryError, LaneError
from fsdp_offload.moving import FixedAddressRegion, Mover, PageBlock, StorageBlock, absent
from fsdp_offload.patching import Patch
from fsdp_offload.phases import contents
from fsdp_offload.spent import StandIn
from fsdp_offload.storages import is_tied
from fsdp_offload.testing import StreamSimulator
from tests.interrupting import at_each_line

pytestmark = pytest.mark.usefixtures("one_thread")
PACKAGE = Path(fsdp_offload.__file__).parent
PHASES = {str(path) for path in (PACKAGE / "phases").glob("*.py")}
MOVING = {str(PACKAGE / "moving" / name) for name in ("mover.py", "blocks.py", "rooms.py")}

LEAVE = "PhaseOffloader._leave"
COME_BACK, MOVE_BACK = "PhaseOffloader._come_back", "Moves.back"


class Net(nn.Module):
    """Two dtypes, buffers, and a parameter that shows a part of its storage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 8).bfloat16()
        self.norm = nn.BatchNorm1d(6)
        self.padded = nn.Parameter(torch.randn(20).bfloat16()[:16])

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).bfloat16())


def wrapped(**options: Any) -> Callable[[nn.Module], Optimizer]:
    return lambda m: HybridDeviceOptimizer(
        torch.optim.AdamW(m.parameters(), lr=0.01), model=m, **options
    )


def plain(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "plain": plain,
    "resized": plain,
    "resident": wrapped(offload_fraction=0.0),
    "host": wrapped(update_on="host"),
}
MORE = pytest.mark.long
CASES = [
    ("plain", "save", "drop"),
    pytest.param("resized", "save", "drop", marks=MORE),
    ("resident", "save", "save"),
    ("host", "rebuild", "save"),
    pytest.param("plain", "save", "save", marks=MORE),
    pytest.param("plain", "keep", "keep", marks=MORE),
    pytest.param("host", "rebuild", "drop", marks=MORE),
    pytest.param("host", "save", "keep", marks=MORE),
]
"""Optimizer, and what becomes of parameters and gradients. ``resized``: a plain one's state leaves
as parameters do."""


class Job:
    """A model under an offloader, and its twin that never leaves."""

    def __init__(self, name: str, params: str = "save", grads: str = "drop") -> None:
        torch.manual_seed(0)
        self.params, self.steps = params, 0
        self.model = Net()
        self.twin = copy.deepcopy(self.model)
        self.optimizer, self.other = (OPTIMIZERS[name](m) for m in (self.model, self.twin))
        self.step()
        fixed_address = False if name == "resized" else "state"
        self.phases = PhaseOffloader(
            self.model, self.optimizer, params=params, grads=grads, fixed_address=fixed_address
        )
        self.phases.offload()  # the first time other lines run
        self.phases.reload()
        self.untouched = self.traces()

    def step(self) -> None:
        """A step of both, gradients for the next, and a write beside the optimizer."""
        synchronize()
        for model, optimizer in ((self.model, self.optimizer), (self.twin, self.other)):
            generator = torch.Generator().manual_seed(self.steps)
            for is_next in (False, True):
                for parameter in model.parameters():
                    drawn = torch.randn(parameter.shape, generator=generator)
                    parameter.grad = drawn.to(parameter.dtype)
                if not is_next:
                    optimizer.step()
            synchronize()
            for parameter in model.parameters():
                parameter.data.add_(0.37)
        self.graph = self.model.first(torch.ones(2, 8, requires_grad=True)).sum()
        self.steps += 1

    def traces(self) -> Any:
        """What an offloader leaves on objects."""
        modules = list(self.model.modules())
        tables = [set(each.__dict__) for each in (*modules, self.optimizer)]
        return tables, [len(module._forward_pre_hooks) for module in modules]

    def check_values(self) -> None:
        synchronize()
        mine, twins = values(self.model, self.optimizer), values(self.twin, self.other)
        differ = [n for n, v in twins.items() if n not in mine or not torch.equal(mine[n], v)]
        assert not differ, differ

    def check_gradients(self) -> None:
        synchronize()
        for mine, twins in zip(self.model.parameters(), self.twin.parameters(), strict=True):
            assert not isinstance(mine.grad, StandIn)
            has_memory = mine.grad.untyped_storage().nbytes() > 0  # before it is looked at
            assert has_memory
            assert torch.equal(mine.grad, twins.grad)

    def check_here(self) -> None:
        """All is as if it had never left."""
        assert not self.phases.is_away
        tensors = [*self.model.parameters(), *self.model.buffers()]
        empty = [i for i, t in enumerate(tensors) if not t.untyped_storage().nbytes()]
        known = [i for i, t in enumerate(tensors) if absent.is_absent(t)]
        assert not empty + known, (empty, known)
        assert self.traces() == self.untouched
        self.check_values()
        self.model(torch.ones(2, 8))
        self.twin(torch.ones(2, 8))

    def check_away(self) -> None:
        """Whoever uses it is told, and whoever reads it gets the values."""
        with pytest.raises(AwayError):
            self.model(torch.ones(2, 8))
        with pytest.raises(AwayError):
            self.optimizer.step()
        self.check_values()

    def check_goes_on(self, *, read: bool = True) -> None:
        """After whatever has happened: from wherever it is, and for good.

        Args:
            read: what is away, too, which leaves its bytes in host memory.
        """
        if self.phases.is_away and read:
            self.check_away()
        self.phases.reload()
        self.check_here()
        if self.params != "rebuild":  # which torch may take for a write
            self.graph.backward()  # of a forward from before it has left
        self.phases.offload()
        self.check_away()
        self.phases.reload()
        self.check_here()
        self.step()


def values(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """But for masters: what was written beside the optimizer comes to them at different times."""
    state = optimizer.state_dict()["state"]
    found = {f"{i}.{n}": v for i, each in state.items() for n, v in each.items() if n != "master"}
    return {**model.state_dict(), **found}


SIMULATORS: list[StreamSimulator] = []


def synchronize() -> None:
    """What the current stream has to do is done."""
    if SIMULATORS:
        SIMULATORS[-1].current_stream().synchronize()


def nothing() -> None:
    """There is nothing to check besides."""


def sweep(
    job: Job,
    move: Callable[[], object],
    root: str,
    check: Callable[[], None],
    prepare: Callable[[], object] = nothing,
    files: set[str] = PHASES,
) -> None:
    """Interrupt ``move`` at each line that runs below ``root``, and ``check`` what there is.

    Args:
        prepare: from where all is present to where ``move`` can begin.
    """

    def settle() -> None:
        job.phases.reload()
        job.step()

    def checked(index: int) -> None:
        check()
        job.check_goes_on(read=index % 2 == 0)

    at_each_line(move, root, files, prepare=prepare, settle=settle, check=checked)


@pytest.mark.parametrize(("name", "params", "grads"), CASES)
def test_leaving(name: str, params: str, grads: str) -> None:
    job = Job(name, params, grads)
    away: list[bool] = []

    def check() -> None:
        """Gradients that come back, and all if nothing has left, are as they were."""
        away.append(job.phases.is_away)
        if not job.phases.is_away:
            job.check_gradients()
        elif grads == "drop":
            assert all(p.grad is None for p in job.model.parameters())
        else:
            job.phases.reload()
            job.check_gradients()

    sweep(job, lambda: job.phases.offload(wait=False), LEAVE, check)
    assert False in away
    assert away == sorted(away)  # from some line on it is away


@pytest.mark.parametrize(
    ("name", "params", "root"), [("plain", "save", LEAVE), ("host", "rebuild", "Mover.drop")]
)
def test_leaving_below(name: str, params: str, root: str) -> None:
    """In the middle of copies, and of what leaves without."""
    job = Job(name, params, "save")
    sweep(job, lambda: job.phases.offload(wait=False), root, nothing, files=MOVING)


@pytest.mark.parametrize(
    ("name", "params"), [("plain", "save"), pytest.param("host", "rebuild", marks=MORE)]
)
def test_leaving_without_room_to_come_back(
    name: str, params: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(name, params, "save")

    def full(block: StorageBlock, index: int) -> None:
        raise torch.OutOfMemoryError("taken")

    def move() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(StorageBlock, "restore", full)
            job.phases.offload(wait=False)

    sweep(job, move, LEAVE, nothing)


def leave_in_vain(phases: PhaseOffloader) -> None:
    """It fails when the last has been asked to leave."""
    drop = Mover.drop

    def fails(mover: Mover, blocks: Any) -> None:
        drop(mover, blocks)
        raise ZeroDivisionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mover, "drop", fails)
        with pytest.raises(ZeroDivisionError):
            phases.offload(wait=False)


@pytest.mark.parametrize(("name", "params"), [("plain", "save"), ("host", "rebuild")])
def test_staying(name: str, params: str) -> None:
    """It comes back because it could not leave, and that is interrupted."""
    job = Job(name, params, "save")
    sweep(job, lambda: leave_in_vain(job.phases), MOVE_BACK, nothing)


@pytest.mark.parametrize(("name", "params", "grads"), CASES)
def test_coming_back(name: str, params: str, grads: str) -> None:
    job = Job(name, params, grads)

    away: list[bool] = []
    sweep(
        job,
        lambda: job.phases.reload(wait=False),
        COME_BACK,
        lambda: away.append(job.phases.is_away),
        job.phases.offload,
    )
    assert True in away
    assert away == sorted(away, reverse=True)  # from some line on it is back


@pytest.mark.parametrize(
    "case",
    [pytest.param(("host", "rebuild", "save"), marks=MORE), pytest.param(("plain",), id="early")],
)
def test_swapping(case: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """What leaves is interrupted, or what comes beside it: early, where the first state leaves
    before all is looked up."""
    monkeypatch.setattr(contents, "AHEAD_BYTES", 1)
    job, other = Job(*case), Job("plain")
    with job.phases.away():
        pass

    def check() -> None:
        if other.phases.is_away:
            other.check_away()
            other.phases.reload()
        other.check_here()

    def move() -> None:
        swap(out=job.phases, in_=other.phases)

    sweep(job, move, LEAVE, check, other.phases.offload)


REGION = {str(PACKAGE / name) for name in ("phases/seats.py", "moving/region.py")}
REGION.add(str(PACKAGE / "moving" / "settling.py"))


def test_leaving_with_state_that_was_replaced() -> None:
    """All of it moves out of the region, and in again."""
    job = Job("plain")

    def replace() -> None:
        for values in job.optimizer.state.values():
            values["exp_avg"] = values["exp_avg"].clone()

    sweep(job, lambda: job.phases.offload(wait=False), LEAVE, nothing, replace, files=REGION)


def test_loading_while_it_is_here() -> None:
    job = Job("plain")

    def load() -> None:
        job.optimizer.load_state_dict(copy.deepcopy(job.optimizer.state_dict()))

    sweep(job, load, "PhaseOffloader._release_state", nothing, files=REGION)


def test_swapping_in_vain() -> None:
    """There is no room for what comes, and what leaves is interrupted after that."""
    job, other = Job("plain", "save", "save"), Job("plain")
    move_back = Mover.back

    def full(mover: Mover, blocks: Any, **options: Any) -> Any:
        if mover is other.phases._moves._mover:
            raise torch.OutOfMemoryError("no room")
        return move_back(mover, blocks, **options)

    def move() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Mover, "back", full)
            with pytest.raises(DeviceMemoryError):
                swap(out=job.phases, in_=other.phases)

    def check() -> None:
        assert job.phases.is_away
        job.phases.reload()  # not every use of it is refused, after two failures
        other.phases.reload()
        other.check_here()

    sweep(job, move, "ModuleGuard.close", check, other.phases.offload)


@contextmanager
def late_streams(policy: str) -> Iterator[None]:
    with StreamSimulator(policy) as simulator:
        SIMULATORS.append(simulator)
        try:
            yield
        finally:
            SIMULATORS.clear()
    assert not simulator.late_uses


def phases_files(*names: str) -> set[str]:
    return {str(PACKAGE / "phases" / name) for name in names}


@pytest.mark.parametrize(
    "policy", ["lazy", *(pytest.param(each, marks=MORE) for each in ("eager", "random:0"))]
)
@pytest.mark.parametrize(("name", "params"), [("plain", "save"), ("host", "rebuild")])
def test_streams_are_late(name: str, params: str, policy: str) -> None:
    files = phases_files("offloader.py", "moves.py", "optimizers.py")
    with late_streams(policy):
        job = Job(name, params, "save")
        phases = job.phases
        sweep(job, lambda: phases.offload(wait=False), LEAVE, nothing, files=files)
        sweep(job, lambda: phases.reload(wait=False), COME_BACK, nothing, phases.offload, files)


@pytest.mark.parametrize(
    "policy", ["lazy", *(pytest.param(each, marks=MORE) for each in ("eager", "random:0"))]
)
@pytest.mark.parametrize(
    ("name", "params", "grads"),
    [("resident", "save", "drop"), pytest.param("host", "rebuild", "save", marks=MORE)],
)
def test_copies_back_are_late(name: str, params: str, grads: str, policy: str) -> None:
    """In the middle of them: what got its memory without its bytes is not taken for present."""
    with late_streams(policy):
        job = Job(name, params, grads)
        phases = job.phases
        files = MOVING | {str(PACKAGE / "absence.py")}
        move = "Moves.back"
        sweep(job, lambda: phases.reload(wait=False), move, nothing, phases.offload, files)


@pytest.mark.parametrize("policy", ["random:5", "random:6"])
def test_staying_while_memory_leaves(policy: str) -> None:
    """What is dropped leaves at any time while the rest comes back."""
    with late_streams(policy):
        job = Job("host", "rebuild", "save")
        files = phases_files("moves.py", "rebuilding.py")
        sweep(job, lambda: leave_in_vain(job.phases), MOVE_BACK, nothing, files=files)


def test_pieces_that_have_no_copy_yet_stay_when_the_way_back_is_struck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A block of a region leaves piece by piece: the rest of it was not copied this time."""
    monkeypatch.setitem(FixedAddressRegion.__init__.__kwdefaults__, "chunk_bytes", 4096)
    model = nn.Linear(64, 64, bias=False)  # four pieces
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    phases = PhaseOffloader(model, optimizer, fixed_address=True)
    phases.offload()
    phases.reload()
    with torch.no_grad():
        model.weight.fill_(7.0)
    sent = []
    left, fetch_all = Mover._left, Mover._fetch_all

    def strike_out(self: Mover, *args: Any) -> None:
        left(self, *args)
        sent.append(args)
        if len(sent) == 2:
            raise KeyboardInterrupt("on the way out")

    def strike_back(self: Mover, *args: Any) -> None:
        monkeypatch.setattr(Mover, "_fetch_all", fetch_all)
        raise KeyboardInterrupt("on the way back")

    monkeypatch.setattr(Mover, "_left", strike_out)
    monkeypatch.setattr(Mover, "_fetch_all", strike_back)
    with pytest.raises(KeyboardInterrupt, match="on the way back"):
        phases.offload()
    assert len(sent) > 2  # what had not left by then has left since
    assert phases.is_away
    assert bool((model.state_dict()["weight"] == 7).all())
    phases.reload()
    assert bool((model.weight == 7).all())
    phases.close()


def struck_once(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, at: int = 1
) -> list[bool]:
    """Interrupt the return of a call; gives one entry per call."""
    original, calls = getattr(owner, name), list[bool]()

    def strike(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        calls.append(True)
        if len(calls) == at:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, name, strike)
    return calls


@pytest.mark.parametrize("at", [1, 2, 3])
def test_state_that_just_got_its_memory_is_copied_again(
    monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Of a wrapper alone, and of a region: nobody else gives up what the way back has begun."""
    job = Job("resident")
    optimizer: Any = job.optimizer
    region = FixedAddressRegion("kept", device=torch.device("cpu"), chunk_bytes=4096)
    tensors = [region.empty((2000,), dtype=torch.float32).fill_(i) for i in range(5)]
    optimizer.offload()
    region.pause()
    for owner in (StorageBlock, PageBlock):
        with monkeypatch.context() as patch:
            struck_once(patch, owner, "restore", at=at)
            with pytest.raises(KeyboardInterrupt):
                (optimizer.reload if owner is StorageBlock else region.resume)()
    optimizer.reload()
    region.resume()
    job.check_values()
    assert all(bool((tensor == i).all()) for i, tensor in enumerate(tensors))
    region.close()


def test_a_cycle_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job("plain")
    phases = job.phases
    for owner, name in (
        (phases._optimizer, "follow"),
        (phases, "_become_present"),
        (phases, "_has_returned"),
    ):
        before = phases.statistics().cycles
        phases.offload()
        with monkeypatch.context() as patch:
            struck_once(patch, owner, name)
            with pytest.raises(KeyboardInterrupt):
                phases.reload()
        phases.reload()
        assert phases.statistics().cycles == before + 1, name
        job.check_goes_on()


def test_what_ends_a_move_is_done_again_if_it_was_struck(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdp_offload.phases import offloader

    job = Job("plain")
    calls = struck_once(monkeypatch, offloader, "release_cached")
    with pytest.raises(KeyboardInterrupt):
        job.phases.offload()
    assert job.phases.is_away
    job.phases.offload()
    assert len(calls) == 2
    assert job.phases.statistics().offloaded["params"].n_bytes > 0
    job.check_goes_on()


@pytest.mark.parametrize("how", ["reload", "read"])
def test_rebuilding_may_be_struck(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """While it waits for the state: the optimizer has not failed by that."""
    job = Job("host", "rebuild")
    job.phases.offload()
    absence: Any = job.optimizer._absence  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        struck_once(patch, absence, "arrive")
        with pytest.raises(KeyboardInterrupt):
            job.phases.reload() if how == "reload" else job.model.state_dict()
    job.check_goes_on()


def test_shards_of_a_failed_optimizer_are_rebuilt() -> None:
    """Else there is no way back, and no load: the model's comes first."""
    job = Job("host", "rebuild")
    optimizer: Any = job.optimizer
    saved = copy.deepcopy((job.model.state_dict(), optimizer.state_dict()))
    job.phases.offload()
    optimizer._health._failure = ZeroDivisionError("in a lane")
    job.phases.reload()
    with pytest.raises(LaneError):
        optimizer.step()
    job.model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    job.check_goes_on()


def test_a_wait_that_was_struck_has_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job("resident")
    optimizer: Any = job.optimizer
    for call in (job.phases.offload, optimizer.synchronize, optimizer.state_dict):
        with monkeypatch.context() as patch:
            calls = struck_once(patch, optimizer._absence, "arrive")
            with pytest.raises(KeyboardInterrupt):
                call()
            assert len(calls) >= 2, "it waited on"
        assert not job.phases.is_away
    job.check_goes_on()


def test_a_failure_behind_an_interrupt_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job("resident")
    optimizer: Any = job.optimizer
    found = iter([KeyboardInterrupt(), ZeroDivisionError("in a lane")])

    def arrive() -> None:
        raise next(found)

    with monkeypatch.context() as patch:
        patch.setattr(optimizer._absence, "arrive", arrive)
        patch.setattr(optimizer, "_drain_quietly", lambda: None)
        with pytest.raises(LaneError, match="in a lane"):
            optimizer.synchronize()
    with pytest.raises(LaneError):
        optimizer.step()


def test_closing_fixed_addresses_goes_on_where_it_has_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fsdp_offload.moving import region

    model, optimizer = trained()
    phases = PhaseOffloader(model, optimizer, fixed_address=True)
    expected = copy.deepcopy(values(model, optimizer))
    renew, calls = region.renew, []

    def short(storage: torch.UntypedStorage) -> None:
        calls.append(storage)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("taken")
        renew(storage)

    monkeypatch.setattr(region, "renew", short)
    with pytest.raises(DeviceMemoryError, match=r"call close\(\) again"):
        phases.close()
    phases.close()
    tensors = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
    assert not any(is_tied(tensor.untyped_storage()) for tensor in tensors)
    assert phases.statistics().host_bytes == 0
    found = values(model, optimizer)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    phases.close()


class TestAway:
    def test_it_comes_back_when_leaving_was_struck(self, monkeypatch: pytest.MonkeyPatch) -> None:
        job = Job("plain")
        with monkeypatch.context() as patch:
            struck_once(patch, job.phases._gradients, "leave")
            with pytest.raises(KeyboardInterrupt), job.phases.away():
                raise AssertionError("the body runs")
        assert not job.phases.is_away
        job.check_goes_on()

    def test_an_inner_one_leaves_the_reload_to_the_outer_one(self) -> None:
        phases = Job("plain").phases
        with phases.away():
            with phases.away():
                assert phases.is_away
            assert phases.is_away
        assert not phases.is_away

    def test_the_body_may_close(self) -> None:
        job = Job("plain")
        with job.phases.away():
            job.phases.close()
        job.check_values()


def trained() -> tuple[Any, Optimizer]:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_method_that_has_just_been_replaced_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python delivers a signal as a call returns: before anybody has what it returns."""
    model, optimizer = trained()
    phases = PhaseOffloader(model, optimizer)
    make = Patch.__init__

    def strike(self: Patch, owner: Any, name: str, *args: Any) -> None:
        make(self, owner, name, *args)
        if owner is optimizer and name == "step":
            monkeypatch.setattr(Patch, "__init__", make)
            raise KeyboardInterrupt

    monkeypatch.setattr(Patch, "__init__", strike)
    with pytest.raises(KeyboardInterrupt):
        phases.offload()
    assert phases.is_away
    phases.reload()
    assert "step" not in vars(optimizer)
    optimizer.step()
    phases.close()


def test_graphs_are_good_again_whenever_they_were_spoiled(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    phases = PhaseOffloader(model, optimizer)
    x = torch.ones(1, 4, requires_grad=True)
    loss = model(x).sum()
    count = torch.autograd.graph.increment_version

    def strike(tensors: Any) -> None:
        count(tensors)
        monkeypatch.setattr(torch.autograd.graph, "increment_version", count)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.autograd.graph, "increment_version", strike)
    with pytest.raises(KeyboardInterrupt):
        phases.offload()
    assert phases.is_away
    phases.reload()
    loss.backward()
    assert x.grad is not None
    phases.close()
