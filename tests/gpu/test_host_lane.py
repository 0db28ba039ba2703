"""The host lane on a GPU, in every mode, whatever is late: the bits of torch's CPU kernel.

Streams are held up by a kernel that only waits, the host thread by sleeping. The twin copies
gradients to the host, steps torch's fused AdamW there and copies weights back, one after the other.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_offload import HybridDeviceOptimizer, TransferConfig
from fsdp_offload.core.devices import AcceleratorBackend
from fsdp_offload.optimizer import host
from tests.gpu import test_overlap
from tests.helpers.compare import bits
from tests.helpers.lanes import in_lanes

mesh = test_overlap.mesh
STEPS, SLEEP = 6, test_overlap.SLEEP
LATE = ("nothing", "compute", "host_out", "host_back", "thread")
LATE_OF_BOTH = (*LATE, "fetch", "update", "store")
SMALL = TransferConfig(bucket_bytes="1MiB", host_threads=4)
MIXED = ("streamed", "host") * 6 + ("host",)
"""A lane for each parameter of the model, in order."""


class CpuTwin:
    """Fused AdamW on fp32 copies in host memory."""

    def __init__(self, parameters: list[Any], **settings: Any) -> None:
        self.parameters = parameters
        self.masters = [nn.Parameter(p._local_tensor.detach().float().cpu()) for p in parameters]
        self.inner = torch.optim.AdamW(self.masters, fused=True, **settings)

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = parameter.grad._local_tensor.float().cpu()
        self.inner.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter._local_tensor.copy_(master)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def hold_up(optimizer: Any, late: str) -> None:
    """A :class:`CpuTwin` has no streams to hold up; an unknown ``late`` raises."""
    if late.startswith("host_") and isinstance(optimizer, HybridDeviceOptimizer):
        lane = optimizer._updates.reserved.engine.host
        assert lane is not None
        streams = {"host_out": lane.link._out, "host_back": lane.link._in}
        streams[late].launch(torch.cuda._sleep, SLEEP)
    elif late != "thread":  # it sleeps itself: see ``lateness``
        test_overlap.hold_up(optimizer, late)


def train(model: Any, optimizer: Any, late: str, *, clip: bool) -> Tensor:
    losses = []
    generator = torch.Generator("cuda").manual_seed(1)
    dtype = next(model.parameters()).dtype
    for _ in range(STEPS):
        x = torch.randn(64, 512, device="cuda", generator=generator).to(dtype)
        hold_up(optimizer, late)
        loss = model(x)
        hold_up(optimizer, late)
        loss.backward()
        if clip and isinstance(optimizer, HybridDeviceOptimizer):
            optimizer.clip_grad_norm_(0.05)
        elif clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        hold_up(optimizer, late)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.fixture
def lateness(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    late = str(request.param)
    if late == "thread":
        step = host.HostBucket.step

        def slowly(bucket: host.HostBucket, received: Any, work: Any) -> None:
            time.sleep(0.005)
            step(bucket, received, work)

        monkeypatch.setattr(host.HostBucket, "step", slowly)
    return late


def wrap(
    model: Any, overlap: str, lanes: str | tuple[str, ...] = "host", *, fused: bool | None = None
) -> HybridDeviceOptimizer:
    return in_lanes(
        torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused),
        model=model,
        overlap=overlap,
        transfer=SMALL,
        update_on=lanes,
    )


@pytest.mark.parametrize("lateness", LATE, indirect=True)
@pytest.mark.parametrize("overlap", ["step", "forward", "backward"])
def test_fp32_shards(mesh: Any, overlap: str, lateness: str) -> None:
    plain, mine = (test_overlap.build(mesh, torch.float32) for _ in range(2))
    twin = CpuTwin(list(plain.parameters()), lr=1e-2)
    optimizer = wrap(mine, overlap)
    clip = overlap != "backward"
    expected = train(plain, twin, "nothing", clip=clip)
    found = train(mine, optimizer, lateness, clip=clip)

    assert torch.equal(found, expected)
    optimizer.synchronize()
    for parameter, master in zip(mine.parameters(), twin.masters, strict=True):
        assert torch.equal(parameter._local_tensor.cpu(), master)
        for name, value in optimizer.state[parameter].items():
            if name != "step":
                assert torch.equal(value._local_tensor, twin.inner.state[master][name]), name
    optimizer.close()


@pytest.mark.parametrize(
    ("lateness", "lanes"),
    [
        *((late, "host") for late in LATE),
        *((late, MIXED) for late in LATE_OF_BOTH),
    ],
    indirect=["lateness"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_mode_has_the_bits_of_step(
    mesh: Any, lateness: str, lanes: str | tuple[str, ...], dtype: torch.dtype
) -> None:
    """The same weights and masters, also with both lanes."""
    outcomes = []
    for overlap in ("step", "forward", "backward"):
        model = test_overlap.build(mesh, dtype)
        optimizer = wrap(model, overlap, lanes)
        losses = train(model, optimizer, lateness if overlap != "step" else "nothing", clip=False)
        state = [
            value._local_tensor.clone()
            for p in model.parameters()
            for name, value in optimizer.state[p].items()
            if name != "step"
        ]
        outcomes.append([losses.cpu(), *state])
        optimizer.close()
    for other in outcomes[1:]:
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(outcomes[0], other, strict=True))


@pytest.mark.gpus(2)
def test_the_thread_selects_the_device() -> None:
    """A new thread has device 0."""
    lane = host.HostLane(AcceleratorBackend(torch.device("cuda", 1)), 1, "step")
    assert lane._thread.submit(torch.cuda.current_device).result() == 1
    lane.stop()
