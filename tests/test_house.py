"""The package does not grow back: measures of ``house.py``, each with what it may be at most."""

from __future__ import annotations

from tests import house


def test_measures_stay_below_what_they_are() -> None:
    assert house.lines() <= 24_280
    assert len(house.files_in_root()) <= 2
    assert house.classes() <= 215
    assert sum(len(p.read_text().splitlines()) for p in house.PACKAGE.glob("bench/*.py")) <= 700
    assert house.long_functions() == []
    assert sum(house.banned_words().values()) <= 2
    assert len(house.private_torch_files()) <= 3


def test_every_error_has_a_reason_and_a_remedy() -> None:
    assert house.errors_without_words() == []
