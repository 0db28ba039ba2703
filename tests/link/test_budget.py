"""What fits, on hosts made of files: /proc and cgroup trees under a temporary folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fsdp_offload.core.config import exact
from fsdp_offload.core.errors import ConfigError, HostMemoryError
from fsdp_offload.link.budget import (
    PAGE_BYTES,
    HostMemory,
    check_host_memory,
    cores_per_rank,
    host_memory,
    local_ranks,
)

GIB = 1 << 30


class Host:
    """256 GiB, of which 200 are free."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.memory(total=256, available=200, present=260)

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def memory(self, *, total: int, available: int, present: int) -> None:
        """Page frames are spread over two zones."""
        kib = GIB // 1024
        self.write(
            "proc/meminfo",
            f"MemTotal: {total * kib:>15} kB\nMemAvailable: {available * kib} kB\nHuge: 0\n",
        )
        pages = present * GIB // PAGE_BYTES
        zone = "Node 0, zone {}\n  pages free 10\n        spanned  {}\n        present  {}\n"
        zones = zone.format("DMA", 5000, 1000) + zone.format("Normal", 2 * pages, pages - 1000)
        self.write("proc/zoneinfo", zones)

    def cgroup(self, path: str, *, used: int, cache: int = 0, **limits: int) -> None:
        folder = f"sys/fs/cgroup/{path}"
        for name in ("max", "high"):
            text = str(limits[name] * GIB) if name in limits else "max"
            self.write(f"{folder}/memory.{name}", f"{text}\n")
        self.write(f"{folder}/memory.current", f"{used * GIB}\n")
        self.write(f"{folder}/memory.stat", f"anon 1\ninactive_file {cache * GIB}\n")

    def check(self, gib: int, ranks: int = 1, bound: int | None = None, **held: int) -> None:
        check_host_memory(
            gib * GIB,
            "new",
            held={name: n_gib * GIB for name, n_gib in held.items()},
            bound_bytes=None if bound is None else bound * GIB,
            local_ranks=ranks,
            root=self.root,
        )

    def fits(self, gib: int, ranks: int = 1, bound: int | None = None, **held: int) -> bool:
        try:
            self.check(gib, ranks, bound, **held)
        except HostMemoryError:
            return False
        return True


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_what_is_available_is_the_bound(host: Host) -> None:
    assert host.fits(200)
    assert not host.fits(201)
    assert host_memory(host.root) == [HostMemory("MemAvailable", 200 * GIB, 256 * GIB)]


def test_all_local_ranks_count_against_the_whole(host: Host) -> None:
    """Earlier ranks may have taken theirs: that must not refuse the later ones."""
    assert host.fits(128, ranks=2)
    assert not host.fits(129, ranks=2)
    host.memory(total=256, available=64, present=260)  # three of four have taken 64 each
    assert host.fits(64, ranks=4)
    assert not host.fits(65, ranks=1)
    assert host.fits(32, ranks=4, mine=32)  # what this rank holds, the others hold, too
    assert not host.fits(33, ranks=4, mine=32)


def test_a_bound_replaces_everything_else(host: Host) -> None:
    assert host.fits(300, bound=300)
    assert host.fits(150, ranks=2, bound=300)
    assert not host.fits(151, ranks=2, bound=300)
    assert not host.fits(1, bound=0)
    assert host.fits(0, bound=0)


def test_memory_that_the_kernel_has_not_counted_yet(host: Host) -> None:
    host.memory(total=16, available=12, present=256)
    assert host.fits(252)
    assert not host.fits(253)
    host.memory(total=230, available=200, present=256)  # less than an eighth: the kernel's own
    assert not host.fits(201)


def test_a_kernel_that_does_not_say_what_the_machine_has_bounds_nothing(host: Host) -> None:
    (host.root / "proc/zoneinfo").unlink()
    assert host.fits(10_000)
    host.cgroup("", used=1, max=64)
    assert not host.fits(64)


@pytest.mark.parametrize("limits", [{"max": 64}, {"high": 64}, {"max": 100, "high": 64}])
def test_the_tightest_limit_of_a_cgroup_counts(host: Host, limits: dict[str, int]) -> None:
    host.write("proc/self/cgroup", "4:memory:/old\n0::/job/rank\n")
    host.cgroup("", used=0)
    host.cgroup("job", used=20, cache=4, **limits)
    host.cgroup("job/rank", used=1, max=500)
    assert host.fits(48)
    assert not host.fits(49)


@pytest.mark.parametrize("path", ["/elsewhere", "/../outside"])
def test_a_cgroup_that_is_not_mounted_means_the_mount_point(host: Host, path: str) -> None:
    host.write("proc/self/cgroup", f"0::{path}\n")
    host.cgroup("", used=0, max=10)
    assert not host.fits(11)


def test_the_message_has_all_the_numbers(host: Host) -> None:
    with pytest.raises(HostMemoryError) as caught:
        host.check(150, ranks=2, one=4, two=3)
    for part in ("new: 150.00 GiB", "300.00 GiB", "2 ranks", "200.00 GiB", "256.00 GiB",
                 "one = 4.00 GiB", "two = 3.00 GiB", "host_memory="):  # fmt: skip
        assert part in str(caught.value)


def test_this_host_has_a_bound() -> None:
    bounds = host_memory()
    assert bounds
    assert all(0 < bound.free_bytes <= bound.total_bytes for bound in bounds)


def test_local_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert local_ranks() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert local_ranks() == 8
    for wrong in ("0", "-1", "many", ""):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", wrong)
        with pytest.raises(ConfigError, match="LOCAL_WORLD_SIZE"):
            local_ranks()


@pytest.mark.parametrize(("ranks", "cores"), [(1, 16), (3, 5), (16, 1), (64, 1)])
def test_ranks_of_a_host_divide_its_cores(
    ranks: int, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert cores_per_rank() == cores


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(0, "0 bytes"), (66560, "66560 bytes"), (2**30, "1.00 GiB (1073741824 bytes)")],
)
def test_little_memory_is_not_said_in_gib(n_bytes: int, text: str) -> None:
    assert exact(n_bytes) == text
