"""``.metadata`` of checkpoints that one did not write: a pickle, and so perhaps code.

``checkpoint.load`` unpickles it as torch does, which is for checkpoints that one trusts. Commands
that only look into a folder refuse a pickle that names anything but what describes tensors.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint import metadata

from ..checkpoint.folder import METADATA
from ..core.errors import CheckpointError

_PLAIN: Final = frozenset(
    (
        ("builtins", "set"),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),  # of Python 3.13
        ("torch", "Size"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
    )
)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Only what describes tensors; every class of torch's module of metadata does."""
        of_metadata = getattr(metadata, name, None) if module == metadata.__name__ else None
        is_own = isinstance(of_metadata, type) and of_metadata.__module__ == module
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_own or is_dtype or (module, name) in _PLAIN:
            return super().find_class(module, name)
        raise CheckpointError(
            f"{METADATA} with {module}.{name}",
            reason="it describes no tensor, and may run code",
            remedy="checkpoint.load(), if you trust who wrote the checkpoint",
        )


def refuse_code(path: Path) -> None:
    """Refuse a checkpoint whose ``.metadata`` names more than what describes tensors.

    Raises:
        CheckpointError: it does. A file that is missing or broken is left to the reader.
    """
    try:
        _Unpickler(io.BytesIO((path / METADATA).read_bytes())).load()
    except CheckpointError:
        raise
    except Exception:  # changed bytes of a pickle may raise anything
        return
