"""``host_memory=`` bounds the sum of all host memory, whatever it was given to."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from fsdp_offload import (
    ActivationOffload,
    FixedAddressRegion,
    HybridDeviceOptimizer,
    PagedStash,
    PhaseOffloader,
    TransferConfig,
    checkpoint,
)
from fsdp_offload.core.errors import DeviceMemoryError, HostMemoryError
from fsdp_offload.link import held_bytes

N_BYTES = 2 << 20
"""That each holder takes."""


class Job:
    """A model of two layers of 1 MiB, of which one is trained."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(2)))

    def optimizer(self, transfer: TransferConfig | None = None) -> HybridDeviceOptimizer:
        inner = torch.optim.AdamW(self.model[0].parameters())
        return HybridDeviceOptimizer(inner, self.model, transfer=transfer)

    def phases(self, transfer: TransferConfig | None = None) -> PhaseOffloader:
        return PhaseOffloader(self.model, transfer=transfer)

    def region(self, transfer: TransferConfig | None = None) -> FixedAddressRegion:
        made = FixedAddressRegion("kv", "cpu", transfer=transfer)
        made.empty(N_BYTES, dtype=torch.uint8)
        made.reserve()
        return made

    def stash(self, transfer: TransferConfig | None = None) -> PagedStash:
        made = PagedStash("cpu", N_BYTES, host_bytes=N_BYTES, transfer=transfer)
        made.prepare()
        return made

    def activations(self, transfer: TransferConfig | None = None) -> ActivationOffload:
        return ActivationOffload(N_BYTES, 1.0, device="cpu", transfer=transfer)

    def save(self, transfer: TransferConfig | None = None) -> None:
        checkpoint.async_save(self.folder / "saved", self.model).result(60)


HOLDERS = {
    "optimizer": "HybridDeviceOptimizer: state of AdamW",
    "phases": "PhaseOffloader: params",
    "region": "FixedAddressRegion: kv",
    "stash": "PagedStash",
    "activations": "ActivationOffload",
    "save": "async_save",
}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.mark.parametrize("given", ["optimizer", "phases", "region", "stash", "activations"])
@pytest.mark.parametrize("second", HOLDERS)
def test_it_bounds_the_sum_whatever_it_was_given_to(job: Job, given: str, second: str) -> None:
    first = getattr(job, given)(TransferConfig(host_memory="3MiB"))
    with pytest.raises(HostMemoryError) as caught:
        getattr(job, second)()
    for part in (
        f"{HOLDERS[second]}: ",
        "host_memory is 3.00 MiB (3145728 bytes)",
        f"{HOLDERS[given]} = ",
    ):
        assert part in str(caught.value)
    first.close()
    getattr(job, second)()


def test_a_failed_attempt_leaves_no_bound(job: Job) -> None:
    for what in ("optimizer", "phases", "region", "stash", "activations"):
        with pytest.raises(HostMemoryError, match="host_memory is 1 bytes") as caught:
            getattr(job, what)(TransferConfig(host_memory="1B"))
        made = getattr(job, what)(TransferConfig(host_memory="1GiB"))
        made.close()
        del caught


def test_a_stash_that_gets_no_pool_holds_no_host_memory() -> None:
    stash = PagedStash("cpu", N_BYTES, host_bytes=N_BYTES)
    full = torch.OutOfMemoryError("full")
    with mock.patch.object(torch, "empty", side_effect=full), pytest.raises(DeviceMemoryError):
        stash.prepare()
    assert HOLDERS["stash"] not in held_bytes()


def test_statistics_say_who_holds_what(job: Job) -> None:
    optimizer, phases = job.optimizer(), job.phases()
    moved = job.activations()
    checkpoint.async_save(job.folder / "saved", job.model).result(60)
    found = optimizer.statistics().host_bytes_by_holder
    assert found[HOLDERS["optimizer"]] == optimizer.statistics().host_arena_bytes
    assert found[HOLDERS["phases"]] == phases.statistics().host_bytes >= N_BYTES
    assert found[HOLDERS["activations"]] == moved.statistics().host_bytes == N_BYTES
    assert found[HOLDERS["save"]] >= N_BYTES
    assert phases.statistics().host_bytes_by_holder == found
    for each in (phases, moved, optimizer):
        each.close()
    left = phases.statistics().host_bytes_by_holder
    assert not left.keys() & {HOLDERS[name] for name in ("optimizer", "phases", "activations")}
