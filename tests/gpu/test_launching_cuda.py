"""Remembered Triton kernels on a GPU: their launches do what first launches do."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_offload import HybridDeviceOptimizer, TransferConfig
from fsdp_offload.update.kernels import triton_kernels
from fsdp_offload.update.kernels.launching import Kernel
from tests.helpers.compare import bits

SMALL = TransferConfig(bucket_bytes="64KiB")


def total_of(ones: Tensor) -> int:
    """Of the masters that a kernel decodes."""
    kernels, masters = triton_kernels(), torch.zeros(len(ones), device="cuda")
    assert kernels is not None
    kernels.decode(ones, torch.zeros_like(ones), masters)
    return int(masters.sum())


def test_a_remembered_variant_is_launched() -> None:
    ones = torch.ones(64, dtype=torch.bfloat16, device="cuda")
    assert total_of(ones) == total_of(ones) == 64
    kernels = triton_kernels()
    assert kernels is not None
    assert len(kernels._DECODE._known) >= 1


def test_a_new_thread_launches_too() -> None:
    ones, found = torch.ones(64, dtype=torch.bfloat16, device="cuda"), list[int]()

    def run() -> None:
        found.extend(total_of(ones) for _ in range(3))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [64] * 3


def trained(moments: Any, **how: Any) -> list[Tensor]:
    """Parameters and state after a few steps, by kernels that have remembered nothing before."""
    for kernel in gc.get_objects():
        if isinstance(kernel, Kernel):
            kernel._known.clear()
    generator = torch.Generator("cuda").manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 64)).cuda().bfloat16()
    for parameter in model.parameters():
        parameter.data.normal_(generator=generator)
    optimizer = HybridDeviceOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True, **how),
        transfer=SMALL, update_on="device", moments=moments,
    )  # fmt: skip
    for _ in range(5):
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter).normal_(generator=generator)
        optimizer.clip_grad_norm_(0.7)
        optimizer.step()
    state = [v.clone() for p in model.parameters() for v in optimizer.state[p].values()]
    found = [p.detach().clone() for p in model.parameters()] + state
    optimizer.close()
    return found


@pytest.mark.parametrize("moments", [None, torch.bfloat16, "int8"], ids=str)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_updates_have_the_bits_of_tritons_launches(
    monkeypatch: pytest.MonkeyPatch, moments: Any, decay: float
) -> None:
    """Pointers, integers and floats arrive as they were given."""
    found = trained(moments, weight_decay=decay)
    monkeypatch.setattr(torch.version, "hip", "0")  # nothing is remembered
    expected = trained(moments, weight_decay=decay)
    assert all(map(torch.equal, map(bits, found), map(bits, expected)))
