"""Measures how fast the link and the host lane's cores are, each while the other is busy.

Only ``update_on="auto"`` on an accelerator measures, at construction, for about half a second:
copies of 16 MiB both ways, and then beside them one thread per core of half of this rank's share,
each stepping torch's fused AdamW on memory of its own. With all of the cores both lanes together
lose by what these take of host memory from the link.

Ranks start each part together, so that those of one host share its memory as they will in a step,
and then take the slowest rank's figures, because lanes must not differ between ranks. These travel
over the groups of the parameters' own meshes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..core.backend import Backend
from ..core.config import MIB, TransferConfig
from ..core.errors import DeviceError
from ..memory import HostArena
from ..plan import Rates
from .host import UNIT_NUMEL
from .worker import ThreadPool, thread_count

_log = logging.getLogger("fsdp_offload")

_KINDS: Final = 4  # parameter, gradient, two moments: fp32
_START_SECONDS: Final = 30.0


@dataclass(frozen=True)
class Effort:
    """How much memory and time measuring takes."""

    link_bytes: int = 256 * MIB  # page-locked, and as much on the device
    chunk_bytes: int = 16 * MIB  # of one copy: at link speed
    host_bytes: int = 512 * MIB  # pageable, far beyond the caches
    window_s: float = 0.1  # of the link; with the cores three times that


def measure_rates(
    backend: Backend,
    transfer: TransferConfig,
    groups: Sequence[dist.ProcessGroup] = (),
    *,
    effort: Effort | None = None,
) -> Rates:
    """The rates of this machine. Collective over ``groups``: of the meshes that the parameters live
    on, in one order on all of their ranks.

    Raises:
        DeviceError: a rank could not measure; all ranks of ``groups`` raise it.
    """
    began = time.perf_counter()
    made: list[Probe] = []
    error: Exception | None = None
    values: list[float] = []

    def prepare() -> list[float]:
        backend.current_stream().synchronize()
        made.append(Probe(backend, transfer, effort or Effort()))
        return []

    for part in (prepare, lambda: [made[0].link_gbps()], lambda: made[0].beside()):
        _least(groups, backend.device, [0.0])  # ranks begin each part together
        try:
            values += part() if error is None else ()
        except Exception as caught:  # this rank takes part to the end: others wait for it
            error = caught
    for probe in made:
        probe.close()
    rates = Rates(*_least(groups, backend.device, [0.0] * 3 if error else values))
    if backend.device.type != "cpu":
        torch.accelerator.empty_cache()
    if not all(rates):
        raise DeviceError(
            f"rates of {backend.device}",
            reason=str(error) if error is not None else "another rank could not measure them",
            remedy='use update_on="device" or "host", or a list of lanes, which need none',
        ) from error
    _log.info("measured in %.2f s: %s", time.perf_counter() - began, rates)
    # A link that is faster beside busy cores than alone is scatter.
    return rates._replace(beside_gbps=min(rates.beside_gbps, rates.link_gbps))


def _least(
    groups: Sequence[dist.ProcessGroup], device: torch.device, values: list[float]
) -> list[float]:
    """Each value's minimum over all ranks of ``groups``; also where the ranks wait for each other.

    Over one group after the other, which spans a mesh as a whole. Ranks whose meshes overlap in
    part only (A and B on one rank, B and C on the next) may still differ.
    """
    least = torch.tensor(values, dtype=torch.float64, device=device)
    for group in groups:
        dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    return least.tolist()


class Probe:
    """Copies both ways between page-locked memory and the device, and threads of the host lane."""

    def __init__(self, backend: Backend, transfer: TransferConfig, effort: Effort) -> None:
        self._effort = effort
        threads = thread_count(transfer.host_threads, beside=True)
        share = effort.host_bytes // 4 // _KINDS // threads // 64 * 64
        self._unit_numel = unit = max(64, min(UNIT_NUMEL, share))
        self._arenas: list[HostArena] = []
        self._pool: ThreadPool | None = None
        try:
            host = self._arena(backend, effort.link_bytes, transfer, pin=backend.can_pin)
            units = self._arena(backend, 4 * _KINDS * unit * threads, transfer, pin=False)
            memories = units.view(torch.float32).view(threads, _KINDS, unit)
            self._steps = [_adamw_step(memory) for memory in memories]
            self._pool = ThreadPool(threads, 1)
            device = backend.allocate(effort.link_bytes)
        except BaseException:
            self.close()
            raise
        pairs = zip(host.split(effort.chunk_bytes), device.split(effort.chunk_bytes), strict=True)
        self._chunks = list(pairs)  # one way those of even numbers, the other the odd ones
        self._h2d = backend.stream("calibrate_h2d")
        self._d2h = backend.stream("calibrate_d2h")
        self._sent = 0
        self._copy(8)  # the first copies are slow

    def _arena(
        self, backend: Backend, n_bytes: int, transfer: TransferConfig, *, pin: bool
    ) -> Tensor:
        arena = HostArena(n_bytes, device=backend.device, can_pin=pin, transfer=transfer)
        self._arenas.append(arena)
        return arena.tensor(0, n_bytes, torch.uint8)

    def _copy(self, count: int) -> None:
        """That many chunks each way, and wait for them."""
        for _ in range(count):
            index = 2 * self._sent % len(self._chunks)
            (host_in, device_in), (host_out, device_out) = self._chunks[index : index + 2]
            self._h2d.copy([device_in], [host_in])
            self._d2h.copy([host_out], [device_out])
            self._sent += 1
        self._h2d.synchronize()
        self._d2h.synchronize()

    def _gbps_since(self, sent: int, began: float) -> float:
        n_bytes = 2 * (self._sent - sent) * self._effort.chunk_bytes
        return n_bytes / (time.perf_counter() - began) / 1e9

    def link_gbps(self) -> float:
        """Of both ways at once, the sum."""
        sent, began = self._sent, time.perf_counter()
        while time.perf_counter() - began < self._effort.window_s:
            self._copy(8)
        return self._gbps_since(sent, began)

    def beside(self) -> tuple[float, float]:
        """GB/s of the link, and elements per second of the threads, while both do all they can."""
        assert self._pool is not None
        counts, stop = [0] * len(self._steps), threading.Event()

        def work(index: int) -> None:
            try:
                while not stop.is_set():
                    self._steps[index]()
                    counts[index] += 1
            finally:
                stop.set()  # after an error the others need not go on

        outcomes = [self._pool.submit(work, index) for index in range(len(self._steps))]
        try:
            self._wait(lambda: min(counts) > 0 or stop.is_set())  # all are warm then
            before, sent, began = sum(counts), self._sent, time.perf_counter()
            while time.perf_counter() - began < 3 * self._effort.window_s:
                self._copy(4)
            # At least one unit ends, however short the window is.
            self._wait(lambda: sum(counts) > before or stop.is_set())
            gbps, seconds = self._gbps_since(sent, began), time.perf_counter() - began
            numel = (sum(counts) - before) * self._unit_numel
        finally:
            stop.set()
            for outcome in outcomes:
                outcome.join(self._pool.alive)
        for outcome in outcomes:
            outcome.wait(self._pool.alive)  # raises what a thread raised
        return gbps, numel / seconds

    def _wait(self, is_done: Callable[[], bool]) -> None:
        latest = time.perf_counter() + _START_SECONDS
        while not is_done():
            if time.perf_counter() > latest:
                raise DeviceError("host lane threads", reason="one of them does not get a core")
            time.sleep(0.001)

    def close(self) -> None:
        """End the threads and give all memory back."""
        if self._pool is not None:
            self._pool.stop()
        self._steps, self._chunks = [], []
        for arena in self._arenas:
            arena.close()


def _adamw_step(memory: Tensor) -> Callable[[], object]:
    """A step of fused AdamW; rows of ``memory`` are parameter, gradient and two moments, fp32."""
    parameter = nn.Parameter(memory[0])
    parameter.grad = memory[1].fill_(1e-3)
    optimizer = torch.optim.AdamW([parameter], lr=1e-6, fused=True)
    optimizer.state[parameter] = {
        "step": torch.tensor(1.0),
        "exp_avg": memory[2].fill_(1e-3),
        "exp_avg_sq": memory[3].fill_(1e-6),
    }
    return optimizer.step
