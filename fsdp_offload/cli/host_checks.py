"""Checks of the host. Each takes what it checks as arguments, so that a test can give it a fault.

Paths are Linux's, below a ``root`` that holds ``proc`` and ``sys``. ``address`` is the device's on
the PCI bus, empty without a device.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from ..core.devices import parse_cpu_list
from ..link.budget import HostMemory, size_text
from .check import Check


def check_host_memory(bounds: Collection[HostMemory], device_bytes: int) -> Check:
    """Compare the tightest bound of host memory with the memory of all devices."""
    name = "host memory"
    if not bounds:
        remedy = "give all ranks a bound with host_memory="
        return Check(name, "warning", "not known: neither the kernel nor a cgroup tells", remedy)
    tight = min(bounds, key=lambda bound: bound.free_bytes)
    free, total = size_text(tight.free_bytes), size_text(tight.total_bytes)
    found = f"{free} free of {total}, by {tight.source}"
    if not tight.free_bytes:
        return Check(name, "error", found, "end other processes, or raise the container's limit")
    if tight.free_bytes < device_bytes:
        return Check(
            name,
            "warning",
            f"{found}; less than the devices have, {size_text(device_bytes)}",
            "AdamW needs 10 bytes per bf16 parameter: give the container more, or keep a share "
            "on the device with offload_fraction=",
        )
    return Check(name, "ok", found)


def check_numa(root: Path, address: str, cores: Collection[int]) -> Check:
    """Tell whether this process may use ``cores`` next to the device, where state should lie."""
    name = "NUMA"
    nodes = list((root / "sys/devices/system/node").glob("node[0-9]*"))
    if len(nodes) <= 1 or not address:
        return Check(name, "ok", f"nodes: {max(1, len(nodes))}")
    folder = root / "sys/bus/pci/devices" / address
    node = _read(folder / "numa_node")
    near = parse_cpu_list(_read(folder / "local_cpulist"))
    if not node.isdecimal() or not near:
        found = f"{len(nodes)} nodes, but not which one is next to {address}"
        return Check(name, "warning", found, "set numa_node in the machine's firmware (it is -1)")
    found = f"{len(nodes)} nodes; node {node} is next to {address}"
    usable = len(near & set(cores))
    if not usable:
        return Check(
            name,
            "warning",
            f"{found}, this process may use none of its cores",
            f"numactl --cpunodebind={node} --membind={node}, or the launcher's binding",
        )
    return Check(name, "ok", f"{found}, of whose cores this process may use {usable}")


def pcie_gbps(root: Path, address: str) -> float:
    """Return the GB/s that the device's PCIe carries each way, without headers; 0: not known."""
    folder = root / "sys/bus/pci/devices" / address
    speed, width = (_number(_read(folder / f"max_link_{name}")) for name in ("speed", "width"))
    # Up to 5 GT/s 8 of 10 bits carry data, to 32 GT/s 128 of 130, above all of them.
    share = 0.8 if speed <= 5 else 128 / 130
    return speed * width * share / 8


def driver_version(root: Path) -> str:
    """Find the version of the kernel's NVIDIA driver; empty without one."""
    found = re.search(r"\d+\.\d[\d.]*", _read(root / "proc/driver/nvidia/version"))
    return found[0] if found else ""


def _number(text: str) -> float:
    """Parse the number that the text begins with; 0 for "Unknown"."""
    try:
        return float(text.split()[0])
    except (IndexError, ValueError):
        return 0.0


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
