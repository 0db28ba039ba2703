"""Shards that are cut elsewhere than their placements say: what DCP is told, on every rank."""

from __future__ import annotations

import copy
import io
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list, _create_write_items
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fsdp_offload.checkpoint import megatron_fsdp
from fsdp_offload.core import dtensor
from fsdp_offload.core.chunks import attach_chunk
from fsdp_offload.core.errors import UnsupportedParameterError
from tests.checkpoint import stand_in

SHAPE = (5, 3)
Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...], rank: int) -> DeviceMesh:
    """A mesh as ``rank`` sees it, without process groups.

    Meshes of different ranks compare equal, and DTensor's dispatch remembers the first one, so no
    operation may run on their DTensors (``nn.Parameter`` would run ``detach``).
    """
    ranks = torch.arange(math.prod(shape)).view(shape)
    return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)


def bare(
    rows: int, *, size: int = 3, rank: int = 1, span: slice | None = None
) -> tuple[DTensor, Tensor]:
    """A DTensor of ``SHAPE`` with so many rows here, and its shard; ``span``: Megatron-FSDP's."""
    shard = torch.arange(3.0 * rows).view(rows, 3)
    spec = stand_in.spec_of(mesh_of((size,), ("dp",), rank), [Shard(0)], SHAPE, shard.dtype)
    made = DTensor(shard, spec, requires_grad=False)
    if span is not None:
        made.megatron_fsdp_slice = span
        megatron_fsdp.describe([made])
    return made, shard


def boxes_of(chunks: Sequence[ChunkStorageMetadata]) -> list[Box]:
    return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]


def check_answers(state: Tensor, values: Tensor) -> None:
    """Items, chunks and data agree, and the data are views of the tensor's own local shard."""
    (item,) = _create_write_items("w", state)
    assert boxes_of([item.tensor_data.chunk]) == boxes_of(_create_chunk_list(state))
    assert boxes_of([item.tensor_data.chunk]) == [((1, 0), (3, 3))]
    assert tuple(item.tensor_data.size) == SHAPE
    assert item.tensor_data.properties.dtype == values.dtype
    found = find_tensor_shard(state, item.index)
    assert found.untyped_storage().data_ptr() == state._local_tensor.data_ptr()
    assert torch.equal(found, values)


def test_an_uneven_shard_answers_with_its_box() -> None:
    state, shard = bare(3)
    assert attach_chunk(state, shard, SHAPE, (1, 0)) is state

    check_answers(state, shard)
    with pytest.raises(ValueError, match="no chunk of this rank starts at"):
        find_tensor_shard(state, MetadataIndex("w", torch.Size((0, 0))))
    attach_chunk(state, shard, SHAPE, (1, 0), writes=False)
    assert _create_write_items("w", state) == []
    assert len(_create_chunk_list(state)) == 1


def by_file(state: Tensor) -> Tensor:
    buffer = io.BytesIO()
    torch.save({"w": state}, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)["w"]


def by_stager(state: Tensor) -> Tensor:
    return StateDictStager().stage({"w": state})["w"]


@pytest.mark.parametrize("way", [copy.deepcopy, by_file, by_stager])
def test_the_answers_follow_a_copy_of_the_tensor(way: Callable[[Tensor], Tensor]) -> None:
    state, shard = bare(3)
    copied = way(attach_chunk(state, shard, SHAPE, (1, 0)))
    values = shard.clone()
    shard.zero_()  # the copy speaks of its own memory

    check_answers(copied, values)


def test_an_empty_shard_holds_nothing_but_a_tensor_without_elements_is_saved() -> None:
    empty = torch.empty(0, 3)
    for shape, count in (((4, 3), 0), ((0, 3), 1)):
        made = attach_chunk(empty.clone(), empty, shape, (0, 0))
        items = _create_write_items("w", made)
        assert len(items) == len(_create_chunk_list(made)) == count
        assert all(find_tensor_shard(made, item.index).shape == (0, 3) for item in items)


def test_a_slice_that_is_not_that_of_the_shard_is_refused() -> None:
    for span in (slice(0, 9), slice(1, 7)):
        with pytest.raises(UnsupportedParameterError, match="a shard of \\(2, 3\\)"):
            bare(2, span=span)


def test_a_shard_that_does_not_say_where_it_was_cut_is_refused() -> None:
    with pytest.raises(UnsupportedParameterError, match=r"megatron_fsdp\.describe"):
        dtensor.shard_info(bare(3)[0], "w")
    assert dtensor.shard_info(bare(2)[0], "w").local_shape == (2, 3)


def test_chunk_metadata_that_a_parameter_brings_are_kept() -> None:
    parameter, shard = bare(1)
    donor = attach_chunk(torch.empty(1, 3), torch.empty(1, 3), SHAPE, (3, 0))
    parameter._local_tensor.__create_chunk_list__ = donor.__create_chunk_list__
    state = dtensor.like(parameter, shard)

    assert boxes_of(_create_chunk_list(state)) == [((3, 0), (1, 3))]
    parameter._local_tensor.__create_chunk_list__ = lambda: 2 * donor.__create_chunk_list__()
    with pytest.raises(UnsupportedParameterError, match="one chunk"):
        dtensor.like(parameter, shard)


def test_other_cuts_are_another_placement() -> None:
    (parameter, shard), (other, _) = bare(1, span=slice(3, 6)), bare(1, span=slice(6, 9))
    state = dtensor.like(parameter, shard)

    assert dtensor.same_placement(parameter, state)
    assert not dtensor.same_placement(other, state)
    assert dtensor.same_placement(other, torch.zeros_like(state))  # tells nothing of its cuts


def elements(shape: tuple[int, ...], box: Box) -> list[int]:
    """Row-major numbers of the elements in a box."""
    inside = tuple(slice(o, o + n) for o, n in zip(*box, strict=True))
    return torch.arange(math.prod(shape)).view(shape)[inside].reshape(-1).tolist()


def check_tiling(states: list[Tensor], shape: tuple[int, ...], *, replicas: int) -> None:
    """Every replica loads every element; each is written once, if each rank says what it writes."""
    written: Counter[int] = Counter()
    loaded: Counter[int] = Counter()
    for state in states:
        for item in _create_write_items("w", state):
            written.update(elements(shape, boxes_of([item.tensor_data.chunk])[0]))
        for box in boxes_of(_create_chunk_list(state)):
            loaded.update(elements(shape, box))
            found = find_tensor_shard(state, MetadataIndex("w", torch.Size(box[0])))
            assert tuple(found.shape) == box[1]
    assert set(written) == set(range(math.prod(shape)))
    assert all(count in (1, replicas) for count in written.values())
    assert loaded == Counter({element: replicas for element in range(math.prod(shape))})


@given(st.data(), st.integers(1, 8), st.integers(1, 3), st.sampled_from([1, 2, 4]))
@settings(max_examples=25)
def test_shards_of_megatron_fsdp_tile(data: Any, size: int, outer: int, tp: int) -> None:
    """Any rows, several cuts in one place (empty shards), within blocks of tensor parallelism;
    replicas write once."""
    block = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple))
    dim = data.draw(st.integers(0, len(block) - 1))
    shape = tuple(n * tp if i == dim else n for i, n in enumerate(block))
    ends = st.lists(st.integers(0, block[0]), min_size=size - 1, max_size=size - 1)
    row, spans = math.prod(block[1:]), [0, *sorted(data.draw(ends)), block[0]]
    placements: list[Placement] = [Replicate(), Shard(0), Shard(dim)]
    states = []
    for rank in range(outer * size * tp):
        mesh = mesh_of((outer, size, tp), ("outer", "dp", "tp"), rank)
        start, stop = list(itertools.pairwise(spans))[mesh.get_coordinate()[1]]
        spec = stand_in.spec_of(mesh, placements, shape, torch.float32)
        shard = torch.empty(stop - start, *block[1:])
        parameter = DTensor(shard, spec, requires_grad=False)
        parameter.megatron_fsdp_dist_index = stand_in.DistIndex("dp", "outer", "tp")
        parameter.megatron_fsdp_slice = slice(start * row, stop * row)
        megatron_fsdp.describe([parameter])
        states.append(dtensor.like(parameter, shard.clone()))

    check_tiling(states, shape, replicas=outer)
    writers = [rank for rank, state in enumerate(states) if _create_write_items("w", state)]
    assert all(rank < size * tp for rank in writers)
