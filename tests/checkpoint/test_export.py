"""Exported files against the gathered model, the masters of a twin, and other readers."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.optim import Optimizer

from fsdp_offload import (
    CheckpointError,
    ConfigError,
    OffloadError,
    UnsupportedParameterError,
    checkpoint,
)
from fsdp_offload.checkpoint import export, export_safetensors
from fsdp_offload.checkpoint.export import CODES, INDEX
from fsdp_offload.update import codec
from tests.checkpoint import jobs, make_golden
from tests.checkpoint.jobs import FLAT, NESTED, Ranks
from tests.checkpoint.test_corruption import refusing
from tests.checkpoint.test_loading import dcp_save
from tests.fsdp import models
from tests.fsdp.models import check
from tests.fsdp.test_meshes import parallel, parallel_loss
from tests.helpers.compare import assert_same

Tensors = dict[str, Tensor]


def load(folder: Path) -> Tensors:
    """Every tensor of an export, by way of its index where there is one."""
    if (folder / INDEX).exists():
        index = json.loads((folder / INDEX).read_text())
        files = sorted(set(index["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    loaded: Tensors = {}
    for name in files:
        loaded |= safetensors.torch.load_file(folder / name)
    return loaded


def exported(folder: Path, source: Any, **options: Any) -> Tensors:
    """What a new export has; the folder is removed again."""
    export_safetensors(source, folder, **options)
    found = load(folder)
    shutil.rmtree(folder)
    return found


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


class Net(nn.Module):
    """A tied head, buffers of three kinds, 0-dim and empty parameters, an expanded buffer."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, dtype=dtype)
        self.norm = nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.tensor(0.3, dtype=dtype))
        self.nothing = nn.Parameter(torch.empty(0, 5, dtype=dtype))
        self.register_buffer("mask", torch.arange(7) % 2 == 0)
        self.register_buffer("table", torch.randn(4, 3).t())
        self.register_buffer("wide", torch.randn(1, 3).expand(5, 3))
        self.register_buffer("scratch", torch.randn(3), persistent=False)
        self.head = nn.Linear(6, 11, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight


def trained(dtype: torch.dtype, lane: str) -> tuple[nn.Module, Optimizer, Tensors]:
    """A model after three steps, its optimizer, and its fp32 masters."""
    made = make_golden.job(dtype, lane)
    make_golden.train(made)
    values = make_golden.dump(made)
    return *made, {name: values[f"{name}.master"] for name, _ in made[0].named_parameters()}


def once(model: nn.Module) -> Tensors:
    """The state dict without the second names of tied weights."""
    seen: set[int] = set()
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor.detach().clone()
    return found


@pytest.mark.parametrize("dtype", CODES)
def test_every_dtype_is_read_back_by_safetensors(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.arange(24, dtype=torch.uint8).view(dtype) if dtype != torch.bool else None
    model = nn.Module()
    model.register_buffer("x", torch.tensor([True, False]) if tensor is None else tensor)
    if dtype.is_floating_point and dtype.itemsize == 1:  # quantised weights keep theirs
        del model.x
        model.x = nn.Parameter(tensor, requires_grad=False)

    export_safetensors(model, tmp_path, dtype="bf16")

    assert_same(load(tmp_path), {"x": model.x})


def test_a_model_is_written_as_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Net()

    with caplog.at_level("INFO", "fsdp_offload"):
        written = export_safetensors(model, tmp_path / "new" / "folder")
    (line,) = caplog.messages
    size = written[0].stat().st_size
    assert re.fullmatch(rf"exported \S+/new/folder: {size} bytes in \S+ s, \S+ GB/s", line)
    with contextlib.chdir(tmp_path):
        assert export_safetensors(model, "other") == (Path("other/model.safetensors"),)
    assert (tmp_path / "other" / "model.safetensors").read_bytes() == written[0].read_bytes()

    assert written == (tmp_path / "new" / "folder" / "model.safetensors",)
    assert left_in(tmp_path / "new" / "folder") == ["model.safetensors"]
    found = load(tmp_path / "new" / "folder")
    assert_same(found, once(model))
    assert "scratch" not in found
    data = written[0].read_bytes()
    size = int.from_bytes(data[:8], "little")
    assert size % 8 == 0
    header = json.loads(data[8 : 8 + size])
    for name, tensor in found.items():
        assert header[name]["data_offsets"][0] % tensor.itemsize == 0, name


def test_tied_weights_are_written_once_and_load_into_their_model(tmp_path: Path) -> None:
    model, other = Net(), Net()
    del model.wide, other.wide  # safetensors does not load into expanded tensors
    (path,) = export_safetensors(model, tmp_path)

    assert safetensors.torch.load_model(other, path) == (set(), [])
    assert torch.equal(other.head.weight, model.embed.weight)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_several_files_have_an_index(tmp_path: Path) -> None:
    model = Net()
    written = export_safetensors(model, tmp_path, max_shard_bytes="100B")

    count = len(written) - 1
    assert count > 3
    assert written[-1].name == "model.safetensors.index.json"
    assert left_in(tmp_path) == sorted(path.name for path in written)
    index = json.loads(written[-1].read_text())
    expected = once(model)
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in expected.values())
    files = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    assert [path.name for path in written[:-1]] == files
    filled = []
    for file in files:
        found = [name for name in expected if index["weight_map"][name] == file]
        assert safetensors.torch.load_file(tmp_path / file).keys() == set(found)
        filled.append((sum(expected[name].nbytes for name in found), found))
    assert [name for _, found in filled for name in found] == list(expected)
    for (nbytes, found), (_, after) in itertools.pairwise(filled):
        assert len(found) == 1 or nbytes <= 100
        assert nbytes + expected[after[0]].nbytes > 100, "more would have fitted"
    assert_same(load(tmp_path), expected)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_files_are_never_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    is_export = name.endswith(".safetensors")

    with (
        refusing("pwrite", 0, errno.ENOSPC),
        pytest.raises(CheckpointError, match="another process" if is_export else "do not belong"),
    ):
        export_safetensors(Net(), tmp_path)

    assert left_in(tmp_path) == [name]
    assert (tmp_path / name).read_text() == "mine"
    export_safetensors(Net(), tmp_path / "new")  # the remedy


@pytest.mark.parametrize(
    ("dtype", "lane"),
    [(torch.bfloat16, "streamed"), (torch.bfloat16, "host"), (torch.float16, "streamed")],
)
def test_masters_are_exported_exactly(tmp_path: Path, lane: str, dtype: torch.dtype) -> None:
    model, wrapped, masters = trained(dtype, lane)

    export_safetensors(model, tmp_path / "fp32", optimizer=wrapped, dtype="fp32")
    assert_same(load(tmp_path / "fp32"), masters)

    export_safetensors(model, tmp_path / "none", optimizer=wrapped)
    assert_same(load(tmp_path / "none"), once(model))

    export_safetensors(model, tmp_path / "bf16", optimizer=wrapped, dtype="bf16")
    stored = once(model)
    if dtype == torch.float16:  # not rounded twice
        stored = {name: master.bfloat16() for name, master in masters.items()}
    assert_same(load(tmp_path / "bf16"), stored)


@pytest.mark.parametrize(
    ("stored", "dtype", "written"),
    [
        (torch.float32, "bf16", torch.bfloat16),
        (torch.bfloat16, "fp32", torch.float32),
    ],
)
def test_weights_without_a_master_are_converted_and_buffers_are_not(
    tmp_path: Path, stored: torch.dtype, dtype: str, written: torch.dtype
) -> None:
    model = Net(stored)
    expected = once(model)
    for name, parameter in model.named_parameters():
        expected[name] = parameter.detach().to(written)
    plain = torch.optim.AdamW(model.parameters())

    for optimizer in (None, plain):
        found = exported(tmp_path / "out", model, optimizer=optimizer, dtype=dtype)
        assert_same(found, expected)
    assert not plain.state


def test_state_of_another_shape_is_no_master(tmp_path: Path) -> None:
    model = Net(torch.bfloat16)
    plain = torch.optim.SGD(model.parameters())
    for parameter in model.parameters():
        plain.state[parameter]["master"] = torch.ones(1, 1, 1)

    found = exported(tmp_path / "out", model, optimizer=plain, dtype="fp32")

    for name, parameter in model.named_parameters():
        assert_same(found[name], parameter.detach().float())


def refused(
    error: type[OffloadError], match: str, folder: Path, *args: Any, **settings: Any
) -> None:
    with pytest.raises(error, match=match) as caught:
        export_safetensors(*args, **settings)
    assert caught.value.reason
    assert caught.value.remedy
    assert left_in(folder) == []


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    out, model = tmp_path / "out", Net()
    adam: Any = torch.optim.AdamW(model.parameters())

    refused(ConfigError, "dtype='fp8'", out, model, out, dtype="fp8")
    refused(ConfigError, "max_shard_bytes", out, model, out, max_shard_bytes="much")
    refused(ConfigError, "source of type int", out, 3, out)
    refused(ConfigError, "optimizer of type str", out, model, out, optimizer="Adam")
    refused(ConfigError, "contains its own masters", out, tmp_path, out, optimizer=adam)
    for side in ("model_prefix", "optimizer_prefix"):
        refused(ConfigError, "prefixes.*'x.'", out, model, out, **{side: "x."})
    refused(CheckpointError, "no .metadata", out, tmp_path, out)


@pytest.mark.parametrize("dtype", ["bf16", None])
def test_views_are_written_as_the_values_that_they_show(
    tmp_path: Path, dtype: Literal["bf16"] | None
) -> None:
    angles = torch.polar(torch.ones(4), torch.arange(4.0))
    model = nn.Module()
    model.register_buffer("conjugate", angles.conj())
    model.register_buffer("negative", angles.conj().imag)
    model.register_buffer("both", angles.view(2, 2).t().conj().imag)
    model.weight = nn.Parameter(torch.arange(12.0).view(3, 4).t()[1:, ::2])
    model.row = nn.Parameter(torch.ones(1, 3).expand(4, 3), requires_grad=False)
    expected = {n: t.resolve_conj().resolve_neg().clone() for n, t in once(model).items()}
    for name, parameter in model.named_parameters():
        expected[name] = parameter.to(torch.bfloat16 if dtype else torch.float32)

    export_safetensors(model, tmp_path / "out", dtype=dtype)

    assert_same(load(tmp_path / "out"), expected)


@pytest.mark.filterwarnings("ignore:.*(quantized tensor|nested tensor)")
def test_tensors_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    out, model = tmp_path / "out", nn.Module()

    model.register_buffer("x", torch.zeros(3, dtype=torch.complex128))
    refused(UnsupportedParameterError, "complex128", out, model, out)
    model.register_buffer("x", torch.zeros(3, device="meta"))
    refused(UnsupportedParameterError, "initialise", out, model, out)
    model.register_buffer("x", torch.eye(3).to_sparse())
    refused(UnsupportedParameterError, "sparse", out, model, out)
    model.register_buffer("x", torch.nested.nested_tensor([torch.ones(2)]))
    refused(UnsupportedParameterError, "only dense", out, model, out)
    model.register_buffer("x", torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))
    refused(UnsupportedParameterError, "qint8", out, model, out)


def test_blocks_are_small_whatever_the_tensor(tmp_path: Path) -> None:
    """Of 24 MB of fp32 masters no more than 1 MiB are made, or written, at once."""
    model = nn.Linear(3000, 2048, bias=False, dtype=torch.bfloat16)
    remainder = torch.randint(-(2**15), 2**15, model.weight.shape, dtype=torch.int16)
    remainder = remainder.view(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight]["master_remainder"] = remainder
    blocks: list[int] = []
    real_value, real_write = export._value, os.pwrite

    def value(*args: Any) -> Tensor:
        block = real_value(*args)
        blocks.append(block.nbytes)
        return block

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        blocks.append(len(data))
        return real_write(descriptor, data, offset)

    with mock.patch.object(export, "_value", value), mock.patch.object(os, "pwrite", pwrite):
        export_safetensors(model, tmp_path, optimizer=optimizer, dtype="fp32")

    assert max(blocks) <= 1 << 20
    assert sum(blocks) > 2 * 24_000_000
    master = torch.empty(model.weight.numel())
    codec.decode_plain(model.weight.detach().view(-1), remainder.view(-1), master)
    assert_same(load(tmp_path), {"weight": master.view(model.weight.shape)})


def save_alone(state: dict[str, Any], path: Path) -> Path:
    dcp_save(state, path)
    return path


def test_a_checkpoint_of_weights_alone(tmp_path: Path) -> None:
    model = Net(torch.bfloat16)
    saved = save_alone(model.state_dict(), tmp_path / "saved")

    export_safetensors(saved, tmp_path / "out", dtype="fp32", max_shard_bytes="500B")

    expected = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in model.state_dict().items()
    }
    assert_same(load(tmp_path / "out"), expected)


def test_tied_weights_in_a_checkpoint_are_written_under_every_name(tmp_path: Path) -> None:
    """It has them twice, and does not tell that they are one."""
    model, wrapped, _ = trained(torch.bfloat16, "streamed")
    model.register_parameter("copy", model.weight)
    checkpoint.save(tmp_path / "saved", model, wrapped)

    export_safetensors(tmp_path / "saved", tmp_path / "out")

    assert_same(load(tmp_path / "out"), dict(model.state_dict()))


def test_a_flat_state_dict_whose_names_begin_with_model(tmp_path: Path) -> None:
    """As Transformers names them: nothing is cut off."""
    state = {"model.layers.0.weight": torch.randn(3, 2), "lm_head.weight": torch.randn(2, 2)}
    for name, saved in (("flat", dict(state)), ("nested", {"model": dict(state)})):
        path = save_alone(saved, tmp_path / name)
        assert_same(exported(tmp_path / "out", path), state)


def test_masters_of_a_model_are_not_taken_for_those_of_its_copy(tmp_path: Path) -> None:
    model, wrapped, masters = trained(torch.bfloat16, "streamed")
    copy = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    state = {"model": model.state_dict(), "ema": copy}
    state["optim"] = get_optimizer_state_dict(model, wrapped, options=FLAT)
    saved, out = save_alone(state, tmp_path / "saved"), tmp_path / "out"

    refused(
        CheckpointError, "name no parameter", out, saved, out, dtype="fp32", model_prefix="ema."
    )
    assert_same(exported(out, saved, model_prefix="ema."), copy)
    assert_same(exported(out, saved, dtype="fp32"), masters)


def test_masters_under_integer_ids_are_refused_where_they_count(tmp_path: Path) -> None:
    model, wrapped, _ = trained(torch.bfloat16, "streamed")
    state = wrapped.state_dict()["state"]
    saved = save_alone({"model": model.state_dict(), "optim": {"state": state}}, tmp_path / "saved")
    out = tmp_path / "out"

    refused(CheckpointError, "name no parameter", out, saved, out, dtype="fp32")
    export_safetensors(saved, out, dtype="bf16")
    assert_same(load(out), once(model))


def gathered(model: nn.Module) -> Tensors:
    """Every tensor whole, on every rank; tied ones once."""
    with torch.no_grad():
        return {
            name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            for name, tensor in once(model).items()
        }


def check_export(folder: Path, expected: Tensors) -> None:
    dist.barrier()
    assert_same(load(folder), expected)
    check(not list(folder.glob(".*")), "temporary files stayed")


def mesh_of(kind: str) -> DeviceMesh:
    world = dist.get_world_size()
    if kind == "hsdp":
        return models.mesh((2, world // 2), ("replicate", "shard"))
    return models.flat_mesh(1 if kind == "one" else world)


def export_sharded(folder: Path, kind: str, max_shard_bytes: int) -> int:
    """Returns how many bytes this rank has written."""
    # With tensor parallelism: strided shards, a layer outside, a plain scale.
    model = parallel(14) if kind == "tp" else models.toy(mesh_of(kind))
    model.register_buffer("count", torch.arange(3))
    if kind == "tp":
        parallel_loss(model, 1).backward()  # an unsharded root must not disturb
    with mock.patch.object(os, "pwrite", wraps=os.pwrite) as pwrite, warnings.catch_warnings():
        warnings.simplefilter("error")
        files = export_safetensors(model, folder, max_shard_bytes=f"{max_shard_bytes}B")
    check(len(files) == 1 or max_shard_bytes < 10_000, f"{len(files)} files")
    check_export(folder, gathered(model))
    return sum(len(call.args[1]) for call in pwrite.call_args_list)


@pytest.mark.parametrize(
    ("size", "kind"),
    [
        (2, "fsdp"),
        (2, "hsdp"),
        (2, "one"),
        pytest.param(4, "hsdp", marks=pytest.mark.long),
        (4, "tp"),
    ],
)
def test_sharded_models(ranks: Ranks, tmp_path: Path, size: int, kind: str) -> None:
    ranks(size).run(export_sharded, tmp_path / "several", kind, 5000)
    written = ranks(size).run(export_sharded, tmp_path / "one", kind, 10**9)

    assert sum(written) == (tmp_path / "one" / "model.safetensors").stat().st_size  # replicas: once
    assert all(written)


def train_and_export(folder: Path, kind: str) -> None:
    """bf16 FSDP2 training: the fp32 export has the bits of the masters."""
    model = models.toy(mesh_of(kind), dtype=torch.bfloat16)
    inner = torch.optim.AdamW(models.groups(model), fused=True)
    wrapped = models.wrap(inner, model, update_on=jobs.MIXED)
    for step in range(1, 4):
        models.backward(model, step)
        wrapped.step()
        wrapped.zero_grad()
    masters = {
        name: jobs.master(p, wrapped.state.get(p, {})).float()
        for name, p in model.named_parameters()
    }
    export_safetensors(model, folder / "fp32", optimizer=wrapped, dtype="fp32")
    check_export(folder / "fp32", masters)
    for dtype in ("bf16", None):
        export_safetensors(model, folder / str(dtype), optimizer=wrapped, dtype=dtype)
        check_export(folder / str(dtype), gathered(model))
    for name, options in (("flat", FLAT), ("nested", NESTED)):
        state = {
            "model": get_model_state_dict(model),
            "optim": get_optimizer_state_dict(model, wrapped, options=options),
        }
        dcp.save(state, checkpoint_id=folder / name)
    wrapped.close()


@pytest.mark.parametrize(
    ("size", "kind"),
    [
        (2, "fsdp"),
        pytest.param(4, "hsdp", marks=pytest.mark.long),
    ],
)
def test_masters_of_sharded_training_live_and_from_a_checkpoint(
    ranks: Ranks, tmp_path: Path, size: int, kind: str
) -> None:
    ranks(size).run(train_and_export, tmp_path, kind)

    for dtype in ("fp32", "bf16", None):
        live = load(tmp_path / str(dtype))
        for layout in ("flat", "nested"):
            found = exported(tmp_path / "out", tmp_path / layout, dtype=dtype)
            assert_same(found.pop("head.weight"), found["embed.weight"])  # tied
            if layout == "nested" and dtype == "fp32":
                # Which parameters are in groups is not told there; this one has no state.
                found["frozen"] = found["frozen"].float()
            assert_same(found, live), (layout, dtype)


def export_stages(folder: Path) -> None:
    """Pipeline stages: each half of the ranks has layers of its own."""
    world = dist.get_world_size()
    on = models.mesh((2, world // 2), ("stage", "shard"))
    stage = on.get_local_rank("stage")
    torch.manual_seed(stage)
    model = nn.ModuleDict({f"layer{stage}": nn.Linear(5, 7)})
    fully_shard(model[f"layer{stage}"], mesh=on["shard"])
    export_safetensors(model, folder)
    mine = gathered(model)
    everything: list[Any] = [None] * world
    dist.all_gather_object(everything, mine)
    expected = {name: tensor for each in everything for name, tensor in each.items()}
    check_export(folder, expected)


def test_pipeline_stages_are_joined(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(export_stages, tmp_path)


def fail(folder: Path, how: str) -> tuple[str, str]:
    """(type, message) of what this rank raised; only rank 1 has a reason of its own."""
    settings: dict[str, Any] = {}
    model = models.toy(models.flat_mesh(dist.get_world_size()))
    harm: Any = contextlib.nullcontext()
    if dist.get_rank() == 1:
        settings = {"dtype": "fp8"} if how == "argument" else {}
        harm = refusing("pwrite", 1, errno.ENOSPC) if how == "disk" else harm
        folder = folder / "elsewhere" if how == "folder" else folder
    try:
        with harm:
            export_safetensors(model, folder, **settings)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("argument", "ConfigError", "fp8"),
        ("disk", "CheckpointError", "No space left"),
        ("folder", "CheckpointError", "do not share the folder"),
    ],
)
def test_all_ranks_raise_if_one_fails(
    ranks: Ranks, tmp_path: Path, how: str, kind: str, text: str
) -> None:
    raised = ranks(2).run(fail, tmp_path / "out", how)

    for rank, (name, message) in enumerate(raised):
        assert name == kind, raised
        assert text in message
        assert ("rank 1" in message) == (rank == 0)
    assert left_in(tmp_path / "out") == []


def export_partial(folder: Path) -> None:
    """A partial tensor has no value on any rank."""
    model = nn.Module()
    model.weight = nn.Parameter(DTensor.from_local(torch.ones(3), models.flat_mesh(2), [Partial()]))
    with pytest.raises(UnsupportedParameterError, match="redistribute"):
        export_safetensors(model, folder)


def test_a_partial_tensor_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(export_partial, tmp_path)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(("tied", "max_shard_bytes"), [(False, "5GB"), (True, "20KB")])
def test_transformers_loads_what_was_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool, max_shard_bytes: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install transformers"
    )
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).bfloat16()
    written = export_safetensors(model, tmp_path, max_shard_bytes=max_shard_bytes)
    config.save_pretrained(tmp_path)

    loaded, told = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, output_loading_info=True
    )

    assert (len(written) > 1) == (max_shard_bytes == "20KB")
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert_same(dict(loaded.state_dict()), dict(model.state_dict()))
    assert ("lm_head.weight" in load(tmp_path)) == (not tied)
