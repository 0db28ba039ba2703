"""Which cores the host lane's threads run on: near the device, and none that another rank has.

Only threads of this package are bound, each by itself and to a set of cores, not to one: the
caller's own threads may run there too, and the system moves ours out of their way.

[Note: whose cores]
Memory of the arena lies next to the device, so do the cores. Several ranks of a host may find the
same ones. Where the process may use every core of the machine, they were not divided, and each
rank takes its share of those near its device, whole physical cores at a time. Where it may not, a
launcher or a container has decided, and all near cores that it left are used.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from ..core.backend import Backend, cores_near, parse_cpu_list
from ..memory import local_ranks


def thread_count(wanted: int | None, *, beside: bool = False) -> int:
    """Threads of the host lane: as ``wanted``, else cores of this process / ranks on this host.

    ``beside`` a streamed lane half of that: the others are left to the link's share of host memory,
    and to the threads that enqueue.
    """
    share = len(os.sched_getaffinity(0)) // local_ranks()
    return wanted or max(1, share // 2 if beside else share)


def thread_setup(backend: Backend, *, bind: bool) -> Callable[[], None]:
    """What each new thread of the host lane does first; never raises for want of permission.

    Args:
        backend: whose device the thread works for.
        bind: whether it is bound to :func:`cores_of_rank`.
    """
    cores = cores_of_rank(backend.device) if bind else frozenset[int]()

    def setup() -> None:
        backend.enter_thread()
        if cores:
            with contextlib.suppress(OSError):  # a sandbox that forbids it: slower, not wrong
                os.sched_setaffinity(0, cores)  # 0: this thread alone

    return setup


def cores_of_rank(device: torch.device) -> frozenset[int]:
    """Cores for the host lane's threads of this rank; never empty."""
    near = cores_near(device)
    ranks, rank = local_ranks(), _local_rank()
    if ranks == 1 or rank is None or len(os.sched_getaffinity(0)) < (os.cpu_count() or 1):
        return near
    sharing = _ranks_near(device, near, ranks, rank)
    if rank not in sharing:
        return near
    return share(sibling_groups(near), sharing.index(rank), len(sharing))


def _local_rank() -> int | None:
    """``LOCAL_RANK`` as torchrun sets it, if it is one."""
    text = os.environ.get("LOCAL_RANK", "")
    return int(text) if text.isdecimal() and int(text) < local_ranks() else None


def _ranks_near(device: torch.device, near: frozenset[int], ranks: int, rank: int) -> list[int]:
    """Local ranks whose devices are next to the same cores; empty where that is unknown."""
    if near == frozenset(os.sched_getaffinity(0)):  # there is but one set
        return list(range(ranks))
    if device.index != rank or torch.cuda.device_count() < ranks:
        return []  # each rank sees devices of its own, or does not use the one of its number
    return [i for i in range(ranks) if cores_near(torch.device(device.type, i)) == near]


def share(groups: Sequence[tuple[int, ...]], index: int, count: int) -> frozenset[int]:
    """Part ``index`` of ``count`` of the groups, sizes differing by one group at most.

    Of fewer groups than parts, all of them: then parts have to be shared.
    """
    start, stop = len(groups) * index // count, len(groups) * (index + 1) // count
    mine = groups[start:stop] if len(groups) >= count else groups
    return frozenset(core for group in mine for core in group)


def sibling_groups(
    cores: Iterable[int], root: Path = Path("/sys/devices/system/cpu")
) -> list[tuple[int, ...]]:
    """``cores`` by physical core, ascending; each alone where that is unknown.

    Source: Linux ``/sys/devices/system/cpu/cpu<n>/topology/thread_siblings_list``.
    """
    allowed = frozenset(cores)
    groups: set[tuple[int, ...]] = set()
    for core in allowed:
        try:
            text = (root / f"cpu{core}" / "topology" / "thread_siblings_list").read_text()
        except OSError:
            text = str(core)
        siblings = parse_cpu_list(text) | {core}
        groups.add(tuple(sorted(siblings & allowed)))
    return sorted(groups)
