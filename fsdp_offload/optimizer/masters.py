"""fp32 masters and the weights that they belong to: which of the two is the newer one.

Updates write the weight from its master. Others write weights alone: a load into the module, or
the caller by hand. Then the master has to become the weight, and only where the two differ, since
a master holds bits that its weight has not. Loads into the module given as ``model=`` are noticed
by hooks. Whole masters are compared with their weights by value, in each update and when state is
read. A bf16 weight and a remainder of 16 bits have no value to compare: after a
write by hand the master is at most half a bf16 step off, until ``resync()``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..core import dtensor
from ..core import storage as storages
from ..update import state as state_io
from ..update.params import MasterForm, ParamState
from ..update.schema import is_torch_class
from .device_state import DeviceState
from .lifecycle import Lifecycle
from .reservation import Reservation

_CHUNK = 1 << 20  # elements that a checksum looks at together: 16 MiB of temporaries


class Masters:
    """The masters of one optimizer."""

    def __init__(self, life: Lifecycle, reserved: Reservation, device_state: DeviceState) -> None:
        self._life, self._reserved, self._view = life, reserved, reserved.view
        self._device_state = device_state
        self.come_with_weights = False
        """From a load of the optimizer's state to the next step: weights loaded meanwhile are those
        that the loaded masters belong to."""
        self._compared: Tensor | None = None  # checksums of weights that masters agree with
        self._before_load: Tensor | None = None  # checksums of weights

    def changed(self) -> None:
        """Masters, or weights, are written here: compare them anew when state is read."""
        self._compared = None

    def follow_weights(self) -> None:
        """Whole masters become weights that were written since, where the two differ."""
        params = self._reserved.params
        if any(storages.is_empty(dtensor.with_history(p.parameter)) for p in params):
            return  # nothing can have been written into what has no memory
        with torch.no_grad():
            whole = [param for param in params if param.form is MasterForm.WHOLE]
            if not whole:
                return
            # On the device: a loop that reads the state of one parameter after the other would
            # else compare all masters each time.
            now = weight_checksums(whole)
            if self._compared is None or not torch.equal(now, self._compared):
                self._reserved.engine.ring.discard()
                for param in whole:
                    state_io.follow_shard(param)
            self._compared = now

    def set_from_weights(self, params: Sequence[ParamState]) -> None:
        """Masters become their weights."""
        with torch.no_grad():
            for param in params:
                state_io.write_master(param, {})
            self.changed()

    def forget_frozen(self) -> None:
        """Drop masters that were loaded for parameters which are not trained now."""
        if not is_torch_class(self._reserved.inner):
            return  # its state may have entries of these names
        for shown in self._view.unmanaged(self._reserved.params).values():
            for form in (MasterForm.REMAINDER, MasterForm.WHOLE):
                shown.pop(form.value, None)

    # ------------------------------------------------------------------ loads into the module

    def before_load(self) -> None:
        """The module is about to be loaded.

        Raises:
            AwayError: there are masters that would have to follow, and state is offloaded.
        """
        if not self._life.is_ours:
            return  # a forked process has the module, and none of the state
        with self._life.turn("a load into the model"):
            self._note_weights()

    def _note_weights(self) -> None:
        mastered = self._reserved.mastered()
        if mastered:
            self._device_state.check("a load into the model")
        self._before_load = None
        # torch's helpers show the state, load weights and state into it in place, and only then
        # call the load methods, the module's first. So where state was shown, masters may have
        # come with these weights, and only a change that this very load makes is a new weight.
        if self._view.may_be_written and not self.come_with_weights and mastered:
            self._before_load = weight_checksums(mastered)

    def after_load(self) -> None:
        """The module was loaded: masters become its weights, unless they came with them."""
        if self.come_with_weights or not self._life.is_ours:
            return
        with self._life.turn("a load into the model"):
            self._follow_load()

    def _follow_load(self) -> None:
        self._life.drain()
        self._reserved.engine.ring.discard()
        before, self._before_load = self._before_load, None
        params = self._reserved.mastered()
        if before is not None:
            changed = (weight_checksums(params) != before).tolist()
            params = [p for p, differs in zip(params, changed, strict=True) if differs]
        else:
            self.forget_frozen()
        self.set_from_weights(params)


def weight_checksums(params: Sequence[ParamState]) -> Tensor:
    """A checksum of each parameter's shard: 1-D int64, on the CPU.

    ``sum((2 i + 1) * bits[i])`` in wrapping int64: any one changed element changes it (an odd
    factor times a nonzero difference below 2^32 is never 0 modulo 2^64), and so does any swap of
    two different ones.
    """
    shards = [storages.present(dtensor.local(p.parameter)).reshape(-1) for p in params]
    found = torch.zeros(len(shards), dtype=torch.int64, device=shards[0].device)
    for total, shard in zip(found, shards, strict=True):
        bits = shard.view(torch.int16 if shard.itemsize == 2 else torch.int32)
        for start in range(0, bits.numel(), _CHUNK):
            chunk = bits[start : start + _CHUNK].to(torch.int64)
            factor = torch.arange(2 * start + 1, 2 * (start + len(chunk)), 2, device=chunk.device)
            total += (chunk * factor).sum()
    return found.cpu()


# --------------------------------------------------------------------------- hooks of the module


class ModuleHook:
    """Calls a method whenever a module is read or loaded, as long as its object lives.

    A copied or pickled module takes along a hook that does nothing.
    """

    def __init__(self, method: Callable[[], None] | None = None) -> None:
        self._find = (lambda: None) if method is None else weakref.WeakMethod(method)

    def __call__(self, *_: object) -> None:
        method = self._find()
        if method is not None:
            method()

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        return ModuleHook, ()


def watch_loads(models: Sequence[nn.Module], masters: Masters) -> list[RemovableHandle]:
    """Let masters follow each load into one of ``models``."""
    before, after = ModuleHook(masters.before_load), ModuleHook(masters.after_load)
    handles = []
    for model in models:
        handles.append(model.register_load_state_dict_pre_hook(before))
        handles.append(model.register_load_state_dict_post_hook(after))
    return handles


def watch_reads(models: Sequence[nn.Module], before: Callable[[], None]) -> list[RemovableHandle]:
    """Call the method before weights of ``models``, or of a module in them, are read or loaded."""
    handles = []
    for module in (module for model in models for module in model.modules()):
        hook = ModuleHook(before)
        handles.append(module.register_state_dict_pre_hook(hook))
        handles.append(module.register_load_state_dict_pre_hook(hook))
    return handles


def remove_all(handles: list[RemovableHandle]) -> None:
    """Remove these hooks; idempotent."""
    while handles:
        handles.pop().remove()


def tell_loaded(model: nn.Module) -> None:
    """Call what follows a load into ``model``: its weights were written by other means."""
    for hook in list(model._load_state_dict_post_hooks.values()):
        if isinstance(hook, ModuleHook):
            hook()
