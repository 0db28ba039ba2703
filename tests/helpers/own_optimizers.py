"""Optimizer classes as users write them: element-wise, whole-matrix, counting, and odd ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Own(Optimizer):
    """Calls :meth:`update` for every parameter that has a gradient."""

    defaults_: dict[str, Any] = {"lr": 0.01}  # noqa: RUF012

    def __init__(self, params: Any, **changed: Any) -> None:
        super().__init__(params, {**self.defaults_, **changed})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure else None
        for group in self.param_groups:
            self.begin(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, self.state[parameter], group)
        return loss

    def begin(self, group: dict[str, Any]) -> None:
        """Called once per group and step."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class Lion(Own):
    """arXiv 2302.06675: element-wise, one moment."""

    defaults_ = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1}  # noqa: RUF012

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        first, second = group["betas"]
        if not state:
            state["exp_avg"] = torch.zeros_like(p)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_((state["exp_avg"] * first + g * (1 - first)).sign_(), alpha=-float(group["lr"]))
        state["exp_avg"].mul_(second).add_(g, alpha=1 - second)


class ReplacingMomentum(Own):
    """Puts a new tensor into its state at every step."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["momentum"] = state["momentum"] * 0.9 + g if state else g.clone()
        p.sub_(state["momentum"], alpha=group["lr"])


class GroupCounter(Own):
    """Counts its steps in a value of the group, and scales by it."""

    defaults_ = {"lr": 0.01, "k": 0}  # noqa: RUF012

    def begin(self, group: dict[str, Any]) -> None:
        group["k"] += 1

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["sum"] = torch.zeros_like(p)
        state["sum"].add_(g)
        p.sub_(state["sum"], alpha=group["lr"] / group["k"])


class AttributeCounter(Own):
    """Counts its steps, and keeps a history, in attributes of the instance."""

    def __init__(self, params: Any, **changed: Any) -> None:
        super().__init__(params, **changed)
        self.count = 0
        self.history: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.count += 1
        self.history.append(self.count)
        return super().step(closure)

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state.setdefault("sum", torch.zeros_like(p)).add_(g)
        p.sub_(state["sum"], alpha=group["lr"] / (self.count + len(self.history)))


class TensorCounter(Own):
    """Counts in tensors, in place: of the group, and in lists of the group and the instance."""

    def __init__(self, params: Any, **changed: Any) -> None:
        super().__init__(params, **changed)
        self.seen = {"steps": [torch.zeros(())]}
        for group in self.param_groups:
            group["k"], group["ks"] = torch.zeros(()), [torch.zeros(())]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.seen["steps"][0] += 1
        return super().step(closure)

    def begin(self, group: dict[str, Any]) -> None:
        group["k"] += 1
        group["ks"][0] += 1

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state.setdefault("sum", torch.zeros_like(p)).add_(g)
        p.sub_(state["sum"] * (group["lr"] / (group["k"] + group["ks"][0] + self.seen["steps"][0])))


class NumberState(Own):
    """Adam as it was before torch kept ``step`` in a tensor."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)
        state["step"] += 1
        state["exp_avg"].mul_(0.9).add_(g, alpha=0.1)
        state["exp_avg_sq"].mul_(0.99).addcmul_(g, g, value=0.01)
        scale = (1 - 0.99 ** state["step"]) ** 0.5 / (1 - 0.9 ** state["step"])
        p.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt() + 1e-8, value=-group["lr"] * scale)


class EagerMomentum(Own):
    """Makes its state at construction, filled with another number than zero."""

    def __init__(self, params: Any, **changed: Any) -> None:
        super().__init__(params, **changed)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["step"] = torch.zeros(())
                self.state[p]["momentum"] = torch.full_like(p, 0.25)

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] += 1
        state["momentum"].mul_(0.9).add_(g)
        p.sub_(state["momentum"], alpha=group["lr"])


class Stateless(Own):
    """Sign descent."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g.sign(), alpha=group["lr"])


class Lamb(Own):
    """arXiv 1904.00962 in short: the norm of the whole parameter scales its step."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state.setdefault("exp_avg", torch.zeros_like(p)).mul_(0.9).add_(g, alpha=0.1)
        direction = state["exp_avg"]
        p.sub_(direction * (group["lr"] * p.norm() / (direction.norm() + 1e-6)))


class Langevin(Own):
    """Adds noise from torch's generator."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g, alpha=group["lr"]).add_(torch.randn_like(p), alpha=1e-3)


class Clipping(Own):
    """Divides by the norm over all gradients of the group."""

    def begin(self, group: dict[str, Any]) -> None:
        gradients = [p.grad for p in group["params"] if p.grad is not None]
        self.norm = torch.stack([torch.zeros(()), *(g.norm() for g in gradients)]).norm()

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        momentum = state.setdefault("momentum", torch.zeros_like(p))
        momentum.mul_(0.9).add_(g / (self.norm + 1e-6))
        p.sub_(momentum, alpha=group["lr"])


class Blocks(Own):
    """Keeps one number per eight elements: state of a shape that is not known beforehand."""

    defaults_ = {"lr": 0.01, "k": 0}  # noqa: RUF012

    def begin(self, group: dict[str, Any]) -> None:
        group["k"] += 1

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        padded = torch.nn.functional.pad(g.reshape(-1), (0, -g.numel() % 8)).view(-1, 8)
        if not state:
            state["norms"] = torch.zeros(padded.shape[0])
        state["norms"].add_(padded.norm(dim=1))
        scaled = (padded / (state["norms"][:, None] + 1e-6)).view(-1)[: g.numel()]
        p.sub_(scaled.view(p.shape), alpha=group["lr"] / group["k"])


class Factored(Own):
    """Rows and columns for matrices, one moment for vectors (Adafactor, CAME, SM3)."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if p.dim() < 2:
            second = state.setdefault("exp_avg_sq", torch.zeros_like(p)).add_(g * g)
        else:
            row = state.setdefault("row", torch.zeros_like(p[..., :1]))
            column = state.setdefault("column", torch.zeros_like(p[..., :1, :]))
            row.add_((g * g).mean(-1, keepdim=True))
            column.add_((g * g).mean(-2, keepdim=True))
            second = row * column
        p.sub_(g / (second.sqrt() + 1e-6), alpha=group["lr"])


class ListState(Own):
    """Keeps a list of tensors."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state.setdefault("preconditioners", [torch.eye(2)])
        p.sub_(g, alpha=group["lr"])


class Failing(Own):
    """Reads state that nobody makes."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(state["missing"])


class ScheduleFree(Own):
    """Wants to be told when training begins and ends, as of the package of that name."""

    mode = "none"

    def train(self) -> None:
        self.mode = "train"

    def eval(self) -> None:
        self.mode = "eval"

    def begin(self, group: dict[str, Any]) -> None:
        if self.mode != "train":
            raise RuntimeError("call train() first")

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g, alpha=group["lr"])
