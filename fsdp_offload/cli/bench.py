"""``bench``: the benchmarks of :mod:`fsdp_offload.bench`, by their own arguments."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence

from .. import bench


def run(words: Sequence[str]) -> int:
    """Run one as ``python -m`` would; its JSON then names that command.

    Args:
        words: behind ``bench``: ``phases``, ``checkpoint``, ``moe`` or nothing, then its arguments.
    """
    name = bench.__name__
    if words and words[0] in ("phases", "checkpoint", "moe"):
        name, words = f"{name}.{words[0]}", words[1:]
    sys.argv[1:] = words
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    return 0
