"""State dicts against the optimizer they are loaded into: matched and checked before any write."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from . import shards
from .errors import StateDictError
from .pipeline.checksum import checksum
from .pipeline.inventory import Inventory, state_names
from .pipeline.records import Record
from .pipeline.schema import signature
from .pipeline.state import write_master

IMPLEMENTATION_FLAGS: Final = frozenset(("foreach", "fused", "capturable", "differentiable"))
"""Group values that say how a kernel runs, not what it computes: a load keeps the current ones."""

Groups = list[dict[str, Any]]


def match_ids(groups: Groups, loaded: Mapping[str, Any]) -> dict[Tensor, Any]:
    """The saved id (int or FQN) of every parameter, by position, as torch matches them.

    Raises:
        StateDictError: not an optimizer state dict, or other groups.
    """
    if "state" not in loaded or not isinstance(loaded.get("param_groups"), list):
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
    return {
        parameter: saved
        for group, saved_group in zip(groups, loaded["param_groups"], strict=True)
        for parameter, saved in zip(group["params"], saved_group["params"], strict=True)
    }


def checked_groups(
    groups: Groups, saved: Groups, inventory: Inventory, records: Sequence[Record]
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
        record = next((r for r in records if r.group == index), None)
        if record is not None and signature(after) != signature(group):
            schema = inventory.probe_group(record, after)
            if state_names(schema) != state_names(record.schema):
                raise StateDictError(
                    f"param_groups[{index}] of the checkpoint",
                    reason=f"its flags need state {state_names(schema)}, "
                    f"but {state_names(record.schema)} is reserved",
                    remedy="build the optimizer with the flags of the checkpoint",
                )
        result.append(values)
    return result


def native_value(parameter: Tensor, name: str, value: Any) -> Any:
    """A loaded state value as the plain optimizer would keep it (dtype kept, device moved)."""
    if isinstance(value, Tensor) and name != "step":
        return value.to(device=shards.local(parameter).device)
    return value


def watch_module_loads(
    models: Sequence[nn.Module],
    records: Callable[[], Sequence[Record] | None],
) -> list[Any]:
    """Notice weights that a module's ``load_state_dict`` changes: their masters become equal.

    Args:
        models: modules to watch.
        records: records to look at, after all transfers; None while an optimizer load that
            already brought the remainders of these weights waits for the next step.

    Returns:
        Handles of the hooks.
    """
    before: dict[Record, Tensor] = {}

    def remember(*_: Any) -> None:
        before.clear()
        for record in records() or ():
            if record.emits_master and record.info.local_numel:
                before[record] = _bits(record)

    def compare(*_: Any) -> None:
        if before:
            changed = torch.stack([_bits(r) != sum_ for r, sum_ in before.items()]).tolist()
            for record, differs in zip(before, changed, strict=True):
                if differs:
                    write_master(record, {})
        before.clear()

    handles: list[Any] = []
    for model in models:
        handles.append(model.register_load_state_dict_pre_hook(remember))
        handles.append(model.register_load_state_dict_post_hook(compare))
    return handles


def _bits(record: Record) -> Tensor:
    return checksum(shards.local(record.parameter).reshape(-1))


def unwatch(owner: object, handles: list[Any]) -> None:
    """Remove the hooks when ``owner`` goes."""
    weakref.finalize(owner, _remove, handles)


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
