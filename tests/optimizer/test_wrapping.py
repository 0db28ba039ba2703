"""What is wrapped, with what, and when: mistakes are refused, and changes before the first step are
followed."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import weakref
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from fsdp_offload import (
    AwayError,
    ClosedError,
    ConfigError,
    HybridDeviceOptimizer,
    PhaseOffloader,
    StateSchemaError,
    TransferConfig,
    checkpoint,
)
from fsdp_offload.optimizer import wrapping
from tests.away import optimizer_alone
from tests.fsdp import models
from tests.fsdp.models import Ranks, check
from tests.helpers.compare import bits
from tests.helpers.own_optimizers import Own
from tests.helpers.training import assert_explains as explained

SMALL = TransferConfig(bucket_bytes="4KiB", host_threads=1)


def make(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 4))


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(parameters: Any, optimizer: Any, steps: range = range(2)) -> None:
    held = list(parameters)
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in held:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


# --------------------------------------------------------------------------- arguments


def test_the_model_may_be_the_second_argument(caplog: pytest.LogCaptureFixture) -> None:
    model = make()
    with caplog.at_level(logging.WARNING, "fsdp_offload"):
        optimizer = HybridDeviceOptimizer(adamw(model), model)
    assert [r.fqn for r in optimizer._updates.reserved.params] == [
        name for name, _ in model.named_parameters()
    ]
    assert caplog.messages == []
    optimizer.close()


def test_a_model_left_out_is_worth_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = make()
    with caplog.at_level(logging.WARNING, "fsdp_offload"):
        optimizer = HybridDeviceOptimizer(adamw(model))
        train(model.parameters(), optimizer)
    assert len(caplog.messages) == 1
    for word in ("model=", "names", "overlap", "loads"):
        assert word in caplog.messages[0]
    optimizer.close()


def wrong_models() -> None:
    mesh = models.flat_mesh(2)
    sharded, other = fully_shard(make(), mesh=mesh), fully_shard(make(1), mesh=mesh)
    for optimizer, model, word in (
        (adamw(make()), sharded, r"replaced the parameters.*call fsdp_offload.shard\(model\) or"),
        (adamw(other), sharded, "another module"),
    ):
        with pytest.raises(ConfigError, match=word):
            HybridDeviceOptimizer(optimizer, model)


def test_sharded_models_that_are_others_are_told_from_those_sharded_too_late(ranks: Ranks) -> None:
    ranks(2).run(wrong_models)


# --------------------------------------------------------------------------- nothing to update


def test_a_first_step_without_any_gradient_does_nothing(caplog: pytest.LogCaptureFixture) -> None:
    for given in (True, False):
        model, plain = make(), make()
        optimizer = HybridDeviceOptimizer(adamw(model), model if given else None)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "fsdp_offload"):
            optimizer.step()
            optimizer.step()
        (warning,) = caplog.messages
        assert "updates none of 4 parameters" in warning
        assert ("fully_shard" in warning) is not given
        reference = adamw(plain)
        train(model.parameters(), optimizer)
        train(plain.parameters(), reference)
        optimizer.zero_grad()
        optimizer.step()
        assert all(map(torch.equal, model.parameters(), plain.parameters()))
        steps = [state["step"] for state in optimizer.state.values()]
        assert steps == [state["step"] for state in reference.state.values()]
        optimizer.close()


def shard_after_wrapping(part: bool) -> None:
    model = make()
    optimizer = HybridDeviceOptimizer(adamw(model), model)
    fully_shard(model[0] if part else model, mesh=models.flat_mesh(2))
    if part:
        for p in model[1].parameters():
            p.grad = torch.ones_like(p)
    else:
        model(torch.ones(3, 20)).sum().backward()
    before = [bits(p).clone() for p in model.parameters()]
    with pytest.raises(ConfigError) as caught:
        optimizer.step()
    for word in (
        "call fsdp_offload.shard(model) or fully_shard",
        "0.weight",
        "then build the optimizer",
    ):
        check(word in str(caught.value), str(caught.value))
    after = [bits(p) for p in model.parameters()]
    check(all(map(torch.equal, before, after)), "something was updated")


@pytest.mark.parametrize("part", [False, True])
def test_fully_shard_after_wrapping_is_noticed_at_the_first_step(ranks: Ranks, part: bool) -> None:
    ranks(2).run(shard_after_wrapping, part)


def one_has_nothing() -> None:
    """Rank 1 holds nothing of the only parameter, and says nothing."""
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(3, 1, bias=False), mesh=models.flat_mesh(2))
    optimizer = HybridDeviceOptimizer(adamw(model), model)
    with mock.patch.object(wrapping, "warn") as warning:
        optimizer.step()
    check(warning.called == (models.local(model.weight).numel() > 0), "an empty shard is no sign")
    optimizer.close()


def test_empty_shards_are_no_evidence(ranks: Ranks) -> None:
    ranks(2).run(one_has_nothing)


# --------------------------------------------------------------------------- groups in place


def twins(lane: str, *, groups: bool = False) -> tuple[Any, Any, Any, Any]:
    plain, mine = make(), make()

    def build(model: Any) -> Optimizer:
        given: Any = model.parameters()
        if groups:
            given = [
                {"params": list(model[0].parameters())},
                {"params": list(model[1].parameters()), "lr": 0.5},
            ]
        return torch.optim.SGD(given, lr=0.1, momentum=0.9, fused=True)

    reference = build(plain)
    optimizer = HybridDeviceOptimizer(build(mine), mine, update_on=lane, transfer=SMALL)
    return plain, reference, mine, optimizer


def replaced(model: Any, optimizer: Any) -> None:
    """What Accelerate does: other parameters under the same names, swapped into the groups."""
    new = {}
    for module in model:
        for name, p in list(module.named_parameters()):
            new[id(p)] = nn.Parameter(p.detach().clone())
            setattr(module, name, new[id(p)])
    for group in optimizer.param_groups:
        group["params"] = [new[id(p)] for p in group["params"]]


def removed(model: Any, optimizer: Any) -> None:
    del optimizer.param_groups[0]["params"][1]


def moved(model: Any, optimizer: Any) -> None:
    groups = optimizer.param_groups
    groups[1]["params"].append(groups[0]["params"].pop())


def reordered(model: Any, optimizer: Any) -> None:
    optimizer.param_groups.reverse()


def deleted(model: Any, optimizer: Any) -> None:
    del optimizer.param_groups[0]


EDITS = [replaced, removed, moved, reordered, deleted]
each_edit = pytest.mark.parametrize("edit", EDITS, ids=lambda f: f.__name__)


@pytest.mark.parametrize(
    ("edit", "lane"),
    [*((edit, "device") for edit in EDITS), (replaced, "host"), (reordered, "host")],
)
def test_groups_changed_before_the_first_step_are_followed(
    edit: Callable[[Any, Any], None], lane: str
) -> None:
    plain, reference, mine, optimizer = twins(lane, groups=True)
    optimizer.state_dict()  # Accelerate's wrapper takes one
    old = [weakref.ref(p) for p in mine.parameters()]
    for model, each in ((plain, reference), (mine, optimizer)):
        edit(model, each)
        train(model.parameters(), each, range(4))
    for a, b in zip(plain.parameters(), mine.parameters(), strict=True):
        assert torch.equal(a, b)
    names = {p: name for name, p in mine.named_parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert {record.parameter: record.fqn for record in optimizer._updates.reserved.params} == {
        p: names[p] for p in held
    }
    saved, expected = optimizer.state_dict(), reference.state_dict()
    assert saved["state"].keys() == expected["state"].keys()
    for key, state in expected["state"].items():
        assert torch.equal(saved["state"][key]["momentum_buffer"], state["momentum_buffer"])
    if edit is replaced:
        gc.collect()
        assert [p() for p in old] == [None] * 4, "the old parameters are freed"
    n_bytes = sum(p.numel() * 4 for p in held)
    # In the host lane there are slots for weights and gradients.
    assert n_bytes <= optimizer.statistics().host_arena_bytes <= 4 * n_bytes + 100_000
    optimizer.close()


@pytest.mark.parametrize("lane", ["device", "host"])
def test_groups_changed_after_a_step_without_gradients_are_followed(lane: str) -> None:
    plain, reference, mine, optimizer = twins(lane, groups=True)
    for model, each in ((plain, reference), (mine, optimizer)):
        each.step()
        replaced(model, each)
        train(model.parameters(), each, range(4))
    for a, b in zip(plain.parameters(), mine.parameters(), strict=True):
        assert torch.equal(a, b)
    optimizer.close()


@each_edit
def test_groups_changed_after_a_step_are_refused_and_can_be_put_back(
    edit: Callable[[Any, Any], None],
) -> None:
    plain, reference, mine, optimizer = twins("device", groups=True)
    for model, each in ((plain, reference), (mine, optimizer)):
        train(model.parameters(), each)
    groups = list(optimizer.param_groups)
    before = [list(group["params"]) for group in groups]
    values = [p.detach().clone() for p in mine.parameters()]
    edit(copy.deepcopy(mine) if edit is not replaced else mine, optimizer)
    for use in (optimizer.step, optimizer.state_dict, lambda: optimizer.state):
        with pytest.raises(StateSchemaError) as caught:
            use()
        explained(caught.value, "param_groups", "requires_grad_(False)")
    optimizer.param_groups[:] = groups
    for group, params in zip(groups, before, strict=True):
        group["params"] = params
    held = [p for params in before for p in params]
    assert all(torch.equal(p, v) for p, v in zip(held, values, strict=True))
    for parameters, each in ((plain.parameters(), reference), (held, optimizer)):
        train(parameters, each, range(2, 4))
    for a, b in zip(plain.parameters(), held, strict=True):
        assert torch.equal(a, b)
    optimizer.close()


@each_edit
def test_groups_changed_after_a_load_are_refused(edit: Callable[[Any, Any], None]) -> None:
    plain, reference, mine, optimizer = twins("host", groups=True)
    train(plain.parameters(), reference)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    edit(mine, optimizer)
    with pytest.raises(StateSchemaError) as caught:
        train(mine.parameters(), optimizer)
    explained(caught.value, "param_groups", "requires_grad_(False)")
    optimizer.close()


def test_groups_changed_while_the_state_is_away_wait_for_it() -> None:
    _, _, mine, optimizer = twins("device", groups=True)
    phases = optimizer_alone(optimizer)
    phases.offload()
    moved(mine, optimizer)
    with pytest.raises(AwayError):
        optimizer.state_dict()
    phases.reload()
    train(mine.parameters(), optimizer)
    optimizer.close()


def test_parameters_and_groups_appended_by_hand_are_trained() -> None:
    plain, mine = make(), make()
    reference, optimizer = adamw(plain), HybridDeviceOptimizer(adamw(mine), mine)
    extra = [[nn.Parameter(torch.ones(70)) for _ in "ab"] for _ in "ab"]
    for model, each, (first, second) in zip(
        (plain, mine), (reference, optimizer), extra, strict=True
    ):
        train(model.parameters(), each)
        each.param_groups[0]["params"].append(first)
        each.param_groups.append({**each.param_groups[0], "params": [second]})
        train([*model.parameters(), first, second], each, range(2, 4))
    for pair in zip(*extra, strict=True):
        assert torch.equal(*pair)
        assert not torch.equal(pair[0], torch.ones(70))
    optimizer.close()


@pytest.mark.parametrize("on_wrapper", [True, False])
def test_another_list_of_groups_is_followed(on_wrapper: bool) -> None:
    plain, reference, mine, optimizer = twins("device")
    for each in (reference, optimizer if on_wrapper else optimizer._wrapped):
        each.param_groups = [{**group, "lr": 0.5} for group in each.param_groups]
    for model, each in ((plain, reference), (mine, optimizer)):
        train(model.parameters(), each)
    assert optimizer.param_groups is optimizer._wrapped.param_groups
    assert all(map(torch.equal, plain.parameters(), mine.parameters()))
    optimizer.close()


def swap_after_fully_shard() -> None:
    """Accelerate: wrapped before prepare(), which shards the model and swaps parameters. The choice
    of overlap is made anew."""
    mesh = models.flat_mesh(2)
    plain, mine = fully_shard(make(), mesh=mesh), make()
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01, fused=True)
    inner = torch.optim.AdamW(mine.parameters(), lr=0.01, fused=True)
    optimizer = HybridDeviceOptimizer(inner, mine, transfer=SMALL)
    check(optimizer.statistics().overlap == "step", "before")
    optimizer.load_state_dict(optimizer.state_dict())
    names = {id(p): name for name, p in mine.named_parameters()}
    fully_shard(mine, mesh=mesh)
    now = dict(mine.named_parameters())
    for group in inner.param_groups:
        group["params"] = [now[names[id(p)]] for p in group["params"]]
    for step in range(3):
        for model, each in ((plain, reference), (mine, optimizer)):
            model(torch.full((3, 20), 1.0 + step)).sum().backward()
            each.step()
            each.zero_grad()
    check(optimizer.statistics().overlap == "forward", "afterwards")
    for (name, a), b in zip(plain.named_parameters(), mine.parameters(), strict=True):
        models.check_same(models.local(a), models.local(b), name)
    check([r.fqn for r in optimizer._updates.reserved.params] == list(now), "names are the model's")
    held = sum(models.local(p).numel() for p in mine.parameters())
    check(
        sum(r.info.local_numel for r in optimizer._updates.reserved.params) == held,
        "only this rank's shards",
    )
    check(len(optimizer.state_dict()["state"]) == 4, "state_dict() works")
    optimizer.close()


def test_parameters_that_fully_shard_replaces_in_the_groups_are_followed(ranks: Ranks) -> None:
    ranks(2).run(swap_after_fully_shard)


# --------------------------------------------------------------------------- other optimizers


class Facade(Optimizer):
    """In the manner of Accelerate's."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)


class Forwards:
    """In the manner of Lightning's."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


@pytest.mark.parametrize(("facade", "name"), [(Facade, "optimizer"), (Forwards, "_optimizer")])
def test_a_facade_is_refused_with_the_line_that_works(facade: Any, name: str) -> None:
    model = make()
    optimizer = facade(adamw(model))
    with pytest.raises(ConfigError) as caught:
        HybridDeviceOptimizer(optimizer, model)
    line = f"optimizer.{name} = HybridDeviceOptimizer(optimizer.{name}, model)"
    explained(caught.value, facade.__name__, "AdamW", line)
    exec(
        line,
        {"HybridDeviceOptimizer": HybridDeviceOptimizer},
        {"optimizer": optimizer, "model": model},
    )
    train(model.parameters(), optimizer)
    wrapper = getattr(optimizer, name)
    assert wrapper.statistics().steps == 2
    with pytest.raises(ConfigError, match="wrapped already"):
        HybridDeviceOptimizer(optimizer, model)
    wrapper.close()


OWN_STEPS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.01),
}


@pytest.mark.parametrize("kind", OWN_STEPS)
def test_a_step_method_that_was_kept_from_before_wrapping_is_the_wrappers(kind: str) -> None:
    def matrices(model: nn.Module) -> list[Any]:
        return [p for p in model.parameters() if p.ndim == 2]

    plain, mine = make(), make()
    reference, inner = OWN_STEPS[kind](matrices(plain)), OWN_STEPS[kind](matrices(mine))
    called: list[str] = []
    for each in (reference, inner):
        each.register_step_pre_hook(lambda *_: called.append("before"))
    kept = inner.step
    optimizer = HybridDeviceOptimizer(inner, mine)
    for each in (reference, optimizer):
        each.register_step_pre_hook(lambda *_: called.append("late"))
        each.register_step_post_hook(lambda *_: called.append("after"))
    for step in range(4):
        for model in (plain, mine):
            for p in matrices(model):
                p.grad = torch.full_like(p, 0.5 + step)
        reference.step()
        expected = called.copy()
        called.clear()
        (kept, inner.step, optimizer.step)[step % 3]()
        assert called == expected == ["before", "late", "after"]
        called.clear()
    assert optimizer.statistics().steps == 4
    for a, b in zip(matrices(plain), matrices(mine), strict=True):
        assert torch.equal(a, b)
    assert reference.state[plain[0].weight].keys() <= inner.state[mine[0].weight].keys()
    optimizer.close()
    with pytest.raises(ClosedError):
        kept()


# --------------------------------------------------------------------------- both names


class Scaled(Own):
    """Momentum, whose attribute says how much of it counts; a method reads the state."""

    scale = 1.0

    def __init__(self, params: Any, **changed: Any) -> None:
        super().__init__(params, **changed)
        self.scale = 1.0

    def update(self, p: Any, g: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["momentum"] = torch.zeros_like(p)
        p.sub_(state["momentum"].mul_(0.9).add_(g), alpha=group["lr"] * self.scale)

    def total(self) -> float:
        return sum(float(state["momentum"].sum()) for state in self.state.values())


OPTIMIZERS = {
    "streamed": (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), {}),
    "host": (
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
        {"update_on": "host"},
    ),
    "elementwise": (Scaled, {"elementwise": True}),
    "own step": (Scaled, {}),
}
each_kind = pytest.mark.parametrize("kind", OPTIMIZERS)


def of_kind(kind: str) -> tuple[Any, Any, Any, Any]:
    """A plain model and optimizer, and a model and the optimizer's two names."""
    build, options = OPTIMIZERS[kind]
    plain, mine = make(), make()
    wrapped: Any = build(mine.parameters())
    HybridDeviceOptimizer(wrapped, mine, transfer=SMALL, **options)
    return plain, build(plain.parameters()), mine, wrapped


def same_state(reference: Optimizer, optimizer: Optimizer) -> bool:
    found = [[*state.items()] for state in optimizer.state.values()]
    expected = [[*state.items()] for state in reference.state.values()]
    return str(found) == str(expected)


@each_kind
def test_the_wrapped_optimizer_shows_what_the_wrapper_has(kind: str) -> None:
    plain, reference, mine, wrapped = of_kind(kind)
    wrapper = wrapped._for_checkpoints.optimizer
    assert isinstance(wrapped, type(reference))
    assert type(wrapped).__name__ == type(reference).__name__
    for first in (0, 2, 4):
        train(plain.parameters(), reference, range(first, first + 2))
        train(mine.parameters(), (wrapped, wrapper)[first == 2], range(first, first + 2))
        assert same_state(reference, wrapped)
        assert wrapped.state is wrapper.state
        assert repr(wrapped.state_dict()) == repr(reference.state_dict())
        for state in (*wrapped.state.values(), *reference.state.values()):
            next(iter(state.values())).mul_(0.5)  # by either name
        with PhaseOffloader(mine, wrapped, grads="save").away():
            assert same_state(reference, wrapped)
        saved = reference.state_dict()
        for each in (reference, wrapped):
            each.load_state_dict(copy.deepcopy(saved))
            assert same_state(reference, each)
    train(plain.parameters(), reference)
    train(mine.parameters(), wrapped)
    assert all(map(torch.equal, plain.parameters(), mine.parameters()))
    for name in ("param_groups", "defaults"):
        setattr(wrapper, name, copy.copy(getattr(wrapper, name)))
        assert getattr(wrapper, name) is getattr(wrapped, name)
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(ConfigError, match=r"save state_dict\(\)"):
            duplicate(wrapped)
    with pytest.raises(AttributeError, match=type(reference).__name__):
        wrapped.no_such_name  # noqa: B018
    wrapped.close()
    with pytest.raises(ClosedError):
        wrapped.state  # noqa: B018


@pytest.mark.parametrize("kind", ["elementwise", "own step"])
@pytest.mark.parametrize("on_wrapper", [True, False])
def test_attributes_and_methods_of_the_class_are_those_of_both_names(
    kind: str, on_wrapper: bool
) -> None:
    plain, reference, mine, wrapped = of_kind(kind)
    each = wrapped._for_checkpoints.optimizer if on_wrapper else wrapped
    for steps, scale in ((range(2), 0.5), (range(2, 4), 0.25)):
        reference.scale = each.scale = scale
        train(plain.parameters(), reference, steps)
        train(mine.parameters(), wrapped, steps)
        assert each.total() == reference.total()
        assert each.scale == scale
    assert all(map(torch.equal, plain.parameters(), mine.parameters()))
    wrapped.close()
    with pytest.raises(ClosedError):  # the class's code reads what the wrapper shows
        each.total()


@each_kind
@pytest.mark.parametrize("on_wrapper", [True, False])
def test_another_dict_of_state_is_taken_or_refused_with_what_works(
    kind: str, on_wrapper: bool
) -> None:
    plain, reference, mine, wrapped = of_kind(kind)
    optimizer = wrapped._for_checkpoints.optimizer if on_wrapper else wrapped
    for steps in (range(2), range(2, 4)):
        reference.state = defaultdict(dict)
        if kind == "own step":
            optimizer.state = defaultdict(dict)
        else:
            with pytest.raises(ConfigError) as caught:
                optimizer.state = defaultdict(dict)
            explained(caught.value, "optimizer.state.clear()")
            optimizer.state.clear()  # as the message says
        train(plain.parameters(), reference, steps)
        train(mine.parameters(), optimizer, steps)
        assert same_state(reference, wrapped)
        assert all(map(torch.equal, plain.parameters(), mine.parameters()))
    wrapped.close()


def test_a_load_method_that_was_kept_from_before_wrapping_is_refused() -> None:
    model = make()
    inner = adamw(model)
    saved, kept = copy.deepcopy(inner.state_dict()), inner.load_state_dict
    optimizer = HybridDeviceOptimizer(inner, model)
    train(model.parameters(), optimizer)
    with pytest.raises(ConfigError, match=r"load_state_dict\(\)"):
        kept(saved)
    train(model.parameters(), inner)
    assert inner.state[model[0].bias]["step"] == 4
    optimizer.close()


@pytest.mark.parametrize("name", ["grad_scale", "found_inf"])
@pytest.mark.parametrize("kind", ["streamed", "elementwise"])
def test_a_scale_that_a_fused_step_would_apply_is_refused_with_what_works(
    kind: str, name: str
) -> None:
    _, _, mine, wrapped = of_kind(kind)
    optimizer = wrapped._for_checkpoints.optimizer
    assert not getattr(optimizer, "_step_supports_amp_scaling", False)
    assert not wrapped._step_supports_amp_scaling
    setattr(optimizer, name, torch.ones(()))
    before = [bits(p).clone() for p in mine.parameters()]
    with pytest.raises(ConfigError) as caught:
        train(mine.parameters(), wrapped)
    explained(caught.value, name, "set both to None", "unscale_")
    assert all(map(torch.equal, before, [bits(p) for p in mine.parameters()]))
    wrapped.grad_scale = wrapped.found_inf = None
    train(mine.parameters(), optimizer)
    wrapped.close()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_of_the_wrapped_optimizer_have_the_masters(tmp_path: Path) -> None:
    model = make().to(torch.bfloat16)
    wrapped = adamw(model)
    optimizer = HybridDeviceOptimizer(wrapped, model)
    train(model.parameters(), optimizer)
    expected = copy.deepcopy(optimizer.state_dict())
    checkpoint.save(tmp_path / "one", model, wrapped)
    train(model.parameters(), optimizer)
    checkpoint.load(tmp_path / "one", model, wrapped)
    assert repr(optimizer.state_dict()) == repr(expected)
    assert "master_remainder" in expected["state"][0]
    optimizer.close()
