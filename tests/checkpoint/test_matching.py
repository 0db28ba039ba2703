"""Loads into jobs that differ from the one that was saved: what goes where, and what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.optim import Optimizer

from fsdp_offload import OptimizerState, checkpoint
from fsdp_offload.core.errors import CheckpointError, ConfigError, StateDictError
from tests.checkpoint.jobs import FLAT
from tests.checkpoint.test_loading import dcp_save
from tests.checkpoint.test_saving import Pair, layers, pair_of, step, values_of
from tests.fsdp import models
from tests.helpers.compare import assert_same

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]

# --------------------------------------------------------------------------- several names


class Ends(nn.Module):
    """Two matrices, which may be one."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(3000, 8), nn.Linear(8, 3000, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def ends(embed: float, head: float) -> Pair:
    """Not tied, after a step that leaves each weight the same in all elements."""
    pair = pair_of(Ends(tied=False))
    with torch.no_grad():
        for parameter, value in zip(pair[0].parameters(), (embed, head), strict=True):
            parameter.fill_(value)
    return pair


def by_torch(pair: Pair, path: Path) -> None:
    state = get_optimizer_state_dict(*pair, options=FLAT)
    dcp_save({"model": get_model_state_dict(pair[0]), "optim": state}, path)


def by_us(pair: Pair, path: Path) -> None:
    checkpoint.save(path, *pair)


@pytest.mark.parametrize("save", [by_us, by_torch])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tied_weights_take_equal_values_and_refuse_others(
    tmp_path: Path, save: Callable[[Pair, Path], None], dtype: torch.dtype
) -> None:
    tied = pair_of(Ends(tied=True).to(dtype))
    save(ends(1.0, 1.0), tmp_path / "same")
    save(ends(1.0, 2.0), tmp_path / "other")

    checkpoint.load(tmp_path / "same", *tied, threads=8)
    assert bool((tied[0].embed.weight == 1.0).all())
    before = values_of(tied)
    with pytest.raises(CheckpointError, match=r"embed\.weight and model\.head\.weight") as caught:
        checkpoint.load(tmp_path / "other", *tied, threads=8)
    assert "untie" in caught.value.remedy
    assert_same(values_of(tied), before)
    step(tied)


def test_state_of_tied_weights_that_differs_is_refused(tmp_path: Path) -> None:
    saved, tied = ends(1.0, 1.0), pair_of(Ends(tied=True))
    saved[1].state[saved[0].head.weight]["exp_avg"].fill_(3.0)
    checkpoint.save(tmp_path / "one", *saved)

    with pytest.raises(
        CheckpointError, match=r"embed\.weight\.exp_avg and .*head\.weight\.exp_avg"
    ):
        checkpoint.load(tmp_path / "one", *tied)
    with pytest.raises(StateDictError, match=r"embed\.weight\.exp_avg and .*head\.weight\.exp_avg"):
        OptimizerState(*tied).load_state_dict(OptimizerState(*saved).state_dict())


@pytest.mark.parametrize("name", ["embed", "head"])
@pytest.mark.parametrize("wrapped", [True, False])
def test_one_name_of_a_tied_weight_is_enough(tmp_path: Path, name: str, wrapped: bool) -> None:
    saved = ends(1.0, 2.0)
    keys = {
        key: value
        for part, state in (
            ("model", get_model_state_dict(saved[0])),
            ("optim", get_optimizer_state_dict(*saved, options=FLAT)),
        )
        for key, value in ((f"{part}.{key}", value) for key, value in state.items())
        if name in key
    }
    dcp_save(keys, tmp_path)
    model = Ends(tied=True)
    inner = torch.optim.AdamW(model.parameters(), lr=0.7)
    optimizer: Optimizer = models.wrap(inner, model) if wrapped else inner

    checkpoint.load(tmp_path, model, optimizer)

    source = getattr(saved[0], name).weight
    assert torch.equal(model.embed.weight, source)
    assert optimizer.param_groups[0]["lr"] == 0.1
    moments = (
        each.state[p]["exp_avg"]
        for each, p in ((saved[1], source), (optimizer, model.embed.weight))
    )
    assert torch.equal(*moments)


def views(memory: Tensor) -> dict[str, Tensor]:
    """Two that lie between each other, and one within the first."""
    return {"even": memory[::2], "odd": memory[1::2], "within": memory[4:8:2]}


def by_our_writer(state: dict[str, Any], path: Path) -> None:
    dcp.save(state, storage_writer=checkpoint.Writer(path), no_dist=True)


@pytest.mark.parametrize("save", [dcp_save, by_our_writer])
def test_the_reader_refuses_different_values_for_one_memory(
    tmp_path: Path, save: Callable[[dict[str, Any], Path], None]
) -> None:
    numbers = torch.arange(2000.0)
    save(views(numbers), tmp_path / "one")
    save({**views(numbers), "within": torch.zeros(2)}, tmp_path / "other")

    memory = torch.zeros(2000)
    dcp.load(views(memory), storage_reader=checkpoint.Reader(tmp_path / "one"), no_dist=True)
    assert torch.equal(memory, numbers)
    with pytest.raises((CheckpointException, CheckpointError), match="even and within"):
        dcp.load(views(memory), storage_reader=checkpoint.Reader(tmp_path / "other"), no_dist=True)
    assert torch.equal(memory, numbers)


# --------------------------------------------------------------------------- parameters and groups


def grown(model: nn.Sequential, wrapped: bool) -> Pair:
    """One more parameter, which comes first in the only group."""
    bigger = nn.Sequential(*model, nn.Linear(2, 2, bias=False))
    inner = torch.optim.AdamW(reversed(list(bigger.parameters())), lr=0.7)
    return bigger, models.wrap(inner, bigger) if wrapped else inner


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_parameter_of_which_nothing_is_said_is_refused_or_begins_anew(
    tmp_path: Path, wrapped: bool
) -> None:
    saved = pair_of(layers(2, 2))
    state = {"model": dict(get_model_state_dict(saved[0])), "optim": OptimizerState(*saved)}
    loading = grown(layers(2, 2), wrapped)
    state["model"]["2.weight"] = torch.zeros(2, 2)
    dcp_save(state, tmp_path)
    step(loading)

    with pytest.raises(StateDictError, match=r"neither state nor options of 2\.weight"):
        checkpoint.load(tmp_path, *loading)
    checkpoint.load(tmp_path, *loading, strict=False)

    assert loading[1].param_groups[0]["lr"] == 0.1  # of any parameter of the group
    fresh = loading[1].state[loading[0][2].weight]
    assert not fresh or not fresh["exp_avg"].any()
    moments = (o.state[m[0].weight]["exp_avg"] for m, o in (saved, loading))
    assert torch.equal(*moments)


@pytest.mark.parametrize("strict", [True, False])
def test_state_under_integer_ids_is_no_state_of_this_model(tmp_path: Path, strict: bool) -> None:
    saved = pair_of(layers(2))
    dcp_save({"model": saved[0].state_dict(), "optim": saved[1].state_dict()}, tmp_path)
    with pytest.raises(CheckpointError, match="no optimizer state for this model"):
        checkpoint.load(tmp_path, *pair_of(layers(2)), strict=strict)


def test_state_that_the_optimizer_does_not_hold_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint.save(tmp_path / "one", *pair_of(layers(2, 2)))
    model = layers(2, 2)
    optimizer = models.wrap(torch.optim.AdamW(model[0].parameters()), model)
    checkpoint.load(tmp_path / "one", model, optimizer)
    (said,) = (message for message in caplog.messages if "skips" in message)
    assert "1.bias, 1.weight" in said


def train(pair: Pair, steps: range) -> None:
    for count in steps:
        for parameter in pair[0].parameters():
            if parameter.requires_grad:
                wave = torch.linspace(-1, 1, parameter.numel()).view(parameter.shape)
                parameter.grad = (wave * (count + 1)).to(parameter.dtype)
        pair[1].step()
        pair[1].zero_grad()


@pytest.mark.parametrize(
    ("dtype", "lane", "into"),
    [
        (torch.bfloat16, "device", "device"),
        (torch.bfloat16, "host", "device"),
        (torch.bfloat16, "device", "host"),
        (torch.float16, "device", "device"),
        (torch.float32, "device", "device"),
    ],
    ids=str,
)
def test_a_parameter_that_is_frozen_at_a_load_goes_on_as_if_it_never_was(
    tmp_path: Path, dtype: torch.dtype, lane: str, into: str
) -> None:
    pairs = []
    for frozen, where in ((False, lane), (True, into)):
        torch.manual_seed(0)
        model = layers(5, 5).to(dtype)
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        model[1].requires_grad_(not frozen)
        pairs.append((model, models.wrap(inner, model, update_on=where)))
    saved, loading = pairs
    train(saved, range(3))
    checkpoint.save(tmp_path / "one", *saved)
    checkpoint.load(tmp_path / "one", *loading)
    loading[0][1].requires_grad_(True)
    for pair in pairs:
        train(pair, range(3, 6))
    for name, value in saved[0].state_dict().items():
        assert torch.equal(loading[0].state_dict()[name], value), name


def test_an_fp32_checkpoint_is_the_master_of_a_frozen_bf16_parameter(tmp_path: Path) -> None:
    saved = pair_of(layers(5, 5))
    checkpoint.save(tmp_path / "one", *saved)
    model = layers(5, 5).bfloat16()
    inner = torch.optim.AdamW(model.parameters())
    model[1].requires_grad_(False)
    optimizer = models.wrap(inner, model)
    checkpoint.load(tmp_path / "one", model, optimizer)
    weight = saved[0][1].weight
    assert torch.equal(model[1].weight, weight.bfloat16())
    assert torch.equal(optimizer.state[model[1].weight]["master"], weight)


# --------------------------------------------------------------------------- models and optimizers


def policy_and_value(wrapped: bool) -> tuple[nn.Module, nn.Module, Optimizer]:
    both = layers(2), layers(2)
    parameters = [p for model in both for p in model.parameters()]
    inner = torch.optim.AdamW(parameters, lr=0.1)
    optimizer: Optimizer = models.wrap(inner, both) if wrapped else inner
    step((nn.ModuleList(both), optimizer))
    return *both, optimizer


@pytest.mark.parametrize("wrapped", [True, False])
def test_two_models_with_equal_names_are_saved_as_one(tmp_path: Path, wrapped: bool) -> None:
    first, second, optimizer = policy_and_value(wrapped)
    calls: dict[str, Callable[[], object]] = {
        "state_dict": OptimizerState([first, second], optimizer).state_dict,
        "load_state_dict": lambda: OptimizerState([first, second], optimizer).load_state_dict({}),
        "save": lambda: checkpoint.save(tmp_path / "no", [first, second], optimizer),
    }
    for name, call in calls.items():
        with pytest.raises(ConfigError, match="use these names") as caught:
            call()
        assert "nn.ModuleDict({'first': first, 'second': second})" in caught.value.remedy, name

    saved = nn.ModuleDict({"first": first, "second": second}), optimizer
    checkpoint.save(tmp_path / "one", *saved)
    with pytest.raises(ConfigError, match=r"0\.weight.* of two of the models"):
        checkpoint.load(tmp_path / "one", [first, second])
    first, second, optimizer = policy_and_value(wrapped)
    loading = nn.ModuleDict({"first": first, "second": second}), optimizer
    checkpoint.load(tmp_path / "one", *loading)
    assert_same(values_of(loading), values_of(saved))


def two_optimizers() -> tuple[nn.Sequential, Optimizer, Optimizer]:
    model = layers(3, 3)
    muon = torch.optim.Muon([layer.weight for layer in model], lr=0.1)
    adamw = torch.optim.AdamW([layer.bias for layer in model], lr=0.2)
    first, second = models.wrap(muon, model), models.wrap(adamw, model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    first.step()
    second.step()
    return model, first, second


def test_several_optimizers_are_saved_as_the_error_says(tmp_path: Path) -> None:
    model, first, second = saved = two_optimizers()
    both: Any = [first, second]
    path = tmp_path / "one"
    texts = set()
    for call in (
        lambda: checkpoint.save(path, model, both),
        lambda: checkpoint.async_save(path, model, both),
        lambda: checkpoint.load(path, model, both),
        lambda: OptimizerState(model, both),
    ):
        with pytest.raises(ConfigError, match="takes one optimizer") as caught:
            call()
        texts.add(str(caught.value))
    (text,) = texts
    assert len(text) < 600
    save, load = (text[text.index(word) :] for word in ("dcp.save(", "checkpoint.load("))
    save = save[: save.index("Writer(path))") + len("Writer(path))")]
    scope = {"dcp": dcp, "checkpoint": checkpoint, "OptimizerState": OptimizerState, "path": path,
             "get_model_state_dict": get_model_state_dict}  # fmt: skip
    with warnings.catch_warnings(action="ignore"):  # that there is no process group
        eval(save, scope | {"model": model, "first": first, "second": second})

    model, first, second = loading = two_optimizers()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(3.0)
    for each in ("first", "second"):
        eval(
            load.replace("first", each), scope | {"model": model, "first": first, "second": second}
        )
    for optimizer in (1, 2):
        pairs = [(job[0], job[optimizer]) for job in (loading, saved)]
        assert_same(*map(values_of, pairs))
