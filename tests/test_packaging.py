"""What an installation brings, and what the source distribution holds."""

from __future__ import annotations

import ast
import re
import runpy
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fsdp_offload
from fsdp_offload.core.fsdp_names import TORCH_RUN

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
    trainers = set(settings["project"]["optional-dependencies"]["trainers"])
    found = set[str]().union(*map(imported, (f for f in files if "integrations" not in f.parts)))
    others = found - set(sys.stdlib_module_names) - OPTIONAL - {"fsdp_offload"}
    assert others == required == {"torch", "tqdm"}
    integrations = (REPOSITORY / "fsdp_offload" / "integrations").glob("*.py")
    assert set[str]().union(*map(imported, integrations)) - {"torch", "typing", "__future__"} <= (
        trainers
    )


def test_the_range_of_torch_is_what_was_run(settings: dict[str, Any]) -> None:
    (torch,) = (d for d in settings["project"]["dependencies"] if d.startswith("torch"))
    major, minor = map(int, TORCH_RUN[-1].split("."))
    assert torch == f"torch>={TORCH_RUN[0]},<{major}.{minor + 1}"
    table = (REPOSITORY / "docs" / "compatibility.md").read_text()
    rows = re.findall(r"^\| (\d\.\d+) \| CPU \| `\w+` \| \d+ \| (\d+) \|", table, re.MULTILINE)
    assert rows == [(version, "0") for version in TORCH_RUN]
    span = f"{TORCH_RUN[0]} to {TORCH_RUN[-1]}"
    for page in ("README.md", "CHANGELOG.md", "docs/index.md", "docs/limits.md"):
        assert f"torch {span}" in (REPOSITORY / page).read_text(), page
    pinned = re.search(r"^torch==(\d\.\d+)", (REPOSITORY / "constraints.txt").read_text(), re.M)
    assert pinned is not None
    assert pinned[1] in TORCH_RUN


def test_the_version_stands_in_one_place(settings: dict[str, Any]) -> None:
    """The changelog's first heading has the version that the next release will have."""
    assert "version" in settings["project"]["dynamic"]
    assert "version" not in settings["project"]
    path = settings["tool"]["hatch"]["version"]["path"]
    (line,) = re.findall(r'^__version__ = "(.+)"$', (REPOSITORY / path).read_text(), re.MULTILINE)
    assert line == fsdp_offload.__version__
    changes = (REPOSITORY / "CHANGELOG.md").read_text()
    newest = re.search(r"^## (.+)$", changes, re.MULTILINE)
    assert newest is not None
    assert line in newest[1].split()


def test_the_source_distribution_holds_what_tests_read(settings: dict[str, Any]) -> None:
    patterns = settings["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert all(pattern.startswith("/") for pattern in patterns), "matches in every folder"
    assert all((REPOSITORY / pattern[1:]).exists() for pattern in patterns)
    needed = {"fsdp_offload", "tests", "docs", "examples", "checkpoints/golden", ".github"}
    needed |= {"constraints.txt", "Makefile", "README.md", "CHANGELOG.md", "LICENSE"}
    assert needed <= {pattern[1:] for pattern in patterns}


def test_links_of_the_readme_work_on_a_package_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """What hatchling builds with is not installed here; ``make dist`` looks at what it has made."""
    interface = SimpleNamespace(MetadataHookInterface=object)
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", interface)
    hook = runpy.run_path(str(REPOSITORY / "docs/readme_for_index.py"))
    readme = (REPOSITORY / "README.md").read_text()
    link = re.compile(r"\]\((?!#)([^)\s]+)\)")
    count = len(link.findall(readme))
    assert count > 20
    there = hook["for_index"](readme, "https://example.org/us/fsdp_offload/")
    found = link.findall(there)
    assert len(found) == count
    for address in found:
        match = re.fullmatch(r"https://example\.org/us/fsdp_offload/(blob|raw)/main/(.+)", address)
        assert match is not None, address
        assert match[1] == "blob"
        assert (REPOSITORY / match[2].partition("#")[0]).exists()
    drawn = re.compile(r'(?:src|srcset)="([^"]+)"')
    files = drawn.findall(there)
    assert [file.partition("/raw/main/")[2] for file in files] == drawn.findall(readme)
    assert all(file.startswith("https://example.org/us/fsdp_offload/raw/main/") for file in files)
    nowhere = hook["for_index"](readme, None)
    assert "<picture" not in nowhere
    assert link.findall(nowhere) == []
    assert "Quickstart · fit a bigger model" in nowhere
    code = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
    assert code.findall(nowhere) == code.findall(there) == code.findall(readme)
