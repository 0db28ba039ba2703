"""``bench`` as users start it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdp_offload.bench import iteration
from fsdp_offload.cli.main import main, parser
from tests.helpers.scripts import Launch

SMALL = ["--device", "cpu", "--layers", "1", "--dim", "64", "--vocabulary", "128"]
SHORT = ["--tokens", "32", "--seq", "16", "--iterations", "1", "--warm-up", "1"]


STARTED = """
import sys
from fsdp_offload.cli.main import main
sys.orig_argv = ["python", "-W", "ignore", "-m", "fsdp_offload", *sys.argv[1:]]
sys.exit(main(sys.argv[1:]))
"""


def test_an_iteration_and_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", *SMALL, *SHORT]
    words = ["--rows", "plain", "--json", tmp_path / "out.json"]
    assert "| plain |" in Launch(STARTED, *command, *words).output()
    environment = json.loads((tmp_path / "out.json").read_text())["environment"]
    command_there = " -W ignore -m fsdp_offload bench --device cpu"
    assert command_there in environment["command"]
    assert environment["command"].endswith("--rows plain --json out.json")  # without its folder
    assert main([*command, "--rows", "plane"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("fsdp-offload: ")
    assert "'plane' is not a kind of row" in said
    assert said.count("\n") == 1


def test_cuda_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", "--device", "cuda"]) == 2
    line = "--device cuda: torch sees no CUDA device. Remedy: --device cpu\n"
    assert capsys.readouterr().err == f"fsdp-offload: {line}"


@pytest.mark.filterwarnings("ignore")
def test_on_the_cpu_sizes_are_small(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of a GPU would take all of a workstation's memory."""
    words = "bench --device cpu --rows plain --warm-up 1 --iterations 1"
    iteration.run_rows(parser().parse_args(words.split()))
    said = capsys.readouterr().out
    assert ", 0.459M parameters, " in said
    assert said.endswith("\nA run on the CPU shows that rows work, not their speed.\n")
