"""``PagedStash``: keep what autograd saves of partly filled buffers in pages of used rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..core.backend import refuse_capture
from ..core.config import SMALL_BYTES, TransferConfig, brief, parse_bytes, sized
from ..core.devices import backend_for
from ..core.errors import (
    ActivationError,
    ConfigError,
    DeviceMemoryError,
    StashOverflowError,
    copy_error,
)
from ..link import HostPool
from ..plan.activations import StashPlan, make_plan
from ..update.kernels import triton_kernels
from . import pages
from .group import Attachment, StashGroup
from .pages import INVALID_ROWS, MOST_FAR, MOST_NEAR, MOST_RANGES, OVERFLOWS, PagePool
from .store import TAILS, RowStore

if TYPE_CHECKING:
    from ..phases import FixedAddressRegion

_log = logging.getLogger("fsdp_offload")
T = TypeVar("T")

LEAST_PAGE_BYTES: Final = 128
UNRECORDED_GROUPS: Final = 64
"""Groups that get page tables for captures if nothing was recorded."""


@dataclass(frozen=True)
class StashStatistics:
    """Counters and memory of a stash. Graph replays only count pages and overflows."""

    groups: int  # closed groups, including captured ones
    exact_groups: int  # of these, with rows outside the pool
    inactive_groups: int  # inside activation checkpointing or other hooks: no effect
    repeats: int  # calls of run() that repeated
    overflows: int  # groups without enough pages since the last check() or run()
    kept_bytes: dict[str, int]  # of saved tensors that were kept whole, by reason
    device_pages: int  # of the pool
    used_device_pages: int  # now
    most_device_pages: int
    used_host_pages: int
    most_host_pages: int


class PagedStash:
    """Keeps only the used rows of what autograd saves, for buffers of worst-case size.

    Args:
        device: the groups' device.
        device_bytes: size of the pool on the device, such as ``"24GiB"``; ``None``: the need of an
            iteration, with ``prepare``'s margin.
        host_bytes: page-locked host memory for pages that do not fit on the device.
        page_bytes: size of a page, a power of two.
        region: a ``FixedAddressRegion`` of the same device, to hold the pool: between phases, while
            no group is live, ``region.pause(save=False)`` frees the memory. It grows with each
            :meth:`prepare`.
        tail: content of restored rows beyond the count: ``"undefined"``, or ``"nan"`` or ``"zero"``
            to find code that reads them.
        transfer: how to allocate host memory.

    Raises:
        ConfigError: an argument is wrong.
        DeviceError: torch cannot use the device here.
    """

    def __init__(
        self,
        device: torch.device | str,
        device_bytes: int | str | None = None,
        host_bytes: int | str = 0,
        page_bytes: int | str = "256KiB",
        region: FixedAddressRegion | None = None,
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
        if region is not None and region.device != self._backend.device:
            raise ConfigError(
                f"a region on {region.device} for a PagedStash on {self._backend.device}",
                reason="kernels read its pages",
                remedy="make the region on the same device",
            )
        self._store = RowStore(self._backend, size, tail, region)
        self._host = HostPool("PagedStash", self._backend, transfer)

    def __reduce__(self) -> NoReturn:
        raise copy_error(self, "make another one, and keep it outside of modules that are copied")

    def __repr__(self) -> str:
        store, pool = self._store, self._store.pool
        state = "closed" if store.is_closed else "exact" if store.is_exact else "paged"
        if pool is not None:
            state += f", pool of {brief(pool.near.nbytes)} on the device"
            state += f" and {brief(pool.far.nbytes)} in host memory" if pool.n_far else ""
        return f"PagedStash({self._backend.device}, {state}, {store.n_live} live groups)"

    # ------------------------------------------------------------------ groups

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def group(self, x: Tensor | None = None, rows: Tensor | None = None) -> StashGroup:
        """Make a context that keeps tensors saved inside in pages, if they have as many rows as
        ``x``.

        Example::

            with stash.group() as group:
                routed, counts = dispatch(x)
                group.rows(routed, counts.sum())
                y = combine(experts(routed, counts))

        Args:
            x: see :meth:`.StashGroup.rows`. Pass it if the buffer already exists.
            rows: number of its rows in use.

        Raises:
            ConfigError: only one of them is passed, or :meth:`.StashGroup.rows` refuses them.
            ClosedError: the stash is closed, or belongs to another process.
        """
        self._store.check_usable("group()")
        made = StashGroup(self._store)
        if (x is None) != (rows is None):
            raise ConfigError(
                "group() with only one of x and rows", reason="it needs both", remedy="pass both"
            )
        if x is not None and rows is not None:
            made.rows(x, rows)
        return made

    def attach(
        self, scope: nn.Module, rows: Callable[..., Tensor], at: nn.Module | None = None
    ) -> Attachment:
        """Make each forward of ``scope`` a group, by hooks.

        Args:
            scope: module whose saved tensors form the group, best with dispatch, experts and
                combine.
            rows: gets the positional inputs of ``at``, and returns the number of rows.
            at: a module inside, whose first input is the buffer; ``None``: ``scope``.

        Returns:
            A handle whose ``remove()`` removes the hooks.
        """
        return Attachment(self.group, scope, rows, scope if at is None else at)

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Make the host wait for each count inside: rows that do not fit into pages are kept
        outside, so nothing overflows. This is the mode before :meth:`prepare`.

        Raises:
            DeviceError: inside a CUDA graph capture.
        """
        refuse_capture(self._backend, "exact()")
        before, self._store.asked_exact = self._store.asked_exact, True
        try:
            yield
        finally:
            self._store.asked_exact = before

    # ------------------------------------------------------------------ sizes

    def prepare(self, margin: float = 1.25, captured_groups: int | None = None) -> StashPlan:
        """Allocate the pool. Afterwards groups allocate no lasting memory, and may be captured.

        Call it after an iteration, or at once if ``device_bytes`` was passed. Another call replaces
        the pool; graphs over the first one must be gone.

        Args:
            margin: factor to the most pages in use at once.
            captured_groups: number of groups of all captures; ``None``: twice the recorded number.

        Raises:
            ActivationError: the size is unknown, or a group is live. DeviceMemoryError,
                HostMemoryError, PinningError: not enough memory; the stash has no pool, as before
                the first call.
            DeviceError: inside a CUDA graph capture.
        """
        store = self._store
        store.check_usable("prepare()")
        refuse_capture(self._backend, "prepare()")
        store.collect()
        if store.n_live:
            raise ActivationError(
                f"prepare() with {store.n_live} live groups",
                reason="their backward still reads the current pool",
                remedy="call it between iterations",
            )
        if not margin >= 1:  # NaN, too
            raise ConfigError(f"margin={margin}", reason="it must be at least 1", remedy="use 1.25")
        if self._device_bytes is None and not store.most_pages:
            raise ActivationError(
                "prepare() before any group was recorded",
                reason="the size of the pool is unknown",
                remedy="run one iteration first, or pass device_bytes",
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
                f"a pool of {brief(plan.device_bytes)}",
                reason=f"{error}; the stash goes on without a pool, and groups wait for "
                "exact counts",
                remedy="pass a smaller device_bytes, and host_bytes for the rest",
            ) from error
        store.pool = pool
        _log.info("PagedStash: %s", plan.explain())
        return plan

    def _take_pool(self, plan: StashPlan) -> PagePool:
        far = self._host.take(plan.host_bytes) if plan.host_pages else None
        numel = plan.device_bytes // 8
        if (region := self._store.region) is None:
            near = torch.empty(numel, dtype=torch.int64, device=self._backend.device)
        else:
            near = region.empty(numel, dtype=torch.int64)
        return PagePool(
            self._backend, plan.page_bytes, near, page_kernels(self._backend.device), far
        )

    def _add_tables(self, pool: PagePool, plan: StashPlan, captured_groups: int | None) -> None:
        """Make tables and compile kernels before captures, which cannot."""
        if not pool.can_capture:
            return
        tables = max((-(-len(each.row_bytes) // MOST_RANGES) for each in plan.groups), default=1)
        worst = [each.pages(plan.page_bytes, each.capacity) for each in plan.groups]
        n_pages = max(worst, default=pool.n_near + pool.n_far)
        if captured_groups is None:
            captured_groups = 2 * (self._store.recorded_groups or UNRECORDED_GROUPS)
        pool.add_tables(tables * captured_groups, n_pages)
        for group in set(plan.groups):
            pool.try_out(group.capacity, group.row_bytes[:MOST_RANGES])

    # ------------------------------------------------------------------ overflow

    def check(self, *, process_group: dist.ProcessGroup | None = None) -> None:
        """Raise on all ranks if pages ran out on one. The host waits for the device once.

        Then the results since the last call are invalid.

        Args:
            process_group: ranks to agree with; ``None``: all ranks, if there is a process group.

        Raises:
            StashOverflowError: pages ran out, or more rows came than a buffer holds.
            DeviceError: inside a CUDA graph capture.
        """
        _raise_if_set(self._agree("check()", process_group))

    def run(self, fn: Callable[[bool], T], *, process_group: dist.ProcessGroup | None = None) -> T:
        """Return ``fn(False)``; if it overflows on one rank, all ranks call ``fn(True)`` in
        :meth:`exact`.

        Before that, it restores torch's random state on the CPU and the device. ``fn(True)`` has to
        reset everything else that ``fn(False)`` wrote, such as gradients and counters.

        Args:
            fn: a forward, or a forward and backward. Its argument says whether it is repeated; then
                a dispatcher enlarges a buffer that was too small.
            process_group: see :meth:`check`.

        Returns:
            The result of ``fn``.

        Raises:
            StashOverflowError: the repetition has too small buffers as well.
            ActivationError: ``fn`` raised on another rank.
            DeviceError: inside a CUDA graph capture.
        """
        refuse_capture(self._backend, "run()")
        device = self._backend.device
        on_device = None if device.type == "cpu" else torch.get_device_module(device)
        state, device_state = torch.get_rng_state(), None
        if on_device is not None:
            device_state = on_device.get_rng_state(device)
        result, flags = self._attempt(fn, False, process_group)
        if not any(flags):
            return result
        del result  # its graph holds pages
        torch.set_rng_state(state)
        if on_device is not None:
            on_device.set_rng_state(device_state, device)
        self._store.counts["repeats"] += 1
        with self.exact():
            result, flags = self._attempt(fn, True, process_group)
        if self._store.counts["repeats"] == 1:
            need = self._store.most_pages * self._store.page_bytes
            _log.info(
                "PagedStash: pages ran out, so run() repeated the work. It needs %s: call "
                "prepare() again, or pass a larger device_bytes",
                brief(need),
            )
        _raise_if_set(flags)
        return result

    def _attempt(
        self, fn: Callable[[bool], T], retry: bool, process_group: dist.ProcessGroup | None
    ) -> tuple[T, list[int]]:
        try:
            result = fn(retry)
        except Exception as error:
            try:  # the other ranks wait for this rank's flags
                self._agree("run()", process_group, failed=True)
            except Exception as other:
                error.add_note(f"and the ranks could not agree: {other!r}")
            raise
        *flags, failed = self._agree("run()", process_group)
        if failed:
            raise ActivationError(
                "run()",
                reason="it raised an error on another rank",
                remedy="look at that rank's error",
            )
        return result, flags

    def _agree(
        self, what: str, process_group: dist.ProcessGroup | None, failed: bool = False
    ) -> list[int]:
        """Return the maxima over ranks: overflows, invalid counts, rows of one, failures."""
        self._store.check_usable(what)
        refuse_capture(self._backend, what)
        seen = torch.zeros(INVALID_ROWS + 2, dtype=torch.int64, device=self._backend.device)
        if (pool := self._store.pool) is not None:
            flags = pool.flags[: INVALID_ROWS + 1]
            seen[:-1] = flags
            flags.zero_()
        seen[-1] = failed
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(seen, dist.ReduceOp.MAX, group=process_group)
        return seen.tolist()

    # ------------------------------------------------------------------ the rest

    def statistics(self) -> StashStatistics:
        """Return counters and memory. The host waits for the device."""
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
            repeats=store.counts["repeats"],
            overflows=flags[OVERFLOWS],
            kept_bytes=dict(store.kept_bytes),
            device_pages=near,
            used_device_pages=used[0],
            most_device_pages=flags[MOST_NEAR],
            used_host_pages=used[1],
            most_host_pages=flags[MOST_FAR],
        )

    def close(self) -> None:
        """Free all memory. Idempotent. Graphs over the pool must be gone; a later backward
        raises."""
        if not self._store.is_closed:
            self._store.collect()
            self._release_pool()
            self._store.is_closed = True

    def _release_pool(self) -> None:
        pool, self._store.pool = self._store.pool, None
        if pool is not None and pool.n_far:
            self._backend.current_stream().synchronize()  # kernels may be writing to them
        self._host.close()


def page_kernels(device: torch.device) -> ModuleType:
    """Return the module with ``claim``, ``move`` and ``release``: Triton's on CUDA, else torch's
    operations."""
    if device.type != "cuda" or triton_kernels() is None:
        return pages
    from . import kernels_pages

    return kernels_pages


def _raise_if_set(flags: Sequence[int]) -> None:
    overflows, invalid, rows = flags[: INVALID_ROWS + 1]
    if invalid:
        raise StashOverflowError(
            f"{rows} rows beyond the capacity of a buffer" if rows > 0 else "a count below 0",
            reason="the dispatcher dropped rows, or counted them wrongly",
            remedy="enlarge the buffer, or use run(fn) and dispatch at the true size in fn(True)",
        )
    if overflows:
        raise StashOverflowError(
            "pages ran out",
            reason="results since the last check are undefined",
            remedy="use run(), which repeats the iteration, or call prepare() with a larger margin",
        )
