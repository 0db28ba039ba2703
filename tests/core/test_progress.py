"""Bars of what takes long: on a terminal, from rank 0; nothing else is ever printed."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import tqdm
from torch import nn

from fsdp_offload import HybridDeviceOptimizer, PhaseOffloader, checkpoint
from fsdp_offload.bench import iteration
from fsdp_offload.cli.main import parser
from fsdp_offload.core import progress as module
from fsdp_offload.core.progress import Progress

SIZES = "--device cpu --layers 1 --dim 64 --vocabulary 64 --tokens 8 --seq 8".split()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All that were made; nothing is too short to be shown."""
    made: list[Any] = []

    class Bar(tqdm.tqdm):  # type: ignore[type-arg]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options, mininterval=0, file=module.sys.stderr)
            made.append(self)

    monkeypatch.setattr(tqdm, "tqdm", Bar)
    monkeypatch.setattr(module, "_DELAY_S", 0)
    monkeypatch.setattr(module, "sys", SimpleNamespace(stderr=Terminal()))
    return made


def save(folder: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = HybridDeviceOptimizer(torch.optim.AdamW(model.parameters()), model)
    checkpoint.save(folder / "one", model, optimizer)
    checkpoint.load(folder / "one", model, optimizer)
    checkpoint.export_safetensors(folder / "one", folder / "out")
    checkpoint.async_save(folder / "two", model, optimizer).result()
    with PhaseOffloader(model, optimizer).away():
        pass


def bench(folder: Path) -> None:
    words = ["bench", *SIZES, "--rows", "plain", "--warm-up", "2", "--iterations", "1"]
    iteration.run_rows(parser().parse_args(words))


PINNING = "allocating host memory"
LONG: dict[Callable[[Path], None], set[str]] = {
    save: {PINNING, "saving", "loading", "exporting"},
    bench: {"warming up"},
}


@pytest.mark.filterwarnings("ignore")  # the benchmarks draw DTensors on the CPU
@pytest.mark.parametrize("work", LONG, ids=lambda work: work.__name__)
def test_what_takes_long_has_a_bar_that_comes_to_its_end(
    work: Callable[[Path], None], bars: list[Any], tmp_path: Path
) -> None:
    work(tmp_path)
    assert {bar.desc.removesuffix(": ") for bar in bars} == LONG[work]
    assert all(bar.n == pytest.approx(bar.total) for bar in bars)
    # `async_save` writes on a thread, beside the job's own lines.
    assert work is not save or sum("saving" in bar.desc for bar in bars) == 1


@pytest.mark.parametrize("why", ["no terminal", "another rank", "no stderr"])
def test_nothing_is_shown_where_nobody_looks(
    why: str, bars: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "another rank":
        monkeypatch.setattr(module, "is_rank_0", lambda: False)
    else:
        monkeypatch.setattr(module.sys, "stderr", io.StringIO() if why == "no terminal" else None)
    with Progress(5, "work") as bar:
        bar.describe("more")
        bar.advance(5)
    assert bars == []


def test_a_bar_shows_bytes_and_leaves_no_trace(bars: list[Any]) -> None:
    with Progress(3 << 20, "work") as bar:
        bar.advance(1 << 20)
    shown = module.sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "work:  33%" in shown
    assert "1.00M/3.00M" in shown
    assert shown.rsplit("\r", 2)[1].strip() == ""


def test_what_is_done_soon_shows_nothing(bars: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DELAY_S", 2)
    with Progress(5, "work") as bar:
        bar.advance(5)
    assert "work" not in module.sys.stderr.getvalue()  # type: ignore[attr-defined]
