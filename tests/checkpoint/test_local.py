"""Local snapshots: exact, refused where they do not fit, and never torn."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from fsdp_offload import (
    CheckpointCorruptError,
    CheckpointError,
    ClosedError,
    ConfigError,
    HybridDeviceOptimizer,
    LaneError,
    OffloadError,
    StateDictError,
    TransferConfig,
)
from fsdp_offload.checkpoint import blocks, local, local_file
from fsdp_offload.checkpoint.local import load_local, save_local
from fsdp_offload.checkpoint.local_job import decode_number, encode_number, first_difference
from tests import own_optimizers
from tests.fsdp import models
from tests.fsdp.models import Toy, check
from tests.helpers.ranks import RankError, RankPool

pytestmark = pytest.mark.usefixtures("one_thread", "small_host_buckets")

MakePool = Callable[..., RankPool]
Job = tuple[nn.Module, HybridDeviceOptimizer]
SMALL = TransferConfig(bucket_bytes=4096, slots=2, host_threads=2)
MIXED = ("host", "streamed", "resident")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# --------------------------------------------------------------------------- one process


class Scaled(nn.Module):
    """State that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.history = [1.0]

    def get_extra_state(self) -> Any:
        return {"history": self.history}

    def set_extra_state(self, state: Any) -> None:
        self.history = state["history"]


class Model(nn.Module):
    """Parameters of all sizes, buffers of all kinds, a frozen parameter, a module of its own."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        shapes = ((70, 50), (129,), (), (0, 5), (7, 3, 4), (33, 31))
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes
        )
        self.frozen = nn.Parameter(torch.randn(5).to(dtype), requires_grad=False)
        self.scaled = Scaled()
        self.register_buffer("mean", torch.randn(6))
        self.register_buffer("seen", torch.randn(9) > 0)
        self.register_buffer("turned", torch.randn(4, 6).t())
        self.register_buffer("cache", torch.randn(2 + seed), persistent=False)


def job(
    cls: Any = torch.optim.AdamW,
    settings: dict[str, Any] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **wrap: Any,
) -> Job:
    model = Model(dtype, seed)
    parameters = list(model.weights)
    groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.02}]
    inner = cls(groups, **copy.deepcopy({"lr": 0.01, **(settings or {})}))
    wrap.setdefault("transfer", SMALL)
    if wrap.get("update_on") == "mixed":
        wrap["update_on"] = [MIXED[i % 3] for i in range(len(parameters))]
    return model, HybridDeviceOptimizer(inner, model=model, **wrap)


def train(made: Job, steps: range) -> None:
    """The last parameter gets its first gradient at step 3, the others skip every third step."""
    model, optimizer = made
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for index, parameter in enumerate(model.weights):
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            absent = step < 3 if index == 5 else (step + index) % 3 == 0
            absent |= not parameter.numel() and type(optimizer._inner) is torch.optim.Adafactor
            parameter.grad = None if absent else gradient
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.9
        model.mean.add_(1.0)


def dump(made: Job) -> dict[str, Any]:
    """Everything that a step may change, as copies."""
    model, optimizer = made
    found: dict[str, Any] = {f"model.{n}": t.detach().clone() for n, t in tensors_of(model)}
    for index, parameter in enumerate(models.parameters_of(optimizer)):
        for name, value in optimizer.state[parameter].items():
            copied = value.detach().clone() if isinstance(value, Tensor) else value
            found[f"state.{index}.{name}"] = copied
    for index, group in enumerate(optimizer.param_groups):
        found |= {f"group.{index}.{n}": copy.deepcopy(v) for n, v in group.items() if n != "params"}
    return found


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from ((name, b) for name, b in model.named_buffers() if name != "cache")


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert found[name].dtype == value.dtype, name
            assert torch.equal(bits(found[name]), bits(value)), name
        else:
            assert found[name] == value, name


def bits(tensor: Tensor) -> Tensor:
    return models.local(tensor).contiguous().reshape(-1).view(torch.uint8)


def resumes_exactly(path: Path, make: Callable[..., Job], steps: int = 2) -> Job:
    """Save after ``steps``, load into a job that had gone elsewhere, train both on."""
    saving = make()
    train(saving, range(1, steps + 1))
    before = dump(saving)
    save_local(path, *saving, extra={"step": steps})
    assert_same(dump(saving), before)
    resumed = make(seed=1)
    train(resumed, range(20, 22))
    assert load_local(path, *resumed) == {"step": steps}
    assert_same(dump(resumed), before)
    for step in range(steps + 1, steps + 5):
        for each in (saving, resumed):
            train(each, range(step, step + 1))
        assert_same(dump(resumed), dump(saving))
    return resumed


CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"amsgrad": True}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3, "foreach": False}),
    "NAdam": (torch.optim.NAdam, {}),
    "tensor lr": (torch.optim.Adam, {"lr": torch.tensor(0.01), "foreach": False}),
}


CASES = [("AdamW", dtype) for dtype in DTYPES]
CASES += [("SGD", torch.float32), ("NAdam", torch.bfloat16), ("tensor lr", torch.float16)]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    def make(seed: int = 0) -> Job:
        return job(*CLASSES[name], dtype=dtype, seed=seed, update_on="mixed")

    resumes_exactly(tmp_path, make)


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("update_on", ["device", "host"])
def test_any_fraction(tmp_path: Path, fraction: float, update_on: str) -> None:
    def make(seed: int = 0) -> Job:
        return job(seed=seed, dtype=torch.bfloat16, offload_fraction=fraction, update_on=update_on)

    resumes_exactly(tmp_path, make, steps=1)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_momentum_that_was_never_set_is_still_initialised_by_the_class(
    tmp_path: Path, steps: int
) -> None:
    resumes_exactly(
        tmp_path, lambda seed=0: job(*CLASSES["SGD"], seed=seed, update_on="mixed"), steps
    )


OWN = [torch.optim.Adafactor, own_optimizers.Lion, own_optimizers.GroupCounter]


@pytest.mark.parametrize("cls", OWN, ids=lambda cls: cls.__name__)
def test_native_state_and_classes_of_ones_own(tmp_path: Path, cls: Any) -> None:
    resumed = resumes_exactly(tmp_path, lambda seed=0: job(cls, seed=seed))
    natives = resumed[1].statistics().parameters.get("native", 0)
    assert natives == 6


def test_what_is_neither_parameter_nor_buffer(tmp_path: Path) -> None:
    saving, resumed = job(), job(seed=1)
    saving[0].scaled.history = [3.0, 4.0]
    train(saving, range(1, 2))
    cache = resumed[0].cache.clone()
    save_local(tmp_path, *saving, extra=torch.arange(3))
    assert torch.equal(load_local(tmp_path, *resumed), torch.arange(3))
    assert resumed[0].scaled.history == [3.0, 4.0]
    assert torch.equal(resumed[0].cache, cache), "persistent=False"


def test_state_of_a_parameter_that_is_frozen_after_training(tmp_path: Path) -> None:
    saving, resumed = job(), job(seed=1)
    train(saving, range(1, 4))
    for made in (saving, resumed):
        made[1].add_param_group({"params": [made[0].frozen]})
        made[0].weights[0].requires_grad_(False)
    save_local(tmp_path, *saving)
    load_local(tmp_path, *resumed)
    assert_same(dump(resumed), dump(saving))


def test_python_numbers_in_state_that_was_shown(tmp_path: Path) -> None:
    class Counting(own_optimizers.Own):
        def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: Any) -> None:
            state["count"] = state.get("count", 0) + 1
            p.sub_(g, alpha=group["lr"] / state["count"])

    def make(seed: int = 0) -> Job:
        return job(Counting, seed=seed)

    resumes_exactly(tmp_path, make)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_written_from_outside_before_the_save_is_adopted_after_the_load(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    def make(seed: int = 0) -> Job:
        return job(dtype=dtype, seed=seed, update_on="host")

    saving, resumed = make(), make(seed=1)
    train(saving, range(1, 4))
    with torch.no_grad():
        saving[0].weights[0][3:5] = 2.0
    save_local(tmp_path, *saving)
    load_local(tmp_path, *resumed)
    for each in (saving, resumed):
        train(each, range(4, 6))
    assert_same(dump(resumed), dump(saving))


def test_loading_the_module_after_it_does_not_drop_the_masters(tmp_path: Path) -> None:
    saving, resumed = (job(dtype=torch.bfloat16, seed=seed) for seed in range(2))
    train(saving, range(1, 4))
    save_local(tmp_path, *saving)
    load_local(tmp_path, *resumed)
    resumed[0].load_state_dict(saving[0].state_dict())
    assert_same(dump(resumed), dump(saving))


def test_state_that_was_replaced_by_hand_before_the_save_is_saved(tmp_path: Path) -> None:
    saving, resumed = job(), job(seed=1)
    train(saving, range(1, 3))
    saving[1].state[saving[0].weights[0]]["step"] = torch.tensor(7.0)
    save_local(tmp_path, *saving)
    load_local(tmp_path, *resumed)
    record = resumed[1]._records[0]
    assert record.fqn == "weights.0"
    assert len(record.pieces) > 1
    assert {piece.state["step"].item() for piece in record.pieces} == {7.0}


def test_state_that_was_replaced_by_hand_before_the_load_is_gone(tmp_path: Path) -> None:
    saving, resumed = job(), job(seed=1)
    train(saving, range(1, 3))
    save_local(tmp_path, *saving)
    resumed[1].state[resumed[0].weights[0]]["step"] = torch.tensor(7.0)
    load_local(tmp_path, *resumed)
    for each in (saving, resumed):
        train(each, range(3, 5))
    assert_same(dump(resumed), dump(saving))


def test_addresses_stay(tmp_path: Path) -> None:
    saving, resumed = job(), job(seed=1)
    save_local(tmp_path, *saving)
    before = {name: t.data_ptr() for name, t in dump_live(resumed).items()}
    load_local(tmp_path, *resumed)
    assert {name: t.data_ptr() for name, t in dump_live(resumed).items()} == before


def dump_live(made: Job) -> dict[str, Tensor]:
    found = dict(tensors_of(made[0]))
    for index, parameter in enumerate(made[0].weights):
        found |= {f"{index}.{name}": v for name, v in made[1].state[parameter].items()}
    return found


def test_the_file_is_safetensors_with_a_table(tmp_path: Path) -> None:
    made = job(update_on="mixed")
    train(made, range(1, 3))
    save_local(tmp_path, *made)
    with safe_open(file_of(tmp_path), "pt") as file:
        names, metadata = set(file.keys()), file.metadata()
        for name, tensor in tensors_of(made[0]):
            assert torch.equal(file.get_tensor(f"model.{name}"), tensor), name
        arena = file.get_tensor("arena.0")
        step = json.loads(metadata["table"])["values"]["weights.0"]["scalars"]["step"]
        places = json.loads(metadata["table"])["topology"]["arenas"][0]
    assert "state.weights.4.exp_avg" in names
    assert step == 2
    assert arena.numel() == places["n_bytes"]
    start = places["offsets"]["weights.1.exp_avg"]
    expected = made[1].state[made[0].weights[1]]["exp_avg"]
    assert torch.equal(arena[start : start + 4 * 129].view(torch.float32), expected)


def test_a_save_replaces_the_one_before(tmp_path: Path) -> None:
    made = job()
    for step in range(1, 4):
        train(made, range(step, step + 1))
        save_local(tmp_path, *made, extra=step)
    assert [path.name[:8] for path in tmp_path.iterdir()] == ["00000003"]
    assert [path.name for path in file_of(tmp_path).parent.iterdir()] == ["rank_0_of_1.safetensors"]
    assert load_local(tmp_path, *made) == 3


def file_of(path: Path, rank: int = 0, size: int = 1) -> Path:
    """Of the only (or newest) save in ``path``."""
    return path / local.save_ids(path)[-1] / f"rank_{rank}_of_{size}.safetensors"


# --------------------------------------------------------------------------- refused


def resized(seed: int = 1) -> Job:
    model = Model(torch.float32, seed)
    model.weights[1] = nn.Parameter(torch.zeros(130))
    groups = [{"params": list(model.weights)[::2]}, {"params": list(model.weights)[1::2]}]
    return model, HybridDeviceOptimizer(torch.optim.AdamW(groups), model=model, transfer=SMALL)


OTHER_JOBS: dict[str, tuple[Callable[[], Job], str]] = {
    "lanes": (lambda: job(update_on="host"), "lane.*'streamed' in the snap.*'host' in this job"),
    "fraction": (lambda: job(offload_fraction=0.0), "lane.*'streamed' in.*'resident' in this"),
    "dtype": (lambda: job(dtype=torch.bfloat16), "'torch.float32' in.*'torch.bfloat16' in this"),
    "class": (lambda: job(torch.optim.Adam), r"AdamW' in the snap.*Adam' in this job"),
    "flags": (lambda: job(settings={"amsgrad": True}), "max_exp_avg_sq.*'nothing' in the snap"),
    "shape": (resized, r"129.*in the snapshot.*130.*in this job"),
}


@pytest.mark.parametrize("other", OTHER_JOBS)
def test_another_job_is_refused_before_anything_is_written(tmp_path: Path, other: str) -> None:
    save_local(tmp_path, *job())
    make, words = OTHER_JOBS[other]
    made = make()
    train(made, range(1, 2))
    before = dump(made)
    with pytest.raises(CheckpointError, match=words) as caught:
        load_local(tmp_path, *made)
    assert not isinstance(caught.value, CheckpointCorruptError)
    assert_same(dump(made), before)


def test_another_precision_is_refused(tmp_path: Path) -> None:
    from fsdp_offload import PrecisionConfig

    save_local(tmp_path, *job(dtype=torch.bfloat16))
    other = job(dtype=torch.bfloat16, precision=PrecisionConfig(master="none"))
    with pytest.raises(CheckpointError, match=r"'master_remainder' in the snap.*'shard' in this"):
        load_local(tmp_path, *other)


def test_group_values_that_need_other_state_are_refused(tmp_path: Path) -> None:
    saving = job()
    saving[1].param_groups[0]["amsgrad"] = True  # the next step would refuse it
    save_local(tmp_path, *saving)
    with pytest.raises(StateDictError, match=r"amsgrad|max_exp_avg_sq"):
        load_local(tmp_path, *job())


def test_another_version_of_the_format_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job()
    with monkeypatch.context() as patch:
        patch.setattr(local_file, "FORMAT_VERSION", 2)
        save_local(tmp_path, *made)
    with pytest.raises(CheckpointError, match=r"format version 2.*reads version 1"):
        load_local(tmp_path, *made)


def test_arguments_are_checked(tmp_path: Path) -> None:
    model, optimizer = job()
    plain = torch.optim.AdamW(model.parameters())
    for call in (save_local, load_local):
        with pytest.raises(ConfigError, match=r"torch.distributed.checkpoint"):
            call(tmp_path, model, plain)  # type: ignore[operator]
    with pytest.raises(ConfigError, match="weights_only"):
        save_local(tmp_path, model, optimizer, extra=object())
    with pytest.raises(ConfigError, match=r"2 tensors of the name optimizer's\.w"):
        save_local(tmp_path, model, job_with_two_names_alike())
    with pytest.raises(CheckpointError, match="holds no snapshot"):
        load_local(tmp_path / "none", model, optimizer)
    assert list(tmp_path.iterdir()) == []
    optimizer.close()
    for call in (save_local, load_local):
        with pytest.raises(ClosedError):
            call(tmp_path, model, optimizer)


def job_with_two_names_alike() -> HybridDeviceOptimizer:
    groups = [{"params": [("w", nn.Parameter(torch.zeros(2)))]} for _ in range(2)]
    return HybridDeviceOptimizer(torch.optim.AdamW(groups), transfer=SMALL)


def test_a_failed_optimizer_is_not_saved_and_recovers_by_a_load(tmp_path: Path) -> None:
    made = job(update_on="mixed")
    train(made, range(1, 3))
    save_local(tmp_path, *made, extra=2)
    expected = dump(made)
    fail(made[1])
    with pytest.raises(LaneError):
        save_local(tmp_path, *made, extra=3)
    assert load_local(tmp_path, *made) == 2
    assert_same(dump(made), expected)
    train(made, range(3, 4))


def fail(optimizer: HybridDeviceOptimizer) -> None:
    with pytest.raises(LaneError), optimizer._health.failing("step()", lambda: None):
        raise RuntimeError("a lane")


@pytest.mark.parametrize(
    "value",
    [0, 7, True, 0.1, 1e-300, -0.0, math.inf, -math.inf, 2 + 3j, complex(math.inf, 0), 2**40],
)
def test_numbers_survive_json(value: Any) -> None:
    found = decode_number(json.loads(json.dumps(encode_number(value), allow_nan=False)))
    assert (type(found), repr(found)) == (type(value), repr(value))


def test_nan_survives_json() -> None:
    text = json.dumps(encode_number(torch.tensor(math.nan)), allow_nan=False)
    assert math.isnan(decode_number(json.loads(text)))


def test_the_first_difference_is_named() -> None:
    assert first_difference({"a": {"b": 1}}, {"a": {"b": 1}}) is None
    assert first_difference({"a": {"b": 1}}, {"a": {"b": 2}}) == ("a, b", 1, 2)
    assert first_difference({"a": 1}, {}) == ("a", 1, "nothing")
    assert first_difference({}, {"a": {}}) == ("a", "nothing", {})


# --------------------------------------------------------------------------- damaged files


def flip(path: Path, position: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ (1 << bit)]))


def flips(tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1 << 14)
    made = job(update_on="mixed")
    train(made, range(1, 3))
    save_local(tmp_path, *made, extra=2)
    expected, path = dump(made), file_of(tmp_path)
    chance = random.Random(count)
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    for index in range(count):
        limit = header if index % 3 == 0 else path.stat().st_size
        position, bit = chance.randrange(limit), chance.randrange(8)
        flip(path, position, bit)
        with pytest.raises(CheckpointCorruptError):
            load_local(tmp_path, *made)
        if has_failed := failed(made[1]):
            assert position >= header
            with pytest.raises(LaneError, match="load a checkpoint"):
                made[1].step()
        flip(path, position, bit)
        if has_failed:
            assert load_local(tmp_path, *made) == 2
        assert_same(dump(made), expected)
    train(made, range(3, 4))


def failed(optimizer: HybridDeviceOptimizer) -> bool:
    try:
        optimizer.synchronize()
    except LaneError:
        return True
    return False


def test_every_flipped_bit_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flips(tmp_path, 20, monkeypatch)


@pytest.mark.long
def test_every_flipped_bit_is_found_in_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flips(tmp_path, 1500, monkeypatch)


def test_a_flipped_bit_of_the_data_makes_the_optimizer_failed(tmp_path: Path) -> None:
    made = job()
    save_local(tmp_path, *made)
    path = file_of(tmp_path)
    saved = local_file.read_header(path)
    flip(path, saved.ranges["arena.0"][0] + 1000, 3)
    with pytest.raises(CheckpointCorruptError, match=r"have checksum .* was written"):
        load_local(tmp_path, *made)
    with pytest.raises(LaneError):
        made[1].step()


@pytest.mark.parametrize("size", [0, 5, 8, 4000, -4096, -1, 1])
def test_a_file_of_another_length_is_found(tmp_path: Path, size: int) -> None:
    made = job()
    train(made, range(1, 2))
    save_local(tmp_path, *made)
    before, path = dump(made), file_of(tmp_path)
    os.truncate(path, path.stat().st_size + size if size in (-4096, -1, 1) else size)
    with pytest.raises(CheckpointCorruptError):
        load_local(tmp_path, *made)
    assert_same(dump(made), before)


def test_a_file_that_shrinks_while_it_is_read_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job()
    save_local(tmp_path, *made)
    fill = local._fill

    def shrink_first(*args: Any) -> None:
        os.truncate(file_of(tmp_path), file_of(tmp_path).stat().st_size - 4000)
        fill(*args)

    monkeypatch.setattr(local, "_fill", shrink_first)
    with pytest.raises(CheckpointCorruptError, match="it ends at byte"):
        load_local(tmp_path, *made)
    assert failed(made[1])


def test_a_file_of_another_save_is_found(tmp_path: Path) -> None:
    made = job()
    save_local(tmp_path / "a", *made)
    save_local(tmp_path / "b", *made)
    shutil.copy(file_of(tmp_path / "a"), file_of(tmp_path / "b"))
    with pytest.raises(CheckpointCorruptError, match="belongs to save"):
        load_local(tmp_path / "b", *made)


@pytest.mark.parametrize("point", ["block", "rename"])
def test_a_save_that_cannot_write_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    made = job()
    save_local(tmp_path, *made, extra=1)

    def refuse(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if point == "block":
            patch.setattr(os, "pwrite", refuse)
        else:
            patch.setattr(Path, "rename", refuse)
        with pytest.raises(CheckpointError, match="No space left"):
            save_local(tmp_path, *made, extra=2)
    assert len(list(tmp_path.iterdir())) == 1
    assert load_local(tmp_path, *made) == 1
    save_local(tmp_path, *made, extra=3)
    assert load_local(tmp_path, *made) == 3


OLD, NEW = "00000001-aaaaaaaa", "00000002-bbbbbbbb"
BROKEN = CheckpointCorruptError("file", reason="damaged")
UNFIT = CheckpointError("file", reason="another mesh")


@pytest.mark.parametrize(
    ("told", "chosen"),
    [
        ([{OLD: None, NEW: None}, {OLD: None, NEW: None}], NEW),
        ([{OLD: None, NEW: None}, {OLD: None}], OLD),  # folders of two hosts
        ([{OLD: None, NEW: None}, {OLD: None, NEW: BROKEN}], OLD),
        ([{OLD: UNFIT, NEW: None}, {OLD: UNFIT, NEW: None}], NEW),
        ([{OLD: None, NEW: None}, {OLD: None, NEW: UNFIT}], "another mesh"),
        ([{OLD: UNFIT, NEW: BROKEN}, {OLD: None, NEW: None}], "another mesh"),
        ([{OLD: None}, {NEW: None}], f"{NEW}: this rank's file is missing"),
        ([{OLD: BROKEN, NEW: None}, {OLD: None, NEW: BROKEN}], "rank 1: file: damaged"),
        ([{}, {}], "holds no snapshot"),
    ],
)
def test_which_save_is_loaded(told: list[dict[str, OffloadError | None]], chosen: str) -> None:
    if chosen in (OLD, NEW):
        assert local.choose(Path("folder"), told, 0) == chosen
        return
    with pytest.raises(CheckpointError, match=chosen):
        local.choose(Path("folder"), told, 0)


# --------------------------------------------------------------------------- several ranks


def fsdp_job(
    size: int, *, shape: tuple[int, ...] = (), dtype: torch.dtype = torch.float32, lr: float = 0.01
) -> tuple[Toy, HybridDeviceOptimizer]:
    mesh = models.mesh(shape, ("replicate", "shard")) if shape else models.flat_mesh(size)
    model = models.toy(mesh, dtype=dtype)
    inner = torch.optim.AdamW(models.groups(model, lr=lr), fused=True, weight_decay=0.1)
    return model, models.wrap(inner, model, update_on=MIXED)


def fsdp_train(made: Any, steps: range) -> None:
    for step in steps:
        models.backward(made[0], step)
        made[1].step()
        made[1].zero_grad()


def check_equal(found: Any, expected: Any, what: str) -> None:
    models.check_twins(found[1], expected[1], what)
    models.check_same_dicts(
        dict(found[0].named_parameters()), dict(expected[0].named_parameters()), what
    )


def fsdp_resume(size: int, shape: tuple[int, ...], dtype: torch.dtype, path: Path) -> None:
    saving = fsdp_job(size, shape=shape, dtype=dtype)
    fsdp_train(saving, range(1, 3))
    with torch.no_grad():
        saving[0](models.tokens(9))  # leaves the root unsharded
    save_local(path, *saving, extra={"rank": dist.get_rank()})
    resumed = fsdp_job(size, shape=shape, dtype=dtype, lr=0.5)
    fsdp_train(resumed, range(20, 21))
    check(load_local(path, *resumed) == {"rank": dist.get_rank()}, "extra of another rank")
    check_equal(resumed, saving, "loaded")
    for step in range(3, 6):
        for each in (saving, resumed):
            fsdp_train(each, range(step, step + 1))
        check_equal(resumed, saving, f"step {step}")


@pytest.mark.parametrize(
    ("size", "shape", "dtype"),
    [
        (2, (), torch.float32),
        (2, (), torch.bfloat16),
        pytest.param(4, (), torch.float32, marks=pytest.mark.long),
        pytest.param(4, (2, 2), torch.bfloat16, marks=pytest.mark.long),
    ],
)
def test_a_resumed_fsdp_job_equals_an_uninterrupted_one(
    ranks: MakePool, tmp_path: Path, size: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    ranks(size).run(fsdp_resume, size, shape, dtype, tmp_path)


def save_steps(path: Path, size: int, steps: int, shape: tuple[int, ...] = ()) -> None:
    """A save after each step."""
    made = fsdp_job(size, shape=shape)
    for step in range(1, steps + 1):
        fsdp_train(made, range(step, step + 1))
        save_local(path, *made, extra=step)


def try_load(path: Path, size: int, shape: tuple[int, ...] = ()) -> tuple[Any, str, bool]:
    """The extra, or what was raised; and whether the optimizer failed.

    What is loaded must be the state of an uninterrupted job at that step.
    """
    made = fsdp_job(size, shape=shape, lr=0.5)
    try:
        step = load_local(path, *made)
    except OffloadError as error:
        return None, f"{type(error).__name__}: {error}", failed(made[1])
    uninterrupted = fsdp_job(size, shape=shape)
    for each, steps in ((uninterrupted, range(1, step + 2)), (made, range(step + 1, step + 2))):
        fsdp_train(each, steps)
    check_equal(made, uninterrupted, f"saved at step {step}")
    return step, "", failed(made[1])


def test_another_world_size_and_another_mesh_are_refused(ranks: MakePool, tmp_path: Path) -> None:
    ranks(4).run(save_steps, tmp_path, 4, 1)
    for step, error, has_failed in ranks(4).run(try_load, tmp_path, 4, (2, 2)):
        assert step is None
        assert not has_failed
        assert error.startswith("CheckpointError")
        assert "[4] in the snapshot, [2, 2] in this job" in error
    for _, error, has_failed in ranks(2).run(try_load, tmp_path, 2):
        assert not has_failed
        assert error.startswith("CheckpointError")
        assert "world_size: 4 in the snapshot, 2 in this job" in error


def test_a_torn_set_is_never_loaded(ranks: MakePool, tmp_path: Path) -> None:
    """Rank 0 has both saves, rank 1 the old one alone: as if it had been killed in between."""
    ranks(2).run(save_steps, tmp_path, 2, 1)
    old = file_of(tmp_path).parent
    shutil.copytree(old, tmp_path / "kept")
    ranks(2).run(save_steps, tmp_path, 2, 2)
    new = file_of(tmp_path).parent
    shutil.copytree(tmp_path / "kept", old)
    assert ranks(2).run(try_load, tmp_path, 2) == [(2, "", False)] * 2

    (new / "rank_1_of_2.safetensors").rename(tmp_path / "aside")
    assert ranks(2).run(try_load, tmp_path, 2) == [(1, "", False)] * 2, "the one before"

    shutil.rmtree(old)
    for step, error, has_failed in ranks(2).run(try_load, tmp_path, 2):
        assert (step, has_failed) == (None, False)
        assert error.startswith("CheckpointCorruptError")
        assert "rank_1_of_2" in error
        assert "missing" in error
    shutil.copy(tmp_path / "kept" / "rank_1_of_2.safetensors", new)
    for step, error, has_failed in ranks(2).run(try_load, tmp_path, 2):
        assert (step, has_failed) == (None, False)
        assert error.startswith("CheckpointCorruptError")
        assert f"belongs to save {old.name}" in error
    (tmp_path / "aside").rename(new / "rank_1_of_2.safetensors")
    assert ranks(2).run(try_load, tmp_path, 2) == [(2, "", False)] * 2


def test_damage_on_one_rank_is_raised_on_all(ranks: MakePool, tmp_path: Path) -> None:
    ranks(2).run(save_steps, tmp_path, 2, 1)
    path = file_of(tmp_path, 1, 2)
    flip(path, path.stat().st_size - 3000, 0)
    errors = ranks(2).run(try_load, tmp_path, 2)
    for step, error, has_failed in errors:
        assert (step, has_failed) == (None, True)
        assert error.startswith("CheckpointCorruptError")
    assert "rank 1: " in errors[0][1]


def save_where_one_rank_cannot(path: Path) -> tuple[str, Any]:
    made = fsdp_job(2)
    fsdp_train(made, range(1, 2))
    save_local(path, *made, extra=1)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "full")))
        with pytest.raises(CheckpointError) as caught:
            save_local(path, *made, extra=2)
    return str(caught.value), load_local(path, *made)


def test_a_save_that_fails_on_one_rank_fails_on_all(ranks: MakePool, tmp_path: Path) -> None:
    told = ranks(2).run(save_where_one_rank_cannot, tmp_path)
    assert [extra for _, extra in told] == [1, 1]
    assert all("full" in error for error, _ in told)
    assert told[0][0].startswith("rank 1: ")
    assert not told[1][0].startswith("rank"), "its own error as it was"
    assert len(local.save_ids(tmp_path)) == 1


def save_and_die(path: Path, point: str, delay_s: float = 0.0) -> None:
    """Save after step 2; rank 1 kills itself at ``point`` of it."""
    made = fsdp_job(2)
    fsdp_train(made, range(1, 3))
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            die_at(point, patch, delay_s)
        save_local(path, *made, extra=2)
    die()


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(point: str, patch: pytest.MonkeyPatch, delay_s: float) -> None:
    if point == "delay":
        threading.Timer(delay_s, die).start()
        return
    homes: dict[str, tuple[Any, str]] = {
        "prepare": (local, "next_save_id"),
        "block": (blocks, "write_block"),
        "header": (blocks, "write_bytes"),
        "flush": (os, "fsync"),
        "rename": (Path, "rename"),
        "verdict": (local, "_remove"),
        "cleanup": (shutil, "rmtree"),
    }
    home, name = homes[point]
    if point == "header":  # blocks go the same way: the first bytes of the file come last
        write = blocks.write_bytes

        def last(descriptor: int, offset: int, *rest: Any) -> None:
            if offset == 0:
                die()
            write(descriptor, offset, *rest)

        patch.setattr(home, name, last)
    else:
        patch.setattr(home, name, die)


KILLED_AT = {
    "prepare": (1,),
    "block": (1,),
    "header": (1,),
    "flush": (1,),
    "rename": (1,),
    "verdict": (2,),
    "cleanup": (2,),
}


def killed(ranks: MakePool, path: Path, point: str, delay_s: float = 0.0) -> int:
    """The step that is loaded after a kill."""
    with pytest.raises(RankError):
        ranks(2).run(save_and_die, path, point, delay_s)
    told = ranks(2).run(try_load, path, 2)
    assert told[0] == told[1]
    assert told[0][1:] == ("", False)
    ranks(2).run(save_steps, path, 2, 1)
    assert len(local.save_ids(path)) == 1, "what a killed save left goes with the next save"
    return told[0][0]


@pytest.mark.parametrize("point", ["block", "verdict"])
def test_after_a_kill_the_old_or_the_new_save_is_loaded(
    ranks: MakePool, tmp_path: Path, point: str
) -> None:
    ranks(2).run(save_steps, tmp_path, 2, 1)
    assert killed(ranks, tmp_path, point) in KILLED_AT[point]


@pytest.mark.long
@pytest.mark.parametrize("point", sorted(KILLED_AT.keys() - {"block", "verdict"}))
def test_after_a_kill_elsewhere_the_old_or_the_new_save_is_loaded(
    ranks: MakePool, tmp_path: Path, point: str
) -> None:
    ranks(2).run(save_steps, tmp_path, 2, 1)
    assert killed(ranks, tmp_path, point) in KILLED_AT[point]


@pytest.mark.long
def test_after_kills_at_random_times_the_old_or_the_new_save_is_loaded(
    ranks: MakePool, tmp_path: Path
) -> None:
    chance = random.Random(0)
    ranks(2).run(save_steps, tmp_path, 2, 1)
    loaded = [killed(ranks, tmp_path, "delay", chance.uniform(0, 0.03)) for _ in range(12)]
    assert set(loaded) <= {1, 2}
