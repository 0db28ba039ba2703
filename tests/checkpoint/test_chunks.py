"""Boxes of ranges and shards: exact, few, and told to DCP by whoever holds them."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list, _create_write_items
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_offload.core import dtensor
from fsdp_offload.core.chunks import Box, covers, flat_boxes
from fsdp_offload.core.errors import UnsupportedParameterError
from fsdp_offload.core.ragged import attach_ragged
from tests.checkpoint import stand_in

MOST_DIMS = 4


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """A shape (dims of size 1 and 0 included) and a range of its elements."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=MOST_DIMS)))
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


def elements(shape: Sequence[int], box: Box) -> list[int]:
    """Row-major positions of the elements of ``box``."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    spans = [range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)]
    return [
        sum(i * stride for i, stride in zip(at, strides, strict=True))
        for at in itertools.product(*spans)
    ]


# --------------------------------------------------------------------------- flat_boxes


@given(ranges())
@settings(max_examples=300)
def test_boxes_of_a_range_are_the_range_in_its_order(
    case: tuple[tuple[int, ...], int, int],
) -> None:
    shape, start, stop = case
    boxes = flat_boxes(shape, start, stop)

    assert [e for box in boxes for e in elements(shape, box)] == list(range(start, stop))
    assert all(box.numel for box in boxes)


def fewest(shape: tuple[int, ...]) -> dict[tuple[int, int], int]:
    """How many contiguous boxes each range needs, by trying all of them."""
    spans = []
    sizes = [range(1, n + 1) for n in shape]
    for size in itertools.product(*sizes):
        for at in itertools.product(*(range(n - s + 1) for n, s in zip(shape, size, strict=True))):
            found = elements(shape, Box(at, size))
            if found == list(range(found[0], found[0] + len(found))):
                spans.append((found[0], found[-1] + 1))
    numel = math.prod(shape)
    needed = {(start, start): 0 for start in range(numel)}
    for start in range(numel):
        for stop in range(start + 1, numel + 1):
            ends = [a for a, b in spans if b == stop and (start, a) in needed]
            needed[start, stop] = 1 + min(needed[start, a] for a in ends)
    return needed


@pytest.mark.parametrize(
    "shape", [(6,), (4, 3), (3, 1), (1, 5), (3, 2, 3), (2, 1, 4), (2, 2, 2, 2)]
)
def test_no_fewer_contiguous_boxes_make_a_range(shape: tuple[int, ...]) -> None:
    for (start, stop), count in fewest(shape).items():
        assert len(flat_boxes(shape, start, stop)) == count, (shape, start, stop)


@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_a_range_of_a_matrix_is_at_most_three_boxes(rows: int, columns: int, data: Any) -> None:
    start = data.draw(st.integers(0, rows * columns))
    stop = data.draw(st.integers(start, rows * columns))

    assert len(flat_boxes((rows, columns), start, stop)) <= 3


def test_a_range_outside_of_the_tensor_is_refused() -> None:
    with pytest.raises(AssertionError):
        flat_boxes((3, 2), 0, 7)


def test_boxes_of_a_huge_tensor_take_no_time() -> None:
    rows, columns = 2**40, 2**20

    assert flat_boxes((rows, columns), 3, rows * columns - 1)[1] == Box((1, 0), (rows - 2, columns))


# --------------------------------------------------------------------------- covers


@st.composite
def piles(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A small shape and boxes within it, which overlap, leave holes, or are empty."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    boxes = []
    for _ in range(draw(st.integers(0, 6))):
        offsets = tuple(draw(st.integers(0, n)) for n in shape)
        sizes = tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offsets, strict=True))
        boxes.append(Box(offsets, sizes))
    return shape, boxes


@given(piles())
@settings(max_examples=500)
def test_covers_is_what_counting_finds(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    met = {e for box in boxes for e in elements(shape, box)}

    assert covers(shape, boxes) == (len(met) == math.prod(shape))


@given(ranges(), st.data())
def test_a_tiling_covers_and_without_a_box_does_not(
    case: tuple[tuple[int, ...], int, int], data: Any
) -> None:
    shape, start, stop = case
    pieces = ((0, start), (start, stop), (stop, math.prod(shape)))
    boxes = [box for piece in pieces for box in flat_boxes(shape, *piece)]
    assert covers(shape, data.draw(st.permutations(boxes)) + boxes[:1])
    for left_out in range(len(boxes)):
        assert not covers(shape, boxes[:left_out] + boxes[left_out + 1 :])


@pytest.mark.parametrize(
    "box", [Box((0,), (4,)), Box((0, 0), (4, 4)), Box((-1, 0), (5, 3)), Box((1, 0), (-1, 3))]
)
def test_a_box_of_another_tensor_is_no_cover(box: Box) -> None:
    assert not covers((4, 3), [Box((0, 0), (4, 3)), box])


def test_covers_is_quick_for_many_boxes() -> None:
    many, side = 20_000, 60
    rows = [Box((3 * i, 0), (3, 8)) for i in range(many)]
    columns = [Box((0, 3 * i), (8, 3)) for i in range(many)]
    grid = [Box((i, j), (1, 1)) for i in range(side) for j in range(side)]
    start = time.thread_time()  # other processes do not count
    assert covers((3 * many, 8), rows)
    assert not covers((3 * many, 8), rows[:-1])
    assert covers((8, 3 * many), columns)
    assert covers((side, side), grid)
    assert time.thread_time() - start < 5  # 0.3 s


# --------------------------------------------------------------------------- answers to DCP


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...], rank: int) -> DeviceMesh:
    """A mesh as ``rank`` sees it, without process groups.

    Meshes of different ranks compare equal, and DTensor's dispatch remembers the first one, so no
    operation may run on their DTensors (``nn.Parameter`` would run ``detach``).
    """
    ranks = torch.arange(math.prod(shape)).view(shape)
    return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)


SHAPE = (5, 3)


def ragged_state(rank: int = 1) -> tuple[DTensor, Tensor]:
    """State of a DTensor that holds elements [4, 11) of 15: three boxes; and its flat shard."""
    mesh = mesh_of((3,), ("dp",), rank)
    shard = torch.arange(4.0, 11.0)
    spec = stand_in.spec_of(mesh, [Shard(0)], SHAPE, shard.dtype)
    made = DTensor(shard, spec, requires_grad=False)
    attached = attach_ragged(made, shard, SHAPE, 4, 11)
    assert attached is made
    return made, shard


def check_answers(state: Tensor, values: Tensor, fqn: str = "w") -> None:
    """Items, chunks and data agree, and the data are views of the tensor's own local shard."""
    items = _create_write_items(fqn, state)
    chunks = _create_chunk_list(state)
    assert [i.tensor_data.chunk for i in items] == chunks
    assert {(tuple(i.tensor_data.size), i.tensor_data.properties.dtype) for i in items} == {
        (SHAPE, values.dtype)
    }
    assert [tuple(c.offsets) for c in chunks] == [(1, 1), (2, 0), (3, 0)]
    whole = torch.zeros(SHAPE)
    for item in items:
        piece = find_tensor_shard(state, item.index)
        assert piece.untyped_storage().data_ptr() == state._local_tensor.data_ptr()
        chunk = item.tensor_data.chunk
        where = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
        whole[where] = piece
    assert torch.equal(whole.view(-1)[4:11], values)
    assert not whole.view(-1)[:4].any()
    assert not whole.view(-1)[11:].any()


def test_a_ragged_shard_answers_in_boxes() -> None:
    state, shard = ragged_state()
    check_answers(state, shard)
    with pytest.raises(ValueError, match="no chunk of this rank starts at"):
        find_tensor_shard(state, MetadataIndex("w", torch.Size((0, 0))))


def by_pickle(state: Tensor) -> Tensor:
    return pickle.loads(pickle.dumps(state))


def by_file(state: Tensor) -> Tensor:
    buffer = io.BytesIO()
    torch.save({"w": state}, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)["w"]


def by_stager(state: Tensor) -> Tensor:
    return StateDictStager().stage({"w": state})["w"]


@pytest.mark.parametrize("way", [by_pickle, copy.deepcopy, by_file, by_stager])
def test_the_answers_follow_a_copy_of_the_tensor(way: Callable[[Tensor], Tensor]) -> None:
    state, shard = ragged_state()
    copied = way(state)
    values = shard.clone()
    shard.zero_()  # the copy speaks of its own memory

    check_answers(copied, values)


def test_what_is_written_into_a_chunk_is_in_the_shard() -> None:
    state, shard = ragged_state()
    for number, chunk in enumerate(_create_chunk_list(state)):
        find_tensor_shard(state, MetadataIndex("w", chunk.offsets)).fill_(number)

    assert shard.tolist() == [0, 0, 1, 1, 1, 2, 2]


def test_only_the_writing_replica_writes_and_all_load() -> None:
    state, shard = ragged_state()
    attach_ragged(state, shard, SHAPE, 4, 11, writes=False)

    assert _create_write_items("w", state) == []
    assert len(_create_chunk_list(state)) == 3


def test_an_empty_shard_holds_nothing_but_a_tensor_without_elements_is_saved() -> None:
    empty = torch.empty(0)
    for shape, count in (((4, 3), 0), ((0, 3), 1)):
        made = attach_ragged(empty.clone(), empty, shape, 0, 0)
        items = _create_write_items("w", made)
        assert len(items) == len(_create_chunk_list(made)) == count
        assert all(find_tensor_shard(made, item.index).shape == (0, 3) for item in items)


# --------------------------------------------------------------------------- tilings


def written(items: Iterator[WriteItem] | list[WriteItem], shape: tuple[int, ...]) -> Counter[int]:
    """How often each element of the global tensor is written."""
    counts: Counter[int] = Counter()
    for item in items:
        chunk = item.tensor_data.chunk
        assert tuple(item.tensor_data.size) == shape
        counts.update(elements(shape, Box(tuple(chunk.offsets), tuple(chunk.sizes))))
    return counts


def check_tiling(
    states: list[Tensor], shape: tuple[int, ...], *, replicas: int, deduplicate: bool
) -> None:
    """Every element is written once; and every replica loads all of them."""
    plans = [SavePlan(_create_write_items("w", state)) for state in states]
    if deduplicate:
        plans = dedup_save_plans(plans)
    numel = math.prod(shape)
    once = written([item for plan in plans for item in plan.items], shape)
    assert once == Counter(range(numel))
    loaded: Counter[int] = Counter()
    boxes = []
    for state in states:
        for chunk in _create_chunk_list(state):
            boxes.append(Box(tuple(chunk.offsets), tuple(chunk.sizes)))
            loaded.update(elements(shape, boxes[-1]))
            found = find_tensor_shard(state, MetadataIndex("w", chunk.offsets))
            assert tuple(found.shape) == boxes[-1].sizes
    assert loaded == Counter({element: replicas for element in range(numel)})
    assert covers(shape, boxes)


shapes = st.lists(st.integers(1, 7), min_size=1, max_size=MOST_DIMS).map(tuple)


def canonical(
    shape: tuple[int, ...], sizes: tuple[int, ...], placements: list[Placement]
) -> list[Tensor]:
    """State of an FSDP2 parameter on every rank of a mesh."""
    states = []
    for rank in range(math.prod(sizes)):
        mesh = mesh_of(sizes, ("a", "b", "c")[: len(sizes)], rank)
        local_shape, _ = compute_local_shape_and_global_offset(
            torch.Size(shape), mesh, tuple(placements)
        )
        spec = stand_in.spec_of(mesh, placements, shape, torch.bfloat16)
        parameter = DTensor(
            torch.empty(local_shape, dtype=torch.bfloat16), spec, requires_grad=False
        )
        assert dtensor.ragged_of(parameter) is None
        states.append(dtensor.like(parameter, torch.empty(local_shape)))
    return states


@given(shapes, st.integers(1, 64))
@settings(max_examples=25)
def test_fsdp_shards_tile(shape: tuple[int, ...], size: int) -> None:
    states = canonical(shape, (size,), [Shard(0)])
    check_tiling(states, shape, replicas=1, deduplicate=True)


@given(shapes, st.integers(1, 8), st.integers(1, 8))
@settings(max_examples=25)
def test_hsdp_shards_tile_and_replicas_write_once(
    shape: tuple[int, ...], outer: int, size: int
) -> None:
    states = canonical(shape, (outer, size), [Replicate(), Shard(0)])
    check_tiling(states, shape, replicas=outer, deduplicate=True)


@given(shapes, st.integers(1, 8), st.sampled_from([1, 2, 4]), st.data())
@settings(max_examples=25)
def test_fsdp_and_tp_shards_tile(
    shape: tuple[int, ...], size: int, tp: int, data: st.DataObject
) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    shape = (shape[0] * tp, *shape[1:]) if dim == 0 else shape
    first: Placement = _StridedShard(0, split_factor=tp) if dim == 0 else Shard(0)
    states = canonical(shape, (size, tp), [first, Shard(dim)])
    check_tiling(states, shape, replicas=1, deduplicate=True)


def under_fake_ranks(size: int, fn: Callable[[], list[Tensor]]) -> list[list[Tensor]]:
    """``fn`` on every rank of a world that consists of this process alone, one after the other."""
    found = []
    for rank in range(size):
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
        try:
            found.append(fn())
        finally:
            dist.destroy_process_group()
            _clear_sharding_prop_cache()  # it remembers the mesh of this rank
    return found


def fsdp_in_tp_state() -> list[Tensor]:
    """State of a layer that FSDP2 has sharded over 3 ranks, within TP over 2 and 2 replicas."""
    mesh = init_device_mesh("cpu", (2, 3, 2), mesh_dim_names=("outer", "dp", "tp"))
    layer = parallelize_module(nn.Linear(3, 14), mesh["tp"], ColwiseParallel())
    fully_shard(layer, mesh=mesh["outer", "dp"])
    assert layer.weight.placements[0] == Replicate()
    assert isinstance(layer.weight.placements[1], _StridedShard)
    return [dtensor.like(p, dtensor.local(p).double()) for p in layer.parameters()]


def test_shards_of_real_fsdp_within_tp_tile() -> None:
    weights, biases = zip(*under_fake_ranks(12, fsdp_in_tp_state), strict=True)
    check_tiling(list(weights), (14, 3), replicas=2, deduplicate=True)
    check_tiling(list(biases), (14,), replicas=2, deduplicate=True)


def ragged(
    shape: tuple[int, ...],
    spans: list[tuple[int, int]],
    *,
    outer: int,
    tp: int = 1,
    tp_dim: int | None = None,
) -> list[Tensor]:
    """State of a Megatron-FSDP parameter on every rank; ``spans``: ranges of the block by rank."""
    names = ("outer", "dp", "tp")
    placements: list[Placement] = [Replicate(), Shard(0), Replicate()]
    if tp_dim is not None:
        placements[2] = Shard(tp_dim)
    index = stand_in.DistIndex("dp", "outer", "tp")
    states = []
    for rank in range(outer * len(spans) * tp):
        mesh = mesh_of((outer, len(spans), tp), names, rank)
        start, stop = spans[mesh.get_coordinate()[1]]
        spec = stand_in.spec_of(mesh, placements, shape, torch.float32)
        parameter = DTensor(torch.empty(stop - start), spec, requires_grad=False)
        parameter.megatron_fsdp_dist_index = index
        parameter.megatron_fsdp_slice = slice(start, stop)
        bound = dtensor.shard_info(parameter, "w").max_local_numel
        assert max(b - a for a, b in spans) <= bound <= math.prod(shape)
        states.append(dtensor.like(parameter, torch.empty(stop - start)))
    return states


@given(shapes, st.integers(1, 64), st.integers(1, 3), st.data())
@settings(max_examples=25)
def test_ragged_shards_tile_without_the_help_of_dcp(
    shape: tuple[int, ...], size: int, outer: int, data: st.DataObject
) -> None:
    """Any cuts, also within rows, several on one element (empty shards); replicas write once."""
    numel = math.prod(shape)
    size = max(1, size // outer)
    at = sorted(data.draw(st.lists(st.integers(0, numel), min_size=size - 1, max_size=size - 1)))
    spans = list(itertools.pairwise([0, *at, numel]))
    check_tiling(ragged(shape, spans, outer=outer), shape, replicas=outer, deduplicate=False)


@given(shapes, st.integers(1, 8), st.sampled_from([1, 2, 4]), st.data())
@settings(max_examples=25)
def test_ragged_shards_of_tensor_parallel_blocks_tile(
    shape: tuple[int, ...], size: int, tp: int, data: st.DataObject
) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    shape = tuple(n * tp if i == dim else n for i, n in enumerate(shape))
    numel = math.prod(shape) // tp
    at = sorted(data.draw(st.lists(st.integers(0, numel), min_size=size - 1, max_size=size - 1)))
    spans = list(itertools.pairwise([0, *at, numel]))
    states = ragged(shape, spans, outer=1, tp=tp, tp_dim=dim)
    check_tiling(states, shape, replicas=1, deduplicate=False)


def test_a_slice_of_another_length_than_the_shard_is_refused() -> None:
    mesh = mesh_of((2,), ("dp",), 0)
    spec = stand_in.spec_of(mesh, [Shard(0)], SHAPE, torch.float32)
    parameter = DTensor(torch.empty(6), spec, requires_grad=False)
    parameter.megatron_fsdp_slice = slice(0, 9)
    with pytest.raises(UnsupportedParameterError, match="6 elements on this rank"):
        dtensor.shard_info(parameter, "w")


def test_chunk_metadata_that_a_parameter_brings_are_kept() -> None:
    mesh = mesh_of((2,), ("dp",), 0)
    spec = stand_in.spec_of(mesh, [Shard(0)], SHAPE, torch.float32)
    parameter = DTensor(torch.empty(1, 3), spec, requires_grad=False)
    donor = attach_ragged(torch.empty(3), torch.empty(3), SHAPE, 9, 12)
    parameter._local_tensor.__create_chunk_list__ = donor.__create_chunk_list__
    state = dtensor.like(parameter, torch.empty(1, 3))

    assert [tuple(chunk.offsets) for chunk in _create_chunk_list(state)] == [(3, 0)]
    parameter._local_tensor.__create_chunk_list__ = lambda: 2 * donor.__create_chunk_list__()
    with pytest.raises(UnsupportedParameterError, match="several chunks"):
        dtensor.like(parameter, torch.empty(1, 3))


def test_other_cuts_are_another_placement() -> None:
    def made(start: int) -> DTensor:
        mesh = mesh_of((3,), ("dp",), 0)
        spec = stand_in.spec_of(mesh, [Shard(0)], SHAPE, torch.float32)
        parameter = DTensor(torch.empty(1, 3), spec, requires_grad=False)
        parameter.megatron_fsdp_slice = slice(start, start + 3)
        return parameter

    parameter, other = made(3), made(6)
    state = dtensor.like(parameter, torch.empty(1, 3))
    assert dtensor.same_placement(parameter, state)
    assert not dtensor.same_placement(other, state)
    assert dtensor.same_placement(other, torch.zeros_like(state))  # tells nothing of its cuts
