"""Faults of the library that the sequences must find: one for each kind of event, and others."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final
from unittest import mock

from fsdp_offload import HybridDeviceOptimizer
from fsdp_offload.core.errors import OffloadError
from fsdp_offload.optimizer import hybrid, lifecycle, weights
from fsdp_offload.optimizer.lifecycle import Lifecycle
from fsdp_offload.optimizer.masters import Masters
from fsdp_offload.optimizer.reservation import Reservation
from fsdp_offload.optimizer.ring import Ring
from fsdp_offload.optimizer.weights import Away, Weights

from .net import ModelError

Call = Callable[..., Any]


def _idle_in_evaluation(step: Call) -> Call:
    def planted(self: Any, *args: Any) -> Any:
        return step(self, *args) if all(model.training for model in self._models) else None

    return planted


def _swallowing(step: Call) -> Call:
    def planted(self: Any, *args: Any) -> Any:
        with contextlib.suppress(ModelError):
            return step(self, *args)

    return planted


def _without_frozen(step: Call) -> Call:
    def planted(self: Any, *args: Any) -> Any:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.grad = parameter.grad if parameter.requires_grad else None
        return step(self, *args)

    return planted


def _to_none(zero_grad: Call) -> Call:
    return lambda self, set_to_none=True: zero_grad(self)


def _for_one_thread(turn: Call) -> Call:
    @contextlib.contextmanager
    def planted(self: Any, *args: Any, **options: Any) -> Iterator[None]:
        is_main = threading.current_thread() is threading.main_thread()
        with turn(self, *args, **options) if is_main else contextlib.nullcontext():
            yield

    return planted


def _for_handlers_too(turn: Call) -> Call:
    @contextlib.contextmanager
    def planted(self: Any, *args: Any, **options: Any) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OffloadError):
                stack.enter_context(turn(self, *args, **options))
            yield

    return planted


def _without_copies(bring: Call) -> Call:
    def planted(*args: Any) -> Any:
        with mock.patch.object(weights, "copy_all"):
            return bring(*args)

    return planted


def _nothing(call: Call) -> Call:
    return lambda *_, **__: None


PLANTS: Final[dict[str, tuple[object, str, Callable[[Call], Call]]]] = {
    "evaluation": (HybridDeviceOptimizer, "step", _idle_in_evaluation),
    "exceptions": (HybridDeviceOptimizer, "step", _swallowing),
    "freezing": (Reservation, "late", lambda late: lambda self: []),
    "zero_grad": (HybridDeviceOptimizer, "zero_grad", _to_none),
    "gradients by hand": (HybridDeviceOptimizer, "step", _without_frozen),
    "second thread": (Lifecycle, "turn", _for_one_thread),
    "signal handler": (Lifecycle, "turn", _for_handlers_too),
    "Ctrl-C": (lifecycle, "defer_sigint", lambda _: contextlib.nullcontext),
    "wrapped optimizer": (hybrid, "make_face", _nothing),
    "state that was fetched ahead is used after it was written": (Ring, "discard", _nothing),
    "masters do not follow weights before they are shown": (Masters, "follow_weights", _nothing),
    "slots keep weights that were updated since": (Weights, "bring", _without_copies),
    "what is written into a copy of a weight is lost": (Away, "flush", _nothing),
}
"""Whose function is replaced, and by what."""


def planted(name: str) -> contextlib.AbstractContextManager[object]:
    """Inside, the library has this fault."""
    owner, attribute, replaced = PLANTS[name]
    return mock.patch.object(owner, attribute, replaced(getattr(owner, attribute)))
