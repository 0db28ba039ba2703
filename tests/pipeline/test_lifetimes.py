"""What must not outlive its use: gradients of a step, memory of a dropped optimizer, threads."""

from __future__ import annotations

import gc
import os
import threading
import weakref

import pytest
import torch
from torch import nn

from fsdp_offload import HybridDeviceOptimizer, LaneError, TransferConfig
from fsdp_offload.pipeline import worker
from fsdp_offload.update.records import Work

SMALL = TransferConfig(bucket_bytes=4096, slots=2, host_threads=8)


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Work]]:
    """A reference to each step's work."""
    seen: list[weakref.ref[Work]] = []
    made = Work.__init__

    def noted(self: Work, *args: object, **kwargs: object) -> None:
        made(self, *args, **kwargs)  # type: ignore[arg-type]
        seen.append(weakref.ref(self))

    monkeypatch.setattr(Work, "__init__", noted)
    return seen


def make(
    lane: str, cls: type[torch.optim.Optimizer] = torch.optim.SGD
) -> tuple[nn.Module, HybridDeviceOptimizer]:
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(6)))
    inner = cls(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    return model, HybridDeviceOptimizer(inner, model=model, update_on=lane, transfer=SMALL)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


@pytest.mark.parametrize("lane", ["device", "host"])
def test_no_step_is_held_by_the_next(lane: str, works: list[weakref.ref[Work]]) -> None:
    model, optimizer = make(lane)
    for _ in range(12):
        step(model, optimizer)
    optimizer.synchronize()
    assert len(works) == 12
    assert [work() for work in works] == [None] * 12
    optimizer.close()


@pytest.mark.parametrize("lane", ["device", "host"])
def test_a_dropped_optimizer_frees_its_state_when_it_is_collected(lane: str) -> None:
    model, optimizer = make(lane, torch.optim.AdamW)
    step(model, optimizer)
    records = [weakref.ref(record) for record in optimizer._records]
    tensors = [weakref.ref(t) for r in optimizer._records for t in r.tensors.values()]
    del optimizer
    gc.collect()
    assert [t() for t in tensors if t() is not None] == []
    assert all(record() is None for record in records)


def test_a_model_loaded_in_a_forked_child_leaves_the_parents_memory_alone() -> None:
    torch.manual_seed(0)
    model = nn.Linear(40, 40).to(torch.bfloat16)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = HybridDeviceOptimizer(inner, model=model, transfer=SMALL)
    saved = {name: torch.zeros_like(v) for name, v in model.state_dict().items()}
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            model.load_state_dict(saved)
            os.write(write, b"loaded")
        finally:
            os._exit(0)
    os.close(write)
    assert os.waitpid(pid, 0)[1] == 0
    assert os.read(read, 16) == b"loaded"
    os.close(read)
    step(model, optimizer)
    optimizer.close()


def test_a_pool_whose_threads_cannot_start_leaves_none_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = set(threading.enumerate())
    start, started = threading.Thread.start, []

    def limited(self: threading.Thread) -> None:
        if self.name.startswith("fsdp_offload-host"):
            if len(started) == 2:
                raise RuntimeError("can't start new thread")
            started.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(RuntimeError, match="start new thread"):
        worker.ThreadPool(4, 1)
    for thread in started:
        thread.join()
    assert set(threading.enumerate()) <= before


def test_a_pool_thread_that_cannot_set_up_does_not_hang_the_constructor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(torch, "set_num_threads", refuse)
    pool = worker.ThreadPool(2, 1)
    with pytest.raises(LaneError, match="host lane"):
        pool.submit(lambda: None).wait(pool.alive)
    pool.stop()
