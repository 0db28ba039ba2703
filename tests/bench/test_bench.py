"""The benchmarks end to end, with tiny models on the CPU."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_offload.bench import iteration
from fsdp_offload.bench.model import Job, synthetic_batches
from fsdp_offload.bench.rows import Case
from fsdp_offload.cli.arguments import DEFAULT_ROWS
from fsdp_offload.cli.main import parser
from fsdp_offload.core.errors import ConfigError
from tests.helpers.ranks import RankPool

TINY = ["--device", "cpu", "--layers", "1", "--dim", "64", "--vocabulary", "128", "--tokens", "32"]
SHORT = ["--seq", "16", "--iterations", "3", "--warm-up", "1"]
FIGURES = Path(__file__).parents[2] / "docs" / "benchmarks"
NUMEL = 128 * 64 + 12 * 64 * 64 + 3 * 64


def bench(words: list[str]) -> dict[str, Any]:
    """What ``fsdp-offload bench`` reports."""
    return iteration.run_rows(parser().parse_args(["bench", *words]))


@pytest.mark.filterwarnings("ignore")
def test_iterations(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    rows = "plain,torchao,step-b8KiB-torchclip,backward-int8,step-host,step-f0,step-all-d0"
    rows += ",cpuoffload,compute"
    bench([*TINY, *SHORT, "--json", str(out), "--rows", rows, "--shards", "fp32"])
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("plain: iteration")
    assert lines[-2].startswith("- torchao: not available: ModuleNotFoundError")
    found = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    del found["torchao"]
    for row in found.values():
        assert row["status"] == "ok", row
        parts = row["forward_ms"] + row["backward_ms"] + row["update_ms"]
        assert 0 < parts == pytest.approx(row["iteration_ms"], rel=0.9)
        assert len(row["losses"]) == 4 + iteration.LEAD_IN
    plain, step = found["plain"], found["step-b8KiB-torchclip"]
    assert step["moved_bytes"] == pytest.approx(8 * NUMEL, rel=0.01)
    assert found["backward-int8"]["moved_bytes"] < 3 * NUMEL
    assert "host" in found["step-host"]["lanes"]
    assert found["step-f0"]["lanes"] == {"resident": 8}
    for exact in ("step-f0", "step-all-d0"):  # fp32 shards: the same bits
        assert found[exact]["losses"] == plain["losses"]


def test_every_overlap_accumulates_micro_batches() -> None:
    rows = "plain,step,forward,backward,backward-all-d0"
    words = [*TINY, *SHORT, "--micro-batches", "2", "--shards", "fp32", "--rows", rows]
    plain, *ours = bench(words)["rows"]
    for row in ours:
        assert row["status"] == "ok", row["reason"]
        assert row["losses"] == plain["losses"]  # the same bits


def test_a_row_is_compared_with_plain_that_clips_if_it_does() -> None:
    def row(kind: str, clip: str, ms: float) -> dict[str, Any]:
        return {"kind": kind, "clip": clip, "status": "ok", "iteration_ms": ms}

    rows = [row("plain", "torch", 4.0), row("step", "ours", 6.0), row("backward", "none", 6.0)]
    assert iteration.derived(rows[1], rows) == {"exposed_ms": 2.0, "of_on_device": 1.5}
    assert iteration.derived(rows[2], rows) == {}
    rows.append(row("plain", "none", 3.0))
    assert iteration.derived(rows[2], rows) == {"exposed_ms": 3.0, "of_on_device": 2.0}


def test_a_row_that_fails_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(iteration, "measure", broken)
    report = bench([*TINY, *SHORT, "--rows", "plain,step"])
    assert [row["status"] for row in report["rows"]] == ["failed", "failed"]
    assert report["rows"][1]["reason"] == "RuntimeError: out of luck"


def rows_of_this_rank() -> list[dict[str, Any]]:
    options = parser().parse_args(["bench", *TINY, *SHORT, "--shards", "fp32"])
    job = Job.of(options)
    batches = synthetic_batches(job, torch.device("cpu"))
    return [
        iteration.run_row(Case.parse(name), job, batches, options) for name in ("plain", "step")
    ]


@pytest.mark.long
def test_two_ranks_agree(ranks: Callable[..., RankPool]) -> None:
    first, second = ranks(2).run(rows_of_this_rank)
    for mine, other in zip(first, second, strict=True):
        assert mine["status"] == "ok"
        assert mine["iteration_ms"] == other["iteration_ms"]


def test_checkpointed_blocks_give_the_same_losses() -> None:
    found = []
    for flags in ([], ["--checkpointed"]):
        report = bench([*TINY, *SHORT, "--rows", "default-d0-torchclip", *flags])
        found.append(report["rows"][0]["losses"])
        assert report["job"]["checkpointed"] is bool(flags)
    assert found[0] == found[1]


def test_words_of_a_name() -> None:
    assert [Case.parse(name).name for name in DEFAULT_ROWS.split(",")] == DEFAULT_ROWS.split(",")
    case = Case.parse("forward-clip-bf16-d4GiB-b64MiB-f0.5-again")
    assert (case.kind, case.clip) == ("forward", "ours")
    assert case.options == {
        "moments": torch.bfloat16, "device_memory": f"{4 << 30}B",
        "bucket_bytes": f"{64 << 20}B", "offload_fraction": 0.5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("backwards", "'backwards' is not a kind of row"),
        ("step-fp8", "the word 'fp8' is unknown"),
        ("step-dmuch", "the word 'dmuch' is unknown"),
        ("plain-bf16", "'plain' rows take only torchclip, again"),
        ("torchao-torchclip", "'torchao' rows take only again"),
        ("cpuoffload-clip", "'cpuoffload' rows take only torchclip, again"),
    ],
)
def test_a_wrong_name_is_refused(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        bench([*TINY, "--rows", name])
    kinds, words = re.findall(r"(?:kinds|words): ([^;]+)", caught.value.remedy)
    assert len(str(caught.value).split()) <= 40
    for kind in kinds.split(", "):  # the remedy is true
        assert Case.parse(kind).kind == kind
    assert Case.parse("-".join(["step", *words.split(", ")])).options


def test_a_job_is_checked() -> None:
    for wrong in ({"tokens": 100}, {"dim": 1100}):
        with pytest.raises(ConfigError, match="a multiple of seq"):
            Job(**wrong)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
def test_the_study_of_phases() -> None:
    study = runpy.run_path(str(FIGURES / "phases.py"))
    sizes = ["--params", "4e5", "--dim", "128", "--vocabulary", "512"]
    report = study["main"](["--device", "cpu", *sizes, "--cycles", "3"])
    assert [row["name"] for row in report["rows"]] == list(study["ROWS"])
    for row in report["rows"]:
        if row["name"] == "fixed" and row["status"] != "ok":
            assert "torch 2.13 or later" in row["reason"]
            continue
        assert row["same_bits"] is True
        assert row["same_addresses"] or row["name"] != "fixed"
        assert row["gib"] * (1 << 30) == pytest.approx(10 * report["params"])
        assert ("host_over_payload" in row) == (row["name"] != "loop")
        assert 1 <= row.get("host_over_payload", 1) < 1.02


@pytest.mark.filterwarnings("ignore")
def test_the_study_of_checkpoints(tmp_path: Path) -> None:
    main = runpy.run_path(str(FIGURES / "checkpoint.py"))["main"]
    report = main([str(tmp_path), "--device", "cpu", "--layers", "1", "--repeats", "1"])
    assert len(report["rows"]) == 8
    assert all(row["s"] > 0 for row in report["rows"])
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore")
def test_the_study_of_larger_models(tmp_path: Path) -> None:
    """It writes the weights once, and trains alike from what it finds."""
    main = runpy.run_path(str(FIGURES / "larger.py"))["main"]
    command = [str(tmp_path), "--device=cpu", "--device-memory=0", "--warm-up=0", "--iterations=2"]
    first, again = (main(command)["rows"][0] for _ in range(2))
    assert first["losses"] == again["losses"]
    assert first["losses"][-1] < first["losses"][0]
    # State of 10 bytes and a weight of 2; gradients have another 2.
    assert first["host_gib"] * 2**30 >= 14 * Job(2, 128, 512).params
    assert first["process_peak_gib"] > first["host_gib"]


@pytest.mark.parametrize("shape", ["unequal", "experts", "lora"])
def test_the_study_of_other_shapes(shape: str) -> None:
    main = runpy.run_path(str(FIGURES / "shapes.py"))["main"]
    rows = ["--rows", "step-f0,forward-all-d0", "--shards", "fp32", "--checkpointed"]
    report = main([shape, *TINY, *SHORT, *rows])
    plain, away = report["rows"]
    assert away["losses"] == plain["losses"]
    assert len(set(away["losses"])) > 1
    assert report["params"] != NUMEL


@pytest.mark.long
def test_as_users_start_it() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "fsdp_offload.bench", *TINY, *SHORT]
    done = subprocess.run([*command, "--rows", "plain"], capture_output=True, text=True, check=True)
    assert "| plain |" in done.stdout
