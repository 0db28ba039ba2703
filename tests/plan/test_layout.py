from __future__ import annotations

import itertools
from collections import defaultdict
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_offload.core.config import align
from fsdp_offload.plan import Bucket, Kind, Layout, ParamSpec, Slice, make_layout
from fsdp_offload.plan.layout import (
    ALIGN_NUMEL,
    CUDA_TILE_NUMEL,
    SLOT_ALIGN_BYTES,
    kind_range,
)

KINDS = (
    Kind("exp_avg", torch.float32),
    Kind("exp_avg_sq", torch.bfloat16),
    Kind("max_exp_avg_sq", torch.float64),
    Kind("master_remainder", torch.int16),
)
SMALLEST_BUCKET = 4096


@st.composite
def entries(draw: st.DrawFn) -> list[ParamSpec]:
    """Parameters of one section: empty, tiny, at and around the cuts, larger than a bucket; with
    all kinds, some or none of them."""
    numels = st.one_of(
        st.sampled_from([0, 1, 63, 64, 65, 127, 128, 129, 512]), st.integers(0, 5000)
    )
    made = []
    for index in range(draw(st.integers(0, 8))):
        numel = draw(numels)
        cuttable = draw(st.integers(0, 3)) > 0
        kinds = tuple((kind, numel) for kind in KINDS if draw(st.booleans()))
        if not cuttable and draw(st.booleans()):  # factored state
            kinds = tuple((kind, draw(st.integers(0, numel))) for kind, _ in kinds)
        unit = draw(st.sampled_from([ALIGN_NUMEL, ALIGN_NUMEL, CUDA_TILE_NUMEL]))
        made.append(ParamSpec(index * 3 + 1, numel, kinds, cuttable, unit))
    return made


class Laid(NamedTuple):
    """What was asked for, and the layout."""

    specs: list[ParamSpec]
    bucket_bytes: int
    start: int
    layout: Layout


@st.composite
def laid_out(draw: st.DrawFn) -> Laid:
    made, start = draw(entries()), draw(st.integers(0, 1000))
    bucket_bytes = draw(st.sampled_from([SMALLEST_BUCKET, 5000, 16384, 1 << 20]))
    layout = make_layout(made, bucket_bytes=bucket_bytes, arena_start=start)
    return Laid(made, bucket_bytes, start, layout)


def slices_of(layout: Layout) -> list[Slice]:
    return [each for bucket in layout.buckets for each in bucket.slices]


def smallest_cut(spec: ParamSpec) -> int:
    return spec.cut_numel if spec.cuttable else spec.numel


def bytes_counted(spec: ParamSpec) -> int:
    return max(8, -(-spec.state_bytes // max(spec.numel, 1)))


@given(laid_out())
def test_every_element_is_in_one_slice_in_order_cut_at_multiples_of_its_unit(laid: Laid) -> None:
    by_index: dict[int, list[Slice]] = defaultdict(list)
    order = []
    for each in slices_of(laid.layout):
        by_index[each.spec.index].append(each)
        order.append(each.spec.index)
        for at in {each.start, each.stop} - {0, each.spec.numel}:
            assert each.spec.cuttable
            assert at % each.spec.cut_numel == 0
    assert list(dict.fromkeys(order)) == [spec.index for spec in laid.specs]
    assert order == sorted(order)
    for spec in laid.specs:
        found = by_index[spec.index]
        assert [p.start for p in found] == [0, *(p.stop for p in found[:-1])]
        assert found[-1].stop == spec.numel
        assert len(found) == 1 or all(p.numel > 0 for p in found)


@given(laid_out())
def test_buckets_are_filled_and_fit_unless_one_slice_cannot_be_smaller(laid: Laid) -> None:
    buckets = laid.layout.buckets
    for bucket in buckets:
        filled = [each for each in bucket.slices if each.numel]
        if len(filled) == 1 and filled[0].numel <= smallest_cut(filled[0].spec):
            continue
        # Kinds with fewer elements than the parameter are padded each.
        slack = sum(
            ALIGN_NUMEL * kind.itemsize
            for each in bucket.slices
            for kind, numel in each.spec.kinds
            if numel != each.spec.numel
        )
        assert bucket.state_bytes <= laid.bucket_bytes + slack
    for bucket, after in itertools.pairwise(buckets):  # the next slice did not fit
        used = sum(align(p.numel, ALIGN_NUMEL) * bytes_counted(p.spec) for p in bucket.slices)
        spec = after.slices[0].spec
        wanted = align(max(smallest_cut(spec), spec.cut_numel), ALIGN_NUMEL)
        assert used + wanted * bytes_counted(spec) > laid.bucket_bytes


@given(laid_out())
def test_a_kind_is_one_run_of_the_arena_which_is_payload_and_alignment(laid: Laid) -> None:
    layout, start = laid.layout, align(laid.start, SLOT_ALIGN_BYTES)
    kinds = [(spec, kind, numel) for spec in laid.specs for kind, numel in spec.kinds]
    assert len(layout.offsets) == len(kinds)
    runs = sorted(
        (layout.offsets[spec.index, kind.name], kind.name, kind.itemsize, numel)
        for spec, kind, numel in kinds
        if numel
    )
    for (at, _, itemsize, numel), (after, *_) in itertools.pairwise(runs):
        assert at + numel * itemsize <= after
    names = []
    for name, group in itertools.groupby(runs, key=lambda run: run[1]):
        names.append(name)
        begins = [(at, itemsize) for at, _, itemsize, _ in group]
        assert begins[0][0] % SLOT_ALIGN_BYTES == 0
        assert begins[0][0] >= start
        assert all((at - begins[0][0]) % (ALIGN_NUMEL * itemsize) == 0 for at, itemsize in begins)
    assert len(names) == len(set(names))
    assert layout.arena_stop >= max((at + n * size for at, _, size, n in runs), default=0)
    assert layout.payload_bytes == sum(kind.itemsize * numel for _, kind, numel in kinds)
    padding = sum(ALIGN_NUMEL * kind.itemsize for _, kind, _ in kinds)
    overhead = layout.arena_stop - start - layout.payload_bytes
    assert 0 <= overhead <= padding + len(KINDS) * SLOT_ALIGN_BYTES


def check_ranges(bucket: Bucket, layout: Layout) -> None:
    """Spans cover the state of their slices: between two lies nothing but alignment."""
    kinds = {kind for each in bucket.slices for kind, _ in each.spec.kinds}
    assert {span.kind for span in bucket.spans} == kinds
    for span in bucket.spans:
        ranges = [
            kind_range(each, kind, numel, layout.offsets)
            for each in bucket.slices
            for kind, numel in each.spec.kinds
            if kind == span.kind
        ]
        assert span.arena_start == ranges[0][0]
        assert span.arena_start + span.n_bytes == ranges[-1][1]
        for (_, stop), (after, _) in itertools.pairwise(ranges):
            assert 0 <= after - stop < ALIGN_NUMEL * span.kind.itemsize


def check_scratch(bucket: Bucket, layout: Layout) -> None:
    """Flat remainders and masters of a bucket are read with one kernel over scratch memory."""
    assert bucket.slices[0].scratch_start == 0
    for before, after in itertools.pairwise(bucket.slices):
        assert before.scratch_start + before.numel <= after.scratch_start
    last = bucket.slices[-1]
    assert last.scratch_start + last.numel <= bucket.scratch_numel
    for span in bucket.spans:
        numels = [dict(each.spec.kinds).get(span.kind) for each in bucket.slices]
        if any(n != each.spec.numel for n, each in zip(numels, bucket.slices, strict=True)):
            continue  # not all slices have all of it
        for each in bucket.slices:
            start, _ = kind_range(each, span.kind, each.spec.numel, layout.offsets)
            assert start - span.arena_start == each.scratch_start * span.kind.itemsize


@given(laid_out())
def test_spans_cover_their_slices_and_lie_apart_in_slot_and_scratch(laid: Laid) -> None:
    for bucket in laid.layout.buckets:
        check_ranges(bucket, laid.layout)
        check_scratch(bucket, laid.layout)
        end = 0
        for span in bucket.spans:
            assert span.slot_start >= end
            assert span.slot_start % SLOT_ALIGN_BYTES == 0
            end = span.slot_start + span.n_bytes
        assert end <= bucket.slot_bytes
        assert bucket.slot_bytes <= bucket.state_bytes + len(bucket.spans) * SLOT_ALIGN_BYTES
    spans = [span for bucket in laid.layout.buckets for span in bucket.spans if span.n_bytes]
    covered = sorted((span.arena_start, span.arena_start + span.n_bytes) for span in spans)
    assert all(stop <= after for (_, stop), (after, _) in itertools.pairwise(covered))


@pytest.mark.parametrize("cuttable", [True, False])
def test_an_optimizer_without_state_still_has_slices_and_scratch(cuttable: bool) -> None:
    layout = make_layout(
        [ParamSpec(0, 0, (), cuttable), ParamSpec(1, 9, (), cuttable)], bucket_bytes=4096
    )
    assert [piece.numel for piece in slices_of(layout)] == [0, 9]
    assert (layout.payload_bytes, layout.arena_stop) == (0, 0)
    assert [bucket.slot_bytes for bucket in layout.buckets] == [0]
    assert layout.scratch_numel == ALIGN_NUMEL
