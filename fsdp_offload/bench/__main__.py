"""``python -m fsdp_offload.bench [table FILE...] [options]``."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Compare optimizers, or make tables from what was measured."""
    if sys.argv[1:2] == ["table"]:
        from .table import main as make_tables

        make_tables(sys.argv[2:])
        return
    from .compare import main as compare

    compare()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of gloo and of peers can abort the interpreter while it shuts down


if __name__ == "__main__":
    main()
