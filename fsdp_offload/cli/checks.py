"""Checks of the host, then of torch, its device and the link.

Checks of the host take the facts as arguments, so that a test can pass a fault. Paths are Linux',
below a ``root`` that contains ``proc`` and ``sys``. ``address`` is the device's on the PCI bus,
empty without a device.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ..bench.machine import measure_link, process_group
from ..core import fsdp_names
from ..core.config import TransferConfig, exact
from ..core.devices import parse_cpu_list
from ..core.errors import PinningError, UnsupportedTorchError
from ..link import HostRange
from ..link.budget import HostMemory, read
from ..update.kernels import triton_kernels
from .check import Check

_OWN_BYTES: Final = 1 << 30
"""A context and the driver take less than this on one device."""
_PIN_BYTES: Final = 64 << 20
_SHARE: Final = 0.6
"""Copies reach 80 to 90 % of PCIe's rate; less than this share is a fault."""


def check_host_memory(bounds: Collection[HostMemory], device_bytes: int) -> Check:
    """Compare the tightest bound of host memory with the memory of all devices."""
    name = "host memory"
    if not bounds:
        remedy = "pass host_memory= on all ranks"
        return Check(name, "warning", "unknown: neither the kernel nor a cgroup reports it", remedy)
    tight = min(bounds, key=lambda bound: bound.free_bytes)
    free, total = exact(tight.free_bytes), exact(tight.total_bytes)
    found = f"{free} free of {total}, according to {tight.source}"
    if not tight.free_bytes:
        return Check(name, "error", found, "end other processes, or raise the container's limit")
    if tight.free_bytes < device_bytes:
        return Check(
            name,
            "warning",
            f"{found}; less than the devices' own {exact(device_bytes)}",
            "AdamW needs 10 bytes per bf16 parameter: raise the container's "
            "limit, or keep a share on the device with offload_fraction=",
        )
    return Check(name, "ok", found)


def check_numa(root: Path, address: str, cores: Collection[int]) -> Check:
    """Check whether ``cores`` include any next to the device, where state should lie."""
    name = "NUMA"
    nodes = list((root / "sys/devices/system/node").glob("node[0-9]*"))
    if len(nodes) <= 1 or not address:
        return Check(name, "ok", f"nodes: {max(1, len(nodes))}")
    folder = root / "sys/bus/pci/devices" / address
    node = read(folder / "numa_node")
    near = parse_cpu_list(read(folder / "local_cpulist"))
    if not node.isdecimal() or not near:
        found = f"{len(nodes)} nodes; the node of {address} is unknown"
        return Check(name, "warning", found, "set numa_node in the machine's firmware (it is -1)")
    found = f"{len(nodes)} nodes; node {node} is next to {address}"
    usable = len(near & set(cores))
    if not usable:
        return Check(
            name,
            "warning",
            f"{found}; this process may use none of its cores",
            f"bind it: numactl --cpunodebind={node} --membind={node}, or the launcher's option",
        )
    return Check(name, "ok", f"{found}; this process may use {usable} of its cores")


def pcie_gbps(root: Path, address: str) -> float:
    """Return the GB/s of the device's PCIe each way, without headers; 0 if unknown."""
    folder = root / "sys/bus/pci/devices" / address
    speed, width = (_number(read(folder / f"max_link_{name}")) for name in ("speed", "width"))
    # Up to 5 GT/s 8 of 10 bits carry data, to 32 GT/s 128 of 130, above all of them.
    share = 0.8 if speed <= 5 else 128 / 130
    return speed * width * share / 8


def driver_version(root: Path) -> str:
    """Find the version of the kernel's NVIDIA driver; empty without one."""
    found = re.search(r"\d+\.\d[\d.]*", read(root / "proc/driver/nvidia/version"))
    return found[0] if found else ""


def _number(text: str) -> float:
    """Parse the number that the text begins with; 0 for "Unknown"."""
    found = re.match(r"\d+(\.\d+)?", text)
    return float(found[0]) if found else 0.0


def check_torch(version: str, run: Sequence[str]) -> Check:
    """Compare ``version`` with those that ran all tests, ascending."""
    found = tuple(int(number) for number in version.split(".")[:2])
    oldest, newest = (tuple(map(int, each.split("."))) for each in (run[0], run[-1]))
    remedy = f"install torch {run[0]} to {run[-1]}"
    if found < oldest:
        return Check("torch", "error", f"{version}, older than {run[0]}", remedy)
    if found > newest:
        return Check("torch", "warning", f"{version}, newer than the tested versions", remedy)
    return Check("torch", "ok", version)


def check_names() -> Check:
    """Look for FSDP2's private names, on a layer that is sharded on the CPU."""
    with process_group("cpu", alone=True):
        model = nn.Linear(4, 4, device="cpu")
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        try:
            fsdp_names.check_torch([model])
        except UnsupportedTorchError as error:
            return Check("FSDP2", "error", f"{error.what}: {error.reason}", error.remedy)
    return Check(
        "FSDP2", "ok", f"torch has all {len(fsdp_names.NAMES)} private names that this package uses"
    )


def check_device(cuda: str | None, driver: str, devices: Sequence[str]) -> Check:
    """Check whether torch, built for ``cuda``, can use a device; empty ``driver``: none."""
    if devices and cuda is None:
        remedy = "use an NVIDIA device: streams and pinning need CUDA"
        return Check("device", "warning", f"{', '.join(devices)}, which was never tested", remedy)
    if devices:
        found = f"{', '.join(devices)}; torch for CUDA {cuda}, driver {driver or 'unknown'}"
        return Check("device", "ok", found)
    if cuda is None and driver:
        remedy = "install torch's build for CUDA (pytorch.org)"
        return Check("device", "error", f"driver {driver}, but this torch has no CUDA", remedy)
    if driver:
        found = f"driver {driver}, but torch for CUDA {cuda} sees no device"
        remedy = "check CUDA_VISIBLE_DEVICES, permissions of /dev/nvidia*, and the driver's version"
        return Check("device", "error", found, remedy)
    return Check("device", "warning", "no GPU found", "run doctor where training runs")


def check_pinning(device: torch.device) -> Check:
    """Page-lock some memory of this process, and free it."""
    try:
        HostRange(_PIN_BYTES, device=device, can_pin=True, transfer=TransferConfig()).close()
    except PinningError as error:
        remedy = 'free host memory, or pass TransferConfig(pin="prefer"), which is slower'
        return Check("page-locking", "error", error.reason, remedy)
    return Check("page-locking", "ok", f"the driver page-locked {exact(_PIN_BYTES)}")


def check_link(device: torch.device, root: Path, address: str) -> Check:
    """Measure copies of page-locked memory on the current device: 2 GiB each way, several times."""
    with process_group("cpu", alone=True):
        measured = measure_link(device, 3)
    to, back, both = (measured[f"{way}_gbps"] for way in ("h2d", "d2h", "h2d+d2h"))
    found = f"{to:.1f} GB/s to the device, {back:.1f} back, {both:.1f} in total with both busy"
    if bound := pcie_gbps(root, address):
        found += f"; PCIe allows {bound:.1f} each way"
    if min(to, back) < _SHARE * bound:
        remedy = "check NUMA, the slot (lspci -vv), other processes that copy, and the IOMMU"
        return Check("link", "warning", found, remedy)
    return Check("link", "ok", found)


def check_others(device: torch.device) -> Check:
    """Find device memory that other processes use."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    others = total_bytes - free_bytes - torch.cuda.memory_reserved(device)
    found = f"{exact(free_bytes)} free of {exact(total_bytes)}"
    if others > _OWN_BYTES:
        return Check(
            "other processes",
            "warning",
            f"{found}; others use about {exact(others)}",
            'end them (nvidia-smi lists them), or pass a number: device_memory="2GiB"',
        )
    return Check("other processes", "ok", found)


def check_triton(device: torch.device | None) -> Check:
    """Compile and try a kernel for updates on the current device, if any."""
    is_there = find_spec("triton") is not None
    if device is None:
        found = "installed" if is_there else "not installed"
        return Check("triton", "ok", f"{found}; updates on the CPU use torch operations")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the check reports it
        if triton_kernels() is not None:
            return Check("triton", "ok", "its kernels compile and compute correctly")
    return Check(
        "triton",
        "warning",
        f"{'its kernels do not compile' if is_there else 'not installed'}; "
        "updates use torch operations, which are slower",
        "install a C compiler and Python's headers"
        if is_there
        else "install torch's build for CUDA",
    )
