"""The package does not grow back: measures of ``house.py``, each with what it may be at most."""

from __future__ import annotations

import ast

from tests import house


def test_measures_stay_below_what_they_are() -> None:
    assert house.lines() <= 24_160
    assert len(house.files_in_root()) <= 2
    assert house.classes() <= 214
    assert sum(len(p.read_text().splitlines()) for p in house.PACKAGE.glob("bench/*.py")) <= 700
    assert house.long_functions() == []
    assert sum(house.banned_words().values()) <= 2
    assert len(house.private_torch_files()) <= 3
    assert len(house.types_named_twice()) == 0
    assert len(house.movers()) <= 3
    motion = house.motion()
    assert len(motion["streams"]) <= 7
    assert len(motion["page-locked memory"]) <= 4
    assert len(motion["copies"]) <= 4


def test_every_error_has_a_reason_and_a_remedy() -> None:
    assert house.errors_without_words() == []


def test_motion_is_found_by_what_is_called() -> None:
    source = """
stream = backend.stream("copies")
memory = torch.empty(8, pin_memory=True).pin_memory()
stream.copy(targets, sources)
memory.copy_(other, non_blocking=True)
also = [1].copy(), copy.copy(other), memory.copy_(other)
"""
    trees = {f"fsdp_offload.{name}": ast.parse(source) for name in ("new", "link.link")}
    assert house.motion(trees) == {
        "streams": ["fsdp_offload.new:2"],
        "page-locked memory": ["fsdp_offload.new:3"] * 2,
        "copies": ["fsdp_offload.new:4", "fsdp_offload.new:5"],
    }
