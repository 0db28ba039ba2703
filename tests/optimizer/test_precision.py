"""Moments in fewer bits: as a plain optimizer whose moments are rounded after every step."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import distribute_tensor
from torch.optim import Optimizer

from fsdp_offload import (
    ConfigError,
    DeviceMemoryError,
    HybridDeviceOptimizer,
    TransferConfig,
)
from fsdp_offload.checkpoint import OptimizerState, load, save
from fsdp_offload.core.devices import backend_for
from fsdp_offload.update import moments, one_kernel, rng_key
from fsdp_offload.update.bucket import Scratch
from fsdp_offload.update.moments import Moment
from fsdp_offload.update.schema import makes_its_state
from tests.fsdp import models
from tests.fsdp.models import Ranks
from tests.helpers.adam_plain import adam_plain
from tests.helpers.compare import assert_same, master_of, rounded
from tests.helpers.fake_fsdp import FakeFsdp
from tests.helpers.training import Model

SHAPES = ((70, 50), (129,), (), (0, 5), (7, 3, 4), (64,))
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SMALL = TransferConfig(bucket_bytes="4KiB")
LOSSY = (BF16, "int8")
# dcp without a process group says so.
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


Settings = tuple[type[Optimizer], dict[str, Any]]
ADAMW: Settings = (torch.optim.AdamW, {"lr": 0.01, "fused": True})
CLASSES: list[Settings] = [
    ADAMW,
    (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True, "foreach": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    (torch.optim.Adagrad, {"lr": 0.01, "initial_accumulator_value": 0.1}),
]


def wrapped(
    dtype: torch.dtype, kept: Any, settings: Settings = ADAMW, **wrap: Any
) -> tuple[Model, HybridDeviceOptimizer]:
    model = Model(0, SHAPES, dtype)
    wrap = {"transfer": SMALL, **wrap}
    cls, options = settings
    return model, HybridDeviceOptimizer(
        cls(model.parameters(), **options),  # type: ignore[call-arg]
        model=model,
        moments=kept,
        **wrap,
    )


def fill(model: nn.Module, step: int, other: nn.Module | None = None) -> None:
    """Gradients of different sizes; some are missing in some steps."""
    generator = torch.Generator().manual_seed(100 + step)
    for index, p in enumerate(model.parameters()):
        value = torch.randn(p.shape, generator=generator) * 3.0**-index
        value = value * torch.rand(p.shape, generator=generator) ** 2
        missing = index != 0 and (step + index) % 4 == 3
        p.grad = None if missing else value.to(p.dtype)
    if other is not None:
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            q.grad = None if p.grad is None else p.grad.to(q.dtype, copy=True)


def round_moments(plain: Optimizer, mine: HybridDeviceOptimizer, counts: list[int]) -> None:
    """What the wrapped optimizer does to the state of the plain one after a step."""
    for record in mine._updates.reserved.params:
        parameter = plain.param_groups[0]["params"][int(record.fqn.split(".")[-1])]
        if parameter.grad is None:
            continue
        counts[record.index] += 1
        for position, moment in enumerate(record.moments):
            kept = plain.state[parameter][moment.name]
            values = kept.flatten().clone()
            seed = rng_key.seed_of(record.fqn)
            draw = (rng_key.key_of(seed, counts[record.index], position // 2), 0)
            codes = torch.empty(values.numel(), dtype=moment.dtype)
            scales = torch.empty(-(-values.numel() // 64)) if moment.has_scales else None
            moments.pack_plain(moment, values, codes, scales, draw)
            moments.unpack_plain(moment, codes, scales, values)
            kept.copy_(values.view(kept.shape))


def check_twin(dtype: torch.dtype, kept: Any, settings: Settings, **wrap: Any) -> None:
    model, mine = wrapped(dtype, kept, settings, **wrap)
    theirs = Model(0, SHAPES, dtype).float()
    cls, options = settings
    plain = cls(theirs.parameters(), **options)  # type: ignore[call-arg]
    counts = [0] * len(SHAPES)
    for step in range(8):
        fill(model, step, theirs)
        mine.step()
        plain.step()
        round_moments(plain, mine, counts)
        if step not in (0, 1, 7):
            continue
        shown = mine.state
        for p, q in zip(model.parameters(), theirs.parameters(), strict=True):
            master = master_of(p, shown[p])
            assert torch.equal(master, q.detach())
            assert torch.equal(p.detach(), rounded(master, dtype))
            for name, value in plain.state[q].items():
                assert torch.equal(shown[p][name].to(value.dtype), value), (step, name)
    mine.close()


@pytest.mark.parametrize(
    ("settings", "kept"),
    [(ADAMW, BF16), *zip(CLASSES, itertools.cycle(LOSSY[::-1]), strict=False)],
    ids=lambda v: v[0].__name__ if isinstance(v, tuple) else str(v),
)
def test_the_numbers_are_those_of_a_plain_optimizer_with_rounded_moments(
    settings: Settings, kept: Any
) -> None:
    if settings[0] is torch.optim.Adagrad and not makes_its_state(torch.optim.Adagrad):
        pytest.skip("this torch's Adagrad makes state at construction, rounded there")
    check_twin(FP32, kept, settings)


@pytest.mark.parametrize(
    ("kept", "dtype", "fraction"),
    [(BF16, BF16, 1.0), (BF16, FP16, 0.5), ("int8", FP16, 0.0), ("int8", BF16, 1.0)],
)
def test_masters_and_lanes(kept: Any, dtype: torch.dtype, fraction: float) -> None:
    check_twin(dtype, kept, ADAMW, offload_fraction=fraction)


@pytest.mark.parametrize("kept", LOSSY)
def test_random_bits_do_not_depend_on_buckets(kept: Any) -> None:
    outcomes = []
    for transfer in (SMALL, TransferConfig(bucket_bytes=1 << 20)):
        model, optimizer = wrapped(BF16, kept, transfer=transfer)
        for step in range(6):
            fill(model, step)
            optimizer.step()
        outcomes.append(all_bits(model, optimizer))
        assert (len(optimizer._updates.reserved.params[0].slices) > 1) == (transfer is SMALL)
    assert_same(*outcomes)


def all_bits(model: nn.Module, optimizer: HybridDeviceOptimizer) -> dict[str, Tensor]:
    """Weights, and everything that is kept, codes and scales included."""
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.synchronize()
    for record in optimizer._updates.reserved.params:
        for name, tensor in record.tensors.items():
            found[f"{record.fqn} {name}"] = tensor.clone()
        found[f"{record.fqn} step"] = record.slices[0].state["step"].clone()
    return found


def test_memory_is_what_it_says() -> None:
    sizes = {}
    for kept in (None, BF16, "int8"):
        _, optimizer = wrapped(BF16, kept)
        sizes[kept] = sum(
            t.numel() * t.itemsize
            for r in optimizer._updates.reserved.params
            for t in r.tensors.values()
        )
    model, _ = wrapped(BF16, None)
    numel = sum(p.numel() for p in model.parameters())
    assert sizes[None] == numel * 10
    assert sizes[BF16] == numel * 6
    blocks = sum(-(-p.numel() // 64) for p in model.parameters())
    assert sizes["int8"] == numel * 4 + blocks * 8


# --------------------------------------------------------------------------- what is kept


def test_int8_is_for_the_moments_of_adam_and_others_keep_their_dtype() -> None:
    model, optimizer = wrapped(FP32, "int8", (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}))
    fill(model, 0)
    optimizer.step()
    assert all(not record.moments for record in optimizer._updates.reserved.params)
    _, optimizer = wrapped(FP32, "int8", (torch.optim.AdamW, {"amsgrad": True}))
    dtypes = {k.name: k.dtype for k, _ in optimizer._updates.reserved.params[0].kinds}
    assert dtypes["exp_avg"] == torch.int8
    assert dtypes["max_exp_avg_sq"] == FP32


def test_where_the_update_is_not_in_fp32_nothing_changes() -> None:
    _, optimizer = wrapped(BF16, BF16, master_weights=False)
    assert all(not record.moments for record in optimizer._updates.reserved.params)


def test_the_host_lane_is_refused() -> None:
    with pytest.raises(ConfigError, match="updates on the CPU"):
        wrapped(BF16, BF16, update_on="host")


# --------------------------------------------------------------------------- saved and loaded


def trained(kept: Any, dtype: torch.dtype = BF16, steps: int = 5, **wrap: Any) -> Any:
    model, optimizer = wrapped(dtype, kept, **wrap)
    for step in range(steps):
        fill(model, step)
        optimizer.step()
    return model, optimizer


def go_on(model: nn.Module, optimizer: Optimizer) -> None:
    for step in range(5, 9):
        fill(model, step)
        optimizer.step()


def through_checkpoint(source: Any, target: Any, path: Path) -> None:
    save(path / "a", *source)
    load(path / "a", *target)


def through_dcp(source: Any, target: Any, path: Path) -> None:
    """torch's writer and reader, which loads in place."""
    saved, read = ({"m": m.state_dict(), "o": OptimizerState(m, o)} for m, o in (source, target))
    dcp.save(saved, checkpoint_id=path / "c", no_dist=True)
    dcp.load(read, checkpoint_id=path / "c", no_dist=True)


def through_helpers(source: Any, target: Any, _: Path) -> None:
    """torch's flattened optimizer state dict."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    target[0].load_state_dict(source[0].state_dict())
    found = get_optimizer_state_dict(*source, options=options)
    set_optimizer_state_dict(*target, copy.deepcopy(found), options=options)


@pytest.mark.parametrize(
    ("way", "kept", "fraction"),
    [
        (through_checkpoint, "int8", 1.0),
        (through_dcp, "int8", 0.0),
        (through_helpers, BF16, 0.5),
    ],
)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(
    way: Callable[..., None], kept: Any, fraction: float, tmp_path: Path
) -> None:
    source = trained(kept, offload_fraction=fraction)
    resumed = trained(kept, steps=2, offload_fraction=fraction)
    way(source, resumed, tmp_path)
    assert_same(all_bits(*source), all_bits(*resumed))
    for made in (source, resumed):
        go_on(*made)
    assert_same(all_bits(*source), all_bits(*resumed))


def test_values_written_into_shown_int8_state_are_taken_over() -> None:
    model, optimizer = trained("int8", FP32)
    weight = model.weights[0]
    shown = optimizer.state[weight]["exp_avg"]
    assert shown.shape == weight.shape
    assert shown.dtype == FP32
    shown.zero_()
    assert float(optimizer.state[weight]["exp_avg"].abs().sum()) == 0
    before = all_bits(model, optimizer)
    _ = optimizer.state  # reading alone changes nothing
    weight.grad = None
    optimizer.step()
    assert_same(
        {n: v for n, v in before.items() if "weights.0" in n},
        {n: v for n, v in all_bits(model, optimizer).items() if "weights.0" in n},
    )
    assert optimizer._updates.view.shown[weight]["exp_avg"].is_meta, (
        "copies are dropped with the next step"
    )


# --------------------------------------------------------------------------- the one kernel


class OnCpu:
    """Lets the CUDA kernel's plain form take the place of the class, on the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.at_once: set[int] = set()  # slices per launch
        kernel = one_kernel.OneKernelAdam
        monkeypatch.setattr(kernel, "is_for", staticmethod(self._fits))
        monkeypatch.setattr(one_kernel.AdamLaunch, "run", self._launched())
        self._moments: Sequence[Moment] = ()

    def _fits(self, inner: Optimizer, pieces: Any) -> bool:
        self._moments = pieces[0].param.moments
        names = {moment.name for moment in self._moments}
        return names in ({"exp_avg", "exp_avg_sq"}, set()) and len(pieces[0].state) == 3

    def _launched(self) -> Any:
        def run(
            launch: one_kernel.AdamLaunch, gradients: Any, updates: int, constants: Any
        ) -> None:
            self.calls += 1
            self.at_once.add(len(launch.operands))
            for operands, gradient in zip(launch.operands, gradients, strict=True):
                adam_plain(self._moments, operands, gradient, updates, constants)

        return run


@pytest.mark.parametrize(
    ("kept", "dtype", "decoupled"),
    [(None, BF16, True), (BF16, BF16, True), ("int8", BF16, False), ("int8", FP32, True)],
)
def test_the_kernel_of_all_in_one_follows_the_class(
    monkeypatch: pytest.MonkeyPatch, kept: Any, dtype: torch.dtype, decoupled: bool
) -> None:
    """To a rounding of fp32: torch's CPU kernel computes otherwise than its CUDA kernel. Then a
    moment may be one step of its format off."""
    decay = 0.1 if decoupled else 0.0
    options = {"lr": 0.01, "fused": True, "weight_decay": decay, "maximize": not decoupled}
    settings = (torch.optim.AdamW if decoupled else torch.optim.Adam, options)
    twin_model, by_class = trained(kept, dtype, settings=settings)
    with monkeypatch.context() as patch:
        twin = OnCpu(patch)
        model, at_once = wrapped(dtype, kept, settings)
        model.load_state_dict(twin_model.state_dict())
        at_once.load_state_dict(by_class.state_dict())
        fill(model, 6, twin_model)
        at_once.step()
        assert twin.calls > 5
    by_class.step()
    for a, b in zip(
        by_class._updates.reserved.params, at_once._updates.reserved.params, strict=True
    ):
        assert a.slices[0].stepped == b.slices[0].stepped
        assert a.slices[0].updates == b.slices[0].updates or kept is None
        assert torch.equal(a.slices[0].state["step"], b.slices[0].state["step"])
        x, y = (
            master_of(r.parameter, made.state[r.parameter])
            for r, made in ((a, by_class), (b, at_once))
        )
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-7)
        for moment in a.moments:
            codes = [r.tensors[moment.name] for r in (a, b)]
            words = [c.view(torch.int16) if kept == BF16 else c for c in codes]
            apart = (words[0].int() - words[1].int()).abs()
            assert int(apart.sum()) <= 0.005 * apart.numel()


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.AdamW, {"lr": torch.tensor(0.01)}),
        (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    ],
    ids=["in a tensor", "decay in the gradient"],
)
def test_hyper_parameters_that_are_left_to_the_class(
    monkeypatch: pytest.MonkeyPatch, cls: Any, options: dict[str, Any]
) -> None:
    twin = OnCpu(monkeypatch)
    trained(BF16, settings=(cls, {**options, "fused": True}))
    assert not twin.calls


@pytest.mark.parametrize("difference", ["none", "missing", "dtype", "updates"])
def test_slices_share_a_launch_where_they_differ_in_nothing(
    monkeypatch: pytest.MonkeyPatch, difference: str
) -> None:
    """Launches of two groups, and of slices one by one, give the same bits."""
    twin, found = OnCpu(monkeypatch), []
    for at_once in (8, 1):
        monkeypatch.setattr(one_kernel, "AT_ONCE", at_once)
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(n).to(BF16)) for n in (*[16] * 11, 0, 48, 48)]
        groups = [{"params": parameters[:10]}, {"params": parameters[10:], "weight_decay": 0.0}]
        inner = torch.optim.AdamW(groups, lr=0.01, fused=True)
        optimizer = HybridDeviceOptimizer(inner, moments=BF16, update_on="device")
        for step in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            if difference == "missing" or (difference == "updates" and step == 0):
                parameters[2].grad = None
            if difference == "dtype":
                parameters[2].grad = None
                parameters[2].grad_dtype = None  # type: ignore[attr-defined]
                parameters[2].grad = torch.randn(16)
            twin.at_once.clear()
            optimizer.step()
            expected = {8, 2, 3} if difference == "none" and at_once == 8 else {1}
            assert twin.at_once == expected
        assert float(optimizer.state[parameters[11]]["step"]) == 3
        found.append([p.detach().clone() for p in parameters])
        optimizer.close()
    assert all(map(torch.equal, *found))


def test_no_room_for_scratch_memory_updates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    OnCpu(monkeypatch)
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(n).to(BF16)) for n in (700, 300)]
        played = FakeFsdp(backend_for(torch.device("cpu")), [[p] for p in parameters])
        inner = torch.optim.AdamW(parameters, lr=0.01, fused=True)
        optimizer = played.wrap(inner, overlap="backward", transfer=SMALL, moments=BF16)
        made.append((played, parameters, optimizer))

    def iterate(played: FakeFsdp, optimizer: HybridDeviceOptimizer, step: int) -> None:
        played.forward()
        played.backward(step)
        optimizer.step()
        optimizer.zero_grad()

    (first, parameters, optimizer), (_, others, twin) = made
    for step in range(2):
        for played, _, each in made:
            iterate(played, each, step)
    expected = [p.detach().clone() for p in parameters]
    monkeypatch.setattr(one_kernel.AdamConstants, "of", lambda *args: None)  # the class updates

    def full(scratch: Scratch) -> None:
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patch:
        patch.setattr(Scratch, "fill", full)
        with pytest.raises(DeviceMemoryError, match="scratch"):
            iterate(first, optimizer, 2)
    assert all(map(torch.equal, parameters, expected))
    optimizer.zero_grad()
    for step in range(2, 4):
        for played, _, each in made:
            iterate(played, each, step)
    for each in (optimizer, twin):
        each.synchronize()
    assert all(map(torch.equal, parameters, others))


# --------------------------------------------------------------------------- ranks


def resume_on_ranks(path: Path) -> None:
    """Save and load on the same ranks: shards that end within a block, or are empty."""
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = models.toy(models.flat_mesh(2))
        inner = torch.optim.AdamW(models.groups(model), fused=True)
        made.append((model, HybridDeviceOptimizer(inner, model=model, moments="int8")))
    steps = [models.tape(2)[step] for step in range(4)]

    def play(job: Any, step: int) -> None:
        models.play(job[0], steps[step])
        job[1].step()

    for step in (0, 1):
        play(made[0], step)
    play(made[1], 3)
    save(path, *made[0])
    load(path, *made[1])
    for step in (2, 3):
        for job in made:
            play(job, step)
    found, expected = (all_bits(*job) for job in reversed(made))
    for name, value in expected.items():
        same = torch.equal(models.local(value), models.local(found[name]))
        models.check(same, f"{name} differs after a resume")
    for _, optimizer in made:
        optimizer.close()


def test_ranks_resume_with_the_same_bits(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(resume_on_ranks, tmp_path / "a")


def check_origins(shape: tuple[int, ...]) -> None:
    """Weights that hold their own index in the whole tensor tell where a shard begins."""
    model = models.toy(models.mesh(shape, ("replica", "shard")[-len(shape) :]))
    with torch.no_grad():
        for parameter in model.parameters():
            whole = torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape)
            cut = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
            models.local(parameter).copy_(models.local(cut))
    optimizer = HybridDeviceOptimizer(
        torch.optim.AdamW(model.parameters()), model=model, moments=BF16
    )
    for record in optimizer._updates.reserved.params:
        shard = models.local(record.parameter).flatten()
        if shard.numel():
            models.check(record.origin == int(shard[0]), f"{record.fqn}: {record.origin}")
            models.check(record.seed == rng_key.seed_of(record.fqn), record.fqn)
    optimizer.close()


@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)], ids=str)
def test_shards_know_where_they_begin(ranks: Ranks, shape: tuple[int, ...]) -> None:
    """So random bits depend neither on the number of ranks nor on the replica."""
    ranks(math.prod(shape)).run(check_origins, shape)
