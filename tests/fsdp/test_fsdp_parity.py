"""Masters of bf16 shards and whole matrices on FSDP2 models: the plain optimizer's bits.

Shards are uneven (7 rows, one element) and some ranks hold none (3 rows on 4 ranks). One block is
unused at steps 1 and 5, so that its parameters get their first gradient late. Other classes, flags
and fp32 shards: ``tests/fuzz`` on 2 and 3 ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from fsdp_offload import HybridDeviceOptimizer
from tests.fsdp import models
from tests.fsdp.models import Ranks
from tests.helpers.compare import master_of, rounded

VARIANTS: dict[str, dict[str, Any]] = {
    "resident": {"offload_fraction": 0.0},
    "half": {"offload_fraction": 0.5},
    "streamed": {"offload_fraction": 1.0, "update_on": "device"},
    "host": {"offload_fraction": 1.0, "update_on": "host"},
    "mixed": {"update_on": ("host", "resident", "streamed", "host", "streamed")},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "AdamW": {"weight_decay": 0.1},
    "AdamW fused": {"weight_decay": 0.1, "fused": True},
    "SGD dampening": {"momentum": 0.9, "dampening": 0.3, "foreach": False},
    "Muon": {"weight_decay": 0.1},
}


def build(name: str, model: nn.Module) -> Optimizer:
    class_name = name.split()[0]
    groups = models.groups(model, matrices_only=class_name == "Muon")
    return getattr(torch.optim, class_name)(groups, **SETTINGS[name])


# --------------------------------------------------------------------------- bf16 shards


def check_masters(wrapped: HybridDeviceOptimizer, twin: Optimizer, what: str) -> None:
    state = wrapped.state
    pairs = zip(models.parameters_of(wrapped), models.parameters_of(twin), strict=True)
    for index, (parameter, expected) in enumerate(pairs):
        label, shard = f"{what}, parameter {index}", models.local(parameter)
        if not parameter.requires_grad:
            models.check_same(shard, expected.detach().bfloat16(), label)
            continue
        found = master_of(shard, {n: models.local(v) for n, v in state[parameter].items()})
        models.check_same(found, expected.detach(), f"{label}, master", placed=False)
        models.check_same(shard, rounded(models.local(expected), shard.dtype), f"{label}, shard")
        for name, value in twin.state.get(expected, {}).items():
            models.check_same(state[parameter][name], value, f"{label}, {name}", placed=False)


def train_bf16(size: int, name: str, variants: list[str], steps: int) -> None:
    mesh = models.flat_mesh(size)
    for variant in variants:
        model = models.toy(mesh, dtype=torch.bfloat16)
        inner = build(name, model)
        twin = models.on_shards(inner, torch.float32)
        if name == "Muon":  # needs whole matrices: fp32 copies of the same weights, sharded too
            twin = build(name, models.toy(mesh, dtype=torch.bfloat16, then=torch.float32))
        wrapped = models.wrap(inner, model, **VARIANTS[variant])
        for step in range(1, steps + 1):
            models.backward(model, step)
            models.copy_gradients(wrapped, twin)
            models.change_lr([wrapped, twin], step)
            wrapped.step()
            twin.step()
            check_masters(wrapped, twin, f"{name}, {variant}, step {step}")
            wrapped.zero_grad()
        wrapped.close()


@pytest.mark.parametrize(
    ("size", "name", "variants", "steps"),
    [
        (1, "AdamW fused", ["mixed"], 4),
        (2, "AdamW", ["resident", "streamed"], 4),
        pytest.param(2, "AdamW fused", ["host", "mixed"], 10, marks=pytest.mark.long),
        (2, "SGD dampening", ["half", "host"], 4),
        (2, "Muon", ["half"], 2),
        pytest.param(4, "AdamW fused", ["mixed"], 4, marks=pytest.mark.long),
    ],
)
def test_bf16_masters_follow_the_optimizer_on_fp32_copies(
    ranks: Ranks, size: int, name: str, variants: list[str], steps: int
) -> None:
    ranks(max(size, 2)).run(train_bf16, size, name, variants, steps)


# --------------------------------------------------------------------------- the same on all ranks


class Matrices(nn.Module):
    """Four matrices of 7 and 6 rows: on 4 ranks the last one's shards are half as large."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(200, rows, bias=False) for rows in (7, 6, 7, 6))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in self.layers]


def muon_over_two_groups() -> None:
    """Buckets hold one matrix each on ranks 0 to 2, and two, of different groups, on rank 3."""
    twins: list[Optimizer] = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Matrices()
        fully_shard(model, mesh=models.flat_mesh(4))
        given = list(model.parameters())
        twins.append(torch.optim.Muon([{"params": given[1::2]}, {"params": given[::2]}]))
    plain, wrapped = twins[0], models.wrap(twins[1], model)
    for step in range(3):
        for index, parameter in enumerate(models.parameters_of(plain)):
            late = step == 0 and index == 2  # never updated before, beside one that was
            parameter.grad = None if late else torch.zeros_like(parameter)
            if not late:
                models.local(parameter.grad).normal_()
        models.copy_gradients(plain, wrapped)
        for optimizer in (plain, wrapped):
            optimizer.step()
        models.check_twins(wrapped, plain, f"Muon, step {step}")


def test_whole_matrices_communicate_in_one_order_however_ranks_cut_buckets(ranks: Ranks) -> None:
    ranks(4).run(muon_over_two_groups)


def lanes(options: dict[str, Any]) -> tuple[list[Any], list[int]]:
    """(name, lane, master form, kinds) in update order; elements of each shard."""
    model = models.toy(models.flat_mesh(4), dtype=torch.bfloat16)
    wrapped = models.wrap(build("AdamW", model), model, **options)
    records = wrapped._updates.reserved.params
    described = [(r.fqn, r.lane, r.form.value, [k.name for k, _ in r.kinds]) for r in records]
    shards = [r.info.local_numel for r in records]
    wrapped.close()
    return described, shards


@pytest.mark.parametrize(
    "options",
    [
        {"offload_fraction": 0.4, "update_on": "host"},
        {"offload_fraction": 0.7},
    ],
)
def test_all_ranks_choose_the_same_lanes_in_the_same_order(
    ranks: Ranks, options: dict[str, Any]
) -> None:
    results = ranks(4).run(lanes, options)

    assert all(described == results[0][0] for described, _ in results)
    assert len({tuple(shards) for _, shards in results}) > 1, "the ranks held equal shards"
    assert any(0 in shards for _, shards in results), "no rank held an empty shard"
    chosen = {lane for _, lane, _, _ in results[0][0]}
    assert len(chosen) == 2
