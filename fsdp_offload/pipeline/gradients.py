"""What a step reads of ``.grad``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..core import dtensor
from ..core.errors import AwayError, StateSchemaError
from ..core.storage import is_empty
from ..update.params import ParamState


def gradient_of(param: ParamState) -> Tensor | None:
    """This rank's gradient of a parameter: 1-D, contiguous, or None.

    Raises:
        AwayError: the shard or its gradient is offloaded.
        StateSchemaError: the shard is not where it was when the optimizer was wrapped.
        UnsupportedParameterError: see :func:`.core.dtensor.gradient_shard`.
    """
    shard = dtensor.with_history(param.parameter)
    storage = shard.untyped_storage()
    if is_empty(shard, storage):
        raise AwayError(
            f"the shard of {param.fqn}",
            reason="its device memory is offloaded, and an update writes into it",
            remedy="reload the model first",
        )
    gradient = dtensor.gradient_shard(param.parameter, param.fqn, param.info.local_shape)
    if gradient is None:
        return None
    if is_empty(gradient):
        raise AwayError(
            f"the gradient of {param.fqn}",
            reason="its device memory is offloaded",
            remedy="reload the model first",
        )
    if dtensor.memory_of(shard, storage) != param.memory:
        raise StateSchemaError(
            f"shard of {param.fqn}",
            reason="parameter.data was assigned after wrapping, by the caller or by a move of the "
            "model, and updates write into the memory of before",
            remedy="write values in place, `with torch.no_grad(): parameter.copy_(values)`, and "
            "move the model before the optimizer is wrapped",
        )
    return gradient.view(-1)


def count_empty_shards(
    params: Sequence[ParamState], empty: Sequence[ParamState], gradients: list[Tensor | None]
) -> None:
    """Let ``step`` of a parameter advance on the ranks that hold nothing of it too.

    FSDP2 gives empty shards an empty gradient, Megatron-FSDP gives them none. Their ``step`` would
    stay behind that of the other ranks, and a checkpoint takes it from any rank.

    Args:
        params: all.
        empty: those that never have a gradient here, for that reason alone.
        gradients: one each; those of ``empty`` are filled in, unless none of the others has one.
    """
    held = [r.index for r in params if r.info.local_numel] if empty else []
    if held and all(gradients[index] is None for index in held):
        return  # a step without any gradient
    for param in empty:
        if gradients[param.index] is None:
            gradients[param.index] = dtensor.local(param.parameter).reshape(-1)
