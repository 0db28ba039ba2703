"""What must not outlive its use: gradients of a step, memory of a dropped optimizer, threads."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from torch import nn

from fsdp_offload import HybridDeviceOptimizer, LaneError, TransferConfig
from fsdp_offload.pipeline import worker

SMALL = TransferConfig(bucket_bytes=4096, host_threads=8)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


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
