"""Markdown from reports."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fsdp_offload.bench import table
from fsdp_offload.bench.machine import VARIABLES, environment
from fsdp_offload.bench.model import Job, gpt_shapes, layers_for
from fsdp_offload.errors import ConfigError

REPORT: dict[str, Any] = {
    "environment": {"gpu": "NVIDIA H200", "torch": "2.11.0", "commit": "abc1234"},
    "job": {
        "layers": 24, "dim": 2048, "vocabulary": 60000, "tokens": 8192, "shards": "bf16",
        "ranks": 1, "iterations": 10,
    },
    "link": {"h2d_gbps": 55.3, "d2h_gbps": 55.2, "h2d+d2h_gbps": 101.5},
    "rows": [
        {"name": "plain", "status": "ok", "iteration_ms": 147.04, "loss": 11.0},
        {
            "name": "backward", "status": "ok", "iteration_ms": 280.04, "of_bound": 1.0567,
            "device_peak_bytes": 101 << 30, "predicted_peak_bytes": 100 << 30,
            "device_allocations": 0, "rss_growth_bytes": 3 << 20, "loss": 11.5, "same_losses": True,
        },
        {"name": "torchao", "status": "not available", "reason": "ImportError: none"},
    ],
}  # fmt: skip


def test_markdown_table() -> None:
    text = table.markdown_table(REPORT)
    head, _, names, rule, *rows = text.splitlines()
    assert head == (
        "1 rank, 1.33 G parameters, bf16 shards, 8192 tokens per rank, NVIDIA H200, torch 2.11.0, "
        "commit abc1234; medians of 10 iterations. Link, GB/s: 55.3 / 55.2 / 101.5 (in / out / "
        "both)."
    )
    assert names.count("|") == rule.count("|") == rows[0].count("|")
    assert "GB/s" not in names  # nobody has a figure there
    assert rows[0] == "| plain | 147.0 |  |  |  | 11.0000 |"
    assert rows[1] == "| backward | 280.0 | 1.057 | 101.00 (+1.0 %) | 0 / 3 | 11.5000 = |"
    assert rows[-1] == "- torchao: not available: ImportError: none"


def test_blocks_that_share_a_group_are_told() -> None:
    job = REPORT["job"] | {"blocks_per_group": 3}
    head, *_ = table.markdown_table({**REPORT, "job": job}).splitlines()
    assert ", 8192 tokens per rank, 3 blocks per group, NVIDIA" in head


def test_variables_that_change_times_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, *(n for n in os.environ if n.startswith("NCCL_"))):
        monkeypatch.delenv(name, raising=False)
    assert "variables" not in environment("cpu")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "2")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("NCCL_TOPO_FILE", "/etc/topology.xml")
    found = environment("cpu")
    assert found["variables"] == {"CUDA_DEVICE_MAX_CONNECTIONS": "2", "NCCL_ALGO": "Ring"}
    head, *_ = table.markdown_table({**REPORT, "environment": found}).splitlines()
    assert ", CUDA_DEVICE_MAX_CONNECTIONS=2, NCCL_ALGO=Ring; medians" in head


def test_line_of_a_row_that_could_not_be_built() -> None:
    line = table.line_of(REPORT["rows"][2])
    assert line == "torchao: not available: ImportError: none"


def test_page_is_filled_again_and_again(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps(REPORT))
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- bench: x.json -->\nold\n<!-- bench end -->\nafter\n")
    table.main([str(page)])
    once = page.read_text()
    assert "old" not in once
    assert once.startswith("before\n<!-- bench: x.json -->\n1 rank, ")
    assert once.endswith("ImportError: none\n<!-- bench end -->\nafter\n")
    table.main([str(page)])
    assert page.read_text() == once


def test_page_without_a_place(tmp_path: Path) -> None:
    (page := tmp_path / "page.md").write_text("text\n")
    with pytest.raises(ConfigError, match="no place for a table"):
        table.filled(page)


def test_sizes_of_the_jobs() -> None:
    shapes = gpt_shapes(24)
    numel = sum(s[0] * (s[1] if len(s) > 1 else 1) for s in shapes)
    assert numel == table.parameters_of(Job().__dict__) == 1_330_939_904
    for dim, layers in ((2048, 60), (3200, 24)):
        assert layers_for(3.14e9, dim, 60000) == layers
        job = Job(layers=layers, dim=dim)
        assert table.parameters_of(job.__dict__) == pytest.approx(3.14e9, rel=0.001)


def test_tables_in_the_repository_are_up_to_date() -> None:
    root = Path(__file__).parents[2]
    for page in (root / "README.md", *(root / "docs").rglob("*.md")):
        if "\n<!-- bench: " in page.read_text():
            assert page.read_text() == table.filled(page), f"bench table {page.name} makes it anew"
