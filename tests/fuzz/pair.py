"""A wrapped optimizer and the plain one over equal models, told the same and compared by bits."""

from __future__ import annotations

import contextlib
import copy
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from fsdp_offload import PhaseOffloader, TransferConfig
from fsdp_offload.core.errors import AwayError, OffloadError, SpentGradientError
from fsdp_offload.plan import residency
from tests.helpers.compare import rounded
from tests.helpers.lanes import in_lanes
from tests.helpers.side_by_side import MASTERS

from .bits import Mismatch, check_same, master_of
from .cases import Case
from .net import ModelError, like, local, make_net

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

FLAGS: Final = ("params", "foreach", "fused", "capturable", "differentiable", "param_names")
"""Entries of a group that say how a kernel runs, or whose they are."""
READS: Final = ("state", "state", "state_dict", "state_dict", "param_groups", "statistics")
LOSS: Final = 1.5
"""What a closure returns."""
REFUSALS: Final[dict[str, tuple[type[OffloadError], str]]] = {
    "use while away": (AwayError, "offloaded|away"),
    "use between backward and step": (SpentGradientError, "before step"),
    "leaving with gradients that no step has consumed": (OffloadError, "gradient"),
}
"""Where the wrapper may raise though the plain optimizer goes on: documented, and nothing else."""


class Pair:
    """Both sides of a case.

    ``mine`` are the wrapped side's parameters, ``carriers`` the twin model's, and ``theirs`` what
    the plain optimizer updates: the carriers' shards, or fp32 masters of them, which are rounded
    into the carriers after each update.
    """

    def __init__(self, case: Case, folder: Path, mesh: DeviceMesh | None = None) -> None:
        self.case, self.folder, self.mesh = case, folder, mesh
        self.model, self.twin = make_net(case, mesh), make_net(case, mesh)
        self.mine, self.carriers = list(self.model.parameters()), list(self.twin.parameters())
        self.theirs = [nn.Parameter(local(p)) for p in self.carriers]
        self.groups = [list(group) for group in case.groups]
        self.later = list(case.later)
        self.lanes = list(case.lanes)
        self.is_wrapped = False
        self.wrapped: Any = self._build(self.mine)
        self.inner: Any = self.wrapped
        self.plain = self._build_plain()
        self.has_run = self.is_spent = self.has_loaded = False
        self.unused = set[int]()  # whose gradients no step has seen
        self.stepped = set[int]()
        self.unrecorded = set[int]()  # frozen when they were wrapped
        self.phases: dict[str, PhaseOffloader] = {}
        self.saved: dict[int, Any] = {}
        self.schedulers: list[Any] = []
        self.log: list[str] = []
        self.counts = Counter[str]()
        self.has_taken = False  # backward has updated parameters, and step() was not called

    def say(self, what: object) -> None:
        """Note what an event does, for whoever reads the report of a failure."""
        self.log.append(str(what))

    def count(self, what: str, where: str) -> None:
        """For the table at the end."""
        self.counts[f"{what}: {where}"] += 1

    @property
    def order(self) -> list[int]:
        """Parameters in the order of the groups."""
        return [i for group in self.groups for i in group]

    # ------------------------------------------------------------------ building

    def _build(self, parameters: list[Any], *, plain: bool = False) -> Optimizer:
        groups = [{"params": [parameters[i] for i in group]} for group in self.groups]
        built = self.case.cls(groups, **self.case.arguments(plain=plain))
        for group in built.param_groups[1:]:
            group["lr"] = group["lr"] * 3
        return built

    def _build_plain(self) -> Optimizer:
        together = self._build(self.theirs, plain=self.is_wrapped)
        if not self.case.apart:
            self.origins = list(range(len(self.groups)))
            return together
        self.origins = [g for g, group in enumerate(self.groups) for _ in group]
        arguments = self.case.arguments(plain=self.is_wrapped)
        apart = self.case.cls([{"params": [p]} for p in _parameters(together)], **arguments)
        for group, origin in zip(apart.param_groups, self.origins, strict=True):
            self.set_group(group, together.param_groups[origin], flags=True)
        return apart

    @staticmethod
    def set_group(group: dict[str, Any], values: dict[str, Any], *, flags: bool = False) -> None:
        """Take over clones of a group's options; ``flags``: also which kernel it is for."""
        left_out = ("params",) if flags else FLAGS
        group.update({k: copy.deepcopy(v) for k, v in values.items() if k not in left_out})

    def plain_groups(self, index: int) -> list[dict[str, Any]]:
        """The plain optimizer's groups that stand for group ``index``."""
        groups = zip(self.plain.param_groups, self.origins, strict=True)
        return [group for group, origin in groups if origin == index]

    def wrap(self) -> None:
        """From here on the one side is wrapped; masters of the other begin as its weights."""
        before = self.plain_state(cloned=True)
        self.is_wrapped = True
        options = [self.plain.param_groups[self.origins.index(i)] for i in range(len(self.groups))]
        for i, carrier in enumerate(self.carriers):
            if self.case.has_master(i):
                piece = local(carrier).float()
                self.theirs[i] = nn.Parameter(piece, self.theirs[i].requires_grad)
        self.plain = self._build_plain()
        for group, origin in zip(self.plain.param_groups, self.origins, strict=True):
            self.set_group(group, options[origin])
        for i, state in self.plain_state(cloned=True).items():
            if i not in self.stepped:  # what was made for half precision is made again
                before[i] = state
        self.set_plain_state(before)
        self.rewrap(self.wrapped)

    def rewrap(self, inner: Optimizer) -> None:
        """Wrap ``inner`` with the lanes of now."""
        case = self.case
        wrap = dict(case.wrap)
        if "offload_fraction" in wrap:
            wrap["update_on"] = "host" if "host" in self.lanes else "device"
        else:
            trainable = self._trainable()
            wrap["update_on"] = [self._lane(n) for n in range(len(trainable))]
        self.inner = inner
        with mock.patch.object(residency, "LEAST_SLOTS", case.slots):
            self.wrapped = in_lanes(
                inner,
                model=self.model if case.gives_model else None,
                master_weights=case.mastered,
                transfer=TransferConfig(**case.transfer),
                **wrap,
            )
        self.schedulers = []
        self.unrecorded = {i for i in self.order if not self.mine[i].requires_grad}

    def _trainable(self) -> list[int]:
        return [i for i in self.order if self.mine[i].requires_grad]

    def _lane(self, position: int) -> str:
        return self.lanes[position % len(self.lanes)]

    def has_remainder(self, index: int) -> bool:
        """Whether weight and remainder together are the master of parameter ``index``."""
        if index in self.unrecorded or self.case.dtypes[index] != torch.bfloat16:
            return False
        return self.case.has_master(index)

    def rebuilt_inner(self) -> Optimizer:
        """A new optimizer over the wrapped side's parameters, with the options of now."""
        inner = self._build(self.mine)
        for group, values in zip(inner.param_groups, self.wrapped.param_groups, strict=True):
            self.set_group(group, values)
        return inner

    def reshard(self) -> bool:
        """An evaluation may have left weights gathered; whether none is now."""
        for model in (self.model, self.twin):
            for module in model.modules() if self.case.sharded else ():
                if isinstance(module, FSDPModule):
                    module.reshard()
        # After a forward that raised, FSDP2 does not do it.
        return all(a is b for a, b in zip(self.model.parameters(), self.mine, strict=True))

    def add_group(self) -> None:
        """A group with the parameters that were left out."""
        added, self.later = self.later, []
        self.groups.append(added)
        self.wrapped.add_param_group({"params": [self.mine[i] for i in added], "lr": 0.02})
        for part in [[i] for i in added] if self.case.apart else [added]:
            self.plain.add_param_group({"params": [self.theirs[i] for i in part], "lr": 0.02})
            self.origins.append(len(self.groups) - 1)
        # Adagrad makes state in its constructor; that of torch 2.11 fails in the step after this.
        made = self.case.cls(self.theirs, **self.case.arguments(plain=self.is_wrapped)).state
        for i in added:
            if self.theirs[i] in made and not self.plain.state[self.theirs[i]]:
                self.plain.state[self.theirs[i]] = made[self.theirs[i]]
        self.schedulers = []

    def close(self) -> None:
        """Give everything back."""
        for phases in self.phases.values():
            phases.close()
        if self.is_wrapped:
            self.wrapped.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    # ------------------------------------------------------------------ gradients and steps

    def set_gradients(
        self, generator: torch.Generator, present: list[bool], scale: float, *, layout: str = ""
    ) -> None:
        """One process: new gradients for both, set by hand."""
        for i, has in enumerate(present):
            mine, carrier = self.mine[i], self.carriers[i]
            drawn = torch.randn(mine.shape, generator=generator) * scale
            self.unused.discard(i)
            if not (has and mine.requires_grad):
                mine.grad = carrier.grad = None
                continue
            self.unused.add(i)
            carrier.grad = drawn.to(mine.dtype)
            mine.grad = _laid_out(drawn.to(mine.dtype), layout)

    def add_gradients(self, generator: torch.Generator, *, in_place: bool) -> None:
        """One process: a second backward adds to those that are there."""
        for i, (mine, carrier) in enumerate(zip(self.mine, self.carriers, strict=True)):
            if mine.grad is None:
                continue
            self.unused.add(i)
            drawn = torch.randn(mine.shape, generator=generator).to(mine.dtype)
            if in_place:
                mine.grad.add_(drawn)
            else:
                mine.grad = mine.grad + drawn
            carrier.grad = carrier.grad + drawn

    def inputs(
        self, generator: torch.Generator, present: list[bool]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Of both models: other ones on each rank."""
        data = [
            torch.randn(p.shape, generator=generator) if has else None
            for p, has in zip(self.mine, present, strict=True)
        ]
        return torch.randn(3, generator=generator) + torch.distributed.get_rank(), data

    def backward(self, generator: torch.Generator, present: list[bool], scale: float) -> None:
        """Forward and backward of both models."""
        x, data = self.inputs(generator, present)
        losses = []
        for model in (self.model, self.twin):
            loss = model(x.clone().requires_grad_(), data).float().sum() * scale
            losses.append(loss.detach())
            if loss.requires_grad:
                loss.backward()
        check_same(*losses, "loss")
        reached = {i for i, p in enumerate(self.mine) if present[i] and p.requires_grad}
        self.unused |= reached
        self.has_run = True
        # A group is taken whole: what earlier backward passes left there, too.
        layers = [set(layer) for layer in self.case.layers]
        taken = set().union(*(layer for layer in layers if layer & reached)) & set(self.order)
        has = any(self.mine[i].grad is not None for i in taken)
        self.has_taken |= self.in_backward and has

    def fail(self, generator: torch.Generator, present: list[bool], place: str) -> None:
        """Both models raise in the same place."""
        x, data = self.inputs(generator, present)
        number = int(torch.randint(len(self.case.layers), (), generator=generator))
        for model in (self.model, self.twin):
            with contextlib.suppress(ModelError):
                loss = model(x.clone().requires_grad_(), data, (place, number)).float().sum()
                loss.backward()
        self.has_run = True
        if self.has_taken:
            self.evaluate(generator, [True] * len(present))  # or FSDP2 would not reshard

    @torch.no_grad()
    def evaluate(self, generator: torch.Generator, present: list[bool]) -> None:
        """A forward of both."""
        x, data = self.inputs(generator, present)
        losses = [model(x.clone(), data).float().sum() for model in (self.model, self.twin)]
        self.has_run = True
        if self.has_taken:
            self.reshard()  # FSDP2 would go on with weights that are half updated
        else:
            check_same(*losses, "loss of an evaluation")

    @property
    def in_backward(self) -> bool:
        """Whether backward passes update parameters."""
        return self.is_wrapped and self.case.overlap == "backward"

    def step(self, seed: int, closure: Callable[[], Any] | None = None) -> None:
        """Both, with the same random numbers; ``closure``: makes gradients of both."""
        self.step_wrapped(seed, closure)
        self.step_plain(seed)

    def step_wrapped(self, seed: int, closure: Callable[[], Any] | None = None) -> None:
        """The plain one has to follow."""
        torch.default_generator.manual_seed(seed)  # torch.manual_seed() takes 4 ms
        if closure is None:
            self.wrapped.step()
        elif (found := self.wrapped.step(closure)) != LOSS:
            raise Mismatch(f"step() returns {found!r}, its closure {LOSS}")

    def step_plain(self, seed: int) -> None:
        """The plain one follows."""
        torch.default_generator.manual_seed(seed)
        self.unrecorded -= {i for i in self.unrecorded if self.carriers[i].grad is not None}
        self.plain_step()
        self.is_spent, self.has_taken = self.in_backward, False
        self.unused -= set(self.order)
        self.has_loaded = False
        self.unrecorded -= {i for i in self.unrecorded if self.mine[i].requires_grad}
        if not self.in_backward and self._torch_has_written():
            self.zero_grad("wrapper")

    def _torch_has_written(self) -> bool:
        """Whether the step has changed gradients, as `foreach` of SGD with `nesterov` does: the
        wrapped one's where nothing is converted. Another step would start from others."""
        pairs = zip(self.carriers, self.theirs, strict=True)
        given = [(c.grad, t.grad) for c, t in pairs if t.grad is not None]
        return any(not torch.equal(local(mine).to(own.dtype), own) for mine, own in given)

    def plain_step(self) -> None:
        """The plain optimizer on the carriers' gradients; their shards follow."""
        for i, (carrier, theirs) in enumerate(zip(self.carriers, self.theirs, strict=True)):
            theirs.grad = None
            if carrier.grad is not None and i in self.order:
                # torch's fused kernels take other strides for others; its steps may write into it.
                gradient = local(carrier.grad).to(theirs.dtype)
                theirs.grad = gradient.clone(memory_format=torch.contiguous_format)
                self.stepped.add(i)
        self.plain.step()
        self.round()

    @torch.no_grad()
    def round(self) -> None:
        """Carriers become the rounding of their masters."""
        for carrier, theirs in zip(self.carriers, self.theirs, strict=True):
            if theirs.dtype != carrier.dtype:
                local(carrier).copy_(rounded(theirs, carrier.dtype))

    @torch.no_grad()
    def reseed(self, only: int | None = None) -> None:
        """Masters of the plain side become its weights."""
        for i, (carrier, theirs) in enumerate(zip(self.carriers, self.theirs, strict=True)):
            if theirs.dtype != carrier.dtype and only in (None, i):
                theirs.copy_(local(carrier))

    def zero_grad(self, how: str, *, to_none: bool = True) -> None:
        """Of both; ``how``: who is asked on the wrapped side; "nobody": it was done there."""
        if how == "model":
            self.model.zero_grad(to_none)
        elif how == "hand":
            for mine in self.mine:
                mine.grad = None
        elif how == "wrapper":
            self.wrapped.zero_grad(to_none)
        if how in ("wrapper", "nobody"):
            for i in set(range(len(self.mine))) - set(self.order):  # in no group
                self.mine[i].grad = None
        for i, carrier in enumerate(self.carriers):
            if to_none or how == "hand" or (how == "wrapper" and i not in self.order):
                carrier.grad = None
            elif carrier.grad is not None:
                carrier.grad = torch.zeros_like(carrier.grad)
        self.is_spent = False
        self.unused.clear()

    def clip(self, limit: float, order: float, *, by_wrapper: bool) -> None:
        """Both; the norms are compared, too."""
        mine = [self.mine[i] for i in self.order]
        if by_wrapper:
            norm = self.wrapped.clip_grad_norm_(limit, order)
        else:
            norm = nn.utils.clip_grad_norm_(mine, limit, order)
        expected = nn.utils.clip_grad_norm_([self.carriers[i] for i in self.order], limit, order)
        values = [n.full_tensor() if hasattr(n, "full_tensor") else n for n in (norm, expected)]
        check_same(values[0], values[1], f"norm of order {order}")

    # ------------------------------------------------------------------ what is refused

    def attempt(self, reason: str, call: Callable[[], Any]) -> bool:
        """Whether ``call`` was not refused; an error is one of :data:`REFUSALS`."""
        kind, words = REFUSALS[reason]
        try:
            call()
        except kind as error:
            if not re.search(words, str(error)):
                raise
            self.say(f"refused: {error}")
            return False
        return True

    def refused(self, reason: str, call: Callable[[], Any]) -> None:
        """``call`` must raise the documented error."""
        if self.attempt(reason, call):
            raise Mismatch(f"{reason}: not refused")

    # ------------------------------------------------------------------ state

    def plain_state(self, *, cloned: bool = False) -> dict[int, dict[str, Any]]:
        """By parameter, of those that have any."""
        found = {i: self.plain.state[p] for i, p in enumerate(self.theirs) if p in self.plain.state}
        found = {i: state for i, state in found.items() if state}
        return copy.deepcopy(found) if cloned else found

    def set_plain_state(self, saved: dict[int, dict[str, Any]]) -> None:
        """Take over a clone, in the dtype of what the plain optimizer updates."""
        self.plain.state.clear()
        for i, values in saved.items():
            self.plain.state[self.theirs[i]] = {
                name: self._plain_value(i, value) for name, value in values.items()
            }

    def _plain_value(self, i: int, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        is_like = value.shape == self.theirs[i].shape and value.dtype == self.carriers[i].dtype
        wanted = self.theirs[i].dtype if self.case.has_master(i) and is_like else value.dtype
        return value.detach().to(wanted, copy=True)

    # ------------------------------------------------------------------ comparison

    @torch.no_grad()
    def compare(self, *, state: bool) -> None:
        """Parameters and options; ``state``: that and masters, too."""
        if not self.is_wrapped:
            return
        if self.case.overlap != "step":
            self.wrapped.synchronize()
        for i, (mine, carrier) in enumerate(zip(self.mine, self.carriers, strict=True)):
            # A view would keep a weight's copy, which the next gather exchanges with host memory.
            check_same(local(mine).clone(), local(carrier), f"parameter {i}")
        self._compare_groups(self.wrapped)
        if not state:
            return
        shown = self.wrapped.state
        own = {i: localized(shown[self.mine[i]]) for i in self.order}
        self.check_state(own, self.plain_state())
        for i, values in own.items():
            is_known = self.case.has_master(i) and i not in self.unrecorded
            if is_known and set(MASTERS) & values.keys():
                found = master_of(local(self.mine[i]), values)
                check_same(found, self.theirs[i].detach(), f"master {i}")

    def check_state(self, own: dict[int, dict[str, Any]], plain: dict[int, dict[str, Any]]) -> None:
        """By parameter. Of those frozen when they were wrapped, it is what it was then."""
        for i, expected in plain.items():
            if i in self.unrecorded or i not in self.order:
                continue
            names = [name for name in own.get(i, {}) if name not in MASTERS]
            if sorted(names) != sorted(expected):
                raise Mismatch(f"state of {i}: {names}, plain {sorted(expected)}")
            for name, value in expected.items():
                check_same(own[i][name], value, f"state {name!r} of {i}")

    def read(self, face: str, what: str) -> dict[int, dict[str, Any]]:
        """State by parameter, copied, that the wrapper or the wrapped optimizer shows."""
        optimizer, found = self.wrapped if face == "wrapper" else self.inner, {}
        if what == "state":
            shown = optimizer.state
            found = {i: localized(shown.get(self.mine[i], {})) for i in self.order}
        elif what == "state_dict":
            saved = optimizer.state_dict()["state"]
            found = {i: localized(saved.get(n, {})) for n, i in enumerate(self.order)}
        elif what == "param_groups":
            self._compare_groups(optimizer)
        else:
            repr(self.wrapped)  # statistics, too
        return copy.deepcopy(found)

    def _compare_groups(self, optimizer: Optimizer) -> None:
        for i, mine in enumerate(optimizer.param_groups):
            for plain in self.plain_groups(i):
                for name in sorted({*mine, *plain}.difference(FLAGS)):
                    if (name in mine) != (name in plain):
                        raise Mismatch(f"group {i}: {name!r} is on one side only")
                    check_same(mine[name], plain[name], f"group {i}, {name!r}")

    @contextlib.contextmanager
    def away(self, **options: Any) -> Iterator[PhaseOffloader]:
        """Inside, model and optimizer are offloaded."""
        key = repr(sorted(options.items()))
        if key not in self.phases:
            self.phases[key] = PhaseOffloader(self.model, self.wrapped, **options)
        phases = self.phases[key]
        for model in (self.model, self.twin):
            model.state_dict()  # FSDP2 reshards for it, as PhaseOffloader does
        phases.offload()
        yield phases
        phases.reload()

    def end_phases(self) -> None:
        """Close what moves the model."""
        for phases in self.phases.values():
            phases.close()
        self.phases.clear()

    def like_mine(self, i: int, value: Any) -> Any:
        """A state value of the plain side as the wrapped side keeps it."""
        if isinstance(value, Tensor) and value.shape == self.theirs[i].shape and value.dim():
            return like(self.mine[i], value.detach().clone())
        return copy.deepcopy(value)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _laid_out(gradient: Tensor, layout: str) -> Tensor:
    """A copy of other strides, where there is more than one dimension."""
    if layout == "transposed" and gradient.dim() == 2:
        return gradient.t().clone().t()
    if layout == "strided" and gradient.dim():
        return gradient.repeat_interleave(2, -1)[..., ::2]
    return gradient.clone()


def localized(values: dict[str, Any]) -> dict[str, Any]:
    """A parameter's state with this rank's pieces of tensors."""
    return {k: local(v) if isinstance(v, Tensor) else v for k, v in values.items()}
