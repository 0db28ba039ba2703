"""Links in the documentation lead somewhere, and so do the pages and files that text names."""

from __future__ import annotations

import re
import runpy
import sys
from collections import Counter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
FOLDERS = (".github", "docs", "examples")
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
PAGE_IN_CODE = re.compile(r"\bdocs/[\w/.-]+\.(?:md|json)\b")


def pages() -> list[Path]:
    """Everything in Markdown that a reader may start from."""
    found = [*REPOSITORY.glob("*.md"), REPOSITORY / "checkpoints" / "README.md"]
    return found + [path for name in FOLDERS for path in (REPOSITORY / name).rglob("*.md")]


def text_of(page: Path) -> str:
    """Without fenced code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    found: set[str] = set()
    seen: Counter[str] = Counter()
    for heading in re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", LINK.sub(r"\1", heading).lower())
        anchor = words.strip().replace(" ", "-")
        found.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return found


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    broken = []
    for page in pages():
        for _, link in LINK.findall(re.sub(r"`[^`\n]*`", "", text_of(page))):
            if re.match(r"\w+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{page.relative_to(REPOSITORY)}: {link}")
    assert not broken


def test_pages_that_code_names_exist() -> None:
    named = {
        (str(source.relative_to(REPOSITORY)), page)
        for folder in ("fsdp_offload", "tests", "examples")
        for source in (REPOSITORY / folder).rglob("*.py")
        for page in PAGE_IN_CODE.findall(source.read_text())
    }
    assert not [(source, page) for source, page in named if not (REPOSITORY / page).exists()]


def test_files_that_pages_name_exist() -> None:
    named = {
        (str(page.relative_to(REPOSITORY)), path)
        for page in pages()
        if page.name != "CHANGELOG.md"
        for path in re.findall(r"`((?:tests|examples|fsdp_offload)/[\w/]+\.py)`", text_of(page))
    }
    assert len(named) > 50
    assert not [(page, path) for page, path in named if not (REPOSITORY / path).exists()]


def test_readers_find_every_page() -> None:
    """In the navigation of the site, which `make docs` builds, or linked from "How it works"."""
    listed = re.findall(r"([\w/.-]+\.md)$", (REPOSITORY / "mkdocs.yml").read_text(), re.MULTILINE)
    outside = {"changes.md", "contributing.md", "examples/README.md", "/readme.md"}
    outside.add("internals/checkpoint-format.md")
    docs = REPOSITORY / "docs"
    found = {str(page.relative_to(docs)) for page in docs.rglob("*.md")}
    internals = {page for page in found if page.startswith("internals/")}
    links = LINK.findall((docs / "how-it-works.md").read_text())
    assert internals <= {link.partition("#")[0] for _, link in links}
    assert found - internals == set(listed) - outside
    assert len(listed) == len(set(listed))
    assert len([page for page in listed if not page.startswith("benchmarks/")]) <= 25


def test_charts_are_drawn_from_the_figures_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = REPOSITORY / "docs" / "benchmarks"
    charts = sorted(folder.glob("*.svg"))
    assert charts
    for chart in charts:
        drawn = tmp_path / chart.name
        figures = chart.with_suffix(".json")
        command = [str(folder / "chart.py")]
        if chart.name.startswith("memory_over_time"):
            command = [str(folder / "memory_over_time.py"), "draw"]
        monkeypatch.setattr(sys, "argv", [*command, str(figures), str(drawn)])
        runpy.run_path(command[0], run_name="__main__")
        assert drawn.read_text() == chart.read_text()


def test_tables_are_made_of_the_figures_beside_them() -> None:
    """If not: `python docs/benchmarks/tables.py`."""
    folder = REPOSITORY / "docs" / "benchmarks"
    tables = runpy.run_path(str(folder / "tables.py"))
    found = {page.name: page.read_text() for page in folder.glob("*.md")}
    assert found == {name: tables["filled"](text) for name, text in found.items()}
    assert re.findall("<!-- table: (.*) -->", found["README.md"]) == list(tables["HEADS"])
    text = "\n".join(page.read_text() for page in pages())
    assert [file.name for file in folder.glob("*.json") if file.name not in text] == []
