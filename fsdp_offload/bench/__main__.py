"""``python -m fsdp_offload.bench``: the command ``fsdp-offload bench``."""

import runpy
import sys

sys.argv.insert(1, "bench")
runpy.run_module("fsdp_offload", run_name="__main__")
