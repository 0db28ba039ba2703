"""Gradient clipping, with the bits of ``torch.nn.utils.clip_grad_norm_``.

[Note: the order of torch's reductions]
torch takes the norm of each gradient's shard, stacks those of all gradients to one vector, then,
for each axis of the mesh over which a gradient is sharded, sends that vector through
``x ** p``, all-reduce, ``x ** (1 / p)``, and takes the norm of the vector (infinity: the vector's
maximum is reduced). The last steps are left to DTensor itself, which has one small tensor to
dispatch here instead of one per parameter, so order and rounding are its own. A gradient that is
replicated over an axis which others are sharded over counts once: its norm is divided there.

Other than torch: gradients may lie on several meshes, beside plain tensors, or be empty on this
rank (torch has no infinity norm of those); what is returned is replicated, never pending a
reduction.

[Note: in place]
``.grad`` is multiplied, as torch does. The update reads gradients anyway and could multiply there;
but a coefficient that is kept for later meets gradients that it was not computed from, as soon as
they are replaced, added to, or clipped again in between. The pass reads and writes every gradient
once: about 2 ms for 1.33 G bf16 elements on an H200.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from . import shards
from .errors import AwayError, ConfigError, NonFiniteGradientError
from .moving.whereabouts import is_away


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The gradients that are there, as DTensors where the parameters are; order kept.

    Raises:
        AwayError: one is offloaded.
    """
    found = [g for p in parameters if (g := shards.whole_gradient(p)) is not None]
    if any(is_away(shards.local(gradient)) for gradient in found):
        raise AwayError(
            "the norm of gradients that are offloaded",
            reason="their device memory was given up",
            remedy="reload the model first",
        )
    return found


@torch.no_grad()
def total_norm(
    gradients: Sequence[Tensor], norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Norm of all gradients as if they were one vector; what ``get_total_norm`` returns.

    Collective over the meshes of the gradients: one all-reduce per axis that some are sharded
    over. The host waits for nothing, unless ``error_if_nonfinite``.

    Args:
        gradients: DTensors or plain tensors, in the order that decides the last bits.
        norm_type: order p of the norm; ``inf`` for the largest absolute value.
        error_if_nonfinite: raise where the norm is NaN or infinite; this waits for the device.

    Returns:
        0-dim, in the gradients' dtype (of several: what torch promotes them to), on the device of
        the first one. A DTensor, replicated over the first mesh, if any gradient is one. Without
        gradients zero, fp32, on the CPU.

    Raises:
        ConfigError: ``norm_type`` is NaN.
        NonFiniteGradientError: see ``error_if_nonfinite``.
    """
    p = float(norm_type)
    if math.isnan(p):
        raise ConfigError(
            f"norm_type={norm_type!r}", reason="not an order of a norm", remedy="use 2 or inf"
        )
    if not gradients:
        return torch.tensor(0.0)
    device = shards.local(gradients[0]).device
    norms = [shards.norm_over_mesh(group, p) for group in shards.by_mesh(gradients)]
    if len(norms) == 1:
        total = norms[0]
    else:
        parts = torch.stack([shards.local(norm).to(device) for norm in norms])
        total = shards.replicated_like(torch.linalg.vector_norm(parts, p), norms)
    if error_if_nonfinite and not bool(shards.local(total).isfinite()):
        raise NonFiniteGradientError(
            f"total gradient norm of order {p} is {shards.local(total).item()}",
            reason="gradients cannot be scaled by a norm that is not finite",
            remedy="find out which gradient it is, or pass error_if_nonfinite=False",
        )
    return total


@torch.no_grad()
def coefficient(total_norm: Tensor, max_norm: float) -> Tensor:
    """What gradients of norm ``total_norm`` are multiplied by: ``max_norm`` over it, at most 1.

    Returns:
        0-dim plain tensor of the norm's dtype and device.

    Raises:
        ConfigError: ``max_norm`` is NaN or negative.
    """
    limit = float(max_norm)
    if not limit >= 0.0:
        raise ConfigError(
            f"max_norm={max_norm!r}", reason="not a norm", remedy="use a number of 0 or more"
        )
    return torch.clamp(limit / (shards.local(total_norm) + 1e-6), max=1.0)


@torch.no_grad()
def scale(gradients: Sequence[Tensor], coefficient: Tensor) -> None:
    """Multiply ``gradients`` in place by ``coefficient``, with the rounding of torch's clipping."""
    alike = defaultdict[tuple[torch.device, torch.dtype], list[Tensor]](list)
    for gradient in gradients:
        shard = shards.local(gradient)
        alike[shard.device, shard.dtype].append(shard)
    for (device, _), some in alike.items():
        torch._foreach_mul_(some, coefficient.to(device))
