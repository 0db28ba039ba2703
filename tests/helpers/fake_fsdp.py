"""FSDP2 as a test plays it: groups that gather, compute and reduce on streams of their own.

The order of calls, waits and allocations is FSDP2's (torch 2.13): a gather stream that waits for
the compute stream when a forward begins, gathers in forward and again in backward, a reduce
stream that waits for the compute stream before it allocates gradients, and a compute stream that
waits for the last reduction when a backward ends. With one rank nothing is gathered or reduced: the
compute stream copies shards and gradients itself (the latter in watched groups, which is ours).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fsdp_offload import HybridDeviceOptimizer
from fsdp_offload.core.backend import Backend, Event, Stream
from fsdp_offload.core.fsdp import Watcher
from fsdp_offload.optimizer import overlap
from tests.helpers.lanes import in_lanes


class FakeGroup:
    """What ``core.fsdp.find_groups`` finds, and what the test plays with."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters = list(parameters)
        self.gathered: list[Tensor] = []
        self.used: list[Tensor] = []
        self.event: Event | None = None
        self._watched: list[tuple[int, Callable[[], Watcher | None]]] = []

    def watch(self, index: int, watcher: Watcher, backend: Backend) -> Callable[[], None]:
        """As :meth:`fsdp_offload.core.fsdp.Group.watch`."""
        entry = (index, weakref.ref(watcher))
        self._watched.append(entry)
        return functools.partial(_forget, self._watched, entry)

    def tell(self, name: str, *args: Any) -> None:
        """Call each watcher's method."""
        for index, find in self._watched:
            watcher = find()
            if watcher is not None:
                getattr(watcher, name)(index, *args)


def _forget(watched: list[Any], entry: Any) -> None:
    if entry in watched:
        watched.remove(entry)


class FakeFsdp:
    """A model's groups and streams.

    Args:
        backend: whose streams are used.
        groups: parameters of each group, in the order of the forward.
        loose: parameters that no group holds.
        one_rank: nothing is gathered or reduced.
        ahead: the next group is gathered before this one is waited for (explicit prefetch).
    """

    def __init__(
        self,
        backend: Backend,
        groups: Sequence[Sequence[Tensor]],
        loose: Sequence[Tensor] = (),
        *,
        one_rank: bool = False,
        ahead: bool = False,
    ) -> None:
        self.backend, self.loose = backend, list(loose)
        self.one_rank, self.ahead = one_rank, ahead
        self.groups = [FakeGroup(parameters) for parameters in groups]
        self.gather, self.reduce = backend.stream("gather"), backend.stream("reduce")
        self.loose_used: list[Tensor] = []

    def wrap(self, inner: torch.optim.Optimizer, **settings: Any) -> HybridDeviceOptimizer:
        """A wrapper that sees these groups."""
        with mock.patch.object(overlap, "find_groups", return_value=self.groups):
            return in_lanes(inner, **settings)

    @property
    def current(self) -> Stream:
        """The compute stream."""
        return self.backend.current_stream()

    # ------------------------------------------------------------------ forward

    @torch.no_grad()
    def forward(self, unused: Collection[int] = ()) -> None:
        """Gather and read every group but the unused ones."""
        self.gather.wait(self.current.record())
        groups = [group for i, group in enumerate(self.groups) if i not in unused]
        for group, following in zip(groups, [*groups[1:], None], strict=True):
            self._unshard(group)
            if self.ahead and following is not None:
                self._unshard(following)
            self._wait_for_unshard(group)
            group.used = [torch.empty_like(p) for p in group.gathered]
            for used, gathered in zip(group.used, group.gathered, strict=True):
                self.current.launch(copy, used, gathered)
            group.gathered = []
        self.loose_used = [torch.empty_like(p) for p in self.loose]
        for used, parameter in zip(self.loose_used, self.loose, strict=True):
            self.current.launch(copy, used, parameter)

    def _unshard(self, group: FakeGroup) -> None:
        if group.gathered:
            return
        group.gathered = [torch.empty_like(p, requires_grad=False) for p in group.parameters]
        if self.one_rank:
            return
        group.tell("before_gather", self.gather)
        self._copy(group, self.gather)
        group.event = self.gather.record()

    def _wait_for_unshard(self, group: FakeGroup) -> None:
        if self.one_rank:
            group.tell("before_gather", self.current)
            self._copy(group, self.current)
        else:
            assert group.event is not None
            self.current.wait(group.event)
        group.tell("after_gather")

    @staticmethod
    def _copy(group: FakeGroup, stream: Stream) -> None:
        for gathered, parameter in zip(group.gathered, group.parameters, strict=True):
            stream.launch(copy, gathered, parameter)

    # ------------------------------------------------------------------ backward

    @torch.no_grad()
    def backward(
        self,
        step: int,
        *,
        unused: Collection[int] = (),
        without: Collection[Tensor] = (),
        is_last: bool = True,
    ) -> None:
        """Gradients of what the forward has read; parameters ``without`` get none."""
        for parameter, used in zip(self.loose, self.loose_used, strict=True):
            if parameter not in without:
                self._give(self.current, parameter, used, step)
        for index in reversed(range(len(self.groups))):
            if index not in unused:
                self._backward_of(self.groups[index], step, without, is_last)
        self.current.wait(self._reducing.record())
        self.loose_used = []

    @property
    def _reducing(self) -> Stream:
        return self.current if self.one_rank else self.reduce

    def _backward_of(
        self, group: FakeGroup, step: int, without: Collection[Tensor], is_last: bool
    ) -> None:
        self._unshard(group)
        self._wait_for_unshard(group)
        for used, gathered in zip(group.used, group.gathered, strict=True):
            self.current.launch(add, used, gathered)
        group.gathered = []
        if not any(p not in without and p.requires_grad for p in group.parameters):
            return
        group.tell("before_reduce")
        reduce = self._reducing
        reduce.wait(self.current.record())
        for parameter, used in zip(group.parameters, group.used, strict=True):
            if parameter not in without and parameter.requires_grad:
                self._give(reduce, parameter, used, step)
        # FSDP2 keeps what the reduction reads until the compute stream has waited for it.
        self._read = group.used
        if is_last:
            group.tell("after_reduce", reduce.record(), reduce)

    @staticmethod
    def _give(stream: Stream, parameter: Tensor, used: Tensor, step: int) -> None:
        if parameter.grad is not None:
            stream.launch(add_gradient, parameter.grad, used, step)
            return
        gradient = torch.empty_like(used)
        stream.launch(write_gradient, gradient, used, step)
        parameter.grad = gradient


def copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def add(target: Tensor, source: Tensor) -> None:
    target.add_(source)


def write_gradient(gradient: Tensor, used: Tensor, step: int) -> None:
    gradient.copy_(used * 0.25 + (step + 1) / 8)


def add_gradient(gradient: Tensor, used: Tensor, step: int) -> None:
    gradient.add_(used * 0.25 + (step + 1) / 8)


def scale(gradient: Tensor) -> None:
    gradient.mul_(0.5)
