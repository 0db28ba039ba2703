"""The waits of ``ActivationOffload``, under the stream simulator: all are needed, and enough."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_offload import ActivationOffload
from fsdp_offload.activations import offload
from tests.helpers.removed_waits import Removal, Simulator, Skip
from tests.helpers.simulator import ADVERSARIES, SimulatedStream

NUMEL, LAYERS = 512, 8
SIZE = NUMEL * 4
OURS = {
    ("activations:out", "current"),
    ("activations:in", "current"),
    ("current", "activations:out"),
    ("current", "activations:in"),
}
SCENES = ("little room", "in turns", "dropped")


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "BATCH_BYTES", 2 * SIZE)
    monkeypatch.setattr(offload, "LEAST_BYTES", 512)


class Square(torch.autograd.Function):
    """Whose work is queued on the current stream."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, current: SimulatedStream) -> Tensor:
        ctx.save_for_backward(x)
        ctx.current = current
        y = torch.full((NUMEL,), float("nan"))
        current.launch(square, y, x.detach())
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        out = torch.full((NUMEL,), float("nan"))
        ctx.current.launch(twice, out, x.detach(), gradient)
        return out, None


def square(y: Tensor, x: Tensor) -> None:
    torch.mul(x, x, out=y)
    y.mul_(0.5).add_(0.2)


def twice(out: Tensor, x: Tensor, gradient: Tensor) -> None:
    torch.mul(x, gradient, out=out)
    out.mul_(1.5)


def start(x: Tensor, values: Tensor, seed: int) -> None:
    x.copy_(values + seed / 8)


def forward(current: SimulatedStream, moved: ActivationOffload, seed: int) -> tuple[Tensor, Tensor]:
    x = torch.full((NUMEL,), float("nan"), requires_grad=True)
    current.launch(start, x.detach(), torch.linspace(0.1, 1.0, NUMEL), seed)
    with moved:
        y: Tensor = x
        for _ in range(LAYERS):
            y = Square.apply(y, current)
    return x, y


def run(scene: str, policy: str, skip: Skip) -> tuple[list[Tensor], Simulator]:
    """Gradients of three iterations."""
    with Simulator(policy, skip) as simulator:
        current = simulator.current_stream()
        inflight = f"{2 * SIZE}B" if scene == "little room" else 0
        moved = ActivationOffload(f"{20 * SIZE}B", 1.0, device="cpu", inflight_bytes=inflight)
        found: list[Tensor] = []
        pairs = [forward(current, moved, 3)] if scene == "in turns" else []
        for seed in range(3):
            pairs.append(forward(current, moved, seed))
            if scene == "dropped" and seed == 1:
                x, y = pairs.pop()
                node = y.grad_fn
                for _ in range(5):
                    node = node.next_functions[0][0]  # type: ignore[union-attr]
                node.saved_tensors  # type: ignore[union-attr]  # noqa: B018
                del x, y, node  # batches before it are on their way back
            while pairs and (scene != "in turns" or len(pairs) > 1 or seed == 2):
                x, y = pairs.pop()
                found += torch.autograd.grad(y, x, torch.ones(NUMEL))
                del x, y
        current.synchronize()
        found = [value.clone() for value in found]
        simulator.synchronize()
        assert moved.statistics().kept_bytes == {}
        moved.close()
    return found, simulator


def expect(scene: str) -> list[Tensor]:
    found = []
    for seed in {"in turns": (0, 1, 2, 3), "dropped": (0, 2)}.get(scene, (0, 1, 2)):
        x, saved = torch.linspace(0.1, 1.0, NUMEL) + seed / 8, []
        for _ in range(LAYERS):
            saved.append(x)
            x = torch.empty(NUMEL)
            square(x, saved[-1])
        gradient = torch.ones(NUMEL)
        for x in reversed(saved):
            out = torch.empty(NUMEL)
            twice(out, x, gradient)
            gradient = out
        found.append(gradient)
    return found


@pytest.fixture(scope="module")
def removal() -> Removal:
    return Removal(run, expect)


@pytest.mark.parametrize("scene", SCENES)
def test_complete_waits_are_enough(removal: Removal, scene: str) -> None:
    removal.check(scene, ADVERSARIES)


@pytest.mark.parametrize("scene", SCENES)
def test_every_wait_is_needed(removal: Removal, scene: str, of_each: int | None) -> None:
    simulator, needed, _ = removal.complete(scene)
    pairs = {simulator.wait_log[index] for index in needed}
    others = {("activations:out", "activations:in")} if scene == "in turns" else set()
    assert pairs == OURS | others
    assert simulator.sync_log == []
    # No backward reads what is copied of a graph that was dropped.
    unread = {("activations:out", "current"), ("activations:in", "current")}
    pairs -= unread if scene == "dropped" else set()
    assert removal.unnoticed(scene, pairs, of_each=of_each) == []


def test_copies_back_wait_for_copies_out_where_streams_are_several(removal: Removal) -> None:
    """On one stream, the compute stream has waited for them already."""
    simulator, _, implied = removal.complete("little room")
    pair = ("activations:in", "activations:out")
    assert pair in {simulator.wait_log[index] for index in implied}
    removal.check_implied("little room", slice(0, 6))
