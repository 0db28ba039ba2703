"""Megatron-FSDP parameters: same bits, and checkpoints that any other job reads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from fsdp_offload import HybridDeviceOptimizer, checkpoint
from fsdp_offload.checkpoint import megatron_fsdp
from fsdp_offload.core import dtensor
from fsdp_offload.update import codec
from tests.checkpoint import stand_in
from tests.checkpoint.jobs import Ranks
from tests.fsdp import models
from tests.fsdp.models import check, local
from tests.helpers.compare import assert_same

LANES = ("streamed", "host", "resident")
KINDS = ("exp_avg", "exp_avg_sq")
SHAPES = {
    "embed": (23, 12),
    "gain": (6,),  # whole on one rank
    "up": (70, 12),
    "cube": (5, 2, 6),
    "bias": (1,),
    "down": (11, 6),
}


def whole(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The same tensors on every rank and at every world size."""
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in SHAPES.items()}


def adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, fused=True)


Job = tuple[dict[str, nn.Parameter], HybridDeviceOptimizer]


def job(*, seed: int = 0, dtype: torch.dtype = torch.float32) -> Job:
    layout = stand_in.Layout(models.mesh((dist.get_world_size(),), ("dp",)))
    parameters = layout.make(whole(seed, dtype))
    return parameters, models.wrap(adamw(parameters.values()), update_on=LANES)


def piece(full: Tensor, parameter: nn.Parameter) -> Tensor:
    """This rank's elements of a whole tensor, in the shard's shape; for cuts along ``dp`` only."""
    return full.reshape(-1)[parameter.megatron_fsdp_slice].reshape(local(parameter).shape)


def gradient(step: int, name: str, dtype: torch.dtype) -> Tensor:
    return whole(100 + step)[name].to(dtype)


def twin(made: Job, gradients: torch.dtype) -> Callable[[int], dict[str, Tensor]]:
    """Steps of the plain optimizer on copies of this rank's shards and state: each returns all."""
    parameters, state = made[0], made[1].state
    shards = {n: nn.Parameter(local(p).clone()) for n, p in parameters.items() if local(p).numel()}
    optimizer = adamw(shards.values())
    for name, shard in shards.items():
        values = {kind: local(v).clone() for kind, v in state[parameters[name]].items()}
        if values["step"]:
            optimizer.state[shard] = values

    def step(number: int) -> dict[str, Tensor]:
        for name, shard in shards.items():
            shard.grad = piece(gradient(number, name, gradients), parameters[name]).to(shard.dtype)
        optimizer.step()
        found = {f"{n}.{k}": v for n, w in shards.items() for k, v in optimizer.state[w].items()}
        return {n: w.detach() for n, w in shards.items()} | found

    return step


def known() -> dict[str, Tensor]:
    """Whole masters and state: what is saved."""
    found = whole(50)
    for seed, kind in enumerate(KINDS, 51):
        found |= {f"{name}.{kind}": value.abs() for name, value in whole(seed).items()}
    return found | {f"{name}.step": torch.tensor(3.0) for name in SHAPES}


@torch.no_grad()
def set_known(made: Job) -> None:
    expected = known()
    for name, parameter in made[0].items():
        state, shard = made[1].state[parameter], local(parameter)
        master = piece(expected[name], parameter)
        remainder = torch.empty(shard.numel(), dtype=torch.bfloat16)
        if shard.dtype == torch.bfloat16:
            codec.encode(master.reshape(-1).clone(), shard.view(-1), remainder)
        else:
            shard.copy_(master)
        if "master" in state:
            local(state["master"]).copy_(master)
        elif "master_remainder" in state:
            local(state["master_remainder"]).view(-1).copy_(remainder)
        for kind in KINDS:
            local(state[kind]).copy_(piece(expected[f"{name}.{kind}"], parameter))
        state["step"].fill_(3)


def step_once(made: Job, step: int, *, dtype: torch.dtype, decoupled: bool = False) -> None:
    for name, parameter in made[0].items():
        mine = piece(gradient(step, name, dtype), parameter).clone()
        stand_in.set_gradient(parameter, mine, decoupled=decoupled)
    made[1].step()
    made[1].zero_grad()


def check_is(made: Job, expected: dict[str, Tensor], what: str) -> None:
    """``expected``: whole tensors, or this rank's pieces of those that it has elements of."""
    for name, parameter in made[0].items():
        state, shard = made[1].state[parameter], local(parameter)
        master = shard
        if "master" in state:
            master = local(state["master"])
        elif "master_remainder" in state:
            master = torch.empty(shard.numel())
            codec.decode(shard.reshape(-1), local(state["master_remainder"]).reshape(-1), master)
        found = {name: master, **{f"{name}.{kind}": local(state[kind]) for kind in KINDS}}
        for key, value in found.items():
            mine = expected.get(key, value)
            mine = mine if mine.numel() == shard.numel() else piece(mine, parameter)
            models.check_same(value.reshape(-1), mine.reshape(-1), f"{what}, {key}")
        check(torch.equal(shard, master.view(shard.shape).to(shard.dtype)), f"{what}, {name}")
        for kind in KINDS:
            shown = state[kind]
            check(shown.shape == parameter.shape, f"{name}, {kind}: {shown.shape}")
            check(models.placement(shown) == models.placement(parameter), f"{name}, {kind}: placed")


def train(decoupled: bool, dtype: torch.dtype) -> set[str]:
    """Six steps beside the plain optimizer; returns what kinds of shards were met."""
    made = job()
    plain = twin(made, dtype)
    for step in range(6):
        step_once(made, step, decoupled=decoupled, dtype=dtype)
        check_is(made, plain(step), f"step {step}")
        left = [p for p in made[0].values() if getattr(p, "decoupled_grad", None) is not None]
        check(not left, "zero_grad() leaves gradients")
    met = set()
    for name, parameter in made[0].items():
        numel, full = local(parameter).numel(), torch.Size(SHAPES[name])
        even = -(-full[0] // dist.get_world_size()) * full[1:].numel()
        kinds = {0: "empty", full.numel(): "whole", even: "even"}
        met.add(kinds.get(numel, "uneven"))
        check(made[1].state[parameter]["step"] == 6, f"{name}: step with {numel} elements")
    return met


@pytest.mark.parametrize(
    ("size", "decoupled", "dtype"),
    [
        (2, False, torch.float32),
        (2, True, torch.float32),
        (2, True, torch.bfloat16),
        pytest.param(4, False, torch.float32, marks=pytest.mark.long),
    ],
)
def test_steps_have_the_bits_of_the_plain_optimizer(
    ranks: Ranks, size: int, decoupled: bool, dtype: torch.dtype
) -> None:
    met = set().union(*ranks(size).run(train, decoupled, dtype))

    assert met >= {"empty", "whole", "uneven"}


def entries(made: Job) -> dict[str, Any]:
    """What a job gives to DCP: weights with their chunks, and the live state."""
    saved = {}
    for name, parameter in made[0].items():
        saved[name] = dtensor.like(parameter, local(parameter))
        saved |= {f"{name}.{kind}": v for kind, v in made[1].state[parameter].items()}
    return saved


def save(path: Path, dtype: torch.dtype) -> None:
    made = job(dtype=dtype)
    set_known(made)
    saved = entries(made)
    refuse = mock.Mock(side_effect=AssertionError("a collective"))
    with (
        mock.patch.object(dist, "all_gather_object", refuse),
        mock.patch.object(dist, "all_gather", refuse),
        mock.patch.object(dist, "all_reduce", refuse),
    ):
        for entry, value in saved.items():
            _create_write_items(entry, value)
    dcp.save(saved, checkpoint_id=path)


def load(path: Path, dtype: torch.dtype) -> None:
    """Into a job with other cuts, which then goes on as the plain optimizer does."""
    made = job(seed=1, dtype=dtype)
    state = entries(made)
    dcp.load(state, checkpoint_id=path)
    check_is(made, known(), "loaded")
    check(all(made[1].state[p]["step"] == 3 for p in made[0].values()), "steps")
    if dtype == torch.float32:
        plain = twin(made, dtype)
        step_once(made, 3, dtype=dtype)
        check_is(made, plain(3), "after the load")


def load_in_fsdp2(like: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Into DTensors cut as FSDP2 cuts, on the CPU; whole tensors."""
    on = init_device_mesh("cpu", (dist.get_world_size(),))
    target = {
        key: distribute_tensor(torch.zeros(value.shape, dtype=value.dtype), on, [Shard(0)])
        if value.dim()
        else torch.zeros_like(value, device="cpu")
        for key, value in like.items()
    }
    dcp.load(target, checkpoint_id=path)
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in target.items()}


@pytest.mark.parametrize(
    ("before", "after", "dtype"),
    [
        (2, 2, torch.float32),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [(4, 2, torch.float32), (2, 4, torch.float32), (4, 2, torch.bfloat16)]
        ),
    ],
)
def test_a_checkpoint_loads_into_other_cuts_and_into_fsdp2(
    ranks: Ranks, tmp_path: Path, before: int, after: int, dtype: torch.dtype
) -> None:
    ranks(before).run(save, tmp_path, dtype)
    ranks(after).run(load, tmp_path, dtype)
    if dtype == torch.float32:
        for found in ranks(after).run(load_in_fsdp2, known(), tmp_path):
            assert_same(found, known())


def export(folder: Path) -> None:
    parameters, optimizer = job(dtype=torch.bfloat16)
    checkpoint.export_safetensors(
        nn.ParameterDict(parameters), folder, optimizer=optimizer, dtype="fp32"
    )


def test_weights_are_exported_from_where_they_lie(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(export, tmp_path)

    found = load_file(tmp_path / "model.safetensors")
    expected = {name: value.float() for name, value in whole(0, torch.bfloat16).items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


EVEN = {"embed": (22, 12), "up": (70, 12), "cube": (6, 2, 6), "row": (2, 4)}


def numbered() -> dict[str, Tensor]:
    """Every element of every tensor is another number."""
    numels = [torch.Size(shape).numel() for shape in EVEN.values()]
    pieces = torch.arange(1.0, sum(numels) + 1).split(numels)
    return {name: piece.view(EVEN[name]) for name, piece in zip(EVEN, pieces, strict=True)}


def save_numbers(kind: str, path: Path) -> int:
    """State whose values are positions; returns how many bytes of it this rank writes."""
    made = {
        "hsdp": lambda: stand_in.Layout(models.mesh((2, 2), ("outer", "dp")), outer=True),
        "tp rows": lambda: stand_in.Layout(models.mesh((2, 2), ("dp", "tp")), tp_dim=0),
        "tp columns": lambda: stand_in.Layout(models.mesh((2, 2), ("dp", "tp")), tp_dim=1),
    }[kind]()
    parameters = made.make(numbered())
    optimizer = models.wrap(adamw(parameters.values()), update_on="host")
    saved = {}
    for name, parameter in parameters.items():
        state = optimizer.state[parameter]["exp_avg"]
        local(state).copy_(local(parameter))
        saved[name] = state
    dcp.save(saved, checkpoint_id=path)
    return sum(
        item.tensor_data.chunk.sizes.numel()
        for name, value in saved.items()
        for item in _create_write_items(name, value)
    )


@pytest.mark.parametrize("kind", ["hsdp", "tp rows", "tp columns"])
def test_replicas_and_tensor_parallel_blocks_are_saved_where_they_belong(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    counts = ranks(4).run(save_numbers, kind, tmp_path)
    assert sum(counts) == sum(v.numel() for v in numbered().values())
    assert (counts[2:] == [0, 0]) == (kind == "hsdp")
    for found in ranks(4).run(load_in_fsdp2, numbered(), tmp_path):
        assert_same(found, numbered())


NEEDS_PACKAGE = pytest.mark.skipif(
    find_spec("megatron_fsdp") is None,
    reason="Megatron-FSDP is optional here: pip install megatron-fsdp (and einops)",
)


class Nothing:
    """Stands for a CUDA stream or event, all of whose methods do nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Nothing]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: Nothing()


@contextlib.contextmanager
def without_cuda() -> Iterator[None]:
    """Lets Megatron-FSDP run on CPU tensors: it makes streams and asks for the current device."""
    cuda = {
        "Stream": Nothing,
        "Event": Nothing,
        "stream": lambda _: contextlib.nullcontext(),
        "current_stream": Nothing,
        "current_device": lambda: 0,
        "synchronize": Nothing,
        "empty_cache": Nothing,
    }
    with (
        mock.patch.multiple(torch.cuda, **cuda),
        mock.patch.object(Tensor, "cuda", lambda self: self),
        mock.patch.object(Tensor, "record_stream"),
    ):
        yield


class Residual(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(12, hidden)
        self.down = nn.Linear(hidden, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def megatron_model(device: str, strategy: int) -> nn.Module:
    """Two units; their parameters are Megatron-FSDP's own."""
    from megatron_fsdp import fully_shard_model

    torch.manual_seed(0)
    axes = init_device_mesh(device, (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
    model = fully_shard_model(
        nn.Sequential(Residual(23), Residual(7)).to(device),
        device_mesh=axes,
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[Residual],
        zero_dp_strategy=strategy,
        device=torch.device(device, dist.get_rank()) if device == "cuda" else torch.device(device),
        calculate_per_token_loss=True,  # sums gradients: gloo cannot scale them on the way
        preproc_state_dict_for_dcp_ckpt=False,  # chunk metadata need no collective here
    )
    model._replace_param_with_distributed_if_needed()
    megatron_fsdp.describe(model)
    return model


def train_megatron(device: str, strategy: int, path: Path) -> None:
    """Train beside the plain optimizer on the shards, save, and load into FSDP2's DTensors."""
    from megatron_fsdp import fully_shard_optimizer

    model = megatron_model(device, strategy)
    names = {parameter: name for name, parameter in model.named_parameters()}
    wrapped = models.wrap(adamw(names), model, update_on="device")
    plain = {p: nn.Parameter(local(p).clone()) for p in names}
    reference = adamw(plain.values())
    fully_shard_optimizer(wrapped, preproc_state_dict_for_dcp_ckpt=False)
    for parameter in plain.values():  # it runs a step with gradients of zeros
        parameter.grad = torch.zeros_like(parameter) if parameter.numel() else None
    reference.step()
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        model(torch.randn(4, 12, device=device)).square().mean().backward()
        for parameter, copied in plain.items():
            gradient = parameter.grad
            check((gradient is None) == (local(parameter).numel() == 0), "gradients of all others")
            copied.grad = None if gradient is None else local(gradient).clone()
        wrapped.step()
        reference.step()
        for parameter, copied in plain.items():
            label = f"step {step}, {names[parameter]}"
            models.check_same(local(parameter), copied.detach(), label)
            for kind, value in reference.state.get(copied, {}).items():
                models.check_same(
                    local(wrapped.state[parameter][kind]).to(value.device), value, kind
                )
        wrapped.zero_grad()
    state = {f"{names[p]}.{k}": v for p, held in wrapped.state.items() for k, v in held.items()}
    dcp.save(state, checkpoint_id=path)
    found = load_in_fsdp2(state, path)
    for parameter, name in names.items():
        check(float(found[f"{name}.step"]) == 4, f"{name}: {found[f'{name}.step']}")
        for kind in KINDS:
            mine = local(wrapped.state[parameter][kind])
            same = torch.equal(piece(found[f"{name}.{kind}"], parameter), mine.cpu())
            check(same, f"{name}.{kind} after the load")


def train_megatron_on_cpu(strategy: int, path: Path) -> None:
    with without_cuda():
        train_megatron("cpu", strategy, path)


@NEEDS_PACKAGE
@pytest.mark.parametrize("strategy", [3, 1])
def test_megatron_fsdp_itself_on_cpu(ranks: Ranks, tmp_path: Path, strategy: int) -> None:
    ranks(2).run(train_megatron_on_cpu, strategy, tmp_path)


@NEEDS_PACKAGE
@pytest.mark.gpus(2)
@pytest.mark.parametrize("strategy", [3, 1])
def test_megatron_fsdp_itself_on_gpus(ranks: Ranks, tmp_path: Path, strategy: int) -> None:
    ranks(2, device_type="cuda").run(train_megatron, "cuda", strategy, tmp_path)


def save_from_new_buffers(path: Path) -> None:
    """The experimental form, whose parameters know their buffer instead of a slice."""
    from megatron_fsdp.experimental.parameter_group import FsdpParameterGroup
    from megatron_fsdp.experimental.placement import Flat, Placements
    from megatron_fsdp.mixed_precision import MixedPrecisionPolicy

    torch.manual_seed(0)
    model = Residual(23)
    full = {name: p.detach().clone() for name, p in model.named_parameters()}
    flat = [Flat()]
    FsdpParameterGroup(
        model,
        dict(model.named_parameters()),
        models.mesh((dist.get_world_size(),), ("dp",)),
        Placements(dp_axes=["dp"], parameter=flat, gradient=flat, optimizer=flat),
        MixedPrecisionPolicy(),
    )
    megatron_fsdp.describe(model)
    wrapped = models.wrap(adamw(model.parameters()), model, update_on="host")
    state = {}
    for name, parameter in model.named_parameters():
        state[name] = wrapped.state[parameter]["exp_avg"]
        local(state[name]).copy_(local(parameter))
    dcp.save(state, checkpoint_id=path)
    found = load_in_fsdp2(state, path)
    for name, value in full.items():
        check(torch.equal(found[name], value), name)


@NEEDS_PACKAGE
def test_the_newer_buffers_of_megatron_fsdp(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4).run(save_from_new_buffers, tmp_path)
