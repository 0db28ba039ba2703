"""Device memory that is taken while there is some to spare, and given back, on a played device."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from fsdp_offload import TransferConfig
from fsdp_offload.core import config
from fsdp_offload.core.backend import AllocatorFigures, CpuBackend, use_backend
from fsdp_offload.core.config import GIB
from fsdp_offload.optimizer import device_memory
from fsdp_offload.plan import residency
from fsdp_offload.plan.residency import AWAY_STEPS, is_steady, margin_bytes
from tests.pipeline.test_overlap import Job

CPU = torch.device("cpu")
TOTAL = 64 * GIB
SMALL = TransferConfig(bucket_bytes="4KiB", host_threads=1)


class Device(CpuBackend):
    """The CPU with figures of device memory: what others take is said by the test."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.spare_bytes = 0
        self.retries = 3  # of before
        self.reserved_bytes, self.unused_bytes = GIB, 0
        self.most = 1 << 62
        """Of one allocation."""

    def allocator(self) -> AllocatorFigures:
        return AllocatorFigures(self.reserved_bytes, self.unused_bytes, self.retries)

    def free_and_total(self) -> tuple[int, int]:
        return margin_bytes(TOTAL, is_steady=False) + self.spare_bytes, TOTAL

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
    (engine,) = job.optimizer._reserved.engines
    return len(engine.staying)


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
    assert job.optimizer._overlap is None or job.optimizer._overlap.uses_link
    job.train(1, first=2)
    assert staying(job) == 5
    assert job.optimizer._overlap is None or not job.optimizer._overlap.uses_link
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


def test_a_quarter_of_the_device_is_left_alone_until_the_peak_is_steady(device: Device) -> None:
    job = auto(device)
    device.spare_bytes = -8 * GIB
    for step in range(60):
        if step in (6, 8, 40):
            device.reserved_bytes += GIB
        job.train(1, first=step)
        # Last growth after step 9, steady after 33, until the next growth in step 41.
        assert staying(job) == (5 if 33 <= step + 1 < 41 else 0), step


def test_what_the_job_takes_anew_in_place_of_what_was_taken_is_no_growth(
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """State was put into memory that torch's allocator had cached for the job."""
    monkeypatch.setattr(device_memory, "LEAST_MARGIN_BYTES", 2)
    job = auto(device)
    (engine,) = job.optimizer._reserved.engines
    device.spare_bytes, before = GIB, engine.own_bytes
    job.train(3)
    assert staying(job) == 5
    taken = engine.own_bytes - before
    for step, more in enumerate((taken, taken), start=3):
        device.reserved_bytes += more
        job.train(1, first=step)
        assert job.optimizer._memory._grown_at == (1 if step == 3 else 5)


def test_a_peak_is_steady_when_it_has_not_grown_for_most_of_the_steps() -> None:
    found = [step for step in range(1, 500) if is_steady(step, min(step, 3))]
    assert found == list(range(12, 500))
    assert not is_steady(40, 11)
    assert is_steady(40, 10)
    assert not is_steady(1099, 1000)
    assert is_steady(1100, 1000)


def test_a_number_is_never_exceeded_nor_changed(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency, "LEAST_SLOTS", 2)
    job = Job("forward", device, device_memory="13000B", transfer=SMALL)
    (engine,) = job.optimizer._reserved.engines
    device.spare_bytes = GIB
    for step in range(6):
        assert engine.own_bytes <= 13_000
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
    assert "6 streamed" in caplog.text
    device.spare_bytes = GIB
    job.train(4)
    figures = job.optimizer.statistics()
    assert (figures.staying_buckets, figures.buckets) == (5, 5)
    assert figures.memory_change == "after step 3, 1024 MiB (to spare): 5 of 5 buckets stay, 0 left"
    for shown in (str(figures), repr(job.optimizer)):
        assert "for 5 buckets that stay and 0 others" in shown
        assert figures.memory_change in shown
        assert "last step: 0.0 MiB out, 0.0 MiB in" in shown
    assert "Parameter Group 0" in repr(job.optimizer)
    job.optimizer.close()
    assert "buckets" not in repr(job.optimizer)


@pytest.mark.parametrize(("spare_bytes", "is_said"), [(GIB, False), (5000, True)])
def test_memory_that_the_allocator_does_not_use_is_said_where_buckets_travel(
    device: Device, spare_bytes: int, is_said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency, "LEAST_SLOTS", 2)
    device.unused_bytes = 2 * GIB
    job = auto(device)
    device.spare_bytes = spare_bytes
    job.train(4)
    said = job.optimizer.statistics().memory_change
    assert ("2048 MiB" in said and "expandable_segments:True" in said) == is_said, said
