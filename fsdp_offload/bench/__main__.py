"""``python -m fsdp_offload.bench [options]``."""

from __future__ import annotations

import os
import sys

from .iteration import main

if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # threads of gloo and of peers can abort the interpreter while it shuts down
