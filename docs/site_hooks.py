"""Pages and files of the site that lie outside of ``docs/``; ``mkdocs.yml`` names this file.

Links are written as they work in the repository. Here they are turned into those of the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

REPOSITORY = Path(__file__).parents[1]
OUTSIDE = {
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "readme.md",
    "checkpoints/README.md": "internals/checkpoint-format.md",
    "examples/README.md": "examples/README.md",
    "examples/finetune.py": "examples/finetune.py",
    "examples/minimal.py": "examples/minimal.py",
    "examples/moe_gpt.py": "examples/moe_gpt.py",
    "examples/rl_phases.py": "examples/rl_phases.py",
    "examples/train_gpt.py": "examples/train_gpt.py",
}
"""Path in the repository, and in the site."""

LINK = re.compile(r"""(\]\(|\b(?:src|srcset)=")(?!\w+:|#)([^)"#\s]+)""")


def on_files(files: Any, config: Any) -> Any:
    """Add them."""
    for source, place in OUTSIDE.items():
        files.append(File.generated(config, place, abs_src_path=str(REPOSITORY / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links to them, and theirs, into links within the site."""
    here = page.file.src_uri
    source = next((s for s, place in OUTSIDE.items() if place == here), f"docs/{here}")

    def place_of(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[2]))
        place = OUTSIDE.get(target, target.removeprefix("docs/"))
        return link[1] + posixpath.relpath(place, posixpath.dirname(here) or ".")

    return LINK.sub(place_of, markdown)
