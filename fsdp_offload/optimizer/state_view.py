"""``optimizer.state`` as the caller sees it, and what becomes of writes into it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..update import state as state_io
from ..update.params import ParamState

Values = dict[str, Any]


class StateView:
    """Live state per parameter: tensors over host or device memory, under torch's names."""

    def __init__(self) -> None:
        self.shown: defaultdict[Tensor, Values] = defaultdict(dict)
        self.may_be_written = False
        """Whether a caller was shown it since :meth:`adopt_writes` looked for writes."""

    def expose(self, params: Sequence[ParamState]) -> None:
        """Show their memory as it is; nothing is copied."""
        for param in params:
            self.shown[param.parameter] = state_io.expose(param)

    def refresh(self, params: Sequence[ParamState]) -> None:
        """Their memory is other memory than before; what the caller has dropped stays dropped."""
        for param in params:
            if shown := self.shown.get(param.parameter):
                shown.update(state_io.expose(param))

    def show(self, params: Sequence[ParamState]) -> defaultdict[Tensor, Values]:
        """For a caller who may write into it: numbers are filled in, codes are decoded."""
        self.may_be_written = True
        for param in params:
            state_io.show(param, self.shown[param.parameter])
        return self.shown

    def read(self, params: Sequence[ParamState]) -> dict[Tensor, Values]:
        """What :meth:`show` shows of ``params``, for a caller who does not write into it."""
        found = {param.parameter: state_io.expose(param) for param in params}
        for param in params:
            state_io.show(param, found[param.parameter])
        return found

    def adopt_writes(
        self, params: Sequence[ParamState], *, is_away: bool, again: bool = False
    ) -> None:
        """Follow what the caller did to the state that was shown: written, or dropped; ``again``:
        it may still be done."""
        if not self.may_be_written:
            return
        with torch.no_grad():
            found = [self.shown.get(param.parameter) or {} for param in params]
            apart = state_io.apart(params, found)
            for param, shown, values in zip(params, found, apart, strict=True):
                if shown:
                    shown.update(values)
                    state_io.adopt_writes(param, shown)
                elif not is_away:  # else once its weight can be read
                    state_io.reset(param)
                    self.shown[param.parameter] = state_io.expose(param)
        self.may_be_written = again

    def unmanaged(self, params: Sequence[ParamState]) -> dict[Tensor, Values]:
        """What is not reserved: made and kept by the class, or of frozen parameters."""
        managed = {param.parameter for param in params}
        return {p: values for p, values in self.shown.items() if p not in managed}

    def load_unmanaged(
        self,
        saved: Mapping[Any, Any],
        ids: Mapping[Tensor, Any],
        params: Sequence[ParamState],
        device: torch.device,
    ) -> None:
        """Replace what :meth:`unmanaged` says by saved values, as the plain optimizer would keep
        them: on ``device``, dtypes kept.

        Args:
            saved: values by id.
            ids: of every parameter.
            params: those that are reserved; they are left alone.
            device: where tensors go.
        """
        managed = {param.parameter for param in params}
        for parameter, saved_id in ids.items():
            if parameter in managed:
                continue
            found = {
                name: value.to(device) if isinstance(value, Tensor) and name != "step" else value
                for name, value in saved.get(saved_id, {}).items()
            }
            self.shown.pop(parameter, None)
            if found:
                self.shown[parameter] = found
