"""A model whose weights leave and come back, as whoever offloads a model does it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fsdp_offload import HybridDeviceOptimizer, TransferConfig, shards, storages
from fsdp_offload.device import CpuGateway
from fsdp_offload.moving import Mover, Places, collect, whereabouts


@contextmanager
def model_away(
    parameters: Sequence[nn.Parameter], optimizer: HybridDeviceOptimizer | None = None
) -> Iterator[None]:
    """Inside, the weights have no memory.

    Args:
        parameters: plain ones or DTensors.
        optimizer: drop what it can make again; without it all is saved.
    """
    gateway = CpuGateway(torch.device("cpu"))
    mover = Mover(gateway, Places(gateway, TransferConfig()))
    makers = {} if optimizer is None else optimizer.rebuildable()
    blocks = collect(
        [(str(i), p.detach()) for i, p in enumerate(parameters) if p not in makers], gateway.device
    )
    dropped = [(shards.local(p).untyped_storage(), make) for p, make in makers.items()]
    sizes = [storage.nbytes() for storage, _ in dropped]
    trip = mover.out(blocks)
    for block in blocks:
        whereabouts.left(block.storage, mover.places.of(block), trip)
    for storage, make in dropped:
        whereabouts.left(storage, make)
        storage.resize_(0)
    yield
    trip = mover.back(blocks)
    for block in blocks:
        whereabouts.returned(block.storage, trip)
    for (storage, _), n_bytes in zip(dropped, sizes, strict=True):
        storage.resize_(n_bytes)
        torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0x7F)
        whereabouts.returned(storage)
    if optimizer is not None:
        optimizer.rebuild(makers)


def has_memory(tensor: Tensor) -> bool:
    """Whether all of a plain tensor's memory is there: its storage's, and the pages it lies in."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0 or not storages.is_tied(storage):
        return storage.nbytes() > 0
    pages = storages.memory_of(storage)
    return all(map(pages.is_mapped, range(len(pages.chunks))))
