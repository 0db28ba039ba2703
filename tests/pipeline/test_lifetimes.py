"""What must not outlive its use: gradients of a step, memory of a dropped optimizer, threads."""

from __future__ import annotations

import threading

import pytest
import torch

from fsdp_offload import LaneError
from fsdp_offload.pipeline import worker


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
