"""SIGINT while memory moves: it arrives when the move has ended, and what follows has the bits of
a job that was never interrupted."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_offload import FixedAddressRegion, HybridDeviceOptimizer, PhaseOffloader, swap
from fsdp_offload import leaving as wrapper_moves
from fsdp_offload.moving import PageBlock, StorageBlock
from fsdp_offload.phases import offloader

pytestmark = pytest.mark.usefixtures("one_thread")


def strike() -> None:
    signal.raise_signal(signal.SIGINT)


def wrapped(model: nn.Module) -> HybridDeviceOptimizer:
    adam = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    return HybridDeviceOptimizer(adam, model=model, offload_fraction=0.0)


def plain(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


class Job:
    """A model and its optimizer, and a twin that never moves."""

    def __init__(self, build: Callable[[nn.Module], Any]) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 8))
        self.twin = copy.deepcopy(self.model)
        self.optimizer, self.other = build(self.model), build(self.twin)
        self.steps = 0
        self.step()

    def step(self) -> None:
        self.steps += 1
        for model, optimizer in ((self.model, self.optimizer), (self.twin, self.other)):
            for index, parameter in enumerate(model.parameters()):
                parameter.grad = torch.full_like(parameter, (self.steps % 5 - 2) / (index + 1))
            optimizer.step()
            optimizer.zero_grad()

    def check(self) -> None:
        """It is all here, goes on, and has the twin's bits before and after."""
        for _ in range(2):
            assert_same(self.model.state_dict(), self.twin.state_dict())
            assert_same(self.optimizer.state_dict()["state"], self.other.state_dict()["state"])
            for shown, mine in zip(
                self.model.state_dict().values(), tensors_of(self.model), strict=True
            ):
                assert shown.data_ptr() == mine.data_ptr()
            self.step()


def tensors_of(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        yield from module.parameters(recurse=False)
        yield from module.buffers(recurse=False)


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def struck(patch: pytest.MonkeyPatch, owner: Any, name: str, *, at: int = 1) -> list[int]:
    """Send SIGINT from within a call of a function, which then goes on; gives one entry per
    call."""
    original, calls = getattr(owner, name), list[int]()

    def call(*args: Any, **options: Any) -> Any:
        calls.append(len(calls) + 1)
        if len(calls) == at:
            strike()
        return original(*args, **options)

    patch.setattr(owner, name, call)
    return calls


@pytest.mark.parametrize(
    ("owner", "name", "at"), [(StorageBlock, "release", 2), (wrapper_moves.state_io, "expose", 8)]
)
def test_an_optimizer_that_leaves(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int
) -> None:
    """Its memory is given up, or, for six parameters, it shows the state that took its place."""
    job = Job(wrapped)
    job.optimizer.state_dict()  # so that what was shown is looked at on the way back
    with monkeypatch.context() as patch:
        calls = struck(patch, owner, name, at=at)
        with pytest.raises(KeyboardInterrupt):
            job.optimizer.offload()
    assert len(calls) > at
    assert job.optimizer.is_away
    job.optimizer.reload()
    job.check()


def test_an_optimizer_that_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(wrapped)
    job.optimizer.offload()
    with monkeypatch.context() as patch:
        calls = struck(patch, StorageBlock, "restore", at=2)
        with pytest.raises(KeyboardInterrupt):
            job.optimizer.reload()
    assert len(calls) > 2
    assert not job.optimizer.is_away
    job.check()


@pytest.mark.parametrize("build", [plain, wrapped])
def test_an_offloader_that_leaves(
    monkeypatch: pytest.MonkeyPatch, build: Callable[[nn.Module], Any]
) -> None:
    job = Job(build)
    phases = PhaseOffloader(job.model, job.optimizer)
    with monkeypatch.context() as patch:
        struck(patch, StorageBlock, "release", at=2)
        with pytest.raises(KeyboardInterrupt):
            phases.offload()
    assert phases.is_away
    phases.reload()
    job.check()


@pytest.mark.parametrize("build", [plain, wrapped])
def test_an_offloader_that_comes_back(
    monkeypatch: pytest.MonkeyPatch, build: Callable[[nn.Module], Any]
) -> None:
    job = Job(build)
    phases = PhaseOffloader(job.model, job.optimizer)
    phases.offload()
    with monkeypatch.context() as patch:
        struck(patch, StorageBlock, "restore", at=2)
        with pytest.raises(KeyboardInterrupt):
            phases.reload()
    assert not phases.is_away
    assert phases.statistics().cycles == 1
    job.check()


def test_a_handle_that_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(plain)
    phases = PhaseOffloader(job.model, job.optimizer)
    handle = phases.offload(wait=False)
    with monkeypatch.context() as patch:
        struck(patch, offloader, "release_cached")
        with pytest.raises(KeyboardInterrupt):
            handle.wait()
    assert phases.statistics().offloaded["params"].n_bytes > 0
    phases.reload()
    job.check()


def test_away_comes_back_when_its_offload_was_struck(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(plain)
    phases = PhaseOffloader(job.model, job.optimizer)
    with monkeypatch.context() as patch:
        struck(patch, StorageBlock, "release")
        with pytest.raises(KeyboardInterrupt), phases.away():
            pytest.fail("the body runs")
    assert not phases.is_away
    job.check()


def test_a_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves, comes = (Job(plain) for _ in range(2))
    out, in_ = (PhaseOffloader(job.model, job.optimizer) for job in (leaves, comes))
    in_.offload()
    with monkeypatch.context() as patch:
        struck(patch, StorageBlock, "restore")
        with pytest.raises(KeyboardInterrupt):
            swap(out=out, in_=in_)
    assert out.is_away
    assert not in_.is_away
    comes.check()
    out.reload()
    leaves.check()


def test_construction_and_close(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(plain)
    phases = PhaseOffloader(job.model, job.optimizer)
    phases.offload()
    with monkeypatch.context() as patch:
        struck(patch, StorageBlock, "restore")
        with pytest.raises(KeyboardInterrupt):
            phases.close()
    assert phases.statistics().host_bytes == 0
    job.check()


@pytest.mark.parametrize("move", ["pause", "resume"])
def test_a_region(monkeypatch: pytest.MonkeyPatch, move: str) -> None:
    region = FixedAddressRegion("kept", device=torch.device("cpu"), chunk_bytes=4096)
    tensors = [region.empty((2000,), dtype=torch.float32).fill_(i) for i in range(5)]
    if move == "resume":
        region.pause()
    with monkeypatch.context() as patch:
        struck(patch, PageBlock, "release" if move == "pause" else "restore", at=3)
        with pytest.raises(KeyboardInterrupt):
            getattr(region, move)()
    assert region.is_paused == (move == "pause")
    region.resume()
    assert all(bool((tensor == i).all()) for i, tensor in enumerate(tensors))
    region.close()


class Striking(dict[str, Any]):
    """A module's table that sends SIGINT when it is asked for what it holds."""

    is_armed = False

    def get(self, *args: Any) -> Any:
        if self.is_armed:
            self.is_armed = False
            strike()
        return super().get(*args)


def test_a_state_dict_of_a_model_that_is_away() -> None:
    """The module has its own tensors again, and not those that it showed."""
    job = Job(plain)
    table = Striking(job.model[0]._parameters)
    job.model[0].__dict__["_parameters"] = table
    phases = PhaseOffloader(job.model, job.optimizer)
    phases.offload()
    table.is_armed = True
    with pytest.raises(KeyboardInterrupt):
        job.model.state_dict()
    assert not table.is_armed
    assert_same(job.model.state_dict(), job.twin.state_dict())
    phases.reload()
    job.check()


@pytest.mark.parametrize("call", ["state_dict", "load_state_dict"])
def test_state_of_a_plain_optimizer_that_is_away(call: str) -> None:
    job = Job(plain)
    phases = PhaseOffloader(job.model, job.optimizer)
    phases.offload()
    loaded = copy.deepcopy(job.other.state_dict())
    register = getattr(job.optimizer, f"register_{call}_pre_hook")
    hook = register(lambda *_: strike())
    with pytest.raises(KeyboardInterrupt):
        getattr(job.optimizer, call)(*([loaded] if call == "load_state_dict" else []))
    hook.remove()
    phases.reload()
    job.check()


def test_waiting_for_an_optimizer_does_not_fail_it(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(wrapped)
    with monkeypatch.context() as patch:
        struck(patch, job.optimizer, "_drain")
        with pytest.raises(KeyboardInterrupt):
            job.optimizer.synchronize()
    job.check()


@pytest.mark.parametrize("build", [plain, wrapped])
def test_at_random_times(build: Callable[[nn.Module], Any]) -> None:
    """By a timer, through cycles with reads in between."""
    job = Job(build)
    phases = PhaseOffloader(job.model, job.optimizer)
    generator = torch.Generator().manual_seed(0)
    before = signal.signal(signal.SIGALRM, lambda *_: strike())
    n_interrupts = 0
    try:
        for _ in range(40):
            seconds = 1e-4 + 4e-3 * float(torch.rand(1, generator=generator))
            try:
                signal.setitimer(signal.ITIMER_REAL, seconds)
                phases.offload()
                job.model.state_dict()
                phases.reload()
            except KeyboardInterrupt:
                n_interrupts += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            phases.reload()
            job.step()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert n_interrupts > 5
    job.check()
