"""``bench`` hands all words on to the benchmark that they name."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp_offload import ConfigError
from fsdp_offload.bench import iteration, phases
from fsdp_offload.cli.main import main

SMALL = ["--device", "cpu", "--layers", "1", "--dim", "64", "--vocabulary", "128"]
SHORT = ["--tokens", "32", "--seq", "16", "--iterations", "1", "--warm-up", "1"]


@pytest.mark.parametrize(
    ("words", "module", "rest"),
    [
        (["--rows", "plain", "--json", "x"], "bench", ["--rows", "plain", "--json", "x"]),
        (["phases", "--cycles", "2"], "bench.phases", ["--cycles", "2"]),
        ([], "bench", []),
    ],
)
def test_words_are_passed_on(
    words: list[str], module: str, rest: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []

    def run_module(name: str, **options: Any) -> None:
        found.append((name, sys.argv[1:], options))

    monkeypatch.setattr(sys, "argv", ["fsdp-offload", "bench", *words])
    monkeypatch.setattr(runpy, "run_module", run_module)
    assert main(["bench", *words]) == 0
    assert found == [(f"fsdp_offload.{module}", rest, {"run_name": "__main__"})]


def test_an_iteration_and_a_mistake(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "fsdp_offload", "bench", *SMALL, *SHORT]
    words = ["--rows", "plain", "--json", str(tmp_path / "out.json")]
    done = subprocess.run([*command, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "| plain |" in done.stdout
    environment = json.loads((tmp_path / "out.json").read_text())["environment"]
    command_there = " -W ignore -m fsdp_offload bench --device cpu"
    assert command_there in environment["command"]
    assert environment["command"].endswith("--rows plain --json out.json")  # without its folder
    done = subprocess.run([*command, "--rows", "plane"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("fsdp-offload: ")
    assert "'plane' is no kind of row" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.filterwarnings("ignore")
def test_on_the_cpu_sizes_are_small(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of a GPU would take all of a workstation's memory."""
    iteration.main("--device cpu --rows plain --warm-up 1 --iterations 1".split())
    phases.main("--device cpu --rows offloader --cycles 2".split())
    assert "0.00 G parameters" in capsys.readouterr().out


def test_a_row_that_phases_have_not_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"row 'nope': it is not measured\. Remedy: use off"):
        phases.main(["--device", "cpu", "--rows", "nope"])
