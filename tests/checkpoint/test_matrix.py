"""What four ranks save, any number resumes: who saved it and how, lanes, dtypes, meshes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoint import jobs
from tests.checkpoint.jobs import (
    BF16,
    OURS,
    OURS_BF16,
    PLAIN,
    PLAIN_BF16,
    Course,
    Ranks,
    Source,
    Variant,
)
from tests.helpers.compare import assert_same

HOST_BF16, STREAMED_BF16 = Variant(lanes=("host",), dtype=BF16), Variant(lanes=1.0, dtype=BF16)
OURS_HSDP = Variant(mesh="hsdp")
OURS_TP, PLAIN_TP = Variant(mesh="tp"), Variant(wrapped=False, mesh="tp")
AWAY, AWAY_BF16 = Variant(away=True), Variant(away=True, dtype=BF16)

# World size, what was saved on four ranks, what loads it. In order of world size, as pools are
# expensive; each row is there for something that no row before it has.
Row = tuple[int, Source, Variant]
ROWS: list[Row] = [
    (4, Source(OURS), OURS),
    (4, Source(PLAIN, "flat"), OURS),
    (4, Source(OURS), PLAIN),
    (4, Source(OURS_BF16), STREAMED_BF16),
    (4, Source(OURS_TP), PLAIN_TP),
    (4, Source(AWAY, "flat"), PLAIN),
    (4, Source(OURS_TP), Variant(away=True, mesh="tp")),
    (1, Source(OURS_BF16), HOST_BF16),
    (2, Source(OURS, "stateful"), Variant(lanes=0.0)),
    (2, Source(PLAIN_BF16, "flat"), OURS_BF16),
    (2, Source(AWAY_BF16), AWAY_BF16),
    (2, Source(OURS_HSDP, "flat"), OURS_HSDP),
    (3, Source(PLAIN, "nested"), Variant(lanes=0.5)),
    (3, Source(AWAY), OURS),
    (3, Source(PLAIN, "nested"), AWAY),
]


def named(row: Row) -> str:
    return f"{row[1]}-to-{row[0]}-{row[2]}"


Saved = dict[Variant, Course]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


@pytest.fixture(scope="module")
def saved(request: pytest.FixtureRequest, root: Path, ranks: Ranks) -> Saved:
    """The checkpoints of the rows that run, and the runs that went on."""
    calls = (getattr(item, "callspec", None) for item in request.session.items)
    rows = [call.params["row"] for call in calls if call and call.params.get("row") in ROWS]
    sources = tuple(dict.fromkeys(source for _, source, _ in rows))
    return ranks(4).run(jobs.save_all, root, sources)[0]


def check_loaded(found: dict[str, Any], expected: dict[str, Any], target: Variant) -> None:
    """All that was saved is there, bit for bit; moments in the precision of the target."""
    for name, value in expected.items():
        if name.startswith("master ") and not target.wrapped:
            continue
        moment = isinstance(value, Tensor) and name.startswith("exp_avg")
        wanted = value.to(found[name].dtype) if moment else value
        assert_same(found[name], wanted, name)
    for name in found.keys() - expected.keys():  # masters that nobody has saved
        weight = expected[name.replace("master ", "weight ")]
        assert_same(found[name], weight.float(), name)


# Gradients of another world size are sums in another order. Greatest distances seen, with all lanes
# and meshes, are 0.9 (weights), 0.2 (masters), 3.8 and 5.9 (moments) on FSDP alone, and 4.3
# (weights and masters) where the tensor-parallel degree changes too; in ulps of the largest element
# of a tensor, counted in the shards' dtype: gradients have no more bits.
LIMITS = {"weight": 8.0, "master": 8.0, "exp_avg": 16.0, "exp_avg_sq": 32.0}


def check_goes_on(found: Course, expected: Course, dtype: torch.dtype, *, exactly: bool) -> None:
    """As the run that was never interrupted: the same bits, or but for the order of sums."""
    for name in found.at_end.keys() & expected.at_end.keys():
        mine, theirs = found.at_end[name], expected.at_end[name]
        kind, _, _ = name.partition(" ")
        if exactly or kind not in LIMITS:
            assert_same(mine, theirs, name)
            continue
        ulp = torch.finfo(dtype).eps * theirs.float().abs().max().item()
        distance = (mine.float() - theirs.float()).abs().max().item()
        assert distance <= LIMITS[kind] * ulp, f"{name} is {distance / ulp} ulps away"


def exact(source: Source, target: Variant) -> bool:
    """Whether both keep the same numbers: not if only one has masters."""
    return source.variant.dtype == torch.float32 or source.variant.wrapped == target.wrapped


LONG = (3, 5, 6, 9, 13, 14)
"""Rows that combine what the others show one by one."""


@pytest.mark.parametrize(
    "row",
    [pytest.param(r, marks=pytest.mark.long) if i in LONG else r for i, r in enumerate(ROWS)],
    ids=named,
)
def test_a_checkpoint_of_four_ranks_resumes(
    ranks: Ranks, root: Path, saved: Saved, row: Row
) -> None:
    world, source, target = row
    found = ranks(world).run(jobs.load_one, root, source, target)[0]
    expected = saved[source.variant]
    check_loaded(found.at_save, expected.at_save, target)
    if exact(source, target):
        check_goes_on(found, expected, target.dtype, exactly=world == 4)
