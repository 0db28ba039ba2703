"""Checks of the host: each takes what it looks at, so that a test can give it a fault.

Paths are Linux's, below a ``root`` that holds ``proc`` and ``sys``. ``address`` is the device's on
the PCI bus, empty where there is none.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Collection
from pathlib import Path
from typing import Final

from ..core.devices import parse_cpu_list
from ..link.budget import HostMemory, size_text
from .check import Check

_HUGE_PAGES: Final = "sys/kernel/mm/transparent_hugepage/enabled"
_RDMA: Final = "sys/class/infiniband"


def check_memlock(limit_bytes: int, root: Path) -> Check:
    """``ulimit -l``, the soft ``RLIMIT_MEMLOCK``.

    The CUDA driver locks pages in the kernel on its own account, which this limit does not bound.
    RDMA adapters do count against it: NCCL between hosts fails there, with or without offload.
    """
    if limit_bytes == resource.RLIM_INFINITY:
        return Check("ulimit -l", "ok", "unlimited")
    found = f"{limit_bytes >> 10} KiB; memory that CUDA page-locks does not count"
    if _names(root / _RDMA):
        return Check(
            "ulimit -l",
            "warning",
            f"{found}, that of RDMA adapters ({', '.join(_names(root / _RDMA))}) does",
            "ulimit -l unlimited; for containers --ulimit memlock=-1",
        )
    return Check("ulimit -l", "ok", found)


def check_host_memory(bounds: Collection[HostMemory], device_bytes: int) -> Check:
    """What the host has left for state: the tightest bound, beside the memory of all devices."""
    name = "host memory"
    if not bounds:
        remedy = "say what all ranks may use with host_memory="
        return Check(name, "warning", "not known: neither the kernel nor a cgroup says", remedy)
    tight = min(bounds, key=lambda bound: bound.free_bytes)
    found = f"{size_text(tight.free_bytes)} free of {size_text(tight.total_bytes)}"
    found += f", by {tight.source}"
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


def check_huge_pages(root: Path) -> Check:
    """Transparent huge pages, for which the arena asks."""
    text = _read(root / _HUGE_PAGES)
    mode = text.partition("[")[2].partition("]")[0]
    if mode in ("always", "madvise"):
        return Check("huge pages", "ok", mode)
    return Check(
        "huge pages",
        "warning",
        "never: the arena is touched in small pages" if mode else "the kernel has none",
        f"echo madvise > /{_HUGE_PAGES}" if mode else "none needed: construction takes longer",
    )


def check_numa(root: Path, address: str, cores: Collection[int]) -> Check:
    """Whether this process may use ``cores`` next to the device, where its arena should lie."""
    name = "NUMA"
    names = _names(root / "sys/devices/system/node")
    nodes = [each for each in names if each.removeprefix("node").isdecimal()]
    if len(nodes) <= 1 or not address:
        return Check(name, "ok", f"nodes: {max(1, len(nodes))}")
    folder = root / "sys/bus/pci/devices" / address
    node = _read(folder / "numa_node")
    near = parse_cpu_list(_read(folder / "local_cpulist"))
    if not node.isdecimal() or not near:
        found = f"{len(nodes)} nodes, but not which one is next to {address}"
        return Check(name, "warning", found, "let the machine's firmware tell (numa_node is -1)")
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


def check_pcie(root: Path, address: str) -> Check:
    """Speed and width of the device's link now, against what the device can do.

    An idle device may lower its link's speed: read it behind copies.
    """
    folder = root / "sys/bus/pci/devices" / address
    names = ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width")
    speed, width, max_speed, max_width = (_number(_read(folder / name)) for name in names)
    if not (speed and width and max_speed and max_width):
        remedy = "none needed if the measured link is as fast as it should be"
        return Check("PCIe", "warning", f"not known: the system does not say of {address}", remedy)
    found = f"{speed:g} GT/s x{width:g} of {max_speed:g} GT/s x{max_width:g}"
    if width < max_width or speed < max_speed:
        return Check(
            "PCIe",
            "warning",
            found,
            "another slot, its setting in the firmware, or no riser: transfers take that much "
            "longer",
        )
    return Check("PCIe", "ok", found)


def pcie_gbps(root: Path, address: str) -> float:
    """GB/s that the link carries each way before packets' headers; 0 if it is not known."""
    folder = root / "sys/bus/pci/devices" / address
    speed, width = (_number(_read(folder / f"current_link_{name}")) for name in ("speed", "width"))
    # Up to 5 GT/s 8 of 10 bits carry data, to 32 GT/s 128 of 130, above all of them.
    share = 0.8 if speed <= 5 else 128 / 130
    return speed * width * share / 8


def driver_version(root: Path) -> str:
    """Of the kernel's NVIDIA driver; empty if there is none, or it does not say."""
    found = re.search(r"\d+\.\d[\d.]*", _read(root / "proc/driver/nvidia/version"))
    return found[0] if found else ""


def _number(text: str) -> float:
    """What the text begins with; 0 for "Unknown"."""
    try:
        return float(text.split()[0])
    except (IndexError, ValueError):
        return 0.0


def _names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
