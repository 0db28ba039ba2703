"""The benchmark on a GPU, with a small model: every mode runs and the losses are the plain ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROWS = "plain,plain-clip,step,forward,backward,forward-clip,forward-torchclip,backward-host"
SMALL = ["--layers=4", "--dim=512", "--vocabulary=1000", "--tokens=2048", "--seq=512"]


@pytest.mark.alone  # rates of the link are compared
def test_modes_give_the_plain_losses(tmp_path: Path) -> None:
    """In a process of its own: cuBLAS reads its setting when it is first used."""
    out, trace = tmp_path / "out.json", tmp_path / "trace.json"
    words = [f"--rows={ROWS}", "--shards=fp32", "--deterministic", "--bucket-bytes=4MiB"]
    files = [f"--json={out}", f"--trace={trace}", "--trace-row=backward"]
    command = [sys.executable, "-m", "fsdp_offload.bench", *SMALL, *words, *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    rows: dict[str, dict[str, Any]] = {row["name"]: row for row in report["rows"]}
    reasons = {name: row.get("reason") for name, row in rows.items()}
    assert set(reasons.values()) == {None}, reasons
    for name in ("step", "forward", "backward", "forward-clip", "forward-torchclip"):
        assert rows[name]["same_losses"], (name, rows[name]["losses"])
        assert rows[name]["bound_ms"] > 0
    assert report["link"]["h2d+d2h_gbps"] > report["link"]["h2d_gbps"] > 1
    assert json.loads(trace.read_text())["traceEvents"]
