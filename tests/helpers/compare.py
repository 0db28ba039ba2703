"""The same bits, of anything: what comparisons rest on, inside ranks too, which do not rewrite
assertions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_offload.update import codec


def local(tensor: Tensor) -> Tensor:
    """This rank's shard."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def bits(tensor: Tensor) -> Tensor:
    """The bytes of this rank's shard, so that NaNs and signed zeros compare too."""
    return local(tensor).contiguous().reshape(-1).view(torch.uint8)


def differences(found: Any, expected: Any, what: str = "") -> list[str]:
    """Where nested values differ, in dtype, shape or bits of this rank's shards."""
    if isinstance(expected, Mapping):
        if not isinstance(found, Mapping) or found.keys() != expected.keys():
            return [f"{what}: {sorted(map(str, found))}, expected {sorted(map(str, expected))}"]
        return [d for k, v in expected.items() for d in differences(found[k], v, f"{what} {k}")]
    if isinstance(expected, list | tuple):
        if not isinstance(found, list | tuple) or len(found) != len(expected):
            return [f"{what}: {found!r}, expected {expected!r}"]
        pairs = enumerate(zip(found, expected, strict=True))
        return [d for i, (a, b) in pairs for d in differences(a, b, f"{what} {i}")]
    if not isinstance(expected, Tensor) or not isinstance(found, Tensor):
        is_same = not isinstance(expected, Tensor) and not isinstance(found, Tensor)
        return [] if is_same and found == expected else [f"{what}: {found!r}, not {expected!r}"]
    a, b = local(found), local(expected)
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return [f"{what}: {a.dtype} {tuple(a.shape)}, expected {b.dtype} {tuple(b.shape)}"]
    wrong = int((bits(a) != bits(b)).sum())
    return [f"{what}: {wrong} of {a.nbytes} bytes differ"] if wrong else []


def same(found: Any, expected: Any) -> bool:
    """Whether :func:`differences` finds none."""
    return not differences(found, expected)


def assert_same(found: Any, expected: Any, what: str = "") -> None:
    """Raise if :func:`differences` finds any."""
    if wrong := differences(found, expected, what):
        raise AssertionError("; ".join(wrong))


def master_of(parameter: Tensor, state: Mapping[str, Any]) -> Tensor:
    """The value that the wrapped optimizer stands for: the parameter itself, or its master."""
    if "master" in state:
        master: Tensor = state["master"]
        return master
    if "master_remainder" in state:
        master = torch.empty(parameter.numel())
        remainder = state["master_remainder"].reshape(-1)
        codec.decode_plain(parameter.detach().reshape(-1), remainder, master)
        return master.view(parameter.shape)
    return parameter.detach()


def rounded(master: Tensor, dtype: torch.dtype) -> Tensor:
    """What the shard of a master must hold: bf16 by the codec, fp16 to nearest even."""
    if master.dtype == dtype or dtype != torch.bfloat16:
        return master.detach().to(dtype)
    value = torch.empty(master.numel(), dtype=dtype)
    codec.encode_plain(master.detach().reshape(-1), value, torch.empty_like(value))
    return value.view(master.shape)
