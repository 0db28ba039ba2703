"""What updates beside forward and backward read besides gradients: there in time, and long enough.

Learning rates on the device are small tensors of the compute stream's pool. Updates are
held up, and the pool is asked for small tensors full of NaN meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from fsdp_offload import HybridDeviceOptimizer, TransferConfig
from fsdp_offload.core.backend import Stream
from tests.gpu.test_overlap import SLEEP, STEPS, build, mesh

__all__ = ["mesh"]  # a fixture


def ask_for_small_tensors() -> None:
    junk = [torch.full((), torch.nan, device="cuda") for _ in range(256)]
    junk += [torch.full((2,), torch.nan, device="cuda", dtype=torch.float64) for _ in range(64)]


def be_late(optimizer: HybridDeviceOptimizer) -> None:
    """Updates run long after ``step()``; what a backward begins with is there late."""
    begin: Callable[[], Any] = optimizer._updates._begin

    def begin_late() -> Any:
        torch.cuda._sleep(SLEEP)
        return begin()

    optimizer._updates._begin = begin_late  # type: ignore[method-assign]


def train(
    model: Any,
    optimizer: Any,
    clip: Callable[[float], Any] | None,
    lr: torch.Tensor,
    late: Sequence[Stream] = (),
) -> torch.Tensor:
    """``late``: streams that are held up before each step."""
    losses = []
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(64, 512, device="cuda", generator=generator)
        loss = model(x)
        loss.backward()
        if clip is not None:
            clip(0.05)
        for stream in late:
            stream.launch(torch.cuda._sleep, SLEEP)
        optimizer.step()
        ask_for_small_tensors()
        optimizer.zero_grad()
        lr.mul_(0.9)
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize("overlap", ["forward", "backward"])
@pytest.mark.parametrize("lanes", ["streamed", "half", "host"])
def test_learning_rates_on_the_device(mesh: Any, overlap: str, lanes: str) -> None:
    plain, mine = build(mesh, torch.float32), build(mesh, torch.float32)
    rates = [torch.tensor(1e-2, device="cuda") for _ in range(2)]
    reference: Any = torch.optim.AdamW(plain.parameters(), lr=rates[0], fused=True)
    if lanes == "host":  # torch's kernel on the CPU, with nothing late
        reference = HybridDeviceOptimizer(reference, model=plain, update_on="host")
    optimizer = HybridDeviceOptimizer(
        torch.optim.AdamW(mine.parameters(), lr=rates[1], fused=True),
        model=mine,
        overlap=overlap,
        offload_fraction=0.5 if lanes == "half" else 1.0,
        device_memory="8MiB",
        transfer=TransferConfig(bucket_bytes="1MiB"),
        update_on="host" if lanes == "host" else "device",
    )
    be_late(optimizer)
    clips = overlap == "forward"

    def clip_plain(max_norm: float) -> None:
        torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm)

    expected = train(plain, reference, clip_plain if clips else None, rates[0])
    updates = [optimizer._updates.reserved.engine.update]
    assert updates
    clip = optimizer.clip_grad_norm_ if clips else None
    found = train(mine, optimizer, clip, rates[1], late=updates)
    optimizer.synchronize()
    assert torch.equal(found, expected), (found, expected)
    for a, b in zip(mine.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a._local_tensor, b._local_tensor)
    optimizer.close()
