"""The package does not grow back: measures of ``house.py``, each with what it may be at most."""

from __future__ import annotations

import ast
import re

import pytest

from tests import house


def test_measures_stay_below_what_they_are() -> None:
    assert house.lines() <= 25_488  # weights and gradients in host memory
    assert house.statements() <= 13_408
    assert len(house.sources()) <= 121
    assert house.long_files() == {}
    assert len(house.files_in_root()) <= 2
    assert house.classes() <= 214
    assert house.lines(list(house.PACKAGE.glob("bench/*.py"))) <= 739
    assert house.long_functions() == []
    assert house.banned_words() == {}
    assert house.types_named_twice() == []
    assert len(set(house.floors().values())) <= 8
    assert house.cycles() == []
    assert len(house.global_tables()) <= 3
    assert len(house.movers()) <= 2
    motion = house.motion()
    assert motion["streams"] == []
    assert motion["page-locked memory"] == []
    assert motion["copies"] == []


def test_private_api_of_torch_is_in_its_files_or_has_a_reason() -> None:
    assert house.private_torch() == []
    assert house.unused_exceptions() == set()


def test_every_note_is_cited_from_two_places() -> None:
    assert len(house.notes()) <= 2
    assert min(house.notes().values()) >= 2


def test_the_table_is_printed_and_what_climbs_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    house.main()
    printed = capsys.readouterr().out
    climbs = re.findall(r"^climbs.* (\d+)   wanted: 6$", printed, re.MULTILINE)
    assert len(climbs) == 2
    assert all(int(count) <= 6 for count in climbs)


def test_every_error_has_a_reason_and_a_remedy_in_at_most_40_words() -> None:
    words = house.error_words()
    assert len(words) > 150
    assert {place: n for place, n in words.items() if not 3 <= n <= 40} == {}


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


def test_private_api_is_found_by_import_and_by_attribute() -> None:
    source = """
from torch.distributed._tools import memory
import torch._dynamo
from torch.library import _scoped as scoped
a = torch._C._get_privateuse1_backend_name(), tensor._typed_storage()
b = getattr(tensor, "_grad_fn_class", None), group.fsdp_params
self._ours = self._ours, named._replace(a=1), os._exit, torch._C.DisableTorchFunctionSubclass
"""
    found = house.private_torch(
        {"new": ast.parse(source), "fsdp_offload.core.fsdp": ast.parse(source)}
    )
    assert sorted(found) == [
        "new:2 _tools",
        "new:3 _dynamo",
        "new:4 _scoped",
        "new:5 _get_privateuse1_backend_name",
        "new:5 _typed_storage",
        "new:6 _grad_fn_class",
        "new:6 fsdp_params",
    ]


def test_tables_of_the_process_are_found_by_what_changes_them() -> None:
    source = """
constant = {"a": 1}
found: WeakSet[object] = weakref.WeakSet()
table = {}
kept: list[int] = []
lock = threading.Lock()
chosen = None
def use():
    global chosen, lock
    table["a"] = constant["a"]
    kept.append(1)
    found.add(1)
"""
    assert sorted(house.global_tables({"new": ast.parse(source)})) == [
        "new.chosen",
        "new.found",
        "new.kept",
        "new.table",
    ]
