"""``PagedStash``: what autograd saves of buffers that are not full, in pages of what is used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple, NoReturn, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..core.backend import backend_for
from ..core.config import MIB, SMALL_BYTES, TransferConfig, parse_bytes, sized
from ..core.errors import (
    ActivationError,
    ConfigError,
    DeviceError,
    DeviceMemoryError,
    StashOverflowError,
    copy_error,
)
from ..link import HostPool
from ..plan.activations import StashPlan, make_plan
from .attach import Attachment
from .group import Group
from .pages import INVALID_ROWS, MOST_FAR, MOST_NEAR, MOST_RANGES, OVERFLOWS, PagePool
from .store import TAILS, RowStore

_log = logging.getLogger("fsdp_offload")
T = TypeVar("T")

LEAST_PAGE_BYTES: Final = 128
UNRECORDED_GROUPS: Final = 64
"""For which captures find page tables, if nothing was recorded."""


class Region(Protocol):
    """What is used of a :class:`.FixedAddressRegion`."""

    @property
    def is_paused(self) -> bool:
        """Whether its tensors may not be used."""
        ...

    def empty(self, shape: int, *, dtype: torch.dtype) -> Tensor:
        """Memory of the region."""
        ...


class _Agreed(NamedTuple):
    """What at least one rank has seen, and what this one has."""

    overflowed: bool
    invalid: bool
    asked: bool
    failed: bool
    invalid_rows: int


@dataclass(frozen=True)
class StashStatistics:
    """What a stash has done and holds. Of graphs' replays only pages and overflows are known."""

    groups: int  # closed ones, captured ones among them
    exact_groups: int  # of these: whose rows were kept outside of the pool
    inactive_groups: int  # inside of activation checkpointing or other hooks: they did nothing
    live_groups: int  # whose backward has not come
    taken: int  # saved tensors that were copied away
    ranges: int  # memory ranges that they were views of: the number of copies
    kept: dict[str, int]  # saved tensors that stayed as they are, by reason
    kept_bytes: dict[str, int]
    overflows: int  # groups for which pages ran out since the last check() or run()
    page_bytes: int
    device_pages: int  # of the pool
    used_device_pages: int  # now
    most_device_pages: int
    host_pages: int
    used_host_pages: int
    most_host_pages: int
    host_ms: float  # time of the host in groups' ends


class PagedStash:
    """Keeps the rows that exist of what autograd saves, where buffers have the worst case's size.

    Args:
        device: where the groups compute.
        device_bytes: of the pool on the device; ``None``: what an iteration has needed, with
            ``prepare``'s margin. A size such as ``"24GiB"``.
        host_bytes: page-locked host memory for what the pool has no room for.
        page_bytes: of a page: a power of two.
        region: a ``FixedAddressRegion`` of the same device, which is to hold the pool: between
            phases ``region.pause(save=False)`` gives the memory up, while no group is live.
        tail: what rows beyond the count are filled with when they come back: ``"undefined"``:
            nothing; ``"nan"`` or ``"zero"``, to find code that reads them.
        transfer: how to obtain host memory.

    Raises:
        ConfigError: an argument is wrong.
        DeviceError: the device cannot be used here.
    """

    def __init__(
        self,
        device: torch.device | str,
        device_bytes: int | str | None = None,
        host_bytes: int | str = 0,
        page_bytes: int | str = "256KiB",
        region: Region | None = None,
        tail: str = "undefined",
        transfer: TransferConfig | None = None,
    ) -> None:
        self._device_bytes = sized(device_bytes, "device_bytes")
        self._host_bytes = parse_bytes(host_bytes, "host_bytes")
        size = parse_bytes(page_bytes, "page_bytes", least_int=SMALL_BYTES)
        if size < LEAST_PAGE_BYTES or size & (size - 1):
            raise ConfigError(
                f"page_bytes={page_bytes!r}",
                reason=f"not a power of two of at least {LEAST_PAGE_BYTES}",
                remedy='use "256KiB"',
            )
        if tail not in TAILS:
            raise ConfigError(f"tail={tail!r}", reason="unknown", remedy=f"use {', '.join(TAILS)}")
        self._backend = backend_for(torch.device(device))
        self._store = RowStore(self._backend, size, tail)
        self._region = region
        self._host = HostPool("PagedStash", self._backend, transfer or TransferConfig())

    def __reduce__(self) -> NoReturn:
        raise copy_error(self, "make another one, and keep it outside of modules that are copied")

    def __repr__(self) -> str:
        state = "closed" if self._store.is_closed else "exact" if self._store.is_exact else "paged"
        return f"PagedStash({self._backend.device}, {state}, {self._store.n_live} live groups)"

    # ------------------------------------------------------------------ groups

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def group(self, x: Tensor | None = None, rows: Tensor | None = None) -> Group:
        """A context manager: what is saved inside, and has as many rows as ``x``, is kept in pages.

        Example::

            with stash.group() as group:
                routed, counts = dispatch(x)
                group.rows(routed, counts.sum())
                y = combine(experts(routed, counts))

        Args:
            x: as of :meth:`.Group.rows`, if the buffer exists before.
            rows: how many of its rows exist.

        Raises:
            ConfigError: only one of them is given, or :meth:`.Group.rows` refuses them.
            ClosedError: the stash is closed, or of another process.
        """
        self._store.check_usable("group()")
        made = Group(self._store)
        if (x is None) != (rows is None):
            raise ConfigError(
                "group() with one of x and rows", reason="both are needed", remedy="pass both"
            )
        if x is not None and rows is not None:
            made.rows(x, rows)
        return made

    def attach(
        self, scope: nn.Module, rows: Callable[..., Tensor], at: nn.Module | None = None
    ) -> Attachment:
        """Make each forward of ``scope`` a group, by hooks.

        Args:
            scope: spans what is saved: dispatch, experts and combine at best.
            rows: gets the positional inputs of ``at`` and gives the number of rows.
            at: a module inside, whose first input is the buffer; ``None``: ``scope``.

        Returns:
            A handle whose ``remove()`` takes the hooks away.
        """
        return Attachment(self.group, scope, rows, scope if at is None else at)

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Inside, the host waits for each count: rows go into pages while these suffice, and are
        kept exactly where not, so nothing overflows. So it is before :meth:`prepare`.

        Raises:
            DeviceError: inside a CUDA graph capture.
        """
        self._refuse_capture("exact()")
        before, self._store.asked_exact = self._store.asked_exact, True
        try:
            yield
        finally:
            self._store.asked_exact = before

    # ------------------------------------------------------------------ sizes

    def prepare(self, margin: float = 1.25, captured_groups: int | None = None) -> StashPlan:
        """Take the pool. From then on groups allocate nothing that lasts, and may be captured.

        Call it after an iteration, or at once if ``device_bytes`` was given. Called again, it gives
        the pool up and takes another one: graphs over the first must be gone.

        Args:
            margin: factor to the pages that were in use at once.
            captured_groups: how many groups all captures together will have; ``None``: twice as
                many as were recorded.

        Raises:
            ActivationError: nothing is known of the size, or a group is live.
            DeviceMemoryError, HostMemoryError, PinningError: no room; there is no pool, and groups
                are exact, as before the first call.
            DeviceError: inside a CUDA graph capture.
        """
        store = self._store
        store.check_usable("prepare()")
        self._refuse_capture("prepare()")
        store.collect()
        if store.n_live:
            raise ActivationError(
                f"prepare() with {store.n_live} live groups",
                reason="their backward needs the present memory",
                remedy="call it between iterations",
            )
        if margin < 1:
            raise ConfigError(f"margin={margin}", reason="below 1", remedy="use 1.25")
        if self._device_bytes is None and not store.most_pages:
            raise ActivationError(
                "prepare() before any group was recorded",
                reason="nothing says how large the pool should be",
                remedy="run one iteration before, or give device_bytes",
            )
        plan = make_plan(
            store.recorded,
            store.most_pages,
            page_bytes=store.page_bytes,
            device_bytes=self._device_bytes,
            host_bytes=self._host_bytes,
            margin=margin,
        )
        self._release_pool()
        try:
            pool = self._take_pool(plan)
            self._add_tables(pool, plan, captured_groups)
        except BaseException as error:
            self._host.close()
            if not isinstance(error, torch.OutOfMemoryError):
                raise
            raise DeviceMemoryError(
                f"a pool of {plan.device_bytes / MIB:.0f} MiB",
                reason=f"{error}; there is none now, and groups are exact",
                remedy="give a smaller device_bytes, and host_bytes for the rest",
            ) from error
        store.pool, store.host_groups = pool, plan.host_groups
        _log.info("PagedStash: %s", plan.explain())
        return plan

    def _take_pool(self, plan: StashPlan) -> PagePool:
        far = self._host.take(plan.host_bytes) if plan.host_pages else None
        numel = plan.device_bytes // 8
        if (region := self._region) is None:
            near = torch.empty(numel, dtype=torch.int64, device=self._backend.device)
        else:
            near = region.empty(numel, dtype=torch.int64)
            self._store.is_present = lambda: not region.is_paused
        return PagePool(self._backend, plan.page_bytes, near, far)

    def _add_tables(self, pool: PagePool, plan: StashPlan, captured_groups: int | None) -> None:
        """For the groups that are live at once, and for captures."""
        tables = max((-(-len(each.row_bytes) // MOST_RANGES) for each in plan.groups), default=1)
        worst = [each.pages(plan.page_bytes, each.capacity) for each in plan.groups]
        n_pages = max(worst, default=pool.n_near + pool.n_far)
        pool.add_tables(tables * (len(plan.groups) + 1), n_pages, to_capture=False)
        if pool.can_capture:
            count = captured_groups
            if count is None:
                count = 2 * (self._store.recorded_groups or UNRECORDED_GROUPS)
            pool.add_tables(tables * count, n_pages, to_capture=True)
            for group in set(plan.groups):  # what a capture launches was compiled before
                pool.try_out(group.capacity, group.row_bytes[:MOST_RANGES])

    # ------------------------------------------------------------------ overflow

    def check(
        self,
        *,
        also: Sequence[Tensor] = (),
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Raise on all ranks if pages ran out on one. The host waits for the device once.

        What was computed since the last call must not be used then.

        Args:
            also: further flags, on the device, one element each, nonzero if set.
            process_group: whose ranks agree; ``None``: all, where there is a process group.

        Raises:
            StashOverflowError: pages ran out, more rows came than a buffer holds, or ``also``.
            DeviceError: inside a CUDA graph capture.
        """
        self._raise_if_set(self._agree("check()", also, process_group))

    def run(
        self,
        fn: Callable[..., T],
        *,
        undo: Callable[[], object] | None = None,
        keep: Iterable[Tensor] = (),
        also: Sequence[Tensor] = (),
        process_group: dist.ProcessGroup | None = None,
    ) -> T:
        """``fn(False)``; if pages ran out on a rank, ``fn(True)`` in :meth:`exact`.

        All ranks repeat it, or none. Random state of torch, on the CPU and the device, is as before
        then.

        Args:
            fn: a forward, or a forward and backward. It gets, by position, whether it is repeated.
            undo: called before the repetition, such as ``optimizer.zero_grad``.
            keep: tensors that ``fn`` writes, such as counters of tokens: as before then, too.
            also: as of :meth:`check`; the repetition is where the dispatcher makes its buffers
                larger.
            process_group: as of :meth:`check`.

        Returns:
            What ``fn`` has.

        Raises:
            StashOverflowError: the count was above the capacity and ``also`` does not say so, or
                the repetition failed, too.
            ActivationError: ``fn`` raised on another rank.
            DeviceError: inside a CUDA graph capture.
        """
        self._refuse_capture("run()")
        kept = [(tensor, tensor.detach().clone()) for tensor in keep]
        states = _random_states(self._backend.device)
        result, agreed = self._attempt(fn, False, also, process_group)
        if agreed.invalid and not agreed.asked:
            self._raise_if_set(agreed)
        if not (agreed.overflowed or agreed.asked):
            return result
        del result  # its graph has pages
        if undo is not None:
            undo()
        _set_random_states(self._backend.device, states)
        with torch.no_grad():
            for tensor, before in kept:
                tensor.copy_(before)
        with self.exact():
            result, agreed = self._attempt(fn, True, also, process_group)
        need = self._store.most_pages * self._store.page_bytes
        self._store.log_once(
            f"PagedStash: pages ran out, and the work was repeated; up to {need / MIB:.0f} MiB "
            "were in use at once: call prepare() again, or give a larger device_bytes"
        )
        self._raise_if_set(agreed)
        return result

    def _attempt(
        self,
        fn: Callable[..., T],
        retry: bool,
        also: Sequence[Tensor],
        process_group: dist.ProcessGroup | None,
    ) -> tuple[T, _Agreed]:
        try:
            result = fn(retry)
        except Exception as error:
            try:  # the others wait for this rank's flags
                self._agree("run()", also, process_group, failed=True)
            except Exception as other:
                error.add_note(f"and the ranks could not agree: {other!r}")
            raise
        agreed = self._agree("run()", also, process_group)
        if agreed.failed:
            raise ActivationError(
                "run()", reason="it raised on another rank", remedy="look at that rank's error"
            )
        return result, agreed

    def _agree(
        self,
        what: str,
        also: Sequence[Tensor],
        process_group: dist.ProcessGroup | None,
        failed: bool = False,
    ) -> _Agreed:
        self._store.check_usable(what)
        self._refuse_capture(what)
        device = self._backend.device
        seen = torch.zeros(4, dtype=torch.int64, device=device)
        own = torch.zeros(1, dtype=torch.int64, device=device)
        if (pool := self._store.pool) is not None:
            flags = pool.flags[: INVALID_ROWS + 1]  # overflows, invalid counts, such a count
            seen[:INVALID_ROWS] = flags[:INVALID_ROWS]
            own.copy_(flags[INVALID_ROWS:])
            flags.zero_()
        for flag in also:
            seen[2] += (flag != 0).any()
        if failed:
            seen[3] = 1
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(seen, dist.ReduceOp.MAX, group=process_group)
        overflowed, invalid, asked, error, rows = torch.cat([seen, own]).tolist()
        return _Agreed(bool(overflowed), bool(invalid), bool(asked), bool(error), rows)

    def _raise_if_set(self, agreed: _Agreed) -> None:
        if agreed.invalid:
            where = (
                f"{agreed.invalid_rows} rows" if agreed.invalid_rows else "rows, on another rank,"
            )
            raise StashOverflowError(
                f"{where} beyond the capacity of a buffer",
                reason="the dispatcher has dropped some",
                remedy="make the buffer larger, or dispatch again with its true size "
                "(run(also=...))",
            )
        if agreed.overflowed or agreed.asked:
            raise StashOverflowError(
                "pages ran out" if agreed.overflowed else "a flag of also= is set",
                reason="what was computed since the last check is undefined",
                remedy="use run(), which repeats it, or call prepare() with a larger margin",
            )

    # ------------------------------------------------------------------ the rest

    def statistics(self) -> StashStatistics:
        """See :class:`StashStatistics`. The host waits for the device."""
        store = self._store
        flags, near, far, used = [0] * 8, 0, 0, [0, 0]
        if store.pool is not None:
            flags = store.pool.flags.tolist()
            near, far = store.pool.n_near, store.pool.n_far
            used = [n - free for n, free in zip((near, far), store.pool.tops.tolist(), strict=True)]
        return StashStatistics(
            groups=store.counts["groups"],
            exact_groups=store.counts["exact_groups"],
            inactive_groups=store.counts["inactive_groups"],
            live_groups=store.n_live - len(store.dropped),
            taken=store.counts["taken"],
            ranges=store.counts["ranges"],
            kept=dict(store.kept),
            kept_bytes=dict(store.kept_bytes),
            overflows=flags[OVERFLOWS],
            page_bytes=store.page_bytes,
            device_pages=near,
            used_device_pages=used[0],
            most_device_pages=flags[MOST_NEAR],
            host_pages=far,
            used_host_pages=used[1],
            most_host_pages=flags[MOST_FAR],
            host_ms=store.host_seconds * 1e3,
        )

    def close(self) -> None:
        """Give all memory up. Idempotent. Graphs over the pool must be gone; backward raises."""
        if not self._store.is_closed:
            self._store.collect()
            self._release_pool()
            self._store.is_closed = True

    def _release_pool(self) -> None:
        pool, self._store.pool = self._store.pool, None
        if pool is not None and pool.n_far:
            self._backend.current_stream().synchronize()  # kernels may be writing to them
        self._host.close()

    def _refuse_capture(self, what: str) -> None:
        if self._backend.is_capturing():
            raise DeviceError(
                f"{what} inside a CUDA graph capture",
                reason="the host waits for the device there",
                remedy=f"call {what} outside of the capture",
            )


def _random_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


def _set_random_states(device: torch.device, states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[1], device)
