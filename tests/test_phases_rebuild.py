"""Optimizers that move their own state, and parameters that are rebuilt from their masters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_offload import HybridDeviceOptimizer, PhaseOffloader, TransferConfig
from fsdp_offload.device import CpuGateway
from fsdp_offload.errors import AwayError, DeviceMemoryError
from fsdp_offload.moving import Mover, Places, Trip, absent, collect

CPU = torch.device("cpu")


class SelfMoving(torch.optim.SGD):
    """Moves its momenta itself, and keeps fp32 masters of bf16 parameters in host memory."""

    is_offloaded = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        gateway = CpuGateway(CPU)
        self.mover = Mover(gateway, Places(gateway, TransferConfig()))
        self.masters: dict[Tensor, Tensor] = {}
        self.calls: list[str] = []
        self.full = False
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
            if parameter.dtype == torch.bfloat16:
                self.masters[parameter] = parameter.detach().float() + 1e-5

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

    def rebuildable(self) -> dict[Tensor, Any]:
        return dict.fromkeys(self.masters)

    def rebuild(self, parameters: Any) -> None:
        for parameter in parameters:
            self.calls.append("rebuild")
            absent.present(parameter).data.copy_(self.masters[parameter])


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
    for parameter, master in optimizer.masters.items():
        parameter.data.copy_(master)
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


def test_rebuilt_parameters_are_not_copied() -> None:
    model, optimizer, phases = made(params="rebuild")
    before = copy.deepcopy(model.state_dict())
    saved = sum(4 * p.numel() for p in model.fp32.parameters())
    assert phases.statistics().host_bytes < saved + 128
    for cycle in range(1, 4):
        assert phases.offload().n_bytes == saved + sum(momenta(made()[1]))
        assert not any(p.untyped_storage().nbytes() for p in model.parameters())
        phases.reload()
        assert optimizer.calls.count("rebuild") == 3 * cycle
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
        assert not torch.tensor([], dtype=torch.bfloat16).set_(
            model.padded.untyped_storage()
        )[16:].any()  # fmt: skip


def test_rebuilt_parameters_are_read_and_loaded_while_away() -> None:
    model, _, phases = made(params="rebuild")
    before = copy.deepcopy(model.state_dict())
    with phases.away():
        torch.testing.assert_close(copy.deepcopy(model.state_dict()), before, rtol=0, atol=0)
        other = {name: value + 1 for name, value in before.items()}
        model.load_state_dict(other)
        torch.testing.assert_close(copy.deepcopy(model.state_dict()), other, rtol=0, atol=0)
    torch.testing.assert_close(model.state_dict(), other, rtol=0, atol=0)


def test_no_room_while_parameters_are_written_leaves_all_away() -> None:
    """Half of a write is not taken for values, neither by readers nor by the next reload."""
    model, optimizer, phases = made(params="rebuild")
    before = copy.deepcopy(model.state_dict())
    phases.offload()

    def full(parameters: Any) -> None:
        parameters[0].data.fill_(5.0)
        raise torch.OutOfMemoryError("no room to round in")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "rebuild", full)
        with pytest.raises(DeviceMemoryError):
            phases.reload()
    assert phases.is_away
    assert not any(p.untyped_storage().nbytes() for p in model.parameters())
    torch.testing.assert_close(copy.deepcopy(model.state_dict()), before, rtol=0, atol=0)
    phases.reload()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_a_read_while_away_that_fails_can_be_repeated() -> None:
    model, optimizer, phases = made(params="rebuild")
    before = copy.deepcopy(model.state_dict())

    def fails(parameters: Any) -> None:
        raise KeyboardInterrupt

    with phases.away():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(optimizer, "rebuild", fails)
            for _ in range(2):
                with pytest.raises(KeyboardInterrupt):
                    model.state_dict()
        torch.testing.assert_close(copy.deepcopy(model.state_dict()), before, rtol=0, atol=0)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_parameters_that_share_memory_are_saved() -> None:
    model, optimizer, phases = made(params="rebuild")
    model.register_buffer("view", model.padded.data[3:])
    model.view[-1] = 5.0
    with phases.away():
        assert optimizer.calls.count("rebuild") == 0
    assert float(model.view[-1]) == 5
    assert optimizer.calls.count("rebuild") == 2


@pytest.mark.parametrize("reads", [False, True])
def test_parameters_outlive_the_optimizer_that_rebuilds_them(*, reads: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 4).bfloat16()
    optimizer = HybridDeviceOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.1), model=model, update_on="host"
    )
    phases = PhaseOffloader(model, optimizer, params="rebuild", grads="drop", state="save")
    for _ in range(2):  # closing is no end: what stands before it is gone after a reload
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        phases.offload()
        phases.reload()
    phases.offload()
    if reads:
        with torch.no_grad():
            model.load_state_dict({name: value + 1 for name, value in expected.items()})
        expected = {name: value + 1 for name, value in expected.items()}
    optimizer.close()
    assert all(torch.equal(model.state_dict()[name], expected[name]) for name in expected)
    phases.reload()
    assert all(torch.equal(model.state_dict()[name], expected[name]) for name in expected)
    phases.close()
