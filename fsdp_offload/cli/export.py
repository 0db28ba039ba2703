"""``export``: weights of a checkpoint for other programs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..checkpoint import export_safetensors
from ..core.errors import ConfigError


def run(options: argparse.Namespace) -> int:
    """Write the files, and print their paths.

    Raises:
        OffloadError: as of ``checkpoint.export_safetensors``.
    """
    files = export_safetensors(
        options.checkpoint,
        options.out,
        dtype=options.dtype,
        max_shard_bytes=options.max_shard_bytes,
        names=None if options.names is None else _names_in(options.names),
        model_prefix=options.model_prefix,
        optimizer_prefix=options.optimizer_prefix,
    )
    sizes = {str(path): path.stat().st_size for path in files}
    if options.json:
        rows = [{"path": path, "file_bytes": n_bytes} for path, n_bytes in sizes.items()]
        print(json.dumps({"files": rows}, indent=1))
    else:
        print("\n".join(f"{n_bytes:>15}  {path}" for path, n_bytes in sizes.items()))
    return 0


def _names_in(path: Path) -> dict[str, str | None]:
    """Of a JSON object; refuses what is none."""
    try:
        names = json.loads(path.read_text())
    except ValueError:
        names = None
    if isinstance(names, dict) and all(isinstance(n, str | None) for n in names.values()):
        return names
    raise ConfigError(
        f"--names {path}",
        reason="no JSON object of names",
        remedy='write {"blocks.0.wq": "model.layers.0.q_proj.weight", "unused": null}',
    )
