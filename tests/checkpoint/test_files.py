"""The plugins in ``dcp.save`` and ``dcp.load``: every byte of what is read is verified."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from fsdp_offload import CheckpointCorruptError, CheckpointError, ConfigError
from fsdp_offload.checkpoint import Reader, Writer, files, latest, reader, writer
from fsdp_offload.checkpoint.files import Checksums, encode_table, read_table
from tests.helpers.compare import assert_same

pytestmark = [
    # of torch, which saves and loads in one process here
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]

BLOCK = 256
DATA = "__0_0.distcp"


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few hundred elements are many blocks."""
    monkeypatch.setattr(writer, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(reader, "SLICE_BYTES", 4 * BLOCK)


def some_state() -> dict[str, Any]:
    """Elements over several blocks and at their edges, all kinds of values."""
    generator = torch.Generator().manual_seed(1)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "several": rand(17, 33),
        "exact": rand(2, BLOCK // 4),
        "one_less": rand(BLOCK // 4 - 1),
        "half": rand(501).to(torch.bfloat16),
        "short": torch.arange(300).to(torch.uint16),
        "odd": (rand(777) > 0),
        "turned": rand(19, 23).t(),
        "strided": rand(40, 40)[::3, 5:31],
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "options": {"lr": 0.1, "name": "x" * 3000},
    }


def write(folder: Path, state: dict[str, Any], **options: Any) -> None:
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, storage_writer=Writer(folder, **options), planner=planner)


def blank(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: torch.zeros_like(value, memory_format=torch.contiguous_format)
        if isinstance(value, Tensor)
        else None
        for name, value in state.items()
    }


def read(folder: Path, targets: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The targets filled; errors as the plugin raised them."""
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        dcp.load(targets, storage_reader=Reader(folder, **options), planner=planner)
    except CheckpointException as error:
        raise error.failures[0][0] from error
    return targets


def place_of(folder: Path, name: str) -> tuple[Any, int]:
    """Where an item lies, and where in the file its elements begin."""
    infos = dcp.FileSystemReader(folder).read_metadata().storage_data
    info = next(info for index, info in infos.items() if index.fqn == name)
    table = read_table(folder / info.relative_path)
    assert table is not None
    checksums = table.of([(i.offset, i.length) for i in infos.values()], folder)
    return info, info.offset + checksums[info.offset].data_start


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize(("small", "threads"), [(False, None), (True, 1), (True, 4)])
def test_what_is_written_is_read(
    tmp_path: Path, request: pytest.FixtureRequest, threads: int | None, small: bool
) -> None:
    """By this package, and by torch without it."""
    if small:
        request.getfixturevalue("small_blocks")
    state, found = some_state(), blank(some_state())
    write(tmp_path / "one", state, threads=threads)
    assert_same(read(tmp_path / "one", blank(state), threads=threads), state)
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(found, checkpoint_id=tmp_path / "one", planner=planner)
    assert_same(found, state)


def test_the_path_may_be_given_to_dcp(tmp_path: Path) -> None:
    state = {"a": torch.arange(5.0)}
    dcp.save(state, checkpoint_id=tmp_path / "b", storage_writer=Writer(tmp_path / "a"))
    assert latest(tmp_path) == tmp_path / "b"
    found = {"a": torch.zeros(5)}
    dcp.load(found, checkpoint_id=tmp_path / "b", storage_reader=Reader(tmp_path / "a"))
    assert_same(found, state)


def test_short_writes_and_reads_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:7], at))
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: preadv(fd, [into[0][:5]], at))
    state = some_state()
    write(tmp_path / "one", state)
    assert_same(read(tmp_path / "one", blank(state)), state)


def test_the_first_error_ends_the_other_jobs() -> None:
    ran: list[int] = []

    def job(index: int) -> None:
        if index == 2:
            raise CheckpointError("job 2")
        ran.append(index)

    with pytest.raises(CheckpointError, match="job 2"):
        files.run_all([lambda i=i: job(i) for i in range(1000)], threads=1)  # type: ignore[misc]
    assert len(ran) < 1000


class PartPlanner(dcp.DefaultLoadPlanner):
    """Asks for one box of one tensor, whatever the target's layout."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self._values = values

    def lookup_tensor(self, index: Any) -> Tensor:
        return self._values


def read_box(folder: Path, name: str, values: Tensor, offsets: list[int]) -> Tensor:
    """Fill ``values`` from ``offsets`` on."""
    found = Reader(folder, threads=2)
    metadata = found.read_metadata()
    found.set_up_storage_reader(metadata, is_coordinator=False)
    entry = metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata)
    index = dcp.metadata.MetadataIndex(name, entry.chunks[0].offsets)
    zeros = torch.Size([0] * values.dim())
    request = ReadItem(LoadItemType.TENSOR, index, zeros, index, torch.Size(offsets), values.shape)
    found.read_data(LoadPlan([request]), PartPlanner(values)).wait()
    return values


@given(data=st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_box_is_read_across_blocks(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    shape = data.draw(st.lists(st.integers(1, 14), min_size=1, max_size=3))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]))
    whole = torch.randint(256, (torch.Size(shape).numel(),)).to(dtype).reshape(shape)
    starts = [data.draw(st.integers(0, size - 1)) for size in shape]
    stops = [data.draw(st.integers(a + 1, size)) for a, size in zip(starts, shape, strict=True)]
    sizes = [b - a for a, b in zip(starts, stops, strict=True)]
    wanted = data.draw(st.sampled_from([dtype, torch.float64, torch.bfloat16]))
    values = torch.zeros(sizes, dtype=wanted)
    if data.draw(st.booleans()):  # a target that is not contiguous
        values = torch.zeros([*sizes, 2], dtype=wanted)[..., 0]
    folder = tmp_path_factory.mktemp("box") / "one"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "BLOCK_BYTES", data.draw(st.sampled_from([3, 16, 64, 1024])))
        patch.setattr(reader, "SLICE_BYTES", data.draw(st.sampled_from([1, 64, 4096])))
        write(folder, {"t": whole})
        found = read_box(folder, "t", values, starts)
    box = tuple(slice(a, b) for a, b in zip(starts, stops, strict=True))
    assert torch.equal(found, whole[box].to(wanted))


@pytest.mark.usefixtures("small_blocks")
def test_a_partial_read_touches_and_verifies_its_own_blocks_only(tmp_path: Path) -> None:
    whole = torch.randn(64, 32)  # 128 bytes a row: two rows a block
    write(tmp_path / "one", {"t": whole})
    path, (info, start) = tmp_path / "one" / DATA, place_of(tmp_path / "one", "t")
    first = (start - info.offset + 10 * 128) // BLOCK  # of rows 10 to 17
    last = (start - info.offset + 18 * 128 - 1) // BLOCK
    for block in (0, first - 1, last + 1):
        flip(path, info.offset + block * BLOCK + 100)
    found = read_box(tmp_path / "one", "t", torch.zeros(8, 32), [10, 0])
    assert torch.equal(found, whole[10:18])
    with pytest.raises(CheckpointCorruptError, match=r"__0_0\.distcp.*checksum"):
        read_box(tmp_path / "one", "t", torch.zeros(12, 32), [8, 0])


def test_a_table_comes_back_as_it_was(tmp_path: Path) -> None:
    checksums = [Checksums(64, [1, 0xFFFFFFFF]), Checksums(0, [7])]
    path = tmp_path / "file"
    path.write_bytes(b"x" * 105 + encode_table(checksums, 60))
    table = read_table(path)
    assert table is not None
    found = table.of([(100, 5), (0, 100)], path)
    assert [(c.data_start, list(c.crcs)) for c in (found[0], found[100])] == [
        (64, [1, 0xFFFFFFFF]),
        (0, [7]),
    ]
    for other in ([(0, 100)], [(0, 100), (100, 5), (105, 1)], [(0, 10), (100, 5)]):
        with pytest.raises(CheckpointCorruptError, match="table"):
            table.of(other, path)


@given(st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_changed_table_is_refused_or_not_ours(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    encoded = bytearray(encode_table([Checksums(1, [4, 5])], 64))
    path = tmp_path_factory.mktemp("table") / "file"
    in_block_bytes = range(len(encoded) - 12, len(encoded) - 8)
    at = data.draw(st.integers(0, len(encoded) - 1).filter(lambda at: at not in in_block_bytes))
    encoded[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(b"y" * 9 + encoded)
    if at >= len(encoded) - len(files.MAGIC):
        assert read_table(path) is None
    else:
        with pytest.raises(CheckpointCorruptError, match="file"):
            read_table(path)


def test_ranks_that_do_not_talk_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="use_collectives=False"):
        dcp.save({"a": 1}, storage_writer=Writer(tmp_path / "one"), use_collectives=False)
    assert not list(tmp_path.iterdir())


def test_a_file_that_shrinks_while_it_is_read_is_told(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"123")
    descriptor = os.open(path, os.O_RDONLY)
    with pytest.raises(CheckpointCorruptError, match="ends at byte 3"):
        files.read_bytes(descriptor, 0, bytearray(5), path)
    os.close(descriptor)


def test_metadata_of_a_later_torch_have_the_fields_of_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.15 has strides in them, and torch 2.13 takes five fields, no more."""
    given: list[int] = []
    five = TensorProperties.__getstate__
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: (*five(self)[:5], (3, 1)))
    monkeypatch.setattr(TensorProperties, "__setstate__", lambda _, state: given.append(len(state)))
    write(tmp_path / "one", {"t": torch.zeros(2, 3)})
    dcp.FileSystemReader(tmp_path / "one").read_metadata()
    assert given == [5]
