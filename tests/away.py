"""Whether memory is there, a model whose weights are away, and an optimizer that is, alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_offload import PhaseOffloader
from fsdp_offload.core import storage as storages
from fsdp_offload.core.devices import CpuBackend
from fsdp_offload.link.block import collect
from fsdp_offload.link.transfer import Transfer


@contextmanager
def model_away(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Inside, the weights, plain ones, have no memory."""
    transfer = Transfer(CpuBackend(torch.device("cpu")), None, "a test")
    transfer.out([("params", collect((str(i), p.detach()) for i, p in enumerate(parameters)))])
    transfer.wait()
    yield
    transfer.back().wait()


def has_memory(tensor: Tensor) -> bool:
    """Whether all of a plain tensor's memory is there: its storage's, and the pages it lies in."""
    storage = tensor.untyped_storage()
    return storage.nbytes() > 0 and getattr(storages.owner_of(storage), "is_present", True)


def optimizer_alone(optimizer: Optimizer) -> PhaseOffloader:
    """An offloader of what the optimizer has on the device; weights and gradients stay."""
    parameters = nn.ParameterList([p for g in optimizer.param_groups for p in g["params"]])
    return PhaseOffloader(parameters, optimizer, params="keep", grads="keep")
