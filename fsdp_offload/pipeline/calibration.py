"""Measures this machine: how fast the link, the host lane's cores and both memories are.

[Note: what is measured, and when]
Only ``update_on="auto"`` on an accelerator measures, once per process and set of ranks, at
construction, in about a second:

* the link alone, each way and both ways, with copies of 16 MiB;
* the host lane alone: one thread per core of this rank's share, each stepping torch's fused AdamW
  on a unit of its own, while gradients and parameters of as many elements travel beside it;
* both at once, each as fast as it can, with half as many threads: what two lanes get. All of the
  cores take so much of host memory from the link that both lanes together lose by it;
* the fused AdamW kernel of the device.

Ranks start each of these together, so that those of one host share its memory as they will in a
step. Then every rank takes the slowest rank's figures: plans must not differ between ranks. All of
it travels over the groups of the parameters' own meshes, as four small all-reduces.

A rank that fails takes part to the end, and then all raise together.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..config import MIB, TransferConfig
from ..device import Gateway
from ..errors import DeviceError
from ..memory import HostArena
from ..plan import Rates
from .cores import thread_count
from .host import UNIT_NUMEL
from .worker import ThreadPool, Ticket

_log = logging.getLogger("fsdp_offload")

ADAMW_BYTES: Final = 28
"""Bytes of memory that fused fp32 AdamW moves per element: four read, three written."""
_STATE_BYTES: Final = 16  # parameter, gradient, two moments
_START_SECONDS: Final = 30.0


@dataclass(frozen=True)
class Effort:
    """How much memory and time measuring takes."""

    link_bytes: int = 256 * MIB  # page-locked, and as much on the device
    chunk_bytes: int = 16 * MIB  # of one copy: at link speed
    host_bytes: int = 512 * MIB  # pageable, far beyond the caches
    window_s: float = 0.1  # of each measurement of the link; the host lane's take three

    @classmethod
    def for_device(cls, device: torch.device) -> Effort:
        """Little where CPU tensors play the device: no lane is chosen by it."""
        if device.type == "cpu":
            return cls(8 * MIB, MIB, 8 * MIB, 0.01)
        return cls()


_known: dict[tuple[object, ...], Rates] = {}


def measure_rates(
    gateway: Gateway,
    transfer: TransferConfig,
    groups: Sequence[dist.ProcessGroup] = (),
    *,
    effort: Effort | None = None,
) -> Rates:
    """The rates of this machine, measured at the first call. Collective over ``groups``.

    Args:
        gateway: the device.
        transfer: how host memory is obtained, and the host lane's threads.
        groups: of the meshes that the parameters live on, in one order on all of their ranks.
        effort: memory and time; by default what the device asks for.

    Raises:
        DeviceError: a rank could not measure; all ranks of ``groups`` raise it.
    """
    key = (gateway.device, transfer, tuple(tuple(dist.get_process_group_ranks(g)) for g in groups))
    known = _known.get(key)
    if _least(groups, gateway.device, [float(known is not None)])[0] and known is not None:
        return known
    began = time.perf_counter()
    effort = effort or Effort.for_device(gateway.device)

    def together(phase: Callable[[], list[float]]) -> list[float]:
        _least(groups, gateway.device, [0.0])
        return phase()

    values, error = _measure(gateway, transfer, effort, together)
    least = _least(groups, gateway.device, values)
    if error is not None or not all(value > 0 for value in map(abs, least)):
        raise DeviceError(
            f"rates of {gateway.device}",
            reason=str(error) if error is not None else "another rank could not measure them",
            remedy='use update_on="device" or "host", which need none, or a saved plan',
        ) from error
    least[4] = -least[4]
    rates = Rates(*least)
    _known[key] = rates
    _log.info("measured in %.2f s: %s", time.perf_counter() - began, rates)
    return rates


def _least(
    groups: Sequence[dist.ProcessGroup], device: torch.device, values: list[float]
) -> list[float]:
    """Each value's minimum over all ranks of ``groups``; also where the ranks wait for each other.

    Over one group after the other, which spans a mesh as a whole. Ranks whose meshes overlap in
    part only (A and B on one rank, B and C on the next) may still differ.
    """
    if not groups:
        return values
    least = torch.tensor(values, dtype=torch.float64, device=device)
    for group in groups:
        dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    return least.tolist()


def _measure(
    gateway: Gateway,
    transfer: TransferConfig,
    effort: Effort,
    together: Callable[[Callable[[], list[float]]], list[float]],
) -> tuple[list[float], Exception | None]:
    """This rank's values in the order of :class:`Rates`, the latency negated: the worst is least.

    Every rank calls ``together`` three times, whatever fails. Values of 0 stand for a failure.
    """
    error: Exception | None = None
    probes: list[Any] = []

    def guarded(phase: Callable[[], list[float]], count: int) -> list[float]:
        nonlocal error
        if error is None:
            try:
                return phase()
            except Exception as caught:
                error = caught
        return [0.0] * count

    def prepare() -> list[float]:
        gateway.current_stream().synchronize()
        probes.append(LinkProbe(gateway, transfer, effort))
        probes.append(HostProbe(gateway, transfer, effort))
        probes[0].run(effort.link_bytes)  # the first copies are slow
        return []

    try:
        guarded(prepare, 0)
        alone = together(lambda: guarded(lambda: probes[0].rates(), 3))
        host = together(lambda: guarded(lambda: probes[1].rates(probes[0]), 2))
        both = together(lambda: guarded(lambda: probes[1].beside(probes[0]), 2))
        device = guarded(lambda: [_device_gbps(gateway, probes[0].device_memory)], 1)
    finally:
        for probe in reversed(probes):
            probe.close()
        _give_back(gateway)
    # Of the host lane alone: the kernel's bytes, one more write and read each for its transfers.
    both[0] = min(both[0], alone[2])  # more would be scatter
    together_gbps = both[0] + both[1] * ADAMW_BYTES / 1e9
    dram_gbps = max(together_gbps, alone[2], host[0] * (ADAMW_BYTES + 8) / 1e9)
    return [*alone, host[0], -host[1], dram_gbps, *device, *both], error


def _give_back(gateway: Gateway) -> None:
    if gateway.device.type != "cpu":
        torch.accelerator.empty_cache()


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source, non_blocking=True)


class LinkProbe:
    """Copies both ways between page-locked memory and the device."""

    def __init__(self, gateway: Gateway, transfer: TransferConfig, effort: Effort) -> None:
        self._chunk_bytes, self._window_s = effort.chunk_bytes, effort.window_s
        self._arena = HostArena(
            effort.link_bytes, device=gateway.device, can_pin=gateway.can_pin, transfer=transfer
        )
        host = self._arena.tensor(0, effort.link_bytes, torch.uint8)
        self.device_memory = gateway.allocate(effort.link_bytes)
        chunks = [c.chunk(2) for c in (host, self.device_memory)]
        self._up, self._down = (
            list(zip(h.split(effort.chunk_bytes), d.split(effort.chunk_bytes), strict=True))
            for h, d in zip(*chunks, strict=True)
        )
        self._h2d = gateway.stream("calibrate_h2d")
        self._d2h = gateway.stream("calibrate_d2h")
        self._place = 0

    def send(self, *, up: bool = True, down: bool = True) -> int:
        """Enqueue one copy each way; the bytes of both."""
        here = self._place = (self._place + 1) % len(self._up)
        if up:
            self._h2d.launch(_copy, *self._up[here])
        if down:
            host, device = self._down[here]
            self._d2h.launch(_copy, device, host)
        return (up + down) * self._chunk_bytes

    def wait(self) -> None:
        """Block until all copies have ended."""
        self._h2d.synchronize()
        self._d2h.synchronize()

    def run(self, n_bytes: int, *, up: bool = True, down: bool = True) -> float:
        """GB/s of about ``n_bytes`` in the given directions, from idle to idle."""
        began, sent = time.perf_counter(), 0
        while sent < n_bytes:
            sent += self.send(up=up, down=down)
        self.wait()
        return sent / (time.perf_counter() - began) / 1e9

    def window(self, seconds: float, **directions: bool) -> float:
        """GB/s over about ``seconds``."""
        trial_gbps = self.run(8 * self._chunk_bytes, **directions)
        return self.run(int(trial_gbps * 1e9 * seconds), **directions)

    def rates(self) -> list[float]:
        """GB/s to the device, from it, and both ways at once."""
        return [
            self.window(self._window_s, down=False),
            self.window(self._window_s, up=False),
            self.window(self._window_s),
        ]

    def close(self) -> None:
        """Give all memory back."""
        self.wait()
        self._up, self._down = [], []
        del self.device_memory
        self._arena.close()


class HostProbe:
    """The host lane's threads, each stepping fused AdamW on a unit of its own."""

    def __init__(self, gateway: Gateway, transfer: TransferConfig, effort: Effort) -> None:
        self._threads = thread_count(transfer.host_threads)
        self._threads_beside = thread_count(transfer.host_threads, beside=True)
        share = effort.host_bytes // _STATE_BYTES // self._threads // 64 * 64
        self.unit_numel = max(64, min(UNIT_NUMEL, share))
        self._window_s = 3 * effort.window_s
        kind_numel = self.unit_numel * self._threads
        self._arena = HostArena(
            _STATE_BYTES * kind_numel, device=gateway.device, can_pin=False, transfer=transfer
        )
        self._steps = [
            _adamw_step([self._arena.tensor(4 * (k * kind_numel + i * self.unit_numel),
                                            self.unit_numel, torch.float32) for k in range(4)])
            for i in range(self._threads)
        ]  # fmt: skip
        self._pool = ThreadPool(self._threads, 1)

    def rates(self, link: LinkProbe) -> list[float]:
        """Elements per second with the lane's own transfers, and a unit's ms on one core."""

        def follow(done: int, sent: int) -> bool:  # a gradient and a parameter per element
            return sent < 8 * done

        numel, _, seconds = self._run(link, follow, self._threads)
        rate = numel / seconds
        return [rate, self.unit_numel * self._threads / rate * 1e3]

    def beside(self, link: LinkProbe) -> list[float]:
        """GB/s of the link, and elements per second of as many threads as the host lane has beside
        a streamed one, while both do all they can."""

        def always(done: int, sent: int) -> bool:
            return True

        numel, sent, seconds = self._run(link, always, self._threads_beside)
        return [sent / seconds / 1e9, numel / seconds]

    def _run(
        self, link: LinkProbe, wants: Callable[[int, int], bool], threads: int
    ) -> tuple[int, int, float]:
        """Elements updated, bytes copied and seconds of a window in which ``threads`` work.

        ``wants`` says from the elements done and the bytes sent so far whether to send more.
        """
        counts, stop = [0] * threads, threading.Event()

        def loop(index: int) -> None:
            try:
                while not stop.is_set():
                    self._steps[index]()
                    counts[index] += 1
            finally:
                stop.set()  # after an error nobody waits for this thread

        tickets: list[Ticket] = [self._pool.submit(loop, i) for i in range(threads)]
        try:
            started = time.perf_counter()
            while min(counts) == 0 and not stop.is_set():  # all are warm then
                if time.perf_counter() - started > _START_SECONDS:
                    raise DeviceError("host lane threads", reason="one of them does not get a core")
                time.sleep(0.001)
            before, began, sent = sum(counts), time.perf_counter(), 0
            deadline = began + self._window_s
            latest = began + _START_SECONDS
            while (now := time.perf_counter()) < deadline or (
                sum(counts) == before and not stop.is_set() and now < latest
            ):  # at least one unit ends, however short the window is
                if wants((sum(counts) - before) * self.unit_numel, sent):
                    for _ in range(4):
                        sent += link.send()
                    link.wait()
                else:
                    time.sleep(0.0005)
            seconds, after = time.perf_counter() - began, sum(counts)
        finally:
            stop.set()
            for ticket in tickets:
                ticket.join(self._pool.alive)
        for ticket in tickets:
            ticket.wait(self._pool.alive)  # raises what a thread raised
        return (after - before) * self.unit_numel, sent, seconds

    def close(self) -> None:
        """End the threads and give all memory back."""
        self._pool.stop()
        self._steps.clear()
        self._arena.close()


def _adamw_step(memory: Sequence[Tensor]) -> Callable[[], object]:
    """A step of fused AdamW over ``memory``: parameter, gradient and two moments, flat fp32."""
    parameter = nn.Parameter(memory[0])
    parameter.grad = memory[1].fill_(1e-3)
    optimizer = torch.optim.AdamW([parameter], lr=1e-6, fused=True)
    optimizer.state[parameter] = {
        "step": torch.tensor(1.0, device=parameter.device),
        "exp_avg": memory[2].fill_(1e-3),
        "exp_avg_sq": memory[3].fill_(1e-6),
    }
    return optimizer.step


def _device_gbps(gateway: Gateway, memory: Tensor) -> float:
    """GB/s of device memory that fused AdamW reaches over ``memory`` (uint8)."""
    n_bytes = memory.numel() // _STATE_BYTES * _STATE_BYTES
    step = _adamw_step(memory[:n_bytes].view(torch.float32).chunk(4))
    rounds = 2 if gateway.device.type == "cpu" else 30
    seconds = math.inf
    for _ in range(2):  # the first one loads the kernel
        gateway.current_stream().synchronize()
        began = time.perf_counter()
        for _ in range(rounds):
            step()
        gateway.current_stream().synchronize()
        seconds = min(seconds, time.perf_counter() - began)
    return rounds * n_bytes // _STATE_BYTES * ADAMW_BYTES / seconds / 1e9
