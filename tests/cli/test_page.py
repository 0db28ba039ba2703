"""The page of the command line has every command and every check."""

from __future__ import annotations

import re
from pathlib import Path

from fsdp_offload.cli.main import COMMANDS

FOLDER = Path(__file__).parents[2]
PAGE = (FOLDER / "docs" / "command-line.md").read_text()


def test_every_command_has_its_heading_and_exit_code() -> None:
    parts = {text.partition("\n")[0]: text for text in PAGE.split("\n## ")[1:]}
    assert parts.keys() == COMMANDS.keys()
    for name, text in parts.items():
        assert f"fsdp-offload {name}" in text
        assert re.search("[Ee]xit code", text), name


def test_every_check_has_its_line() -> None:
    code = "".join(
        (FOLDER / "fsdp_offload" / "cli" / f"{name}.py").read_text()
        for name in ("doctor", "checks")
    )
    named = set(re.findall(r'Check\(\s*"([^"]+)"', code)) | set(re.findall(r' name = "(.+)"', code))
    assert len(named) == 9
    table = re.findall(r"^\| ([^|]+) \| [^|]+ \| [^|]+ \|$", PAGE, re.MULTILINE)
    lines = {name for row in table for name in row.split(", ")}
    assert named <= lines
