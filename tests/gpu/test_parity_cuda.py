"""On CUDA: the device lanes give the plain optimizer's bits, the host lane torch's CPU kernel's."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_offload import HybridDeviceOptimizer, TransferConfig
from fsdp_offload.update import codec
from fsdp_offload.update.kernels import triton_kernels
from tests.helpers.lanes import in_lanes

SHAPES = [(300, 70), (7,), (0,), (129, 65), (1000,), (64, 64), (3, 5, 7)]
SMALL = TransferConfig(bucket_bytes="64KiB")

CASES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"foreach": False}),
    (torch.optim.AdamW, {"fused": True, "amsgrad": True, "maximize": True}),
    (torch.optim.AdamW, {"capturable": True}),
    (torch.optim.Adam, {"fused": True, "weight_decay": 0.1}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "fused": True}),
    (torch.optim.SGD, {}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.2}),
    (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {"weight_decay": 0.1}),
    (torch.optim.Adamax, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Rprop, {}),
]


def parameters(dtype: torch.dtype, device: str = "cuda") -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [nn.Parameter(value.to(device, dtype)) for value in values]


def fill(
    step: int,
    targets: list[nn.Parameter],
    *others: list[nn.Parameter],
    late_first: bool = False,
    complete: bool = False,
) -> None:
    """The same gradients everywhere; some are None in some steps, unless ``complete``.

    ``late_first``: one parameter gets its first gradient in the second step. Plain fused SGD
    cannot do that: it takes parameters with and without momentum in one call.
    """
    generator = torch.Generator().manual_seed(100 + step)
    for index, parameter in enumerate(targets):
        value = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        missing = not complete and step > 0 and (step + index) % 4 == 3
        if late_first and step == 0 and index == 3:
            missing = True
        for each in (parameter, *(other[index] for other in others)):
            rounded = value.to(parameter.dtype).to(each.device, each.dtype, copy=True)
            each.grad = None if missing else rounded


def step_both(
    mine: HybridDeviceOptimizer,
    mine_p: list[nn.Parameter],
    plain: torch.optim.Optimizer,
    plain_p: list[nn.Parameter],
    steps: int,
    *,
    complete: bool = False,
) -> None:
    """That many steps side by side, with the same gradients: see :func:`fill`."""
    for step in range(steps):
        fill(step, mine_p, plain_p, complete=complete)
        plain.step()
        mine.step()


def assert_same_state(mine: dict[str, Any], plain: dict[str, Any]) -> None:
    for name, value in plain.items():
        assert torch.equal(torch.as_tensor(mine[name]).cpu(), torch.as_tensor(value).cpu()), name


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("cls", "options"), CASES, ids=lambda v: getattr(v, "__name__", str(v)))
def test_fp32_device_lanes_equal_the_plain_optimizer(
    cls: type[torch.optim.Optimizer], options: dict[str, Any], fraction: float
) -> None:
    plain_p, mine_p = parameters(torch.float32), parameters(torch.float32)
    plain = cls(plain_p, lr=0.01, **options)  # type: ignore[call-arg]
    mine = HybridDeviceOptimizer(
        cls(mine_p, lr=0.01, **options),  # type: ignore[call-arg]
        offload_fraction=fraction,
        transfer=SMALL,
    )
    for step in range(10):
        if step == 5:
            plain.param_groups[0]["lr"] = mine.param_groups[0]["lr"] = 0.003
        fill(step, mine_p, plain_p, late_first=cls is not torch.optim.SGD)
        plain.step()
        mine.step()
        mine.zero_grad()
    for a, b in zip(plain_p, mine_p, strict=True):
        assert torch.equal(a, b)
        if plain.state[a]:
            assert_same_state(mine.state[b], plain.state[a])
    if fraction == 1.0:
        tensors = [v for s in mine.state.values() for v in s.values() if v.dim()]
        assert all(not v.is_cuda and (v.is_pinned() or v.numel() == 0) for v in tensors)
    mine.close()


@pytest.mark.parametrize("lanes", ["resident", "streamed", "mixed"])
def test_bf16_master_trajectory_equals_fp32_training(lanes: str) -> None:
    mine_p = parameters(torch.bfloat16)
    plain_p = [nn.Parameter(p.detach().float()) for p in mine_p]
    plain = torch.optim.AdamW(plain_p, lr=0.01, fused=True)
    names = itertools.cycle(["resident", "streamed"])
    chosen = [next(names) if lanes == "mixed" else lanes for _ in mine_p]
    inner = torch.optim.AdamW(mine_p, lr=0.01, fused=True)
    mine = in_lanes(inner, update_on=chosen, transfer=SMALL)
    step_both(mine, mine_p, plain, plain_p, 8)
    for a, b in zip(plain_p, mine_p, strict=True):
        remainder = mine.state[b]["master_remainder"].cuda().view(-1)
        master = torch.empty(b.numel(), device="cuda")
        codec.decode(b.detach().view(-1), remainder, master)
        off = (master.view(a.shape) != a).view(-1).nonzero().view(-1).tolist()
        assert not off, (
            len(off),
            off[:3],
            off[-3:],
            (master.view(a.shape) - a).abs().max(),
            [x["step"].item() for x in mine.state.values()],
            [x["step"].item() for x in plain.state.values()],
        )
        assert_same_state(mine.state[b], plain.state[a])
    mine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_host_lane_equals_the_cpu_kernel(
    cls: type[torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    options: dict[str, Any] = {"momentum": 0.9} if cls is torch.optim.SGD else {}
    fused = {} if cls is torch.optim.RMSprop else {"fused": True}
    mine_p = parameters(dtype)
    plain_p = [nn.Parameter(p.detach().float().cpu()) for p in mine_p]
    plain = cls(plain_p, lr=0.01, **options, **fused)  # type: ignore[call-arg]
    inner = cls(mine_p, lr=0.01, **options)  # type: ignore[call-arg]
    mine = HybridDeviceOptimizer(inner, update_on="host", transfer=SMALL)
    step_both(mine, mine_p, plain, plain_p, 8)
    for a, b in zip(plain_p, mine_p, strict=True):
        if dtype == torch.float32:
            assert torch.equal(a, b.cpu())
        else:
            master = mine.state[b].get("master")
            if master is None:
                master = codec.decoded(b.detach().cpu(), mine.state[b]["master_remainder"])
            assert torch.equal(master, a)
            info = torch.finfo(dtype)  # a weight is its master, rounded
            most = info.eps / 2 * a.abs().clamp_min(info.tiny)
            assert bool(((a - b.float().cpu()).abs() <= most).all())
        if plain.state[a]:
            assert_same_state(mine.state[b], plain.state[a])
    mine.close()


def test_codec_kernels_equal_their_plain_twin() -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    special = [0x7FFFFFFF, -1, 0x7F800001, 0x7F800000, -0x800000, 0x7F7FFFFF, 0x8000, 0x18000, 0]
    for numel in (1, 1023, 1 << 22):
        bits = torch.randint(-(2**31), 2**31 - 1, (numel,), device="cuda", generator=generator)
        bits = bits.to(torch.int32)
        bits[: len(special)] = torch.tensor(special, device="cuda", dtype=torch.int32)[:numel]
        master = bits.view(torch.float32)
        outcomes = []
        for encode, decode in (
            (codec.encode, codec.decode),
            (codec.encode_plain, codec.decode_plain),
        ):
            value = torch.empty(numel, dtype=torch.bfloat16, device="cuda")
            remainder = torch.empty_like(value)
            back = torch.empty(numel, device="cuda")
            encode(master, value, remainder)
            decode(value, remainder, back)
            alone = torch.empty_like(value)
            codec.round_to_value(master, alone)
            assert torch.equal(alone.view(torch.int16), value.view(torch.int16))
            assert torch.equal(back.isnan(), master.isnan())
            assert torch.equal(value.isnan(), master.isnan())
            pair = value.view(torch.int16), remainder.view(torch.int16)
            outcomes.append((*pair, back.view(torch.int32)))
        assert triton_kernels() is not None, "Triton comes with torch's GPU builds"
        for kernel, plain in zip(*outcomes, strict=True):
            assert torch.equal(kernel, plain)


def test_steady_state_allocates_nothing_and_frees_everything() -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    mine_p = parameters(torch.bfloat16)
    mine = HybridDeviceOptimizer(torch.optim.AdamW(mine_p, fused=True), transfer=SMALL)
    fill(0, mine_p)
    mine.step()
    mine.synchronize()
    allocations = torch.cuda.memory_stats()["num_device_alloc"]
    held = torch.cuda.memory_allocated()
    for step in range(5):
        fill(step, mine_p)
        mine.step()
    mine.synchronize()
    assert torch.cuda.memory_stats()["num_device_alloc"] == allocations
    assert torch.cuda.memory_allocated() <= held
    mine.close()
    del mine, mine_p
    assert torch.cuda.memory_allocated() <= before + (1 << 20)


def test_gradients_written_late_on_the_callers_stream_are_seen() -> None:
    mine_p, plain_p = parameters(torch.float32), parameters(torch.float32)
    mine = HybridDeviceOptimizer(torch.optim.SGD(mine_p, lr=0.1), transfer=SMALL)
    plain = torch.optim.SGD(plain_p, lr=0.1)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(5):
            torch.cuda._sleep(20_000_000)
            for a, b in zip(mine_p, plain_p, strict=True):
                a.grad = torch.randn_like(a)
                b.grad = a.grad.clone()
            mine.step()
            plain.step()
            mine.zero_grad(set_to_none=False)  # may still be read by the update
    side.synchronize()
    for a, b in zip(mine_p, plain_p, strict=True):
        assert torch.equal(a, b)
    mine.close()


CAPTURE = """
import torch
from fsdp_offload import DeviceError, HybridDeviceOptimizer
p = torch.nn.Parameter(torch.randn(1000, device="cuda"))
optimizer = HybridDeviceOptimizer(torch.optim.SGD([p], lr=0.1, momentum=0.9))
p.grad = torch.ones_like(p)
optimizer.step()
before = p.detach().clone()
torch.cuda.synchronize()
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
except DeviceError as error:
    assert "capture" in str(error)
else:
    raise SystemExit("the capture was not refused")
torch.cuda.synchronize()
assert torch.equal(p, before)
optimizer.step()
assert not torch.equal(p, before)
"""


def test_capture_of_step_is_refused() -> None:
    """In a process of its own: a broken-off capture leaves torch's generators unusable."""
    done = subprocess.run([sys.executable, "-c", CAPTURE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_muon_keeps_whole_matrices_and_adafactor_its_own_state() -> None:
    for cls in (torch.optim.Muon, torch.optim.Adafactor):
        shapes = [(300, 70), (129, 65)]
        mine_p = [nn.Parameter(torch.randn(s, device="cuda")) for s in shapes]
        plain_p = [nn.Parameter(p.detach().clone()) for p in mine_p]
        mine = HybridDeviceOptimizer(cls(mine_p, lr=0.01), transfer=SMALL)
        plain = cls(plain_p, lr=0.01)
        step_both(mine, mine_p, plain, plain_p, 3, complete=True)
        for a, b in zip(mine_p, plain_p, strict=True):
            assert torch.equal(a, b)
        mine.close()
