"""The wrapper keeps every promise of ``torch.optim.Optimizer``, and gives back what it takes."""

from __future__ import annotations

import copy
import gc
import io
import logging
import mmap
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import fsdp_offload
from fsdp_offload import HybridDeviceOptimizer, TransferConfig
from fsdp_offload.link import HostRange
from fsdp_offload.update.shadow import Shadow
from tests.helpers.compare import assert_same
from tests.helpers.lanes import in_lanes
from tests.helpers.simulator import StreamSimulator
from tests.helpers.training import (
    SMALL,
    Model,
    each_lane,
    fill_gradients,
    pair,
    train,
    values,
    wrap,
)


def test_it_is_an_optimizer_that_shares_groups_and_defaults() -> None:
    inner = torch.optim.AdamW(Model().parameters(), lr=0.1)
    groups, group, defaults = inner.param_groups, inner.param_groups[0], dict(inner.defaults)
    keys = dict(group)
    optimizer = wrap(inner, "streamed")

    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups[0] is inner.param_groups[0] is group
    assert optimizer.param_groups is inner.param_groups
    assert group == keys
    assert groups[0] is group
    assert optimizer.defaults == defaults
    assert repr(optimizer).startswith("HybridDeviceOptimizer (")
    assert not hasattr(optimizer, "offload")
    with pytest.raises(
        AttributeError, match=r"^'HybridDeviceOptimizer' object has no .* 'offload'$"
    ):
        optimizer.offload()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.param_groups[0] is group


@each_lane
def test_after_wrapping_the_inner_optimizer_forwards_to_the_wrapper(lane: str) -> None:
    model, optimizer, twin_model, twin = pair(lane)
    inner = optimizer._wrapped
    train(model, inner, range(2))
    train(twin_model, twin, range(2))

    assert optimizer.statistics().steps == 2
    assert_same(values(model), values(twin_model))
    assert inner.state is optimizer.state
    saved = copy.deepcopy(inner.state_dict())
    assert_same(saved, twin.state_dict())
    train(model, inner, range(2, 3))
    inner.load_state_dict(saved)
    assert_same(optimizer.state_dict(), twin.state_dict())
    inner.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert inner.step(lambda: 5.0) == 5.0


@pytest.mark.parametrize(
    ("lane", "kind", "built"),
    [
        ("resident", "lambda", "before"),
        ("streamed", "one cycle", "on inner"),
        ("host", "one cycle", "on wrapper"),
    ],
)
def test_schedulers_work_on_either_optimizer(lane: str, kind: str, built: str) -> None:
    """Warnings are errors: none that ``lr_scheduler.step()`` came first, either."""

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        if kind == "one cycle":  # also changes the momentum at every step
            return OneCycleLR(optimizer, max_lr=0.3, total_steps=6)
        return LambdaLR(optimizer, lambda step: 1 / (1 + step))

    model, twin_model = Model(), Model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    twin = torch.optim.SGD(twin_model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    scheduler = schedule(inner) if built == "before" else None
    optimizer = wrap(inner, lane)
    scheduler = scheduler or schedule(inner if built == "on inner" else optimizer)
    twin_scheduler = schedule(twin)
    rates = []
    for step in range(5):
        for each, its, its_scheduler in (
            (model, optimizer, scheduler),
            (twin_model, twin, twin_scheduler),
        ):
            train(each, its, range(step, step + 1))
            its_scheduler.step()
        rates.append(float(optimizer.param_groups[0]["lr"]))

    assert len(set(rates)) == 5
    assert_same(values(model), values(twin_model))
    assert scheduler.get_last_lr() == twin_scheduler.get_last_lr()


# --------------------------------------------------------------------------- hooks


def test_step_hooks_run_once_per_step_with_the_wrapper_wherever_they_were_registered() -> None:
    model = Model()
    inner = torch.optim.AdamW(model.parameters())
    seen: list[tuple[str, object]] = []

    def note(name: str) -> Callable[..., None]:
        return lambda optimizer, args, kwargs: seen.append((name, optimizer))

    inner.register_step_pre_hook(note("pre, inner before"))
    inner.register_step_post_hook(note("post, inner before"))
    optimizer = wrap(inner, "streamed")
    optimizer.register_step_pre_hook(note("pre, wrapper"))
    optimizer.register_step_post_hook(note("post, wrapper"))
    inner.register_step_post_hook(note("post, inner after"))
    handles = [
        register_optimizer_step_pre_hook(note("pre, global")),
        register_optimizer_step_post_hook(note("post, global")),
    ]
    expected = ["pre, global", "pre, inner before", "pre, wrapper"]
    expected += ["post, inner before", "post, wrapper", "post, inner after", "post, global"]
    try:
        for step in (optimizer.step, inner.step):
            seen.clear()
            fill_gradients(model, 0)
            step()
            assert sorted(name for name, _ in seen) == sorted(expected)
            assert [name[:3] for name, _ in seen] == ["pre"] * 3 + ["pos"] * 4
            assert all(argument is optimizer for _, argument in seen)
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("on_inner", [False, True], ids=["on wrapper", "on inner before"])
def test_state_dict_hooks_run_and_may_replace_the_state_dict(on_inner: bool) -> None:
    model, lane = Model(), "streamed"
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = None if on_inner else wrap(inner, lane)
    target, calls = optimizer or inner, []

    def after_saving(optimizer: Any, saved: dict[str, Any]) -> dict[str, Any]:
        calls.append("saved")
        return {**saved, "extra": 1}

    def before_loading(optimizer: Any, loaded: dict[str, Any]) -> dict[str, Any]:
        calls.append("load")
        assert loaded.pop("extra") == 1
        loaded["param_groups"] = [{**g, "lr": 0.7} for g in loaded["param_groups"]]
        return loaded

    target.register_state_dict_pre_hook(lambda _: calls.append("save"))
    target.register_state_dict_post_hook(after_saving)
    target.register_load_state_dict_pre_hook(before_loading)
    target.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
    optimizer = optimizer or wrap(inner, lane)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)

    assert calls == ["save", "saved", "load", "loaded"]
    assert optimizer.param_groups[0]["lr"] == 0.7
    assert saved["extra"] == 1, "the caller's dict was changed"


@pytest.mark.parametrize(("lane", "on_inner"), [("host", False), ("streamed", True)])
def test_a_group_can_be_added_at_any_time(lane: str, on_inner: bool) -> None:
    model, optimizer, twin_model, twin = pair(lane)
    train(model, optimizer, range(2))
    train(twin_model, twin, range(2))
    for each, its in ((model, optimizer._wrapped if on_inner else optimizer), (twin_model, twin)):
        each.weights.extend(Model(seed=4, shapes=((700,), (3, 5))).weights)
        its.add_param_group({"params": list(each.weights)[2:], "lr": 0.02, "weight_decay": 0.1})

    assert len(optimizer.param_groups) == len(optimizer._wrapped.param_groups) == 2
    assert len(optimizer.state) == 4, "its state is reserved at once"
    train(model, optimizer, range(2, 5))
    train(twin_model, twin, range(2, 5))
    assert_same(values(model), values(twin_model))
    assert_same(optimizer.state_dict(), twin.state_dict())


def test_groups_with_names_keep_them() -> None:
    model = Model()
    optimizer = HybridDeviceOptimizer(torch.optim.AdamW(model.named_parameters()))
    train(model, optimizer, range(1))
    names = [name for name, _ in model.named_parameters()]

    assert optimizer.param_groups[0]["param_names"] == names
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == names
    assert [record.fqn for record in optimizer._updates.reserved.params] == names


def test_names_of_a_loaded_state_dict_are_taken_as_by_torch() -> None:
    saved = torch.optim.AdamW(Model().named_parameters())
    found = []
    for wrapped in (False, True):
        model = Model()
        optimizer: Optimizer = torch.optim.AdamW(model.parameters())
        optimizer = HybridDeviceOptimizer(optimizer, model) if wrapped else optimizer
        optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
        found.append(optimizer.state_dict()["param_groups"][0]["param_names"])
    assert found[0] == found[1] == [name for name, _ in Model().named_parameters()]


def test_steps_that_are_numbers_are_loaded_as_by_torch() -> None:
    """Of a class that keeps its state itself, and of a parameter that is frozen."""
    for made in (torch.optim.Adafactor, torch.optim.AdamW):
        pairs = []
        for wrapped in (False, True):
            model = Model()
            optimizer: Optimizer = made(model.parameters(), lr=0.01)
            optimizer = HybridDeviceOptimizer(optimizer, model) if wrapped else optimizer
            train(model, optimizer, range(2))
            saved = copy.deepcopy(optimizer.state_dict())
            for state in saved["state"].values():
                state["step"] = state["step"].item()
            model.weights[0].requires_grad_(False)
            optimizer.load_state_dict(saved)
            model.requires_grad_(True)
            train(model, optimizer, range(2, 4))
            pairs.append((values(model), optimizer.state_dict()))
        assert_same(pairs[0], pairs[1])


# --------------------------------------------------------------------------- state dicts


@each_lane
def test_a_saved_state_dict_loads_with_weights_only(lane: str) -> None:
    model, optimizer, *_ = pair(lane, torch.optim.AdamW)
    train(model, optimizer, range(2))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    payload = sum(v.numel() * 4 for s in optimizer.state.values() for v in s.values())
    assert file.tell() < payload + 8192, "more than the state was saved"
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    _, other, *_ = pair(lane, torch.optim.AdamW)
    other.load_state_dict(loaded)

    assert_same(loaded, optimizer.state_dict())
    assert_same(other.state_dict(), optimizer.state_dict())


def test_a_loaded_tensor_lr_is_not_shared_with_the_dict_it_came_from() -> None:
    lane = "streamed"
    _, optimizer, *_ = pair(lane, torch.optim.AdamW, lr=torch.tensor(0.5))
    saved = optimizer.state_dict()
    _, other, *_ = pair(lane, torch.optim.AdamW, lr=torch.tensor(0.1))
    other.load_state_dict(saved)
    saved["param_groups"][0]["lr"].fill_(9.0)

    assert float(other.param_groups[0]["lr"]) == 0.5


def test_a_load_takes_hyper_parameters_and_leaves_the_choice_of_kernel() -> None:
    source = torch.optim.AdamW(Model().parameters(), lr=0.3, betas=(0.5, 0.6), foreach=True)
    optimizer = HybridDeviceOptimizer(torch.optim.AdamW(Model().parameters(), fused=True))
    optimizer.load_state_dict(source.state_dict())
    group = optimizer.param_groups[0]

    assert (group["lr"], group["betas"]) == (0.3, (0.5, 0.6))
    assert (group["fused"], group["foreach"]) == (True, None)


# --------------------------------------------------------------------------- how much, and where


def state_bytes(optimizer: HybridDeviceOptimizer, lane: str) -> int:
    """Bytes of the state that users see, of parameters in a lane, scalars not counted."""
    return sum(
        value.numel() * value.itemsize
        for record in optimizer._updates.reserved.params
        if record.lane == lane
        for value in optimizer.state[record.parameter].values()
        if value.dim()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_statistics_are_what_tensors_add_up_to(
    dtype: torch.dtype, arenas: list[weakref.ref[HostRange]]
) -> None:
    model = Model(shapes=((40, 60), (130,), (64, 10), (7,), (500,))).to(dtype)
    optimizer = in_lanes(
        torch.optim.AdamW(model.parameters()),
        update_on=["streamed", "host", "resident", "streamed", "host"],
        transfer=SMALL,
    )
    statistics = optimizer.statistics()
    n_host = 130 + 500

    assert statistics.steps == statistics.moved_bytes == 0
    assert statistics.parameters == {"streamed": 2, "host": 2, "resident": 1}
    assert statistics.device_state_bytes == state_bytes(optimizer, "resident")
    shown = state_bytes(optimizer, "streamed") + state_bytes(optimizer, "host")
    assert statistics.host_state_bytes == shown
    assert statistics.host_arena_bytes == sum(a().n_bytes for a in arenas)  # type: ignore[union-attr]
    assert statistics.host_arena_bytes >= statistics.host_state_bytes
    assert not statistics.pinned
    pieces = sum(len(record.slices) for record in optimizer._updates.reserved.params)
    assert 5 < statistics.buckets <= pieces

    train(model, optimizer, range(2))
    everything = optimizer.statistics()
    assert everything.steps == 2
    assert everything.step_ms > 0
    # What moves is the state of streamed parameters, and weights and gradients of host ones, with
    # gaps of less than 64 elements behind each slice.
    least = state_bytes(optimizer, "streamed") + 2 * dtype.itemsize * n_host
    assert least <= everything.moved_bytes < least + 64 * 16 * pieces
    for parameter in model.parameters():
        parameter.grad = None
    optimizer.step()
    assert optimizer.statistics().moved_bytes == 0
    model.weights[3].grad = torch.ones_like(model.weights[3])
    optimizer.step()
    assert 0 < optimizer.statistics().moved_bytes <= 4096


@pytest.mark.parametrize(
    ("device_memory", "expected"), [(0, 4), ("32KiB", 4), ("112KiB", 14), ("1MiB", 20)]
)
def test_staging_is_as_large_as_was_asked_for(device_memory: Any, expected: int) -> None:
    """Four slots at least; all of the state, 20 buckets, at most."""
    inner = torch.optim.AdamW(Model(shapes=((20_480,),)).parameters())
    transfer = TransferConfig(bucket_bytes="8KiB")
    optimizer = HybridDeviceOptimizer(inner, transfer=transfer, device_memory=device_memory)
    statistics = optimizer.statistics()
    assert statistics.staging_bytes == expected * 8192
    size = f"{expected * 8192 / (1 << 20):.2f} MiB"
    assert f"device memory for state, slots and scratch: {size}; " in str(statistics)


# --------------------------------------------------------------------------- giving back


def mappings_now() -> set[mmap.mmap]:
    """Host memory that the process has mapped; the collector knows no other objects of mmap."""
    return {each for each in gc.get_objects() if isinstance(each, mmap.mmap)}


def host_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("fsdp_offload-host")]


def have_ended(threads: set[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(10)
    return not any(thread.is_alive() for thread in threads)


@each_lane
def test_close_gives_everything_back_and_may_be_called_again(
    lane: str, arenas: list[weakref.ref[HostRange]]
) -> None:
    mappings, threads = mappings_now(), set(host_threads())
    model, optimizer, twin_model, twin = pair(lane)
    train(model, optimizer, range(2))
    train(twin_model, twin, range(2))
    assert len(mappings_now() - mappings) == {"resident": 0, "host": 2}.get(lane, 1)
    own = set(host_threads()) - threads
    assert len(own) == (1 if lane == "host" else 0)
    assert "closed" not in repr(optimizer)
    optimizer.close()
    optimizer.close()
    assert repr(optimizer).endswith("\nclosed")
    assert have_ended(own)  # it may hold memory until then
    gc.collect()

    assert mappings_now() <= mappings
    assert all(arena() is None or arena()._mapping is None for arena in arenas)
    assert_same(values(model), values(twin_model))
    assert optimizer.statistics().host_arena_bytes == 0


@pytest.mark.parametrize(
    ("lane", "stepped"), [("resident", True), ("streamed", False), ("host", True)]
)
def test_a_wrapper_that_is_dropped_without_close_gives_everything_back(
    lane: str, stepped: bool, arenas: list[weakref.ref[HostRange]]
) -> None:
    mappings, threads = mappings_now(), set(host_threads())
    model = Model()
    inner = torch.optim.AdamW(model.parameters())
    optimizer = wrap(inner, lane, model=model)
    scheduler = LambdaLR(inner, lambda step: 1.0)
    if stepped:
        train(model, optimizer, range(2))
        scheduler.step()
    reference = weakref.ref(optimizer)
    del optimizer, inner, scheduler  # each keeps the others
    gc.collect()

    assert reference() is None
    assert have_ended(set(host_threads()) - threads)
    assert [arena() for arena in arenas] == [None] * len(arenas)
    assert mappings_now() <= mappings
    model.load_state_dict(Model(seed=1).state_dict())  # its hooks are gone, too
    assert not model._load_state_dict_pre_hooks
    assert not model._load_state_dict_post_hooks


def test_a_dropped_wrapper_waits_for_transfers_in_flight_before_it_gives_memory_back() -> None:
    with StreamSimulator("lazy") as simulator:
        model = Model()
        optimizer = wrap(torch.optim.AdamW(model.parameters()), "streamed")
        train(model, optimizer, range(1))
        (d2h,) = (stream for stream in simulator._streams if stream.name == "state:out")
        assert d2h.entries
        del optimizer
        gc.collect()

        assert not d2h.entries


# --------------------------------------------------------------------------- host threads


@pytest.fixture
def kernel_threads(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, int]]:
    """(thread, number of its kernels' threads) of each step that ran on a thread of its own."""
    seen: set[tuple[str, int]] = set()
    step = Shadow.step

    def noted(self: Shadow, *args: Any) -> None:
        thread = threading.current_thread()
        if thread is not threading.main_thread():
            seen.add((thread.name, torch.get_num_threads()))
        step(self, *args)

    monkeypatch.setattr(Shadow, "step", noted)
    return seen


def test_only_the_host_lanes_own_thread_gets_its_number_of_kernel_threads(
    kernel_threads: set[tuple[str, int]],
) -> None:
    before, older = torch.get_num_threads(), set(host_threads())
    wanted = before + 3
    answers: list[int] = []
    ask, done = threading.Event(), threading.Event()

    def older_thread() -> None:
        torch.get_num_threads()
        ask.wait()
        answers.append(torch.get_num_threads())
        done.set()

    threading.Thread(target=older_thread, daemon=True).start()
    model = Model()
    transfer = TransferConfig(bucket_bytes="4KiB", host_threads=wanted)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = HybridDeviceOptimizer(inner, update_on="host", transfer=transfer)
    newer = threading.Thread(target=lambda: answers.append(torch.get_num_threads()))
    newer.start()
    newer.join()
    train(model, optimizer, range(2))
    ask.set()
    done.wait()

    assert len(set(host_threads()) - older) == 1
    assert kernel_threads == {("fsdp_offload-host_0", wanted)}
    assert torch.get_num_threads() == before
    assert answers == [before, before]


def test_one_host_thread_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def build(threads: int, update_on: str) -> None:
        transfer = TransferConfig(host_threads=threads)
        model = Model()
        inner = torch.optim.AdamW(model.parameters())
        HybridDeviceOptimizer(inner, model, update_on=update_on, transfer=transfer)

    with caplog.at_level(logging.WARNING, "fsdp_offload"):
        build(2, "host")
        build(1, "device")
        assert caplog.records == []
        build(1, "host")

    assert len(caplog.records) == 1
    assert "host_threads" in caplog.text


IMPORT = """
import sys
import fsdp_offload
assert "torch" not in sys.modules
assert fsdp_offload.__version__
assert set(fsdp_offload.__all__) <= set(dir(fsdp_offload))
try:
    fsdp_offload.nonsense
except AttributeError as error:
    assert "nonsense" in str(error)
else:
    raise AssertionError
from fsdp_offload import LaneError
assert "torch" not in sys.modules
"""


def test_importing_the_package_does_not_import_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_every_public_name_resolves_and_the_list_is_sorted() -> None:
    assert fsdp_offload.__all__ == sorted(fsdp_offload.__all__)
    for name in fsdp_offload.__all__:
        assert getattr(fsdp_offload, name).__name__.rpartition(".")[2] == name


def test_without_overlap_one_accumulate_serves_every_step() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = HybridDeviceOptimizer(torch.optim.AdamW(model.parameters()), model)
    context = optimizer.accumulate()
    for _ in range(2):
        with context:
            model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    assert optimizer.statistics().steps == 2
    optimizer.close()
