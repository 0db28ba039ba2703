"""Leaving and coming back, end to end with small tensors on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_offload.bench import phases, table, ways
from fsdp_offload.bench.model import Job
from fsdp_offload.errors import ConfigError
from fsdp_offload.storages import can_swap
from tests.helpers.ranks import RankPool

SMALL = ["--device", "cpu", "--params", "4e5", "--repeats", "2", "--cycles", "3"]
CPU = torch.device("cpu")
ROW: dict[str, Any] = {
    "name": "offloader", "status": "ok", "n_bytes": 1 << 30, "first_out_s": 0.02,
    "first_back_s": 0.021, "out_s": 0.0199, "back_s": 0.0201, "out_gbps": 53.96,
    "back_gbps": 53.42, "out_of_link": 0.9812, "back_of_link": 0.97, "first_out_of_link": 0.97,
    "first_back_of_link": 0.96, "worst_out_of_link": 0.95, "worst_back_of_link": 0.94,
    "freed_share": 0.9987, "host_over_payload": 1.00012, "pin_s": 0.031, "pin_s_per_gib": 0.031,
    "same_bits": True,
}  # fmt: skip
REPORT: dict[str, Any] = {
    "bench": "phases",
    "environment": {"gpu": "NVIDIA H200", "torch": "2.11.0"},
    "job": {
        "layers": 24, "dim": 2048, "vocabulary": 60000, "shards": "bf16", "ranks": 1, "repeats": 5
    },
    "link": {"h2d_gbps": 55.3, "d2h_gbps": 55.2, "h2d+d2h_gbps": 101.5},
    "rows": [ROW, {"name": "memory-saver", "status": "not available", "reason": "ImportError: no"}],
    "endurance": [
        {
            "name": "offloader", "status": "ok", "cycles": 200, "same_bits": False,
            "rss_bytes_first": 3 << 30, "rss_bytes_last": 3 << 30,
            "device_free_bytes_first": 1 << 30, "device_free_bytes_last": 1 << 29,
            "fragmented_bytes_first": 0, "fragmented_bytes_last": 2 << 20,
            "rss_bytes_closed": 1 << 30,
        }
    ],
}  # fmt: skip


def test_table() -> None:
    head, _, _, _, row, _, missing, _, _, _, endured = table.markdown_table(REPORT).splitlines()
    assert head == (
        "1 rank, 1.33 G parameters per rank, bf16 shards, fp32 state, NVIDIA H200, torch 2.11.0; "
        "later cycles: medians of 5. Link, GB/s: 55.3 / 55.2 / 101.5 (in / out / both)."
    )
    assert row == (
        "| offloader | 1.00 | 0.020 / 0.021 | 0.020 / 0.020 | 54.0 / 53.4 | 0.981 / 0.970 | 0.970 "
        "/ 0.960 | 0.950 / 0.940 | 0.999 | 1.0001 | 0.03 (0.031) | same |"
    )
    assert missing == "- memory-saver: not available: ImportError: no"
    assert endured == (
        "| offloader | 200 | 3072 / 3072 | 1024 / 512 | 0 / 2 | 1024 | differ |"
    )  # fmt: skip


def start_module(arguments: list[str]) -> None:
    """As users do; the output goes where this process's goes."""
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "fsdp_offload.bench.phases", *arguments], check=True
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("start", [phases.main, pytest.param(start_module, marks=pytest.mark.long)])
def test_one_run_on_the_cpu(
    start: Callable[[list[str]], object], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The run in this process stands for the module's in the default selection."""
    out = tmp_path / "out.json"
    start([*SMALL, "--json", str(out)])
    assert capfd.readouterr().out.startswith("offloader: GiB 0.00; first cycle, s")
    report = json.loads(out.read_text())
    rows = {row["name"]: row for row in report["rows"]}
    assert list(rows) == list(ways.all_ways())
    assert rows.pop("memory-saver")["reason"].startswith("ModuleNotFoundError")
    numel = table.parameters_of(report["job"])
    for name, row in rows.items():
        if name == "fixed" and not can_swap():  # CPU storages stay where they are in torch 2.11
            assert "torch 2.13 or later" in row["reason"]
            continue
        assert row["status"] == "ok", row
        assert row["same_bits"] is True
        assert row["n_bytes"] == numel * 10  # bf16, two moments in fp32; or these and a remainder
        assert len(row["all_out_s"]) == len(row["all_back_s"]) == 3
        assert min(row["out_gbps"], row["back_gbps"]) > 0
        if name in ("offloader", "fixed", "swap"):
            assert 1 <= row["host_over_payload"] < 1.02
    endured = {row["name"]: row for row in report["endurance"]}
    assert list(endured) == ["offloader", "fixed"]
    for row in endured.values():
        assert row["same_bits"] is True
        assert row["cycles"] == 3
        assert row["rss_bytes_last"] > 0


def leave_one(name: str) -> tuple[int, bool, bool]:
    """Bytes of this rank's shards, and whether they are the same before and after a change."""
    way = ways.all_ways()[name](Job(layers=1, **phases.SMALL), CPU)
    ways.fill(way.tensors, CPU)
    way.leave()
    way.come_back()
    same = ways.same_bits(way.tensors, CPU)
    way.tensors[-1].view(torch.uint8).view(-1)[-1] ^= 1
    found = sum(t.nbytes for t in way.tensors), same, ways.same_bits(way.tensors, CPU)
    way.close()
    return found


def test_two_ranks_and_a_changed_bit(ranks: Callable[..., RankPool]) -> None:
    job = Job(layers=1, **phases.SMALL)
    for name in ("offloader", "loop-pinned"):
        found = ranks(2).run(leave_one, name)
        assert sum(n for n, _, _ in found) == 10 * table.parameters_of(job.__dict__)
        assert [(same, changed) for _, same, changed in found] == [(True, False)] * 2


def test_a_way_that_cannot_be_made_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(job: Job, device: torch.device) -> ways.Way:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(
        phases, "all_ways", lambda: {"broken": broken, "loop": ways.all_ways()["loop"]}
    )
    report = phases.main([*SMALL, "--rows", "broken,loop", "--endure", "broken"])
    assert [row["status"] for row in report["rows"]] == ["not available", "ok"]
    assert report["rows"][0]["reason"] == "RuntimeError: out of luck"
    assert report["endurance"][0]["status"] == "not available"


@pytest.mark.parametrize(
    ("wrong", "reason"), [(["--rows", "fast"], "fast"), (["--cycles", "0"], "not positive")]
)
def test_options_are_checked(wrong: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        phases.parse([*SMALL, *wrong])
