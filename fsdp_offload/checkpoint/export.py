"""Export weights for other programs as safetensors files, as transformers reads them.

An export is a save of DCP: the planner lays out the files from what all ranks have, and every rank
writes its chunks straight into their byte ranges, which the library ``safetensors`` cannot do. No
rank gathers a tensor. A :class:`Source` lists the tensors and reads their chunks: from a model, on
all ranks, or from a checkpoint, in one process.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.optim import Optimizer

from ..core import dtensor
from ..core.arguments import check_optimizer
from ..core.config import parse_bytes
from ..core.errors import CheckpointError, ConfigError, UnsupportedParameterError
from ..core.interrupts import defer_sigint, let_through
from ..core.progress import Progress
from ..update import codec
from . import folder
from .api import coordination_group, run_save
from .files import done, memory_of, run_all, typed, write_bytes, write_whole
from .planner import FlatSavePlanner, read_values
from .reader import Reader
from .rule import GROUPS, STATE, find_layout
from .safetensors import CODES, INDEX, File, plan_files
from .state import REMAINDER, WHOLE, state_to_read, wait_for, weights_of
from .writer import Writer

STEP_BYTES: Final = 1 << 20
"""Bytes of a file that a thread converts and writes at once."""
_MASTERS: Final = (REMAINDER, WHOLE)
_DTYPES: Final = {None: None, "bf16": torch.bfloat16, "fp32": torch.float32}
_CONVERTED: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""``dtype`` converts only these: other floating dtypes are quantised and need their scales."""
_USUAL: Final = ("", "model.", "model.module.")
"""Prefixes of weights to which the only optimizer state of a checkpoint belongs."""


def export_safetensors(
    source: nn.Module | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    optimizer: Optimizer | None = None,
    dtype: Literal["bf16", "fp32"] | None = None,
    max_shard_bytes: int | str = "5GB",
    model_prefix: str | None = None,
    optimizer_prefix: str | None = None,
) -> tuple[Path, ...]:
    """Write the weights into a new folder: ``model.safetensors``, or several files with an index.

    Names in the files are the FQNs; tied weights get their first, from a checkpoint all. For
    ``transformers``, call ``model.config.save_pretrained(out)`` after the export.

    Args:
        source: the model, sharded or not; then all ranks call this and share the folder. Or the
            folder of a DCP checkpoint, which one process reads alone, without the model.
        out: a folder that does not exist yet, or is empty. It appears when all files are complete.
        optimizer: holds the fp32 masters of a model.
        dtype: ``"fp32"``: the exact masters; weights without one are widened. ``"bf16"``: the
            weights of the training's computation. ``None``: as stored. Integers, buffers and
            quantised weights keep their dtype, and in a checkpoint also tensors outside its
            optimizer.
        max_shard_bytes: most bytes of elements in one file; a tensor is never cut.
        model_prefix: prefix of the FQNs of weights in a checkpoint; ``None``: ``"model."`` or none.
        optimizer_prefix: prefix of ``state.{fqn}``; ``None``: a usual one.

    Returns:
        The files, the index last.

    Raises:
        ConfigError: an argument is wrong, or ranks have different tensors of one name.
        UnsupportedParameterError: a tensor cannot be stored.
        CheckpointError: weights are missing, ``out`` holds files, the file system refused, or
            another rank failed. ``out`` is unchanged.
        CheckpointCorruptError: the checkpoint changed after it was written.
    """
    writer = _ExportWriter(out)

    def find() -> Source:  # called in DCP's local step, which raises errors on all ranks
        wanted = _wanted(source, optimizer, dtype, model_prefix, optimizer_prefix)
        if isinstance(source, nn.Module):
            return _of_model(source, optimizer, wanted)
        return _of_checkpoint(Reader(source), model_prefix, optimizer_prefix, wanted)

    with defer_sigint() as interrupt:
        of_model = isinstance(source, nn.Module)
        group = coordination_group("export_safetensors", interrupt) if of_model else None
        run_save(writer, _ExportPlanner(find, max_shard_bytes), group)
    written = [file.name for file in writer.files]
    return tuple(Path(out) / name for name in written + [INDEX] * (len(written) > 1))


def _wanted(source: object, optimizer: object, dtype: Any, *prefixes: object) -> torch.dtype | None:
    """Check the arguments; returns the dtype of weights in the files."""
    if dtype not in _DTYPES:
        raise ConfigError(
            f"dtype={dtype!r}",
            reason="weights are written in bf16 or fp32, or in their own dtype",
            remedy='use "bf16", "fp32" or None',
        )
    check_optimizer(optimizer, several='leave it out with dtype="bf16" or None')
    of_checkpoint = isinstance(source, str | os.PathLike) and optimizer is None
    if not (of_checkpoint or (isinstance(source, nn.Module) and prefixes == (None, None))):
        raise ConfigError(
            f"source of type {type(source).__name__}, optimizer of type {type(optimizer).__name__}"
            f", prefixes {prefixes}",
            reason="a checkpoint contains its own masters, and only checkpoint keys have prefixes",
            remedy="pass a model and its optimizer, or only the path of a checkpoint",
        )
    return _DTYPES[dtype]


# --------------------------------------------------------------------------- DCP


class Source(NamedTuple):
    """The weights of an export."""

    written: Mapping[str, Tensor]  # by FQN, on the meta device: shapes and dtypes in the files
    tensors: Mapping[str, Tensor]  # by FQN: DCP finds in them the chunks that this process has
    read: Callable[[MetadataIndex], Sequence[Tensor]]  # a chunk and, if there is one, its master


class _ExportPlanner(FlatSavePlanner):
    """Lays out the files of an export from the tensors of all ranks."""

    def __init__(self, find: Callable[[], Source], max_shard_bytes: int | str) -> None:
        super().__init__(lambda: self.source.tensors)
        self._find, self._max_shard_bytes = find, max_shard_bytes

    @let_through()
    def set_up_planner(  # torch looks for the name storage_meta, and warns without it
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Find the tensors; the plan tells the coordinator of all of them."""
        with typed():
            self.source = self._find()
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.mappings: Any = self.source.written

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Tell every rank the files; of ranks that hold the same chunk, one writes it."""
        plans, metadata = super().create_global_plan(all_plans)
        max_bytes = parse_bytes(self._max_shard_bytes, "max_shard_bytes")
        files = plan_files(metadata.planner_data, max_bytes)
        return [replace(plan, planner_data=files) for plan in plans], metadata


class _ExportWriter(Writer):
    """Writes what an :class:`_ExportPlanner` has planned."""

    files: Sequence[File] = ()

    @defer_sigint()
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make files of full size, with their headers."""
        plans = super().prepare_global_plan(plans)
        assert self._aside is not None  # it was made just now
        files: Sequence[File] = plans[0].planner_data
        for file in files:
            write_whole(self._aside / file.name, file.header)
            os.truncate(self._aside / file.name, file.nbytes)
        if len(files) > 1:
            total = sum(file.nbytes - len(file.header) for file in files)
            weights = {name: file.name for file in files for name in file.places}
            index = {"metadata": {"total_size": total}, "weight_map": weights}
            write_whole(self._aside / INDEX, json.dumps(index, indent=2).encode())
        return plans

    @let_through()
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's chunks, and make them permanent."""
        assert isinstance(planner, _ExportPlanner)
        self.files = plan.planner_data
        with Progress(len(plan.items), "exporting", unit=" chunks") as bar:
            for file in self.files:
                path = (self.path.parent / plan.storage_data).with_name(file.name)
                with typed(path), path.open("r+b") as opened:
                    for item in plan.items:
                        if item.index.fqn in file.places:
                            tensors = planner.source.read(item.index)
                            _write_chunk(opened.fileno(), file, item, tensors)
                            bar.advance()
                    os.fsync(opened.fileno())
        return done([])

    @defer_sigint()
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Give the folder its name."""
        assert self._aside is not None, "prepare_global_plan() first"
        folder.install(self._aside, self.path, overwrite=False)
        self._complete("exported", sum(file.nbytes for file in self.files))


def _write_chunk(descriptor: int, file: File, item: WriteItem, tensors: Sequence[Tensor]) -> None:
    assert item.tensor_data is not None  # the planner has tensors only
    offset, written = file.places[item.index.fqn]
    first, *others = item.tensor_data.chunk.offsets or (0,)
    found = [torch.atleast_1d(tensor) for tensor in tensors]
    # A single row may exceed STEP_BYTES. A thread holds about three times a step's bytes.
    rows = max(1, STEP_BYTES // max(1, written.itemsize * found[0][:1].numel()))

    def write(start: int) -> None:
        box = _value(written.dtype, *(tensor[start : start + rows] for tensor in found))
        for at, run in _runs(box, written.shape or (1,), (first + start, *others)):
            write_bytes(descriptor, offset + at * box.element_size(), memory_of(run), file.name)

    run_all(functools.partial(write, start) for start in range(0, len(found[0]), rows))


def _runs(
    box: Tensor, shape: Sequence[int], begin: Sequence[int], at: int = 0
) -> Iterator[tuple[int, Tensor]]:
    """Cut a box at index ``begin`` of a tensor into runs, each with its first element's number."""
    row = math.prod(shape[1:])
    if tuple(box.shape[1:]) == tuple(shape[1:]):
        yield at + begin[0] * row, box
    else:
        for index, below in enumerate(box, begin[0]):
            yield from _runs(below, shape[1:], begin[1:], at + index * row)


def _value(dtype: torch.dtype, weight: Tensor, master: Tensor | None = None) -> Tensor:
    """Convert a box to ``dtype``, contiguous on the CPU; a bf16 master is the remainder."""
    # The memory of a lazy conjugate or negative has other values.
    weight = weight.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if master is None or dtype == weight.dtype:
        return weight.to(dtype)
    master = master.detach().cpu().contiguous()
    whole = codec.decoded(weight, master) if master.dtype == torch.bfloat16 else master
    return whole.to(dtype)


# --------------------------------------------------------------------------- sources


def _written(fqn: str, tensor: Tensor, wanted: torch.dtype | None) -> Tensor:
    if tensor.dtype not in CODES:
        raise UnsupportedParameterError(
            f"{fqn} of {tensor.dtype}",
            reason="safetensors has no such dtype",
            remedy="convert it, or remove it from the model",
        )
    dtype = wanted if wanted and tensor.dtype in _CONVERTED else tensor.dtype
    return torch.empty(tensor.shape, dtype=dtype, device="meta")


def _of_model(model: nn.Module, optimizer: Optimizer | None, wanted: torch.dtype | None) -> Source:
    state = {} if optimizer is None else state_to_read(optimizer)
    named = dtensor.saved_names([model]).items()
    parameters = {n: p for p, names in named if isinstance(p, nn.Parameter) for n in names}
    written: dict[str, Tensor] = {}
    chunked: dict[str, list[Tensor]] = {}  # the weight and, if there is one, its master
    owners: set[Tensor] = set()
    for fqn, held in weights_of([model]).items():
        owner = parameters.get(fqn, held)
        if fqn.endswith("_extra_state") or not isinstance(held, Tensor) or owner in owners:
            continue
        owners.add(owner)
        _check_dense(fqn, owner)
        written[fqn] = _written(fqn, held, wanted if fqn in parameters else None)
        # Placed like the parameter, which alone may tell where its shard was cut.
        # Other classes may have an entry of a master's name.
        entries = [value for name, value in state.get(owner, {}).items() if name in _MASTERS]
        masters = [e for e in entries if isinstance(e, Tensor) and e.shape == owner.shape]
        chunked[fqn] = [dtensor.like(owner, dtensor.local(held)), *masters]
    wait_for([model])
    weights = {fqn: tensors[0] for fqn, tensors in chunked.items()}
    return Source(written, weights, lambda i: [dtensor.chunk(t, i) for t in chunked[i.fqn]])


def _check_dense(fqn: str, tensor: Tensor) -> None:
    shard, placements = dtensor.local(tensor), getattr(tensor, "placements", ())
    is_dense = tensor.layout is torch.strided and not (shard.is_meta or shard.is_nested)
    is_plain = type(shard) in (Tensor, nn.Parameter, nn.Buffer)
    if not (is_dense and is_plain) or any(p.is_partial() for p in placements):
        raise UnsupportedParameterError(
            f"{fqn}: {type(shard).__name__}, {shard.device}, {tensor.layout}, placed {placements}",
            reason="an export writes only dense shards that hold their own values",
            remedy="initialise it, convert it to a plain tensor, or redistribute it",
        )


def _of_checkpoint(
    reader: Reader, prefix: str | None, optimizer_prefix: str | None, wanted: torch.dtype | None
) -> Source:
    """Find the weights in a checkpoint and their masters, which are read whole, one at a time."""
    reader.set_up_storage_reader(reader.read_metadata(), True)
    stored = reader.metadata.state_dict_metadata
    sizes = {k: v for k, v in stored.items() if isinstance(v, TensorStorageMetadata)}
    if prefix is None:
        # The place of each key in the saved nested dict, if known.
        paths = reader.metadata.planner_data or {key: tuple(key.split(".")) for key in sizes}
        prefix = "model." if any(p[0] == "model" and len(p) > 1 for p in paths.values()) else ""
    fqns = [key.removeprefix(prefix) for key in sizes if key.startswith(prefix)]
    # State of "model." fits weights of "ema.", too, so the caller has to claim it.
    known = fqns if optimizer_prefix is not None or prefix in _USUAL else []
    layout = find_layout(stored, known, model_prefix=prefix, optimizer_prefix=optimizer_prefix)
    layout = replace(layout, model=prefix)
    state = layout.entries(STATE, stored)
    trained = state.keys() | layout.entries(GROUPS, stored).keys()
    keys: dict[str, list[str]] = {}  # of the weight and, if there is one, of its master
    for fqn in fqns:
        if layout.is_weight(key := prefix + fqn) and not fqn.endswith("_extra_state"):
            masters = [layout.state(fqn) + n for n in _MASTERS if n in state.get(fqn, ())]
            keys[fqn] = [key, *(m for m in masters if sizes[m].size == sizes[key].size)]
    if not keys:
        raise CheckpointError(
            f"a checkpoint without tensors under {prefix!r}",
            reason="weights are missing: no key begins with this prefix",
            remedy="pass the path of a model's checkpoint, or the prefix of its keys as "
            "model_prefix=",
        )
    lost = {key for key in sizes if key.rpartition(".")[2] in _MASTERS and "." in key}
    if wanted == torch.float32 and (lost := lost.difference(*keys.values())):
        raise CheckpointError(
            f"masters {sorted(lost)[:4]}",
            reason="their keys name no parameter, so fp32 weights would not be exact",
            remedy="pass optimizer_prefix=, save optimizer state by FQN "
            '(get_optimizer_state_dict), or export with dtype="bf16" or None',
        )
    _tie(reader, keys if wanted else {}, trained, sizes)
    written, tensors = {}, {}
    for fqn, (key, *_) in keys.items():
        dtype = sizes[key].properties.dtype
        tensors[fqn] = torch.empty(sizes[key].size, dtype=dtype, device="meta")
        is_weight = fqn in trained or trained.isdisjoint(keys)
        written[fqn] = _written(fqn, tensors[fqn], wanted if is_weight else None)
        if written[fqn].dtype == dtype:
            del keys[fqn][1:]
    return Source(written, tensors, lambda i: [*read_values(reader, keys[i.fqn][:2]).values()])


def _tie(reader: Reader, keys: dict[str, list[str]], trained: set[str], sizes: Any) -> None:
    """Give all names of a tied matrix the master of the one that has state: equal values tell."""
    forms = {
        fqn: (sizes[key].size, sizes[key].properties.dtype)
        for fqn, (key, *_) in keys.items()
        if len(sizes[key].size) > 1
    }
    both = {forms[f] for f in forms.keys() & trained} & {forms[f] for f in forms.keys() - trained}
    marks = {
        fqn: (form, hashlib.sha256(memory_of(value)).digest())
        for fqn, form in forms.items()
        if form in both
        for value in read_values(reader, keys[fqn][:1]).values()
    }
    owned = {marks[fqn]: keys[fqn][1:] for fqn in marks.keys() & trained}
    for fqn in [fqn for fqn in marks.keys() - trained if marks[fqn] in owned]:
        keys[fqn] += owned[marks[fqn]]
        trained.add(fqn)
