"""Snapshots for a fast resume on the same topology: one file per rank, read straight into place.

Usage::

    save_local("/nvme/snapshots", model, optimizer, extra={"step": step})
    ...
    step = load_local("/nvme/snapshots", model, optimizer)["step"]

[Note: files]
``<path>/<save id>/rank_<r>_of_<w>.safetensors``. The arena is one tensor, resident state, weights
and buffers one each, and what else there is (group values, ``extra``) one that ``torch.save`` made.
``__metadata__`` has a table of it all and a CRC-32 per block of 8 MiB; the header has its own.

[Note: a save is complete or does not count]
Every save has a folder of its own, named by its id: a number that grows, then random digits. Each
rank writes aside, flushes and renames. Then all ranks tell each other how it went, and only when
all have succeeded the older folders go. A load takes the newest id whose file is whole on *every*
rank, so ranks never resume from different saves, whenever one of them was killed. The folder may
be shared by all ranks or be one per host.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import loading
from ..errors import (
    CheckpointCorruptError,
    CheckpointError,
    ConfigError,
    OffloadError,
)
from ..optimizer import HybridDeviceOptimizer
from .folder import given
from .local_file import Contents, Entry, RankFile, missing, read_entries, read_header, write_file
from .local_job import Job, Table, first_difference, placement
from .team import Team, of_rank

_log = logging.getLogger("fsdp_offload")

_SAVE_ID: Final = re.compile(r"\d{8}-[0-9a-f]{8}")
_FILE: Final = re.compile(r"rank_\d+_of_(\d+)\.safetensors")


def save_local(
    path: str | os.PathLike[str],
    model: nn.Module | Sequence[nn.Module],
    optimizer: HybridDeviceOptimizer,
    *,
    extra: Any = None,
) -> None:
    """Write this rank's state, weights and buffers into folder ``path``; all ranks call it.

    When it returns, the snapshot is on disk on every rank and replaces the one before. If it
    raises, or a rank is killed, the one before is untouched. Needs the space of both.

    Args:
        path: of snapshots of one job: shared by its ranks, or one folder per host.
        model: the module or modules whose parameters the optimizer holds.
        optimizer: nothing of it is changed.
        extra: what else to keep for this rank (step number, random states, data loader): small,
            and of types that ``torch.load(weights_only=True)`` accepts.

    Raises:
        ConfigError: not a :class:`HybridDeviceOptimizer`, or values that could not be loaded.
        UnsupportedParameterError: a tensor has a form whose memory cannot be read flat.
        CheckpointError: a rank could not write. As the others: raised on every rank.
        LaneError: an earlier update failed.
    """
    held, team, folder = _offloaded(optimizer), Team.of_world(), Path(path)

    def prepare() -> tuple[Contents, str]:
        held.check_loadable("save_local()")
        held._settle_masters()
        held._gateway.current_stream().synchronize()
        return _contents(Job(model, held, team), extra), next_save_id(folder)

    contents, proposals = team.share(prepare)
    save_id = max(proposals)
    target = folder / save_id

    # Any other exception, such as of a peer that was killed, leaves open who knows of a success:
    # then nothing may be removed.
    try:
        file = target / file_name(team.rank, team.size)
        team.together(lambda: write_file(file, contents, save_id))
    except OffloadError:
        _remove(folder, {save_id})
        raise
    _remove(folder, {*save_ids(folder)} - {save_id})


def _remove(folder: Path, ids: Iterable[str]) -> None:
    for each in ids:
        shutil.rmtree(folder / each, ignore_errors=True)  # other ranks may remove it as well


def load_local(
    path: str | os.PathLike[str],
    model: nn.Module | Sequence[nn.Module],
    optimizer: HybridDeviceOptimizer,
) -> Any:
    """Read the newest complete snapshot of :func:`save_local` into place; all ranks call it.

    The next steps are bit for bit those of the job that saved. Works on a *failed* optimizer.

    Args:
        path: as given to :func:`save_local`.
        model: built and sharded as when it was saved.
        optimizer: wrapped with the same settings as when it was saved.

    Returns:
        ``extra`` of this rank; its tensors are on the CPU.

    Raises:
        ConfigError: not a :class:`HybridDeviceOptimizer`.
        CheckpointError: no snapshot, or one of another topology: world size, mesh, placement,
            shapes, dtypes, lanes, optimizer class. Nothing was written.
        CheckpointCorruptError: no snapshot is complete: nothing was written. Or a checksum differs
            while reading: then the optimizer is *failed* until a load succeeds.
        StateDictError: group values that need other state. Nothing was written.
    """
    held, team = _offloaded(optimizer), Team.of_world()

    def survey() -> tuple[tuple[Path, Job, dict[str, _Fitting]], dict[str, OffloadError | None]]:
        held._health.check(failed_ok=True)
        held.check_loadable("load_local()")
        folder, job, found = given(path), Job(model, held, team), dict[str, _Fitting]()
        return (folder, job, found), _survey(folder, job, found)

    (folder, job, found), told = team.share(survey)
    chosen = found[choose(folder, told, team.rank)]

    with held._replacing_all("load_local()", keep=CheckpointError):
        team.together(lambda: _fill(job, chosen))
    return chosen.objects["extra"]


def _offloaded(optimizer: object) -> HybridDeviceOptimizer:
    if not isinstance(optimizer, HybridDeviceOptimizer):
        raise ConfigError(
            f"optimizer of type {type(optimizer).__name__}",
            reason="a local snapshot is the memory of a HybridDeviceOptimizer",
            remedy="pass the wrapper; save a plain optimizer with torch.distributed.checkpoint",
        )
    return optimizer


def file_name(rank: int, size: int) -> str:
    """Of one rank's file."""
    return f"rank_{rank}_of_{size}.safetensors"


def save_ids(folder: Path) -> list[str]:
    """Ids of the saves in ``folder``, complete or not, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(entry.name for entry in folder.iterdir() if _SAVE_ID.fullmatch(entry.name))


def next_save_id(folder: Path) -> str:
    """An id that no save has, greater than all in ``folder``."""
    last = max((int(name[:8]) for name in save_ids(folder)), default=0)
    return f"{last + 1:08d}-{secrets.token_hex(4)}"


def choose(folder: Path, told: Sequence[Mapping[str, OffloadError | None]], rank: int) -> str:
    """The newest save whose file is whole on every rank.

    Args:
        told: per rank, what is wrong with its file of each save that it sees.
        rank: this one, whose own error is preferred.

    Raises:
        CheckpointError: there is none, or the newest whole one does not fit the job.
    """
    first_error: OffloadError | None = None
    for save_id in sorted({name for found in told for name in found}, reverse=True):
        errors = {
            r: error
            for r, found in enumerate(told)
            if (error := found.get(save_id, missing(folder / save_id))) is not None
        }
        broken = {r: e for r, e in errors.items() if isinstance(e, CheckpointCorruptError)}
        if not errors:
            if first_error is not None:
                _log.warning("%s: loading %s instead, the save before", first_error, save_id)
            return save_id
        shown = broken or errors
        r = rank if rank in shown else min(shown)
        error = shown[r] if r == rank else of_rank(r, shown[r])
        if not broken:
            raise error
        first_error = first_error or error
    raise first_error or CheckpointError(
        f"{folder}", reason="it holds no snapshot", remedy="give the folder that save_local() got"
    )


def _contents(job: Job, extra: Any) -> Contents:
    native, made = job.native_entries()
    objects = Entry("objects", _pickled(job.objects(extra)))
    arenas = [entry for entry in job.entries if entry.name.startswith("arena.")]
    rest = [*job.entries[len(arenas) :], *native, objects]
    rest.sort(key=lambda entry: -entry.tensor.itemsize)  # each starts at a multiple of its own
    table = {
        "topology": job.topology,
        "values": job.values(),
        "native": made,
        "torch": torch.__version__,
    }
    return Contents([*arenas, *rest], table)


def _pickled(value: Any) -> Tensor:
    """``torch.save`` as 1-D uint8, checked to load under ``weights_only=True``."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        _unpickled(buffer.getvalue())
    except Exception as error:
        raise ConfigError(
            "extra, a param_group, or state of a module",
            reason=f"torch.load(weights_only=True) would refuse it: {error}",
            remedy="keep to tensors, numbers, strings, lists and dicts",
        ) from error
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _unpickled(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


@dataclass(frozen=True)
class _Fitting:
    """A file that can be loaded, and what was made of it beforehand."""

    file: RankFile
    objects: dict[str, Any]
    groups: list[dict[str, Any]]


def _survey(folder: Path, job: Job, found: dict[str, _Fitting]) -> dict[str, OffloadError | None]:
    """Fill ``found`` with this rank's files that can be loaded; what is wrong with the others."""
    told: dict[str, OffloadError | None] = {}
    for save_id in save_ids(folder):
        try:
            path = folder / save_id / file_name(job.team.rank, job.team.size)
            found[save_id] = _fitting(path, job)
            told[save_id] = None
        except FileNotFoundError:  # another rank, still in its save, removes what came before
            told[save_id] = missing(folder / save_id)
        except OffloadError as error:
            told[save_id] = error
    return told


def _fitting(path: Path, job: Job) -> _Fitting:
    """A whole file that fits the job.

    Raises:
        CheckpointCorruptError: it is missing or damaged.
        CheckpointError, StateDictError: it is of another topology, or of other settings.
    """
    sizes = {int(m[1]) for f in path.parent.iterdir() if (m := _FILE.fullmatch(f.name))}
    if sizes - {job.team.size} and not path.exists():
        raise _other_topology(path, "world_size", min(sizes), job.team.size)
    file = read_header(path)
    # As JSON gives it back: keys are strings, tuples are lists.
    here = json.loads(json.dumps(job.topology))
    if different := first_difference(file.table["topology"], here):
        raise _other_topology(path, *different)
    objects = _read_objects(file)
    optimizer = job.optimizer
    groups = loading.checked_groups(
        optimizer.param_groups, objects["param_groups"], optimizer._inventory, optimizer._records
    )
    return _Fitting(file, objects, groups)


def _other_topology(path: Path, where: str, saved: Any, here: Any) -> CheckpointError:
    return CheckpointError(
        f"{path}: {where}",
        reason=f"{saved!r} in the snapshot, {here!r} in this job",
        remedy="resume on the topology and with the settings that saved it, or load a "
        "torch.distributed.checkpoint, which reshards",
    )


def _read_objects(file: RankFile) -> dict[str, Any]:
    start, stop = file.ranges["objects"]
    buffer = bytearray(stop - start)
    read_entries(file, [Entry("objects", torch.frombuffer(buffer, dtype=torch.uint8))], None)
    return _unpickled(bytes(buffer))  # type: ignore[no-any-return]


def _fill(job: Job, saved: _Fitting) -> None:
    """Overwrite weights and state; inside :meth:`HybridDeviceOptimizer._replacing_all`."""
    optimizer = job.optimizer
    optimizer._gateway.current_stream().synchronize()
    natives = [_native_entry(job, made) for made in saved.file.table["native"]]
    read_entries(saved.file, [*job.entries, *(e for e, _, _ in natives)], optimizer._gateway)
    for entry in job.entries:
        if entry.origin is not None:
            entry.origin.copy_(entry.tensor)
    job.set_values(saved.file.table["values"])
    job.set_module_states(saved.objects["modules"])
    _set_natives(job, saved, natives)
    for group, values in zip(optimizer.param_groups, saved.groups, strict=True):
        for name, value in values.items():
            if isinstance(value, Tensor) and isinstance(now := group.get(name), Tensor):
                value = value.to(now.device)
            group[name] = value


def _native_entry(job: Job, made: Table) -> tuple[Entry, Tensor, Table]:
    """Memory for one state tensor of a native or frozen parameter, and the tensor over it."""
    parameter = next(p for p, name in job.names.items() if name == made["fqn"])
    device = torch.device("cpu") if made["on_host"] else job.optimizer.device
    dtype = getattr(torch, made["dtype"].removeprefix("torch."))
    memory = torch.empty(made["local_shape"], dtype=dtype, device=device)
    tensor = memory
    if made["mesh"] is not None:
        assert isinstance(parameter, DTensor), made
        tensor = DTensor.from_local(
            memory,
            parameter.device_mesh,
            [placement(text) for text in made["placements"]],
            run_check=False,
            shape=torch.Size(made["global_shape"]),
            stride=tuple(made["stride"]),
        )
    return Entry(made["entry"], memory), tensor, made


def _set_natives(job: Job, saved: _Fitting, made: list[tuple[Entry, Tensor, Table]]) -> None:
    found: dict[str, dict[str, Any]] = {
        name: dict(values) for name, values in saved.objects["native"].items()
    }
    for _, tensor, table in made:
        found[table["fqn"]][table["name"]] = tensor
    for _, state in job.unrecorded():
        state.clear()
    parameters = {name: parameter for parameter, name in job.names.items()}
    for name, values in found.items():
        job.optimizer._shown[parameters[name]].update(values)
