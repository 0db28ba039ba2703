"""The accuracy run: its arithmetic, its text, and one tiny run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_offload.bench import accuracy, text
from fsdp_offload.bench.accuracy import Training
from fsdp_offload.errors import ConfigError

TINY = ["--device=cpu", "--steps=6", "--layers=1", "--dim=64", "--batch=2", "--seq=16"]


def run(precision: str, seed: int, final: float) -> dict[str, Any]:
    curve = {"steps": [1, 2], "validation": [5.0, final]}
    return {"precision": precision, "seed": seed, "host_bytes": 1000, **curve}


REPORT = {
    "environment": {"torch": "2.11.0"},
    "training": {"layers": 6, "dim": 256, "batch": 32, "seq": 256, "steps": 2000},
    "runs": [run("fp32", 0, 1.5), run("fp32", 1, 1.7), run("int8", 1, 1.8)],
    "failed": [{"precision": "int8", "seed": 0, "reason": "no luck"}],
}


def test_summary_compares_the_same_seeds() -> None:
    lines = accuracy.summary(REPORT).splitlines()
    assert lines[4] == "| fp32 | 1.6000 | 1.5000 | 1.7000 |  | 1,000 |"
    assert lines[5] == "| int8 | 1.8000 | 1.8000 | 1.8000 | +0.1000 | 1,000 |"
    assert lines[2].count("|") == lines[3].count("|") == lines[4].count("|")
    assert lines[-1] == "- int8, seed 0: no luck"


def test_learning_rate_rises_and_falls() -> None:
    training = Training(steps=100)
    factors = [training.factor(step) for step in range(100)]
    assert factors[0] == pytest.approx(0.2)
    assert factors[4] == factors[5] == pytest.approx(1.0)
    assert factors[5:] == sorted(factors[5:], reverse=True)
    assert 0.1 <= factors[-1] < 0.11


@pytest.mark.parametrize("wrong", [{"precision": "fp8"}, {"steps": 0}])
def test_training_is_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Training(**wrong)


def test_text_and_its_windows() -> None:
    data = text.standard_library(1 << 16)
    assert len(data) == 1 << 16
    learned, held_out = text.split(data)
    assert torch.equal(torch.cat((learned, held_out)), data)
    inputs, targets = text.windows(data, torch.tensor([0, 7]), 5)
    assert inputs[1].tolist() == data[7:12].tolist()
    assert targets[1].tolist() == data[8:13].tolist()
    starts = text.random_starts(data, 3, 4, 5, seed=1)
    assert starts.shape == (3, 4)
    assert torch.equal(starts, text.random_starts(data, 3, 4, 5, seed=1))
    assert not torch.equal(starts, text.random_starts(data, 3, 4, 5, seed=2))
    ends = text.even_starts(data, 3, 5)
    assert (ends[0], ends[-1] + 5 + 1) == (0, len(data))


def test_one_run(tmp_path: Path) -> None:
    result = tmp_path / "one.json"
    one = [*TINY, "--evaluate-every=4", "--precisions=fp32", "--seeds=3", f"--one={result}"]
    accuracy.main(one)
    found = json.loads(result.read_text())
    assert (found["precision"], found["seed"], found["steps"]) == ("fp32", 3, [4, 6])
    assert 4 < found["validation"][0] < 6
    assert len(found["train"]) == 2
    accuracy.main(one)
    again = json.loads(result.read_text())
    assert again["validation"] == found["validation"]


@pytest.mark.long
def test_all_runs_are_processes(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = ["--precisions=fp32", "--seeds=0,1", "--jobs=2", f"--json={out}"]
    command = [sys.executable, "-m", "fsdp_offload.bench.accuracy", *TINY, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert [run["seed"] for run in report["runs"]] == [0, 1]
    assert report["failed"] == []
    assert report["environment"]["command"].startswith("python -m fsdp_offload.bench.accuracy ")
    late = subprocess.run(
        [*command, "--time-limit-s=0"], capture_output=True, text=True, check=False
    )
    assert "- fp32, seed 1: not done when the time limit was reached" in late.stdout
