"""What one rank says for all: warnings, and of work that takes long a bar or a line of the log."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch.distributed as dist

_DELAY_S: Final = 2
"""What is done sooner shows nothing."""
_log = logging.getLogger("fsdp_offload")


def is_rank_0() -> bool:
    """Whether this process speaks for all; also without a process group."""
    return not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0


def warn(text: str, *values: object) -> None:
    """Log a warning once per job; for what all ranks find, or what concerns all of them."""
    if is_rank_0():
        _log.warning(text, *values, stacklevel=2)


def report(text: str, n_bytes: int, seconds: float) -> None:
    """Log what was done once per job, with its rate, unless a bar has shown it."""
    if is_rank_0() and not _draws_bars():
        rate = n_bytes / max(seconds, 1e-9) / 1e9
        _log.info("%s: %d bytes in %.2f s, %.2f GB/s", text, n_bytes, seconds, rate)


def _draws_bars() -> bool:
    # A background save would write between the lines of the job's own bars.
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and is_rank_0() and sys.stderr is not None and sys.stderr.isatty()


class Progress:
    """A bar that may not be there. Several threads may advance it."""

    def __init__(self, total: float, text: str, unit: str) -> None:
        self._bar = None
        if total and _draws_bars():
            from tqdm import tqdm

            self._bar = tqdm(
                total=total,
                unit=unit,
                unit_scale=unit == "B",
                unit_divisor=1024,
                desc=text,
                delay=_DELAY_S,
                leave=False,
            )
        self._lock = threading.Lock()
        self._start = time.perf_counter()

    def advance(self, done: float = 1) -> None:
        """So much more is done."""
        if self._bar is not None:
            with self._lock:
                self._bar.update(done)

    def describe(self, text: str) -> None:
        """Say what is done from now on, where advance cannot tell."""
        if self._bar is not None:
            late = time.perf_counter() - self._start > _DELAY_S
            self._bar.set_description(text, refresh=late)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()


@contextmanager
def progress(total: float, text: str, *, unit: str = "B") -> Iterator[Progress]:
    """A bar over ``total`` bytes, or another ``unit``; of 0 none.

    Shown on rank 0, by its main thread, where there is a terminal, if it takes more than 2 s.
    """
    bar = Progress(total, text, unit)
    try:
        yield bar
    finally:
        bar.close()
