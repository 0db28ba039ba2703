"""Seconds per GiB to obtain pinned host memory, one line per way.

    python tests/gpu/pin_speed.py
    --gib N      size of each allocation (default 8)
    --repeat N   rounds over all ways (default 2); where memory is new to a virtual machine, the
                 first round also pays for the host handing it over

Run it on a machine with a GPU and at least twice the size free.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from fsdp_offload.config import TransferConfig
from fsdp_offload.memory import HostArena

DEVICE = torch.device("cuda", 0)


def torch_pinned(n_bytes: int) -> str:
    memory = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)
    assert memory.is_pinned()
    return ""


def arena(n_bytes: int, *, huge_pages: bool) -> str:
    owner = HostArena(
        n_bytes, device=DEVICE, can_pin=True, transfer=TransferConfig(huge_pages=huge_pages)
    )
    done = owner.statistics()
    assert done.pinned
    gib = n_bytes / 2**30
    owner.close()
    return (
        f"touch {done.touch_seconds / gib:.4f}, register {done.pin_seconds / gib:.4f}, "
        f"{done.threads} threads, huge pages: {done.huge_pages}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=8)
    parser.add_argument("--repeat", type=int, default=2)
    options = parser.parse_args()
    n_bytes = int(options.gib * 2**30)
    torch.ones(1, device=DEVICE)  # the context is not part of what is measured
    ways: dict[str, Callable[[], str]] = {
        "torch pin_memory=True": lambda: torch_pinned(n_bytes),
        "arena, 4 KiB pages": lambda: arena(n_bytes, huge_pages=False),
        "arena, huge pages": lambda: arena(n_bytes, huge_pages=True),
    }
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.gib} GiB each")
    for turn in range(options.repeat):
        for name, way in ways.items():
            start = time.perf_counter()
            detail = way()
            seconds = (time.perf_counter() - start) / options.gib
            print(f"round {turn}  {name:24} {seconds:.4f} s/GiB  {detail}", flush=True)
            torch._C._host_emptyCache()  # torch keeps pinned memory otherwise


if __name__ == "__main__":
    main()
