"""Ctrl-C in a load's take-over, or in a save's commit, comes when that is done."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fsdp_offload import checkpoint
from fsdp_offload.checkpoint import files, folder, state
from fsdp_offload.checkpoint import planner as planner_module
from fsdp_offload.core.errors import LaneError
from tests.checkpoint.test_saving import Pair, layers, pair_of, step, values_of
from tests.helpers.compare import assert_same

pytestmark = pytest.mark.usefixtures("one_thread")


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


def test_an_interrupt_in_the_take_over_comes_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are the module's, state is not yet the optimizer's."""
    expected, loading = saved_and_other(tmp_path / "one")
    hand_over = state.hand_over

    def interrupting(*args: Any) -> None:
        interrupt()
        hand_over(*args)

    monkeypatch.setattr(planner_module, "hand_over", interrupting)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.load(tmp_path / "one", *loading)
    assert loading[1].param_groups[0]["lr"] == 0.25
    assert_same(values_of(loading), expected)
    step(loading)


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


@pytest.mark.parametrize("name", ["write_whole", "_install"])
def test_an_interrupted_commit_is_a_whole_one(tmp_path: Path, name: str) -> None:
    pair = pair_of(layers(6, 6))
    checkpoint.save(tmp_path / "one", *pair, extra={"turn": 1})
    real = getattr(folder, name)

    def interrupting(*args: Any) -> None:
        interrupt()
        real(*args)

    with mock.patch.object(folder, name, interrupting), pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path / "one", *pair, extra={"turn": 2}, overwrite=True)
    assert checkpoint.load(tmp_path / "one", *pair) == {"turn": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
