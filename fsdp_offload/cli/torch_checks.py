"""Checks of torch, its device and the link; each takes what was found, for tests to plant faults.

What looks at this machine stands at the end, and in :mod:`.doctor`.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ..bench.machine import measure_link
from ..core import backend, fsdp
from ..core.errors import PinningError, UnsupportedTorchError
from ..memory.budget import size_text
from ..update.kernels import triton_kernels
from .check import Check
from .host_checks import pcie_gbps

_OWN_BYTES: Final = 1 << 30
"""A context, and what the driver keeps for itself, take less than this on one device."""
_PIN_BYTES: Final = 64 << 20
_SHARE: Final = 0.6
"""Of a link's bytes copies reach 80 to 90 %; with less than this something is in their way."""


def check_torch(version: str, run: Sequence[str]) -> Check:
    """Against the versions that all tests were run with, ascending."""
    found = tuple(int(number) for number in version.split(".")[:2])
    oldest, newest = (tuple(map(int, each.split("."))) for each in (run[0], run[-1]))
    remedy = f"install torch {run[0]} to {run[-1]}"
    if found < oldest:
        return Check("torch", "error", f"{version}, older than {run[0]}", remedy)
    if found > newest:
        return Check("torch", "warning", f"{version}, newer than what was tested", remedy)
    return Check("torch", "ok", version)


def check_names(try_names: Callable[[], None]) -> Check:
    """FSDP2's private names.

    Args:
        try_names: raises UnsupportedTorchError if one is missing.
    """
    try:
        try_names()
    except UnsupportedTorchError as error:
        return Check("FSDP2", "error", f"{error.what}: {error.reason}", error.remedy)
    return Check("FSDP2", "ok", f"all {len(fsdp.NAMES)} private names are there")


def check_device(cuda: str | None, driver: str, devices: Sequence[str]) -> Check:
    """A device that torch can use.

    Args:
        cuda: version that torch was built for; ``None``: without it.
        driver: what the kernel's NVIDIA driver says of itself; empty: there is none.
        devices: names of those that torch sees.
    """
    if devices and cuda is None:
        remedy = "an NVIDIA device: streams and pinning are CUDA's"
        return Check("device", "warning", f"{', '.join(devices)}, which was not tried", remedy)
    if devices:
        found = f"{', '.join(devices)}; torch for CUDA {cuda}, driver {driver or 'not known'}"
        return Check("device", "ok", found)
    if cuda is None and driver:
        remedy = "install torch's build for CUDA (pytorch.org)"
        return Check("device", "error", f"driver {driver}, but this torch has no CUDA", remedy)
    if driver:
        found = f"driver {driver}, but torch for CUDA {cuda} sees no device"
        remedy = "CUDA_VISIBLE_DEVICES, permissions of /dev/nvidia*, or a driver as new as CUDA"
        return Check("device", "error", found, remedy)
    return Check("device", "warning", "none: CPU tensors only", "run it where training runs")


def check_pinning(pin: Callable[[], None]) -> Check:
    """Whether the driver page-locks memory of this process.

    Args:
        pin: does it for a while; raises PinningError.
    """
    try:
        pin()
    except PinningError as error:
        remedy = 'free host memory, or TransferConfig(pin="prefer"), which is slower'
        return Check("page-locking", "error", error.reason, remedy)
    return Check("page-locking", "ok", f"the driver takes {size_text(_PIN_BYTES)}")


def check_link(measured: Mapping[str, Any], pcie_gbps: float) -> Check:
    """Copies of page-locked memory.

    Args:
        measured: as :func:`fsdp_offload.bench.machine.measure_link` gives it.
        pcie_gbps: what PCIe carries each way; 0: not known.
    """
    to, back, both = (measured[f"{way}_gbps"] for way in ("h2d", "d2h", "h2d+d2h"))
    found = f"{to:.1f} GB/s to the device, {back:.1f} back, {both:.1f} in all with both at once"
    if pcie_gbps:
        found += f"; PCIe carries {pcie_gbps:.1f} each way"
    if min(to, back) < _SHARE * pcie_gbps:
        remedy = "see NUMA; other processes that copy; the IOMMU's setting in a virtual machine"
        return Check("link", "warning", found, remedy)
    return Check("link", "ok", found)


def check_others(free_bytes: int, total_bytes: int, own_bytes: int) -> Check:
    """Device memory that neither this process nor the driver has.

    Args:
        free_bytes: as the driver says.
        total_bytes: of the device.
        own_bytes: that torch's allocator holds in this process.
    """
    others = total_bytes - free_bytes - own_bytes
    found = f"{size_text(free_bytes)} free of {size_text(total_bytes)}"
    if others > _OWN_BYTES:
        return Check(
            "other processes",
            "warning",
            f"{found}; others have about {size_text(others)}",
            'end them (nvidia-smi lists them), or give a number: device_memory="2GiB"',
        )
    return Check("other processes", "ok", found)


def check_triton(is_there: bool, is_usable: bool | None) -> Check:
    """Kernels for updates.

    Args:
        is_there: whether it can be imported.
        is_usable: whether a kernel gave what it should; ``None``: there is no device to try it.
    """
    if is_usable is None:
        found = "there" if is_there else "not installed"
        return Check("triton", "ok", f"{found}; without a device torch operations update")
    if is_usable:
        return Check("triton", "ok", "kernels compile")
    return Check(
        "triton",
        "warning",
        "kernels do not compile: torch operations update, slower"
        if is_there
        else "not installed: torch operations update, slower",
        "a C compiler and Python's headers" if is_there else "install torch's build for CUDA",
    )


# --------------------------------------------------------------------------- this machine


@contextmanager
def _group_of_one() -> Iterator[None]:
    """A gloo group of this process alone, whatever a launcher has set."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def names_here() -> Check:
    """All names, on a layer that is sharded on the CPU."""

    def try_names() -> None:
        model = nn.Linear(4, 4, device="cpu")
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        fsdp.check_torch([model])

    with _group_of_one():
        return check_names(try_names)


def triton_here(is_there: bool) -> Check:
    """A kernel is compiled and tried on the current device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the check says it
        return check_triton(is_there, triton_kernels() is not None)


def others_here(device: torch.device) -> Check:
    """Of one device."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return check_others(free_bytes, total_bytes, torch.cuda.memory_reserved(device))


def pinning_here(device: torch.device) -> Check:
    """Page-locks memory, and gives it back."""

    def pin() -> None:
        with mmap.mmap(-1, _PIN_BYTES) as memory:
            address = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
            backend.pin(address, _PIN_BYTES, device)
            backend.unpin(address, _PIN_BYTES, device)

    return check_pinning(pin)


def link_here(device: torch.device, root: Path, address: str) -> Check:
    """Measured on the current device: 2 GiB each way, some times."""
    with _group_of_one():
        measured = measure_link(device, 3)
    return check_link(measured, pcie_gbps(root, address))


def address_of(device: torch.device) -> str:
    """On the PCI bus, as Linux writes it."""
    properties = torch.cuda.get_device_properties(device)
    domain, bus, slot = (
        int(getattr(properties, f"pci_{name}_id")) for name in ("domain", "bus", "device")
    )
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"
