"""Public names and signatures are those of ``public_surface.txt``, and the API page shows them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fsdp_offload import PhaseOffloader, checkpoint
from tests import public_surface

PAGE = Path(__file__).parents[1] / "docs" / "api.md"


def test_the_surface_is_what_was_written_down() -> None:
    """After an intended change: ``python -m tests.public_surface``, and a line in the changelog."""
    assert public_surface.surface() == public_surface.FILE.read_text().splitlines()


def test_a_changed_default_a_new_method_and_a_new_name_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def save(path: str, *, verify: bool = True) -> None: ...

    before = public_surface.surface()
    monkeypatch.setattr(checkpoint, "save", save)
    monkeypatch.setattr(checkpoint, "__all__", [*checkpoint.__all__, "Table"])
    monkeypatch.setattr(checkpoint, "Table", type("Table", (), {}), raising=False)
    monkeypatch.setattr(PhaseOffloader, "discharge", PhaseOffloader.away, raising=False)
    assert set(public_surface.surface()) - set(before) == {
        "fsdp_offload.checkpoint.save(path: str, *, verify: bool = True) -> None",
        "class fsdp_offload.checkpoint.Table(object)",
        "    discharge(self) -> Iterator[Handle]",
    }


def test_no_line_depends_on_the_process_or_on_torch() -> None:
    text = public_surface.FILE.read_text()
    assert not re.search(r" at 0x|<class|typing\.|__main__", text)


def test_the_api_page_has_every_public_name() -> None:
    listed = set(re.findall(r"^::: (\S+)$", PAGE.read_text(), re.MULTILINE))
    errors = "fsdp_offload.core.errors"
    shown = listed - {errors, "fsdp_offload.testing"}
    names = {
        line.removeprefix("class ").partition("(")[0]
        for line in public_surface.FILE.read_text().splitlines()
        if not line.startswith((" ", "module ", "fsdp_offload.testing", "class fsdp_offload.test"))
        and " = fsdp_offload." not in line
        and not re.match(r"class fsdp_offload\.\w+Error\(", line)
    }
    assert {errors, "fsdp_offload.testing"} <= listed
    assert shown == names
