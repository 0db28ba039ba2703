"""What a step reads of ``.grad``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..core import dtensor
from ..core.errors import AwayError, StateSchemaError
from ..core.storage import is_empty
from ..update.records import Record


def gradient_of(record: Record) -> Tensor | None:
    """This rank's gradient of a parameter: 1-D, contiguous, or None.

    Raises:
        AwayError: the shard or its gradient is offloaded.
        StateSchemaError: the shard is not where it was when the optimizer was wrapped.
        UnsupportedParameterError: see :func:`.core.dtensor.gradient_shard`.
    """
    shard = dtensor.with_history(record.parameter)
    storage = shard.untyped_storage()
    if is_empty(shard, storage):
        raise AwayError(
            f"the shard of {record.fqn}",
            reason="its device memory is offloaded, and an update writes into it",
            remedy="reload the model first",
        )
    gradient = dtensor.gradient_shard(record.parameter, record.fqn, record.info.local_shape)
    if gradient is None:
        return None
    if is_empty(gradient):
        raise AwayError(
            f"the gradient of {record.fqn}",
            reason="its device memory is offloaded",
            remedy="reload the model first",
        )
    if dtensor.memory_of(shard, storage) != record.memory:
        raise StateSchemaError(
            f"shard of {record.fqn}",
            reason="its memory was replaced after wrapping, and updates are in place",
            remedy="wrap the optimizer after the model has been moved or re-sharded",
        )
    return gradient.view(-1)


def count_empty_shards(
    records: Sequence[Record], empty: Sequence[Record], gradients: list[Tensor | None]
) -> None:
    """Let ``step`` of a parameter advance on the ranks that hold nothing of it too.

    FSDP2 gives empty shards an empty gradient, Megatron-FSDP gives them none. Their ``step`` would
    stay behind that of the other ranks, and a checkpoint takes it from any rank.

    Args:
        records: all.
        empty: those that never have a gradient here, for that reason alone.
        gradients: per record; those of ``empty`` are filled in, unless none of the others has one.
    """
    held = [r.index for r in records if r.info.local_numel] if empty else []
    if held and all(gradients[index] is None for index in held):
        return  # a step without any gradient
    for record in empty:
        if gradients[record.index] is None:
            gradients[record.index] = dtensor.local(record.parameter).reshape(-1)
