"""Device memory that is taken while some is spare, and given back, on a played device."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from fsdp_offload import TransferConfig
from fsdp_offload.core import config
from fsdp_offload.core.backend import AllocatorFigures
from fsdp_offload.core.config import GIB
from fsdp_offload.core.devices import AcceleratorBackend, CpuBackend
from fsdp_offload.plan import residency
from fsdp_offload.plan.residency import AWAY_STEPS, margin_bytes
from tests.helpers.simulator import use_backend
from tests.optimizer.test_overlap import Job

CPU = torch.device("cpu")
TOTAL = 64 * GIB
SMALL = TransferConfig(bucket_bytes="4KiB", host_threads=1)


class Device(CpuBackend):
    """The CPU with figures of device memory: what others take is said by the test."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.spare_bytes = 0
        self.retries = 3  # of before
        self.reserved_bytes, self.allocated_bytes, self.unused_bytes = GIB, GIB, 0
        self.most = 1 << 62
        """Of one allocation."""

    def allocator(self) -> AllocatorFigures:
        peak = self.allocated_bytes
        return AllocatorFigures(self.reserved_bytes, peak, self.unused_bytes, self.retries)

    def free_and_total(self) -> tuple[int, int]:
        return margin_bytes(TOTAL, 1) + self.spare_bytes, TOTAL

    def allocate(self, n_bytes: int) -> torch.Tensor:
        if n_bytes > self.most:
            raise torch.OutOfMemoryError(f"{n_bytes} bytes")
        return super().allocate(n_bytes)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """In use; optimizers begin with none of its memory."""
    monkeypatch.setattr(config, "FIRST_DEVICE_BYTES", 0)
    made = Device()
    with use_backend(made):
        yield made


def auto(device: Device, overlap: str = "forward") -> Job:
    return Job(overlap, device, device_memory="auto", transfer=SMALL)


def staying(job: Job) -> int:
    engine = job.optimizer._updates.reserved.engine
    return len(engine.ring.staying)


@pytest.mark.parametrize("overlap", ["step", "forward", "backward"])
def test_what_is_to_spare_is_taken_after_some_steps_and_given_back_when_it_is_short(
    device: Device, overlap: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = Job(None)
    plain.train(64)
    caplog.set_level(logging.INFO, "fsdp_offload")
    job = auto(device, overlap)
    device.spare_bytes = GIB
    job.train(2)
    assert staying(job) == 0
    assert job.optimizer._updates.overlap is None or job.optimizer._updates.overlap.uses_link
    job.train(1, first=2)
    assert staying(job) == 5
    assert job.optimizer._updates.overlap is None or not job.optimizer._updates.overlap.uses_link
    assert "5 of 5 buckets stay" in caplog.text
    job.train(2, first=3)
    assert job.optimizer.statistics().moved_bytes == 0

    device.retries, device.spare_bytes = 4, -(1 << 40)
    job.train(1, first=5)
    assert staying(job) == 0
    device.spare_bytes = GIB
    job.train(AWAY_STEPS - 1, first=6)
    assert staying(job) == 0, "what had to leave came back at once"
    device.reserved_bytes += 1  # a new peak: it is looked at again
    job.train(64 - 6 - AWAY_STEPS + 1, first=6 + AWAY_STEPS - 1)
    assert staying(job) == 5
    job.assert_like(plain)


def test_a_quarter_of_the_device_is_left_alone_until_demand_stays(device: Device) -> None:
    """When and how much is decided is shown in tests/plan/test_memory_watch.py."""
    job = auto(device)
    device.spare_bytes = -8 * GIB
    for step in range(60):
        if step in (5, 40):
            device.reserved_bytes += GIB
            device.allocated_bytes += 2 * GIB
        job.train(1, first=step)
        # Demand grew last in step 6, and three quarters of the steps had passed after step 21.
        assert staying(job) == (5 if 21 <= step + 1 < 41 else 0), step


def test_a_number_is_never_exceeded_nor_changed(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency, "LEAST_SLOTS", 2)
    job = Job("forward", device, device_memory="13000B", transfer=SMALL)
    engine = job.optimizer._updates.reserved.engine
    device.spare_bytes = GIB
    for step in range(6):
        assert engine.ring.own_bytes <= 13_000
        assert 0 < staying(job) < 5
        device.retries += step > 3
        job.train(1, first=step)


def test_where_an_allocation_fails_training_goes_on(device: Device) -> None:
    plain = Job(None)
    plain.train(6)
    job = auto(device)
    device.spare_bytes, device.most = GIB, 0
    job.train(6)
    assert staying(job) == 0
    job.assert_like(plain)


def test_without_figures_nothing_is_taken() -> None:
    with use_backend(CpuBackend(CPU)):
        job = Job("forward", device_memory="auto", transfer=SMALL)
        job.train(4)
    assert staying(job) == 0


def test_what_was_done_is_said(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fsdp_offload")
    job = auto(device)
    assert 'AdamW, overlap="forward", after 0 steps' in caplog.text
    assert "6 with state in host memory" in caplog.text
    device.spare_bytes = GIB
    job.train(4)
    figures = job.optimizer.statistics()
    assert (figures.staying_buckets, figures.buckets) == (5, 5)
    assert figures.memory_change == (
        "after step 3 to 1024 MiB (spare memory): 5 of 5 buckets stay, 0 evicted"
    )
    for shown in (str(figures), repr(job.optimizer)):
        assert "5 of 5 buckets stay there between steps" in shown
        assert figures.memory_change in shown
        assert "last step: 0 bytes to the host, " in shown
    assert "Parameter Group 0" in repr(job.optimizer)
    job.optimizer.close()
    assert "buckets" not in repr(job.optimizer)


@pytest.mark.parametrize(
    ("spare_bytes", "setting", "is_said"),
    [(GIB, "", False), (5000, "", True), (5000, "expandable_segments:True", False)],
)
def test_memory_that_the_allocator_does_not_use_is_said_where_buckets_travel(
    device: Device, spare_bytes: int, setting: str, is_said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", setting)
    monkeypatch.setattr(residency, "LEAST_SLOTS", 2)
    device.unused_bytes = 2 * GIB
    job = auto(device)
    device.spare_bytes = spare_bytes
    job.train(4)
    said = job.optimizer.statistics().memory_change
    assert ("2048 MiB" in said and "expandable_segments:True" in said) == is_said, said


@pytest.mark.parametrize(
    ("fraction", "reserved", "free", "total"),
    [(1.0, 30, 40, 80), (0.5, 30, 10, 40), (0.5, 41, 0, 40), (0.9, 20, 40, 72)],
)
def test_a_fraction_of_the_process_bounds_what_is_free(
    monkeypatch: pytest.MonkeyPatch, fraction: float, reserved: int, free: int, total: int
) -> None:
    for name, value in (
        ("mem_get_info", (40 * GIB, 80 * GIB)),
        ("get_per_process_memory_fraction", fraction),
        ("memory_reserved", reserved * GIB),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    backend = AcceleratorBackend.__new__(AcceleratorBackend)  # there is no CUDA here
    backend.device = torch.device("cuda", 0)
    assert backend.free_and_total() == (free * GIB, total * GIB)
