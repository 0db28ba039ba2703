"""Leaving a GPU and coming back: the driver's memory, addresses, CUDA graphs, streams, NCCL."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_offload import FixedAddressRegion, PhaseOffloader
from tests import phase_jobs
from tests.phase_jobs import LANES, POLICIES

REPOSITORY = Path(__file__).parents[2]
CYCLES = 20
WIDE = 4096  # five matrices of 64 MiB, their gradients and moments: 0.75 GiB that leave
WRAPPED = [lanes for lanes in LANES if lanes != "plain"]
ADDRESSES = pytest.mark.parametrize("fixed_address", [False, True], ids=["resized", "fixed"])

Pool = Callable[..., Any]


@ADDRESSES
@pytest.mark.parametrize("lanes", ["plain", "resident"])
def test_the_driver_has_the_memory_meanwhile(ranks: Pool, lanes: str, fixed_address: bool) -> None:
    pool = ranks(1, device_type="cuda")
    for share in pool.run(phase_jobs.frees_its_payload, lanes, WIDE, fixed_address=fixed_address):
        assert 0.99 <= share < 1.2


@pytest.mark.parametrize("lanes", LANES)
def test_training_with_switches_is_training_without(ranks: Pool, lanes: str) -> None:
    for dtype in ("float32", "bfloat16"):
        ranks(1, device_type="cuda").run(phase_jobs.same_training, lanes, "all", dtype)


@pytest.mark.parametrize("policy", [p for p in POLICIES if p not in ("all", "rebuilt")])
@pytest.mark.parametrize("lanes", ["plain", "mixed"])
def test_policies(ranks: Pool, lanes: str, policy: str) -> None:
    ranks(1, device_type="cuda").run(phase_jobs.same_training, lanes, policy, "bfloat16")


@pytest.mark.parametrize("policy", ["all", "grads-saved"])
@pytest.mark.parametrize("lanes", ["plain", "mixed"])
def test_training_at_fixed_addresses(ranks: Pool, lanes: str, policy: str) -> None:
    pool = ranks(1, device_type="cuda")
    pool.run(phase_jobs.same_training, lanes, policy, "float32", fixed_address=True)


def test_parameters_are_rebuilt_from_masters(ranks: Pool) -> None:
    ranks(1, device_type="cuda").run(phase_jobs.same_training, "host", "rebuilt", "bfloat16")


@pytest.mark.parametrize("lanes", WRAPPED)
def test_the_optimizer_alone(ranks: Pool, lanes: str) -> None:
    ranks(1, device_type="cuda").run(phase_jobs.optimizer_alone, lanes, "bfloat16")


@pytest.mark.parametrize("lanes", LANES)
def test_use_while_away_raises(ranks: Pool, lanes: str) -> None:
    ranks(1, device_type="cuda").run(phase_jobs.use_while_away, lanes)


@pytest.mark.parametrize("lanes", ["plain", "mixed"])
def test_use_brings_it_back_where_asked(ranks: Pool, lanes: str) -> None:
    ranks(1, device_type="cuda").run(phase_jobs.reload_on_use, lanes)


@pytest.mark.parametrize("lanes", LANES)
def test_state_while_away_takes_no_device_memory(ranks: Pool, tmp_path: Path, lanes: str) -> None:
    ranks(1, device_type="cuda").run(phase_jobs.state_while_away, lanes, str(tmp_path))


@ADDRESSES
def test_no_room_to_come_back(ranks: Pool, fixed_address: bool) -> None:
    pool = ranks(1, device_type="cuda")
    pool.run(phase_jobs.no_room_to_come_back, WIDE, fixed_address=fixed_address)


@ADDRESSES
def test_used_at_once(ranks: Pool, fixed_address: bool) -> None:
    ranks(1, device_type="cuda").run(phase_jobs.used_at_once, WIDE, fixed_address=fixed_address)


def test_two_jobs_take_turns(ranks: Pool) -> None:
    ranks(1, device_type="cuda").run(phase_jobs.swapped, 1024)


# ---------------------------------------------------------------------- addresses and CUDA graphs


def graph_of(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """What ``run`` enqueues, captured after a first run on another stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def attend(weight: Tensor, cache: Tensor, place: Tensor, x: Tensor) -> Tensor:
    """One more row of ``cache``, then a product with all of it."""
    cache.index_copy_(0, place, x @ weight)
    place += 1
    return torch.softmax(x @ cache.T / 8, -1) @ cache


def test_a_graph_over_a_region_replays_after_every_pause() -> None:
    device = torch.device("cuda", 0)
    region = FixedAddressRegion("cache", device)
    weight, cache = region.empty((64, 64)), region.empty((CYCLES + 2, 64))
    place, x = region.empty((1,), dtype=torch.int64), region.empty((1, 64))
    own = [weight, cache, place, x]
    torch.manual_seed(0)
    other = [torch.randn_like(weight), torch.zeros_like(cache), torch.zeros_like(place)]
    other.append(torch.randn_like(x))
    for mine, theirs in zip(own, other, strict=True):
        mine.copy_(theirs)
    addresses = [tensor.data_ptr() for tensor in own]
    out = torch.empty(1, 64, device=device)
    graph = graph_of(lambda: out.copy_(attend(weight, cache, place, x)))
    for mine, theirs in zip(own, other, strict=True):
        mine.copy_(theirs)
    for cycle in range(CYCLES):
        before = torch.cuda.mem_get_info()[0]
        region.pause()
        assert region.is_paused
        assert torch.cuda.mem_get_info()[0] > before
        region.resume()
        assert [tensor.data_ptr() for tensor in own] == addresses
        graph.replay()
        assert torch.equal(out, attend(*other)), cycle
    assert torch.equal(cache, other[1])
    assert int(place) == CYCLES
    region.close()


def test_a_graph_of_an_update_replays_after_every_pause() -> None:
    """Plain AdamW whose parameters, gradients and state lie in a region."""
    device = torch.device("cuda", 0)
    region = FixedAddressRegion("state", device)
    torch.manual_seed(0)
    shapes = [(300, 70), (129,), (5, 5)]
    values = [torch.randn(shape, device=device) for shape in shapes]

    def place(value: Tensor) -> Tensor:
        kept = region.empty(value.shape, dtype=value.dtype)
        return kept.copy_(value)

    def build(make: Callable[[Tensor], Tensor]) -> tuple[list[nn.Parameter], torch.optim.AdamW]:
        parameters = [nn.Parameter(make(value)) for value in values]
        optimizer = torch.optim.AdamW(parameters, lr=0.01, capturable=True)
        for parameter in parameters:
            parameter.grad = make(torch.zeros_like(parameter))
            zeros = {k: make(torch.zeros_like(parameter)) for k in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": make(torch.zeros((), device=device)), **zeros}
        return parameters, optimizer

    mine, update = build(place)
    theirs, reference = build(torch.Tensor.clone)
    addresses = [p.data_ptr() for p in mine]
    graph = graph_of(update.step)
    reference.step()  # the first run outside of the capture; gradients are zeros
    for cycle in range(CYCLES):
        region.pause()
        region.resume()
        for a, b in zip(mine, theirs, strict=True):
            assert a.grad is not None
            assert b.grad is not None
            b.grad.normal_()
            a.grad.copy_(b.grad)
        graph.replay()
        reference.step()
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a, b), cycle
            for name, value in reference.state[b].items():
                assert torch.equal(update.state[a][name], value), (cycle, name)
    assert [p.data_ptr() for p in mine] == addresses
    region.close()


def test_graphs_survive_an_offloader_with_fixed_addresses() -> None:
    """Forward and update of a model that was made before, without a region of its own."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8)).cuda() for _ in "ab"]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, capturable=True) for m in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        optimizer.step()  # makes the state
    model, optimizer = models[0], optimizers[0]
    phases = PhaseOffloader(model, optimizer, grads="keep", fixed_address=True)
    x, out = torch.randn(4, 256, device="cuda"), torch.empty(4, 8, device="cuda")
    with torch.no_grad():
        forward = graph_of(lambda: out.copy_(model(x)))
    update = graph_of(optimizer.step)
    optimizers[1].step()  # the first run of the update outside of its capture
    addresses = [p.data_ptr() for p in model.parameters()]
    for cycle in range(CYCLES):
        with phases.away():
            pass
        assert [p.data_ptr() for p in model.parameters()] == addresses
        update.replay()
        optimizers[1].step()
        forward.replay()
        assert torch.equal(out, models[1](x)), cycle
    phases.close()


# ------------------------------------------------------------------------------- several GPUs


@pytest.mark.gpus(2)
@pytest.mark.parametrize("lanes", LANES)
def test_two_gpus_train_the_same(ranks: Pool, lanes: str) -> None:
    pool = ranks(2, device_type="cuda")
    for dtype in ("float32", "bfloat16"):
        pool.run(phase_jobs.same_training, lanes, "all", dtype)
    if lanes != "plain":
        pool.run(phase_jobs.optimizer_alone, lanes, "float32")


@pytest.mark.gpus(2)
@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "all"])
def test_two_gpus_and_policies(ranks: Pool, policy: str) -> None:
    pool = ranks(2, device_type="cuda")
    lanes = "host" if policy == "rebuilt" else "mixed"
    pool.run(phase_jobs.same_training, lanes, policy, "bfloat16")
    if policy != "rebuilt":
        pool.run(phase_jobs.same_training, lanes, policy, "float32", fixed_address=True)


@pytest.mark.gpus(2)
@ADDRESSES
def test_two_gpus_leave(ranks: Pool, tmp_path: Path, fixed_address: bool) -> None:
    pool = ranks(2, device_type="cuda")
    shares = pool.run(phase_jobs.frees_its_payload, "plain", WIDE, fixed_address=fixed_address)
    assert min(shares) >= 0.99
    pool.run(phase_jobs.use_while_away, "mixed")
    pool.run(phase_jobs.used_at_once, WIDE, fixed_address=fixed_address)
    pool.run(phase_jobs.state_while_away, "mixed", str(tmp_path))
    pool.run(phase_jobs.swapped, 512)


# ------------------------------------------------------------------------ benchmark and example


def run_here(arguments: list[str]) -> str:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_benchmark(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    sizes = ["--params=1e8", "--repeats=2", "--cycles=10"]
    run_here(["-m", "fsdp_offload.bench.phases", *sizes, f"--json={out}"])
    report = json.loads(out.read_text())
    rows = {row["name"]: row for row in report["rows"]}
    assert rows.pop("memory-saver")["status"] in ("ok", "not available")
    for name, row in rows.items():
        assert row["status"] == "ok", row
        assert row["same_bits"], name
        if name in ("offloader", "fixed", "optimizer"):
            assert row["freed_share"] >= 0.99, name
            assert row["host_over_payload"] <= 1.01, name
    for row in report["endurance"]:
        assert row["same_bits"], row
        assert row["device_free_bytes_last"] >= row["device_free_bytes_first"] - (2 << 20)
        assert row["fragmented_bytes_last"] <= row["fragmented_bytes_first"]


def test_example() -> None:
    output = run_here(["examples/rl_phases.py", "--iterations=21"])
    rewards = [float(reward) for reward in re.findall(r"reward (\d\.\d+) ", output)]
    assert "1 x cuda" in output
    assert rewards[-1] > 2 * rewards[0], output
