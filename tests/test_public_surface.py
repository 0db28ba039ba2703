"""Public names and signatures are those of ``public_surface.txt``, and the API page shows them."""

from __future__ import annotations

import re
from pathlib import Path

from tests import public_surface

PAGE = Path(__file__).parents[1] / "docs" / "api.md"


def test_the_surface_is_what_was_written_down() -> None:
    """After an intended change: ``python -m tests.public_surface``, and a line in the changelog."""
    assert public_surface.surface() == public_surface.FILE.read_text().splitlines()


def test_the_api_page_has_every_public_name() -> None:
    listed = set(re.findall(r"^::: (\S+)$", PAGE.read_text(), re.MULTILINE))
    errors = "fsdp_offload.core.errors"
    shown = listed - {errors}
    names = {
        line.removeprefix("class ").partition("(")[0]
        for line in public_surface.FILE.read_text().splitlines()
        if not line.startswith((" ", "module "))
        and " = fsdp_offload." not in line
        and not re.match(r"class fsdp_offload\.\w+Error\(", line)
    }
    assert errors in listed
    assert shown == names
