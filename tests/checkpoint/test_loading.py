"""Loads in one process: where things are found, and that they come back as they were."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_offload import OptimizerState, PhaseOffloader, checkpoint
from fsdp_offload.core.errors import CheckpointError, OffloadError, StateDictError
from tests.checkpoint.jobs import Ranks
from tests.checkpoint.test_saving import Pair, layers, pair_of, step, values_of
from tests.fsdp import models
from tests.helpers.compare import assert_same


def dcp_save(state: dict[str, Any], path: Path) -> None:
    """As another program would."""
    with warnings.catch_warnings(action="ignore"):  # that there is no process group
        dcp.save(state, checkpoint_id=path, no_dist=True)


class Extra(nn.Linear):
    """A layer with state of its own that is no buffer."""

    def __init__(self, value: Any) -> None:
        super().__init__(2, 2)
        self.value = value

    def get_extra_state(self) -> Any:
        return copy.deepcopy(self.value)

    def set_extra_state(self, state: Any) -> None:
        self.value = state


def plain(value: Any) -> Any:
    """Something that ``==`` compares."""
    if isinstance(value, io.BytesIO):
        return "bytes", value.getvalue()
    if isinstance(value, tuple):
        return tuple(plain(each) for each in value)
    return ("tensor", value.dtype, value.tolist()) if isinstance(value, Tensor) else value


@pytest.mark.parametrize(
    ("saved", "other"),
    [
        (5, 7),
        ({"scale": 0.5, "history": [1, 2]}, {"scale": 1.0, "more": None}),
        (torch.arange(3), torch.zeros(5)),
        (torch.tensor(1), 7),
        (io.BytesIO(b"abc"), io.BytesIO(b"")),
    ],
    ids=["int", "dict", "tensor", "tensor for an int", "bytes"],
)
@pytest.mark.parametrize("with_optimizer", [False, True])
def test_extra_state_of_a_module_comes_back(
    tmp_path: Path, saved: Any, other: Any, with_optimizer: bool
) -> None:
    job = (*pair_of(Extra(saved)),) if with_optimizer else (Extra(saved),)
    checkpoint.save(tmp_path / "one", *job)
    job[0].value = other

    checkpoint.load(tmp_path / "one", *job)

    assert plain(job[0].value) == plain(saved)
    if with_optimizer:
        step(job)


def optimizer_of(model: nn.Module, wrapped: bool, **options: Any) -> Optimizer:
    inner = torch.optim.AdamW(model.parameters(), **{"lr": 0.1, **options})
    return models.wrap(inner, model) if wrapped else inner


OPTIONS: dict[str, Any] = {
    "dicts": (
        {"notes": {"a": {"b": 1}}, "nothing": {}},
        {"notes": {"a": {"b": 2}, "c": 3}, "nothing": {"d": 4}},
    ),
    "tensors": (
        {"lr": torch.tensor(0.1), "betas": (torch.tensor(0.5), torch.tensor(0.6))},
        {"lr": torch.tensor(0.3), "betas": (torch.tensor(0.1), torch.tensor(0.2))},
    ),
}


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("kind", OPTIONS)
def test_options_come_back(tmp_path: Path, kind: str, wrapped: bool) -> None:
    model, (saved, other) = layers(2), OPTIONS[kind]
    optimizer = optimizer_of(model, wrapped, foreach=False)
    optimizer.param_groups[0].update(copy.deepcopy(saved))
    checkpoint.save(tmp_path / "one", model, optimizer)
    optimizer.param_groups[0].update(copy.deepcopy(other))

    checkpoint.load(tmp_path / "one", model, optimizer)

    (group,) = optimizer.param_groups
    assert {name: plain(group[name]) for name in saved} == {n: plain(v) for n, v in saved.items()}


@pytest.mark.parametrize("kind", ["float64", "float32"])
def test_a_numpy_scalar_comes_back_as_a_number(tmp_path: Path, kind: str) -> None:
    numpy = pytest.importorskip("numpy")
    model, optimizer = pair_of(layers(2))
    optimizer.param_groups[0]["lr"] = getattr(numpy, kind)(0.25)
    checkpoint.save(tmp_path / "one", model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.5

    checkpoint.load(tmp_path / "one", model, optimizer)

    assert optimizer.param_groups[0]["lr"] == 0.25
    assert type(optimizer.param_groups[0]["lr"]) is float


@pytest.mark.parametrize("away", [False, True])
def test_a_buffer_that_is_a_conjugate_view_is_saved_and_loaded(tmp_path: Path, away: bool) -> None:
    def views() -> dict[str, Tensor]:
        large, small, other = (torch.randn(100, 100, dtype=torch.complex64) for _ in range(3))
        return {"large": large.conj(), "small": small[:2].conj(), "negative": other.conj().imag}

    saved, loaded, same = layers(1), layers(1), layers(1)
    for name, view in views().items():
        saved.register_buffer(name, view)
        loaded.register_buffer(name, torch.zeros(view.shape, dtype=view.dtype))
    for name, view in views().items():
        same.register_buffer(name, view)
    expected = {n: getattr(saved, n).resolve_conj().resolve_neg().clone() for n in views()}

    with PhaseOffloader(saved).away() if away else contextlib.nullcontext():
        checkpoint.save(tmp_path / "one", saved)
    for model in (loaded, same):
        checkpoint.load(tmp_path / "one", model)

    for name, value in expected.items():
        for model in (saved, loaded, same):
            assert torch.equal(getattr(model, name), value), name


@pytest.mark.parametrize("extra", [5, torch.ones(2)], ids=["int", "tensor"])
def test_extra_of_another_program_is_not_ours(tmp_path: Path, extra: Any) -> None:
    saved, loading = layers(2), layers(2)
    dcp_save({"model": saved.state_dict(), "extra": extra}, tmp_path)

    assert checkpoint.load(tmp_path, loading) == {}
    assert_same(loading.state_dict(), saved.state_dict())


def with_amsgrad() -> Pair:
    model = layers(2, 2)
    return model, optimizer_of(model, True, amsgrad=True)


@pytest.mark.parametrize(
    ("other", "error", "words"),
    [
        (
            lambda: pair_of(layers(2)),
            CheckpointError,
            "this model lacks model.1.bias, model.1.weight",
        ),
        (
            lambda: pair_of(layers(2, 2, 2)),
            CheckpointError,
            "the checkpoint lacks 2.bias, 2.weight",
        ),
        (lambda: pair_of(nn.Linear(2, 2)), CheckpointError, "it has no weight of this model"),
        (with_amsgrad, StateDictError, "max_exp_avg_sq"),
    ],
    ids=["fewer layers", "more layers", "other names", "more state"],
)
def test_what_does_not_fit_is_refused_before_anything(
    tmp_path: Path, other: Callable[[], Pair], error: type[OffloadError], words: str
) -> None:
    checkpoint.save(tmp_path / "one", *pair_of(layers(2, 2)))
    loading = other()
    before = values_of(loading)

    with pytest.raises(error, match=words):
        checkpoint.load(tmp_path / "one", *loading)
    assert_same(values_of(loading), before)
    step(loading)


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        (5, "of a plain Python type"),
        (torch.full((2,), 0.5), "of torch.float32: this model's tensor has torch.int64"),
        (torch.ones(2, dtype=torch.complex64), "of torch.complex64"),
    ],
)
def test_a_weight_of_another_kind_of_numbers_is_refused(
    tmp_path: Path, stored: Any, words: str
) -> None:
    model = layers(2)
    model.register_buffer("count", torch.zeros(2, dtype=torch.int64))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    weights = {name: torch.ones_like(value) for name, value in before.items()}
    dcp_save({"model": {**weights, "count": stored}}, tmp_path)

    with pytest.raises(StateDictError, match=words):
        checkpoint.load(tmp_path, model)
    assert_same(model.state_dict(), before)


def test_a_pt_file_is_for_load_state_dict(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    torch.save((model := layers(2)).state_dict(), path)
    with pytest.raises(CheckpointError, match=r"Remedy: .*model.load_state_dict\(torch.load\(path"):
        checkpoint.load(path, model)


@pytest.mark.parametrize("count", [3, "three"])
def test_a_step_count_may_be_a_number_and_nothing_else(tmp_path: Path, count: Any) -> None:
    pair = pair_of(layers(2))
    state = dict(OptimizerState(*pair).state_dict())
    dcp_save(
        {"model": pair[0].state_dict(), "optim": {**state, "state.0.bias.step": count}}, tmp_path
    )
    step(pair, -3.0)
    before = values_of(pair)

    if count == 3:
        checkpoint.load(tmp_path, *pair)
        assert pair[1].state[pair[0][0].bias]["step"] == 3
    else:
        with pytest.raises(StateDictError, match=r"0\.bias\.step of <class 'str'>"):
            checkpoint.load(tmp_path, *pair)
        assert_same(values_of(pair), before)
    step(pair)


def test_masters_alone_are_loaded_where_the_class_can_keep_more(tmp_path: Path) -> None:
    """Of SGD without momentum they are all of the state."""
    pairs = []
    for momentum in (0.0, 0.9):
        model = layers(2, 2).bfloat16()
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        pairs.append((model, models.wrap(inner, model)))
        step(pairs[-1])
    saving, loading = pairs
    checkpoint.save(tmp_path / "one", *saving)
    checkpoint.load(tmp_path / "one", *loading)
    for pair in pairs:
        step(pair)
    found = values_of(loading)
    assert_same({name: found[name] for name in values_of(saving)}, values_of(saving))


def test_there_is_nothing_to_load_where_latest_found_nothing(tmp_path: Path) -> None:
    loading = pair_of(layers(2))
    before = values_of(loading)

    with pytest.raises(CheckpointError, match=r"latest\(\) returns None"):
        checkpoint.load(checkpoint.latest(tmp_path), *loading)
    assert_same(values_of(loading), before)
    step(loading)


@pytest.mark.parametrize("later", [False, True])
def test_a_module_without_parameters_is_saved(tmp_path: Path, later: bool) -> None:
    """As the ranks of a pipeline may hold it."""
    saved, loading = nn.Module(), nn.Module()
    saved.register_buffer("scale", torch.tensor([1.0, 2.0]))
    loading.register_buffer("scale", torch.zeros(2))
    if later:
        checkpoint.async_save(tmp_path / "one", saved).result()
    else:
        checkpoint.save(tmp_path / "one", saved)

    checkpoint.load(tmp_path / "one", loading)

    assert loading.get_buffer("scale").tolist() == [1.0, 2.0]


class Stage(nn.Module):
    """Only the first rank has weights."""

    def __init__(self) -> None:
        super().__init__()
        if dist.get_rank() == 0:
            self.weight = nn.Parameter(torch.ones(3))


def save_and_load_stages(path: Path) -> None:
    stage = Stage()
    checkpoint.save(path, stage)
    for parameter in stage.parameters():
        parameter.data.zero_()
    checkpoint.load(path, stage)
    assert all(parameter.tolist() == [1.0] * 3 for parameter in stage.parameters())


def test_a_rank_without_weights_saves_and_loads_like_others(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(save_and_load_stages, tmp_path / "one")


@pytest.mark.parametrize("empty", [[], nn.ReLU()])
def test_weights_that_no_rank_has_are_refused_by_an_empty_model(tmp_path: Path, empty: Any) -> None:
    checkpoint.save(tmp_path / "one", nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"lacks model\.bias, model\.weight"):
        checkpoint.load(tmp_path / "one", empty)
    checkpoint.save(tmp_path / "none", empty, extra={"step": 1})
    assert checkpoint.load(tmp_path / "none", empty) == {"step": 1}
