"""Keep fp32 masters and their weights in sync: decide which of the two is newer.

Updates write the weight from its master. Loads into the module, and the caller, write only weights.
Then the master has to become the weight, but only where the two differ, because a master has more
bits. Hooks notice loads into the module given as ``model=``. Whole masters are compared with their
weights by value, in each update and when state is read. A bf16 weight with a 16-bit remainder
cannot be compared: after the caller wrote the weight, the master is at most half a bf16 step off,
until ``resync()``.
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

_CHUNK = 1 << 20  # elements per step of a checksum: 16 MiB of temporaries


class Masters:
    """The masters of one optimizer."""

    def __init__(self, life: Lifecycle, reserved: Reservation, device_state: DeviceState) -> None:
        self._life, self._reserved, self._view = life, reserved, reserved.view
        self._device_state = device_state
        self.come_with_weights = False
        """True from a load of the optimizer's state to the next step: weights loaded meanwhile
        belong to the loaded masters."""
        self._compared: Tensor | None = None  # checksums of weights that match the masters
        self._before_load: Tensor | None = None  # checksums of weights

    def changed(self) -> None:
        """Record that this package wrote masters or weights, so the next read of state compares
        them again."""
        self._compared = None

    def follow_weights(self) -> None:
        """Set whole masters from weights that were written since, where the two differ."""
        whole = [p for p in self._reserved.params if p.form is MasterForm.WHOLE]
        if not whole or any(storages.is_empty(dtensor.local(p.parameter)) for p in whole):
            return  # freed memory cannot have been written
        with torch.no_grad():
            # Checksums on the device, because a loop that reads one parameter's state after the
            # other would otherwise compare all masters each time.
            now = weight_checksums(whole)
            if self._compared is None or not torch.equal(now, self._compared):
                self._reserved.engine.ring.discard()
                for param in whole:
                    state_io.follow_shard(param)
            self._compared = now

    def set_from_weights(self, params: Sequence[ParamState]) -> None:
        """Set masters from their weights."""
        with torch.no_grad():
            for param in params:
                state_io.write_master(param, {})
            self.changed()

    def forget_frozen(self) -> None:
        """Drop masters that were loaded for frozen parameters."""
        if not is_torch_class(self._reserved.inner):
            return  # its state may have entries with these names
        for shown in self._view.unmanaged(self._reserved.params).values():
            for form in (MasterForm.REMAINDER, MasterForm.WHOLE):
                shown.pop(form.value, None)

    # ------------------------------------------------------------------ loads into the module

    def before_load(self) -> None:
        """Prepare for a load into the module.

        Raises:
            AwayError: masters would have to follow, and state is offloaded.
        """
        if not self._life.is_ours:
            return  # a forked process has the module but not the state
        with self._life.turn("a load into the model"):
            self._note_weights()

    def _note_weights(self) -> None:
        mastered = self._reserved.mastered()
        if mastered:
            self._device_state.check("a load into the model")
        self._before_load = None
        # torch's helpers read the state, load weights and state into it in place, and only then
        # call the load methods, the module's first. So if state was read, masters may have come
        # with these weights, and only a change by this load itself makes a new weight.
        if self._view.may_be_written and not self.come_with_weights and mastered:
            self._before_load = weight_checksums(mastered)

    def after_load(self) -> None:
        """Set masters from the loaded weights, unless both were loaded together."""
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
    """Compute a checksum of each parameter's shard: 1-D int64, on the CPU.

    ``sum((2 i + 1) * bits[i])`` in wrapping int64: any one changed element changes it (an odd
    factor times a nonzero difference below 2^32 is never 0 modulo 2^64), and so does any swap of
    two different ones.
    """
    shards = [storages.present(dtensor.local(p.parameter)).reshape(-1) for p in params]
    found = {  # some weights may be in host memory
        device: torch.zeros(len(shards), dtype=torch.int64, device=device)
        for device in dict.fromkeys(shard.device for shard in shards)
    }
    for index, shard in enumerate(shards):
        total = found[shard.device][index]
        bits = shard.view(torch.int16 if shard.itemsize == 2 else torch.int32)
        for start in range(0, bits.numel(), _CHUNK):
            chunk = bits[start : start + _CHUNK].to(torch.int64)
            factor = torch.arange(2 * start + 1, 2 * (start + len(chunk)), 2, device=chunk.device)
            total += (chunk * factor).sum()
    return torch.stack([each.cpu() for each in found.values()]).sum(0)


# --------------------------------------------------------------------------- hooks of the module


class ModuleHook:
    """Calls a method when a module is read or loaded, as long as the method's object lives.

    A copied or pickled module gets a hook that does nothing.
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
    """Install hooks that update masters after each load into one of ``models``."""
    before, after = ModuleHook(masters.before_load), ModuleHook(masters.after_load)
    handles = []
    for model in models:
        handles.append(model.register_load_state_dict_pre_hook(before))
        handles.append(model.register_load_state_dict_post_hook(after))
    return handles


def watch_reads(models: Sequence[nn.Module], before: Callable[[], None]) -> list[RemovableHandle]:
    """Install hooks that call ``before`` when weights of ``models``, or of a module in them, are
    read or loaded."""
    handles = []
    for module in (module for model in models for module in model.modules()):
        hook = ModuleHook(before)
        handles.append(module.register_state_dict_pre_hook(hook))
        handles.append(module.register_load_state_dict_pre_hook(hook))
    return handles


def tell_loaded(model: nn.Module) -> None:
    """Call the hooks of a load into ``model``, after other code wrote its weights."""
    for hook in list(model._load_state_dict_post_hooks.values()):
        if isinstance(hook, ModuleHook):
            hook()
