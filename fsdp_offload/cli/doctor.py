"""``doctor``: find what makes offload slow or fail on this machine, a line each."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Final

from .check import Check, attempt, worst

_ROOT: Final = Path("/")


def run(options: argparse.Namespace) -> int:
    """Print all checks; returns 1 if one is an error."""
    checks = list(_checks(options.device))
    if options.json:
        rows = [check._asdict() for check in checks]
        print(json.dumps({"state": worst(checks), "checks": rows}, indent=1))
    else:
        width = max(len(check.name) for check in checks)
        print("\n".join(check.line(width) for check in checks))
    return int(worst(checks) == "error")


def _checks(index: int) -> Iterator[Check]:
    try:  # to import torch, and all public names that this package needs
        import_module(".checks", __package__)
    except (ImportError, OSError) as error:  # OSError: a library that torch is linked with
        text = " ".join(str(error).split())
        remedy = "install it as pytorch.org says, in a version that docs/compatibility.md lists"
        yield Check("torch", "error", f"Python cannot import it: {text}", remedy)
    else:
        yield from _of_torch_and_host(index)


def _of_torch_and_host(index: int) -> Iterator[Check]:
    """Check torch and the host.

    Raises:
        ConfigError: torch sees no device of this number.
    """
    import torch

    from ..core.devices import pci_address
    from ..core.errors import ConfigError
    from ..core.fsdp_names import TORCH_RUN
    from ..link.budget import host_memory
    from . import checks

    count = torch.cuda.device_count()
    if not 0 <= index < max(1, count):
        raise ConfigError(
            f"--device {index}",
            reason=f"torch sees {count or 'no'} GPUs",
            remedy="count from 0, or leave it out" if count else "leave it out",
        )
    device = torch.device("cuda", index) if count else None
    address = pci_address(device) if device else ""
    properties = [torch.cuda.get_device_properties(i) for i in range(count)]
    device_bytes = sum(each.total_memory for each in properties)

    yield checks.check_torch(str(torch.__version__), TORCH_RUN)
    yield attempt("FSDP2", checks.check_names)
    driver = checks.driver_version(_ROOT)
    yield checks.check_device(torch.version.cuda, driver, [each.name for each in properties])
    yield checks.check_host_memory(host_memory(_ROOT), device_bytes)
    yield checks.check_numa(_ROOT, address, os.sched_getaffinity(0))
    if device is not None:
        torch.cuda.set_device(device)
    yield attempt("triton", lambda: checks.check_triton(device))
    if device is not None:
        yield attempt("other processes", lambda: checks.check_others(device))
        yield attempt("page-locking", lambda: checks.check_pinning(device))
        yield attempt("link", lambda: checks.check_link(device, _ROOT, address))
