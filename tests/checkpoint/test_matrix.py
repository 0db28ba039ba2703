"""What four ranks save, any number of ranks resumes: by whom and how it was saved, lanes, dtypes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_offload.testing import RankPool
from tests.checkpoint import jobs
from tests.checkpoint.jobs import Course, Source, Variant

Ranks = Callable[..., RankPool]
BF16 = torch.bfloat16
OURS, PLAIN = Variant(), Variant(wrapped=False)
OURS_BF16, PLAIN_BF16 = Variant(dtype=BF16), Variant(wrapped=False, dtype=BF16)
HOST_BF16, STREAMED_BF16 = Variant(lanes=("host",), dtype=BF16), Variant(lanes=1.0, dtype=BF16)
OURS_HSDP, PLAIN_HSDP = Variant(mesh="hsdp"), Variant(wrapped=False, mesh="hsdp")
OURS_TP, PLAIN_TP = Variant(mesh="tp"), Variant(wrapped=False, mesh="tp")

# World size, what was saved on four ranks, what loads it. In order of world size, as pools are
# expensive; each row is there for something that no row before it has.
DEFAULT: list[tuple[int, Source, Variant]] = [
    (4, Source(OURS), OURS),
    (4, Source(OURS), PLAIN),
    (4, Source(PLAIN, "flat"), OURS),
    (4, Source(PLAIN, "nested"), OURS),
    (4, Source(PLAIN), Variant(lanes=0.5)),
    (4, Source(OURS_BF16), STREAMED_BF16),
    (4, Source(HOST_BF16), OURS_BF16),
    (4, Source(OURS_TP), PLAIN_TP),
    (1, Source(OURS), OURS),
    (1, Source(OURS_BF16), HOST_BF16),
    (1, Source(OURS_HSDP), OURS_HSDP),
    (2, Source(OURS, "stateful"), Variant(lanes=0.0)),
    (2, Source(PLAIN_BF16, "flat"), OURS_BF16),
    (2, Source(OURS_BF16), PLAIN_BF16),
    (2, Source(PLAIN_HSDP, "flat"), OURS_HSDP),
    (2, Source(OURS_TP), OURS_TP),
    (3, Source(PLAIN, "nested"), OURS),
    (3, Source(OURS_BF16, "flat"), OURS_BF16),
    (3, Source(OURS_TP, "nested"), OURS_TP),
]


def everything() -> list[tuple[int, Source, Variant]]:
    """The product of lanes for our own checkpoints, and of ways to save; but for ``DEFAULT``."""
    lanes: tuple[jobs.Lanes, ...] = (0.0, 0.5, 1.0, ("host",), jobs.MIXED)
    rows: list[tuple[int, Source, Variant]] = []
    for world, dtype, mesh in itertools.product(
        (4, 1, 2, 3), (torch.float32, BF16), ("flat", "hsdp", "tp")
    ):
        plain = Variant(wrapped=False, dtype=dtype, mesh=mesh)
        mixed = Variant(dtype=dtype, mesh=mesh)
        many = [Variant(lanes=each, dtype=dtype) for each in lanes] if mesh == "flat" else [mixed]
        for way in jobs.SAVERS:
            made = [*(many if way == "save" else [mixed]), plain]
            rows += [(world, Source(a, way), b) for a, b in itertools.product(made, made)]
    return [row for row in rows if row not in DEFAULT]


def named(row: tuple[int, Source, Variant]) -> str:
    return f"{row[1]}-to-{row[0]}-{row[2]}"


Saved = dict[Variant, Course]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


@pytest.fixture(scope="module")
def saved(root: Path, ranks: Ranks) -> Saved:
    """The checkpoints of ``DEFAULT``, and the runs that went on."""
    sources = tuple(dict.fromkeys(source for _, source, _ in DEFAULT))
    return ranks(4).run(jobs.save_all, root, sources)[0]


@pytest.fixture(scope="module")
def saved_all(root: Path, ranks: Ranks) -> Saved:
    """The checkpoints of the product."""
    sources = tuple(dict.fromkeys(source for _, source, _ in everything()))
    return ranks(4).run(jobs.save_all, root / "all", sources, timeout_s=600)[0]


# --------------------------------------------------------------------------- comparing


def same(found: Any, expected: Any) -> bool:
    """Of the same bits; what the optimizer keeps in fewer bits is compared rounded."""
    if not isinstance(expected, Tensor):
        return found == expected
    return torch.equal(bits(found), bits(expected))


def bits(value: Tensor) -> Tensor:
    return value.contiguous().view(torch.int16 if value.itemsize == 2 else torch.int32)


def check_loaded(found: dict[str, Any], expected: dict[str, Any], target: Variant) -> None:
    """All that was saved is there, bit for bit; moments in the precision of the target."""
    for name, value in expected.items():
        if name.startswith("master ") and not target.wrapped:
            continue
        moment = isinstance(value, Tensor) and name.startswith("exp_avg")
        wanted = value.to(found[name].dtype) if moment else value
        assert same(found[name], wanted), name
    if target.wrapped and not any(name.startswith("master ") for name in expected):
        for name in (n.removeprefix("master ") for n in found if n.startswith("master ")):
            assert same(found[f"master {name}"].float(), expected[f"weight {name}"].float()), name


def check_goes_on(found: Course, expected: Course) -> None:
    """As the run that was never interrupted: the same bits."""
    for step, (mine, theirs) in enumerate(zip(found.after, expected.after, strict=True), 1):
        for name in mine.keys() & theirs.keys():
            assert same(mine[name], theirs[name]), f"{name}, {step} steps after the load"


def ulps_apart(found: Course, expected: Course, kind: str) -> float:
    """The greatest distance in ulps of the largest element of the tensor, over all steps."""
    worst = 0.0
    for mine, theirs in zip(found.after, expected.after, strict=True):
        for name, value in theirs.items():
            if name.startswith(f"{kind} ") and name in mine:
                unit = torch.finfo(value.dtype).eps * value.float().abs().max().item()
                distance = (mine[name].float() - value.float()).abs().max().item()
                worst = max(worst, distance / unit if unit else distance)
    return worst


def check_goes_on_nearly(found: Course, expected: Course) -> None:
    print("ULPS", [ulps_apart(found, expected, k) for k in ("weight", "exp_avg", "exp_avg_sq")])


def exact(source: Source, target: Variant) -> bool:
    """Whether both keep the same numbers: not if only one has masters."""
    return source.variant.dtype == torch.float32 or source.variant.wrapped == target.wrapped


def resume(ranks: Ranks, root: Path, saved: Saved, row: tuple[int, Source, Variant]) -> None:
    world, source, target = row
    found = ranks(world).run(jobs.load_one, root, source, target)[0]
    expected = saved[source.variant]
    check_loaded(found.at_save, expected.at_save, target)
    if not exact(source, target):
        return
    if world == 4:
        check_goes_on(found, expected)
    else:
        check_goes_on_nearly(found, expected)


@pytest.mark.parametrize("row", DEFAULT, ids=named)
def test_a_checkpoint_of_four_ranks_resumes(
    ranks: Ranks, root: Path, saved: Saved, row: tuple[int, Source, Variant]
) -> None:
    resume(ranks, root, saved, row)


@pytest.mark.long
@pytest.mark.parametrize("row", everything(), ids=named)
def test_any_checkpoint_of_four_ranks_resumes(
    ranks: Ranks, root: Path, saved_all: Saved, row: tuple[int, Source, Variant]
) -> None:
    resume(ranks, root / "all", saved_all, row)
