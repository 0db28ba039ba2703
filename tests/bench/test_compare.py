"""The comparison end to end, with a tiny model on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_offload.bench import compare
from fsdp_offload.bench.machine import process_group
from fsdp_offload.bench.model import Job, sharded_model
from fsdp_offload.bench.timing import LEAD_IN
from fsdp_offload.errors import ConfigError
from fsdp_offload.groups import find_groups
from tests.helpers.ranks import RankPool

TINY = ["--device", "cpu", "--layers", "1", "--dim", "64", "--vocabulary", "128", "--tokens", "32"]
SHORT = ["--seq", "16", "--iterations", "3", "--warm-up", "1"]


def start_module(arguments: list[str]) -> None:
    """As users do; the output goes where this process's goes."""
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "fsdp_offload.bench", *arguments], check=True
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "start", [compare.main, pytest.param(start_module, marks=pytest.mark.long)]
)
def test_one_run_on_the_cpu(
    start: Callable[[list[str]], object], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The run in this process stands for the module's in the default selection."""
    rows = "plain,torchao,step,step-torchclip,step-host,cpuoffload"
    files = ["--json", str(tmp_path / "out.json"), "--trace", str(tmp_path / "trace.json")]
    more = ["--rows", rows, "--shards", "fp32", "--slots", "3", "--bucket-bytes", "8KiB"]
    start([*TINY, *SHORT, *files, *more])
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("plain: iteration")
    assert lines[-1].startswith("- torchao: not available: ModuleNotFoundError")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["traceEvents"]
    check_report(json.loads((tmp_path / "out.json").read_text()))


def check_report(report: dict[str, Any]) -> None:
    rows = {row["name"]: row for row in report["rows"]}
    assert rows.pop("torchao")["status"] == "not available"
    assert {row["status"] for row in rows.values()} == {"ok"}
    for row in rows.values():
        parts = row["forward_ms"] + row["backward_ms"] + row["update_ms"]
        assert 0 < row["iteration_ms_min"] <= row["iteration_ms"] <= row["iteration_ms_max"]
        assert parts == pytest.approx(row["iteration_ms"], rel=0.9)
        assert len(row["losses"]) == 4 + LEAD_IN
        assert row["losses"][0] > row["losses"][-1] - 1
    plain, step, host = rows["plain"], rows["step"], rows["step-host"]
    assert step["same_losses"] is True  # fp32 shards: the numbers of the plain optimizer
    assert "same_losses" not in rows["cpuoffload"]
    assert step["exposed_ms"] == pytest.approx(step["iteration_ms"] - plain["iteration_ms"])
    numel = 128 * 64 + 12 * 64 * 64 + 3 * 64
    assert plain["device_state_bytes"] == pytest.approx(8 * numel, rel=0.01)
    assert step["device_state_bytes"] == 0
    assert step["moved_bytes"] == pytest.approx(8 * numel, rel=0.01)
    assert step["buckets"] > 2
    assert "host" in host["lanes"]


def test_no_row_begins_after_the_time_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare.Run, "_row", lambda self, case: pytest.fail("began"))
    report = compare.main([*TINY, *SHORT, "--rows", "plain", "--time-limit-s", "-1"])
    assert report["rows"][0]["status"] == "not run"
    assert "plain: not run: the time limit was reached" in capsys.readouterr().out


def test_a_row_that_fails_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(compare, "measure", broken)
    report = compare.main([*TINY, *SHORT, "--rows", "plain,step"])
    assert [row["status"] for row in report["rows"]] == ["failed", "failed"]
    assert report["rows"][1]["reason"] == "RuntimeError: out of luck"


@pytest.mark.parametrize(("together", "groups"), [(1, 6), (2, 4), (5, 2), (9, 2)])
def test_blocks_share_a_group(together: int, groups: int) -> None:
    sizes = ["--layers", "5", "--blocks-per-group", str(together)]
    options = compare.parse([*TINY, *SHORT, *sizes, "--rows", "plain"])
    with process_group("cpu", with_host=True, timeout_s=60) as device:
        job = compare.Run(options, device).job
        model = sharded_model(job, device)
        assert len(find_groups([model])) == groups
        assert model.job.blocks_per_group == together


def rows_of_this_rank() -> list[dict[str, Any]]:
    options = compare.parse([*TINY, *SHORT, "--rows", "plain,step", "--shards", "fp32"])
    rows: list[dict[str, Any]] = compare.Run(options, torch.device("cpu")).all()["rows"]
    return rows


@pytest.mark.long
def test_two_ranks_agree(ranks: Callable[..., RankPool]) -> None:
    first, second = ranks(2).run(rows_of_this_rank)
    for mine, other in zip(first, second, strict=True):
        assert mine["status"] == "ok"
        assert mine["iteration_ms"] == other["iteration_ms"]
    assert first[1]["same_losses"] is True


def test_a_name_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="step comes twice"):
        compare.main([*TINY, "--rows", "step,step"])


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"tokens": 100}, "not a multiple"),
        ({"layers": 0}, "not positive"),
        ({"blocks_per_group": 0}, "not positive"),
        ({"dim": 1100}, "heads"),
        ({"shards": "fp8"}, "unknown choice"),
    ],
)
def test_job_is_checked(wrong: dict[str, int], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Job(**wrong)  # type: ignore[arg-type]
