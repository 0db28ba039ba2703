"""``optimizer.state`` as the caller sees it, and adopting writes into it; matching and checking
loaded state dicts before any write."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core.errors import StateDictError
from ..core.progress import warn
from ..update import state as state_io
from ..update.params import ParamState

Values = dict[str, Any]


class StateView:
    """Live state per parameter: tensors over host or device memory, under torch's names.

    ``keeper``: a class that steps itself, whose own state is shown.
    """

    def __init__(self, keeper: Optimizer | None = None) -> None:
        self._keeper, self._shown = keeper, defaultdict[Tensor, Values](dict)
        self._has_named = False
        self.may_be_written = False
        """Whether a caller got it since the last :meth:`adopt_writes`."""

    @property
    def shown(self) -> defaultdict[Tensor, Values]:
        """The state that the caller sees, as last filled in."""
        return self._shown if self._keeper is None else self._keeper.state

    def expose(self, params: Sequence[ParamState]) -> None:
        """Show the memory of ``params`` without a copy."""
        for param in params:
            self.shown[param.parameter] = state_io.expose(param)

    def refresh(self, params: Sequence[ParamState]) -> None:
        """Show the new memory of ``params``; entries that the caller dropped stay dropped."""
        for param in params:
            if shown := self.shown.get(param.parameter):
                shown.update(state_io.expose(param))

    def show(self, params: Sequence[ParamState]) -> defaultdict[Tensor, Values]:
        """Return state that the caller may write to, with numbers and decoded values."""
        self.may_be_written = True
        for param in params:
            state_io.show(param, self.shown[param.parameter])
        return self.shown

    def read(self, params: Sequence[ParamState]) -> dict[Tensor, Values]:
        """Return the same as :meth:`show`, for a caller that does not write to it."""
        found = {param.parameter: state_io.expose(param) for param in params}
        for param in params:
            state_io.show(param, found[param.parameter])
        return found

    def adopt_writes(
        self, params: Sequence[ParamState], *, is_away: bool, again: bool = False
    ) -> None:
        """Adopt state that the caller has written or dropped; ``again``: the caller may still do
        so."""
        if not self.may_be_written:
            return
        with torch.no_grad():
            found = [self.shown.get(param.parameter) or {} for param in params]
            resolved = state_io.resolve_aliases(params, found)
            for param, shown, values in zip(params, found, resolved, strict=True):
                if shown:
                    shown.update(values)
                    state_io.adopt_writes(param, shown)
                elif not is_away:  # else once its weight can be read
                    state_io.reset(param)
                    self.shown[param.parameter] = state_io.expose(param)
        self.may_be_written = again

    def unmanaged(self, params: Sequence[ParamState]) -> dict[Tensor, Values]:
        """Return unreserved state: made by the class itself, or of frozen parameters."""
        managed = {param.parameter for param in params}
        return {p: values for p, values in self.shown.items() if p not in managed}

    def load_unmanaged(
        self,
        saved: Mapping[Any, Any],
        ids: Mapping[Tensor, Any],
        params: Sequence[ParamState],
        device: torch.device,
        *,
        steps_are_tensors: bool,
    ) -> None:
        """Replace unreserved state by saved values, stored like the plain optimizer: on ``device``,
        with their dtypes, steps as tensors.

        Args:
            saved: values by id.
            ids: id of every parameter.
            params: reserved parameters, which it skips.
            device: target of tensors.
            steps_are_tensors: whether the class stores steps as tensors, not numbers.
        """
        managed = {param.parameter for param in params}
        for parameter, saved_id in ids.items():
            if parameter in managed:
                continue
            found = {
                name: value.to(device) if isinstance(value, Tensor) and name != "step" else value
                for name, value in saved.get(saved_id, {}).items()
            }
            step = found.get("step")
            if steps_are_tensors and step is not None and not isinstance(step, Tensor):
                found["step"] = torch.tensor(float(step))  # like torch's classes in __setstate__
            self.shown.pop(parameter, None)
            if found:
                self.shown[parameter] = found

    def name_masters(self, params: Sequence[ParamState]) -> None:
        """Warn once about entries of a state dict that an optimizer without this library
        ignores."""
        mastered = [] if self._has_named else [param for param in params if param.emits_master]
        self._has_named = True
        if mastered:
            entries = " and ".join(sorted({repr(param.form.value) for param in mastered}))
            shards = "/".join(sorted({str(param.info.dtype)[6:] for param in mastered}))
            warn(
                "state_dict() holds the fp32 masters of %d parameters in %s: an "
"optimizer without fsdp_offload ignores them and continues from the "
"%s weights",
                len(mastered), entries, shards,
            )  # fmt: skip


# --------------------------------------------------------------------------- loads

Groups = list[dict[str, Any]]


def match(
    groups: Groups, loaded: Mapping[str, Any], params: Sequence[ParamState]
) -> tuple[dict[Tensor, Any], Sequence[Mapping[str, Any]]]:
    """Match saved ids (int or FQN) to parameters by position, like torch; returns them with the
    saved values of reserved parameters.

    Raises:
        StateDictError: not an optimizer state dict, or with other groups.
    """
    state = loaded.get("state")
    if not isinstance(state, Mapping) or not isinstance(loaded.get("param_groups"), list):
        raise StateDictError(
            f"a dict with keys {sorted(map(str, loaded))}",
            reason="an optimizer state dict has 'state' and 'param_groups'",
            remedy="pass the result of state_dict(), of this or of the plain optimizer",
        )
    sizes = [len(group["params"]) for group in loaded["param_groups"]]
    expected = [len(group["params"]) for group in groups]
    if sizes != expected:
        raise StateDictError(
            f"param_groups with {sizes} parameters",
            reason=f"this optimizer has {expected}: the checkpoint has another model or "
            "other groups",
            remedy="build the model and the parameter groups that were saved",
        )
    ids = {
        parameter: saved
        for group, saved_group in zip(groups, loaded["param_groups"], strict=True)
        for parameter, saved in zip(group["params"], saved_group["params"], strict=True)
    }
    for saved in ids.values():
        if not isinstance(state.get(saved, {}), Mapping):
            raise StateDictError(
                f"state of parameter {saved!r} of type {type(state[saved]).__name__}",
                reason="a parameter's state is a dict of names and values",
                remedy="pass the result of state_dict(), of this or of the plain optimizer",
            )
    # If a flattened checkpoint lacks an entry, torch's unflattening puts an empty dict.
    values = [
        {n: v for n, v in state.get(ids[p.parameter], {}).items() if not isinstance(v, dict)}
        for p in params
    ]
    return ids, values
