"""Same bits on meshes of two axes, on two meshes at once, and outside of FSDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import Optimizer

from fsdp_offload import PhaseOffloader
from fsdp_offload.core.fsdp import find_groups
from tests.fsdp import models
from tests.fsdp.models import Ranks, check
from tests.helpers.compare import bits

DIM = 12
LANES = ("streamed", "host", "resident")


def adamw(model: nn.Module) -> Optimizer:
    """For-loop, in every lane alike: torch takes the tensors of one call from one mesh only."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, foreach=False)


def train_twins(
    make: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module, int], Tensor],
    *,
    steps: int = 4,
    **how: Any,
) -> tuple[nn.Module, Optimizer]:
    """Train a plain and a wrapped copy, compare after each step; the wrapped one is returned."""
    torch.manual_seed(0)
    plain_model = make()
    torch.manual_seed(0)
    model = make()
    how = {"update_on": LANES, **how}
    plain, wrapped = adamw(plain_model), models.wrap(adamw(model), model, **how)
    for step in range(1, steps + 1):
        for each in (plain_model, model):
            loss_of(each, step).backward()
        for optimizer in (plain, wrapped):
            optimizer.step()
        models.check_twins(wrapped, plain, f"step {step}")
        if step < steps:  # the last gradients stay, to be looked at
            plain.zero_grad()
            wrapped.zero_grad()
    return model, wrapped


def train_and_leave(
    make: Callable[[], nn.Module], loss_of: Callable[[nn.Module, int], Tensor]
) -> nn.Module:
    """:func:`train_twins` in the streamed lane, of which gradients leave once; then all leaves and
    comes back as it was."""
    how: dict[str, Any] = {"overlap": "step", "offload": "all", "device_memory": 0}
    _, away = train_twins(make, loss_of, steps=2, update_on="device", **how)
    check(away.statistics().host_gradient_bytes > 0, "gradients leave")  # type: ignore[attr-defined]
    away.close()  # type: ignore[attr-defined]
    model, optimizer = train_twins(make, loss_of, steps=3, update_on="device", overlap="backward")
    optimizer.zero_grad()
    before = [models.local(parameter).clone() for parameter in model.parameters()]
    with PhaseOffloader(model, optimizer).away():
        pass
    for index, (parameter, old) in enumerate(zip(model.parameters(), before, strict=True)):
        models.check_same(models.local(parameter), old, f"parameter {index} after a departure")
    return model


def train_hsdp(dtype: torch.dtype) -> list[Tensor]:
    """Bits of all shards and states after 3 steps on a mesh of 2 replicas of 2 shards."""
    on = models.mesh((2, 2), ("replicate", "shard"))
    plain_model, model = (models.toy(on, dtype=dtype) for _ in range(2))
    inner = torch.optim.AdamW(models.groups(model), fused=True)
    wrapped = models.wrap(inner, model, update_on=LANES)
    plain = torch.optim.AdamW(models.groups(plain_model), fused=True)
    for step in range(1, 4):
        models.backward(model, step)
        wrapped.step()
        if dtype == torch.float32:
            models.backward(plain_model, step)
            plain.step()
            models.check_twins(wrapped, plain, f"HSDP, step {step}")
            plain.zero_grad()
        wrapped.zero_grad()
    states = [v for entry in wrapped.state.values() for v in entry.values()]
    found = [bits(t).clone() for t in [*model.parameters(), *states]]
    wrapped.close()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hsdp_replicas_keep_equal_bits(ranks: Ranks, dtype: torch.dtype) -> None:
    results = ranks(4).run(train_hsdp, dtype)

    for rank, replica in ((0, 2), (1, 3)):
        pairs = zip(results[rank], results[replica], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    assert not all(a.equal(b) for a, b in zip(results[0], results[1], strict=True))


# --------------------------------------------------------------------------- FSDP and TP


class Parallel(nn.Module):
    """Tensor-parallel layers inside FSDP, one outside of it, and a plain scale outside of both."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, hidden)
        self.down = nn.Linear(hidden, DIM)
        self.outside = nn.Linear(DIM, 7)
        self.logit_scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.down(torch.tanh(self.up(x)))
        return self.outside(x + inner) * self.logit_scale.exp()


def parallel(hidden: int) -> nn.Module:
    on = models.mesh((2, 2), ("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "outside": ColwiseParallel()}
    model = parallelize_module(Parallel(hidden), on["tp"], plan)
    ignored = {*model.outside.parameters(), model.logit_scale}
    return fully_shard(model, mesh=on["dp"], ignored_params=ignored)


def parallel_loss(model: nn.Module, step: int) -> Tensor:
    """Data differ along ``dp`` and are the same along ``tp``."""
    row = models.mesh((2, 2), ("dp", "tp")).get_local_rank("dp")
    generator = torch.Generator().manual_seed(100 * step + row)
    output = model(torch.randn(4, DIM, generator=generator))
    return (output.full_tensor() if isinstance(output, DTensor) else output).square().mean()


AWAY: dict[str, Any] = {"update_on": "device", "offload": "all", "device_memory": 0}
"""All that FSDP2 gathers leaves."""


def train_parallel(hidden: int, how: dict[str, Any]) -> None:
    model, wrapped = train_twins(lambda: parallel(hidden), parallel_loss, **how)
    away = wrapped.statistics().host_weight_bytes  # type: ignore[attr-defined]
    check((away > 0) == bool(how), f"{away} bytes of weights on the host")
    strided = model.up.weight.placements[0]
    check(isinstance(strided, _StridedShard), f"up.weight is placed {model.up.weight.placements}")
    check(model.outside.weight.device_mesh.ndim == 1, "the outside layer is on another mesh")
    check(not isinstance(model.logit_scale, DTensor), "the scale is a plain tensor")
    state = wrapped.state
    for name in ("exp_avg", "exp_avg_sq"):
        shown = state[model.up.weight][name]
        check(models.placement(shown) == models.placement(model.up.weight), f"{name}: placement")
        check(not isinstance(state[model.logit_scale][name], DTensor), f"{name} of a plain tensor")


@pytest.mark.parametrize("how", [{}, AWAY], ids=["state", "all"])
def test_fsdp_with_tensor_parallel_ignored_and_plain_parameters(
    ranks: Ranks, how: dict[str, Any]
) -> None:
    """Its hidden dimension is cut unevenly."""
    ranks(4).run(train_parallel, 14, how)


# --------------------------------------------------------------------------- experts


class Experts(nn.Module):
    """Experts of this rank's half, sharded over two ranks, beside layers sharded over four."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, 3)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.out = nn.Linear(DIM, 5)

    def forward(self, x: Tensor, unused: int) -> Tensor:
        weights = self.router(x).softmax(-1)
        mixed = [
            expert(x) * weights[:, i, None] for i, expert in enumerate(self.experts) if i != unused
        ]
        return self.out(x + sum(mixed))


def experts() -> nn.Module:
    inner = models.mesh((2, 2), ("expert", "expert_shard"))
    model = Experts()
    with torch.no_grad():  # each half of the ranks has experts of its own
        for parameter in model.experts.parameters():
            parameter.add_(inner.get_local_rank("expert"))
    for expert in model.experts:
        fully_shard(expert, mesh=inner["expert_shard"])
    return fully_shard(model, mesh=models.flat_mesh(4))


def experts_loss(model: nn.Module, step: int) -> Tensor:
    """The two halves leave out different experts, so gradients are None on some ranks only."""
    half = models.mesh((2, 2), ("expert", "expert_shard")).get_local_rank("expert")
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return model(torch.randn(4, DIM, generator=generator), (step + half) % 3).square().mean()


def train_experts(how: dict[str, Any]) -> list[bool]:
    model, _ = train_twins(experts, experts_loss, steps=3, **how)
    meshes = {p.device_mesh.size() for p in model.parameters()}
    check(meshes == {2, 4}, f"meshes of {meshes} ranks")
    return [p.grad is None for p in model.experts.parameters()]


@pytest.mark.parametrize("how", [{}, {**AWAY, "overlap": "backward"}], ids=["state", "all"])
def test_experts_on_another_mesh_of_which_some_are_unused_on_some_ranks(
    ranks: Ranks, how: dict[str, Any]
) -> None:
    results = ranks(4).run(train_experts, how)

    assert results[0] == results[1]
    assert results[0] != results[2], "the halves left out the same experts"


def experts_in_one_call() -> nn.Module:
    """One ``fully_shard`` call, whose parameters lie on two meshes: two groups of one module."""
    inner = models.mesh((2, 2), ("expert", "expert_shard"))["expert_shard"]
    of_experts = _fsdp_common.ShardPlacementResult(
        Shard(0), _fsdp_common.FSDPMeshInfo(inner, shard_mesh_dim=0)
    )
    model = Experts()
    its = set(model.experts.parameters())
    return fully_shard(
        model,
        mesh=models.flat_mesh(4),
        shard_placement_fn=lambda parameter: of_experts if parameter in its else None,
    )


def train_experts_in_one_call() -> None:
    def loss_of(model: nn.Module, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        return model(torch.randn(4, DIM, generator=generator), -1).square().mean()

    model = train_and_leave(experts_in_one_call, loss_of)
    check(len(find_groups([model])) == 2, "not two groups")
    meshes = {p.device_mesh.size() for p in model.parameters()}
    check(meshes == {2, 4}, f"meshes of {meshes} ranks")


@pytest.mark.skipif(
    not hasattr(_fsdp_common, "ShardPlacementResult"), reason="this torch has one mesh per call"
)
def test_two_meshes_in_one_call(ranks: Ranks) -> None:
    ranks(4).run(train_experts_in_one_call)


SPMD: dict[str, dict[str, Any]] = {
    "sharded": {"shard": "outer"},
    "replicated": {"replicate": "outer"},
    "sharded over both": {"shard": ("outer", "inner")},
    "replicated and sharded": {"replicate": "outer", "shard": "inner"},
}


def spmd_mesh() -> Any:
    return models.mesh((2, 2), ("outer", "inner"))


def on_one_mesh(kind: str) -> nn.Module:
    """Parameters are DTensors on the whole mesh before FSDP2 is told which of its axes are its."""
    model = nn.Sequential(nn.Linear(DIM, 8, bias=False), nn.Tanh(), nn.Linear(8, DIM, bias=False))
    for layer, cut in ((model[0], Shard(0)), (model[2], Shard(1))):
        inner = cut if kind == "sharded" else Replicate()
        placed = distribute_tensor(layer.weight.data, spmd_mesh(), [Replicate(), inner])
        layer.weight = nn.Parameter(placed)
    dims = fsdp.DataParallelMeshDims(**SPMD[kind])
    return fully_shard(model, mesh=spmd_mesh(), dp_mesh_dims=dims)


def train_on_one_mesh(kind: str) -> None:
    def loss_of(model: nn.Module, step: int) -> Tensor:
        data = torch.randn(4, DIM, generator=torch.Generator().manual_seed(step))
        given = DTensor.from_local(data, spmd_mesh(), [Replicate(), Replicate()])
        return model(given).square().mean()

    train_and_leave(lambda: on_one_mesh(kind), loss_of)


@pytest.mark.skipif(
    not hasattr(fsdp, "DataParallelMeshDims"), reason="this torch takes the mesh of FSDP2 alone"
)
@pytest.mark.parametrize("kind", list(SPMD))
def test_axes_of_one_mesh(ranks: Ranks, kind: str) -> None:
    ranks(4).run(train_on_one_mesh, kind)


class Normed(nn.Module):
    """A norm under sequence parallelism: its gradient is a partial sum on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.norm(x))


def normed() -> nn.Module:
    on = models.mesh((2,), ("tp",))
    plan = {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1))}
    return parallelize_module(Normed(), on, plan)


def normed_loss(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return model(torch.randn(2, 3, DIM, generator=generator)).square().mean()


def train_normed() -> list[Tensor]:
    model, _ = train_twins(normed, normed_loss)
    placements = model.norm.weight.grad.placements
    check(placements[0].is_partial(), f"the gradient is placed {placements}")
    return [models.local(p).clone() for p in model.norm.parameters()]


def test_partial_gradients_are_summed_as_the_plain_optimizer_does(ranks: Ranks) -> None:
    first, second = ranks(2).run(train_normed)

    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
