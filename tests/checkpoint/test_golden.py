"""Checkpoints of earlier versions are read, by this package and by torch, to the last bit."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor

from fsdp_offload import checkpoint
from fsdp_offload.checkpoint import manifest
from tests.checkpoint.jobs import Ranks
from tests.checkpoint.make_golden import EXTRA, GOLDEN, LR, MAKERS, Job, dump, job, make
from tests.helpers.compare import assert_same, bits

pytestmark = [
    # of torch, which reads in one process here
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]

NAMES = sorted(path.name for path in GOLDEN.iterdir())
OURS = [name for name in NAMES if name.startswith("v3_")]
LANES = ("streamed", "host", "resident")


def golden(name: str) -> Path:
    return GOLDEN / name / "checkpoint"


def expected_of(name: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / name / "expected.safetensors")


def spoil(made: Job) -> None:
    """So that nothing is right by chance."""
    with torch.no_grad():
        for parameter in made[0].parameters():
            parameter.fill_(7.0)
            for value in made[1].state.get(parameter, {}).values():
                value.fill_(7)
    made[1].param_groups[0]["lr"] = 7.0


def load(name: str, dtype: torch.dtype, lane: str | None) -> tuple[Job, dict[str, Any]]:
    made = job(dtype, lane)
    if lane is not None:
        spoil(made)
    return made, checkpoint.load(golden(name), *made)


def adjusted(
    expected: dict[str, Tensor], dtype: torch.dtype, lane: str | None
) -> dict[str, Tensor]:
    """What a job of ``dtype`` keeps of it."""
    found = dict(expected)
    for fqn in ("weight", "bias"):
        source = fqn if lane is None else f"{fqn}.master"
        found[fqn] = found[source].to(dtype)
        if lane is None:  # plain AdamW has no master
            for part in ("exp_avg", "exp_avg_sq"):
                found[f"{fqn}.{part}"] = found[f"{fqn}.{part}"].to(dtype)
            found[f"{fqn}.master"] = found[fqn].float()
    return found


def compare(name: str, dtype: torch.dtype, lane: str | None) -> None:
    """Raise if anything is wrong after a load."""
    made, extra = load(name, dtype, lane)
    options = made[1].param_groups[0]
    if (options["lr"], tuple(options["betas"])) != (LR, (0.8, 0.95)):
        raise AssertionError(f"options {options}")
    if extra != (EXTRA if name in OURS else {}):
        raise AssertionError(f"extra {extra}")
    assert_same(dump(made), adjusted(expected_of(name), dtype, lane))


def cases() -> list[tuple[str, torch.dtype, str | None]]:
    """Every golden checkpoint into every lane and a plain optimizer, in both dtypes."""
    return [*itertools.product(NAMES, (torch.float32, torch.bfloat16), (*LANES, None))]


@pytest.mark.parametrize(("name", "dtype", "lane"), cases())
def test_a_golden_checkpoint_is_loaded(name: str, dtype: torch.dtype, lane: str | None) -> None:
    compare(name, dtype, lane)


def compare_all() -> None:
    for case in cases():
        compare(*case)


def test_golden_checkpoints_are_loaded_on_two_ranks(ranks: Ranks) -> None:
    ranks(2).run(compare_all)


def test_all_forms_are_there() -> None:
    assert set(NAMES) >= set(MAKERS)


@pytest.mark.parametrize("name", OURS)
def test_torch_alone_reads_it(name: str) -> None:
    """As the last section of checkpoints/README.md says."""
    reader = dcp.FileSystemReader(golden(name))
    expected = expected_of(name)
    state: dict[str, Any] = {}
    for key, entry in reader.read_metadata().state_dict_metadata.items():
        is_tensor = isinstance(entry, dcp.metadata.TensorStorageMetadata)
        state[key] = torch.empty(entry.size, dtype=entry.properties.dtype) if is_tensor else None
    dcp.load(state, storage_reader=reader, no_dist=True)
    for fqn in ("weight", "bias"):
        assert torch.equal(bits(state[f"model.{fqn}"]), bits(expected[fqn]))
        for part in ("exp_avg", "exp_avg_sq", "step"):
            value = state[f"optim.state.{fqn}.{part}"]
            assert torch.equal(bits(value), bits(expected[f"{fqn}.{part}"]))
        master = master_of(state[f"model.{fqn}"], state, f"optim.state.{fqn}")
        assert torch.equal(bits(master), bits(expected[f"{fqn}.master"]))


def master_of(weight: Tensor, state: dict[str, Any], start: str) -> Tensor:
    """The rule of checkpoints/README.md."""
    if (master := state.get(f"{start}.master")) is not None:
        assert master.dtype == torch.float32
        return master  # type: ignore[no-any-return]
    remainder = state.get(f"{start}.master_remainder")
    if remainder is None:
        return weight.float()
    assert remainder.dtype == torch.bfloat16
    high, low = (part.view(torch.int16).to(torch.int32) for part in (weight, remainder))
    return ((high << 16) + low).view(torch.float32)


def read_file(path: Path, infos: dict[Any, Any]) -> dict[tuple[str, tuple[int, ...] | None], Any]:
    """All items of a file, as checkpoints/README.md describes it; nothing of this package."""
    data, found = path.read_bytes(), {}
    crc, length, block_bytes, magic = struct.unpack("<IQI8s", data[-24:])
    text = data[-24 - length : -24]
    assert magic == b"FSDPOFF3"
    assert zlib.crc32(text) == crc
    words = list(struct.unpack(f"<{length // 4}I", text))
    for index, info in sorted(infos.items(), key=lambda pair: pair[1].offset):
        assert info.offset % 64 == 0
        item = data[info.offset : info.offset + info.length]
        data_start = words.pop(0)
        for at in range(0, len(item), block_bytes):
            assert zlib.crc32(item[at : at + block_bytes]) == words.pop(0)
        path.with_name("item").write_bytes(item)
        value = torch.load(path.with_name("item"), weights_only=True)
        if isinstance(value, Tensor) and value.numel():
            assert data_start % 64 == 0
            nbytes = value.numel() * value.element_size()
            assert item[data_start : data_start + nbytes] == bytes(bits(value).tolist())
        found[index.fqn, None if index.offset is None else tuple(index.offset)] = value
    assert not words
    return found


@pytest.mark.parametrize("name", OURS)
def test_the_files_are_as_the_specification_says(name: str, tmp_path: Path) -> None:
    path = tmp_path / "copy"
    shutil.copytree(golden(name), path)
    outer = json.loads((path / "manifest.json").read_text())
    assert zlib.crc32(outer["manifest"].encode()) == outer["crc32"]
    manifest = json.loads(outer["manifest"])
    assert manifest["format"] == "fsdp_offload.checkpoint"
    assert manifest["version"] == 3
    assert manifest["optimizer"] == "AdamW"
    assert manifest["time_ns"] > 0
    assert {*manifest["files"], "manifest.json"} == set(os.listdir(path))
    infos = dcp.FileSystemReader(path).read_metadata().storage_data
    expected, found = expected_of(name), {fqn: [] for fqn in ("weight", "bias")}
    for file, (nbytes, crc) in manifest["files"].items():
        data = (path / file).read_bytes()
        assert len(data) == nbytes
        if file == ".metadata":
            assert zlib.crc32(data) == crc
            continue
        assert struct.unpack("<I", data[-24:-20]) == (crc,)
        mine = {index: info for index, info in infos.items() if info.relative_path == file}
        for (key, offsets), value in read_file(path / file, mine).items():
            if key.startswith("model."):
                found[key.removeprefix("model.")].append((offsets, value))
    assert len(manifest["files"]) == 1 + manifest["world_size"]
    for fqn, pieces in found.items():
        ordered = [value for _, value in sorted(pieces, key=lambda piece: piece[0])]
        assert torch.equal(bits(torch.cat(ordered)), bits(expected[fqn]))


@pytest.mark.parametrize("name", ["v3_fp32_streamed", "v3_bf16_remainder"])
def test_what_is_written_today_has_the_same_form(name: str, tmp_path: Path) -> None:
    """Keys, offsets of chunks, dtypes and the manifest; the bits depend on torch's kernels."""
    make(name, tmp_path)
    today, then = tmp_path / name / "checkpoint", golden(name)
    assert forms(today) == forms(then)
    manifests = [manifest.read_manifest(path) for path in (today, then)]
    shown = [(m.version, m.format, m.optimizer, m.world_size) for m in manifests if m is not None]
    assert shown[0] == shown[1]


def forms(path: Path) -> dict[str, Any]:
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        key: (entry.properties.dtype, entry.size, entry.chunks)
        if isinstance(entry, dcp.metadata.TensorStorageMetadata)
        else None
        for key, entry in entries.items()
    }
