"""State dicts against the optimizer they are loaded into: matched and checked before any write."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch import Tensor

from ..core.errors import StateDictError
from ..pipeline.inventory import Inventory, missing_kinds
from ..update.params import ParamState
from ..update.schema import signature

_log = logging.getLogger("fsdp_offload")

IMPLEMENTATION_FLAGS: Final = frozenset(("foreach", "fused", "capturable", "differentiable"))
"""Group values that say how a kernel runs, not what it computes: a load keeps the current ones."""

Groups = list[dict[str, Any]]


def match_ids(groups: Groups, loaded: Mapping[str, Any]) -> dict[Tensor, Any]:
    """The saved id (int or FQN) of every parameter, by position, as torch matches them.

    Raises:
        StateDictError: not an optimizer state dict, or other groups.
    """
    if not isinstance(loaded.get("state"), Mapping) or not isinstance(
        loaded.get("param_groups"), list
    ):
        raise StateDictError(
            f"a dict with keys {sorted(map(str, loaded))}",
            reason="an optimizer state dict has 'state' and 'param_groups'",
            remedy="pass what state_dict() of this or of the plain optimizer returned",
        )
    found = [len(group["params"]) for group in loaded["param_groups"]]
    expected = [len(group["params"]) for group in groups]
    if found != expected:
        raise StateDictError(
            f"param_groups with {found} parameters",
            reason=f"this optimizer has {expected}: the checkpoint is of another model or of "
            "other groups",
            remedy="build the model and its parameter groups as when it was saved",
        )
    ids = {
        parameter: saved
        for group, saved_group in zip(groups, loaded["param_groups"], strict=True)
        for parameter, saved in zip(group["params"], saved_group["params"], strict=True)
    }
    for saved in ids.values():
        if not isinstance(loaded["state"].get(saved, {}), Mapping):
            raise StateDictError(
                f"state of parameter {saved!r} of type {type(loaded['state'][saved]).__name__}",
                reason="a parameter's state is a dict of names and values",
                remedy="pass what state_dict() of this or of the plain optimizer returned",
            )
    return ids


def checked_groups(
    groups: Groups, saved: Groups, inventory: Inventory, params: Sequence[ParamState]
) -> Groups:
    """Group values to take over.

    Raises:
        StateDictError: their flags need state that is not reserved (``amsgrad``, ...).
    """
    result = []
    for index, (group, saved_group) in enumerate(zip(groups, saved, strict=True)):
        values = {
            name: copy.deepcopy(value)
            for name, value in saved_group.items()
            if name not in ("params", "param_names") and name not in IMPLEMENTATION_FLAGS
        }
        after = {**group, **values}
        param = next((r for r in params if r.group == index), None)
        if param is not None and signature(after) != signature(group):
            if missing := missing_kinds(param, inventory.schema(param, after)):
                raise StateDictError(
                    f"param_groups[{index}] of the checkpoint",
                    reason=f"its flags need state {missing}, which is not reserved",
                    remedy="build the optimizer with the flags of the checkpoint",
                )
        result.append(values)
    return result


def name_masters(params: Sequence[ParamState]) -> None:
    """Log which entries of a state dict are lost on an optimizer without this library."""
    mastered = [param for param in params if param.emits_master]
    if mastered:
        entries = " and ".join(sorted({repr(param.form.value) for param in mastered}))
        shards = "/".join(sorted({str(param.info.dtype)[6:] for param in mastered}))
        _log.warning(
            "state_dict() holds the fp32 masters of %d parameters in %s: an optimizer without "
            "fsdp_offload ignores these entries and goes on from the %s weights",
            len(mastered), entries, shards,
        )  # fmt: skip
