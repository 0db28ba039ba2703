"""How many hardware queues the CUDA driver puts streams into.

[Note: queues]
Streams share hardware queues of a copy engine, and what is in one queue runs in order, whichever
stream it belongs to. Bulk that is enqueued long before it is ready to run keeps what others have
enqueued behind it, such as the user's own copies of a batch. With the driver's default, three
streams of bulk to the device held up three of every four other streams on an H200; with
``CUDA_DEVICE_MAX_CONNECTIONS=32``, the most there is, none (docs/how-it-works.md). The driver reads
it when CUDA is initialised, so it is set when this package is imported, unless it is set already.
Source of the variable: the CUDA C++ programming guide, "CUDA environment variables".
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from typing import Final

VARIABLE: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
MOST: Final = 32

_log = logging.getLogger("fsdp_offload")


def ask_for_queues() -> None:
    """Set the variable, unless somebody has, or CUDA is initialised already. Imports nothing."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        os.environ.setdefault(VARIABLE, str(MOST))


@functools.cache
def warn_of_few_queues() -> None:
    """Once per process, where streams of a CUDA device are about to be made."""
    value = os.environ.get(VARIABLE)
    if value is None or not value.isdecimal() or int(value) < MOST:
        _log.warning(
            "%s is %s: your own copies to the device may share a hardware queue with transfers of "
            "state and wait for them. Import fsdp_offload before CUDA is used, or export %s=%d",
            VARIABLE,
            "not set" if value is None else value,
            VARIABLE,
            MOST,
        )
