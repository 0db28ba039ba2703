"""Hardware queues: asked for at import, and told about where they are few."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fsdp_offload import queues


@pytest.fixture(autouse=True)
def untold() -> Iterator[None]:
    queues.warn_of_few_queues.cache_clear()
    yield
    queues.warn_of_few_queues.cache_clear()


def after_import(**exported: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != queues.VARIABLE} | exported
    shown = f"os.environ.get({queues.VARIABLE!r}), 'torch' in sys.modules"
    program = f"import os, sys, fsdp_offload; print({shown})"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_importing_the_package_asks_for_all_queues_and_leaves_a_users_choice() -> None:
    assert after_import() == "32 False"
    assert after_import(**{queues.VARIABLE: "1"}) == "1 False"


@pytest.mark.parametrize(("initialized", "found"), [(False, "32"), (True, None)])
def test_nothing_is_set_once_cuda_has_read_it(
    monkeypatch: pytest.MonkeyPatch, *, initialized: bool, found: str | None
) -> None:
    monkeypatch.delenv(queues.VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    queues.ask_for_queues()
    assert os.environ.get(queues.VARIABLE) == found


@pytest.mark.parametrize(
    ("value", "told"), [("32", ""), (None, "not set"), ("8", "is 8"), ("many", "is many")]
)
def test_few_queues_are_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: Any, value: str | None, told: str
) -> None:
    if value is None:
        monkeypatch.delenv(queues.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(queues.VARIABLE, value)
    with caplog.at_level(logging.WARNING, "fsdp_offload"):
        queues.warn_of_few_queues()
        queues.warn_of_few_queues()
    assert len(caplog.messages) == bool(told)
    assert told in "".join(caplog.messages)
