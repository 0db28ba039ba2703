"""``export``: weights of a checkpoint for other programs."""

from __future__ import annotations

import argparse
import json

from ..checkpoint import export_safetensors


def run(options: argparse.Namespace) -> int:
    """Write the files, and print their paths.

    Raises:
        OffloadError: see ``checkpoint.export_safetensors``.
    """
    files = export_safetensors(
        options.checkpoint,
        options.out,
        dtype=options.dtype,
        max_shard_bytes=options.max_shard_bytes,
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
