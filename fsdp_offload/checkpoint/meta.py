"""Prepare models on the meta device for a load: memory for saved tensors, values for the rest."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core import dtensor
from ..core.devices import default_device
from ..core.errors import UnsupportedParameterError
from ..core.fsdp import device_of, find_groups
from ..core.storage import as_bytes, move
from .state import some


def give_memory(models: Sequence[nn.Module]) -> None:
    """Allocate uninitialised memory for all meta tensors: shards on FSDP2's device, others on the
    compute device."""
    for group in find_groups(models):
        group.give_memory()
    device = device_of(models) or default_device()
    fresh: dict[Tensor, Tensor] = {}
    for model in models:
        for parameter in model.parameters():
            if parameter.is_meta:
                move(parameter, device)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_meta:
                    if buffer not in fresh:
                        fresh[buffer] = torch.empty_like(buffer, device=device)
                    setattr(module, name, fresh[buffer])


@torch.no_grad()
def make_buffers(models: Sequence[nn.Module], saved: Collection[str]) -> None:
    """Initialise buffers on the meta device that are not ``saved``.

    Calls the module's ``reset_parameters()``, or ``_init_weights(module)`` of the Hugging Face
    model around it.

    Raises:
        UnsupportedParameterError: neither sets them; nothing has changed.
    """
    device, names = device_of(models) or default_device(), dtensor.saved_names(models)
    before: list[tuple[nn.Module, str, Tensor]] = []
    arounds: dict[nn.Module, Any] = {}  # the Hugging Face model around each module
    for model in models:
        paths: dict[str, Any] = {"": None}
        for path, module in model.named_modules():
            around = module if hasattr(module, "_init_weights") else paths[path.rpartition(".")[0]]
            paths[path] = arounds[module] = around
            before += [
                (module, name, buffer)
                for name, buffer in module.named_buffers(recurse=False)
                if buffer.is_meta and buffer.numel() and names[buffer][0] not in saved
            ]
    try:
        for module, name, buffer in before:
            made = torch.empty_like(buffer, device=device, memory_format=torch.contiguous_format)
            as_bytes(made).fill_(255)  # NaN, or -1: unset
            setattr(module, name, made)
        for module in dict.fromkeys(module for module, _, _ in before):
            _initialise(module, arounds[module])
        found = [(names[b][0], getattr(module, name).contiguous()) for module, name, b in before]
        if without := [fqn for fqn, made in found if as_bytes(made).eq(255).all()]:
            raise UnsupportedParameterError(
                f"buffers {some(without)} on the meta device",
                reason="checkpoints lack them (persistent=False), and their modules do not "
                "initialise them",
                remedy="initialise them in reset_parameters() of their modules, or build "
                "the model with real buffers, such as under "
                "accelerate.init_empty_weights()",
            )
    except BaseException:  # a later load would take them for initialised
        for module, name, buffer in before:
            setattr(module, name, buffer)
        raise


def _initialise(module: nn.Module, around: Any) -> None:
    """Make the module set its values, unless it would change existing parameters."""
    if all(parameter.is_meta for parameter in module.parameters(recurse=False)):
        reset = around and functools.partial(around._init_weights, module)
        getattr(module, "reset_parameters", reset or (lambda: None))()
