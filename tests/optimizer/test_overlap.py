"""Gates, the iteration that begins in backward, and their errors, beside a played FSDP2."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fsdp_offload import (
    ConfigError,
    HybridDeviceOptimizer,
    LaneError,
    SpentGradientError,
    TransferConfig,
)
from fsdp_offload.core.devices import backend_for
from fsdp_offload.core.storage import is_held
from fsdp_offload.optimizer import overlap, ring, ring_bucket
from fsdp_offload.optimizer.host import HostBucket
from fsdp_offload.optimizer.overlap import Times
from fsdp_offload.optimizer.ring import Ring
from fsdp_offload.plan import residency
from fsdp_offload.update.params import Work
from tests.away import optimizer_alone
from tests.helpers.fake_fsdp import FakeFsdp
from tests.helpers.own_optimizers import Lion
from tests.helpers.simulator import StreamSimulator

CPU = torch.device("cpu")
SMALL = TransferConfig(bucket_bytes="4KiB", host_threads=1)
BOTH = pytest.mark.parametrize("overlap", ["forward", "backward"])


class Job:
    """A played model of four groups and its optimizer."""

    def __init__(
        self, overlap: str | None, backend: Any = None, lr: Any = 0.05, **how: Any
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        groups = [
            [nn.Parameter(torch.randn(n, generator=generator)) for n in numels]
            for numels in ((300, 64), (900,), (130, 500), (260,))
        ]
        self.parameters = [p for group in groups for p in group]
        self.played = FakeFsdp(backend or backend_for(CPU), groups)
        lr = lr.clone() if isinstance(lr, Tensor) else lr
        inner = torch.optim.AdamW(self.parameters, lr=lr)
        self.optimizer: Any = inner
        if overlap is not None:
            how = {"transfer": SMALL, **how}
            self.optimizer = self.played.wrap(inner, overlap=overlap, **how)

    def backward(self, step: int, **how: Any) -> None:
        self.played.forward(how.get("unused", ()))
        self.played.backward(step, **how)

    def train(self, steps: int, first: int = 0) -> None:
        for step in range(first, first + steps):
            self.backward(step)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def assert_like(self, plain: Job) -> None:
        state = self.optimizer.state
        for mine, theirs in zip(self.parameters, plain.parameters, strict=True):
            assert torch.equal(mine, theirs)
            for name, value in plain.optimizer.state[theirs].items():
                assert torch.equal(state[mine][name], value), name


# --------------------------------------------------------------------------- refused


@BOTH
@pytest.mark.parametrize("model", [None, nn.Linear(3, 3), [nn.Linear(3, 3)]], ids=str)
def test_without_an_fsdp2_module_there_is_nothing_to_hide_under(overlap: str, model: Any) -> None:
    parameters = [nn.Parameter(torch.ones(3))] if model is None else None
    module = model[0] if isinstance(model, list) else model
    inner = torch.optim.AdamW(parameters or module.parameters())
    with pytest.raises(ConfigError, match=r"shard\(model\)"):
        HybridDeviceOptimizer(inner, model=model, overlap=overlap)
    inner.step()  # it is as it was


@BOTH
@pytest.mark.parametrize("cls", [Lion, getattr(torch.optim, "Muon", torch.optim.Adafactor)])
def test_classes_that_cannot_be_updated_piece_by_piece_are_refused(overlap: str, cls: Any) -> None:
    matrix = nn.Parameter(torch.ones(8, 8))
    played = FakeFsdp(backend_for(CPU), [[matrix]])
    with pytest.raises(ConfigError, match=cls.__name__):
        played.wrap(cls([matrix]), overlap=overlap)
    assert played.groups[0]._watched == []


def test_what_would_split_an_iteration_is_refused_and_the_iteration_can_be_ended() -> None:
    plain, job = Job(None), Job("backward")
    for each in (plain, job):
        each.train(2)
        each.backward(2)
    optimizer = job.optimizer
    extra = nn.Parameter(torch.ones(5))
    uses: list[Callable[[], Any]] = [
        optimizer.zero_grad,
        optimizer.state_dict,
        optimizer.resync,
        lambda: optimizer.state,
        lambda: optimizer.add_param_group({"params": [extra]}),
        lambda: job.backward(3),
    ]
    for use in uses:
        with pytest.raises(SpentGradientError, match="Remedy"):
            use()
    assert len(optimizer.param_groups) == 1
    plain.optimizer.step()
    optimizer.step()
    job.assert_like(plain)


def put(group: dict[str, Any], name: str, value: Any) -> None:
    """In place where it is a tensor."""
    group[name] = group[name].fill_(value) if isinstance(group[name], Tensor) else value


@pytest.mark.parametrize("lr", [0.05, torch.tensor(0.05)], ids=["float", "tensor"])
def test_hyper_parameters_changed_before_the_step_are_refused_until_restored(lr: Any) -> None:
    plain, job = Job(None, lr=lr), Job("backward", lr=lr)
    for each in (plain, job):
        each.train(2)
        each.backward(2)
    group = job.optimizer.param_groups[0]
    for name, value in (("lr", 0.5), ("betas", (0.5, 0.6)), ("weight_decay", 1.0)):
        before = copy.deepcopy(group[name])
        put(group, name, value)
        with pytest.raises(ConfigError, match=f"'{name}'"):
            job.optimizer.step()
        put(group, name, before)
    job.optimizer.step()
    plain.optimizer.step()
    job.assert_like(plain)


def test_a_failure_in_backward_makes_the_optimizer_failed_until_a_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, job = Job(None), Job("backward")
    plain.train(3)
    job.train(3)
    weights = [p.detach().clone() for p in job.parameters]
    saved = copy.deepcopy(job.optimizer.state_dict())

    def fail(*_: object) -> None:
        raise ZeroDivisionError("in a bucket")

    with monkeypatch.context() as patch:
        patch.setattr(ring_bucket.BucketUpdate, "run", fail)
        with pytest.raises(LaneError, match=r"backward\(\) failed.*in a bucket"):
            job.backward(3)
    uses = [job.optimizer.step, job.optimizer.zero_grad, job.optimizer.state_dict]
    for use in [*uses, lambda: job.backward(3)]:
        with pytest.raises(LaneError, match="load a checkpoint"):
            use()
    for parameter, value in zip(job.parameters, weights, strict=True):
        parameter.data.copy_(value)
    job.optimizer.load_state_dict(saved)
    job.optimizer.zero_grad()
    job.train(3, first=3)
    plain.train(3, first=3)
    job.assert_like(plain)


@pytest.mark.parametrize("found_in", ["forward()", "step before"])
def test_a_failure_on_a_host_thread_surfaces_in_the_next_forward_or_step(
    found_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job("forward", update_on="host")
    job.train(2)
    job.backward(2)

    def fail(*_: object) -> None:
        raise ZeroDivisionError("on a host thread")

    monkeypatch.setattr(HostBucket, "step", fail)
    job.optimizer.step()
    job.optimizer.zero_grad()
    finds = job.played.forward if found_in == "forward()" else job.optimizer.step
    with pytest.raises(LaneError, match="on a host thread") as caught:
        finds()
    assert found_in in caught.value.what
    with pytest.raises(LaneError, match="load a checkpoint"):
        job.optimizer.step()


# --------------------------------------------------------------------------- buckets that stay


def sent_bytes(job: Job) -> tuple[int, int]:
    """What the last iteration moved, each way."""
    figures = job.optimizer.statistics()
    return int(figures.moved_bytes), int(figures.fetched_bytes)


@pytest.mark.parametrize(("memory", "staying"), [(0, 0), (13_000, 1), (100_000, 5)])
def test_buckets_that_stay_are_sent_once(
    memory: int, staying: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency, "LEAST_SLOTS", 2)
    job, plain = Job("backward", device_memory=f"{memory}B"), Job(None)
    engine = job.optimizer._updates.reserved.engine
    sizes = [each.bucket.state_bytes for each in engine.ring.buckets]
    stay_bytes = sum(sizes[index] for index in engine.ring.staying)
    assert (len(sizes), len(engine.ring.staying)) == (5, staying)
    job.train(1)
    assert sent_bytes(job) == (sum(sizes) - stay_bytes, sum(sizes))
    job.train(3, first=1)
    plain.train(4)
    assert sent_bytes(job) == (sum(sizes) - stay_bytes,) * 2
    job.assert_like(plain)
    job.train(1, first=4)
    plain.train(1, first=4)
    job.assert_like(plain)


@pytest.mark.parametrize(("mode", "staying"), [("forward", {0, 2}), ("backward", {0, 1})])
def test_which_buckets_stay(mode: str, staying: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """In "forward" not those at the head of the model alone: see plan/residency.py."""
    monkeypatch.setattr(residency, "LEAST_SLOTS", 2)
    job = Job(mode, device_memory=0)
    engine = job.optimizer._updates.reserved.engine
    largest = max(engine.ring.sizes.values())
    engine.ring.fit(4 * largest, 0)
    assert engine.ring.staying.keys() == staying


def test_which_buckets_stay_if_weights_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward is ahead by a fifth of them: that share of the first buckets stays."""
    monkeypatch.setattr(residency, "LEAST_SLOTS", 1)
    monkeypatch.setattr(residency, "MOST_SLOT_BYTES", 1)
    ring = Job("backward", device_memory=0).optimizer._updates.reserved.engine.ring
    ring.find_weights = lambda: mock.Mock(ahead_share=0.2)
    ring.fit(4 * max(ring.sizes.values()), 0)
    assert ring.staying.keys() == {0, 1, 3}


def test_state_that_was_read_before_is_up_to_date_after_synchronize() -> None:
    """All buckets stay, so no step writes host memory."""
    job, plain = Job("backward"), Job(None)
    for each in (job, plain):
        each.train(1)
    held = [job.optimizer.state[p]["exp_avg"] for p in job.parameters]
    for each in (job, plain):
        each.train(2, first=1)
    job.optimizer.synchronize()
    for mine, theirs in zip(held, plain.parameters, strict=True):
        assert torch.equal(mine, plain.optimizer.state[theirs]["exp_avg"])


def test_another_backward_while_the_state_is_offloaded_is_told_of_the_gradients() -> None:
    job = Job("backward")
    job.backward(0)
    job.optimizer.step()
    with optimizer_alone(job.optimizer).away(), pytest.raises(SpentGradientError):
        job.backward(1)


@pytest.mark.parametrize("write", ["state", "load", "offload", "failure"])
def test_what_stays_is_sent_again_where_state_may_have_changed(write: str) -> None:
    job, plain = Job("backward"), Job(None)
    for each in (job, plain):
        each.train(2)
    moved, fetched = sent_bytes(job)
    assert moved == fetched
    if write == "state":
        for each in (job, plain):
            for parameter in each.parameters:
                each.optimizer.state[parameter]["exp_avg"].mul_(0.5)
    elif write == "offload":
        with optimizer_alone(job.optimizer).away():
            pass
    else:
        saved = copy.deepcopy(plain.optimizer.state_dict())
        if write == "failure":
            with mock.patch.object(Ring, "_step", side_effect=RuntimeError("broken")):
                with pytest.raises(LaneError):
                    job.train(1, first=2)
            for mine, theirs in zip(job.parameters, plain.parameters, strict=True):
                mine.data.copy_(theirs.data)
                mine.grad = None
        else:
            for state in saved["state"].values():
                state["exp_avg_sq"].mul_(2)
            plain.optimizer.load_state_dict(copy.deepcopy(saved))
        job.optimizer.load_state_dict(saved)
    for each in (job, plain):
        each.train(1, first=2)
    assert sent_bytes(job)[1] > fetched
    for each in (job, plain):
        each.train(1, first=3)
    assert sent_bytes(job) == (moved, fetched)
    job.assert_like(plain)


# --------------------------------------------------------------------------- lifetimes


@pytest.mark.parametrize("ahead", [0, ring.AHEAD])
def test_gradients_are_dropped_group_by_group_as_the_forward_comes_by(
    ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else all of them would take memory beside the forward's last activations."""
    monkeypatch.setattr(ring, "AHEAD", ahead)
    monkeypatch.setattr(overlap, "REORDER_AFTER", frozenset[int]())  # a new order enqueues all
    job = Job("forward", device_memory=0)
    for step in range(3):
        job.backward(step, unused=(1,) if step == 1 else ())
        groups = [
            [p.grad.untyped_storage() for p in group.parameters if p.grad is not None]
            for group in job.played.groups
        ]
        job.optimizer.step()
        job.optimizer.zero_grad()
        assert [all(map(is_held, each)) for each in groups] == [True] * 4
        for unused in ((2, 3), (2,)):
            job.played.forward(unused=unused)
            found = [any(map(is_held, each)) for each in groups]
            assert found == [group in unused for group in range(4)]
        job.played.forward()
        assert not any(map(is_held, itertools.chain(*groups)))


@BOTH
def test_what_the_snapshot_holds_lives_until_every_gate_is_open(overlap: str) -> None:
    """A learning rate on the device is read by updates that are still to run, and its memory is
    the compute stream's."""
    job = Job(overlap, lr=torch.tensor(0.05))
    job.backward(0)
    job.optimizer.step()
    job.optimizer.zero_grad()
    gates = job.optimizer._updates.overlap.gates
    read: Work = gates[0].on_open[0].func.__self__
    assert isinstance(read.snapshot.groups[0]["lr"], Tensor)
    held = weakref.ref(read.snapshot.groups[0]["lr"])
    del read
    job.played.forward(unused=(3,))
    assert held() is not None
    job.played.forward()
    assert all(not gate.on_open for gate in gates)


@BOTH
def test_no_iteration_is_held_by_the_next(overlap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    works: list[weakref.ref[Work]] = []
    made = Work.__init__

    def noted(self: Work, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        works.append(weakref.ref(self))

    monkeypatch.setattr(Work, "__init__", noted)
    job = Job(overlap)
    job.train(5)
    job.played.forward()  # opens the gates
    assert [work() for work in works] == [None] * 5


@BOTH
@pytest.mark.parametrize("in_the_middle", [False, True])
def test_a_dropped_optimizer_frees_its_state_and_its_hooks(
    overlap: str, in_the_middle: bool
) -> None:
    job = Job(overlap)
    job.train(2)
    if in_the_middle:
        job.backward(2)
    tensors = [
        weakref.ref(t) for r in job.optimizer._updates.reserved.params for t in r.tensors.values()
    ]
    overlapping = weakref.ref(job.optimizer._updates.overlap)
    job.optimizer = None
    gc.collect()
    assert [t() for t in tensors if t() is not None] == []
    assert overlapping() is None
    assert all(group._watched == [] for group in job.played.groups)


# --------------------------------------------------------------------------- order and waits


@BOTH
def test_a_gather_that_began_before_the_updates_does_not_open_the_gate(overlap: str) -> None:
    """``unshard(async_op=True)``, ``step()``, and only then the wait for the gather."""
    with StreamSimulator("lazy") as simulator:
        job = Job(overlap, simulator)
        job.backward(0)
        group = job.played.groups[1]
        group.tell("before_gather", job.played.gather)
        job.optimizer.step()
        group.tell("after_gather")
        simulator.reset_counters()
        group.tell("before_gather", job.played.gather)

        assert simulator.wait_log == [("gather", "update")]
        group.tell("after_gather")
        simulator.reset_counters()
        group.tell("before_gather", job.played.gather)
        assert simulator.wait_log == []
        simulator.synchronize()


def test_updates_in_backward_wait_for_what_the_caller_enqueued_before_the_first() -> None:
    """Clones of learning rates on the device are made there."""
    with StreamSimulator("lazy") as simulator:
        job = Job("backward", simulator)
        simulator.reset_counters()
        group = job.played.groups[3]
        job.played.forward()
        group.used = [torch.ones(260)]
        job.parameters[-1].grad = torch.ones(260)
        reduced = job.played.reduce.record()
        simulator.reset_counters()
        group.tell("after_reduce", reduced, job.played.reduce)

        assert simulator.wait_log[0] == ("update", "current")
        simulator.synchronize()


@BOTH
def test_the_order_follows_the_measured_times_with_the_same_bits(
    overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "MARK_EVERY", 1)
    seen: list[list[float]] = []
    original = Ring.reorder

    def reorder(self: Ring, ready_ms: Any, ranks: Any, ms_per_byte: float) -> None:
        seen.append(list(ready_ms))
        original(self, ready_ms, ranks, ms_per_byte)

    monkeypatch.setattr(Ring, "reorder", reorder)
    plain = Job(None)
    plain.train(8)
    job = Job(overlap)
    job.train(8)
    lane = job.optimizer._updates.reserved.engine.ring
    assert sorted(lane.order) == list(range(len(lane.buckets)))
    job.assert_like(plain)

    assert len(seen) == 3, "once when it was built, and after steps 3 and 6"
    if overlap == "backward":
        for ready in seen[1:]:
            assert min(ready) == 0.0
            assert ready[0] == max(ready), "the gradients of the first group come last"


class At:
    """A timed event."""

    def __init__(self, ms: float, *, reached: bool = True) -> None:
        self.ms, self.reached = ms, reached

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        return None

    def elapsed_time(self, end: Any) -> float:
        return float(end.ms - self.ms)


def test_times_count_from_the_first_gradients_and_what_has_none_comes_last() -> None:
    times = Times([At(9.0), None, At(4.0), At(6.5)], [(10, At(0.0)), (30, At(4.0))])

    assert times.are_known()
    assert times.ready_ms() == [5.0, 5.0, 0.0, 2.5]
    assert times.ms_per_byte() == 0.2
    assert not Times([At(1.0, reached=False)], []).are_known()
    assert not Times([], [(1, At(1.0, reached=False))]).are_known()
    assert Times([None, None], []).ready_ms() == []
    assert Times([], [(1, At(0.0))]).ms_per_byte() is None
    assert Times([], [(1, At(0.0)), (1, At(3.0))]).ms_per_byte() is None
