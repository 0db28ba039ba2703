"""Checkpoints: what is saved, how it is laid out in files, and how it comes back."""

from __future__ import annotations

from .export import export_safetensors
from .folder import complete_checkpoints, latest
from .local import load_local, save_local
from .packer import OptimizerState, pack_optimizer_state, unpack_optimizer_state
from .restore import load
from .saving import async_save, save
from .team import wait_for_background as wait_for_saves

__all__ = [
    "OptimizerState",
    "async_save",
    "complete_checkpoints",
    "export_safetensors",
    "latest",
    "load",
    "load_local",
    "pack_optimizer_state",
    "save",
    "save_local",
    "unpack_optimizer_state",
    "wait_for_saves",
]
