"""A model whose weights leave and come back, as whoever offloads a model does it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fsdp_offload import TransferConfig, storages
from fsdp_offload.device import CpuGateway
from fsdp_offload.moving import Mover, Places, collect, whereabouts


@contextmanager
def model_away(
    parameters: Sequence[nn.Parameter],
) -> Iterator[None]:
    """Inside, the weights, plain ones or DTensors, have no memory."""
    gateway = CpuGateway(torch.device("cpu"))
    mover = Mover(gateway, Places(gateway, TransferConfig()))
    blocks = collect([(str(i), p.detach()) for i, p in enumerate(parameters)], gateway.device)
    trip = mover.out(blocks)
    for block in blocks:
        whereabouts.left(block.storage, mover.places.of(block), trip)
    yield
    trip = mover.back(blocks)
    for block in blocks:
        whereabouts.returned(block.storage, trip)


def has_memory(tensor: Tensor) -> bool:
    """Whether all of a plain tensor's memory is there: its storage's, and the pages it lies in."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0 or not storages.is_tied(storage):
        return storage.nbytes() > 0
    pages = storages.memory_of(storage)
    return all(map(pages.is_mapped, range(len(pages.chunks))))
