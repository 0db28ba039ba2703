"""State dicts against the optimizer they are loaded into: matched and checked before any write."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..core import dtensor
from ..core.errors import StateDictError
from ..core.storage import present
from ..pipeline.inventory import Inventory, missing_kinds
from ..update.checksum import checksum
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
            if missing := missing_kinds(param, inventory.schema_under(param, after)):
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


def native_value(device: torch.device, name: str, value: Any) -> Any:
    """A loaded state value as the plain optimizer would keep it (dtype kept, device moved)."""
    if isinstance(value, Tensor) and name != "step":
        return value.to(device=device)
    return value


class ModuleLoadHook:
    """Hook of a module's ``load_state_dict``: calls ``owner``'s method ``name``, if it lives.

    A copied or pickled module takes a hook along that does nothing.
    """

    def __init__(self, owner: object = None, name: str = "") -> None:
        self._owner = (lambda: None) if owner is None else weakref.ref(owner)
        self._name = name

    def __call__(self, *_: object) -> None:
        owner = self._owner()
        if owner is not None:
            getattr(owner, self._name)()

    def __reduce__(self) -> tuple[type[ModuleLoadHook], tuple[()]]:
        return ModuleLoadHook, ()


def watch_module_loads(
    models: Sequence[nn.Module], owner: object, *, before: str, after: str
) -> None:
    """Call ``owner``'s methods of these names around each load into one of ``models``."""
    handles: list[Any] = []
    for model in models:
        handles.append(model.register_load_state_dict_pre_hook(ModuleLoadHook(owner, before)))
        handles.append(model.register_load_state_dict_post_hook(ModuleLoadHook(owner, after)))
    weakref.finalize(owner, _remove, handles)


def watch_module_reads(models: Sequence[nn.Module], owner: object, *, before: str) -> None:
    """Call ``owner``'s method before weights of ``models`` or of a part are read or loaded."""
    handles: list[Any] = []
    for module in (module for model in models for module in model.modules()):
        hook = ModuleLoadHook(owner, before)
        handles.append(module.register_state_dict_pre_hook(hook))
        handles.append(module.register_load_state_dict_pre_hook(hook))
    weakref.finalize(owner, _remove, handles)


def tell_loaded(model: nn.Module) -> None:
    """Call what runs after a load into ``model``: its weights were written by other means."""
    for hook in list(model._load_state_dict_post_hooks.values()):
        if isinstance(hook, ModuleLoadHook):
            hook()


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def weight_checksums(params: Sequence[ParamState]) -> Tensor:
    """A checksum of each parameter's shard: 1-D int64, on the CPU."""
    found = [checksum(present(dtensor.local(r.parameter)).reshape(-1)) for r in params]
    return torch.stack([value.cpu() for value in found])
