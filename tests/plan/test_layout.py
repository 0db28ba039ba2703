from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_offload.plan import Bucket, Kind, Layout, ParamSpec, Slice, make_layout
from fsdp_offload.plan.layout import (
    ALIGN_NUMEL,
    CUDA_TILE_NUMEL,
    SLOT_ALIGN_BYTES,
    align,
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


bucket_sizes = st.sampled_from([SMALLEST_BUCKET, 5000, 16384, 1 << 20])


def slices_of(layout: Layout) -> Iterator[tuple[Bucket, Slice]]:
    return ((bucket, piece) for bucket in layout.buckets for piece in bucket.slices)


def in_slice(piece: Slice, kind: Kind) -> int | None:
    """Elements of ``kind`` that belong to the slice, or None if its parameter has none."""
    for each, numel in piece.spec.kinds:
        if each == kind:
            return piece.numel if piece.spec.cuttable else numel
    return None


@given(entries(), bucket_sizes, st.integers(0, 1000))
def test_every_element_is_in_exactly_one_slice_in_the_given_order(
    made: list[ParamSpec], bucket_bytes: int, start: int
) -> None:
    layout = make_layout(made, bucket_bytes=bucket_bytes, arena_start=start)
    pieces: dict[int, list[Slice]] = defaultdict(list)
    order = []
    for _, piece in slices_of(layout):
        pieces[piece.spec.index].append(piece)
        order.append(piece.spec.index)
    assert list(dict.fromkeys(order)) == [entry.index for entry in made]
    assert order == sorted(order)
    for entry in made:
        found = pieces[entry.index]
        assert [p.start for p in found] == [0, *(p.stop for p in found[:-1])]
        assert found[-1].stop == entry.numel
        assert len(found) == 1 or all(p.numel > 0 for p in found)


@given(entries(), bucket_sizes)
def test_parameters_are_cut_only_at_multiples_of_their_unit(
    made: list[ParamSpec], bucket_bytes: int
) -> None:
    for _, piece in slices_of(make_layout(made, bucket_bytes=bucket_bytes)):
        entry = piece.spec
        for at in {piece.start, piece.stop} - {0, entry.numel}:
            assert entry.cuttable
            assert at % entry.cut_numel == 0


@given(entries(), st.integers(0, 1000))
def test_state_never_overlaps_and_starts_at_multiples_of_64(
    made: list[ParamSpec], start: int
) -> None:
    layout = make_layout(made, bucket_bytes=SMALLEST_BUCKET, arena_start=start)
    assert layout.arena_start == align(start, SLOT_ALIGN_BYTES)
    assert len(layout.offsets) == sum(len(entry.kinds) for entry in made)
    runs = sorted(
        (
            (layout.offsets[entry.index, kind.name], kind, numel * kind.itemsize)
            for entry in made
            for kind, numel in entry.kinds
            if numel
        ),
        key=lambda run: run[0],
    )
    for (at, _, size), (after, _, _) in itertools.pairwise(runs):
        assert at + size <= after
    for kind, group in itertools.groupby(runs, key=lambda run: run[1]):
        begins = [at for at, _, _ in group]
        assert begins[0] % SLOT_ALIGN_BYTES == 0
        assert begins[0] >= layout.arena_start
        assert all((at - begins[0]) % (ALIGN_NUMEL * kind.itemsize) == 0 for at in begins)
    ends = [at + size for at, _, size in runs]
    if ends:
        assert layout.arena_stop >= max(ends)


@given(entries())
def test_a_kind_of_all_parameters_is_one_run(made: list[ParamSpec]) -> None:
    layout = make_layout(made, bucket_bytes=SMALLEST_BUCKET)
    begins = [
        (layout.offsets[entry.index, kind.name], kind.name)
        for entry in made
        for kind, numel in entry.kinds
        if numel
    ]
    names = [name for name, _ in itertools.groupby(sorted(begins), key=lambda run: run[1])]
    assert len(names) == len(set(names))


@given(entries(), bucket_sizes)
def test_spans_cover_the_state_of_their_slices_exactly(
    made: list[ParamSpec], bucket_bytes: int
) -> None:
    layout = make_layout(made, bucket_bytes=bucket_bytes)
    for bucket in layout.buckets:
        kinds = {kind for piece in bucket.slices for kind, _ in piece.spec.kinds}
        assert {span.kind for span in bucket.spans} == kinds
        for span in bucket.spans:
            ranges = [
                kind_range(piece, kind, numel, layout.offsets)
                for piece in bucket.slices
                for kind, numel in piece.spec.kinds
                if kind == span.kind
            ]
            assert span.arena_start == ranges[0][0]
            assert span.arena_start + span.n_bytes == ranges[-1][1]
            # Between two slices lies nothing but alignment, so no byte is in two buckets' spans.
            for (_, stop), (after, _) in itertools.pairwise(ranges):
                assert 0 <= after - stop < ALIGN_NUMEL * span.kind.itemsize
    covered = sorted(
        (span.arena_start, span.arena_start + span.n_bytes)
        for bucket in layout.buckets
        for span in bucket.spans
        if span.n_bytes
    )
    assert all(stop <= after for (_, stop), (after, _) in itertools.pairwise(covered))


@given(entries(), bucket_sizes)
def test_spans_lie_apart_in_a_slot_and_are_aligned_there(
    made: list[ParamSpec], bucket_bytes: int
) -> None:
    for bucket in make_layout(made, bucket_bytes=bucket_bytes).buckets:
        end = 0
        for span in bucket.spans:
            assert span.slot_start >= end
            assert span.slot_start % SLOT_ALIGN_BYTES == 0
            end = span.slot_start + span.n_bytes
        assert bucket.slot_bytes >= end
        assert bucket.slot_bytes <= bucket.state_bytes + len(bucket.spans) * SLOT_ALIGN_BYTES


@given(entries(), bucket_sizes)
def test_scratch_and_slot_offsets_agree_for_kinds_that_all_slices_have(
    made: list[ParamSpec], bucket_bytes: int
) -> None:
    """Flat remainders and masters of a bucket are read with one kernel over scratch memory."""
    layout = make_layout(made, bucket_bytes=bucket_bytes)
    for bucket in layout.buckets:
        assert bucket.slices[0].scratch_start == 0
        for before, after in itertools.pairwise(bucket.slices):
            assert before.scratch_start + before.numel <= after.scratch_start
        last = bucket.slices[-1]
        assert last.scratch_start + last.numel <= bucket.scratch_numel
        for span in bucket.spans:
            numels = [in_slice(piece, span.kind) for piece in bucket.slices]
            if numels != [piece.numel for piece in bucket.slices]:
                continue
            for piece in bucket.slices:
                start, _ = kind_range(piece, span.kind, piece.spec.numel, layout.offsets)
                assert start - span.arena_start == piece.scratch_start * span.kind.itemsize


@given(entries(), bucket_sizes)
def test_buckets_fit_unless_one_slice_cannot_be_smaller(
    made: list[ParamSpec], bucket_bytes: int
) -> None:
    for bucket in make_layout(made, bucket_bytes=bucket_bytes).buckets:
        filled = [piece for piece in bucket.slices if piece.numel]
        if len(filled) == 1 and filled[0].numel <= smallest_cut(filled[0].spec):
            continue
        # Kinds with fewer elements than the parameter are padded each.
        slack = sum(
            ALIGN_NUMEL * kind.itemsize
            for piece in bucket.slices
            for kind, numel in piece.spec.kinds
            if numel != piece.spec.numel
        )
        assert bucket.state_bytes <= bucket_bytes + slack


def smallest_cut(entry: ParamSpec) -> int:
    return entry.cut_numel if entry.cuttable else entry.numel


@given(entries(), bucket_sizes)
def test_buckets_are_filled(made: list[ParamSpec], bucket_bytes: int) -> None:
    """A bucket is closed only where the next slice did not fit into it."""
    buckets = make_layout(made, bucket_bytes=bucket_bytes).buckets
    for bucket, after in itertools.pairwise(buckets):
        used = sum(align(p.numel, ALIGN_NUMEL) * bytes_counted(p.spec) for p in bucket.slices)
        entry = after.slices[0].spec
        wanted = align(max(smallest_cut(entry), entry.cut_numel), ALIGN_NUMEL)
        assert used + wanted * bytes_counted(entry) > bucket_bytes


def bytes_counted(entry: ParamSpec) -> int:
    return max(8, -(-entry.state_bytes // max(entry.numel, 1)))


@given(entries(), st.integers(0, 1000))
def test_the_arena_is_payload_and_alignment(made: list[ParamSpec], start: int) -> None:
    layout = make_layout(made, bucket_bytes=SMALLEST_BUCKET, arena_start=start)
    runs = [(kind, numel) for entry in made for kind, numel in entry.kinds]
    payload = sum(kind.itemsize * numel for kind, numel in runs)
    assert layout.payload_bytes == payload
    padding = sum(ALIGN_NUMEL * kind.itemsize for kind, _ in runs)
    overhead = layout.arena_stop - layout.arena_start - payload
    assert 0 <= overhead <= padding + len(KINDS) * SLOT_ALIGN_BYTES


def test_small_parameters_share_a_bucket_and_a_large_one_fills_its_rest() -> None:
    kinds = (KINDS[0], Kind("exp_avg_sq", torch.float32))
    sizes = [10, 100, 1000]
    made = [ParamSpec(i, n, tuple((kind, n) for kind in kinds)) for i, n in enumerate(sizes)]
    first, second, third = make_layout(made, bucket_bytes=SMALLEST_BUCKET).buckets
    cuts = [(p.spec.index, p.start, p.stop, p.scratch_start) for p in first.slices]
    assert cuts == [(0, 0, 10, 0), (1, 0, 100, 64), (2, 0, 320, 192)]
    assert [(s.arena_start, s.n_bytes) for s in first.spans] == [(0, 2048), (4864, 2048)]
    assert [(p.start, p.stop) for p in (*second.slices, *third.slices)] == [(320, 832), (832, 1000)]
    assert [(s.slot_start, s.n_bytes) for s in third.spans] == [(0, 672), (768, 672)]


@pytest.mark.parametrize("cuttable", [True, False])
def test_an_optimizer_without_state_still_has_slices_and_scratch(cuttable: bool) -> None:
    layout = make_layout(
        [ParamSpec(0, 0, (), cuttable), ParamSpec(1, 9, (), cuttable)], bucket_bytes=4096
    )
    assert [piece.numel for _, piece in slices_of(layout)] == [0, 9]
    assert (layout.payload_bytes, layout.slot_bytes, layout.arena_stop) == (0, 0, 0)
    assert layout.scratch_numel == ALIGN_NUMEL
