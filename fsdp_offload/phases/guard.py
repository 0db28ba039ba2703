"""What modules do while their memory is away.

[Note: two places per module]
``state_dict`` and ``load_state_dict`` end in one method per module that reads or writes the
module's own tensors, whatever stands around it (wrappers, torch.distributed.checkpoint). While
that method runs, the module's tables hold host tensors, so overrides of it work as well. Nothing
of it outlives the call, whether it returns or raises.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from .. import shards
from ..errors import AwayError
from ..groups import Group
from ..interrupts import held_back
from ..moving import absent
from ..patching import Patch, checked, remove_all

BeforeUse = Callable[[str], None]
"""Called with what is about to happen: it raises, or brings everything back."""


class ModuleGuard:
    """Stands before all modules of ``models`` from :meth:`close` to :meth:`open`.

    Args:
        models: with all of their modules.
        groups: the FSDP2 groups in them.
    """

    def __init__(self, models: Sequence[nn.Module], groups: Sequence[Group]) -> None:
        self._models, self._groups = models, groups
        self._patches: list[Patch] = []
        self._undo: list[Callable[[], None]] = []
        self._steps = StepHook()
        self._allow_graphs: Callable[[], None] = do_nothing
        self._is_loaded = False

    def close(self, before_use: BeforeUse, lock: threading.RLock) -> None:
        """Let ``before_use`` know of every use, and show host tensors to state dicts.

        ``lock`` is held while modules have host tensors: whoever brings memory back holds it, too.
        """
        modules = dict.fromkeys(module for model in self._models for module in model.modules())
        before_use = _untraced(before_use)
        checks = {
            "forward": checked(before_use, "a compiled forward"),
            "_apply": checked(before_use, "a move or cast of the model"),
            "__reduce_ex__": checked(before_use, "a copy of the model"),
        }
        forward = _Forward(before_use)
        for module in modules:
            # At the front: FSDP2's own hook reads the shards.
            self._undo.append(module.register_forward_pre_hook(forward, prepend=True).remove)
            for name, check in checks.items():
                # What torch.compile has made looks at no hooks, but at whether this is replaced.
                self._patch(module, name, check)
            self._patch(module, "_save_to_state_dict", _on_host(module, lock))
            self._patch(module, "_load_from_state_dict", self._into_host(module, lock))
        for group in self._groups:
            group.close(before_use, self._patches)
        tensors = [t for m in self._models for t in (*m.parameters(), *m.buffers())]
        away = {id(t): t for t in tensors if absent.is_absent(t)}
        self._steps.add(_check_steps(away, before_use), register_optimizer_step_pre_hook)
        self._allow_graphs = shards.spoil_graphs(away.values())
        self._is_loaded = False

    def open(self) -> None:
        """Leave everything as it was. Idempotent."""
        remove_all(self._patches)
        for undo in self._undo:
            undo()
        self._steps.remove()
        if not self._is_loaded:  # else graphs from before have other values in mind
            self._allow_graphs()
        self._allow_graphs = do_nothing
        self._patches.clear()
        self._undo.clear()

    def _into_host(self, module: nn.Module, lock: threading.RLock) -> Callable[..., Any]:
        def load(
            original: Callable[..., Any],
            state_dict: Any,
            prefix: str,
            local_metadata: dict[str, Any],
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            if local_metadata.get("assign_to_params_buffers"):
                raise AwayError(
                    "load_state_dict(assign=True) of an offloaded model",
                    reason="it would put other tensors in the place of those that come back",
                    remedy="load without assign=True, or reload() first",
                )
            self._is_loaded = True
            with lock, held_back(), host_tensors(module):
                return original(state_dict, prefix, local_metadata, *args, **kwargs)

        return load

    def _patch(self, module: nn.Module, name: str, replacement: Callable[..., Any]) -> None:
        Patch(module, name, replacement, self._patches)


class StepHook:
    """What torch calls before steps of one optimizer, or of all, however a step is reached: a
    method that was bound before, or that is called by its class, passes a :class:`Patch` by."""

    def __init__(self) -> None:
        self._before: Callable[[Optimizer], None] | None = None
        self._handle: RemovableHandle | None = None
        self._n_running = 0

    def add(
        self,
        before: Callable[[Optimizer], None],
        register: Callable[[Callable[..., None]], RemovableHandle],
    ) -> None:
        """Call ``before`` from now on, instead of what was called so far.

        Args:
            before: kept alive until :meth:`remove`, but not by torch.
            register: what takes a hook; always the same.
        """
        self._before = before
        if self._handle is None:
            self._handle = register(_Entry(weakref.ref(self)))

    def remove(self) -> None:
        """Call nothing any more. Idempotent."""
        self._before = None
        # While torch goes over its table, only the last entry may be taken out: it looks for none
        # behind that. Another one stays, without effect, for the next add() and remove().
        if self._handle is None or (self._n_running and not self._is_last(self._handle)):
            return
        self._handle.remove()
        self._handle = None

    def __del__(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    @staticmethod
    def _is_last(handle: RemovableHandle) -> bool:
        table = handle.hooks_dict_ref()
        return not table or next(reversed(table)) == handle.id

    def run(self, optimizer: Optimizer) -> None:
        """A step of ``optimizer`` begins. What a call has put in its own place is called, too."""
        called = None
        self._n_running += 1
        try:
            while self._before is not None and self._before is not called:
                called = self._before
                called(optimizer)
        finally:
            self._n_running -= 1


class _Entry:
    """In torch's table of hooks; without effect in a copy."""

    def __init__(self, find: Callable[[], StepHook | None] | None = None) -> None:
        self._find = find

    def __call__(self, optimizer: Optimizer, *call: object) -> None:
        hook = None if self._find is None else self._find()
        if hook is not None:
            hook.run(optimizer)

    def __reduce__(self) -> tuple[type[_Entry], tuple[()]]:
        return _Entry, ()


class _Forward:
    """A forward pre-hook; without effect in a copy."""

    def __init__(self, before_use: BeforeUse | None = None) -> None:
        self._before_use = before_use

    def __call__(self, module: nn.Module, args: object) -> None:
        if self._before_use is not None:
            self._before_use(f"forward of {type(module).__name__}")

    def __reduce__(self) -> tuple[type[_Forward], tuple[()]]:
        return _Forward, ()


def _untraced(before_use: BeforeUse) -> BeforeUse:
    """The same, called by compiled code instead of being compiled with it."""
    if "torch._dynamo" not in sys.modules:  # slow to import, and nothing is compiled
        return before_use
    found: BeforeUse = torch.compiler.disable(before_use)
    return found


def _check_steps(away: Mapping[int, Tensor], before_use: BeforeUse) -> Callable[[Optimizer], None]:
    """Let ``before_use`` know of steps of any optimizer that has tensors of ``away``, by identity.
    They are kept alive."""

    def check(optimizer: Optimizer) -> None:
        users = (p for group in optimizer.param_groups for p in group["params"])
        if any(id(p) in away and p.grad is not None for p in users):
            before_use(f"step() of {type(optimizer).__name__}")

    return check


def do_nothing() -> None:
    """There are no graphs to allow, there is nothing to end, or nobody to tell."""


def _on_host(module: nn.Module, lock: threading.RLock) -> Callable[..., Any]:
    def save(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with lock, held_back(), host_tensors(module):
            return original(*args, **kwargs)

    return save


@contextmanager
def host_tensors(module: nn.Module) -> Iterator[None]:
    """Inside, parameters and buffers of the module itself that are away are host tensors.

    Over the memory that holds their bytes: what is written arrives when they come back.
    """
    swapped: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
    tables: list[dict[str, Any]] = [module._parameters, module._buffers]
    try:
        for table in tables:
            for name, tensor in list(table.items()):
                view = None if tensor is None else absent.host_view(tensor)
                if view is None:
                    continue
                if isinstance(tensor, nn.Parameter):
                    view = nn.Parameter(view, requires_grad=tensor.requires_grad)
                swapped.append((table, name, tensor, view))
                table[name] = view
        yield
    finally:
        for table, name, tensor, view in swapped:
            if table.get(name) is view:  # else the module has replaced it itself
                table[name] = tensor
