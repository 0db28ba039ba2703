"""Optimizers that move their own state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_offload import PhaseOffloader, TransferConfig
from fsdp_offload.device import CpuGateway
from fsdp_offload.errors import AwayError, DeviceMemoryError
from fsdp_offload.moving import Mover, Places, Trip, collect

CPU = torch.device("cpu")


class SelfMoving(torch.optim.SGD):
    """Moves its momenta itself."""

    is_offloaded = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        gateway = CpuGateway(CPU)
        self.mover = Mover(gateway, Places(gateway, TransferConfig()))
        self.calls: list[str] = []
        self.full = False
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)

    def _blocks(self) -> Any:
        moments = [(str(i), s["momentum_buffer"]) for i, s in enumerate(self.state.values())]
        return collect(moments, CPU)

    def reserve_offload(self) -> None:
        self.calls.append("reserve")

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def offload(self, *, wait: bool = True) -> Trip:
        self.calls.append("offload")
        self.blocks = self._blocks()
        return self.mover.out(self.blocks)

    def reload(self, *, wait: bool = True) -> Trip:
        self.calls.append("reload")
        if self.full:
            raise DeviceMemoryError("state")
        return self.mover.back(self.blocks)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bf16 = nn.Linear(8, 8).bfloat16()
        self.fp32 = nn.Linear(8, 8)
        whole = torch.randn(20).bfloat16()  # a view of more than the parameter
        self.padded = nn.Parameter(whole[:16])


def made(**options: Any) -> tuple[Net, SelfMoving, PhaseOffloader]:
    torch.manual_seed(0)
    model = Net()
    optimizer = SelfMoving(model.parameters())
    return model, optimizer, PhaseOffloader(model, optimizer, **options)


def momenta(optimizer: SelfMoving) -> list[int]:
    return [s["momentum_buffer"].untyped_storage().nbytes() for s in optimizer.state.values()]


def test_the_optimizer_leaves_first_and_comes_back_last() -> None:
    model, optimizer, phases = made()
    before = copy.deepcopy(model.state_dict())
    assert optimizer.calls == ["reserve", "synchronize"]
    phases.offload()
    assert optimizer.calls[2:] == ["synchronize", "reserve", "offload"]
    assert not any(momenta(optimizer))
    assert phases.statistics().offloaded["state"].n_bytes > 0
    with pytest.raises(AwayError):
        optimizer.step()
    phases.reload()
    assert optimizer.calls[5:] == ["reload"]
    assert all(momenta(optimizer))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_state_may_stay() -> None:
    _, optimizer, phases = made(state="keep")
    with phases.away():
        assert all(momenta(optimizer))
        with pytest.raises(AwayError):
            optimizer.step()
    assert "offload" not in optimizer.calls


def test_no_room_for_the_state_leaves_all_away() -> None:
    model, optimizer, phases = made()
    before = copy.deepcopy(model.state_dict())
    phases.offload()
    optimizer.full = True
    with pytest.raises(DeviceMemoryError):
        phases.reload()
    assert not any(p.untyped_storage().nbytes() for p in model.parameters())
    optimizer.full = False
    phases.reload()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
