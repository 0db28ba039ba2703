"""Broken checkpoints and broken disks: a right load, or a typed error that names the file.

Every corruption is generated from a seed. What is checked after each of them: nothing wrong was
loaded; where sizes, tables or ``.metadata`` tell, nothing was written; else the optimizer has
failed; and the next load makes everything exact.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import pickle
import random
import shutil
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
)

from fsdp_offload import (
    CheckpointError,
    LaneError,
    checkpoint,
)
from fsdp_offload.checkpoint import writer
from fsdp_offload.checkpoint.files import read_table
from tests.checkpoint.jobs import FLAT, Ranks
from tests.checkpoint.known import Job, Model, check_is, job, known, set_to
from tests.helpers.compare import assert_same

pytestmark = [
    # of torch, which saves in one process here
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]

SAVED, OTHER, BEFORE = 3, 4, 9
"""Steps: of the checkpoint, of another one beside it, of the job that loads."""


def data_file(path: Path, rng: random.Random) -> Path:
    return rng.choice(sorted(path.glob("*.distcp")))


def any_file(path: Path, rng: random.Random) -> Path:
    return rng.choice(sorted(path.iterdir()))


def change(path: Path, at: int, rng: random.Random) -> set[str]:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return {path.name}


def truncate(path: Path, other: Path, rng: random.Random) -> set[str]:
    file = any_file(path, rng)
    os.truncate(file, rng.choice([0, file.stat().st_size - 1, rng.randrange(file.stat().st_size)]))
    return {file.name}


def extend(path: Path, other: Path, rng: random.Random) -> set[str]:
    file = any_file(path, rng)
    with file.open("ab") as end:
        end.write(rng.randbytes(rng.choice([1, 64, 5000])))
    return {file.name}


def remove(path: Path, other: Path, rng: random.Random) -> set[str]:
    """Not the manifest: without it, checksums of blocks are compared all the same."""
    file = rng.choice([file for file in sorted(path.iterdir()) if file.name != "manifest.json"])
    file.unlink()
    return {file.name}


def swap(path: Path, other: Path, rng: random.Random) -> set[str]:
    one, two = path / "__0_0.distcp", path / "__1_0.distcp"
    one.rename(path / "x")
    two.rename(one)
    (path / "x").rename(two)
    return {one.name, two.name}


def replace_file(path: Path, other: Path, rng: random.Random) -> set[str]:
    file = data_file(path, rng)
    shutil.copy(other / file.name, file)
    return {file.name}


def zeros(path: Path, other: Path, rng: random.Random) -> set[str]:
    """A page that never reached the disk, at the end of a file: sizes stay."""
    file = data_file(path, rng)
    data = bytearray(file.read_bytes())
    data[-rng.randrange(21, 4096) :] = b""
    file.write_bytes(data.ljust(file.stat().st_size, b"\0"))
    return {file.name}


def bits_of_metadata(path: Path, other: Path, rng: random.Random) -> set[str]:
    file = path / rng.choice([".metadata", "manifest.json"])
    return change(file, rng.randrange(file.stat().st_size), rng)


def bits_of_table(path: Path, other: Path, rng: random.Random) -> set[str]:
    file = data_file(path, rng)
    end = max(item.offset + item.nbytes for item in items_of(file))
    return change(file, rng.randrange(end, file.stat().st_size), rng)


def bits_of_elements(path: Path, other: Path, rng: random.Random) -> set[str]:
    """Anywhere in the elements and values that a load reads."""
    file = data_file(path, rng)
    item = rng.choice([item for item in items_of(file) if not is_spare(item)])
    return change(file, item.data_offset + rng.randrange(item.data_nbytes), rng)


@dataclass(frozen=True)
class Item:
    """One item of a data file."""

    key: str
    offset: int
    nbytes: int
    data_offset: int
    data_nbytes: int


def is_spare(item: Item) -> bool:
    """Options of a group stand there for each of its parameters and are read once; empty chunks
    are not read at all."""
    return item.key.startswith("optim.param_groups.") or not item.data_nbytes


def items_of(path: Path) -> list[Item]:
    metadata = pickle.loads((path.parent / ".metadata").read_bytes())
    infos = {i: f for i, f in metadata.storage_data.items() if f.relative_path == path.name}
    table = read_table(path)
    assert table is not None
    checksums = table.of([(info.offset, info.length) for info in infos.values()], path)
    items = []
    for index, info in infos.items():
        stored, nbytes = metadata.state_dict_metadata[index.fqn], info.length
        if isinstance(stored, TensorStorageMetadata):
            (sizes,) = (c.sizes for c in stored.chunks if c.offsets == index.offset)
            nbytes = sizes.numel() * stored.properties.dtype.itemsize
        start = info.offset + checksums[info.offset].data_start
        items.append(Item(index.fqn, info.offset, info.length, start, nbytes))
    return items


Corruption = Callable[[Path, Path, random.Random], set[str]]
"""Breaks the first, a copy of a checkpoint; the second is another save. Returns the names that an
error may tell."""
KINDS: list[Corruption] = [truncate, extend, remove, swap, replace_file, zeros]
KINDS += [bits_of_metadata, bits_of_table, bits_of_elements]
FEW = [(kind, seed) for kind in KINDS for seed in range(2)]


def save_both(root: Path) -> None:
    # So that large items are several blocks.
    with mock.patch.object(writer, "BLOCK_BYTES", 16 << 10):
        for name, step in (("good", SAVED), ("other", OTHER)):
            made = job()
            set_to(made, step)
            checkpoint.save(root / name, *made, extra={"step": step})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Path:
    """``good`` and ``other``, each of two ranks."""
    root = tmp_path_factory.mktemp("saved")
    ranks(2).run(save_both, root)
    return root


@pytest.fixture
def loading() -> Job:
    """A job of one process, the same for all loads, as long as no test leaves it failed."""
    if is_failed(kept_job()):
        kept_job.cache_clear()
    return kept_job()


@functools.cache
def kept_job() -> Job:
    return job()


def broken(saved: Path, where: Path, corrupt: Corruption, seed: int) -> tuple[set[str], bool]:
    """The names that an error may tell, and whether it must come before anything is written."""
    shutil.copytree(saved / "good", where)
    names = corrupt(where, saved / "other", random.Random(seed))
    return names, corrupt is not bits_of_elements


def check_error(error: BaseException, names: set[str]) -> None:
    assert isinstance(error, CheckpointError), f"{type(error).__name__}: {error}"
    assert any(name in str(error) for name in names), f"{error} does not name {names}"
    assert error.reason
    assert error.remedy


def raised_by(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def is_failed(made: Job) -> bool:
    try:
        made[1].synchronize()
    except LaneError:
        return True
    return False


def load_broken(made: Job, path: Path, names: set[str], *, told_before: bool) -> str:
    """Load ``path`` and judge what came of it: "loaded", "refused" or "failed"."""
    set_to(made, BEFORE)
    error = raised_by(lambda: checkpoint.load(path, *made))
    if error is None:
        check_is(made, SAVED)
        return "loaded"
    check_error(error, names)
    if not is_failed(made):
        check_is(made, BEFORE)
        return "refused"
    assert not told_before, f"written before it was noticed: {error}"
    for call in (
        made[1].step,
        made[1].state_dict,
        lambda: checkpoint.save(path.parent / "of-failed", *made),
    ):
        with pytest.raises(LaneError):
            call()
    assert not (path.parent / "of-failed").exists()
    return "failed"


def load_good(made: Job, path: Path) -> None:
    assert checkpoint.load(path, *made) == {"step": SAVED}
    check_is(made, SAVED)
    assert not is_failed(made)


def test_bytes_that_nobody_reads_do_not_matter(saved: Path, tmp_path: Path, loading: Job) -> None:
    """A change in the state of a large tensor, and weights alone are loaded; and the whole not."""
    shutil.copytree(saved / "good", tmp_path / "broken")
    file = tmp_path / "broken" / "__1_0.distcp"
    (item,) = (item for item in items_of(file) if item.key == "optim.state.large.exp_avg")
    change(file, item.data_offset + item.data_nbytes // 2, random.Random(0))
    model = Model()
    checkpoint.load(tmp_path / "broken", model)
    weights = dict(model.named_parameters())
    assert_same(weights, {fqn: known(fqn, SAVED, weight) for fqn, weight in weights.items()})
    found = load_broken(loading, tmp_path / "broken", {file.name}, told_before=False)
    assert found == "failed"
    load_good(loading, saved / "good")


def test_options_that_are_broken_are_not_taken_over(
    saved: Path, tmp_path: Path, loading: Job
) -> None:
    """They are saved for each parameter; one copy at least is read, and what is read is right."""
    outcomes = []
    for fqn in ("large", "uneven", "one"):
        path = tmp_path / fqn
        shutil.copytree(saved / "good", path)
        for file in sorted(path.glob("*.distcp")):
            for item in items_of(file):
                if item.key == f"optim.param_groups.{fqn}.lr":
                    change(file, item.offset + item.nbytes // 2, random.Random(0))
                    names = {file.name}
        outcomes.append(load_broken(loading, path, names, told_before=True))
        load_good(loading, saved / "good")
    assert "refused" in outcomes


def test_without_its_manifest_a_checkpoint_is_loaded_and_compared(
    saved: Path, tmp_path: Path, loading: Job
) -> None:
    shutil.copytree(saved / "good", tmp_path / "bad")
    (tmp_path / "bad" / "manifest.json").unlink()
    load_good(loading, tmp_path / "bad")
    names = bits_of_elements(tmp_path / "bad", saved / "other", random.Random(0))
    assert load_broken(loading, tmp_path / "bad", names, told_before=False) != "loaded"
    load_good(loading, saved / "good")


def load_all(saved: Path, cases: list[tuple[Path, set[str], bool]]) -> list[str]:
    """On every rank; a failed check must not leave other ranks in a collective."""
    made, outcomes = job(), []
    for path, names, told_before in cases:
        try:
            outcome = load_broken(made, path, names, told_before=told_before)
        except AssertionError:
            outcome = f"{path.name}: {traceback.format_exc()}"
        outcomes.append(outcome)
        load_good(made, saved / "good")
    return outcomes


def test_all_ranks_refuse_together(ranks: Ranks, saved: Path, tmp_path: Path) -> None:
    cases = []
    for corrupt, seed in FEW:
        path = tmp_path / f"{corrupt.__name__} {seed}"
        cases.append((path, *broken(saved, path, corrupt, seed)))
    first, second = ranks(2).run(load_all, saved, cases)
    assert first == second, "ranks disagree"
    assert set(first) == {"refused", "failed"}, first


@pytest.fixture
def foreign(tmp_path: Path, loading: Job) -> Path:
    """As a job with a plain optimizer saves it with torch's own function."""
    set_to(loading, SAVED)
    optimizer = get_optimizer_state_dict(*loading, options=FLAT)
    state = {"model": get_model_state_dict(loading[0]), "optim": optimizer}
    path = tmp_path / "foreign"
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    return path


@pytest.mark.parametrize("left", [0, 1000])
def test_a_truncated_foreign_file_is_refused_before_anything(
    foreign: Path, loading: Job, left: int
) -> None:
    file = foreign / "__0_0.distcp"
    os.truncate(file, left % file.stat().st_size)
    assert load_broken(loading, foreign, {file.name}, told_before=True) == "refused"


@pytest.mark.parametrize(
    ("name", "seed"),
    [*((".metadata", seed) for seed in range(4)), ("__0_0.distcp", 0), ("__0_0.distcp", 1)],
)
def test_changed_foreign_files_are_typed(
    foreign: Path, loading: Job, saved: Path, name: str, seed: int
) -> None:
    """torch writes no checksums of blocks: what it cannot parse is told, elements are not."""
    rng, file, names = random.Random(seed), foreign / name, {"foreign"}
    data = bytearray(file.read_bytes())
    at, n_bytes = rng.randrange(len(data) - 40), 40
    if name != ".metadata":  # the archive around an item
        infos = pickle.loads((foreign / ".metadata").read_bytes()).storage_data
        read = [(index.fqn, i) for index, i in infos.items() if ".param_groups." not in index.fqn]
        fqn, info = rng.choice(sorted(read, key=lambda item: item[1].offset))
        at, n_bytes, names = info.offset, 200, {"foreign", fqn}
    data[at : at + n_bytes] = rng.randbytes(n_bytes)
    file.write_bytes(data)
    assert load_broken(loading, foreign, names, told_before=False) != "loaded"
    load_good(loading, saved / "good")


def drop_chunk(metadata: Any) -> None:
    entry = metadata.state_dict_metadata["model.large"]
    assert isinstance(entry, TensorStorageMetadata)
    entry.chunks.pop()


def shrink_chunk(metadata: Any) -> None:
    entry = metadata.state_dict_metadata["optim.state.large.exp_avg"]
    entry.chunks[0] = replace(entry.chunks[0], sizes=torch.Size((100, 100)))


def move_chunk(metadata: Any) -> None:
    entry = metadata.state_dict_metadata["model.large"]
    entry.chunks[0] = replace(entry.chunks[0], offsets=torch.Size((1, 0)))


@pytest.mark.parametrize("edit", [drop_chunk, shrink_chunk, move_chunk])
def test_chunks_that_leave_elements_out_are_refused(
    foreign: Path, loading: Job, edit: Callable[[Any], None]
) -> None:
    metadata = pickle.loads((foreign / ".metadata").read_bytes())
    edit(metadata)
    (foreign / ".metadata").write_bytes(pickle.dumps(metadata))
    found = load_broken(
        loading, foreign, {"chunks do not cover all elements", ".metadata"}, told_before=True
    )
    assert found == "refused"


def refusing(name: str, after: int, code: int) -> Any:
    """A call of ``os`` fails from its ``after``-th time on."""
    real, calls = getattr(os, name), itertools.count()

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) >= after:
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    return mock.patch.object(os, name, call)


def save_any(path: Path, made: Job, *, asynchronous: bool, **options: Any) -> None:
    options = {"extra": {"step": SAVED}, **options}
    if asynchronous:
        future: Future[None] = checkpoint.async_save(path, *made, **options)
        future.result(60)
    else:
        checkpoint.save(path, *made, **options)


def check_nothing_left(root: Path, made: Job, *, asynchronous: bool = False) -> None:
    """The earlier checkpoint alone is there, and the next save and load are as ever."""
    lead = not dist.is_initialized() or dist.get_rank() == 0
    if lead:
        found = sorted(path.name for path in root.iterdir())
        assert found == ["earlier"], found
    assert not is_failed(made)
    barrier()
    save_any(root / "next", made, asynchronous=asynchronous)
    load_good(made, root / "next")
    load_good(made, root / "earlier")
    barrier()
    if lead:
        shutil.rmtree(root / "next")
    barrier()


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


@pytest.fixture
def earlier(tmp_path: Path, loading: Job) -> Path:
    """A folder with one complete checkpoint."""
    set_to(loading, SAVED)
    checkpoint.save(tmp_path / "run" / "earlier", *loading, extra={"step": SAVED})
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("call", "after", "code", "asynchronous"),
    [
        *(("pwrite", n, errno.ENOSPC, n == 3) for n in (0, 1, 3, 8)),  # items, table, .metadata
        # file, .metadata, folder, manifest, folder
        *(("fsync", n, errno.EIO, n == 2) for n in range(5)),
        ("mkdir", 0, errno.EROFS, True),
        ("rename", 0, errno.EIO, False),
    ],
)
def test_a_disk_that_refuses_leaves_the_earlier_checkpoint(
    earlier: Path, loading: Job, asynchronous: bool, call: str, after: int, code: int
) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with refusing(call, after, code), pytest.raises(CheckpointError) as caught:
        save_any(earlier / "new", loading, asynchronous=asynchronous)
    assert os.strerror(code) in str(caught.value)
    assert set(os.listdir("/proc/self/fd")) == before, "a file is still open"
    check_nothing_left(earlier, loading, asynchronous=asynchronous)


def test_a_replaced_checkpoint_comes_back_where_the_new_one_may_not_last(
    earlier: Path, loading: Job
) -> None:
    manifest = earlier / "earlier" / "manifest.json"
    before = manifest.read_bytes()
    with refusing("fsync", 4, errno.EIO), pytest.raises(CheckpointError):
        save_any(earlier / "earlier", loading, asynchronous=False, overwrite=True)
    assert manifest.read_bytes() == before
    check_nothing_left(earlier, loading)


def refuse_on_one_rank(root: Path, asynchronous: bool) -> list[str]:
    """Rank 1 alone cannot write, flush or create; then the lead alone."""
    made, messages = job(), []
    set_to(made, SAVED)
    checkpoint.save(root / "earlier", *made, extra={"step": SAVED})
    for rank, call, after in [(1, "pwrite", 0), (1, "pwrite", 1), (1, "fsync", 0), (0, "fsync", 1)]:
        active = dist.get_rank() == rank
        with refusing(call, after, errno.ENOSPC) if active else contextlib.nullcontext():
            try:
                save_any(root / "new", made, asynchronous=asynchronous)
            except CheckpointError as error:
                messages.append(f"{rank} {error}")
            barrier()
        check_nothing_left(root, made)
    for path, overwrite in ((root / "earlier", False), (Path(__file__), True)):
        try:
            save_any(path, made, asynchronous=asynchronous, overwrite=overwrite)
        except CheckpointError as error:
            messages.append(f"0 {error}")
        check_nothing_left(root, made)
    return messages


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_error_of_one_rank_is_raised_on_all(
    ranks: Ranks, tmp_path: Path, asynchronous: bool
) -> None:
    found = ranks(2).run(refuse_on_one_rank, tmp_path / "run", asynchronous)
    for rank, messages in enumerate(found):
        assert len(messages) == 6, messages
        for message in messages[:4]:
            at_fault = int(message[0])
            assert "No space left" in message
            if at_fault == 1:  # what the lead does, it does for all
                assert ("rank 1" in message) == (rank == 0), message
