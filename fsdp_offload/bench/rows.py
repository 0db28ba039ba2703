"""Rows by name: the optimizer and options of a row.

``plain`` is the optimizer on the device. ``default`` is ours without options; ``step``, ``forward``
and ``backward`` are ours with that ``overlap``. ``torchao`` is its ``CPUOffloadOptimizer``;
``cpuoffload`` is FSDP2's ``CPUOffloadPolicy`` with torch's fused AdamW on the CPU. ``compute`` is
forward and backward alone. Rows with ``all`` make their weights on the CPU. The other words:

====================  ======================================================================
``clip``              clip every iteration: ours with ``optimizer.clip_grad_norm_``
``torchclip``         clip with ``torch.nn.utils.clip_grad_norm_``
``bf16``, ``int8``    moments in that precision
``host``, ``all``     ``update_on="host"``, ``offload="all"``
``f0.5``              ``offload_fraction``
``d0``, ``d2GiB``     ``device_memory``
``b64MiB``            ``TransferConfig(bucket_bytes=...)``
``c24GiB``            cap the memory of torch's allocator
``again``             nothing: the row once more, to see how much the machine drifts
====================  ======================================================================
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.optim import AdamW

from ..core.config import TransferConfig, parse_bytes
from ..core.errors import ConfigError
from ..optimizer.hybrid import HybridDeviceOptimizer
from .model import Job, initialize, meta_model, sharded_model

OURS: Final = ("default", "step", "forward", "backward")
MAX_NORM: Final = 1.0
LEARNING_RATE: Final = 1e-4
_WORDS: Final[dict[str, tuple[str, Any]]] = {
    "clip": ("clip", "ours"),
    "torchclip": ("clip", "torch"),
    "bf16": ("moments", torch.bfloat16),
    "int8": ("moments", "int8"),
    "host": ("update_on", "host"),
    "all": ("offload", "all"),
}
_NUMBERS: Final[dict[str, tuple[str, Callable[[str], Any]]]] = {
    "f": ("offload_fraction", float),
    "d": ("device_memory", lambda size: f"{parse_bytes(size)}B"),
    "b": ("bucket_bytes", lambda size: f"{parse_bytes(size)}B"),
    "c": ("cap_bytes", parse_bytes),
}
_WORDS_OF_PEERS: Final = {
    "plain": ("torchclip", "again"),
    "cpuoffload": ("torchclip", "again"),
    "torchao": ("again",),
    "compute": ("again",),
}


class Case(NamedTuple):
    """One row."""

    name: str
    kind: str
    clip: str  # "none", "ours" or "torch"
    options: dict[str, Any]  # from the other words of the name

    @classmethod
    def parse(cls, name: str) -> Case:
        """Parse a name; refuses words unknown to this kind of row."""
        kind, *words = name.split("-")
        if kind not in (*OURS, *_WORDS_OF_PEERS):
            raise _refused(name, f"{kind!r} is not a kind of row")
        if set(words).difference(_WORDS_OF_PEERS.get(kind, words)):
            raise _refused(name, f"{kind!r} rows take only {', '.join(_WORDS_OF_PEERS[kind])}")
        options = dict(_read(name, word) for word in words if word != "again")
        return cls(name, kind, options.pop("clip", "none"), options)


def _read(name: str, word: str) -> tuple[str, Any]:
    if word in _WORDS:
        return _WORDS[word]
    try:
        option, read = _NUMBERS[word[:1]]
        return option, read(word[1:])
    except (KeyError, ValueError):  # a ConfigError is a ValueError
        raise _refused(name, f"the word {word!r} is unknown") from None


def _refused(name: str, reason: str) -> ConfigError:
    kinds = ", ".join((*OURS, *_WORDS_OF_PEERS))
    words = ", ".join((*_WORDS, "again", "f0.5", "d2GiB", "b64MiB", "c24GiB"))
    remedy = f"write KIND-WORD-...; kinds: {kinds}; words: {words}"
    return ConfigError(f"row {name!r}", reason=reason, remedy=remedy)


class Trainer(NamedTuple):
    """Parts of one row's training: ``clip`` runs between backward and step."""

    model: nn.Module
    optimizer: Any
    clip: Callable[[], object]


def make_trainer(case: Case, job: Job, device: torch.device) -> Trainer:
    """Make the trainer of a row; raises ImportError if its peer is not installed."""
    if case.kind == "torchao":
        # torchao does not support DTensors.
        model: nn.Module = initialize(meta_model(job).to_empty(device=device), job, device)
        peer = importlib.import_module("torchao.optim").CPUOffloadOptimizer
        optimizer = peer(model.parameters(), AdamW, fused=True, lr=LEARNING_RATE)
        return Trainer(model, optimizer, lambda: None)
    options = dict(case.options)
    if cap_bytes := options.pop("cap_bytes", None):
        total_bytes = torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / total_bytes))
    policy = None
    if case.kind == "cpuoffload" or options.get("offload") == "all":
        policy = CPUOffloadPolicy(pin_memory=case.kind == "cpuoffload" and device.type == "cuda")
    model = sharded_model(job, device, policy)
    if case.kind == "compute":
        nothing = SimpleNamespace(step=lambda: None, zero_grad=model.zero_grad)
        return Trainer(model, nothing, lambda: None)
    optimizer = AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    if case.kind in OURS:  # the others keep no masters for bf16 shards
        if case.kind != "default":
            options["overlap"] = case.kind
        transfer = TransferConfig(bucket_bytes=options.pop("bucket_bytes", None))
        optimizer = HybridDeviceOptimizer(optimizer, model=model, transfer=transfer, **options)
    if case.clip == "ours":
        return Trainer(model, optimizer, partial(optimizer.clip_grad_norm_, MAX_NORM))
    if case.clip == "torch":
        parameters = list(model.parameters())
        return Trainer(model, optimizer, partial(nn.utils.clip_grad_norm_, parameters, MAX_NORM))
    return Trainer(model, optimizer, lambda: None)
