"""Files of one rank: written in parallel, read in part, every byte of what is read verified."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import zipfile
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from fsdp_offload import CheckpointCorruptError, CheckpointError
from fsdp_offload.checkpoint import blocks, reader, writer
from fsdp_offload.checkpoint.items import MAGIC, TAIL_BYTES, Item, Table, read_table, table_nbytes
from fsdp_offload.checkpoint.reader import CheckpointReader, read_metadata
from fsdp_offload.checkpoint.restore import read_into
from fsdp_offload.checkpoint.writer import RankFile, write_metadata

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # of torch, which saves and loads in one process here
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]

SMALL_BLOCK = 256


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few hundred elements are many blocks, and none is small enough to be written at once."""
    for module in (blocks, writer, reader):
        monkeypatch.setattr(module, "BLOCK_BYTES", SMALL_BLOCK)
    monkeypatch.setattr(writer, "SMALL_BYTES", 64)
    monkeypatch.setattr(reader, "PIECE_BYTES", 4 * SMALL_BLOCK)


def some_state() -> dict[str, Any]:
    """Elements over several blocks and at their edges, all kinds of values."""
    generator = torch.Generator().manual_seed(1)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "several": rand(17, 33),
        "exact": rand(2, SMALL_BLOCK // 4),
        "one_less": rand(SMALL_BLOCK // 4 - 1),
        "one_more": rand(SMALL_BLOCK // 4 + 1),
        "half": rand(501).to(torch.bfloat16),
        "odd": (rand(777) > 0),
        "turned": rand(19, 23).t(),
        "strided": rand(40, 40)[::3, 5:31],
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "options": {"lr": 0.1, "betas": (0.9, 0.99), "name": "x" * 3000},
    }


Saver = Callable[..., Path]


def write(folder: Path, state: dict[str, Any], *, threads: int | None = None, rank: int = 0) -> Any:
    """A rank's file and ``.metadata``, as a save makes them."""
    folder.mkdir(exist_ok=True)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(state, is_coordinator=True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    path = folder / f"__{rank}_0.distcp"
    file = RankFile(path, planner.finish_plan(plans[0]), planner, threads=threads)
    file.write(file.large)
    write_metadata(folder, metadata, [file.finish()])
    return metadata


def blank(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: torch.zeros_like(value, memory_format=torch.contiguous_format)
        if isinstance(value, Tensor)
        else None
        for name, value in state.items()
    }


def read(folder: Path, targets: dict[str, Any], **options: Any) -> dict[str, Any]:
    read_into(targets, read_metadata(folder), CheckpointReader(folder, **options))
    return targets


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert found[name].dtype == value.dtype, name
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


def item_of(folder: Path, name: str) -> Item:
    table = read_table(folder / "__0_0.distcp")
    assert table is not None
    return next(item for item in table.items if item.key[0] == name)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


# --------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("threads", [1, 3, None])
@pytest.mark.parametrize("small", [False, True])
def test_what_is_written_is_read(
    tmp_path: Path, request: pytest.FixtureRequest, threads: int | None, small: bool
) -> None:
    if small:
        request.getfixturevalue("small_blocks")
    state = some_state()
    write(tmp_path, state, threads=threads)
    assert_same(read(tmp_path, blank(state), threads=threads), state)


@pytest.mark.usefixtures("small_blocks")
def test_torch_reads_it_without_this_package(tmp_path: Path) -> None:
    state = some_state()
    write(tmp_path, state)
    found = blank(state)
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path), planner=planner, no_dist=True)
    assert_same(found, state)


@pytest.mark.usefixtures("small_blocks")
def test_every_item_is_an_archive_at_the_place_that_the_metadata_says(tmp_path: Path) -> None:
    state = some_state()
    write(tmp_path, state)
    metadata = read_metadata(tmp_path)
    places = sorted((i.offset, i.length) for i in metadata.storage_data.values())
    assert places[0][0] == 0
    for (offset, length), (after, _) in itertools.pairwise(places):
        assert offset + length == after, "a gap, or an overlap"
    data = (tmp_path / "__0_0.distcp").read_bytes()
    for index, info in metadata.storage_data.items():
        cut = tmp_path / "item"
        cut.write_bytes(data[info.offset : info.offset + info.length])
        assert_same({"": torch.load(cut, weights_only=True)}, {"": state[index.fqn]})
        with zipfile.ZipFile(cut) as archive:
            assert archive.testzip() is None


@pytest.mark.usefixtures("small_blocks")
def test_elements_are_aligned_and_large_items_stand_last(tmp_path: Path) -> None:
    state = some_state()
    write(tmp_path, state)
    table = read_table(tmp_path / "__0_0.distcp")
    assert table is not None
    assert table.block_bytes == SMALL_BLOCK
    tensors = [item for item in table.items if isinstance(state[item.key[0]], Tensor)]
    assert all(item.data_offset % 64 == 0 for item in tensors)
    large = [item.data_nbytes > 64 for item in tensors]
    assert large == sorted(large)
    data = (tmp_path / "__0_0.distcp").read_bytes()
    for item in table.items:
        stop = item.data_offset + item.data_nbytes
        cuts = range(item.data_offset, stop, SMALL_BLOCK)
        found = tuple(zlib.crc32(data[at : min(at + SMALL_BLOCK, stop)]) for at in cuts)
        assert item.crcs == (found or (0,)), item.key


@pytest.mark.usefixtures("small_blocks")
def test_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    found = []
    for name, threads in (("a", 1), ("b", 4), ("c", 4)):
        write(tmp_path / name, some_state(), threads=threads)
        found.append((tmp_path / name / "__0_0.distcp").read_bytes())
    assert found[0] == found[1] == found[2]


def test_a_rank_without_items_makes_no_file(tmp_path: Path) -> None:
    write(tmp_path, {})
    assert [path.name for path in tmp_path.iterdir()] == [".metadata"]


@given(
    sizes=st.lists(st.integers(0, 900), min_size=1, max_size=5),
    block=st.sampled_from([4, 64, 256, 1000]),
    threads=st.integers(1, 4),
)
@settings(
    max_examples=15,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_sizes_and_blocks(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], block: int, threads: int
) -> None:
    folder = tmp_path_factory.mktemp("sizes")
    state = {f"t{i}": torch.arange(float(size)) + i for i, size in enumerate(sizes)}
    with pytest.MonkeyPatch.context() as patch:
        for module in (blocks, writer, reader):
            patch.setattr(module, "BLOCK_BYTES", block)
        patch.setattr(writer, "SMALL_BYTES", 0)
        write(folder, state, threads=threads)
    assert_same(read(folder, blank(state), threads=threads), state)


# --------------------------------------------------------------------------- sources and threads


def write_item(name: str, shape: tuple[int, ...]) -> WriteItem:
    size = torch.Size(shape)
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(shape)), sizes=size)
    data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), size)
    return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.TENSOR, tensor_data=data)


@pytest.mark.usefixtures("small_blocks")
def test_a_copy_with_another_source_stands_for_an_entry(tmp_path: Path) -> None:
    """Bytes that were staged are written in the place of the tensor's own."""
    value = torch.arange(1000.0)
    staged = blocks.TensorSource(value + 1)

    class Planner(DefaultSavePlanner):
        def resolve_data(self, item: WriteItem) -> Any:
            return value.reshape(item.tensor_data.size)  # type: ignore[union-attr]

    items = [write_item("as it is", (10, 100)), write_item("staged", (1000,))]
    file = RankFile(tmp_path / "__0_0.distcp", dcp.SavePlan(items), Planner(), threads=2)
    assert [entry.item.index.fqn for entry in file.large] == ["as it is", "staged"]
    file.write([file.large[0]])
    file.write([dataclasses.replace(file.large[1], source=staged)])
    found = {
        r.index.fqn: torch.load(cut(tmp_path, r.storage_data), weights_only=True)
        for r in file.finish()
    }
    assert torch.equal(found["as it is"], value.reshape(10, 100))
    assert torch.equal(found["staged"], value + 1)


def cut(folder: Path, info: Any) -> Path:
    path = folder / "cut"
    data = (folder / info.relative_path).read_bytes()
    path.write_bytes(data[info.offset : info.offset + info.length])
    return path


class OnDevice:
    """A block that pretends to be elsewhere: it can only be copied into host memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.device = tensor, torch.device("meta")

    def numel(self) -> int:
        return self.tensor.numel()


def test_a_block_on_a_device_passes_through_one_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = torch.randint(256, (700,), dtype=torch.uint8)

    class Scratch:
        def copy_(self, block: OnDevice) -> Tensor:
            return block.tensor.clone()

    asked: list[int] = []
    monkeypatch.setattr(blocks, "scratch", lambda nbytes: asked.append(nbytes) or Scratch())
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    crc = blocks.write_block(descriptor, 11, OnDevice(data), "file")  # type: ignore[arg-type]
    os.close(descriptor)
    assert asked == [700]
    assert (tmp_path / "file").read_bytes() == bytes(11) + data.numpy().tobytes()
    assert crc == zlib.crc32(data.numpy().tobytes())


def test_each_thread_has_one_scratch_buffer() -> None:
    first = blocks.scratch(100)
    assert blocks.scratch(50).data_ptr() == first.data_ptr()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(blocks.scratch, 100).result().data_ptr() != first.data_ptr()


def test_short_writes_and_reads_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:7], at))
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: preadv(fd, [into[0][:5]], at))
    state = some_state()
    write(tmp_path, state)
    assert_same(read(tmp_path, blank(state)), state)


def test_blocks_are_positioned_and_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads write to one descriptor: the place is part of the call, in whatever order."""
    monkeypatch.setattr(writer, "run_all", lambda jobs, threads: backwards(list(jobs)))
    monkeypatch.setattr(writer, "BLOCK_BYTES", SMALL_BLOCK)
    monkeypatch.setattr(writer, "SMALL_BYTES", 0)
    state = some_state()
    write(tmp_path, state)
    assert_same(read(tmp_path, blank(state)), state)


def backwards(jobs: list[Callable[[], Any]]) -> list[Any]:
    return [job() for job in reversed(jobs)][::-1]


def test_the_first_error_ends_the_other_jobs() -> None:
    ran: list[int] = []

    def job(index: int) -> None:
        if index == 2:
            raise CheckpointError("job 2")
        ran.append(index)

    with pytest.raises(CheckpointError, match="job 2"):
        blocks.run_all([lambda i=i: job(i) for i in range(1000)], threads=1)  # type: ignore[misc]
    assert len(ran) < 1000


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"),
    [(1, 8, 1), (16, 4, 4), (64, 16, 4), (640, 1, blocks.MAX_THREADS)],
)
def test_threads_are_this_ranks_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(blocks, "local_ranks", lambda: ranks)
    assert blocks.thread_count() == threads


# --------------------------------------------------------------------------- partial reads


def reads_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(offset, bytes) of every positioned read from here on."""
    seen: list[tuple[int, int]] = []
    preadv = os.preadv

    def noted(fd: int, into: list[memoryview], at: int) -> int:
        seen.append((at, len(into[0])))
        return preadv(fd, into, at)

    monkeypatch.setattr(os, "preadv", noted)
    return seen


class Part:
    """The rows and columns of one rank, as the planner sees them."""

    def __init__(self, whole: Tensor, box: tuple[slice, ...]) -> None:
        self.shape = whole.shape
        self.box = box
        self.offsets = torch.Size([s.start for s in box])
        self.values = torch.zeros([s.stop - s.start for s in box], dtype=whole.dtype)


class PartPlanner:
    """Asks for one box of one tensor, whatever the target's layout."""

    piecewise: frozenset[str] = frozenset()

    def __init__(self, part: Part) -> None:
        self.part = part

    def resolve_tensor(self, request: Any) -> Tensor:
        found = self.part.values
        for dim, (start, length) in enumerate(
            zip(request.dest_offsets, request.lengths, strict=True)
        ):
            found = found.narrow(dim, start, length)
        return found

    def commit_tensor(self, request: Any, tensor: Tensor) -> None:
        pass


def read_box(folder: Path, name: str, part: Part) -> Tensor:
    from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

    metadata = read_metadata(folder)
    entry = metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata)
    index = MetadataIndex(name, entry.chunks[0].offsets)
    lengths = part.values.shape
    zeros = torch.Size([0] * len(lengths))
    request = ReadItem(LoadItemType.TENSOR, index, zeros, index, part.offsets, lengths)
    found = CheckpointReader(folder, threads=2)
    found.set_up_storage_reader(metadata, is_coordinator=False)
    found.read_data(LoadPlan([request]), PartPlanner(part)).wait()  # type: ignore[arg-type]
    return part.values


@given(data=st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_box_is_read_across_blocks(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    shape = data.draw(st.lists(st.integers(1, 14), min_size=1, max_size=3))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]))
    whole = torch.randint(256, (torch.Size(shape).numel(),)).to(dtype).reshape(shape)
    box = []
    for size in shape:
        start = data.draw(st.integers(0, size - 1))
        box.append(slice(start, data.draw(st.integers(start + 1, size))))
    wanted = data.draw(st.sampled_from([dtype, torch.float64]))
    part = Part(whole.to(wanted), tuple(box))
    if data.draw(st.booleans()):  # a target that is not contiguous
        part.values = torch.zeros([*part.values.shape, 2], dtype=wanted)[..., 0]
    folder = tmp_path_factory.mktemp("box")
    with pytest.MonkeyPatch.context() as patch:
        for module in (blocks, writer, reader):
            patch.setattr(module, "BLOCK_BYTES", data.draw(st.sampled_from([3, 16, 64, 1024])))
        patch.setattr(writer, "SMALL_BYTES", 0)
        patch.setattr(reader, "PIECE_BYTES", data.draw(st.sampled_from([1, 64, 4096])))
        write(folder, {"t": whole})
        found = read_box(folder, "t", part)
    assert torch.equal(found, whole[tuple(box)].to(wanted))


@pytest.mark.usefixtures("small_blocks")
def test_a_partial_read_touches_and_verifies_its_own_blocks_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.randn(64, 32)  # 128 bytes a row: two rows a block, 32 blocks
    write(tmp_path, {"t": whole})
    path, item = tmp_path / "__0_0.distcp", item_of(tmp_path, "t")
    for block in (0, 4, 9, 31):
        flip(path, item.data_offset + block * SMALL_BLOCK + 100)
    seen = reads_of(monkeypatch)
    rows = Part(whole, (slice(10, 18), slice(0, 32)))  # blocks 5 to 8
    assert torch.equal(read_box(tmp_path, "t", rows), whole[10:18])
    elements = [(at - item.data_offset) // SMALL_BLOCK for at, nbytes in seen if nbytes == 256]
    assert sorted(elements) == [5, 6, 7, 8]
    one_more = Part(whole, (slice(9, 18), slice(0, 32)))  # half of block 4
    with pytest.raises(CheckpointCorruptError, match=r"__0_0\.distcp.*checksum"):
        read_box(tmp_path, "t", one_more)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_elements_are_converted_to_the_dtype_of_the_target(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    whole = torch.randn(90, 31)
    write(tmp_path, {"t": whole})
    found = read(tmp_path, {"t": torch.zeros(90, 31, dtype=dtype)})
    assert torch.equal(found["t"], whole.to(dtype))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("name", "where"),
    [
        *itertools.product(("several", "scalar"), ("before", "elements", "after")),
        *itertools.product(("options",), ("before", "elements")),  # a value has no frame
    ],
)
def test_a_changed_byte_of_an_item_is_noticed(tmp_path: Path, name: str, where: str) -> None:
    state = some_state()
    write(tmp_path, state)
    item = item_of(tmp_path, name)
    stop = item.data_offset + item.data_nbytes
    around = {"before": item.offset + 40, "elements": stop - 3, "after": item.offset + item.nbytes}
    flip(tmp_path / "__0_0.distcp", around[where] - (where == "after"))
    with pytest.raises(CheckpointCorruptError, match=r"__0_0\.distcp"):
        read(tmp_path, {name: blank(state)[name]})
    other = read(tmp_path, {"half": blank(state)["half"]})
    assert torch.equal(other["half"], state["half"])


# --------------------------------------------------------------------------- tables


def test_a_table_comes_back_as_it_was(tmp_path: Path) -> None:
    items = (
        Item(("a.b", (0, 3)), 0, 100, 64, 20, 7, (1, 0xFFFFFFFF)),
        Item(("ü", None), 100, 5, 100, 5, 0, ()),
        Item(("c", ()), 105, 300, 128, 4, 9, (3,)),
    )
    table = Table(512, items)
    path = tmp_path / "file"
    path.write_bytes(b"x" * 405 + table.encode())
    assert read_table(path) == table
    tail = path.read_bytes()[-TAIL_BYTES:]
    assert table_nbytes(tail, path, path.stat().st_size) == len(table.encode())


@given(st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_changed_table_is_refused_or_not_ours(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    encoded = bytearray(Table(64, (Item(("key", (0,)), 0, 9, 1, 2, 3, (4, 5)),)).encode())
    path = tmp_path_factory.mktemp("table") / "file"
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(b"y" * 9 + encoded)
    if at >= len(encoded) - len(MAGIC):
        assert read_table(path) is None
    else:
        with pytest.raises(CheckpointCorruptError, match="file"):
            read_table(path)


def test_columns_of_a_later_release_are_left_alone(tmp_path: Path) -> None:
    path, table = tmp_path / "file", Table(64, (Item(("key", (0,)), 0, 9, 1, 2, 3, (4, 5)),))
    content = json.loads(table.encode()[:-TAIL_BYTES])
    content["items"][0].append("later")
    text = json.dumps({**content, "later": 1}).encode()
    tail = zlib.crc32(text).to_bytes(4, "little") + len(text).to_bytes(8, "little") + MAGIC
    path.write_bytes(text + tail)
    assert read_table(path) == table


@pytest.mark.parametrize("nbytes", [0, 1, TAIL_BYTES - 1, TAIL_BYTES])
def test_a_short_file_is_not_ours(tmp_path: Path, nbytes: int) -> None:
    (tmp_path / "file").write_bytes(b"\0" * nbytes)
    assert read_table(tmp_path / "file") is None


def test_a_table_of_nothing_is_refused(tmp_path: Path) -> None:
    """A tail of zeros but for its magic has a length and a checksum that agree."""
    (tmp_path / "file").write_bytes(bytes(12) + MAGIC)
    with pytest.raises(CheckpointCorruptError):
        read_table(tmp_path / "file")


@pytest.mark.usefixtures("small_blocks")
def test_an_item_that_the_table_does_not_name_is_refused(tmp_path: Path) -> None:
    state = some_state()
    write(tmp_path, state)
    path = tmp_path / "__0_0.distcp"
    table = read_table(path)
    assert table is not None
    items = tuple(item for item in table.items if item.key[0] != "half")
    end = len(table.encode())
    path.write_bytes(path.read_bytes()[:-end] + Table(table.block_bytes, items).encode())
    with pytest.raises(CheckpointCorruptError, match="half"):
        read(tmp_path, blank(state))


def test_the_table_is_json_behind_the_items(tmp_path: Path) -> None:
    """What README.md in checkpoints/ promises to readers of other programs."""
    write(tmp_path, some_state())
    data = (tmp_path / "__0_0.distcp").read_bytes()
    assert data[-8:] == b"FSDPOFF1"
    nbytes = int.from_bytes(data[-16:-8], "little")
    text = data[-20 - nbytes : -20]
    assert zlib.crc32(text) == int.from_bytes(data[-20:-16], "little")
    rows = json.loads(text)["items"]
    assert max(offset + length for _, offset, length, *_ in rows) == len(data) - 20 - nbytes


# --------------------------------------------------------------------------- errors, other writers


@pytest.mark.usefixtures("small_blocks")
def test_a_file_of_torch_next_to_ours(tmp_path: Path) -> None:
    """Each file is read as what it is."""
    ours, theirs = some_state(), {"theirs": torch.randn(30, 7), "value": [1, 2]}
    mine = write(tmp_path, ours)
    other = tmp_path / "other"
    dcp.save(theirs, storage_writer=dcp.FileSystemWriter(other), no_dist=True)
    foreign = dcp.FileSystemReader(other).read_metadata()
    (other / "__0_0.distcp").rename(tmp_path / "__1_0.distcp")
    places = {
        index: dataclasses.replace(info, relative_path="__1_0.distcp")
        for index, info in foreign.storage_data.items()
    }
    both = Metadata({**mine.state_dict_metadata, **foreign.state_dict_metadata})
    both.storage_data = {**mine.storage_data, **places}
    targets = {**blank(ours), **blank(theirs)}
    read_into(targets, both, CheckpointReader(tmp_path))
    assert_same(targets, {**ours, **theirs})


def test_a_file_that_exists_is_not_written_over(tmp_path: Path) -> None:
    write(tmp_path, some_state())
    (tmp_path / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp.*another job saves"):
        write(tmp_path, some_state())


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_full_disk_is_told_and_the_file_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp.*No space left") as caught:
        write(tmp_path, some_state())
    assert not isinstance(caught.value, CheckpointCorruptError)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_read_error_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    state = some_state()
    write(tmp_path, state)
    monkeypatch.setattr(os, "preadv", refuse)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp.*Input/output error"):
        read(tmp_path, blank(state))


def test_a_truncated_file_is_told_while_reading(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"123")
    descriptor = os.open(path, os.O_RDONLY)
    into = torch.zeros(5, dtype=torch.uint8)
    with pytest.raises(CheckpointCorruptError, match="ends at byte 3"):
        blocks.read_block(descriptor, 0, into, None, path)
    os.close(descriptor)


@pytest.mark.parametrize("content", [b"", b"\0" * 50, b"\x80\x04N.", b"garbage", b"cfoo\nbar\n."])
def test_metadata_that_cannot_be_understood_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointCorruptError, match=r"\.metadata"):
        read_metadata(tmp_path)
