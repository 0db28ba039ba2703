"""Links in the documentation lead somewhere, and so do the pages and files that text names."""

from __future__ import annotations

import json
import re
import runpy
from collections import Counter
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
FOLDERS = (".github", "docs", "examples")
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
DRAWN = re.compile(r'\b(?:src|srcset)="([^"]+)"')
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
        text = re.sub(r"`[^`\n]*`", "", text_of(page))
        for link in [*(link for _, link in LINK.findall(text)), *DRAWN.findall(text)]:
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


def test_pictures_are_drawn_from_the_figures_beside_them() -> None:
    """If not, run the script that draws it."""
    folder = REPOSITORY / "docs" / "benchmarks"
    chart = runpy.run_path(str(folder / "chart.py"))
    drawn: dict[Path, str] = chart["pictures"]()
    curves = runpy.run_path(str(folder / "memory_over_time.py"))
    for figures in folder.glob("memory_over_time_*.json"):
        drawn[figures.with_suffix(".svg")] = curves["draw"](json.loads(figures.read_text()))
    pictures = folder.parent / "pictures"
    drawn |= runpy.run_path(str(pictures / "draw.py"))["pictures"]()
    assert set(drawn) == {*folder.glob("*.svg"), *pictures.glob("*.svg")}
    assert [path.name for path, text in drawn.items() if path.read_text() != text] == []
    readme = (REPOSITORY / "README.md").read_text()
    assert chart["filled"](readme) == readme


def test_the_chart_takes_the_newest_row(tmp_path: Path) -> None:
    chart = runpy.run_path(str(REPOSITORY / "docs" / "benchmarks" / "chart.py"))

    def report(gbps: float = 90.0, **peaks_gib: float) -> dict[str, Any]:
        rows: list[dict[str, Any]] = [{"name": "plain-f32", "status": "failed"}]
        for name, gib in peaks_gib.items():
            row = {"name": name.replace("_", "-"), "status": "ok", "iteration_ms": 2e3}
            rows.append(row | {"device_peak_gib": gib})
        job, link = {"tokens": 16384, "ranks": 1}, {"h2d+d2h_gbps": gbps}
        return {"params": 7.9e9, "job": job, "link": link, "rows": rows}

    first = report(plain=64.0, forward_torchclip_all_d0=13.0, default_torchclip=70.0)
    second = report(forward_torchclip_all_d0=12.0, backward_all_c8GiB=20.0, compute=30.0)
    second["rows"] += report(backward_all_bf16_c8GiB=19.0)["rows"]
    slow = report(70.0, forward_torchclip_all_d0=11.0)
    found = {"2026-11-27_a": second, "2026-11-26_b": first, "2026-11-28": slow}
    for name, report_ in found.items():
        (tmp_path / f"whole_h100_{name}.json").write_text(json.dumps(report_))
    reports = chart["reports"](tmp_path)
    gib = {key: [p.gib for p in some] for key, some in chart["points"](reports).items()}
    assert gib == {"clip": [12.0, 70.0], "none": [20.0], "bf16": [19.0], "plain": [64.0]}
    gain = chart["gain"](reports)
    assert "needs 12 GiB, with activations (`device_memory=0`), and 103 GiB of CPU memory." in gain
    assert "trains 8,200 tokens per second" in gain
    assert "does not fit" in chart["chart"](reports, "dark")


def test_tables_are_made_of_the_figures_beside_them() -> None:
    """If not: `python docs/benchmarks/tables.py`."""
    folder = REPOSITORY / "docs" / "benchmarks"
    tables = runpy.run_path(str(folder / "tables.py"))
    page = (folder / "README.md").read_text()
    assert tables["filled"](page) == page
    assert re.findall("<!-- table: (.*) -->", page) == list(tables["HEADS"])
    text = "\n".join(page.read_text() for page in pages())
    assert [file.name for file in folder.glob("*.json") if file.name not in text] == []
