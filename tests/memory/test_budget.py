from __future__ import annotations

import os
from pathlib import Path

import pytest

from fsdp_offload.errors import ConfigError, HostMemoryError
from fsdp_offload.memory import available_host_bytes, check_host_budget, local_ranks
from fsdp_offload.memory.budget import (
    PAGE_BYTES,
    parse_balloon_pages,
    parse_cgroup_mounts,
    parse_cgroup_paths,
    parse_limit,
    parse_meminfo,
    parse_present_pages,
)

GIB = 1 << 30
V1_NONE = "9223372036854771712"


class Host:
    """A procfs and cgroup trees of our own under a temporary folder."""

    def __init__(self, root: Path) -> None:
        self.proc = root / "proc"
        self.cgroup2, self.cgroup1 = root / "cgroup 2", root / "memory"
        self.memory(total=256, available=200)
        self.zones(present=256)
        self.write("proc/self/status", "Name:\trank\nPid:\t100\nPPid:\t1\nRssAnon:\t1024 kB\n")

    def write(self, name: str, text: str) -> None:
        path = self.proc.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def memory(self, *, total: float, available: float) -> None:
        self.write(
            "proc/meminfo",
            f"MemTotal: {int(total * GIB) // 1024:>15} kB\nMemFree: 1024 kB\n"
            f"MemAvailable: {int(available * GIB) // 1024} kB\nHugePages_Total: 0\n",
        )

    def zones(self, *, present: float) -> None:
        """Spread over two zones."""
        pages = int(present * GIB) // PAGE_BYTES
        zone = "Node 0, zone {}\n  pages free 10\n        spanned  {}\n        present  {}\n"
        self.write(
            "proc/zoneinfo",
            zone.format("DMA", 5000, 1000) + zone.format("Normal", 2 * pages, pages - 1000),
        )

    def balloon(self, held: float) -> None:
        pages = int(held * GIB) // PAGE_BYTES
        self.write("proc/vmstat", f"balloon_inflate {pages + 7}\nballoon_deflate 7\npgfault 1\n")

    def in_cgroups(self, *, v2: str | None = None, v1: str | None = None, root: str = "/") -> None:
        """The process's own cgroups; ``root`` is what the mount points show."""
        mounts, paths = "22 27 0:21 / /proc rw,relatime - proc proc rw\n", "8:pids:/elsewhere\n"
        if v1 is not None:
            paths += f"4:cpu,memory:{v1}\n"
            mounts += f"35 31 0:32 {root} {self.cgroup1} rw shared:9 - cgroup cgroup rw,memory\n"
        if v2 is not None:
            paths += f"0::{v2}\n"
            point = str(self.cgroup2).replace(" ", "\\040")
            mounts += f"41 31 0:38 {root} {point} rw - cgroup2 cgroup2 rw\n"
        self.write("proc/self/mountinfo", mounts)
        self.write("proc/self/cgroup", paths)

    def v2(self, path: str, limit: float | None, used: float, inactive: float = 0.0) -> None:
        files = {
            "memory.max": "max\n" if limit is None else f"{int(limit * GIB)}\n",
            "memory.current": f"{int(used * GIB)}\n",
            "memory.stat": f"anon 5\nfile 6\ninactive_file {int(inactive * GIB)}\n",
        }
        for name, text in files.items():
            self.write(f"cgroup 2/{path}/{name}", text)

    def v1(self, path: str, limit: float | None, used: float, stat: str = "") -> None:
        files = {
            "memory.limit_in_bytes": V1_NONE if limit is None else str(int(limit * GIB)),
            "memory.usage_in_bytes": str(int(used * GIB)),
            "memory.stat": stat,
        }
        for name, text in files.items():
            self.write(f"memory/{path}/{name}", text)

    def rank(self, pid: int, anon: float) -> None:
        """A process with the same parent as this one, and ``anon`` GiB of its own."""
        task = self.proc / "1" / "task" / "1"
        task.mkdir(parents=True, exist_ok=True)
        with (task / "children").open("a") as children:
            children.write(f"{pid} ")
        self.write(
            f"proc/{pid}/status", f"Pid:\t{pid}\nPPid:\t1\nRssAnon:\t{int(anon * GIB) // 1024} kB\n"
        )

    def usable(self) -> float | None:
        n_bytes = available_host_bytes(self.proc).usable_bytes
        return None if n_bytes is None else n_bytes / GIB

    def check(self, gib: float, ranks: int = 1, budget: float | None = None) -> None:
        check_host_budget(
            int(gib * GIB),
            local_ranks=ranks,
            budget_bytes=None if budget is None else int(budget * GIB),
            proc=self.proc,
        )


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


# --------------------------------------------------------------------------- parsing


@pytest.mark.parametrize(
    ("text", "limit"),
    [("max\n", None), (V1_NONE, None), ("4096\n", 4096), ("0", 0), ("", None), ("-1", None)],
)
def test_limits(text: str, limit: int | None) -> None:
    assert parse_limit(text) == limit


def test_kernel_texts() -> None:
    assert parse_meminfo("A:  3 kB\nHugePages_Total:  7\nB: 1 kB\n") == {"A": 3072, "B": 1024}
    zones = "Node 0\n  present 3\n  managed 2\n  pagesets\n cpu: 0\n  present  4\nNode 1, zone\n"
    assert parse_present_pages(zones) == 7
    assert parse_balloon_pages("pgfault 1\nballoon_inflate 9\nballoon_deflate 4\n") == 5
    assert parse_balloon_pages("pgfault 1\n") == 0
    paths = "9:name=systemd:/s\n4:cpu,memory:/a:b\n3:memory_x:/no\n0::/u\n"
    assert parse_cgroup_paths(paths) == {1: "/a:b", 2: "/u"}
    mounts = (
        "1 2 0:1 / /sys rw - sysfs sysfs rw\n"
        "3 2 0:2 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        "4 2 0:3 /box /sys/fs/cgroup/mem\\040ory rw opt:1 - cgroup cgroup rw,memory\n"
        "5 2 0:4 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
        "6 2 0:4 / /second rw - cgroup2 cgroup2 rw\n"
    )
    assert parse_cgroup_mounts(mounts) == {
        1: ("/box", Path("/sys/fs/cgroup/mem ory")),
        2: ("/", Path("/sys/fs/cgroup/unified")),
    }


# --------------------------------------------------------------------------- what is usable


def test_without_cgroups_free_memory_is_the_bound(host: Host) -> None:
    memory = available_host_bytes(host.proc)
    assert memory.free_bytes == memory.usable_bytes == 200 * GIB
    assert memory.growth_bytes == 0
    assert memory.cgroup_limit_bytes is None
    assert memory.cgroup_used_bytes is None


@pytest.mark.parametrize(("total", "counted"), [(31, 225 - 4), (223, 33 - 4), (225, 0), (252, 0)])
def test_memory_that_the_kernel_has_not_counted_yet(
    host: Host, total: float, counted: float
) -> None:
    """Only a difference of more than an eighth (32 of 256) is memory that will appear."""
    host.memory(total=total, available=30)
    assert available_host_bytes(host.proc).growth_bytes == counted * GIB
    assert host.usable() == 30 + counted


def test_a_balloon_is_not_memory_that_will_appear(host: Host) -> None:
    host.memory(total=31, available=30)
    host.balloon(held=225)
    assert host.usable() == 30


def test_a_kernel_that_hides_the_machine_is_bounded_by_cgroups_alone(host: Host) -> None:
    (host.proc / "zoneinfo").unlink()
    assert host.usable() is None
    host.check(10_000)
    host.in_cgroups(v2="/job")
    host.v2("job", limit=100, used=10)
    assert host.usable() == 90
    with pytest.raises(HostMemoryError, match="does not say what the machine has"):
        host.check(91)


def test_v2_page_cache_that_nobody_reads_is_not_used(host: Host) -> None:
    host.in_cgroups(v2="/job")
    host.v2("job", limit=64, used=40, inactive=30)
    memory = available_host_bytes(host.proc)
    assert memory.cgroup_limit_bytes == 64 * GIB
    assert memory.cgroup_used_bytes == 10 * GIB
    assert host.usable() == 54


def test_v2_the_level_that_leaves_least_wins(host: Host) -> None:
    host.in_cgroups(v2="/pod/box")
    host.v2("pod/box", limit=None, used=10)
    host.v2("pod", limit=64, used=60)
    assert host.usable() == 4
    host.v2("pod/box", limit=40, used=10)
    assert host.usable() == 4
    host.v2("pod/box", limit=12, used=10)
    assert host.usable() == 2
    host.v2("", limit=11, used=10)
    assert host.usable() == 1


def test_v2_high_slows_down_for_ever_so_it_is_a_limit(host: Host) -> None:
    host.in_cgroups(v2="/job")
    host.v2("job", limit=64, used=0)
    host.write("cgroup 2/job/memory.high", str(16 * GIB))
    assert host.usable() == 16


def test_v2_max_everywhere_is_no_limit(host: Host) -> None:
    host.in_cgroups(v2="/pod/box")
    for level in ("", "pod", "pod/box"):
        host.v2(level, limit=None, used=10)
    assert available_host_bytes(host.proc).cgroup_limit_bytes is None
    assert host.usable() == 200


def test_a_use_above_the_limit_leaves_nothing(host: Host) -> None:
    host.in_cgroups(v2="/job")
    host.v2("job", limit=10, used=12)
    assert host.usable() == 0


def test_v1(host: Host) -> None:
    host.in_cgroups(v1="/pod/box")
    host.v1("pod/box", limit=None, used=20)
    assert host.usable() == 200
    host.v1("pod", limit=64, used=60, stat=f"inactive_file 1\ntotal_inactive_file {3 * GIB}\n")
    assert host.usable() == 7


def test_v1_a_limit_above_the_mount_is_seen(host: Host) -> None:
    """A container's mount shows only its own cgroup; the pod's limit shows in its statistics."""
    host.in_cgroups(v1="/pod/box", root="/pod/box")
    host.v1("", limit=None, used=20, stat=f"hierarchical_memory_limit {48 * GIB}\n")
    assert host.usable() == 28


def test_both_versions_the_tightest_wins(host: Host) -> None:
    host.in_cgroups(v1="/job", v2="/job")
    host.v1("job", limit=64, used=0)
    host.v2("job", limit=32, used=0)
    assert host.usable() == 32
    host.v1("job", limit=16, used=0)
    assert host.usable() == 16


@pytest.mark.parametrize(
    ("path", "root"), [("/../job", "/"), ("/docker/2", "/docker/1"), ("/", "/docker/1"), ("/", "/")]
)
def test_a_path_outside_of_what_is_mounted_means_the_mount(
    host: Host, path: str, root: str
) -> None:
    host.in_cgroups(v2=path, root=root)
    host.v2("", limit=8, used=0)
    for elsewhere in ("../job", "docker/2"):
        host.v2(elsewhere, limit=2, used=0)
    assert host.usable() == 8


def test_a_path_below_what_is_mounted(host: Host) -> None:
    host.in_cgroups(v2="/docker/1/job", root="/docker/1")
    host.v2("job", limit=8, used=0)
    assert host.usable() == 8


def test_this_machine_has_memory() -> None:
    memory = available_host_bytes()
    assert memory.free_bytes > 0
    assert memory.usable_bytes is None or memory.usable_bytes > 0


def test_old_kernels_without_memavailable(host: Host) -> None:
    host.write("proc/meminfo", "MemTotal: 9 kB\nMemFree: 3 kB\nBuffers: 1 kB\nCached: 2 kB\n")
    assert available_host_bytes(host.proc).free_bytes == 6 * 1024


def test_no_meminfo_is_an_error_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(HostMemoryError, match="host_budget"):
        available_host_bytes(tmp_path)


# --------------------------------------------------------------------------- the check


def test_what_fits_exactly_passes(host: Host) -> None:
    host.check(200)
    host.check(50, ranks=4)
    with pytest.raises(HostMemoryError):
        host.check(201)
    with pytest.raises(HostMemoryError):
        host.check(51, ranks=4)


def test_the_error_has_every_number_and_the_remedies(host: Host) -> None:
    host.memory(total=31, available=30)
    host.in_cgroups(v2="/job")
    host.v2("job", limit=64, used=4)
    with pytest.raises(HostMemoryError) as caught:
        host.check(10, ranks=8)
    text = str(caught.value)
    for gib in (10, 80, 60, 30, 221, 64, 4):
        assert f"{gib}.00 GiB ({gib * GIB} bytes)" in text
    for word in ("8 ranks", "offload_fraction", "device_budget", "fewer ranks", "host_budget="):
        assert word in text
    assert isinstance(caught.value, MemoryError)


def test_nothing_always_fits(host: Host) -> None:
    (host.proc / "meminfo").unlink()
    host.check(0, ranks=8)
    host.check(0, budget=0)


def test_one_rank_is_not_multiplied(host: Host) -> None:
    with pytest.raises(HostMemoryError) as caught:
        host.check(300)
    assert "ranks of this host" not in str(caught.value)


def test_a_budget_is_believed_and_nothing_else_is_read(host: Host) -> None:
    (host.proc / "meminfo").unlink()
    host.check(500, ranks=2, budget=1000)
    with pytest.raises(HostMemoryError) as caught:
        host.check(501, ranks=2, budget=1000)
    for gib in (501, 1002, 1000):
        assert f"{gib}.00 GiB ({gib * GIB} bytes)" in str(caught.value)


def test_peers_that_were_first_do_not_make_the_last_rank_fail(host: Host) -> None:
    """4 ranks need 40 each of 200; three have it already, so that 80 are left."""
    host.memory(total=256, available=80)
    with pytest.raises(HostMemoryError, match="160"):
        host.check(40, ranks=4)
    for pid in (100, 101, 102, 103):
        host.rank(pid, anon=40.001)
    host.check(40, ranks=4)


def test_peers_count_for_no_more_than_they_are_going_to_take(host: Host) -> None:
    host.memory(total=256, available=80)
    for pid in (101, 102, 103, 104):
        host.rank(pid, anon=150)
    with pytest.raises(HostMemoryError) as caught:
        host.check(100, ranks=3)
    assert f"have taken {200}.00 GiB" in str(caught.value)


def test_strangers_with_the_same_parent_do_not_count_for_a_single_rank(host: Host) -> None:
    host.memory(total=256, available=80)
    host.rank(101, anon=100)
    with pytest.raises(HostMemoryError):
        host.check(100)


def test_local_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert local_ranks() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert local_ranks() == 8
    for garbage in ("", "0", "-2", "eight", "1.5"):
        monkeypatch.setitem(os.environ, "LOCAL_WORLD_SIZE", garbage)
        with pytest.raises(ConfigError, match=f"LOCAL_WORLD_SIZE='{garbage}'"):
            local_ranks()
