"""Errors and warnings whose remedy is followed to the letter: then the bits are plain torch's."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from fsdp_offload import (
    ActivationOffload,
    ConfigError,
    FixedAddressRegion,
    HybridDeviceOptimizer,
    PagedStash,
    StateSchemaError,
    TransferConfig,
    UnsupportedParameterError,
    checkpoint,
)
from fsdp_offload.core.config import OffloadConfig, parse_bytes
from tests.fsdp import models
from tests.fsdp.models import Ranks, check
from tests.helpers.compare import assert_same, bits

GIB = 1 << 30


# --------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("given", "reason", "meant"),
    [
        (0.5, "a share", 8 * GIB),
        ("0.5", "a share", 8 * GIB),
        (8, "so few", 8 * GIB),
        ("8", "needs a unit", 8 * GIB),
        (8.0, "a float", 8 * GIB),
        (1.5, "a float", GIB * 3 // 2),
        (4096, "so few", 4 * GIB),
        ((1 << 20) - 1, "so few", ((1 << 20) - 1) << 20),
        (8e9, "a float", 8 * 10**9),
        ("8589934592", "needs a unit", 8 * GIB),
        (True, "not a size", 8 * GIB),
        ("8 apples", "not a size", 8 * GIB),
        (float("inf"), "not a size", 8 * GIB),
    ],
)
def test_a_size_without_a_unit_is_refused_with_what_was_meant(
    given: Any, reason: str, meant: int
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes(given, "device_memory")
    assert caught.value.what == f"device_memory={given!r}"
    assert reason in caught.value.reason
    (advised, *_) = re.findall(r'"([^"]+)"', caught.value.remedy)
    assert parse_bytes(advised) == meant


def test_what_is_a_size() -> None:
    sizes = {0: 0, "0": 0, 1 << 20: 1 << 20, "4KiB": 4096, "1.5 GB": 1_500_000_000, "3b": 3}
    assert {given: parse_bytes(given) for given in sizes} == sizes
    assert replace(TransferConfig(bucket_bytes="4KiB"), pin="never").bucket_bytes == "4KiB"
    assert OffloadConfig.make(transfer=TransferConfig(bucket_bytes=65536)).bucket_bytes == 65536
    with pytest.raises(ConfigError, match='write "64GiB"'):
        TransferConfig(bucket_bytes=64)


SIZES: dict[str, Callable[..., object]] = {
    "bucket_bytes": TransferConfig,
    "host_memory": TransferConfig,
    "device_memory": lambda **how: HybridDeviceOptimizer(adamw(nn.Linear(2, 2)), **how),
    "host_bytes": lambda **how: PagedStash("cpu", **how),
    "device_bytes": lambda **how: PagedStash("cpu", **how),
    "page_bytes": lambda **how: PagedStash("cpu", **how),
    "inflight_bytes": lambda **how: ActivationOffload("1MiB", device="cpu", **how),
    "chunk_bytes": lambda **how: FixedAddressRegion("kv", "cpu", **how),
}


@pytest.mark.parametrize("name", SIZES)
def test_every_option_that_is_a_size_is_parsed_alike(name: str) -> None:
    for given in (0.5, 8, "8", 8.0):
        with pytest.raises(ConfigError, match=re.escape(f"{name}={given!r}: ")):
            SIZES[name](**{name: given})


def test_the_size_of_exported_files_is_parsed_alike(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_shard_bytes=8: "):
        checkpoint.export_safetensors(nn.Linear(2, 2), tmp_path, max_shard_bytes=8)


# --------------------------------------------------------------------------- steps


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    loss: torch.Tensor = model(torch.randn(2, 3, 4, 4, generator=generator)).square().mean()
    return loss


def trained(model: nn.Module, optimizer: Optimizer, steps: int = 3) -> list[torch.Tensor]:
    for step in range(steps):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def test_zero_grad_before_step(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is updated, as with torch, and one warning tells the order."""
    model, plain = made(), made()
    optimizer = HybridDeviceOptimizer(adamw(model), model)
    with caplog.at_level(logging.WARNING, "fsdp_offload"):
        for _ in range(2):
            loss_of(model, 0).backward()
            optimizer.zero_grad()
            optimizer.step()
    assert_same(list(model.parameters()), list(plain.parameters()))
    (warning,) = caplog.messages
    assert "Remedy: call zero_grad() after step(), or before backward()" in warning
    assert_same(trained(model, optimizer), trained(plain, adamw(plain)))


def assign(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data.clamp(-0.1, 0.1)


def write(model: nn.Module) -> None:
    for p in model.parameters():
        with torch.no_grad():
            p.copy_(p.clamp(-0.1, 0.1))


def test_assigned_data_is_written_in_place_instead() -> None:
    model = made()
    optimizer = HybridDeviceOptimizer(adamw(model), model)
    trained(model, optimizer, 1)
    assign(model)
    with pytest.raises(StateSchemaError, match=r"parameter\.data was assigned") as caught:
        trained(model, optimizer, 1)
    assert "with torch.no_grad(): parameter.copy_(values)" in caught.value.remedy

    found = []
    for wraps in (False, True):
        model = made()
        optimizer = HybridDeviceOptimizer(adamw(model), model) if wraps else adamw(model)  # type: ignore[assignment]
        trained(model, optimizer, 1)
        write(model)
        found.append(trained(model, optimizer))
    assert_same(*found)


def to_format(model: nn.Module) -> None:
    model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]


def assign_contiguous(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()


@pytest.mark.parametrize("follow", [to_format, assign_contiguous])
def test_weights_that_are_not_contiguous(follow: Callable[[nn.Module], None]) -> None:
    model, plain = made().to(memory_format=torch.channels_last), made()  # type: ignore[call-overload]
    with pytest.raises(UnsupportedParameterError, match="not contiguous") as caught:
        HybridDeviceOptimizer(adamw(model), model)
    for advice in ("to(memory_format=torch.contiguous_format)", "= parameter.data.contiguous()"):
        assert advice in caught.value.remedy
    follow(model)
    optimizer = HybridDeviceOptimizer(adamw(model), model)
    assert_same(trained(model, optimizer), trained(plain, adamw(plain)))


def test_assigned_parameters_are_not_taken_for_fully_shard() -> None:
    model = made()
    optimizer = HybridDeviceOptimizer(adamw(model), model)
    model.load_state_dict(made().state_dict(), assign=True)
    loss_of(model, 0).backward()
    with pytest.raises(ConfigError, match="parameters were assigned after") as caught:
        optimizer.step()
    assert "then build the optimizer from model.parameters(), then wrap it" in caught.value.remedy
    optimizer.close()
    optimizer, plain = HybridDeviceOptimizer(adamw(model), model), made()
    model.zero_grad()
    assert_same(trained(model, optimizer), trained(plain, adamw(plain)))


# --------------------------------------------------------------------------- gathered parameters


def steps_of(model: Any, optimizer: Optimizer) -> list[torch.Tensor]:
    for step in range(3):
        models.backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(models.tokens(9))
    model.reshard()
    return [bits(p).clone() for p in model.parameters()]


def gathered() -> None:
    mesh = models.flat_mesh(2)
    expected = steps_of(plain := models.toy(mesh), adamw(plain))

    model: Any = models.toy(mesh)
    model.unshard()
    with pytest.raises(ConfigError) as caught:
        HybridDeviceOptimizer(adamw(model), model)
    for words in (
        "2 gathered parameters, such as frozen",
        "call reshard() of each FSDPModule",
    ):
        check(words in str(caught.value), str(caught.value))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    same = map(torch.equal, steps_of(model, HybridDeviceOptimizer(adamw(model), model)), expected)
    check(all(same), "other bits after reshard()")

    # The optimizer was built before: wrapping it is no mistake, nor is a step.
    model = models.toy(mesh)
    inner = adamw(model)
    model.unshard()
    optimizer = HybridDeviceOptimizer(inner, model)
    names = [param.fqn for param in optimizer._updates.reserved.params]
    check("embed.weight" in names, f"named {names}")
    optimizer.step()  # no gradients, and nothing was replaced
    model.reshard()
    check(all(map(torch.equal, steps_of(model, optimizer), expected)), "other bits")


def test_gathered_parameters(ranks: Ranks) -> None:
    ranks(2).run(gathered)
