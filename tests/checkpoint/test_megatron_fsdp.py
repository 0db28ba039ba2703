"""Megatron-FSDP parameters: same bits, and checkpoints that any other job reads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from fsdp_offload import HybridDeviceOptimizer
from fsdp_offload.checkpoint import megatron_fsdp
from fsdp_offload.core import dtensor
from tests.checkpoint import stand_in
from tests.fsdp import models
from tests.fsdp.models import check
from tests.helpers.ranks import RankPool

Ranks = Callable[..., RankPool]
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


def layout(size: int) -> stand_in.Layout:
    assert size == dist.get_world_size()
    return stand_in.Layout(models.mesh((size,), ("dp",)))


def adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, fused=True)


Job = tuple[dict[str, nn.Parameter], HybridDeviceOptimizer]


def job(size: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Job:
    parameters = layout(size).make(whole(seed, dtype))
    return parameters, models.wrap(adamw(parameters.values()), update_on=LANES)


def local(parameter: Tensor) -> Tensor:
    return models.local(parameter)


def piece(full: Tensor, parameter: nn.Parameter) -> Tensor:
    """This rank's elements of a whole tensor, in the shard's shape; for cuts along ``dp`` only."""
    return full.reshape(-1)[parameter.megatron_fsdp_slice].reshape(local(parameter).shape)


def give_gradients(
    parameters: dict[str, nn.Parameter],
    plain: dict[str, nn.Parameter],
    step: int,
    **options: Any,
) -> None:
    for name, full in whole(100 + step).items():
        gradient = piece(full, parameters[name]).to(options.get("dtype", torch.float32))
        given = options.get("decoupled", False)
        stand_in.set_gradient(parameters[name], gradient.clone(), decoupled=given)
        widened = gradient.to(plain[name].dtype, copy=True)
        plain[name].grad = widened if gradient.numel() else None


def twin(parameters: dict[str, nn.Parameter]) -> tuple[dict[str, nn.Parameter], Optimizer]:
    """The plain optimizer on copies of this rank's shards."""
    plain = {n: nn.Parameter(local(p).clone()) for n, p in parameters.items()}
    return plain, adamw(plain.values())


def check_same(made: Job, plain: dict[str, nn.Parameter], optimizer: Optimizer, what: str) -> None:
    state = made[1].state
    for name, parameter in made[0].items():
        label = f"{what}, {name}"
        models.check_same(local(parameter), plain[name].detach(), label)
        for kind, value in optimizer.state.get(plain[name], {}).items():
            models.check_same(local(state[parameter][kind]), value, f"{label}, {kind}")


# --------------------------------------------------------------------------- same bits


def train(size: int, *, decoupled: bool = False, dtype: torch.dtype = torch.float32) -> set[str]:
    """Six steps beside the plain optimizer; returns what kinds of shards were met."""
    made = job(size)
    parameters, optimizer = made
    plain, reference = twin(parameters)
    for step in range(6):
        give_gradients(parameters, plain, step, decoupled=decoupled, dtype=dtype)
        optimizer.step()
        reference.step()
        check_same(made, plain, reference, f"step {step}")
        optimizer.zero_grad()
        left = [p for p in parameters.values() if getattr(p, "decoupled_grad", None) is not None]
        check(not left, "zero_grad() leaves gradients")
    met = set()
    for name, parameter in parameters.items():
        shard, state = local(parameter), optimizer.state[parameter]
        check(not shard.numel() or reference.state[plain[name]]["step"] == 6, "the twin's step")
        check(state["step"] == 6, f"{name}: step {state['step']} with {shard.numel()} elements")
        for kind in KINDS:
            shown = state[kind]
            check(shown.shape == parameter.shape, f"{name}, {kind}: {shown.shape}")
            check(models.placement(shown) == models.placement(parameter), f"{name}, {kind}: placed")
            check(shown._local_tensor.shape == shard.shape, f"{name}, {kind}: shard")
        even = torch.empty(SHAPES[name], device="meta").chunk(size)
        rank = dist.get_rank()
        if not shard.numel():
            met.add("empty")
        elif shard.shape == parameter.shape:
            met.add("whole")
        elif rank >= len(even) or even[rank].shape != shard.shape:
            met.add("uneven")
    optimizer.close()
    return met


@pytest.mark.parametrize("size", [2, 4])
def test_steps_have_the_bits_of_the_plain_optimizer_on_the_shards(ranks: Ranks, size: int) -> None:
    met = set().union(*ranks(size).run(train, size))

    assert met == {"empty", "whole", "uneven"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoupled_gradients_are_read(ranks: Ranks, dtype: torch.dtype) -> None:
    ranks(2).run(train, 2, decoupled=True, dtype=dtype)


def step_without_gradients() -> None:
    parameters, optimizer = job(2)
    before = {n: local(p).clone() for n, p in parameters.items()}
    optimizer.step()
    for name, parameter in parameters.items():
        check(optimizer.state[parameter]["step"] == 0, f"{name} was counted")
        check(torch.equal(local(parameter), before[name]), f"{name} was touched")


def test_a_step_without_any_gradient_counts_nowhere(ranks: Ranks) -> None:
    ranks(2).run(step_without_gradients)


def take_over() -> None:
    """A plain optimizer that has stepped on the DTensors themselves, then wrapped."""
    parameters = layout(2).make(whole(0))
    plain, reference = twin(parameters)
    inner = torch.optim.AdamW(parameters.values(), lr=0.01, weight_decay=0.1, fused=True)
    for step in range(4):
        if step == 2:
            inner = models.wrap(inner, update_on=LANES)
        give_gradients(parameters, plain, step)
        inner.step()
        reference.step()
    check_same((parameters, inner), plain, reference, "taken over")


def test_a_stepped_optimizer_is_taken_over(ranks: Ranks) -> None:
    ranks(2).run(take_over)


# --------------------------------------------------------------------------- checkpoints


def entries(made: Job) -> dict[str, Any]:
    """What a job gives to DCP: weights with their boxes, and the live state."""
    saved = {}
    for name, parameter in made[0].items():
        saved[name] = dtensor.like(parameter, local(parameter))
        saved |= {f"{name}.{kind}": v for kind, v in made[1].state[parameter].items()}
    return saved


def told(made: Job) -> dict[str, tuple[int, Tensor]]:
    """By entry, where this rank's elements start in the flat tensor, and the elements."""
    found = {}
    for name, parameter in made[0].items():
        start = parameter.megatron_fsdp_slice.start
        found[name] = (start, local(parameter).reshape(-1).clone())
        for kind, value in made[1].state[parameter].items():
            flat = local(value).reshape(-1).clone()
            is_bits = kind == "master_remainder"  # many are no numbers
            found[f"{name}.{kind}"] = (start, flat.view(torch.int16) if is_bits else flat)
    return found


def joined(results: list[dict[str, tuple[int, Tensor]]]) -> dict[str, Tensor]:
    """Whole flat tensors from what the ranks told, by their slices alone."""
    found = {}
    for entry in results[0]:
        shape = SHAPES[entry.split(".")[0]]
        if entry.endswith("step"):
            assert len({float(r[entry][1]) for r in results}) == 1, entry
            found[entry] = results[0][entry][1]
            continue
        full = torch.full((torch.Size(shape).numel(),), torch.nan)
        for result in results:
            start, values = result[entry]
            full[start : start + values.numel()] = values.float()
        assert not full.isnan().any(), entry
        found[entry] = full
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for entry, value in expected.items():
        assert torch.equal(found[entry].float().reshape(-1), value.float().reshape(-1)), entry


def save(size: int, path: Path, way: str, dtype: torch.dtype) -> dict[str, tuple[int, Tensor]]:
    made = job(size, dtype=dtype)
    plain, _ = twin(made[0])
    for step in range(3):
        give_gradients(made[0], plain, step, dtype=dtype)
        made[1].step()
    saved = entries(made)
    expected = told(made)
    refuse = mock.Mock(side_effect=AssertionError("a collective"))
    with (
        mock.patch.object(dist, "all_gather_object", refuse),
        mock.patch.object(dist, "all_gather", refuse),
        mock.patch.object(dist, "all_reduce", refuse),
    ):
        for entry, value in entries(made).items():
            _create_write_items(entry, value)
    if way == "async":
        for name, parameter in made[
            0
        ].items():  # torch cannot stage a DTensor over part of a buffer
            saved[name] = dtensor.like(parameter, local(parameter).clone())
        future = dcp.async_save(saved, checkpoint_id=path)
        with torch.no_grad():  # staging has copied what is written here
            for value in saved.values():
                local(value).zero_()
        future.result()
    else:
        dcp.save(saved, checkpoint_id=path)
    return expected


def load(size: int, path: Path, dtype: torch.dtype) -> dict[str, tuple[int, Tensor]]:
    """Into a job with other cuts, which then goes on as the plain optimizer does."""
    made = job(size, seed=1, dtype=dtype)
    state = entries(made)
    dcp.load(state, checkpoint_id=path)
    found = told(made)
    if dtype != torch.float32:
        return found
    plain, reference = twin(made[0])
    for name, parameter in plain.items():
        if parameter.numel():  # the plain optimizer keeps nothing of the others
            entry = made[1].state[made[0][name]]
            reference.state[parameter] = {k: local(v).clone() for k, v in entry.items()}
    for step in range(3, 5):
        give_gradients(made[0], plain, step)
        made[1].step()
        reference.step()
        check_same(made, plain, reference, f"after the load, step {step}")
    return found


def load_plain(path: Path, keys: list[str]) -> dict[str, Tensor]:
    """Into DTensors as FSDP2 makes them."""
    world = dist.get_world_size()
    mesh = models.mesh((world,), ("shard",))
    state: dict[str, Any] = {}
    for key in keys:
        shape = () if key.endswith("step") else SHAPES[key.split(".")[0]]
        zeros = torch.zeros(shape)
        state[key] = zeros if shape == () else distribute_tensor(zeros, mesh, [Shard(0)])
    dcp.load(state, checkpoint_id=path)
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
def test_a_checkpoint_loads_into_other_cuts_and_into_fsdp2(
    ranks: Ranks, tmp_path: Path, before: int, after: int
) -> None:
    expected = joined(ranks(before).run(save, before, tmp_path, "sync", torch.float32))
    assert {float(v) for k, v in expected.items() if k.endswith("step")} == {3.0}
    assert_same(joined(ranks(after).run(load, after, tmp_path, torch.float32)), expected)
    for found in ranks(after).run(load_plain, tmp_path, list(expected)):
        assert_same(found, expected)


def test_an_asynchronous_checkpoint_keeps_what_was_there(ranks: Ranks, tmp_path: Path) -> None:
    expected = joined(ranks(2).run(save, 2, tmp_path, "async", torch.float32))
    for found in ranks(2).run(load_plain, tmp_path, list(expected)):
        assert_same(found, expected)


def masters(size: int, path: Path) -> dict[str, tuple[int, Tensor]]:
    return load(size, path, torch.bfloat16)


def test_masters_of_bf16_shards_come_along(ranks: Ranks, tmp_path: Path) -> None:
    expected = joined(ranks(4).run(save, 4, tmp_path, "sync", torch.bfloat16))
    assert any(entry.endswith("master_remainder") for entry in expected)
    assert any(entry.endswith("master") for entry in expected)
    assert_same(joined(ranks(2).run(masters, 2, tmp_path)), expected)


# --------------------------------------------------------------------------- other mesh axes


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


def load_numbers(path: Path) -> dict[str, Tensor]:
    mesh = models.mesh((4,), ("shard",))
    shaped = numbered()
    state = {
        n: distribute_tensor(torch.zeros(v.shape), mesh, [Shard(0)]) for n, v in shaped.items()
    }
    dcp.load(state, checkpoint_id=path)
    return {name: value.full_tensor() for name, value in state.items()}


@pytest.mark.parametrize("kind", ["hsdp", "tp rows", "tp columns"])
def test_replicas_and_tensor_parallel_blocks_are_saved_where_they_belong(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    counts = ranks(4).run(save_numbers, kind, tmp_path)
    assert sum(counts) == sum(v.numel() for v in numbered().values())
    assert (counts[2:] == [0, 0]) == (kind == "hsdp")
    for found in ranks(4).run(load_numbers, tmp_path):
        assert_same(found, numbered())


# --------------------------------------------------------------------------- the real package

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
    found = load_like(state, path)
    for parameter, name in names.items():
        check(float(found[f"{name}.step"]) == 4, f"{name}: {found[f'{name}.step']}")
        for kind in KINDS:
            mine = local(wrapped.state[parameter][kind])
            same = torch.equal(piece(found[f"{name}.{kind}"], parameter), mine.cpu())
            check(same, f"{name}.{kind} after the load")


def load_like(state: dict[str, Any], path: Path) -> dict[str, Tensor]:
    """The checkpoint in DTensors cut as FSDP2 cuts, then whole; all on the CPU."""
    on = init_device_mesh("cpu", (dist.get_world_size(),))
    target = {
        k: distribute_tensor(torch.zeros(v.shape, dtype=v.dtype), on, [Shard(0)])
        if isinstance(v, DTensor)
        else torch.zeros_like(v, device="cpu")
        for k, v in state.items()
    }
    dcp.load(target, checkpoint_id=path)
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in target.items()}


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
    found = load_like(state, path)
    for name, value in full.items():
        check(torch.equal(found[name], value), name)


@NEEDS_PACKAGE
def test_the_newer_buffers_of_megatron_fsdp(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4).run(save_from_new_buffers, tmp_path)
