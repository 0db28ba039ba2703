"""Weights from folders of safetensors, and models on the meta device, which a load fills."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn import functional as F

from fsdp_offload import (
    CheckpointCorruptError,
    CheckpointError,
    ConfigError,
    DeviceError,
    HybridDeviceOptimizer,
    OffloadError,
    StateDictError,
    checkpoint,
)
from fsdp_offload.checkpoint import reader
from fsdp_offload.checkpoint.safetensors import INDEX
from fsdp_offload.cli.main import main
from tests.fsdp import models
from tests.fsdp.models import Ranks
from tests.helpers.compare import assert_same

WIDTH, ROWS = 6, 11


class Rotary(nn.Module):
    """Makes a buffer in ``__init__`` that no file holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 1 / torch.arange(1.0, WIDTH + 1), persistent=False)


class OwnRotary(Rotary):
    def reset_parameters(self) -> None:
        self.frequencies.copy_(1 / torch.arange(1.0, WIDTH + 1))


class Model(nn.Module):
    """A tied head, uneven shards, buffers that are saved and that are not."""

    def __init__(self, rotary: type[Rotary] = OwnRotary) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH)
        self.rotary = rotary()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.register_buffer("shift", torch.randn(3))
        self.scale = nn.Parameter(torch.randn(1))
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.rotary.frequencies * self.scale
        for layer in self.layers:
            x = torch.tanh(layer(x)) + self.shift.sum()
        return self.head(x)


class HuggingFace(Model):
    """As transformers' models: the model makes what its modules do not."""

    def __init__(self) -> None:
        super().__init__(Rotary)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Rotary):
            OwnRotary.reset_parameters(module)  # type: ignore[arg-type]


def weights(dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The same at every call; without the second name of the tied weight."""
    torch.manual_seed(5)
    found = Model().to(dtype).state_dict()
    return {name: tensor for name, tensor in found.items() if name != "head.weight"}


def write(folder: Path, tensors: dict[str, Tensor], *, files: int = 1) -> Path:
    """As ``save_pretrained`` does."""
    folder.mkdir(exist_ok=True)
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = sorted(tensors)
    table = {}
    for index in range(files):
        file = f"model-{index + 1:05d}-of-{files:05d}.safetensors"
        save_file({name: tensors[name] for name in names[index::files]}, folder / file)
        table |= dict.fromkeys(names[index::files], file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return folder


def on_meta(make: Callable[[], Any] = Model) -> Any:
    with torch.device("meta"):
        return make()


def sharded(model: Any, **options: Any) -> Any:
    for module in (*model.layers, model):
        fully_shard(module, mesh=models.flat_mesh(2), **options)
    return model


def filled(dtype: torch.dtype | None = None) -> Any:
    model: Any = Model().to(dtype)
    missing = model.load_state_dict(weights(), strict=False).missing_keys
    assert missing == ["head.weight"]
    return model


def check_filled(model: Any, dtype: torch.dtype | None = None) -> None:
    expected = filled(dtype)
    assert model.head.weight is model.embed.weight
    for name, tensor in (*expected.named_parameters(), *expected.named_buffers()):
        found = dict((*model.named_parameters(), *model.named_buffers()))[name]
        whole = found.full_tensor() if hasattr(found, "full_tensor") else found
        assert_same([whole.detach()], [tensor.detach()])


# --------------------------------------------------------------------------- what is loaded


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [Model, HuggingFace])
@pytest.mark.parametrize("meta", [False, True])
def test_a_model_in_one_process(
    tmp_path: Path, files: int, dtype: torch.dtype, make: Any, meta: bool
) -> None:
    """Of another dtype than the files, too."""
    folder = write(tmp_path / "folder", weights(), files=files)
    model = on_meta(make).to(dtype) if meta else make().to(dtype)
    parameters = [*model.parameters()]
    assert checkpoint.load(folder, model) == {}
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    check_filled(model, dtype)


def load_shards(folder: Path, kind: str) -> int:
    """Bytes that this rank has read."""
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if kind == "on CPU" else {}
    model = sharded(Model() if kind == "real" else on_meta(), **options)
    read = []

    def count(descriptor: int, offset: int, into: Any, path: object) -> None:
        read.append(len(into))
        original(descriptor, offset, into, path)

    original = reader.read_bytes
    with mock.patch.object(reader, "read_bytes", count):
        checkpoint.load(folder, model)
    check_filled(model)
    optimizer = HybridDeviceOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model)
    plain_model = filled()
    for module in (*plain_model.layers, plain_model):
        fully_shard(module, mesh=models.flat_mesh(2))
    plain = torch.optim.AdamW(plain_model.parameters(), lr=0.1)
    for each, net in ((optimizer, model), (plain, plain_model)):
        for step in range(3):
            tokens = torch.arange(ROWS) + step
            F.cross_entropy(net(tokens % ROWS), tokens.flip(0) % ROWS).backward()
            each.step()
            each.zero_grad()
    models.check_twins(optimizer, plain, kind)
    return sum(read)


@pytest.mark.parametrize("kind", ["real", "meta", "on CPU"])
def test_each_rank_reads_its_shards_alone(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    folder = write(tmp_path / "folder", weights(), files=2)
    whole = sum(t.nbytes for t in weights().values())
    both = ranks(2).run(load_shards, folder, kind)
    assert sum(both) == whole + weights()["shift"].nbytes  # every rank has the whole buffer
    assert max(both) < 0.6 * whole


def fill_from_a_checkpoint(tmp: Path) -> None:
    first = sharded(filled())
    checkpoint.save(tmp / "saved", first)
    second = sharded(on_meta())
    checkpoint.load(tmp / "saved", second)
    check_filled(second)


def test_a_checkpoint_fills_a_model_on_the_meta_device(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(fill_from_a_checkpoint, tmp_path)


def test_base_models_say_their_prefix(tmp_path: Path) -> None:
    folder = write(tmp_path / "folder", {f"base.{k}": v for k, v in weights().items()})
    model = on_meta()
    with pytest.raises(CheckpointError, match=r"model_prefix='model\.base\.'"):
        checkpoint.load(folder, model)
    checkpoint.load(folder, model, model_prefix="model.base.")
    check_filled(model)


def test_exports_are_read_back(tmp_path: Path) -> None:
    checkpoint.export_safetensors(filled(), tmp_path / "out", max_shard_bytes="100B")
    checkpoint.load(tmp_path / "out", model := on_meta())
    check_filled(model)


@pytest.mark.parametrize("name", ["diffusion_pytorch_model", "consolidated"])
def test_the_only_file_may_have_another_name(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "folder", weights())
    (folder / "model.safetensors").rename(folder / f"{name}.safetensors")
    checkpoint.load(folder, model := on_meta())
    check_filled(model)


# --------------------------------------------------------------------------- what is refused


def test_names_that_only_one_side_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = weights()
    del tensors["layers.1.bias"]
    folder = write(tmp_path / "folder", tensors)
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=r"lacks layers\.1\.bias.* give them values"):
            checkpoint.load(folder, model := on_meta(), strict=strict)
        assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    checkpoint.load(folder, Model(), strict=False)
    assert "the checkpoint lacks layers.1.bias: they keep their values" in caplog.messages
    shutil.rmtree(folder)
    folder = write(folder, {**weights(), "layers.2.bias": torch.ones(WIDTH)})
    with pytest.raises(CheckpointError, match=r"this model lacks model\.layers\.2\.bias"):
        checkpoint.load(folder, model := on_meta())
    assert all(parameter.is_meta for parameter in model.parameters())
    checkpoint.load(folder, model, strict=False)
    check_filled(model)


def test_a_shape_that_does_not_fit(tmp_path: Path) -> None:
    folder = write(tmp_path / "folder", {**weights(), "scale": torch.ones(2)})
    with pytest.raises(StateDictError, match=r"model\.scale of shape \(2,\)"):
        checkpoint.load(folder, model := on_meta())
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))


class Careless(Rotary):
    def reset_parameters(self) -> None:
        """Forgets the buffer."""


class Own(Rotary):
    """Would lose the value of its parameter."""

    reset_parameters = OwnRotary.reset_parameters

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))


class Failing(Rotary):
    def reset_parameters(self) -> None:
        raise ValueError("rotary.frequencies on the meta device")


@pytest.mark.parametrize("rotary", [Rotary, Careless, Own, Failing])
def test_buffers_that_nothing_makes(tmp_path: Path, rotary: type[Rotary]) -> None:
    folder = write(tmp_path / "folder", weights())
    model = on_meta(lambda: Model(rotary))
    if rotary is Own:
        model.rotary.weight = nn.Parameter(torch.ones(1))
    with pytest.raises(OffloadError, match=r"rotary\.frequencies on the meta"):
        checkpoint.load(folder, model, strict=rotary is not Own)
    assert model.rotary.frequencies.is_meta
    assert model.embed.weight.is_meta
    model.rotary.frequencies = 1 / torch.arange(1.0, WIDTH + 1)  # the remedy
    checkpoint.load(folder, model, strict=rotary is not Own)
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))


def test_an_optimizer_comes_after_the_weights(tmp_path: Path) -> None:
    folder = write(tmp_path / "folder", weights())
    model = on_meta()
    inner = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match="optimizer of a model on the meta device"):
        checkpoint.load(folder, model, inner)
    with pytest.raises(DeviceError, match=r"checkpoint\.load\(path, model\)"):
        HybridDeviceOptimizer(inner, model)
    checkpoint.load(folder, model)
    HybridDeviceOptimizer(inner, model)


def cut(folder: Path) -> None:
    file = folder / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def header(table: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = table if isinstance(table, bytes) else json.dumps(table).encode()
        file = folder / "model-00001-of-00002.safetensors"
        file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(100))

    return change


def entry(**changed: Any) -> Callable[[Path], None]:
    return header(
        {"embed.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changed}}
    )


def index(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / INDEX).write_text(text) and None


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (cut, "it ends within"),
    "empty": (
        lambda f: (f / "model-00001-of-00002.safetensors").write_bytes(b""),
        "its safetensors header",
    ),
    "no header": (header(b"[]"), "its safetensors header"),
    "length": (entry(data_offsets=[0, 5]), "5 bytes from 0"),
    "before": (entry(data_offsets=[-4, 0]), "4 bytes from -4"),
    "shape": (entry(shape=[-1]), "its safetensors header"),
    "no entry": (header({"a": None}), "its safetensors header"),
    "missing": (lambda f: (f / "model-00002-of-00002.safetensors").unlink(), "it is missing"),
    "index": (index("{}"), "not a valid index"),
    "outside": (index('{"weight_map": {"a": "../model.safetensors"}}'), "outside its folder"),
    "twice": (
        lambda f: shutil.copy(*(f / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))),
        "another file contains",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_files_are_corrupt(tmp_path: Path, name: str) -> None:
    change, text = CHANGES[name]
    change(write(tmp_path / "folder", weights(), files=2))
    with pytest.raises(CheckpointCorruptError, match=text):
        checkpoint.load(tmp_path / "folder", model := on_meta())
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_dtype_that_torch_has_not_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "folder", weights(), files=2)
    entry(dtype="F4")(folder)
    with pytest.raises(CheckpointError, match=r"embed\.weight of dtype F4 .*BF16") as raised:
        checkpoint.load(folder, on_meta())
    assert not isinstance(raised.value, CheckpointCorruptError)


def test_several_models_in_a_folder(tmp_path: Path) -> None:
    folder = write(tmp_path / "folder", weights())
    for name in ("one", "other"):
        shutil.copy(folder / "model.safetensors", folder / f"{name}.safetensors")
    checkpoint.load(folder, on_meta())  # model.safetensors
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"one\.safetensors, other\.safetensors: no index"):
        checkpoint.load(folder, on_meta())


def test_inspect_shows_such_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "folder", weights())
    assert main(["inspect", str(tmp_path / "folder"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["checksums"] == "none"
    assert "model.embed.weight" in {row["name"] for row in report["tensors"]}
