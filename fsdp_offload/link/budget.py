"""Check whether more fits into this host's memory, before allocating it.

Two bounds apply: ``MemAvailable`` of ``/proc/meminfo``, and the rest of every memory cgroup
(version 2) above this process. A cgroup's limit is the smaller of ``memory.max`` and
``memory.high``: pinned pages cannot be reclaimed, so the kernel would slow a process above ``high``
for ever. Page cache that nothing reads (``inactive_file``) does not count as use.

Some virtual machines start with a small ``MemTotal`` that grows with use; ``/proc/zoneinfo`` lists
all their page frames as *present* from the start. A kernel without that file (gVisor) reports
nothing about the machine; only a cgroup bounds memory there. If a host adds memory on demand,
nothing inside can see it: pass ``host_memory=``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from ..core.config import exact
from ..core.errors import ConfigError, HostMemoryError

PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_ROOT: Final = Path("/")
_RESERVED_SHARE: Final = 8  # the kernel keeps less than this part of the present memory


class HostMemory(NamedTuple):
    """One bound on what this host's processes may take together, in bytes."""

    source: str
    free_bytes: int  # left of the bound now
    total_bytes: int  # left if no process held anything


def host_memory(root: Path = _ROOT) -> list[HostMemory]:
    """Find the known bounds; ``root`` contains ``proc`` and ``sys``."""
    found = []
    meminfo = _numbers(root / "proc/meminfo", 1024)
    present = re.findall(r"^\s*present\s+(\d+)$", read(root / "proc/zoneinfo"), re.MULTILINE)
    if "MemAvailable" in meminfo and present:
        present_bytes = PAGE_BYTES * sum(map(int, present))
        hidden = present_bytes - meminfo["MemTotal"]
        # The kernel hides what it keeps for itself; more than that will be added with use.
        growth = hidden if hidden * _RESERVED_SHARE > present_bytes else 0
        free, total = (meminfo[name] + growth for name in ("MemAvailable", "MemTotal"))
        found.append(HostMemory("MemAvailable", free, total))
    for folder in _cgroups(root):
        limits = [read(folder / name) for name in ("memory.max", "memory.high")]
        used = read(folder / "memory.current")
        known = [int(limit) for limit in limits if limit.isdecimal()]  # "max": no limit
        if known and used.isdecimal():
            cache = _numbers(folder / "memory.stat", 1).get("inactive_file", 0)
            free = max(0, min(known) - max(0, int(used) - cache))
            found.append(HostMemory("its memory cgroup", free, min(known)))
    return found


def _cgroups(root: Path) -> Iterator[Path]:
    match = re.search(r"^0::/(.*)$", read(root / "proc/self/cgroup"), re.MULTILINE)
    top = root / "sys/fs/cgroup"
    folder = top / match[1] if match else top
    if ".." in folder.parts or not folder.exists():
        folder = top  # a container often sees its own cgroup as the root
    yield folder
    while folder != top:
        folder = folder.parent
        yield folder


def _numbers(path: Path, unit: int) -> dict[str, int]:
    lines = re.findall(r"^(\w+):?\s+(\d+)", read(path), re.MULTILINE)
    return {name: unit * int(value) for name, value in lines}


def read(path: Path) -> str:
    """Return the text of a file of the kernel's; empty if it is missing."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def check_host_memory(
    required_bytes: int,
    holder: str,
    *,
    held: Mapping[str, int],
    bound_bytes: int | None,
    local_ranks: int,
    root: Path = _ROOT,
) -> None:
    """Refuse host memory that does not fit, before allocating it.

    Assumes that all ranks of a host hold and need the same as this one. They do not check at the
    same time, and some have already taken theirs. So this rank's share has to fit into free memory,
    and all shares together into the total.

    Args:
        required_bytes: bytes that this rank will take.
        holder: name of the object that takes them.
        held: bytes that this rank has already taken, by holder.
        bound_bytes: bytes that all ranks may use together; ``None`` asks the host.
        local_ranks: ranks on this host, this one included.
        root: contains ``proc`` and ``sys``.

    Raises:
        HostMemoryError: it does not fit; the message has all figures by holder.
    """
    if not required_bytes:
        return
    taken = sum(held.values()) * local_ranks
    needed = required_bytes * local_ranks
    if bound_bytes is not None:
        if needed + taken <= bound_bytes:
            return
        reason = f"host_memory is {exact(bound_bytes)}"
        reason += f", of which {exact(taken)} are taken" if taken else ""
    else:
        short = (
            f"{source} leaves {exact(free)} of {exact(total)}"
            for source, free, total in host_memory(root)
            if required_bytes > free or needed + taken > total
        )
        if not (reason := next(short, "")):
            return
    if held:
        holders = (f"{name} = {exact(n_bytes)}" for name, n_bytes in held.items())
        reason += f"; this rank holds: {', '.join(holders)}"
    what = f"{holder}: {exact(required_bytes)} of host memory on this rank"
    if local_ranks > 1:
        what += f" and {exact(needed)} on the {local_ranks} ranks of this host"
    raise HostMemoryError(
        what,
        reason=reason,
        remedy="offload less, close() another holder, run fewer ranks per host, or "
        "raise host_memory= or the container's memory limit",
    )


def cores_per_rank() -> int:
    """Return this rank's share of the process's cores, at least 1.

    Raises:
        ConfigError: see :func:`local_ranks`.
    """
    return max(1, len(os.sched_getaffinity(0)) // local_ranks())


def local_ranks() -> int:
    """Return the number of ranks on this host, from torchrun's ``LOCAL_WORLD_SIZE``; 1 without it.

    Raises:
        ConfigError: the variable is not a positive integer.
    """
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"LOCAL_WORLD_SIZE={text!r}",
            reason="not a positive number of ranks",
            remedy="set it to the number of ranks on this host, as torchrun does, or unset it",
        )
    return int(text)
