"""Save, load and export checkpoints, as plugins of ``torch.distributed.checkpoint``."""

from __future__ import annotations

from .api import async_save, load, save
from .export import export_safetensors
from .folder import latest
from .reader import Reader
from .stager import Stager
from .state import OptimizerState
from .writer import Writer

__all__ = [
    "OptimizerState",
    "Reader",
    "Stager",
    "Writer",
    "async_save",
    "export_safetensors",
    "latest",
    "load",
    "save",
]
