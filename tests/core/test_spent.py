"""The stand-in of a consumed gradient: every use raises, and it costs nothing."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_offload import SpentGradientError
from fsdp_offload.core.spent import SpentGradient, is_spent

USES: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda g: g.norm(),
    "norm of several": lambda g: torch.nn.utils.get_total_norm([torch.ones(2), g]),
    "foreach": lambda g: torch._foreach_mul_([g], 2.0),
    "in place": lambda g: g.mul_(2.0),
    "operator": lambda g: 1.0 - g,
    "out=": lambda g: torch.add(torch.ones(2), 1, out=g),
    "copy to": lambda g: torch.ones(2).copy_(g),
    "item": lambda g: g.sum().item(),
    "float": float,
    "truth": bool,
    "list": lambda g: g.tolist(),
    "numpy": lambda g: g.numpy(),
    "index": lambda g: g[0],
    "isnan": lambda g: torch.isnan(g).any(),
    "detach": lambda g: g.detach(),
    "clone": lambda g: g.clone(),
    "cpu": lambda g: g.cpu(),
    "data": lambda g: g.data,
    "shape": lambda g: g.shape,
    "pointer": lambda g: g.data_ptr(),
    "to_local": lambda g: g.to_local(),  # type: ignore[attr-defined]
    "full_tensor": lambda g: g.full_tensor(),  # type: ignore[attr-defined]
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": lambda g: torch.save(g, io.BytesIO()),
    "compare": lambda g: torch.equal(g, g),
}


def made() -> tuple[nn.Parameter, SpentGradient]:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = SpentGradient(parameter, "layer.weight")
    gradient = parameter.grad
    assert isinstance(gradient, SpentGradient)
    return parameter, gradient


@pytest.mark.parametrize("use", USES)
def test_every_use_raises_and_names_the_parameter(use: str) -> None:
    _, gradient = made()
    with pytest.raises(SpentGradientError) as caught:
        USES[use](gradient)

    assert "layer.weight" in str(caught.value)
    assert "Remedy" in str(caught.value)


def test_torchs_helpers_raise_and_are_named() -> None:
    parameter, _ = made()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    uses: list[tuple[str, Callable[[], object]]] = [
        ("clip_grad_norm_ with", lambda: nn.utils.clip_grad_norm_([parameter], 1.0)),
        ("clip_grad_value_ with", lambda: nn.utils.clip_grad_value_([parameter], 1.0)),
        ("GradScaler.unscale_", lambda: scaler.unscale_(torch.optim.SGD([parameter], lr=0.1))),
        ("layer.weight", lambda: torch.optim.SGD([parameter], lr=0.1).step()),
        ("layer.weight", lambda: torch.optim.AdamW([parameter], fused=True).step()),
        ("layer.weight", lambda: (parameter * 2).sum().backward()),
    ]
    for name, use in uses:
        with pytest.raises(SpentGradientError) as caught:
            use()
        assert name in caught.value.what


def test_it_can_be_dropped_shown_and_recognised() -> None:
    parameter, gradient = made()

    assert is_spent(gradient)
    assert not is_spent(parameter)
    assert not is_spent(None)
    assert repr(gradient) == "SpentGradient(layer.weight)"
    torch.optim.SGD([parameter], lr=0.1).zero_grad()
    assert parameter.grad is None


def test_it_holds_no_memory() -> None:
    parameter = nn.Parameter(torch.empty(1 << 40, device="meta"))
    gradient = SpentGradient(parameter, "huge")
    parameter.grad = gradient

    assert is_spent(parameter.grad)
