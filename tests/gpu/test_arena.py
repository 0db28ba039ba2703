from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator

import pytest
import torch

from fsdp_offload.core import devices
from fsdp_offload.core.config import MIB, TransferConfig
from fsdp_offload.core.errors import PinningError
from fsdp_offload.link import HostRange

NUMEL = 8 * MIB + 3  # of fp32: more than 32 MiB, not a multiple of a page


def make(n_bytes: int = 4 * NUMEL + 4096, **transfer: object) -> HostRange:
    config = TransferConfig(**transfer)  # type: ignore[arg-type]
    return HostRange(n_bytes, device=torch.device("cuda", 0), can_pin=True, transfer=config)


@pytest.fixture
def arena() -> Iterator[HostRange]:
    owner = make()
    yield owner
    torch.cuda.synchronize()
    owner.close()


def test_the_whole_arena_is_pinned_until_closed() -> None:
    arena = make()
    views = [arena.tensor(offset, 1024, torch.float32) for offset in (0, 4096, 4 * NUMEL)]
    assert arena.pinned
    assert arena.seconds > 0
    assert all(view.is_pinned() for view in views)
    arena.close()
    assert not arena.pinned
    assert not any(view.is_pinned() for view in views)
    views[-1].fill_(3)
    assert torch.equal(views[-1].cuda().cpu(), views[-1])


def test_asynchronous_copies_both_ways_are_exact(arena: HostRange) -> None:
    host = arena.tensor(4096, NUMEL, torch.float32)
    source = torch.randn(NUMEL, device="cuda")
    host.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(host, source.cpu())
    back = host.to("cuda", non_blocking=True)
    assert torch.equal(back, source)


def test_a_refusal_leaves_the_device_usable(arena: HostRange) -> None:
    """Registering twice is what the driver refuses most reliably."""
    address = arena.tensor(0, 1, torch.uint8).data_ptr()
    with pytest.raises(PinningError, match="cudaHostRegister answered 712"):
        devices.pin(address, 4096, torch.device("cuda", 0))
    # A code left in the runtime would be reported by the next kernel launch.
    assert torch.ones(1000, device="cuda").sum().item() == 1000
    devices.unpin(1 << 12, 4096, torch.device("cuda", 0))
    assert torch.ones(1000, device="cuda").sum().item() == 1000


def test_a_forked_child_does_not_unregister(arena: HostRange) -> None:
    view = arena.tensor(0, NUMEL, torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads: wanted here
        pid = os.fork()
    if pid == 0:
        arena.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert view.is_pinned()
    assert view.cuda().sum().item() == 0


def test_a_process_that_never_closes_ends_cleanly() -> None:
    script = """
import torch
from fsdp_offload.core.config import TransferConfig
from fsdp_offload.link import HostRange
arena = HostRange(
    64 << 20, device=torch.device("cuda", 0), can_pin=True, transfer=TransferConfig()
)
view = arena.tensor(0, 1 << 20, torch.float32)
on_device = view.to("cuda", non_blocking=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
