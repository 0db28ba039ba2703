"""Ctrl-C at any line of a save or a load: what cannot be left half-way is completed first."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fsdp_offload import checkpoint
from fsdp_offload.checkpoint import files
from fsdp_offload.core.config import TransferConfig
from fsdp_offload.core.devices import backend_for
from fsdp_offload.core.errors import LaneError
from fsdp_offload.link.host_pool import HostPool, held_bytes
from tests.checkpoint.test_saving import Pair, layers, pair_of, step, values_of
from tests.helpers.compare import assert_same


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def saved_and_other(path: Path) -> tuple[dict[str, torch.Tensor], Pair]:
    torch.manual_seed(0)
    saving = pair_of(layers(6, 6).bfloat16())
    saving[1].param_groups[0]["lr"] = 0.25
    checkpoint.save(path, *saving)
    expected = values_of(saving)
    torch.manual_seed(1)
    loading = pair_of(layers(6, 6).bfloat16())
    step(loading, -3.0)
    return expected, loading


def test_a_load_that_was_interrupted_while_it_read_has_failed(tmp_path: Path) -> None:
    expected, loading = saved_and_other(tmp_path / "one")
    read, parts = checkpoint.Reader.read_data, []

    def interrupting(self: Any, plan: Any, planner: Any) -> Any:
        done = read(self, plan, planner)
        parts.append(plan)
        if planner.state_dict.keys() & {"model.0.weight"}:
            interrupt()
        return done

    patched = mock.patch.object(checkpoint.Reader, "read_data", interrupting)
    with patched, pytest.raises(KeyboardInterrupt):
        checkpoint.load(tmp_path / "one", *loading)
    assert parts
    with pytest.raises(LaneError):
        loading[1].state_dict()
    checkpoint.load(tmp_path / "one", *loading)
    assert_same(values_of(loading), expected)


def test_an_interrupt_is_raised_when_no_thread_works_any_more() -> None:
    """Its caller closes the file that other threads write."""
    started, ended = threading.Event(), []

    def job() -> None:
        if threading.current_thread() is threading.main_thread():
            assert started.wait(60)
            return
        started.set()
        time.sleep(0.2)  # the main thread waits
        interrupt()
        time.sleep(0.2)
        ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        files.run_all([job, job], threads=2)
    assert ended


def test_no_interrupt_leaves_a_thread_that_works() -> None:
    def work() -> None:
        files.run_all([lambda: None] * 3, threads=2)

    errors, threads = [], {*threading.enumerate()}  # the errors keep what their frames have
    for at in range(1, lines(work, 0, "checkpoint/files.py")):
        try:
            lines(work, at, "checkpoint/files.py")
        except KeyboardInterrupt as error:
            errors.append(error)
        assert {*threading.enumerate()} <= threads, at
    assert len(errors) > 20


def lines(work: Callable[[], Any], at: int, where: str = "fsdp_offload/checkpoint") -> int:
    """Do ``work``, with a Ctrl-C at that line of these files; returns how many lines ran."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        if where not in frame.f_code.co_filename:
            return None
        if event == "line":
            count += 1
            if count == at:
                interrupt()
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return count


# Between open() and its `with`, Python's collector closes the file, and warns.
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("call", ["save", "async_save", "overwrite", "load"])
@pytest.mark.parametrize("moments", [12, pytest.param(400, marks=pytest.mark.long)])
def test_at_any_line_all_stays_usable(tmp_path: Path, call: str, moments: int) -> None:
    pair, run = pair_of(layers(6, 6)), tmp_path / "run" / "deep"
    step(pair)
    checkpoint.save(tmp_path / "good", *pair, extra={"turn": 0})
    expected, path = values_of(pair), run / "one"

    def work() -> None:
        if call == "load":
            checkpoint.load(tmp_path / "good", *pair)
        elif call == "async_save":
            checkpoint.async_save(path, *pair, extra={"turn": 1}).result()
        else:
            checkpoint.save(path, *pair, overwrite=call == "overwrite", extra={"turn": 1})

    def reset() -> None:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        if call == "overwrite":
            checkpoint.save(path, *pair, extra={"turn": 0})

    for _ in range(2):  # caches are filled
        reset()
        all_lines, interrupted = lines(work, 0), 0
    chance = random.Random(moments)
    descriptors, threads = len(os.listdir("/proc/self/fd")), {*threading.enumerate()}
    for at in sorted(chance.sample(range(1, all_lines), min(moments, all_lines - 1))):
        reset()
        with contextlib.suppress(KeyboardInterrupt):
            lines(work, at)
            interrupted -= 1
        interrupted += 1
        while others := {*threading.enumerate()} - threads:
            for thread in others:
                if thread.is_alive():  # else another one is starting it
                    thread.join(10)  # a save in the background may go on
                    assert not thread.is_alive(), at
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == descriptors, at
        if call == "load":
            checkpoint.load(tmp_path / "good", *pair)
        else:
            names = [each.name for each in run.iterdir()] if run.exists() else []
            assert names in ([], ["one"]), at
            assert names or not (tmp_path / "run").exists(), at
            assert names or call != "overwrite", at
            assert not names or checkpoint.load(path, *pair)["turn"] in (0, 1)
            checkpoint.save(path, *pair, overwrite=True)
        assert_same(values_of(pair), expected)
    assert interrupted > 0.5 * min(moments, all_lines - 1)


def test_no_interrupt_leaves_the_ledger_of_host_memory_locked() -> None:
    """Else all other threads would wait for it."""

    def work() -> None:
        pool = HostPool("a save", backend_for(torch.device("cpu")), TransferConfig(pin="never"))
        pool.take(4096)
        held_bytes()
        pool.close()

    for at in range(1, lines(work, 0, "link/host_pool.py")):
        with contextlib.suppress(KeyboardInterrupt):
            lines(work, at, "link/host_pool.py")
        other = threading.Thread(target=held_bytes, daemon=True)
        other.start()
        other.join(10)
        assert not other.is_alive(), at
