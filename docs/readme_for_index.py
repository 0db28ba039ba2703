"""README as a package index shows it: hatchling calls this when it builds.

There, links to files of the repository lead nowhere. With ``Source`` among ``[project.urls]`` in
``pyproject.toml`` they lead there; until then only their text is left, and pictures are left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?!\w+:|#)(?P<path>[^)\s]+)\)")
DRAWN = re.compile(r"<picture>.*?</picture>\n", re.DOTALL)
FILE = re.compile(r'\b(src|srcset)="')
FENCED = re.compile(r"(^```.*?^```\n)", re.MULTILINE | re.DOTALL)
WITHOUT_LINKS = "\nPages that are named here are in the source distribution.\n"


def for_index(readme: str, source: str | None) -> str:
    """README with links that work outside of the repository, whose address is ``source``."""

    address = (source or "").rstrip("/")

    def drawn(picture: re.Match[str]) -> str:
        return FILE.sub(rf'\1="{address}/raw/main/', picture[0]) if source else ""

    def outside(link: re.Match[str]) -> str:
        picture, text, path = link.group("picture", "text", "path")
        if source is None:
            return "" if picture else text
        return f"{picture}[{text}]({address}/{'raw' if picture else 'blob'}/main/{path})"

    pieces = FENCED.split(readme)
    pieces[::2] = [LINK.sub(outside, DRAWN.sub(drawn, text)) for text in pieces[::2]]
    return re.sub(r"\n{3,}", "\n\n", "".join(pieces)) + ("" if source else WITHOUT_LINKS)


class ReadmeHook(MetadataHookInterface):
    """Found by hatchling, since it is the only such class here."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set ``readme``, which ``pyproject.toml`` calls dynamic."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        source = metadata.get("urls", {}).get("Source")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": for_index(text, source),
        }
