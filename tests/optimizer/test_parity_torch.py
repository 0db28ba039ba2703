"""Every dense optimizer of ``torch.optim`` gives the bits that it gives unwrapped.

One process, CPU tensors. Each run takes ten steps with two changes of lr, two groups with
different hyper-parameters, gradients that are missing in some steps or come late, one parameter
that never gets any, one empty and one 0-dim parameter, and buckets so small that parameters are
cut; parameters and state are compared after 1, 2 and 10 steps. What is rotated in the normal run
is multiplied out in the test marked ``long``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_offload import TransferConfig
from tests.helpers.compare import bits
from tests.helpers.lanes import in_lanes
from tests.helpers.optimizer_table import (
    ELEMENTWISE,
    FUSED,
    SETTINGS,
    Setting,
    settings,
)
from tests.helpers.side_by_side import MATRICES, SHAPES, SMALL, Apart, Build, SideBySide

LANES = ("resident", "streamed", "host")
LARGER = ((130, 70), *SHAPES[1:])
"""For the host lane, whose buckets hold six times as much."""
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def build(setting: Setting, **changed: Any) -> Build:
    """Builds the setting; the second group has another lr and weight decay."""

    def make(groups: list[dict[str, Any]]) -> Optimizer:
        optimizer = setting.build(groups, **changed)
        for group in optimizer.param_groups[1:]:
            group["lr"] = group["lr"] * 3
            if "weight_decay" in group:
                group["weight_decay"] = 0.03
        return optimizer

    return make


def reference(setting: Setting, *, on_host: bool = False) -> Build:
    """The plain optimizer that the wrapped one must equal: on the host lane torch's fused CPU
    kernel where the class has one and the user left the choice open."""
    fused = on_host and setting.implementation == "open" and setting.name in FUSED
    made = build(setting, fused=True) if fused else build(setting)
    if setting.name == "SGD" and (fused or setting.implementation == "fused"):
        return partial(Apart, made)
    return made


def shapes_for(setting: Setting, shapes: Any = SHAPES) -> Any:
    if setting.name == "Muon":
        return MATRICES
    return shapes if setting.takes_empty else [shape for shape in shapes if 0 not in shape]


def has_lane(setting: Setting, lane: str) -> bool:
    if setting.name == "Adafactor":  # keeps its state itself
        return lane == "resident"
    return lane != "host" or setting.name in ELEMENTWISE


def check(
    setting: Setting, lane: str, dtype: torch.dtype, transfer: TransferConfig = SMALL
) -> None:
    """In fp32 the plain optimizer's bits; in half precision those of it over fp32 masters."""
    on_host, is_half = lane == "host", dtype in (BF16, FP16)
    shapes = shapes_for(setting, LARGER if on_host else SHAPES)
    twins = SideBySide(
        build(setting),
        plain_build=reference(setting, on_host=on_host),
        shapes=shapes,
        dtypes=[dtype],
        plain_dtypes=[FP32 if is_half else dtype],
        update_on=[lane],
        transfer=transfer,
    )
    assert twins.lanes() == {"native" if setting.name == "Adafactor" else lane}
    twins.run()
    names = {name for p in twins.mine for name in twins.wrapped.state[p]}
    assert ("master_remainder" in names) == (dtype == BF16)
    assert ("master" in names) == (dtype == FP16)


def thin() -> Iterator[tuple[Setting, str, torch.dtype]]:
    """Each class in each lane in fp32 and in bf16 or fp16, each implementation of it, and state
    that is there with some options alone; other options run as groups of one optimizer, see below.
    """
    halves = itertools.cycle((BF16, FP16))
    for name in sorted(SETTINGS):
        cases = settings("open", "for-loop", "foreach", "fused", names=[name])
        last = {case.implementation: case for case in cases}
        turn = itertools.cycle(last.values())
        for lane, dtype in ((lane, each) for lane in LANES for each in (FP32, next(halves))):
            if has_lane(case := next(turn), lane) and (name != "Adafactor" or dtype == FP32):
                yield case, lane, dtype
        other = {"momentum", "centered", "amsgrad", "initial_accumulator_value"}
        some = [c for c in cases if c.implementation == "open" and other & c.kwargs.keys()]
        for case, lane in zip(some, itertools.cycle(LANES[1:]), strict=False):
            yield case, lane, FP32


@pytest.mark.parametrize(
    ("setting", "lane", "dtype"),
    [pytest.param(*case, id="-".join(map(str, case))) for case in thin()],
)
def test_every_class_in_every_lane(setting: Setting, lane: str, dtype: torch.dtype) -> None:
    check(setting, lane, dtype)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("setting", settings("open", "for-loop", "foreach", "fused"), ids=str)
def test_every_setting_in_every_lane(setting: Setting, lane: str, dtype: torch.dtype) -> None:
    if has_lane(setting, lane) and (setting.name != "Adafactor" or dtype == FP32):
        for size in ("4KiB", "1MiB") if dtype == FP32 else ("4KiB",):
            transfer = TransferConfig(bucket_bytes=size, host_threads=2)
            check(setting, lane, dtype, transfer)


@pytest.mark.parametrize(
    "lanes", ["mixed", *(pytest.param(lane, marks=pytest.mark.long) for lane in LANES)]
)
@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
def test_one_optimizer_with_all_settings_of_its_class_as_groups(name: str, lanes: str) -> None:
    """Neighbours in a bucket differ in hyper-parameters and in which state they have."""

    def make(groups: list[dict[str, Any]]) -> Optimizer:
        parameters = [p for group in groups for p in group["params"]]
        own = [
            Setting(name, "for-loop", kwargs)
            for kwargs in SETTINGS[name]
            if "initial_accumulator_value" not in kwargs  # one value per optimizer
        ]
        built = [s.build([p]) for s, p in zip(itertools.cycle(own), parameters, strict=False)]
        together = built[0]
        for each in built[1:]:
            together.add_param_group(each.param_groups[0])
            together.state.update(each.state)
        return together

    shapes = [(3 + 7 * i, 40) for i in range(len(SETTINGS[name]) + 3)]
    given = (
        [LANES[i % 3] for i in range(len(shapes))] if lanes == "mixed" else [lanes] * len(shapes)
    )
    twins = SideBySide(make, shapes=shapes, update_on=given)
    assert twins.lanes() == set(given)
    twins.run()


# --------------------------------------------------------------------------- half precision


@pytest.mark.parametrize(
    ("name", "dtype", "lane"),
    [(name, (BF16, FP16)[i % 2], LANES[i % 3]) for i, name in enumerate(sorted(ELEMENTWISE))],
)
def test_without_masters_half_precision_equals_plain_torch(
    name: str, dtype: torch.dtype, lane: str
) -> None:
    """The host lane keeps to the for-loop here: fused SGD skips elements of half precision."""
    setting = Setting(name, "open", SETTINGS[name][-1])
    twins = SideBySide(
        build(setting),
        shapes=LARGER if lane == "host" else SHAPES,
        dtypes=[dtype],
        update_on=[lane],
        master_weights=False,
    )
    twins.run()
    assert all(not {"master", "master_remainder"} & s.keys() for s in twins.wrapped.state.values())


@pytest.mark.parametrize("has_master", [True, False])
def test_adafactor_keeps_its_own_state_and_equals_plain_torch_in_bf16(has_master: bool) -> None:
    setting, shapes = Setting("Adafactor", "open", {}), shapes_for(Setting("Adafactor", "open", {}))
    SideBySide(build(setting), shapes=shapes, dtypes=[BF16], master_weights=has_master).run()


@pytest.mark.parametrize(
    ("dtype", "lane"), [(BF16, "streamed"), (FP16, "host"), (FP16, "resident")]
)
def test_masters_beyond_the_range_of_the_shard_are_kept(dtype: torch.dtype, lane: str) -> None:
    """The shard rounds to infinity, its master does not, and comes back with the next step."""
    limit = torch.finfo(dtype).max
    start = torch.full((100,), limit, dtype=dtype)
    parameter, plain = nn.Parameter(start.clone()), nn.Parameter(start.float())
    wrapped = in_lanes(torch.optim.SGD([parameter], lr=1.0), update_on=[lane])
    optimizer = torch.optim.SGD([plain], lr=1.0)
    # Half an ulp is 2^-9 (bf16) or 2^-12 (fp16) of the largest number.
    step = torch.tensor(limit) * (2.0**-8.5 if dtype == BF16 else 2.0**-11.5)
    seen = []
    for sign in (-1, 1):
        parameter.grad = torch.full_like(parameter, sign * step.item())
        plain.grad = parameter.grad.float()
        wrapped.step()
        optimizer.step()
        seen.append(bool(parameter.isinf().all()))
    assert seen == [True, False]
    assert torch.equal(parameter.float(), plain)


@pytest.mark.parametrize(("name", "turn"), [*zip(sorted(ELEMENTWISE), itertools.cycle(range(3)))])
def test_lanes_and_dtypes_mixed_in_one_optimizer(name: str, turn: int) -> None:
    """Every dtype in every lane, one step for all of them."""
    dtypes = (FP32, BF16, FP16, FP64)
    lanes = [LANES[(i + i // 12 + turn) % 3] for i in range(12)]
    twins = SideBySide(
        build(Setting(name, "for-loop", SETTINGS[name][-1])),
        shapes=[(5 + 3 * i, 30) for i in range(12)],
        dtypes=dtypes,
        plain_dtypes=(FP32, FP32, FP32, FP64),
        update_on=lanes,
    )
    assert twins.wrapped.statistics().parameters == dict.fromkeys(LANES, 4)
    twins.run()


@pytest.mark.parametrize(("name", "lane"), [*zip(("Adadelta", "Adam", "SGD"), LANES, strict=True)])
def test_complex_parameters(name: str, lane: str) -> None:
    setting = Setting(name, "for-loop", SETTINGS[name][-1])
    SideBySide(
        build(setting), shapes=[(40, 30), (9,), (3, 65)], dtypes=[torch.complex64],
        update_on=[lane],
    ).run()  # fmt: skip


# --------------------------------------------------------------------------- odd gradients


@pytest.mark.parametrize("lane", LANES)
def test_gradients_of_another_memory_layout(lane: str) -> None:
    mine, theirs = (nn.Parameter(torch.ones(40, 70)) for _ in range(2))
    wrapped = in_lanes(torch.optim.AdamW([mine], foreach=False), update_on=[lane], transfer=SMALL)
    plain = torch.optim.AdamW([theirs], foreach=False)
    for layout in ("transposed", "strided", "expanded"):
        if layout == "transposed":
            gradient = torch.randn(70, 40).t()
        elif layout == "strided":
            gradient = torch.randn(40, 140)[:, ::2]
        else:
            gradient = torch.randn(40, 1).expand(40, 70)
        mine.grad, theirs.grad = gradient, gradient.contiguous()
        wrapped.step()
        plain.step()
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("name", "dtype", "lane"),
    [
        ("AdamW", FP32, "host"),
        ("AdamW", BF16, "streamed"),
        ("SGD", FP16, "resident"),
        ("Adamax", BF16, "host"),
    ],
)
def test_nan_and_infinite_gradients_spoil_what_they_spoil_without_wrapping(
    name: str, dtype: torch.dtype, lane: str
) -> None:
    """Once NaN, a master stays NaN; its neighbours are exact."""
    setting = Setting(name, "for-loop", SETTINGS[name][-1])
    start = torch.randn(40, 70).to(dtype)
    mine, theirs = nn.Parameter(start.clone()), nn.Parameter(start.float())
    wrapped = in_lanes(setting.build([mine]), update_on=[lane], transfer=SMALL)
    plain = setting.build([theirs])
    for step in range(4):
        gradient = torch.randn(40, 70).to(dtype)
        if step == 1:
            gradient[3, 5], gradient[20, 0], gradient[39, 69] = torch.nan, torch.inf, -torch.inf
        mine.grad, theirs.grad = gradient, gradient.float()
        wrapped.step()
        plain.step()
        assert torch.equal(mine.isnan(), theirs.to(dtype).isnan())
    assert 1 <= int(mine.isnan().sum()) <= 3
    good = ~theirs.isnan()
    state = wrapped.state[mine]
    for key, value in plain.state[theirs].items():
        same = bits(state[key][good] if value.dim() else state[key])
        assert torch.equal(same, bits(value[good] if value.dim() else value))


@pytest.mark.parametrize(
    ("name", "implementation", "threads", "lane"),
    [
        ("AdamW", "fused", 3, "host"),
        ("AdamW", "foreach", 3, "streamed"),
        ("SGD", "fused", 1, "host"),
    ],
)
def test_large_parameters_on_several_threads(
    name: str, implementation: str, threads: int, lane: str
) -> None:
    """torch splits tensors of more than 32768 elements over threads."""
    torch.set_num_threads(threads)
    transfer = TransferConfig(bucket_bytes="256KiB", host_threads=2)
    setting = Setting(name, implementation, SETTINGS[name][-1])
    twins = SideBySide(
        build(setting),
        shapes=[(100_003,), (333, 301)],
        update_on=[lane],
        transfer=transfer,
    )
    for _ in range(2):
        twins.step([True, True])
    twins.compare()


# --------------------------------------------------------------------------- other promises


def test_every_dense_class_of_torch_is_in_the_table() -> None:
    dense = {c for c in vars(torch.optim).values() if isinstance(c, type) and c is not Optimizer}
    names = {c.__name__ for c in dense if issubclass(c, Optimizer)}
    assert names == set(SETTINGS) | {"LBFGS", "SparseAdam"}


def test_the_runs_cut_parameters_and_share_buckets() -> None:
    """What the runs above rely on."""
    twins = SideBySide(build(Setting("AdamW", "open", {})))
    pieces: dict[Tensor, int] = {}
    for record in twins.wrapped._updates.reserved.params:
        pieces[record.parameter] = len(record.slices)
    assert pieces[twins.mine[0]] > 4
    assert pieces[twins.mine[-1]] > 1
    assert twins.wrapped.statistics().buckets < sum(pieces.values())
