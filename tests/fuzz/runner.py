"""Runs sequences, finds the events that a failure needs, and says how to run it again."""

from __future__ import annotations

import logging
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_offload.optimizer import ring

from .bits import Mismatch
from .cases import Case
from .events import draw, happen
from .pair import Pair


@dataclass
class Failure:
    """A sequence in which the two sides differ, and the fewest events that still do."""

    seed: int
    ranks: int
    kept: list[int]
    report: str

    def __str__(self) -> str:
        kept = ",".join(map(str, self.kept))
        return (
            f"seed {self.seed} on {self.ranks} rank(s); again:\n  python -m tests.fuzz "
            f"--ranks {self.ranks} --seed {self.seed} --keep {kept}\n{self.report}"
        )


@dataclass
class Outcome:
    """Of many sequences."""

    count: int
    failures: list[Failure]
    cpu_s: float  # of this process
    counts: Counter[str]  # how often what happened where


def run_case(case: Case, mesh: DeviceMesh, counts: Counter[str] | None = None) -> str | None:
    """Why the two sides differ, if they do, with the events until then; adds to ``counts``."""
    with mock.patch.object(ring, "AHEAD", case.ahead):
        pair = Pair(case, _folder(case), mesh if case.sharded else None)
        lines, found = [str(case)], ""
        for position, event in enumerate(case.events):
            pair.log.clear()
            found = _guarded(partial(happen, pair, event))
            if not found:
                state = case.watched or position == len(case.events) - 1
                found = _guarded(partial(pair.compare, state=state))
            found = _agree(found)
            lines.append(f"  {position} {event.name}: {'; '.join(pair.log)}")
            if found:
                break
        closed = _guarded(pair.close)
    if counts is not None:
        counts.update(pair.counts)
    found = found or _agree(closed)
    return "\n".join([*lines, found]) if found else None


def _guarded(call: Callable[[], None]) -> str:
    """What went wrong, or nothing."""
    try:
        call()
    except Mismatch as error:
        return f"differs: {error}"
    except Exception:
        return traceback.format_exc()
    return ""


def _agree(found: str) -> str:
    """The same answer on all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return found
    failed = torch.tensor([float(bool(found))])
    dist.all_reduce(failed)
    if not failed.item():
        return ""
    answers: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, found)
    return "\n".join(f"rank {r}: {text}" for r, text in enumerate(answers) if text)


def _folder(case: Case) -> Path:
    """An own one, the same on all ranks."""
    names = [tempfile.mkdtemp(prefix="fuzz-", dir=_MEMORY)]
    if case.ranks > 1:
        own = Path(names[0])
        dist.broadcast_object_list(names)
        if dist.get_rank():
            own.rmdir()
    return Path(names[0])


_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Files of a sequence are written where no disk has to be waited for."""


def shrink(case: Case, first: str, mesh: DeviceMesh) -> tuple[list[int], str]:
    """Positions of the fewest events that are found to fail still, and their report."""
    kept, report = list(range(len(case.events))), first
    size = max(1, len(kept) // 2)
    while size:
        start = 0
        while start < len(kept):
            fewer = kept[:start] + kept[start + size :]
            if _has_wrap(case, fewer) and (found := run_kept(case, fewer, mesh)):
                kept, report = fewer, found
            else:
                start += size
        size //= 2
    return kept, report


def _has_wrap(case: Case, kept: list[int]) -> bool:
    return any(case.events[i].name == "wrap" for i in kept)


def run_kept(case: Case, kept: Iterable[int], mesh: DeviceMesh) -> str | None:
    """Only these events."""
    chosen = set(kept)
    return run_case(case.without({i for i in range(len(case.events)) if i not in chosen}), mesh)


def run_seeds(
    seeds: Iterable[int],
    ranks: int = 1,
    without: Iterable[str] = (),
    *,
    most_failures: int = 1,
) -> Outcome:
    """Run one sequence after another.

    Args:
        seeds: of the sequences.
        ranks: in how many processes; more than one: this is one of them.
        without: names of events that are left out.
        most_failures: stop after so many.
    """
    left_out, failures, count, counts = frozenset(without), list[Failure](), 0, Counter[str]()
    cpu = time.process_time()
    with ready() as mesh:
        for seed in seeds:
            case = draw(seed, ranks, left_out)
            count += 1
            if report := run_case(case, mesh, counts):
                kept, report = shrink(case, report, mesh)
                failures.append(Failure(seed, ranks, kept, report))
                if len(failures) >= most_failures:
                    break
    return Outcome(count, failures, time.process_time() - cpu, counts)


def run_again(
    seed: int, ranks: int = 1, kept: Iterable[int] | None = None, without: Iterable[str] = ()
) -> str | None:
    """One sequence, or some of its events: why the two sides differ, if they do."""
    case = draw(seed, ranks, frozenset(without))
    with ready() as mesh:
        return run_kept(case, range(len(case.events)) if kept is None else kept, mesh)


@contextmanager
def ready() -> Iterator[DeviceMesh]:
    """A mesh over all ranks; one thread, no warnings: of a scheduler that steps first, say."""
    log = logging.getLogger("fsdp_offload")
    with ExitStack() as stack:
        if not dist.is_initialized():  # in a single process: FSDP2 on one rank
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            stack.callback(dist.destroy_process_group)
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        stack.callback(log.setLevel, log.level)
        log.setLevel(logging.CRITICAL)
        yield init_device_mesh("cpu", (dist.get_world_size(),))
