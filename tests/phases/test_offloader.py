"""Phases in one process, without FSDP2: kinds, policies, use while away, failures."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.optim import Optimizer

from fsdp_offload import HybridDeviceOptimizer, PhaseOffloader, TransferConfig, checkpoint, swap
from fsdp_offload.core.errors import (
    AwayError,
    ClosedError,
    ConfigError,
    DeviceMemoryError,
    HostMemoryError,
    UnsupportedParameterError,
)
from fsdp_offload.core.storage import can_swap
from fsdp_offload.link import address_range, transfer
from fsdp_offload.link.address_range import Chunk
from fsdp_offload.link.block import StorageBlock
from fsdp_offload.link.transfer import Handle
from fsdp_offload.phases import offloader
from tests.away import has_memory
from tests.helpers.compare import assert_same
from tests.phases.twins import failing


class Net(nn.Module):
    """Tied weights, a view as a buffer, a frozen parameter, buffers of two dtypes, a module called
    ``buffer``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.body = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 8))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.register_buffer("corner", self.frozen.data[2:5])
        self.register_buffer("scratch", torch.randn(3), persistent=False)
        self.buffer = nn.ParameterDict({"scratch": torch.randn(3)})

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embed(tokens)) + self.frozen)


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def backward(model: nn.Module, step: int = 0) -> None:
    tokens = torch.randint(11, (5,), generator=torch.Generator().manual_seed(step))
    nn.functional.cross_entropy(model(tokens), tokens).backward()


def train(model: nn.Module, optimizer: Optimizer, steps: range, between: Any = None) -> None:
    for step in steps:
        backward(model, step)
        optimizer.step()
        if between is not None:
            between()
        optimizer.zero_grad()


def tensors_of(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def state_of(optimizer: Optimizer) -> list[Tensor]:
    values = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in values if isinstance(value, Tensor)]


def storages_of(tensors: list[Tensor]) -> dict[int, int]:
    """Bytes by storage."""
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}


def all_present(tensors: list[Tensor]) -> bool:
    return all(map(has_memory, tensors))


def all_away(tensors: list[Tensor]) -> bool:
    return not any(map(has_memory, tensors))


ADDRESSES = pytest.mark.parametrize(
    "keep_addresses",
    [False, pytest.param(True, marks=pytest.mark.skipif(not can_swap(), reason="no CPU swap"))],
    ids=["default", "keep"],
)


def owners(tensor: Tensor | None) -> int:
    """Of its storage."""
    assert tensor is not None
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


# ---------------------------------------------------------------------- out and back


@pytest.mark.parametrize("make", [adamw, sgd])
def test_training_with_a_phase_after_every_step_has_the_same_bits(
    make: Callable[[Any], Optimizer],
) -> None:
    plain, moved = net(), net()
    first, second = make(plain.parameters()), make(moved.parameters())
    train(plain, first, range(6))
    phases = PhaseOffloader(moved, second)
    objects = [id(t) for t in tensors_of(moved)]

    def switch() -> None:
        with phases.away():
            assert all_away(tensors_of(moved))
            assert all_away(state_of(second))

    train(moved, second, range(6), switch)
    assert_same(moved.state_dict(), plain.state_dict())
    assert_same(second.state_dict(), first.state_dict())
    assert [id(t) for t in tensors_of(moved)] == objects
    assert moved.head.weight is moved.embed.weight
    assert moved.corner.data_ptr() == moved.frozen.data_ptr() + 8
    assert phases.statistics().cycles == 6


def test_each_storage_moves_once_and_a_second_call_does_nothing() -> None:
    model = net()
    before, n_bytes = (
        copy.deepcopy(model.state_dict()),
        sum(storages_of(tensors_of(model)).values()),
    )
    phases = PhaseOffloader(model)
    phases.reload()
    first = phases.offload()
    assert first.n_bytes == n_bytes
    assert phases.offload() is first
    assert phases.is_away
    phases.reload()
    assert phases.reload().is_done()
    assert not phases.is_away
    assert_same(model.state_dict(), before)
    statistics = phases.statistics()
    assert statistics.cycles == 1
    assert statistics.offloaded["params"].n_bytes == n_bytes
    assert statistics.reloaded["params"].n_bytes == n_bytes
    assert statistics.offloaded["grads"].n_bytes == 0
    assert statistics.offload_seconds > 0
    assert "PhaseOffloader: params" in statistics.host_bytes_by_holder
    shown = rf"{n_bytes} bytes in \S+ s, \S+ GB/s"
    assert re.fullmatch(rf"out: {shown}; back: {shown}; .* reserved on the host", str(statistics))


@ADDRESSES
def test_freed_bytes_are_what_the_driver_has_more(
    keep_addresses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    phases, tensors = PhaseOffloader(model, keep_addresses=keep_addresses), tensors_of(model)

    def free(device: torch.device) -> int:
        return -sum({t.data_ptr(): t.nbytes for t in tensors if has_memory(t)}.values())

    monkeypatch.setattr(transfer, "free_bytes", free)
    before = free(torch.device("cpu"))
    with phases.away():
        assert phases.statistics().freed_bytes == -before > 0


@pytest.mark.parametrize(
    ("params", "grads", "state"),
    [("save", "drop", "save"), ("keep", "save", "keep"), ("save", "keep", "save")],
)
def test_policies_move_what_they_name(params: str, grads: str, state: str) -> None:
    model = net()
    optimizer = sgd(model.parameters())
    phases = PhaseOffloader(model, optimizer, params=params, grads=grads, state=state)
    train(model, optimizer, range(2))
    backward(model)
    gradients = [p.grad for p in model.parameters()]
    values = [None if g is None else g.clone() for g in gradients]
    moments = [s["momentum_buffer"] for s in optimizer.state.values()]
    live = [g for g in gradients if g is not None]
    phases.offload()
    assert (all_away if params == "save" else all_present)(tensors_of(model))
    assert (all_away if state == "save" else all_present)(moments)
    if grads == "drop":
        assert all(p.grad is None for p in model.parameters())
    else:
        assert (all_away if grads == "save" else all_present)(live)
    phases.reload()
    if grads != "drop":
        assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
        assert_same([p.grad for p in model.parameters()], values)


def test_saved_gradients_may_be_dropped_while_away_and_are_not_held() -> None:
    model = nn.Linear(4, 4)
    phases = PhaseOffloader(model, grads="save")
    for keeps in (True, False):
        model.weight.grad = torch.ones(4, 4)
        gradient = model.weight.grad
        phases.offload()
        if not keeps:
            model.zero_grad()
        phases.reload(wait=False)
        assert model.weight.grad is (gradient if keeps else None)
        model.zero_grad()
        assert owners(gradient) == owners(torch.empty(1))


def test_away_ends_with_a_reload() -> None:
    model = net()
    before, phases = copy.deepcopy(model.state_dict()), PhaseOffloader(model)
    with pytest.raises(KeyError), phases.away():
        raise KeyError("inside")
    assert not phases.is_away
    with phases.away():
        with phases.away():
            assert phases.is_away
        assert phases.is_away  # the inner one leaves that to the outer one
    with phases.away():
        phases.close()
    assert_same(model.state_dict(), before)


def test_host_memory_is_taken_once_and_given_back(arenas: Any) -> None:
    model = net()
    optimizer = adamw(model.parameters())
    train(model, optimizer, range(1))
    phases = PhaseOffloader(model, optimizer)
    held = phases.statistics().host_bytes
    assert sum(storages_of([*tensors_of(model), *state_of(optimizer)]).values()) <= held
    train(model, optimizer, range(1, 30), lambda: (phases.offload(), phases.reload()))
    assert phases.statistics().host_bytes == held
    assert len(arenas) == 1
    phases.offload()
    shown = model.state_dict()
    phases.close()
    phases.close()
    assert not phases.is_away
    assert phases.statistics().host_bytes == 0
    with pytest.raises(ClosedError):
        phases.offload()
    del shown
    gc.collect()
    assert all(arena() is None or arena()._mapping is None for arena in arenas)
    train(model, optimizer, range(30, 32))


def test_what_is_made_or_grows_later_moves_too(arenas: Any) -> None:
    model = net()
    optimizer = adamw(model.parameters())
    phases = PhaseOffloader(model, optimizer)
    train(model, optimizer, range(1))
    with phases.away():
        assert all_away([s["exp_avg"] for s in optimizer.state.values()])
    for numel in (5, 9, 4000, 7):
        model.register_buffer("late", torch.randn(numel))
        before = copy.deepcopy(model.state_dict())
        with phases.away():
            assert_same(model.state_dict(), before)
        assert_same(model.state_dict(), before)
    held = phases.statistics().host_bytes
    assert held == sum(arena().n_bytes for arena in arenas if arena() is not None)
    everything = storages_of([*tensors_of(model), *state_of(optimizer)])
    assert held <= sum(n_bytes + 64 for n_bytes in everything.values()) + 4000 * 4


def test_state_that_was_replaced_or_is_a_kept_gradient_stays() -> None:
    model = net()
    optimizer = sgd(model.parameters())
    train(model, optimizer, range(1))
    phases = PhaseOffloader(model, optimizer, grads="keep")
    (parameter, kept), (_, replaced), *others = optimizer.state.items()
    parameter.grad = kept["momentum_buffer"]
    old = replaced["momentum_buffer"]
    replaced["momentum_buffer"] = old + 1
    before = copy.deepcopy(optimizer.state_dict()["state"])
    with phases.away():
        assert all_present([kept["momentum_buffer"], old])
        assert owners(old) == owners(torch.empty(1))  # its holder decides how long
        assert all_away([replaced["momentum_buffer"]])
        assert all_away([each["momentum_buffer"] for _, each in others])
        assert_same(optimizer.state_dict()["state"], before)
    assert_same(optimizer.state_dict()["state"], before)


def hooks_of(optimizer: Optimizer) -> list[int]:
    names = ("step_pre", "step_post", "state_dict_post", "load_state_dict_pre")
    return [len(getattr(optimizer, f"_optimizer_{name}_hooks")) for name in names]


def test_hooks_and_host_memory_go_with_the_offloader(arenas: Any) -> None:
    model = net()
    optimizer = adamw(model.parameters())
    phases = PhaseOffloader(model, optimizer)
    assert all(hooks_of(optimizer))
    phases.offload()
    phases.reload()
    copy.deepcopy((model, optimizer))
    del phases
    gc.collect()
    assert not any(hooks_of(optimizer))
    assert [arena() for arena in arenas] == [None]
    PhaseOffloader(model, optimizer).close()
    assert not any(hooks_of(optimizer))
    for (name, module), twin in zip(model.named_modules(), net().modules(), strict=True):
        assert module.__dict__.keys() == twin.__dict__.keys(), name
        assert not module._forward_pre_hooks
        assert not module._state_dict_hooks
        assert not module._load_state_dict_pre_hooks


def test_memory_that_is_away_outlives_the_offloader_but_not_the_model(arenas: Any) -> None:
    model = net()
    optimizer = adamw(model.parameters())
    train(model, optimizer, range(1))
    before = copy.deepcopy(model.state_dict())
    PhaseOffloader(model, optimizer).offload()
    gc.collect()
    assert_same(model.state_dict(), before)
    with pytest.raises(AwayError):
        model(torch.arange(5))
    del model, optimizer
    gc.collect()
    assert [arena() for arena in arenas] == [None]


@ADDRESSES
def test_repr_says_what_is_where(keep_addresses: bool) -> None:
    model = nn.Linear(512, 512, bias=False)
    optimizer = sgd(model.parameters())
    model(torch.ones(512)).sum().backward()
    optimizer.step()
    phases = PhaseOffloader(model, optimizer, grads="keep", keep_addresses=keep_addresses)
    here = "present: params 1.00 MiB, grads 1.00 MiB, state 1.00 MiB; 2.00 MiB reserved on the host"
    assert repr(phases) == f"PhaseOffloader(cpu, {here})"
    handle = phases.offload(wait=False)
    assert repr(handle) == "Handle(params 1.00 MiB, state 1.00 MiB: copied; call wait())"
    handle.wait()
    assert re.fullmatch(r"Handle\(.* MiB: done in \d+\.\d\d s\)", repr(handle))
    handle.freed_bytes = 1 << 30
    assert repr(handle).endswith(" s, freed 1.00 GiB)")
    away = "away: params 1.00 MiB, state 1.00 MiB; on the device: grads 1.00 MiB; 2.00 MiB"
    assert repr(phases) == f"PhaseOffloader(cpu, {away} reserved on the host)"
    phases.close()
    assert repr(phases) == "PhaseOffloader(cpu, closed)"
    assert repr(Handle()) == "Handle(nothing: done in 0.00 s)"


# ---------------------------------------------------------------------- use while away

Away = tuple[Net, Optimizer, PhaseOffloader]


@pytest.fixture
def away() -> Away:
    model = net()
    optimizer = adamw(model.parameters())
    train(model, optimizer, range(2))
    phases = PhaseOffloader(model, optimizer)
    phases.offload()
    return model, optimizer, phases


USES: dict[str, Callable[[Net, Optimizer], object]] = {
    "forward": lambda m, o: m(torch.arange(5)),
    "part": lambda m, o: m.body[2](torch.zeros(1, 6)),
    "step": lambda m, o: o.step(),
    "load": lambda m, o: m.load_state_dict(net(1).state_dict()),
    "load of a part": lambda m, o: m.body.load_state_dict(net(1).body.state_dict()),
    "load through torch": lambda m, o: set_model_state_dict(m, net(1).state_dict()),
    "optimizer load": lambda m, o: o.load_state_dict(o.state_dict()),
}


@pytest.mark.parametrize("use", USES)
def test_use_while_away_raises_and_harms_nothing(use: str, away: Away) -> None:
    model, optimizer, phases = away
    before = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(AwayError, match="Remedy"):
        USES[use](model, optimizer)
    assert phases.is_away
    phases.reload()
    assert_same((model.state_dict(), optimizer.state_dict()), before)
    USES[use](model, optimizer)


@ADDRESSES
def test_a_checkpoint_is_not_loaded_while_away(tmp_path: Path, keep_addresses: bool) -> None:
    model = net()
    optimizer = adamw(model.parameters())
    train(model, optimizer, range(2))
    phases = PhaseOffloader(model, optimizer, keep_addresses=keep_addresses)
    checkpoint.save(tmp_path, model, optimizer)
    before = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    phases.offload()
    for arguments in ((model,), (model, optimizer), (net(), optimizer)):
        with pytest.raises(AwayError, match=r"checkpoint\.load\(\)"):
            checkpoint.load(tmp_path, *arguments)
    phases.reload()
    assert_same((model.state_dict(), optimizer.state_dict()), before)
    checkpoint.load(tmp_path, model, optimizer)
    assert_same((model.state_dict(), optimizer.state_dict()), before)


def test_torch_makes_no_state_while_away(tmp_path: Path) -> None:
    """It would leave a rate of 0, and gradients, as its first step is refused."""
    model = net()
    optimizer = adamw(model.parameters())
    with PhaseOffloader(model, optimizer).away():
        with pytest.raises(AwayError, match=r"save or load before the first step\(\) of AdamW"):
            get_optimizer_state_dict(model, optimizer)
        checkpoint.save(tmp_path, model, optimizer)  # it needs no state
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_refused_first_step_of_a_warm_up_drops_no_gradient() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    model(torch.ones(4)).sum().backward()
    phases = PhaseOffloader(model, optimizer, params="keep", grads="keep")
    with phases.away(), pytest.raises(AwayError):
        optimizer.step()
    assert model.weight.grad is not None


def test_copies_of_a_model_that_is_away_are_refused(away: Away) -> None:
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(AwayError, match="of a model"):
            copied(away[0].body)


def test_two_offloaders_of_one_model(away: Away) -> None:
    """The second has nothing to move; both have to be reloaded."""
    model, optimizer, phases = away
    other = PhaseOffloader(model, optimizer)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    assert other.offload().n_bytes == 0
    phases.reload()
    with pytest.raises(AwayError):
        model(torch.arange(5))
    other.reload()
    assert_same((model.state_dict(), optimizer.state_dict()["state"]), before)
    train(model, optimizer, range(2, 3))
    with other.away():
        assert all_away(tensors_of(model))


def test_a_forked_process_is_refused() -> None:
    phases = PhaseOffloader(net())
    phases.offload()
    child = os.fork()
    if child == 0:
        try:
            phases.reload()
        except ClosedError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    phases.reload()


# ---------------------------------------------------------------------- state dicts


def test_state_dict_while_away_is_in_host_memory(away: Away) -> None:
    model, optimizer, phases = away
    shown, state = model.state_dict(), optimizer.state_dict()
    part = model.body.state_dict(prefix="x.")
    through_dcp = get_model_state_dict(model)
    assert all_present([*shown.values(), *through_dcp.values()])
    assert shown["embed.weight"].data_ptr() == shown["head.weight"].data_ptr()
    assert model.state_dict(keep_vars=True)["frozen"] is model.frozen
    values = copy.deepcopy((shown, state, part, through_dcp))
    saved = io.BytesIO()
    torch.save(shown["corner"], saved)  # its bytes and its storage's, not those of the whole arena
    assert len(saved.getvalue()) < 4096
    assert all_away(tensors_of(model))
    phases.reload()
    assert_same(values[0], model.state_dict())
    assert_same(values[1], optimizer.state_dict())
    assert_same(values[2], model.body.state_dict(prefix="x."))
    assert_same(values[3], get_model_state_dict(model))


class Pair(NamedTuple):
    first: Tensor
    others: list[Tensor]


def test_nested_state_is_in_host_memory_too() -> None:
    model = net()
    optimizer = sgd(model.parameters())
    made = OrderedDict(pair=Pair(torch.ones(9), [torch.zeros(5)]))
    optimizer.state[model.frozen] = {"nested": made}
    before = copy.deepcopy(optimizer.state_dict())
    with PhaseOffloader(model, optimizer).away():
        assert all_away([made["pair"].first, *made["pair"].others])
        assert_same(optimizer.state_dict(), before)


def test_state_dict_hooks_of_others_see_values() -> None:
    model, sums = net(), []

    def add(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        sums.append(sum(v.sum() for name, v in state.items() if name.startswith(prefix)))

    model.body.register_state_dict_post_hook(add)
    with PhaseOffloader(model).away():
        model.state_dict()
    model.state_dict()
    assert_same(sums[0], sums[1])


def test_what_is_written_into_a_state_dict_comes_back(away: Away) -> None:
    model, optimizer, phases = away
    other = copy.deepcopy(net(5).state_dict())
    for name, value in model.state_dict().items():
        value.copy_(other[name])
    parameter, states = next(iter(optimizer.state)), optimizer.state_dict()["state"]
    next(iter(states.values()))["exp_avg"].fill_(7)
    assert all_away(tensors_of(model))
    phases.reload()
    assert_same(model.state_dict(), other)
    assert bool((optimizer.state[parameter]["exp_avg"] == 7).all())


def test_an_export_while_away(away: Away, tmp_path: Path) -> None:
    model, _, phases = away
    checkpoint.export_safetensors(model, tmp_path / "away")
    phases.reload()
    checkpoint.export_safetensors(model, tmp_path / "here")
    first, second = (tmp_path / name / "model.safetensors" for name in ("away", "here"))
    assert first.read_bytes() == second.read_bytes()


def test_a_sparse_buffer_stays() -> None:
    model: Any = nn.Linear(4, 4)
    model.register_buffer("edges", (torch.eye(4) * 3).to_sparse())
    phases, edges = PhaseOffloader(model), model.edges
    expected = {name: each.to_dense().clone() for name, each in model.state_dict().items()}
    with phases.away():
        assert all_away([model.weight])
        shown = {name: each.to_dense().clone() for name, each in model.state_dict().items()}
    assert model.edges is edges
    back = {name: each.to_dense() for name, each in model.state_dict().items()}
    assert_same([shown, back], [expected, expected])


# ---------------------------------------------------------------------- failures


def test_host_memory_short_changes_nothing() -> None:
    model = net()
    optimizer = adamw(model.parameters())
    with pytest.raises(HostMemoryError, match=r"is 100 bytes.*offload less"):
        PhaseOffloader(model, transfer=TransferConfig(host_memory="100B"))
    held = sum(t.untyped_storage().nbytes() + 64 for t in tensors_of(model))
    phases = PhaseOffloader(model, optimizer, transfer=TransferConfig(host_memory=f"{held}B"))
    train(model, optimizer, range(1))
    with pytest.raises(HostMemoryError, match=rf"host_memory is {held} bytes, of which \d+ bytes"):
        phases.offload()
    assert not phases.is_away
    assert all_present(tensors_of(model))
    train(model, optimizer, range(1, 2))


BLOCKS = {False: StorageBlock, True: Chunk}


@pytest.fixture(params=["plain", "hybrid"])
def trained(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> tuple[nn.ParameterList, Optimizer]:
    """A job that moves in several batches and chunks."""
    monkeypatch.setattr(transfer, "BATCH_BYTES", 1 << 20)
    monkeypatch.setattr(transfer, "AHEAD_BYTES", 2 << 20)
    monkeypatch.setattr(address_range, "CHUNK_BYTES", 1 << 19)
    model = nn.ParameterList([nn.Parameter(torch.randn(n)) for n in (9, 300_000, 600_000, 5)])
    optimizer = sgd(model.parameters())
    if request.param == "hybrid":
        optimizer = HybridDeviceOptimizer(optimizer, model, offload_fraction=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def everything(model: nn.Module, optimizer: Optimizer) -> Any:
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


@pytest.mark.parametrize(
    ("method", "at"), [("view", 0), ("view", 5), ("restore", 0), ("restore", 5)]
)
@ADDRESSES
def test_what_cannot_be_reloaded_stays_away(
    trained: Any, at: int, method: str, keep_addresses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each of the copies back, and each time that memory is taken; a later call brings all."""
    model, optimizer = trained
    before = everything(model, optimizer)
    phases = PhaseOffloader(model, optimizer, keep_addresses=keep_addresses)
    phases.offload()
    block = BLOCKS[keep_addresses]
    for _ in range(2):
        with monkeypatch.context() as patch:
            error = torch.OutOfMemoryError("taken")
            patch.setattr(block, method, failing(getattr(block, method), at, error))
            with pytest.raises(DeviceMemoryError, match=r"reload of \d+ bytes: .*taken"):
                phases.reload()
        assert phases.is_away
        assert all_away(tensors_of(model))
        assert_same(everything(model, optimizer), before)
    phases.reload()
    assert_same(everything(model, optimizer), before)
    optimizer.step()


@pytest.mark.parametrize("at", [0, 5])
@ADDRESSES
def test_what_cannot_be_offloaded_stays(
    trained: Any, at: int, keep_addresses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever copy out fails."""
    model, optimizer = trained
    before = everything(model, optimizer)
    phases = PhaseOffloader(model, optimizer, keep_addresses=keep_addresses)
    block = BLOCKS[keep_addresses]
    with monkeypatch.context() as patch:
        patch.setattr(block, "view", failing(block.view, at, ZeroDivisionError()))
        with pytest.raises(ZeroDivisionError):
            phases.offload()
    assert not phases.is_away
    assert all_present(tensors_of(model))
    assert_same(everything(model, optimizer), before)
    with phases.away():
        assert_same(everything(model, optimizer), before)
    optimizer.step()


def test_memory_that_torch_does_not_own_stays_or_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Linear(2, 2)
    model.weight.data = torch.frombuffer(bytearray(16), dtype=torch.float32).view(2, 2)
    phases = PhaseOffloader(model)
    with phases.away():  # no device: nothing is lost by leaving it
        assert all_present([model.weight])
        assert all_away([model.bias])
    parts = [("", Tensor())]

    class OnDevice:
        device = torch.device("cuda", 0)
        resizable = staticmethod(lambda: False)
        nbytes = staticmethod(lambda: 16)
        _cdata = 1

    monkeypatch.setattr(parts[0][1], "untyped_storage", OnDevice, raising=False)
    monkeypatch.setattr(offloader.dtensor, "plain_tensors", lambda tensor: parts)
    monkeypatch.setattr(phases._backend, "device", OnDevice.device)
    with pytest.raises(UnsupportedParameterError, match=r"weight.*clone\(\)"):
        phases.offload()


class Outer(Optimizer):
    """Does not call ``Optimizer.__init__``."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.param_groups = inner, inner.param_groups


def test_wrong_arguments() -> None:
    choices = (
        {"params": "drop"},
        {"grads": "rebuild"},
        {"keep_addresses": "state"},
        {"keep_addresses": 1},
        {"optimizer": "adamw"},
    )
    for wrong in choices:
        with pytest.raises(ConfigError):
            PhaseOffloader(net(), **wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"PhaseOffloader .*did you mean 'keep_addresses'"):
        PhaseOffloader(net(), keep_address=True)
    with pytest.raises(ConfigError, match="nothing to move"):
        PhaseOffloader(nn.ReLU())
    model = net()
    with pytest.raises(ConfigError, match=r"hooks.*pass the optimizer that it wraps"):
        PhaseOffloader(model, Outer(sgd(model.parameters())))
    phases = PhaseOffloader(model)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ConfigError):
            copied(phases)


def test_an_optimizer_that_was_wrapped_later_is_refused() -> None:
    """The wrapper's state would stay on the device."""
    model = net()
    optimizer = sgd(model.parameters())
    phases = PhaseOffloader(model, optimizer)
    wrapper = HybridDeviceOptimizer(optimizer, model)
    with pytest.raises(ConfigError, match="wrap first"):
        phases.offload()
    assert not phases.is_away
    with PhaseOffloader(model, wrapper).away():
        pass


# ---------------------------------------------------------------------- swap


def test_swap_reuses_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = net(1), net(2)
    before = copy.deepcopy((first.state_dict(), second.state_dict()))
    a, b = PhaseOffloader(first), PhaseOffloader(second)
    b.offload()
    restore = StorageBlock.restore
    tensors = [*tensors_of(first), *tensors_of(second)]
    limit = sum(storages_of(tensors).values())

    def short(block: StorageBlock) -> None:
        if sum(storages_of(tensors).values()) + block.n_bytes > limit:
            raise torch.OutOfMemoryError("full")
        restore(block)

    monkeypatch.setattr(StorageBlock, "restore", short)
    for _ in range(3):
        out, in_ = swap(out=a, in_=b)
        assert out.n_bytes == in_.n_bytes > 0
        assert (a.is_away, b.is_away) == (True, False)
        a, b = b, a
    swap(out=b, in_=a, wait=False)
    a.offload()
    b.reload()
    monkeypatch.setattr(StorageBlock, "restore", failing(restore, 2, torch.OutOfMemoryError("x")))
    monkeypatch.setattr(Handle, "release_next", lambda handle: False)
    with pytest.raises(DeviceMemoryError):
        swap(out=b, in_=a)
    assert (a.is_away, b.is_away) == (True, True)
    monkeypatch.undo()
    b._transfer.handle.wait()
    a.reload()
    b.reload()
    assert_same((first.state_dict(), second.state_dict()), before)
    a.close()
    with pytest.raises(ClosedError):
        swap(out=b, in_=a)
    assert not b.is_away
