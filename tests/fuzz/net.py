"""A model of any shapes, sharded or not, whose gradients any subset of parameters can have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .cases import Case


class ModelError(RuntimeError):
    """What a model raises on purpose."""


def _raise(*_: Tensor) -> None:
    raise ModelError("on purpose")


class Layer(nn.Module):
    """Each weight adds one bounded number to the input."""

    def __init__(self, weights: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> None:
        super().__init__()
        made = (nn.Parameter(torch.empty(shape, dtype=dtype)) for shape, dtype in weights)
        self.weights = nn.ParameterList(made)

    def forward(self, x: Tensor, data: list[Tensor | None], *, raises: bool = False) -> Tensor:
        if raises:
            _raise()
        for weight, factors in zip(self.weights, data, strict=True):
            if factors is not None:
                # Sums of fp32 products: the same on both sides, whatever the weight's dtype.
                x = x + torch.tanh((weight.float() * factors).sum() * 0.1)
        return x


class Net(nn.Module):
    """Layers; the last one's weights belong to the root's FSDP group."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.n_weights = [len(layer) for layer in case.layers]
        made = [Layer([(case.shapes[i], case.dtypes[i]) for i in layer]) for layer in case.layers]
        self.layers, self.last = nn.ModuleList(made[:-1]), made[-1]

    def forward(
        self, x: Tensor, data: list[Tensor | None], fault: tuple[str, int] | None = None
    ) -> Tensor:
        """``fault``: raise in the forward or backward of the layer of this number."""
        layers = [*self.layers, self.last]
        for number, (layer, count) in enumerate(zip(layers, self.n_weights, strict=True)):
            own, data = data[:count], data[count:]
            raises = fault == ("forward", number)
            # A layer that nothing goes through is not called at all.
            if raises or layer is self.last or any(factors is not None for factors in own):
                x = layer(x, own, raises=raises)
                if fault == ("backward", number) and x.requires_grad:
                    x.register_hook(_raise)
        return x


def make_net(case: Case, mesh: DeviceMesh | None) -> Net:
    """The model of ``case``: the same values on every rank and at every call."""
    net = Net(case)
    generator = torch.Generator().manual_seed(case.seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    if mesh is not None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        options: dict[str, Any] = {"mesh": mesh}
        if case.reshard is not None:
            options["reshard_after_forward"] = case.reshard
        if case.half_compute:
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32
            )
        for layer in net.layers:
            fully_shard(layer, **options)
        fully_shard(net, **options)
    return net


def local(tensor: Tensor) -> Tensor:
    """This rank's piece, over the same memory."""
    return tensor._local_tensor.detach() if isinstance(tensor, DTensor) else tensor.detach()


def like(parameter: Tensor, piece: Tensor) -> Tensor:
    """``piece`` as a shard of a tensor that is placed like ``parameter``."""
    if not isinstance(parameter, DTensor):
        return piece
    return DTensor.from_local(
        piece,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
