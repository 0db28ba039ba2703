"""Each fault that ``doctor`` looks for, planted in files or numbers, is found."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fsdp_offload.cli import checks, doctor
from fsdp_offload.cli.check import Check, attempt
from fsdp_offload.cli.main import main
from fsdp_offload.core import devices
from fsdp_offload.core.errors import PinningError
from fsdp_offload.core.fsdp_names import NAMES
from fsdp_offload.link.budget import HostMemory

GIB = 1 << 30
ADDRESS = "0000:1b:00.0"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def check(found: Check, state: str, *texts: str) -> None:
    assert found.state == state, found
    assert all(text in f"{found.found}. {found.remedy}" for text in texts), found
    # What is wrong has a remedy, what is right needs none.
    assert bool(found.remedy) == (state != "ok"), found


# --------------------------------------------------------------------------- host


def test_host_memory() -> None:
    free = HostMemory("MemAvailable", 200 * GIB, 256 * GIB)
    check(checks.check_host_memory([free], 80 * GIB), "ok", "200.00 GiB", "MemAvailable")
    cgroup = HostMemory("its memory cgroup", 64 * GIB, 100 * GIB)
    check(checks.check_host_memory([free, cgroup], 64 * GIB), "ok", "64.00 GiB", "cgroup")
    check(checks.check_host_memory([free, cgroup], 65 * GIB), "warning", "64.00 GiB", "65.00")
    full = HostMemory("its memory cgroup", 0, 100 * GIB)
    check(checks.check_host_memory([free, full], 0), "error", "0 bytes free", "cgroup")
    check(checks.check_host_memory([], 0), "warning", "unknown", "host_memory=")


def two_nodes(root: Path, *, node: str = "1", near: str = "8-15") -> Path:
    device = f"sys/bus/pci/devices/{ADDRESS}"
    files = {f"sys/devices/system/node/node{i}/cpulist": "" for i in (0, 1)}
    files["sys/devices/system/node/online"] = "0-1"
    return write(root, files | {f"{device}/numa_node": node, f"{device}/local_cpulist": near})


def test_the_cores_of_this_process_are_next_to_the_device(tmp_path: Path) -> None:
    root = two_nodes(tmp_path)
    check(checks.check_numa(root, ADDRESS, range(6, 10)), "ok", "node 1", "may use 2")
    found = checks.check_numa(root, ADDRESS, range(8))
    check(found, "warning", "none of its cores", "--cpunodebind=1")
    check(checks.check_numa(root, "", range(8)), "ok", "nodes: 2")


def test_the_node_of_the_device_is_not_known(tmp_path: Path) -> None:
    root = two_nodes(tmp_path, node="-1", near="0-15")
    check(checks.check_numa(root, ADDRESS, range(8)), "warning", "2 nodes", ADDRESS)


def link(root: Path, speed: str, width: str) -> Path:
    folder = f"sys/bus/pci/devices/{ADDRESS}"
    return write(root, {f"{folder}/max_link_speed": speed, f"{folder}/max_link_width": width})


def test_what_pcie_carries(tmp_path: Path) -> None:
    assert checks.pcie_gbps(tmp_path, ADDRESS) == 0
    root = link(tmp_path, "32.0 GT/s PCIe", "16")
    assert checks.pcie_gbps(root, ADDRESS) == pytest.approx(63.0, abs=0.1)
    root = link(tmp_path, "5.0 GT/s PCIe", "16")
    assert checks.pcie_gbps(root, ADDRESS) == pytest.approx(8.0)
    assert checks.pcie_gbps(link(tmp_path, "Unknown", "16"), ADDRESS) == 0


# --------------------------------------------------------------------------- torch and device


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("2.10.1", "error"),
        ("2.11.0+cu128", "ok"),
        ("2.12.0", "ok"),
        ("2.15.3", "ok"),
        ("2.16.0a0", "warning"),
        ("3.0.0", "warning"),
    ],
)
def test_torch(version: str, state: str) -> None:
    check(checks.check_torch(version, ("2.11", "2.13", "2.15")), state, version)


def test_torch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(doctor, "import_module", broken)
    (found,) = doctor._checks(0)
    check(found, "error", "libcudart.so.12")


def test_names_of_fsdp2_are_tried_here(monkeypatch: pytest.MonkeyPatch) -> None:
    check(checks.check_names(), "ok", f"all {len(NAMES)}")
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    monkeypatch.delattr(FSDPParamGroup, "wait_for_unshard")
    check(checks.check_names(), "error", "FSDPParamGroup.wait_for_unshard", "torch 2.")


@pytest.mark.parametrize(
    ("cuda", "driver", "devices", "state", "text"),
    [
        ("12.8", "570.1", ["H100"], "ok", "H100; torch for CUDA 12.8, driver 570.1"),
        (None, "", [], "warning", "no GPU"),
        ("12.8", "", [], "warning", "no GPU"),
        (None, "570.1", [], "error", "this torch has no CUDA"),
        ("12.8", "535.2", [], "error", "sees no device"),
        (None, "", ["MI300X"], "warning", "was never tested"),
    ],
)
def test_device(cuda: str | None, driver: str, devices: list[str], state: str, text: str) -> None:
    check(checks.check_device(cuda, driver, devices), state, text)


CPU = torch.device("cpu")


def test_page_locking_that_the_driver_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PinningError("1 byte", reason="cudaHostRegister answered 2")

    unpinned: list[int] = []
    monkeypatch.setattr(devices, "unpin", lambda _, size, on: unpinned.append(size))
    monkeypatch.setattr(devices, "pin", refused)
    check(checks.check_pinning(CPU), "error", "answered 2", "free host memory")
    assert unpinned == []
    monkeypatch.setattr(devices, "pin", lambda *_: None)
    check(checks.check_pinning(CPU), "ok")
    assert unpinned == [64 << 20]


def test_a_slow_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = link(tmp_path, "32.0 GT/s PCIe", "16")

    def found(to: float, back: float, root: Path = root) -> Check:
        figures = {"h2d_gbps": to, "d2h_gbps": back, "h2d+d2h_gbps": to + back}
        monkeypatch.setattr(checks, "measure_link", lambda *_: figures)
        return checks.check_link(CPU, root, ADDRESS)

    check(found(55, 54), "ok", "55.0 GB/s", "54.0 back", "63.0")
    check(found(25, 25), "warning", "25.0 GB/s", "lspci")  # half the width
    check(found(25, 54), "warning", "25.0 GB/s")
    check(found(55, 25), "warning", "25.0 back")
    check(found(12, 12, tmp_path / "none"), "ok", "12.0 GB/s")  # no bound is known


def test_other_processes_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(free_gib: int, own_gib: int) -> Check:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free_gib * GIB, 80 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: own_gib * GIB)
        return checks.check_others(CPU)

    check(found(79, 0), "ok", "79.00 GiB")
    check(found(39, 40), "ok")
    check(found(39, 0), "warning", "others use about 41.00")


def test_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(device: torch.device | None, *, is_there: bool, kernels: object = None) -> Check:
        monkeypatch.setattr(checks, "find_spec", lambda _: is_there or None)
        monkeypatch.setattr(checks, "triton_kernels", lambda: kernels)
        return checks.check_triton(device)

    check(found(CPU, is_there=True, kernels=1), "ok", "compile")
    check(found(None, is_there=False), "ok", "not installed")
    check(found(CPU, is_there=False), "warning", "not installed", "torch operations")
    check(found(CPU, is_there=True), "warning", "do not compile", "C compiler")


# --------------------------------------------------------------------------- a stand-in device


DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.10  Mon Jan  1\nGCC version: 11.4"


def test_a_device_as_it_should_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = link(two_nodes(tmp_path, near=f"0-{max(os.sched_getaffinity(0))}"), "32.0 GT/s", "16")
    write(root, {"proc/driver/nvidia/version": DRIVER})
    cgroup = {"memory.max": str(500 * GIB), "memory.high": "max", "memory.current": "0"}
    write(root, {f"sys/fs/cgroup/{name}": text for name, text in cgroup.items()})
    properties = SimpleNamespace(
        name="H100", total_memory=80 * GIB, pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0
    )
    fakes = {
        "device_count": lambda: 1,
        "get_device_properties": lambda *_: properties,
        "set_device": lambda *_: None,
        "mem_get_info": lambda *_: (79 * GIB, 80 * GIB),
        "memory_reserved": lambda *_: 0,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(doctor, "_ROOT", root)
    for name in ("pin", "unpin"):
        monkeypatch.setattr(devices, name, lambda *_: None)
    monkeypatch.setattr(checks, "triton_kernels", lambda: 1)
    gbps = {"h2d_gbps": 55.0, "d2h_gbps": 54.0, "h2d+d2h_gbps": 90.0}
    monkeypatch.setattr(checks, "measure_link", lambda *_: gbps)

    main(["doctor", "--json"])
    rows = json.loads(capsys.readouterr().out)["checks"]
    found = {row["name"]: row["state"] for row in rows}
    wanted = {"device", "host memory", "NUMA", "triton", "other processes", "page-locking"}
    assert found.keys() >= wanted | {"link"}
    assert set(found.values()) <= {"ok"}, found


def test_the_driver_says_its_version(tmp_path: Path) -> None:
    assert checks.driver_version(tmp_path) == ""
    write(tmp_path, {"proc/driver/nvidia/version": DRIVER})
    assert checks.driver_version(tmp_path) == "570.86.10"


# --------------------------------------------------------------------------- the command


def test_a_check_that_fails_is_not_known_and_ends_nothing() -> None:
    def broken() -> Check:
        raise RuntimeError("no\nlink")

    check(attempt("link", broken), "warning", "the check failed: RuntimeError: no link")


NAMES_OF_CHECKS = ["torch", "FSDP2", "device", "host memory", "NUMA"]


def test_all_checks_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    found = {row["name"]: row for row in report["checks"]}
    assert list(found)[:5] == NAMES_OF_CHECKS
    assert {"NUMA", "triton"} <= found.keys()
    assert found["FSDP2"]["state"] == "ok"
    assert all(row.keys() == {"name", "state", "found", "remedy"} for row in found.values())
    assert code == int(report["state"] == "error")


def test_an_error_is_a_line_and_the_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Check("link", "error", "cut", "mend it")
    monkeypatch.setattr(doctor, "_checks", lambda index: iter([Check("torch", "ok", "2"), fault]))
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out == "ok       torch  2\nerror    link   cut. Remedy: mend it\n"
    monkeypatch.setattr(doctor, "_checks", lambda index: iter([fault._replace(state="warning")]))
    assert main(["doctor"]) == 0


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "torch sees no GPUs. Remedy: leave it out"),
        (2, "torch sees 2 GPUs. Remedy: count from 0, or leave it out"),
    ],
)
def test_a_device_that_is_not_there(
    count: int,
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert main(["doctor", "--device", "2"]) == 2
    assert capsys.readouterr().err == f"fsdp-offload: --device 2: {text}\n"
