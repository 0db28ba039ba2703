"""Does the state fit into this host's memory, before any of it is taken.

Three numbers bound what all processes of this host may still take:

* ``MemAvailable`` of ``/proc/meminfo``: free memory plus what the kernel can drop at once.
* What the kernel owns but has not counted yet. Some virtual machines start with a small
  ``MemTotal`` that grows while memory is used. Their page frames are all *present* in
  ``/proc/zoneinfo`` from the start, so ``present - MemTotal`` is memory that will appear. It counts
  only when it is more than an eighth of what is present (everywhere else the difference is what
  the kernel keeps for itself, a few per cent), less the kernel's page descriptors (1/64), and
  without the pages that a balloon holds, because only the host can give those back.
* What every memory cgroup above this process leaves: its limit minus its use, where page cache
  that nobody reads (``inactive_file``) does not count as use. cgroup v1 and v2, the tightest wins.
  In v2 the limit is the smaller of ``memory.max`` and ``memory.high``: pinned pages cannot be
  reclaimed, so that a process above ``high`` is slowed down for ever.

A kernel without ``/proc/zoneinfo`` (gVisor) reports a ``MemTotal`` that follows use and says
nothing about the machine; there only a cgroup limit can refuse.

Two kinds of growth cannot be seen from inside: memory that the host would hot-plug on demand
(Hyper-V, virtio-mem) and a balloon that it would deflate. ``TransferConfig.host_budget`` is for
these: where it is given, nothing else is looked at.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from ..errors import ConfigError, HostMemoryError

PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_PROC: Final = Path("/proc")
# cgroup v1 writes "no limit" as the largest multiple of the page size in an int64.
_V1_UNLIMITED: Final = 1 << 62
_DESCRIPTOR_SHARE: Final = 64  # a page descriptor is 64 bytes for each 4096
_RESERVED_SHARE: Final = 8


@dataclass(frozen=True)
class HostMemory:
    """What the host has left, in bytes."""

    free_bytes: int
    """``MemAvailable``."""

    growth_bytes: int | None
    """Memory that the kernel owns and has not counted yet. ``None``: it cannot be known, and
    ``free_bytes`` is no bound."""

    cgroup_limit_bytes: int | None
    """Limit of the tightest memory cgroup; ``None`` if there is no limit."""

    cgroup_used_bytes: int | None
    """Use of that cgroup without inactive page cache; ``None`` if there is no limit."""

    @property
    def usable_bytes(self) -> int | None:
        """Bytes that can still be taken; ``None`` if nothing is known to bound them."""
        bounds = []
        if self.growth_bytes is not None:
            bounds.append(self.free_bytes + self.growth_bytes)
        if self.cgroup_limit_bytes is not None:
            bounds.append(max(0, self.cgroup_limit_bytes - (self.cgroup_used_bytes or 0)))
        return min(bounds, default=None)

    def explain(self) -> str:
        """The numbers behind :attr:`usable_bytes`, for people."""
        parts = [f"{size_text(self.free_bytes)} free (MemAvailable)"]
        if self.growth_bytes is None:
            parts[0] += ", which is no bound because this kernel does not say what the machine has"
        elif self.growth_bytes:
            parts.append(f"{size_text(self.growth_bytes)} that the kernel has not counted yet")
        if self.cgroup_limit_bytes is not None:
            parts.append(
                f"a cgroup limit of {size_text(self.cgroup_limit_bytes)} with "
                f"{size_text(self.cgroup_used_bytes or 0)} used"
            )
        return ", ".join(parts)


def size_text(n_bytes: int) -> str:
    """``n_bytes`` in GiB for people, and exactly."""
    return f"{n_bytes / 2**30:.2f} GiB ({n_bytes} bytes)"


def available_host_bytes(proc: Path = _PROC) -> HostMemory:
    """Read what this host has left for this process and its peers.

    Args:
        proc: where procfs is mounted.

    Raises:
        HostMemoryError: ``/proc/meminfo`` cannot be read.
    """
    try:
        meminfo = parse_meminfo((proc / "meminfo").read_text())
    except OSError as error:
        raise HostMemoryError(
            "free host memory is unknown",
            reason=f"cannot read {proc / 'meminfo'} ({error.strerror})",
            remedy="say how much may be used with TransferConfig(host_budget=...)",
        ) from None
    limit, used = _tightest_cgroup(proc)
    return HostMemory(available_from(meminfo), _growth_bytes(proc, meminfo), limit, used)


def check_host_budget(
    required_bytes: int,
    *,
    local_ranks: int,
    budget_bytes: int | None,
    proc: Path = _PROC,
) -> None:
    """Refuse an arena that does not fit, before anything is allocated.

    All ranks of a host are assumed to need what this one needs. They do not check at the same
    time, so what peers seem to have taken already (their anonymous memory beyond this rank's) is
    counted as still usable, up to ``required_bytes`` for each.

    Args:
        required_bytes: host bytes that this rank is going to take.
        local_ranks: ranks on this host, this one included.
        budget_bytes: bytes that all of them may use together; ``None`` asks the host.
        proc: where procfs is mounted.

    Raises:
        HostMemoryError: it does not fit; the message has all the numbers.
    """
    if required_bytes == 0:
        return
    needed = required_bytes * local_ranks
    if budget_bytes is not None:
        if needed > budget_bytes:
            raise _too_much(
                required_bytes, local_ranks, f"host_budget allows {size_text(budget_bytes)}"
            )
        return
    memory = available_host_bytes(proc)
    if memory.usable_bytes is None or needed <= memory.usable_bytes:
        return
    taken = _taken_by_peers(required_bytes, local_ranks, proc)
    if needed <= memory.usable_bytes + taken:
        return
    why = f"{size_text(memory.usable_bytes)} can be used: {memory.explain()}"
    if taken:
        why += f"; ranks beside this one have taken {size_text(taken)} of it already"
    raise _too_much(required_bytes, local_ranks, why)


def local_ranks() -> int:
    """Ranks on this host, from ``LOCAL_WORLD_SIZE`` as torchrun sets it; 1 without it.

    Raises:
        ConfigError: the variable is not a positive integer.
    """
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    try:
        ranks = int(text)
    except ValueError:
        ranks = 0
    if ranks < 1:
        raise ConfigError(
            f"LOCAL_WORLD_SIZE={text!r}",
            reason="not a positive number of ranks",
            remedy="set it to the number of ranks on this host, as torchrun does, or unset it",
        )
    return ranks


def _too_much(required_bytes: int, ranks: int, why: str) -> HostMemoryError:
    what = f"offloaded state needs {size_text(required_bytes)} of host memory on this rank"
    if ranks > 1:
        what += f" and {size_text(required_bytes * ranks)} on the {ranks} ranks of this host"
    return HostMemoryError(
        what,
        reason=why,
        remedy="lower offload_fraction or raise device_budget, run fewer ranks per host, raise the "
        "container's memory limit, or, if the host has more than it shows, say how much all its "
        "ranks may use with TransferConfig(host_budget=...)",
    )


# --------------------------------------------------------------------------- /proc/meminfo


def parse_meminfo(text: str) -> dict[str, int]:
    """Bytes by name from the text of ``/proc/meminfo``."""
    sizes: dict[str, int] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        fields = rest.split()
        if len(fields) == 2 and fields[1] == "kB":
            sizes[name] = int(fields[0]) * 1024
    return sizes


def available_from(meminfo: Mapping[str, int]) -> int:
    """``MemAvailable``, or what kernels before 3.14 give instead, in bytes."""
    if "MemAvailable" in meminfo:
        return meminfo["MemAvailable"]
    return sum(meminfo.get(name, 0) for name in ("MemFree", "Buffers", "Cached"))


def parse_present_pages(text: str) -> int:
    """Pages that exist, counted or not, from the text of ``/proc/zoneinfo``."""
    return sum(
        int(fields[1])
        for line in text.splitlines()
        if (fields := line.split())[:1] == ["present"] and len(fields) == 2
    )


def parse_balloon_pages(text: str) -> int:
    """Pages that a balloon driver holds, from the text of ``/proc/vmstat``."""
    counters = dict(line.split()[:2] for line in text.splitlines() if len(line.split()) >= 2)
    return max(0, int(counters.get("balloon_inflate", 0)) - int(counters.get("balloon_deflate", 0)))


def _growth_bytes(proc: Path, meminfo: Mapping[str, int]) -> int | None:
    """Bytes by which ``MemTotal`` will grow by itself; see the module's text."""
    zones = _read(proc / "zoneinfo")
    present = PAGE_BYTES * parse_present_pages(zones) if zones else 0
    if present == 0:
        return None
    missing = present - meminfo.get("MemTotal", present)
    missing -= PAGE_BYTES * parse_balloon_pages(_read(proc / "vmstat") or "")
    if missing * _RESERVED_SHARE <= present:
        return 0
    return missing - present // _DESCRIPTOR_SHARE


# --------------------------------------------------------------------------- cgroups


@dataclass(frozen=True)
class _Version:
    limits: tuple[str, ...]
    usage: str
    inactive: tuple[str, ...]


_V2: Final = _Version(("memory.max", "memory.high"), "memory.current", ("inactive_file",))
# `total_` counts the children too; without hierarchy there is only the plain name.
_V1: Final = _Version(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "inactive_file"),
)


def parse_limit(text: str) -> int | None:
    """Bytes of a cgroup limit file; ``None`` for "no limit" of either version."""
    word = text.strip()
    if not word.isdecimal() or int(word) >= _V1_UNLIMITED:
        return None
    return int(word)


def parse_cgroup_paths(text: str) -> dict[int, str]:
    """This process's path in the memory hierarchy of each version, from ``/proc/self/cgroup``."""
    paths: dict[int, str] = {}
    for line in text.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            paths[2] = path
        elif "memory" in controllers.split(","):
            paths[1] = path
    return paths


def parse_cgroup_mounts(text: str) -> dict[int, tuple[str, Path]]:
    """Root within the hierarchy and mount point, by version, from ``/proc/self/mountinfo``."""
    mounts: dict[int, tuple[str, Path]] = {}
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        root, point = _unescape(fields[3]), Path(_unescape(fields[4]))
        if kind[0] == "cgroup2":
            mounts.setdefault(2, (root, point))
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            mounts.setdefault(1, (root, point))
    return mounts


def _unescape(text: str) -> str:
    """mountinfo writes blanks in names as octal codes."""
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, char)
    return text


def _tightest_cgroup(proc: Path) -> tuple[int | None, int | None]:
    """Limit and use of the cgroup that leaves least, over both versions and all levels."""
    paths = parse_cgroup_paths(_read(proc / "self" / "cgroup") or "")
    mounts = parse_cgroup_mounts(_read(proc / "self" / "mountinfo") or "")
    found: list[tuple[int, int]] = []
    for number, version in ((1, _V1), (2, _V2)):
        if number in paths and number in mounts:
            found.extend(
                level
                for folder in _levels(paths[number], *mounts[number])
                if (level := _read_level(folder, version)) is not None
            )
    return min(found, key=lambda level: level[0] - level[1], default=(None, None))


def _levels(path: str, root: str, point: Path) -> Iterator[Path]:
    """Folders from the process's own cgroup up to the mount point.

    A container often sees no more than its own cgroup, mounted as if it were the root. A path that
    leads out of what is mounted (another namespace's view) then means the mount point.
    """
    inner = PurePosixPath(path)
    mounted = inner.is_relative_to(root) and ".." not in inner.parts
    folder = point / inner.relative_to(root) if mounted else point
    yield folder
    while folder != point:
        folder = folder.parent
        yield folder


def _read_level(folder: Path, version: _Version) -> tuple[int, int] | None:
    """Limit and use of one cgroup, or ``None`` if it has no limit."""
    stat = _read(folder / "memory.stat") or ""
    fields = dict(line.split()[:2] for line in stat.splitlines() if len(line.split()) >= 2)
    texts = [_read(folder / name) or "" for name in version.limits]
    # v1 only: the limits of levels that are not mounted here show up in this field alone.
    texts.append(fields.get("hierarchical_memory_limit", ""))
    limits = [limit for text in texts if (limit := parse_limit(text)) is not None]
    usage = parse_limit(_read(folder / version.usage) or "")
    if not limits or usage is None:
        return None
    inactive = next((int(fields[name]) for name in version.inactive if name in fields), 0)
    return min(limits), max(0, usage - inactive)


# --------------------------------------------------------------------------- peers


def _taken_by_peers(required_bytes: int, ranks: int, proc: Path) -> int:
    """Bytes that the other ranks of this host seem to have taken for the same purpose already.

    The other ranks are the processes with the same parent; what they have more than this one is
    their arena. The estimate never exceeds what they are going to take.
    """
    own = _status(proc / "self")
    pids: set[str] = set()
    for children in proc.glob(f"{own.get('PPid', 0)}/task/*/children"):
        pids.update((_read(children) or "").split())
    beyond = [_status(proc / pid).get("RssAnon", 0) - own.get("RssAnon", 0) for pid in pids]
    largest = sorted(beyond, reverse=True)[: ranks - 1]
    return sum(min(max(0, n_bytes), required_bytes) for n_bytes in largest)


def _status(folder: Path) -> dict[str, int]:
    """``PPid`` and ``RssAnon`` (bytes) from a process's ``status`` file."""
    values: dict[str, int] = {}
    for line in (_read(folder / "status") or "").splitlines():
        name, _, rest = line.partition(":")
        if name == "PPid":
            values[name] = int(rest)
        elif name == "RssAnon":
            values[name] = int(rest.split()[0]) * 1024
    return values


def _read(path: Path) -> str | None:
    """Text of a kernel file, or ``None`` where it is missing, forbidden or its process is gone."""
    try:
        return path.read_text()
    except OSError:
        return None
