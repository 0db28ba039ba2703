"""The optimizer of a :class:`PhaseOffloader`, of three kinds behind one face."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..device import Gateway
from ..errors import ClosedError, ConfigError, DeviceMemoryError
from ..moving import Block, Mover, Trip
from ..patching import Patch, checked, weakly
from .guard import BeforeUse, StepHook, do_nothing
from .handle import Handle
from .plain_state import PlainState, parameters_of
from .policies import Policies

MakeRoom = Callable[[], bool]


class OptimizerState:
    """No optimizer, one whose state stays, or (subclasses) one whose state moves.

    Args:
        optimizer: kept from stepping while parameters are away.
    """

    _checks_itself: ClassVar[bool] = False
    """Whether the optimizer knows of its absence and follows its state, however it is called."""

    def __init__(self, optimizer: Optimizer | None) -> None:
        self._optimizer: Any = optimizer
        self._hook = StepHook()

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Keys and tensors of state that somebody else has to move, or to leave alone."""
        return iter(()) if self._optimizer is None else PlainState(self._optimizer).named()

    def parameters(self) -> list[Tensor]:
        """What it updates."""
        return [] if self._optimizer is None else parameters_of(self._optimizer)

    def reserve(self) -> None:
        """Host memory for what it moves itself; state that it makes of weights is made by then.

        Raises:
            DeviceMemoryError: others have taken device memory meanwhile, and it is away.
        """

    def synchronize(self) -> None:
        """Updates under way are in order of the current stream when this returns."""
        wait = getattr(self._optimizer, "synchronize", None)
        if callable(wait):
            wait()

    def offload(self, mover: Mover, blocks: Sequence[Block]) -> Trip:
        """State leaves."""
        return mover.out(blocks)

    def reload(self, mover: Mover, blocks: Sequence[Block], make_room: MakeRoom | None) -> Trip:
        """State comes back. Raises torch.OutOfMemoryError, or a DeviceMemoryError."""
        return mover.back(blocks, make_room=make_room)

    def close(self, before_use: BeforeUse, patches: list[Patch]) -> None:
        """Tell of uses while memory is away, until ``patches``, which get what does it, are
        removed."""
        if self._optimizer is None:
            return
        rates = [group.get("lr") for group in self._optimizer.param_groups]

        def check(_: Optimizer) -> None:
            try:
                before_use(f"step() of {type(self._optimizer).__name__}")
            except BaseException:
                self._end_initialisation(rates)
                raise

        def step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            check(self._optimizer)
            # on_use="reload" has put another step in this one's place: it follows the state.
            return self._optimizer.step(*args, **kwargs)

        self._replace_step(step, check, patches)

    def _replace_step(
        self,
        step: Callable[..., Any],
        before: Callable[[Optimizer], None],
        patches: list[Patch],
    ) -> None:
        """Let ``step`` be called in its place, or ``before`` ahead of it where it is reached by
        another way, until ``patches``, to which this adds, are removed."""
        # A class that wraps another optimizer may have no hooks.
        if self._checks_itself or not hasattr(self._optimizer, "_optimizer_step_pre_hooks"):
            Patch(self._optimizer, "step", step, patches)
        else:
            _HookedStep(self._optimizer, step, before, self._hook, patches)

    def around_load(
        self, before: Callable[[], None], after: Callable[[], None]
    ) -> Callable[[], None]:
        """Call ``before`` and ``after``, methods whose objects are not kept alive, when a load puts
        other state tensors in the place of those that somebody else moves; returns what ends it."""
        return do_nothing

    def after_steps(self, call: Callable[[], None]) -> Callable[[], None]:
        """Call ``call``, a method whose object is not kept alive, after each step; returns what
        ends it. Of a class without torch's hooks no step is seen."""
        if not hasattr(self._optimizer, "_optimizer_step_post_hooks"):
            return do_nothing
        end: Callable[[], None] = self._optimizer.register_step_post_hook(_AfterStep(call)).remove
        return end

    def _end_initialisation(self, rates: Sequence[Any]) -> None:
        """Undo what ``torch.distributed.checkpoint.state_dict`` does before it lets an optimizer
        make its state by a step: gradients and rates of 0, which it leaves behind if that raises.
        """
        groups = self._optimizer.param_groups
        is_zero = all(group.get("lr") == 0.0 for group in groups)
        if self._optimizer.state or not is_zero or all(rate == 0.0 for rate in rates):
            return
        for group, rate in zip(groups, rates, strict=False):
            if rate is not None:
                group["lr"] = rate
        self._optimizer.zero_grad()

    def follow(self, handle: Handle, trip: Trip, gateway: Gateway, patches: list[Patch]) -> None:
        """Until ``handle`` is done, let uses of the state come after ``trip``, by ``patches``, to
        which this adds."""
        if self._optimizer is None or handle.is_done():
            return

        has_followed = False

        def step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            nonlocal has_followed
            if not handle.is_done():
                trip.follow(gateway.current_stream())
            has_followed = True
            try:
                return original(*args, **kwargs)
            finally:
                has_followed = False

        def follow(_: Optimizer) -> None:
            # Without a look at the handle: its end removes the hook, over which torch goes now.
            if not has_followed:
                trip.follow(gateway.current_stream())

        def wait(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            handle.wait()
            return original(*args, **kwargs)

        self._replace_step(step, follow, patches)
        Patch(self._optimizer, "state_dict", wait, patches)
        Patch(self._optimizer, "load_state_dict", wait, patches)


class _AfterStep:
    """A step post-hook for which updates under way need not have ended."""

    reads_parameters = False

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = weakly(call)

    def __call__(self, *_: object) -> None:
        self._call()


class _HookedStep(Patch):
    """``step`` of an optimizer, replaced for whoever calls it by name, and hooked for others.

    Args:
        optimizer: has torch's hooks.
        step: as of :class:`Patch`.
        before: called before steps that do not come through ``step``, or come through it.
        hook: of this optimizer; one of these uses it at a time.
        into: as of :class:`Patch`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        step: Callable[..., Any],
        before: Callable[[Optimizer], None],
        hook: StepHook,
        into: list[Patch],
    ) -> None:
        self._hook = hook
        super().__init__(optimizer, "step", step, into)
        hook.add(before, optimizer.register_step_pre_hook)

    def remove(self) -> None:
        """See :class:`Patch`."""
        if self._is_active:  # else the hook may be another one's by now
            self._hook.remove()
        super().remove()


class _MovedState(OptimizerState):
    """A plain optimizer, whose state tensors are blocks like any others."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._plain = PlainState(optimizer)

    def named(self) -> Iterator[tuple[str, Tensor]]:
        return self._plain.named()

    def reload(self, mover: Mover, blocks: Sequence[Block], make_room: MakeRoom | None) -> Trip:
        trip = super().reload(mover, blocks, make_room)
        try:
            self._plain.arrive()
        except BaseException:
            trip.wait()
            raise
        return trip

    def close(self, before_use: BeforeUse, patches: list[Patch]) -> None:
        super().close(before_use, patches)
        self._plain.close(patches)
        copy = checked(before_use, f"a copy of {type(self._optimizer).__name__}")
        Patch(self._optimizer, "__reduce_ex__", copy, patches)

    def around_load(
        self, before: Callable[[], None], after: Callable[[], None]
    ) -> Callable[[], None]:
        if not hasattr(self._optimizer, "_optimizer_load_state_dict_pre_hooks"):
            return super().around_load(before, after)
        first = self._optimizer.register_load_state_dict_pre_hook(weakly(before))
        last = self._optimizer.register_load_state_dict_post_hook(weakly(after))

        def end() -> None:
            first.remove()
            last.remove()

        return end


class _OwnState(OptimizerState):
    """An optimizer that moves its own state."""

    _checks_itself = True

    def named(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    def reserve(self) -> None:
        self._optimizer.reserve_offload()

    def offload(self, mover: Mover, blocks: Sequence[Block]) -> Trip:
        trip: Trip = self._optimizer.offload(wait=False)
        return trip

    def reload(self, mover: Mover, blocks: Sequence[Block], make_room: MakeRoom | None) -> Trip:
        while True:
            try:
                trip: Trip = self._optimizer.reload(wait=False)
            except ClosedError:  # its state is gone; what else is away has to come back
                return Trip()
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not is_out_of_memory(error) or make_room is None or not make_room():
                    raise
            else:
                return trip


def find_state(optimizer: Any, policies: Policies) -> OptimizerState:
    """The kind that ``optimizer`` is.

    Raises:
        ConfigError: no optimizer, or one that is wrapped.
    """
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer of type {type(optimizer).__name__}",
            reason="not a torch.optim.Optimizer",
            remedy="pass the optimizer itself, or None",
        )
    if getattr(getattr(optimizer, "__dict__", {}).get("step"), "forwards_to_wrapper", False):
        raise ConfigError(
            f"optimizer {type(optimizer).__name__}",
            reason="it is wrapped: its HybridDeviceOptimizer holds the state",
            remedy="pass the wrapper",
        )
    if getattr(optimizer, "is_offloaded", False):  # a HybridDeviceOptimizer
        return _OwnState(optimizer) if policies.state == "save" else _Kept(optimizer)
    if optimizer is not None and policies.state == "save":
        return _MovedState(optimizer)
    return OptimizerState(optimizer)


class _Kept(OptimizerState):
    """An optimizer that could move its own state, and is not asked to."""

    _checks_itself = True

    def named(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())


def is_out_of_memory(error: BaseException) -> bool:
    """Torch's error, or ours."""
    return isinstance(error, torch.OutOfMemoryError | DeviceMemoryError)
