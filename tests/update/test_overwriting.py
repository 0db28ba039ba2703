"""Sources of copies that lie in other copies' targets."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fsdp_offload.update.overwriting import is_same, kept_apart

PARTS = 6


@st.composite
def copies(draw: st.DrawFn) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Targets, sources in the same memory or elsewhere, and the order of the copies."""
    sizes = draw(st.lists(st.integers(0, 5), min_size=PARTS, max_size=PARTS))
    memory = torch.arange(100, 130)
    starts = [sum(sizes[:i]) for i in range(PARTS)]
    targets = [memory[s : s + n] for s, n in zip(starts, sizes, strict=True)]
    sources = []
    for target, n in zip(targets, sizes, strict=True):
        kind, start = draw(st.integers(0, 2)), draw(st.integers(0, 30 - n))
        elsewhere = torch.arange(n)
        strided = memory[:: draw(st.integers(1, 4))]
        some = strided[start : start + n] if len(strided) >= start + n else elsewhere
        sources.append((target, some, elsewhere)[kind])
    return targets, sources, draw(st.permutations(range(PARTS)))


@given(copies())
def test_copies_in_any_order_take_what_was_there_before(
    case: tuple[list[Tensor], list[Tensor], list[int]],
) -> None:
    targets, sources, order = case
    wanted = [source.clone() for source in sources]
    apart = kept_apart(targets, sources)
    for index in order:
        if not is_same(targets[index], apart[index]):  # as whoever copies asks
            targets[index].copy_(apart[index])
    for target, value in zip(targets, wanted, strict=True):
        assert torch.equal(target, value)


def test_only_what_would_be_overwritten_is_cloned() -> None:
    memory, other = torch.arange(12.0), torch.arange(4.0)
    targets = [memory[:4], memory[4:8]]
    own, behind, neighbour = memory[:4], memory[8:], memory[:4]
    assert kept_apart(targets, [own, behind]) == [own, behind]
    first, second = kept_apart(targets, [other, neighbour])
    assert first is other
    assert second.data_ptr() != neighbour.data_ptr()
    assert torch.equal(second, neighbour)
    for source in (memory[1:5], memory[3:7], memory[0:8:2], memory.view(torch.int32)[:4]):
        (found, _) = kept_apart(targets, [source, memory[4:8]])
        assert found.data_ptr() != source.data_ptr(), "overlaps its own target, or a part of it"
    meta = torch.empty(4, device="meta")
    assert kept_apart([memory[:4]], [meta]) == [meta]
