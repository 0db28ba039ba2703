"""Optimizer classes of other packages: wrapped, they give the bits that they give alone.

Needs ``pytorch_optimizer``, ``schedulefree``, ``torchao``, ``bitsandbytes``; what is not installed
is skipped. ``python -m tests.packages.test_optimizer_packages`` prints a row per class.
"""

from __future__ import annotations

import importlib
import inspect
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from fsdp_offload import HybridDeviceOptimizer
from fsdp_offload.core.errors import ConfigError

SHAPES = ((64, 96), (33,), (16, 8, 3), (20, 20))
STEPS = 12
PACKAGES = ("pytorch_optimizer", "schedulefree", "torchao.optim", "bitsandbytes.optim")
NEEDS_MORE = {"LBFGS", "SparseAdam", "SAM", "WSAM", "GSAM", "LookSAM", "BSAM", "FriendlySAM"}
"""Several evaluations per step, or sparse gradients."""


def classes_of(package: str) -> Iterator[tuple[str, type[Optimizer]]]:
    """Optimizer classes that the package exports, its own ones."""
    module = importlib.import_module(package)
    for name, cls in sorted(vars(module).items()):
        if inspect.isclass(cls) and issubclass(cls, Optimizer) and cls is not Optimizer:
            if not cls.__module__.startswith("torch.optim") and name not in NEEDS_MORE:
                yield name, cls


def train(
    make: Callable[[Any], Optimizer], wrap: Callable[[Optimizer], Optimizer] | None
) -> tuple[list[nn.Parameter], Optimizer]:
    """Steps with random gradients, some missing; resumed from a state dict half-way."""
    torch.manual_seed(0)
    random.seed(0)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    optimizer = make([{"params": parameters[:2]}, {"params": parameters[2:]}])
    if wrap is not None:
        optimizer = wrap(optimizer)
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        if hasattr(optimizer, "train"):
            optimizer.train()
        for index, parameter in enumerate(parameters):
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = None if (step + index) % 5 == 4 else gradient
        optimizer.step()
        if step == STEPS // 2:
            optimizer.load_state_dict(optimizer.state_dict())
    return parameters, optimizer


def outcome(cls: type[Optimizer]) -> str:
    """``same``, ``differs``, or why it does not run alone or was refused."""

    def make(groups: Any) -> Optimizer:
        try:
            return cls(groups, lr=1e-3)
        except TypeError:
            return cls(groups)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plain, again = (train(make, None)[0] for _ in range(2))
        except Exception as error:
            return f"does not run alone here: {type(error).__name__}"
        if not all(map(torch.equal, plain, again)):
            return "does not repeat its own numbers"
        try:
            wrapped, optimizer = train(make, HybridDeviceOptimizer)
        except ConfigError as error:
            return f"refused: {error}"
    assert optimizer.statistics().steps == STEPS
    same = all(map(torch.equal, plain, wrapped))
    return "same" if same else "differs"


@pytest.mark.long
@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.filterwarnings("ignore")
def test_classes_of_other_packages_give_the_bits_that_they_give_alone(package: str) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed")
    outcomes = {name: outcome(cls) for name, cls in classes_of(package)}
    print(*(f"{package}.{name}: {text}" for name, text in outcomes.items()), sep="\n")
    wrong = {name: text for name, text in outcomes.items() if text == "differs"}
    assert not wrong
    assert "same" in outcomes.values(), "none of them runs here"


if __name__ == "__main__":
    for package in PACKAGES:
        for name, cls in classes_of(package):
            print(f"{package}.{name}: {outcome(cls)}", flush=True)
