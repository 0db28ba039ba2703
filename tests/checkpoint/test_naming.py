"""Prefixes of checkpoints, recognised from their keys alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_offload.checkpoint.naming import Places, find_places, option_keys, options_by_fqn
from fsdp_offload.errors import CheckpointError

FQNS = ["embed.weight", "blocks.0.up.weight", "blocks.0.up.bias", "gain"]
NAMES = {"step", "exp_avg", "exp_avg_sq"}


def keys_of(places: Places, fqns: list[str] = FQNS) -> set[str]:
    """What a checkpoint with these prefixes has."""
    keys = set()
    for fqn in fqns:
        if places.model is not None:
            keys.add(places.weight(fqn))
        if places.base is not None:
            keys |= {places.state(fqn) + name for name in NAMES}
            keys.add(f"{places.base}param_groups.{places.inner}{fqn}.lr")
    return keys


@pytest.mark.parametrize(
    "places",
    [
        Places("model.", "optim."),
        Places("", "optimizer."),  # torchtitan
        Places("model.module.", "optimizer.", "module."),  # Megatron-FSDP
        Places("model.", None),
        Places("", ""),
        Places("app.model.", "app.optimizer."),
        Places(None, "optim."),
    ],
)
def test_prefixes_are_recognised(places: Places) -> None:
    assert find_places(keys_of(places), FQNS, NAMES) == places


def test_nothing_is_found_in_a_checkpoint_of_another_model() -> None:
    keys = keys_of(Places("model.", "optim."), ["other.weight"])

    assert find_places(keys, FQNS, NAMES) == Places(None, None)


def test_a_second_set_of_weights_gives_way_to_the_usual_prefix() -> None:
    keys = keys_of(Places("model.", "optim.")) | keys_of(Places("ema.model.", None))

    assert find_places(keys, FQNS, NAMES) == Places("model.", "optim.")


def test_the_more_complete_set_of_weights_is_taken() -> None:
    keys = keys_of(Places("model.", None), FQNS[:2]) | keys_of(Places("ema.model.", None))

    assert find_places(keys, FQNS, NAMES).model == "ema.model."


@pytest.mark.parametrize("other", [None, "critic.optim."])
def test_sets_that_fit_equally_well_are_refused(other: str | None) -> None:
    keys = keys_of(Places("actor.", other and "actor.optim.")) | keys_of(Places("critic.", other))

    with pytest.raises(CheckpointError, match="prefix=") as caught:
        find_places(keys, FQNS, NAMES)

    assert "actor." in caught.value.what
    assert "critic." in caught.value.what


def test_names_that_end_alike_are_not_mixed_up() -> None:
    """``weight`` is the end of most other names."""
    fqns = ["weight", "up.weight", "up.up.weight"]
    places = Places("", "optim.")

    assert find_places(keys_of(places, fqns), fqns, NAMES) == places


def test_a_parameter_whose_name_is_that_of_a_state_entry() -> None:
    fqns = ["step", "exp_avg", "state.step", "up.step"]
    places = Places("model.", "optim.")

    assert find_places(keys_of(places, fqns), fqns, NAMES) == places


segments = st.sampled_from(["up", "weight", "0", "module", "step", "model", "norm", "down"])
some_fqns = st.lists(
    st.lists(segments, min_size=1, max_size=3).map(".".join), min_size=1, max_size=6, unique=True
)
bases = st.sampled_from(["", "optim.", "optimizer.", "app.optimizer.", "a.b."])
weights = st.sampled_from(["model.", "app.model.", "model.module.", "w.", None])


@given(fqns=some_fqns, model=weights, base=st.none() | bases, inner=st.sampled_from(["", "m."]))
def test_weights_and_states_are_found_under_any_prefix(
    fqns: list[str], model: str | None, base: str | None, inner: str
) -> None:
    places = Places(model, base, "" if base is None else inner)
    keys = keys_of(places, fqns)

    found = find_places(keys, fqns, NAMES)

    # One FQN may be the end of another, so that several readings find them all: any will do.
    if model is not None:
        assert {found.weight(fqn) for fqn in fqns} <= keys
    if base is not None:
        assert {found.state(fqn) + "exp_avg" for fqn in fqns} <= keys


# --------------------------------------------------------------------------- options of groups

OPTIM = Places("model.", "optim.")
OPTIONS = {"lr": 0.1, "betas": (0.8, 0.9)}


@pytest.mark.parametrize(
    ("places", "values"),
    [
        (OPTIM, {f"optim.param_groups.a.b.{name}": value for name, value in OPTIONS.items()}),
        (OPTIM, {"optim.param_groups": [{"params": ["a.b"], **OPTIONS}]}),
        (
            OPTIM,
            {
                "optim.param_groups.0.params": ["a.b"],
                "optim.param_groups.0.lr": 0.1,
                "optim.param_groups.0.betas": (0.8, 0.9),
            },
        ),
        (
            Places("", "optimizer.", "module."),
            {"optimizer.param_groups": [{"params": ["module.a.b"], **OPTIONS}]},
        ),
        (
            Places("", "optimizer.", "module."),
            {f"optimizer.param_groups.module.a.b.{name}": v for name, v in OPTIONS.items()},
        ),
    ],
)
def test_options_are_read_in_every_form(places: Places, values: dict[str, object]) -> None:
    others = {"optim.state.a.b.step", "model.a.b", "optim.param_groups_of_old", "x.param_groups"}
    others.add(f"{places.base}param_groups.{places.inner}c.d.lr")  # nobody asks for that one
    keys = option_keys({*values, *others}, places, ["a.b"])

    assert sorted(keys) == sorted(values)
    assert options_by_fqn({key: values[key] for key in keys}, places) == {"a.b": OPTIONS}


def test_options_of_a_parameter_called_by_a_number() -> None:
    values = {f"optim.param_groups.0.{name}": value for name, value in OPTIONS.items()}

    assert options_by_fqn(values, OPTIM) == {"0": OPTIONS}


def test_groups_without_names_give_no_options() -> None:
    """Megatron's groups name their parameters by position."""
    values = {"optimizer.param_groups": [{"params": [0, 1], "lr": 0.1}]}

    assert "a.b" not in options_by_fqn(values, Places("", "optimizer.", "module."))
