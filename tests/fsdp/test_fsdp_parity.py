"""Same bits as the plain optimizer on FSDP2 models, on 1, 2 and 4 ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from fsdp_offload.testing import RankPool
from tests.fsdp import models
from tests.fsdp.models import check

Ranks = Callable[..., RankPool]
WORLDS = (1, 2, 4)

# --------------------------------------------------------------------------- every optimizer

DEVICE = {
    "resident": {"offload_fraction": 0.0},
    "quarter": {"offload_fraction": 0.25},
    "half": {"offload_fraction": 0.5},
    "streamed": {"offload_fraction": 1.0, "update_on": "device"},
}
HOST = {
    "half on host": {"offload_fraction": 0.5, "update_on": "host"},
    "host": {"offload_fraction": 1.0, "update_on": "host"},
    "mixed": {"update_on": ("host", "resident", "streamed", "host", "streamed")},
}
LEFT_OPEN = ("AdamW", "Adam", "SGD", "Adagrad")  # the host lane takes the fused CPU kernel here
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("AdamW", {"weight_decay": 0.1}),
    "AdamW fused": ("AdamW", {"weight_decay": 0.1, "fused": True}),
    "AdamW for-loop": ("AdamW", {"weight_decay": 0.1, "foreach": False, "fused": False}),
    "AdamW foreach": ("AdamW", {"weight_decay": 0.1, "foreach": True}),
    "Adam amsgrad": ("Adam", {"amsgrad": True}),
    "Adam amsgrad fused": ("Adam", {"amsgrad": True, "fused": True, "maximize": True}),
    "SGD": ("SGD", {"weight_decay": 0.1}),
    "SGD dampening": ("SGD", {"momentum": 0.9, "dampening": 0.3, "foreach": False}),
    "SGD Nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}),
    "SGD fused": ("SGD", {"momentum": 0.9, "dampening": 0.3, "fused": True}),
    "Adagrad": ("Adagrad", {"lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    "Adagrad fused": ("Adagrad", {"fused": True}),
    "RMSprop": ("RMSprop", {"centered": True, "momentum": 0.5}),
    "NAdam": ("NAdam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": ("RAdam", {"weight_decay": 0.1}),
    "Adamax": ("Adamax", {}),
    "Adadelta": ("Adadelta", {}),
    "ASGD": ("ASGD", {"t0": 3.0}),
    "Rprop": ("Rprop", {}),
    "Adafactor": ("Adafactor", {}),
    "Muon": ("Muon", {"weight_decay": 0.1}),
}


def build(name: str, model: torch.nn.Module) -> Optimizer:
    class_name, options = SETTINGS[name]
    groups = models.groups(model, matrices_only=class_name == "Muon")
    return getattr(torch.optim, class_name)(groups, **options)


def variants_of(name: str) -> dict[str, dict[str, Any]]:
    """Wrapper options under which the setting must equal the plain optimizer."""
    class_name, options = SETTINGS[name]
    whole = class_name in ("Muon", "Adafactor")
    open_ = class_name in LEFT_OPEN and not {"fused", "foreach"} & options.keys()
    return DEVICE if whole or open_ else DEVICE | HOST


def wrapped(name: str, model: torch.nn.Module, options: dict[str, Any]) -> Optimizer:
    inner = build(name, model)
    options = dict(options)
    if isinstance(options.get("update_on"), tuple):
        options["update_on"] = models.mixed_lanes(inner, options["update_on"])
    return models.wrap(inner, model, **options)


def change_hyper_parameters(optimizers: list[Optimizer], step: int) -> None:
    for optimizer in optimizers:
        if step == 3:
            optimizer.param_groups[0]["lr"] *= 0.5
        if step == 7:
            optimizer.param_groups[1]["lr"] *= 3.0


def every_optimizer(size: int, names: list[str]) -> None:
    for name in names:
        one(size, name)

def one(size, name):
    mesh = models.flat_mesh(size)
    model = models.toy(mesh)
    plain = build(name, model)
    others = {v: wrapped(name, models.toy(mesh), o) for v, o in variants_of(name).items()}
    for step in range(1, 11):
        models.backward(model, step)
        if step == 4:
            for parameter in models.parameters_of(plain)[::3]:
                parameter.grad = None
        gradients = models.gradients_of(plain)
        for optimizer in others.values():
            models.give(optimizer, gradients)
        change_hyper_parameters([plain, *others.values()], step)
        for optimizer in [plain, *others.values()]:
            optimizer.step()
            optimizer.zero_grad()
        if step in (1, 2, 10):
            for variant, optimizer in others.items():
                models.check_twins(optimizer, plain, f"{name}, {variant}, step {step}")
    for optimizer in others.values():
        optimizer.close()


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("name", list(SETTINGS))
def test_x(ranks: Ranks, size: int, name:str) -> None:
    ranks(max(size, 2)).run(every_optimizer, size, [name])
