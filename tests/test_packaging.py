"""What an installation brings, and what the source distribution holds."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fsdp_offload.core.fsdp import TORCH_RUN

REPOSITORY = Path(__file__).parents[1]
OPTIONAL = {
    "transformers",  # examples/finetune.py says how to install it
    "triton",  # comes with torch's GPU builds
}


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


def imported(path: Path) -> set[str]:
    """Packages that a file imports, by their first name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module.split(".")[0])
    return found


def test_the_package_imports_its_dependencies_alone(settings: dict[str, Any]) -> None:
    required = {re.split(r"\W", name)[0] for name in settings["project"]["dependencies"]}
    files = [*(REPOSITORY / "fsdp_offload").rglob("*.py"), *(REPOSITORY / "examples").glob("*.py")]
    found = set[str]().union(*map(imported, files))
    others = found - set(sys.stdlib_module_names) - OPTIONAL - {"fsdp_offload"}
    assert others == required == {"torch", "tqdm"}


def test_the_range_of_torch_is_what_was_run(settings: dict[str, Any]) -> None:
    (torch,) = (d for d in settings["project"]["dependencies"] if d.startswith("torch"))
    major, minor = map(int, TORCH_RUN[-1].split("."))
    assert torch == f"torch>={TORCH_RUN[0]},<{major}.{minor + 1}"
    table = (REPOSITORY / "docs" / "compatibility.md").read_text()
    assert re.findall(r"^\| (\d\.\d+)", table, re.MULTILINE) == [*TORCH_RUN]


def test_the_source_distribution_holds_what_tests_read(settings: dict[str, Any]) -> None:
    patterns = settings["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert all(pattern.startswith("/") for pattern in patterns), "matches in every folder"
    assert all((REPOSITORY / pattern[1:]).exists() for pattern in patterns)
    needed = {"fsdp_offload", "tests", "docs", "examples", "checkpoints/golden"}
    needed |= {"constraints.txt", "Makefile", "README.md", "CHANGELOG.md", "LICENSE"}
    assert needed <= {pattern[1:] for pattern in patterns}
