"""Where weights and optimizer state are found among the keys of a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_offload.checkpoint.state import STATE, Layout, find_layout

FQNS = ["embed.weight", "blocks.0.up.weight", "blocks.0.up.bias", "gain"]
LAYOUTS = [
    Layout("model.", "optim."),
    Layout("model.", "optimizer."),
    Layout("", "optimizer."),
    Layout("", ""),
    Layout("model.module.", "optimizer.", "module."),
]


def keys_of(layout: Layout) -> set[str]:
    keys = {layout.weight(fqn) for fqn in FQNS}
    return keys | {layout.state(fqn) + name for fqn in FQNS[:2] for name in ("step", "exp_avg")}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_usual_prefixes_are_found(layout: Layout) -> None:
    found = find_layout(keys_of(layout), FQNS)

    assert found == layout
    weights = {key for key in keys_of(layout) if found.is_weight(key)}
    assert weights == {layout.weight(fqn) for fqn in FQNS}
    assert found.entries(STATE, keys_of(layout)) == {f: {"step", "exp_avg"} for f in FQNS[:2]}


def test_others_have_to_be_named() -> None:
    keys = keys_of(Layout("actor.model.", "actor.optim.")) | keys_of(Layout("critic.", "c."))
    assert find_layout(keys, FQNS) == Layout(None, None)
    found = find_layout(keys, FQNS, model_prefix="critic.", optimizer_prefix="actor.optim.")
    assert found == Layout("critic.", "actor.optim.")


def test_nothing_is_found_in_a_checkpoint_of_another_model() -> None:
    found = find_layout(keys_of(LAYOUTS[0]), ["other.weight", "weight"])
    assert found == Layout(None, None)
    assert found.entries(STATE, keys_of(LAYOUTS[0])) == {}


def test_state_without_entries_is_found_by_its_options() -> None:
    """SGD without momentum has none."""
    keys = {"model.gain", "optim.param_groups.gain.lr"}
    assert find_layout(keys, ["gain"]) == LAYOUTS[0]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("form", ["flat", "list", "indexed"])
def test_options_are_read_in_every_form(layout: Layout, form: str) -> None:
    names = [layout.inner + fqn for fqn in FQNS]
    start = f"{layout.optimizer}param_groups"
    values: dict[str, Any] = {f"{start}.{name}.lr": 0.5 for name in names}
    if form == "list":
        values = {start: [{"params": names, "lr": 0.5}]}
    elif form == "indexed":
        values = {f"{start}.0.params": names, f"{start}.0.lr": 0.5}

    keys = layout.option_keys({*values, "model.lr", f"{start}.other.lr"}, FQNS)

    assert set(keys) == set(values)
    assert layout.options(values) == {fqn: {"lr": 0.5} for fqn in FQNS}


def test_options_of_a_parameter_called_by_a_number() -> None:
    values = {"optim.param_groups.0.lr": 0.5}
    assert LAYOUTS[0].options(values) == {"0": {"lr": 0.5}}


def test_groups_without_names_give_no_options() -> None:
    assert LAYOUTS[0].options({"optim.param_groups": [{"lr": 0.5}]}) == {}
