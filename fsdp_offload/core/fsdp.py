"""FSDP2's private names, all of them, and the versions of torch that they were tried with.

[Note: private names]
FSDP2 has no public way to its parameter groups (torch/distributed/fsdp/_fully_shard). What this
package reads, replaces or writes there is listed in :data:`NAMES` and used in this file and in
:mod:`.fsdp_groups` alone. :func:`check_torch` tries every one of them where an optimizer or an
offloader is built: a version of torch without one of them is refused there, not in the middle of a
backward.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from .errors import UnsupportedTorchError

TORCH_RUN: Final = ("2.11", "2.13", "2.15")
"""Versions that all tests were run with (docs/compatibility.md)."""

_log = logging.getLogger("fsdp_offload")


@dataclass(frozen=True)
class Name:
    """One attribute of one of FSDP2's objects."""

    owner: str  # "module", "state", "context", "group", "mesh", "streams" or "parameter"
    attribute: str
    use: str  # "read", "called", "replaced" (a method, on the instance) or "written"
    purpose: str
    before: str = ""  # what older versions call it
    arguments: tuple[object, ...] = ()  # of a method, as FSDP2 or this package calls it


NAMES: Final = (
    Name("module", "_get_fsdp_state", "called", "from a module to its state"),
    Name("state", "_fsdp_param_groups", "read", "from a state to its groups", "_fsdp_param_group"),
    Name("state", "_state_ctx", "read", "the backward that all modules of a root share"),
    Name("context", "is_last_backward", "read", "whether gradients are final"),
    Name("group", "fsdp_params", "read", "its parameters, in the order of its flat buffers"),
    Name("group", "offload_policy", "read", "CPUOffloadPolicy is refused"),
    Name("group", "mesh_info", "read", "ranks that it is sharded and replicated over"),
    Name("group", "comm_ctx", "read", "its streams"),
    Name("group", "is_unsharded", "read", "whether a gather has anything to do"),
    Name("group", "_training_state", "read", "which streams the next gather takes"),
    Name("group", "_all_gather_result", "read", "a gather that was not waited for"),
    Name("group", "_all_reduce_hook", "read", "whether the reduction needs a stream of its own"),
    Name("group", "_post_reduce_event", "read", "when the gradients are there"),
    Name("group", "_partial_reduce_output", "written", "gradients that wait for an all-reduce"),
    Name("group", "reduce_grads", "read", "accumulation without synchronisation"),
    Name("group", "all_reduce_grads", "read", "accumulation without the all-reduce of HSDP"),
    Name("group", "lazy_init", "replaced", "refused while shards are away"),
    Name("group", "unshard", "replaced", "waits for updates of the shards", arguments=(False,)),
    Name("group", "wait_for_unshard", "replaced", "what updates read may be dropped"),
    Name("group", "post_backward", "replaced", "gradients are final", arguments=(None, None)),
    Name("mesh", "shard_mesh_dim", "read", "None: every rank has the whole parameters"),
    Name("mesh", "replicate_mesh_dim", "read", "None: shards are not replicated"),
    Name("sharded mesh", "shard_mesh_size", "read", "with one rank nothing is gathered"),
    Name(
        "streams",
        "get_all_gather_streams",
        "called",
        "the stream that reads the shards",
        arguments=(False, None),
    ),
    Name("streams", "reduce_scatter_stream", "written", "one rank reduces on the compute stream"),
    Name("streams", "all_reduce_stream", "read", "where gradients of HSDP are reduced"),
    Name("streams", "device_handle", "read", "the compute stream"),
    Name("parameter", "sharded_param", "read", "the parameter that the optimizer has"),
    Name("parameter", "_unsharded_param", "read", "holds gradients that were not reduced"),
    Name("parameter", "unsharded_accumulated_grad", "read", "the same, in another dtype"),
    Name("parameter", "reset_sharded_param", "replaced", "compares addresses: not while away"),
)
"""See [Note: private names]."""


def check_torch(models: Iterable[nn.Module]) -> None:
    """Try all of :data:`NAMES` that ``models`` have; one warning if torch is newer than tried.

    Raises:
        UnsupportedTorchError: one is missing.
    """
    _warn_if_newer(str(torch.__version__))
    tried: set[object] = set()

    def once(kind: object, owner: str, instance: Any) -> None:
        if kind not in tried:
            _try(owner, instance)
            tried.add(kind)

    for module in _modules(models):
        once(type(module), "module", module)
        state: Any = module._get_fsdp_state()
        once(type(state), "state", state)
        for group, _ in _groups_of(module):
            kind = (type(group), type(getattr(group, "mesh_info", None)))
            if kind not in tried:
                _try_group(group, state)
                tried.add(kind)


def _try_group(group: Any, state: Any) -> None:
    _try("group", group)
    _try("context", state._state_ctx)
    _try("mesh", group.mesh_info)
    if group.mesh_info.shard_mesh_dim is not None:
        _try("sharded mesh", group.mesh_info)
    # FSDP2 makes streams in the first forward: these are of the CPU, and none of the group's.
    streams = type(group.comm_ctx)()
    streams.lazy_init(torch.device("cpu"))
    _try("streams", streams)
    for parameter in group.fsdp_params[:1]:
        _try("parameter", parameter)


def _try(owner: str, instance: Any) -> None:
    for name in NAMES:
        if name.owner == owner and (problem := _problem(name, instance)):
            raise UnsupportedTorchError(
                f"torch {torch.__version__}, {type(instance).__name__}.{name.attribute}",
                reason=f"this private name of FSDP2 {problem}; it is {name.use}: {name.purpose}",
                remedy=f"install a version that was tried: torch {', '.join(TORCH_RUN)}",
            )


def _problem(name: Name, instance: Any) -> str:
    """What is wrong with it, or nothing."""
    kind = type(instance)
    in_class = inspect.getattr_static(kind, name.attribute, None)
    if not (hasattr(instance, name.attribute) or (name.before and hasattr(instance, name.before))):
        # _unsharded_param is declared, and there from the first gather on.
        return "" if name.attribute in inspect.get_annotations(kind) else "does not exist"
    if name.use in ("called", "replaced") and not _takes(in_class, name.arguments):
        return f"does not take {len(name.arguments)} arguments"
    if name.use == "written" and isinstance(in_class, property):
        return "cannot be written"
    return ""


def _takes(method: Any, arguments: tuple[object, ...]) -> bool:
    """Of the class: on the instance another optimizer or offloader may have replaced it."""
    try:
        inspect.signature(method).bind(None, *arguments)
    except TypeError:
        return False
    return True


@functools.cache
def _warn_if_newer(version: str) -> None:
    """Once per process and version."""
    newest = TORCH_RUN[-1]
    if _minor(version) > _minor(newest):
        _log.warning(
            "torch %s is newer than the versions that fsdp_offload was tried with (%s); "
            "FSDP2's private names are tried at construction, results are not",
            version,
            ", ".join(TORCH_RUN),
        )


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split(".")[:2])


# --------------------------------------------------------------------------- groups of a model


def fsdp_groups(models: Iterable[nn.Module]) -> list[tuple[Any, Any]]:
    """FSDP2's own parameter groups, each once, with the state of its modules.

    ``fully_shard`` of several modules gives all of them one state.
    """
    return list(dict.fromkeys(pair for m in _modules(models) for pair in _groups_of(m)))


def _modules(models: Iterable[nn.Module]) -> Iterator[FSDPModule]:
    for model in models:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                yield module


def _groups_of(module: FSDPModule) -> list[tuple[Any, Any]]:
    """torch 2.11 keeps one per state, later versions a list (and raise for "the" one where there
    are several)."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return [(group, state) for group in groups if group is not None]


def fsdp_parameters(models: Iterable[nn.Module]) -> set[Tensor]:
    """Parameters that an FSDP2 module of ``models`` all-gathers."""
    managed: set[Tensor] = set()
    for group, _ in fsdp_groups(models):
        managed.update(fsdp_param.sharded_param for fsdp_param in group.fsdp_params)
    return managed


def offloads_parameters(models: Iterable[nn.Module]) -> bool:
    """Whether a module was sharded with ``CPUOffloadPolicy``."""
    groups = fsdp_groups(models)
    return any(isinstance(group.offload_policy, CPUOffloadPolicy) for group, _ in groups)
