"""Checkpoints: what is saved, how it is laid out in files, and how it comes back."""

from __future__ import annotations

from .folder import complete_checkpoints, latest
from .packer import OptimizerState, pack_optimizer_state, unpack_optimizer_state
from .restore import load
from .saving import async_save, save, wait_for_saves

__all__ = [
    "OptimizerState",
    "async_save",
    "complete_checkpoints",
    "latest",
    "load",
    "pack_optimizer_state",
    "save",
    "unpack_optimizer_state",
    "wait_for_saves",
]
