"""Output of one rank for all: warnings, and a bar or a log line for long work."""

from __future__ import annotations

import logging
import sys
import threading
import time
from typing import Final, Self

import torch.distributed as dist

from .config import brief

_DELAY_S: Final = 2
"""Shorter work shows no bar."""
_log = logging.getLogger("fsdp_offload")


def is_rank_0() -> bool:
    """Whether this process is rank 0, or has no process group."""
    return not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0


def warn(text: str, *values: object) -> None:
    """Log a warning once per job, for facts that all ranks share."""
    if is_rank_0():
        _log.warning(text, *values, stacklevel=2)


def report(text: str, n_bytes: int, seconds: float) -> None:
    """Log finished work once per job, with its rate, unless a bar has shown it."""
    if is_rank_0() and not _shows_bars():
        rate = n_bytes / max(seconds, 1e-9) / 1e9
        _log.info("%s: %s in %.2f s, %.2f GB/s", text, brief(n_bytes), seconds, rate)


def _shows_bars() -> bool:
    # A background save would write between the lines of the job's own bars.
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and is_rank_0() and sys.stderr is not None and sys.stderr.isatty()


class Progress:
    """A bar over ``total`` bytes, or another ``unit``, inside a ``with``; none if ``total`` is 0.

    Only the main thread of rank 0 shows it, on a terminal, after 2 s. Several threads may advance
    it.
    """

    def __init__(self, total: float, text: str, *, unit: str = "B") -> None:
        self._bar = None
        if total and _shows_bars():
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, done: float = 1) -> None:
        """Advance the bar."""
        if self._bar is not None:
            with self._lock:
                self._bar.update(done)

    def describe(self, text: str) -> None:
        """Change the bar's text."""
        if self._bar is not None:
            # A refresh would show the bar before its delay.
            late = time.perf_counter() - self._start > _DELAY_S
            self._bar.set_description(text, refresh=late)
