"""The weights of a live model, for an export."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import shards
from ..chunks import Box
from ..device import gateway_for
from ..errors import CheckpointError, UnsupportedParameterError
from ..pipeline.state import REMAINDER, WHOLE
from .blocks import BLOCK_BYTES
from .export_files import Source, narrow
from .export_plan import Found, file_dtype

_WRAPPERS: Final = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and activation checkpointing put into names."""


def open_model(
    model: nn.Module, optimizers: Sequence[Optimizer], wanted: torch.dtype | None
) -> Source:
    """The shards that this process holds, and their masters; nothing is copied.

    Raises:
        CheckpointError: a tensor is on the meta device.
        UnsupportedParameterError: a tensor is sparse, partial or packed, or of an unknown dtype.
    """
    tensors, masters = _tensors_of(model, keep_vars=True), _masters_of(optimizers)
    shown = _tensors_of(model)  # in host memory, where the model is offloaded
    found: list[Found] = []
    held: dict[str, dict[Box, tuple[Tensor, Tensor | None]]] = {}
    first: dict[int, str] = {}
    for fqn, tensor in tensors.items():
        _check_exportable(fqn, tensor)
        dtype = file_dtype(fqn, tensor.dtype, wanted, is_weight=isinstance(tensor, nn.Parameter))
        held[fqn] = _held(shown[fqn], masters.get(tensor))
        tied = first.setdefault(id(tensor), fqn)
        shape, boxes = tuple(tensor.shape), tuple(held[fqn])
        found.append(Found(fqn, shape, dtype, None if tied == fqn else tied, boxes))
    for device in {shards.local(tensor).device for tensor in tensors.values()}:
        # Other threads read, on streams of their own.
        gateway_for(device).current_stream().synchronize()

    def read(fqn: str, box: Box, part: Box) -> tuple[Tensor, Tensor | None]:
        weight, master = held[fqn][box]
        return narrow(weight, box, part), None if master is None else narrow(master, box, part)

    return Source(found, read, BLOCK_BYTES)


def _held(tensor: Tensor, master: Tensor | None) -> dict[Box, tuple[Tensor, Tensor | None]]:
    """Views of this rank's shard and of its master, by box; empty boxes are left out."""
    shard = shards.local(tensor)
    if master is not None:
        master = shards.local(master).reshape(shard.shape)
    ragged = shards.ragged_of(tensor)
    if ragged is None:
        chunks = shards.chunk_list(tensor)
        boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]
        assert len(boxes) <= 1, boxes  # several are ragged
        return {box: (shard, master) for box in boxes if box.numel}
    held: dict[Box, tuple[Tensor, Tensor | None]] = {}
    flat = shard.reshape(-1)
    flat_master = None if master is None else master.reshape(-1)
    start = 0
    for box in ragged.boxes:
        stop = start + box.numel
        part = None if flat_master is None else flat_master[start:stop].view(box.sizes)
        held[box] = flat[start:stop].view(box.sizes), part
        start = stop
    return held


def _tensors_of(model: nn.Module, *, keep_vars: bool = False) -> dict[str, Tensor]:
    """Parameters and persistent buffers by FQN, tied ones under every name; sharded."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    tensors: dict[str, Tensor] = {}
    for key, tensor in model.state_dict(keep_vars=keep_vars).items():
        if not isinstance(tensor, Tensor) or key.endswith("_extra_state"):
            continue
        for wrapper in _WRAPPERS:
            key = key.replace(wrapper, "")
        tensors[key] = tensor
    return tensors


def _masters_of(optimizers: Sequence[Optimizer]) -> dict[Tensor, Tensor]:
    """Remainders and whole masters by parameter, final."""
    masters: dict[Tensor, Tensor] = {}
    for optimizer in optimizers:
        if getattr(optimizer.__dict__.get("step"), "forwards_to_wrapper", False):
            optimizer.state_dict()  # the wrapper's: waits for its transfers
        for parameter, state in optimizer.state.items():
            for name in (REMAINDER, WHOLE):
                if isinstance(found := state.get(name), Tensor):
                    masters[parameter] = found
    return masters


def _check_exportable(fqn: str, tensor: Tensor) -> None:
    """Refuse what has no elements of its own here."""
    shard = shards.local(tensor)
    if shard.device.type == "meta":
        raise CheckpointError(
            f"{fqn} on the meta device",
            reason="its weights are missing: they were never made or loaded",
            remedy="materialise the model (to_empty, then initialise or load) before exporting",
        )
    placements = getattr(tensor, "placements", ())
    packed = type(shard) not in (Tensor, nn.Parameter, nn.Buffer)
    if tensor.layout is not torch.strided or packed or any(p.is_partial() for p in placements):
        raise UnsupportedParameterError(
            f"{fqn} of type {type(shard).__name__}, layout {tensor.layout}, placed {placements}",
            reason="only dense shards with values of their own can be written",
            remedy="convert it to a plain tensor, redistribute it, or leave it out of the model",
        )
