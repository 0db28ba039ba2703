"""Which key of a checkpoint goes to which tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from fsdp_offload.checkpoint.rule import (
    STATE,
    KeyLayout,
    Match,
    find_layout,
    match,
    or_give,
)

FQNS = ["embed.weight", "blocks.0.up.weight", "blocks.0.up.bias", "gain"]
OURS = KeyLayout("model.", "optim.")
LAYOUTS = [
    OURS,
    KeyLayout("model.", "optimizer."),
    KeyLayout("model.", "optimizer.", "module."),
]


def keys_of(layout: KeyLayout) -> set[str]:
    keys = {layout.weight(fqn) for fqn in FQNS}
    return keys | {layout.state(fqn) + name for fqn in FQNS[:2] for name in ("step", "exp_avg")}


def matched(
    values: Mapping[str, Any],
    groups: Sequence[Sequence[Sequence[str]]] = ([[fqn] for fqn in FQNS],),
) -> Match:
    weights = {fqn: names for group in groups for names in group for fqn in names}
    layout = find_layout(values, weights)
    return match(layout, values, weights, groups, lambda keys: {k: values[k] for k in keys})


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_usual_prefixes_are_found(layout: KeyLayout) -> None:
    found = find_layout(keys_of(layout), FQNS)

    assert found == layout
    weights = {key for key in keys_of(layout) if found.is_weight(key)}
    assert weights == {layout.weight(fqn) for fqn in FQNS}
    assert found.entries(STATE, keys_of(layout)) == {f: {"step", "exp_avg"} for f in FQNS[:2]}


@pytest.mark.parametrize(
    "layout",
    [KeyLayout("a.model.", "a.optim."), KeyLayout("", "optimizer."), KeyLayout("", "")],
    ids=str,
)
def test_others_have_to_be_named_and_are_proposed(layout: KeyLayout) -> None:
    keys = keys_of(layout)
    assert find_layout(keys, FQNS).model is None
    prefixes = {"model_prefix": layout.model, "optimizer_prefix": layout.optimizer}
    for (option, prefix), kind in zip(prefixes.items(), ("", STATE), strict=True):
        assert or_give(option, keys, FQNS, kind) == f", or give {option}={prefix!r}"
    assert find_layout(keys, FQNS, **prefixes) == layout


def test_nothing_is_found_in_a_checkpoint_of_another_model() -> None:
    found = find_layout(keys_of(OURS), ["other.weight", "weight"])
    assert found == KeyLayout(None, None)
    assert found.entries(STATE, keys_of(OURS)) == {}
    for fqn in ("other.weight", "up.weigh"):
        assert or_give("model_prefix", keys_of(OURS), [fqn]) == ""
    keys = ["x.up", "y.up"]
    assert or_give("model_prefix", keys, ["up"]) == ", or give model_prefix='x.' or 'y.'"


def test_state_without_entries_is_found_by_its_options() -> None:
    """SGD without momentum has none."""
    assert find_layout({"model.gain", "optim.param_groups.gain.lr"}, ["gain"]) == OURS


def options_in(form: str, layout: KeyLayout, fqns: Sequence[str], **options: Any) -> dict[str, Any]:
    names = [layout.inner + fqn for fqn in fqns]
    start = f"{layout.optimizer}param_groups"
    group = {"params": names, **options}
    if form == "list":
        return {start: [group]}
    if form == "indexed":
        return {f"{start}.0.{name}": value for name, value in group.items()}
    return {f"{start}.{name}.{option}": v for name in names for option, v in options.items()}


FORMS = ["flat", "list", "indexed"]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_options_are_read_in_every_form(layout: KeyLayout, form: str) -> None:
    values = options_in(form, layout, FQNS, lr=0.5, param_names=["a"])
    found = matched({**dict.fromkeys(keys_of(layout)), **values})

    assert found.options == [{"lr": 0.5}]
    assert not found.absent


@pytest.mark.parametrize("form", FORMS)
def test_any_parameter_of_a_group_speaks_for_it(form: str) -> None:
    values = options_in(form, OURS, FQNS[2:], lr=0.5)
    found = matched(values, [[["new"], *([f] for f in FQNS)], [["newer"]]])

    assert found.options == [{"lr": 0.5}, {}]
    assert found.absent == {"new", "newer", *FQNS[:2]}


def test_options_of_a_parameter_called_by_a_number() -> None:
    found = matched({"optim.param_groups.0.lr": 0.5}, [[["0"]]])
    assert found.options == [{"lr": 0.5}]
    assert not found.absent


def test_groups_without_names_give_no_options() -> None:
    values = dict.fromkeys(keys_of(OURS)) | {"optim.param_groups": [{"lr": 0.5}]}
    assert matched(values).options == [{}]


def test_a_tied_weight_is_found_under_any_of_its_names() -> None:
    tied = [["embed", "head"], ["gain"]]
    values = {
        "model.head": 1,
        "model.gain": 2,
        "model.old": 3,
        "optim.state.head.step": 4,
        "optim.param_groups.head.lr": 5,
    }
    found = matched(values, [tied])
    assert found.weights == {"head": "model.head", "gain": "model.gain"}
    assert (found.missing, found.unknown) == ([], ["model.old"])
    assert found.state == {"embed": {"step": ["optim.state.head.step"]}, "gain": {}}
    assert found.options == [{"lr": 5}]

    both = matched({**values, "model.embed": 1, "optim.state.embed.step": 4}, [tied])
    keys = ["optim.state.embed.step", "optim.state.head.step"]
    assert both.state["embed"] == {"step": keys}
    assert both.weights["embed"] == "model.embed"
