"""What the user sees of work that takes long: a bar on a terminal, from one rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


def is_rank_0() -> bool:
    """Whether this process speaks for all; also without a process group."""
    return not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0


class Progress:
    """A bar that may not be there. Several threads may advance it."""

    def __init__(self, n_bytes: int, text: str, delay_s: float) -> None:
        self._bar = None
        if n_bytes:
            from tqdm import tqdm

            self._bar = tqdm(
                total=n_bytes,
                unit="B",
                unit_scale=True,
                unit_divisor=1024,
                desc=text,
                delay=delay_s,
            )
        self._lock = threading.Lock()
        self._start = time.perf_counter()

    def advance(self, n_bytes: int) -> None:
        """So many more are done."""
        if self._bar is not None:
            with self._lock:
                self._bar.update(n_bytes)

    def describe(self, text: str) -> None:
        """Say what is done from now on, where advance cannot tell."""
        if self._bar is not None:
            late = time.perf_counter() - self._start > 1
            self._bar.set_description(text, refresh=late)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()


@contextmanager
def progress(n_bytes: int, text: str, *, delay_s: float = 0) -> Iterator[Progress]:
    """A bar over ``n_bytes``, shown after ``delay_s``; of 0 bytes none."""
    bar = Progress(n_bytes, text, delay_s)
    try:
        yield bar
    finally:
        bar.close()
