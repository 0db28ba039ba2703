"""Fixtures and marking rules shared by all tests."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fsdp_offload.link import HostRange
    from tests.helpers.ranks import RankPool

GPU_TESTS = Path(__file__).parent / "gpu"
# Each rank holds memory of its own: three pools cover the usual 2 and 4 ranks, and 1 or 3.
MAX_POOLS = 3
WORKER_DEVICE_BYTES = 5 << 30

try:
    from hypothesis import settings
except ImportError:  # tests on a GPU machine do without
    pass
else:  # a deadline per example would fail on a busy machine
    settings.register_profile("no-deadline", deadline=None, max_examples=50)
    settings.load_profile("no-deadline")


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., RankPool]]:
    """``ranks(2).run(fn, ...)``: a pool of that size, kept for the whole session.

    Keywords are those of ``RankPool``. Only the pools used last stay alive.
    """
    from tests.helpers.ranks import RankPool  # imports torch, which tier T0 does without

    pools: OrderedDict[tuple[object, ...], RankPool] = OrderedDict()

    def pool_of(world_size: int, *, device_type: str = "cpu") -> RankPool:
        key = (world_size, device_type)
        if key not in pools:
            if len(pools) == MAX_POOLS:
                pools.popitem(last=False)[1].close()
            pools[key] = RankPool(world_size, device_type=device_type)
        pools.move_to_end(key)
        return pools[key]

    yield pool_of
    for pool in pools.values():
        pool.close()


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.long)])
def size(request: pytest.FixtureRequest) -> int:
    """How many ranks, where a second one shows little: on two cores it takes five times as long."""
    return int(request.param)


@pytest.fixture(params=[2, pytest.param(None, marks=pytest.mark.long)])
def of_each(request: pytest.FixtureRequest) -> int | None:
    """How many waits of each pair of streams to remove, counted from both ends, or all."""
    found: int | None = request.param
    return found


# The fixtures below import the package when they are used: tests of tier T0 do without torch.


@pytest.fixture(autouse=True)
def empty_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory that earlier tests still hold does not count against ``host_memory=``."""
    if module := sys.modules.get("fsdp_offload.link.host_pool"):  # tier T0 does without torch
        monkeypatch.setattr(module, "_open", weakref.WeakValueDictionary())


@pytest.fixture
def arenas(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[HostRange]]:
    """Every arena that is made in the test."""
    from fsdp_offload.link import HostRange, host_pool

    made: list[weakref.ref[HostRange]] = []

    class Noted(HostRange):
        def __init__(self, n_bytes: int, **settings: Any) -> None:
            made.append(weakref.ref(self))
            super().__init__(n_bytes, **settings)

    monkeypatch.setattr(host_pool, "HostRange", Noted)
    return made


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Of ``-n auto``, for GPU tests: a core each, and room for two contexts and what tests hold."""
    import torch

    cores = len(os.sched_getaffinity(0))
    if not torch.cuda.is_available():
        return cores
    device_bytes = torch.cuda.get_device_properties(0).total_memory
    return max(1, min(cores, device_bytes // WORKER_DEVICE_BYTES))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark by place and by fixture. Runs first: `-m` is applied to the marks that it adds."""
    for item in items:
        if item.path.is_relative_to(GPU_TESTS) and not item.get_closest_marker("gpus"):
            item.add_marker(pytest.mark.gpu)
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ranks)


def pytest_collection_finish() -> None:
    """What is imported stays: a collection need not look at it again (0.2 s each time)."""
    if "torch" in sys.modules and "PYTEST_XDIST_WORKER" in os.environ:
        import_module("torch._dynamo")  # by the first step of an optimizer, if not now
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine cannot run, and seed, before any fixture of the test is made."""
    if item.get_closest_marker("alone") and "PYTEST_XDIST_WORKER" in os.environ:
        pytest.fail('marked "alone": run it without -n, as `make test-gpu` does', pytrace=False)
    gpus = item.get_closest_marker("gpus")
    needed = (gpus.args[0] if gpus.args else 2) if gpus else 1
    if gpus or item.get_closest_marker("gpu"):
        from torch.cuda import device_count

        if device_count() < needed:
            pytest.skip(f"needs {needed} GPU(s), found {device_count()}")
    random.seed(0)
    # Tests of tier T0 import neither, and a hook must not do it for them.
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
        if not torch.cuda.is_available():
            # On busy cores, threads of a small kernel wait much longer for each other than they
            # work. Tests may set another number.
            torch.set_num_threads(1)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
