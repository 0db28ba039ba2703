"""Private names of FSDP2 that this package uses, and a check that torch has them.

:data:`NAMES` lists what ``core/fsdp.py`` reads, replaces or writes. :func:`check_torch` tries every
name when an optimizer or an offloader is built, so that an unsupported torch fails there, not in
the middle of a backward.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from .errors import UnsupportedTorchError
from .fsdp import fsdp_modules, groups_of
from .progress import warn

TORCH_RUN: Final = ("2.11", "2.13", "2.14", "2.15")
"""Versions of torch that run all tests (docs/compatibility.md)."""


@dataclass(frozen=True)
class Name:
    """One attribute of an object of FSDP2."""

    owner: str  # "module", "state", "context", "group", "mesh", "streams" or "parameter"
    attribute: str
    use: str  # "read", "called", "replaced" (a method, on the instance) or "written"
    purpose: str
    before: str = ""  # its name in older versions
    arguments: tuple[object, ...] = ()  # a method's, as FSDP2 or this package passes them


NAMES: Final = (
    Name("module", "_get_fsdp_state", "called", "from a module to its state"),
    Name("state", "_fsdp_param_groups", "read", "from a state to its groups", "_fsdp_param_group"),
    Name("state", "_state_ctx", "read", "the backward that all modules of a root share"),
    Name("context", "is_last_backward", "read", "whether gradients are final"),
    Name("group", "fsdp_params", "read", "its parameters, in the order of its flat buffers"),
    Name("group", "offload_policy", "written", "CPUOffloadPolicy is taken off"),
    Name("group", "device", "read", "where it computes"),
    Name("group", "mesh_info", "read", "ranks that it is sharded and replicated over"),
    Name("group", "comm_ctx", "read", "its streams"),
    Name("group", "is_unsharded", "read", "whether a gather has anything to do"),
    Name("group", "is_sharded", "read", "whether a gather reads the shards"),
    Name("group", "_training_state", "read", "which streams the next gather takes"),
    Name("group", "_all_gather_result", "read", "a gather that was not waited for"),
    Name("group", "_to_sharded", "called", "frees what a forward that raised has gathered"),
    Name("group", "_all_gather_comm", "written", "its buffer is copied from without tables"),
    Name("group", "_reduce_scatter_comm", "written", "its buffer is copied into without tables"),
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
    Name("parameter", "_sharded_param_data", "written", "what a gather reads: lent for its length"),
    Name("parameter", "padded_sharded_param_size", "read", "room for its reduced gradient"),
    Name("parameter", "_module_info", "read", "the parameter that a load may have assigned"),
    Name("parameter", "_unsharded_param", "read", "holds gradients that were not reduced"),
    Name("parameter", "unsharded_accumulated_grad", "read", "the same, in another dtype"),
    Name("parameter", "offload_to_cpu", "written", "CPUOffloadPolicy is taken off"),
    Name("parameter", "pin_memory", "written", "the same"),
    Name("parameter", "device", "read", "where it is gathered"),
    Name(
        "parameter",
        "reset_sharded_param",
        "replaced",
        "values are adopted; no addresses compared",
    ),
)
"""All private names in use."""


def check_torch(models: Iterable[nn.Module]) -> None:
    """Try all of :data:`NAMES` on ``models``; warn once if torch is newer than tested.

    Raises:
        UnsupportedTorchError: a name is missing.
    """
    _warn_if_newer(str(torch.__version__))
    tried: set[object] = set()

    def once(kind: object, owner: str, instance: Any) -> None:
        if kind not in tried:
            _try(owner, instance)
            tried.add(kind)

    for module in fsdp_modules(models):
        once(type(module), "module", module)
        state: Any = module._get_fsdp_state()
        once(type(state), "state", state)
        for group, _ in groups_of(module):
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
    # FSDP2 makes its streams in the first forward, so this uses streams of the CPU.
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
                remedy=f"install a tested version: torch {', '.join(TORCH_RUN)}",
            )


def _problem(name: Name, instance: Any) -> str:
    kind = type(instance)
    in_class = inspect.getattr_static(kind, name.attribute, None)
    if not (hasattr(instance, name.attribute) or (name.before and hasattr(instance, name.before))):
        # _unsharded_param is declared, and set by the first gather.
        return "" if name.attribute in inspect.get_annotations(kind) else "does not exist"
    if name.use in ("called", "replaced") and not _takes(in_class, name.arguments):
        return f"does not take {len(name.arguments)} arguments"
    return "cannot be written" if name.use == "written" and isinstance(in_class, property) else ""


def _takes(method: Any, arguments: tuple[object, ...]) -> bool:
    """Check the class: another optimizer or offloader may have replaced it on the instance."""
    try:
        inspect.signature(method).bind(None, *arguments)
    except TypeError:
        return False
    return True


@functools.cache
def _warn_if_newer(version: str) -> None:
    newest = TORCH_RUN[-1]
    if _minor(version) > _minor(newest):
        warn(
            "torch %s is newer than the tested versions (%s): it has the private "
            "names of FSDP2 that fsdp_offload uses, but its results are untested",
            version,
            ", ".join(TORCH_RUN),
        )


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split(".")[:2])
