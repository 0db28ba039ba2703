"""Other threads, signal handlers and Ctrl-C, in the middle of an update: each update is whole."""

from __future__ import annotations

import copy
import functools
import importlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fsdp_offload import BusyError, ClosedError, HybridDeviceOptimizer, PhaseOffloader, checkpoint
from tests.fsdp import models
from tests.fsdp.models import Ranks
from tests.helpers.compare import assert_same
from tests.helpers.own_optimizers import Own
from tests.helpers.training import SMALL, Model, assert_explains, fill_gradients, train, values

Entry = Callable[[HybridDeviceOptimizer, nn.Module, Any, Path], object]

ENTRIES: dict[str, Entry] = {
    "step": lambda o, model, saved, path: o.step(),
    "state": lambda o, model, saved, path: o.state,
    "wrapped.state": lambda o, model, saved, path: o._wrapped.state,
    "state_dict": lambda o, model, saved, path: o.state_dict(),
    "load_state_dict": lambda o, model, saved, path: o.load_state_dict(saved),
    "clip_grad_norm_": lambda o, model, saved, path: o.clip_grad_norm_(1e-3),
    "zero_grad": lambda o, model, saved, path: o.zero_grad(),
    "statistics": lambda o, model, saved, path: o.statistics(),
    "synchronize": lambda o, model, saved, path: o.synchronize(),
    "save": lambda o, model, saved, path: checkpoint.save(path / "saved", model, o),
    "phases": lambda o, model, saved, path: PhaseOffloader(model, o).close(),
}


class Watched(Own):
    """Momentum; calls what it is given in the middle of its next update."""

    during: ClassVar[Callable[[], None] | None] = None

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        call, Watched.during = Watched.during, None
        if not state:
            state["momentum"] = torch.zeros_like(p)
        state["momentum"].mul_(0.9).add_(g)
        if call is not None:
            call()
        p.sub_(state["momentum"], alpha=group["lr"])


def made(*, elementwise: bool = True) -> tuple[Model, HybridDeviceOptimizer]:
    model = Model()
    inner = Watched(model.parameters())
    optimizer = HybridDeviceOptimizer(inner, model, elementwise=elementwise, transfer=SMALL)
    train(model, optimizer, range(2))
    return model, optimizer


def outcome(model: nn.Module, optimizer: HybridDeviceOptimizer) -> list[Any]:
    train(model, optimizer, range(3, 5))
    found = [values(model), copy.deepcopy(optimizer.state_dict())]
    optimizer.close()
    return found


@pytest.fixture
def in_handler() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Runs a call in a signal handler, at once."""
    calls: list[Callable[[], object]] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: calls.pop()())  # type: ignore[func-returns-value]

    def run(call: Callable[[], object]) -> None:
        calls.append(call)
        signal.raise_signal(signal.SIGUSR1)
        assert not calls

    yield run
    signal.signal(signal.SIGUSR1, before)


KINDS = pytest.mark.parametrize("elementwise", [True, False], ids=["offloaded", "own step"])


@KINDS
@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_another_thread_waits_for_the_end_of_the_step(
    name: str, elementwise: bool, tmp_path: Path
) -> None:
    found = []
    for is_thread in (False, True):
        model, optimizer = made(elementwise=elementwise)
        saved = copy.deepcopy(optimizer.state_dict())
        call = functools.partial(ENTRIES[name], optimizer, model, saved, tmp_path / f"{is_thread}")
        thread = threading.Thread(target=call)
        was_waiting: list[bool] = []

        def begin(thread: threading.Thread = thread, into: list[bool] = was_waiting) -> None:
            thread.start()
            time.sleep(0.05)
            into.append(thread.is_alive())

        if is_thread:
            Watched.during = begin
        train(model, optimizer, range(2, 3))
        thread.join() if is_thread else call()
        assert was_waiting == [True] * is_thread
        found.append(outcome(model, optimizer))
    assert_same(found[0], found[1])


@KINDS
@pytest.mark.parametrize("name", ENTRIES)
def test_a_signal_handler_in_the_middle_of_a_step_gets_a_typed_error(
    name: str, elementwise: bool, tmp_path: Path, in_handler: Any
) -> None:
    found = []
    for strikes in (False, True):
        model, optimizer = made(elementwise=elementwise)
        saved = copy.deepcopy(optimizer.state_dict())

        def enter(o: Any = optimizer, m: Any = model, s: Any = saved) -> None:
            with pytest.raises(BusyError) as caught:
                ENTRIES[name](o, m, s, tmp_path)
            assert_explains(caught.value, "in the middle of step()", "set a flag")

        if strikes:
            Watched.during = lambda: in_handler(enter)
        train(model, optimizer, range(2, 3))
        assert Watched.during is None
        found.append(outcome(model, optimizer))
        assert list(tmp_path.iterdir()) == []
    assert_same(found[0], found[1])


@KINDS
def test_ctrl_c_arrives_when_the_step_is_done(elementwise: bool) -> None:
    found = []
    for strikes in (False, True):
        model, optimizer = made(elementwise=elementwise)
        if strikes:
            Watched.during = lambda: signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                train(model, optimizer, range(2, 3))
        else:
            train(model, optimizer, range(2, 3))
        assert optimizer.statistics().steps == 3
        found.append(outcome(model, optimizer))
    assert_same(found[0], found[1])


def test_ctrl_c_ends_the_wait_for_another_thread() -> None:
    model, optimizer = made()
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with optimizer._updates.life.held("a test"):
            taken.set()
            done.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    fill_gradients(model, 2)
    threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    done.set()
    thread.join()
    assert optimizer.statistics().steps == 2
    optimizer.close()


@KINDS
def test_a_closure_and_hooks_may_use_the_optimizer(elementwise: bool) -> None:
    """A closure may wait for another thread that does: autograd has threads of its own."""
    model, optimizer = made(elementwise=elementwise)
    read: list[int] = []
    hooks = [
        optimizer.register_step_pre_hook(lambda *_: optimizer.zero_grad()),
        optimizer.register_step_post_hook(lambda *_: read.append(len(optimizer.state))),
        optimizer.register_state_dict_pre_hook(lambda o: read.append(len(o.state))),
        optimizer.register_load_state_dict_post_hook(lambda o: read.append(len(o.state))),
    ]

    def closure() -> float:
        thread = threading.Thread(target=lambda: read.append(len(optimizer.state)))
        thread.start()
        thread.join(10)
        fill_gradients(model, 2)
        return 1.0

    assert optimizer.step(closure) == 1.0
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert read == [2] * 4
    for hook in hooks:
        hook.remove()
    optimizer.close()


def test_a_fork_does_not_wait_for_a_thread_that_it_has_not() -> None:
    _, optimizer = made()
    with optimizer._updates.life.held("a test"):
        taken = threading.Thread(target=fork_and_use, args=(optimizer,))
        taken.start()
        taken.join()
    optimizer.close()


def fork_and_use(optimizer: HybridDeviceOptimizer) -> None:
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a wait for a lock would never end
        try:
            optimizer.zero_grad()
            optimizer.state_dict()
        except ClosedError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


# --------------------------------------------------------------------------- in backward


def read_in_backward() -> None:
    functions, found = importlib.import_module("torch.optim.adam"), []
    update = functions.adam
    for reads in (False, True):
        torch.manual_seed(0)
        model = models.shard(models.Toy(), models.flat_mesh(2))
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer = models.wrap(inner, model, overlap="backward", transfer=SMALL)
        threads: list[threading.Thread] = []

        def during(*given: Any, o: Any = optimizer, into: Any = threads, **more: Any) -> None:
            update(*given, **more)
            if len(into) < 3:
                with pytest.raises(BusyError):
                    o.statistics()
                into.append(threading.Thread(target=o.statistics))
                into[-1].start()
                time.sleep(0.02)
                models.check(into[-1].is_alive(), "it waits")

        with mock.patch.object(functions, "adam", during if reads else update):
            models.train((model, optimizer), range(3))
        for thread in threads:
            thread.join()
        models.check(len(threads) == 3 * reads, "updates ran")
        found.append([models.local(p).detach().clone() for p in model.parameters()])
        optimizer.close()
    models.check(all(map(torch.equal, *found)), "bits")


def test_updates_in_backward_are_whole_too(ranks: Ranks) -> None:
    ranks(2).run(read_in_backward)
