"""Saves: what becomes part of a checkpoint, and what is left where something goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from fsdp_offload import HybridDeviceOptimizer, TransferConfig, checkpoint
from fsdp_offload.checkpoint import export_safetensors
from fsdp_offload.checkpoint.planner import FlatSavePlanner
from fsdp_offload.core.errors import (
    CheckpointError,
    ClosedError,
    ConfigError,
    LaneError,
    OffloadError,
)
from fsdp_offload.optimizer import masters
from fsdp_offload.optimizer.overlap import REORDER_AFTER
from tests.checkpoint.jobs import Ranks
from tests.checkpoint.test_interop import refusal
from tests.fsdp import models
from tests.fsdp.models import check

Pair = tuple[nn.Module, HybridDeviceOptimizer]


def pair_of(model: nn.Module, **options: Any) -> Pair:
    """``model`` and a wrapper that has stepped once."""
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    pair = model, models.wrap(inner, model, **options)
    step(pair)
    return pair


def step(pair: Pair, gradient: float = 1.0) -> None:
    for parameter in pair[0].parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    pair[1].step()
    pair[1].zero_grad()


def layers(*sizes: int) -> nn.Sequential:
    """Square linear layers."""
    return nn.Sequential(*(nn.Linear(size, size) for size in sizes))


def sharded() -> Pair:
    """A small FSDP2 job, the same on all ranks."""
    torch.manual_seed(0)
    model = fully_shard(layers(5, 5), mesh=models.flat_mesh(dist.get_world_size()))
    return pair_of(model)


def values_of(pair: Pair) -> dict[str, Tensor]:
    """Copies of this rank's weights and state."""
    found = {}
    for name, parameter in pair[0].named_parameters():
        found[name] = models.local(parameter).clone()
        for kind, value in pair[1].state[parameter].items():
            found[f"{name}.{kind}"] = models.local(value).clone()
    return found


def check_values(pair: Pair, expected: dict[str, Tensor]) -> None:
    models.check_same_dicts(values_of(pair), expected, "values")


def test_links_are_no_checkpoints_of_their_own(tmp_path: Path) -> None:
    """Neither counted nor followed, wherever they lead."""
    model, run = nn.Linear(2, 2), tmp_path / "run"
    checkpoint.save(tmp_path / "elsewhere" / "old", model)
    checkpoint.save(run / "1", model)
    (run / "best").symlink_to("1")
    (run / "far").symlink_to(tmp_path / "elsewhere" / "old")

    checkpoint.save(run / "2", model, keep_last=2)
    assert {path.name for path in run.iterdir()} == {"1", "2", "best", "far"}
    checkpoint.save(run / "3", model, keep_last=1)

    assert {path.name for path in run.iterdir()} == {"3", "best", "far"}
    assert (run / "best").is_symlink()
    assert checkpoint.load(tmp_path / "elsewhere" / "old", model) == {}


def test_a_save_makes_no_state_in_a_plain_optimizer(tmp_path: Path) -> None:
    """torch's functions make it in a step, so that the next one would correct the bias for two."""
    expected, found, loaded = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
    for each in (found, loaded):
        each.load_state_dict(expected.state_dict())
    for model in (expected, found, loaded):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if model is found:
            checkpoint.save(tmp_path, model, optimizer)
        elif model is loaded:
            checkpoint.load(tmp_path, model, optimizer)
        model(torch.ones(3)).sum().backward()
        optimizer.step()
    for model in (found, loaded):
        assert torch.equal(model.weight, expected.weight)


@pytest.mark.parametrize("later", [False, True])
def test_nothing_is_left_of_a_plan_that_fails(
    tmp_path: Path, later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = mock.Mock(side_effect=ValueError("plans do not fit"))
    monkeypatch.setattr(FlatSavePlanner, "create_global_plan", failing)

    def call() -> None:
        if later:
            checkpoint.async_save(tmp_path / "one", nn.Linear(2, 2)).result()
        else:
            checkpoint.save(tmp_path / "one", nn.Linear(2, 2))

    with pytest.raises(CheckpointError, match="plans do not fit") as caught:
        call()

    assert isinstance(caught.value.__cause__, ValueError)
    assert failing.called
    assert not list(tmp_path.iterdir())


def save_extra(root: Path) -> list[dict[str, Any]]:
    rank, model = dist.get_rank(), layers(300)  # rank 1 has tensors to write too
    checkpoint.save(root / "all", model, extra={"rank": rank})
    checkpoint.save(root / "first", model, extra=None if rank else {"rank": rank})
    checkpoint.save(root / "second", model, extra={"rank": rank} if rank else None)
    return [checkpoint.load(root / name, model) for name in ("all", "first", "second")]


def test_extra_is_that_of_rank_0_alone(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks(2).run(save_extra, tmp_path):
        assert found == [{"rank": 0}, {"rank": 0}, {}]


def save_shards_in_extra(root: Path) -> OffloadError | None:
    model, _ = sharded()
    return refusal(lambda: checkpoint.save(root / "one", model, extra={"ema": model.state_dict()}))


def test_shards_in_extra_are_refused_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    for error in ranks(2).run(save_shards_in_extra, tmp_path):
        assert isinstance(error, ConfigError)
        assert error.what.startswith("extra with a DTensor of shape (")
        assert "full_tensor()" in error.remedy
    assert not list(tmp_path.iterdir())


def save_other_tensors(root: Path) -> list[OffloadError | None]:
    shape = layers(4 + dist.get_rank())
    dtype = layers(4).to((torch.float32, torch.bfloat16)[dist.get_rank()])
    calls = [partial(checkpoint.save, root / "one", model) for model in (shape, dtype)]
    return [refusal(call) for call in calls]


def test_ranks_with_other_tensors_under_one_name_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    for shape, dtype in ranks(2).run(save_other_tensors, tmp_path):
        assert isinstance(shape, ConfigError)
        assert isinstance(dtype, ConfigError)
        assert "model.0.weight of (4, 4) torch.float32 and (5, 5) torch.float32" in str(shape)
        assert "model.0.weight of (4, 4) torch.float32 and (4, 4) torch.bfloat16" in str(dtype)
    assert not list(tmp_path.iterdir())


def save_between_steps(root: Path) -> None:
    """All buckets stay on the device from one step to the next, also over a save."""
    model = models.toy(models.flat_mesh(dist.get_world_size()), dtype=torch.bfloat16)
    transfer = TransferConfig(bucket_bytes="4KiB")
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = models.wrap(
        inner, model, overlap="backward", transfer=transfer, device_memory="1MiB"
    )

    def train(iteration: int) -> int:
        models.backward(model, iteration)
        optimizer.step()
        optimizer.zero_grad()
        return int(optimizer.statistics().fetched_bytes)

    for iteration in range(max(REORDER_AFTER) + 1):
        train(iteration)
    fetched = [train(2)]
    checkpoint.save(root / "one", model, optimizer)
    fetched.append(train(3))
    checkpoint.async_save(root / "two", model, optimizer).result(60)
    fetched.append(train(4))
    export_safetensors(model, root / "export", optimizer=inner, dtype="fp32")
    fetched.append(train(6))
    check(not any(fetched), f"{fetched}")

    checkpoint.save(root / "three", model, optimizer)
    refuse = mock.Mock(side_effect=AssertionError("weights were looked at"))
    with mock.patch.object(masters, "weight_checksums", refuse):
        model.load_state_dict(model.state_dict())
    optimizer.state  # noqa: B018 - the caller may write into it, so all is fetched again
    check(train(7) > 0, "what may have been written was not fetched")


def test_a_save_leaves_the_next_step_as_it_was(ranks: Ranks, size: int, tmp_path: Path) -> None:
    ranks(size).run(save_between_steps, tmp_path)


def unknown_parameters(pair: Pair, root: Path) -> list[Callable[[], Any]]:
    """Rank 1 passes a model that looks like the optimizer's."""
    model, optimizer = (layers(5, 5) if dist.get_rank() else pair[0]), pair[1]
    return [
        lambda: checkpoint.save(root / "new", model, optimizer),
        lambda: checkpoint.async_save(root / "new", model, optimizer).result(60),
        lambda: checkpoint.load(root / "good", model, optimizer),
    ]


def wrong_count(pair: Pair, root: Path) -> list[Callable[[], Any]]:
    return [lambda: checkpoint.save(root / "new", *pair, keep_last=0 if dist.get_rank() else 3)]


def closed(pair: Pair, root: Path) -> list[Callable[[], Any]]:
    if dist.get_rank() == 1:
        pair[1].close()
    return [
        lambda: checkpoint.save(root / "new", *pair),
        lambda: checkpoint.async_save(root / "new", *pair).result(60),
        lambda: checkpoint.load(root / "good", *pair),
    ]


def refused_on_rank_1(
    root: Path, calls: Callable[[Pair, Path], list[Callable[[], Any]]]
) -> list[OffloadError | None]:
    pair = sharded()
    checkpoint.save(root / "good", *pair, extra={"turn": 1})
    found = [refusal(call) for call in calls(pair, root)]
    dist.barrier()
    check([p.name for p in root.iterdir()] == ["good"], f"left behind: {list(root.iterdir())}")
    again = sharded()  # nobody waits for anybody
    check(checkpoint.load(root / "good", *again) == {"turn": 1}, "extra")
    return found


@pytest.mark.parametrize(
    ("calls", "kind", "words"),
    [
        (unknown_parameters, ConfigError, "the model does not"),
        (wrong_count, ConfigError, "keep_last=0"),
        (closed, ClosedError, "HybridDeviceOptimizer: it is closed"),
    ],
)
def test_an_error_of_one_rank_is_raised_on_all(
    ranks: Ranks, tmp_path: Path, calls: Any, kind: type[OffloadError], words: str
) -> None:
    first, second = ranks(2).run(refused_on_rank_1, tmp_path, calls)

    assert len(first) == len(second) >= 1
    for there, here in zip(first, second, strict=True):
        assert type(there) is type(here) is kind
        assert str(there) == f"rank 1: {here}"
        assert words in str(here)


def fail_at_the_end(path: Path) -> tuple[OffloadError | None, ...]:
    """A hook raises when all has been read; then the optimizer fails until a good load."""
    pair = sharded()
    checkpoint.save(path, *pair)
    saved = values_of(pair)
    step(pair, 0.5)

    def hook(*_: Any) -> None:
        if dist.get_rank() == 1:
            raise ValueError("the hook broke")

    handle = pair[1].register_load_state_dict_pre_hook(hook)
    told = refusal(lambda: checkpoint.load(path, *pair))
    unusable = (pair[1].step, lambda: checkpoint.save(path.with_name("new"), *pair))
    failed = [refusal(call) for call in unusable]
    handle.remove()
    checkpoint.load(path, *pair)
    check_values(pair, saved)
    step(pair)
    return told, *failed


def test_a_load_that_one_rank_cannot_take_over_fails_on_all(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks(2).run(fail_at_the_end, tmp_path / "one")

    for told, *failed in results:
        assert isinstance(told, OffloadError)
        assert "the hook broke" in str(told)
        assert [type(error) for error in failed] == [LaneError, LaneError]
    assert "rank 1" in str(results[0][0])


def stage(*others: str) -> Pair:
    """Rank r has module ``stage{r}``; and ``others``."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    pair = pair_of(nn.ModuleDict({n: nn.Linear(4, 4) for n in (f"stage{rank}", *others)}))
    step(pair, float(rank))
    return pair


def lack_a_module(path: Path) -> OffloadError | None:
    """Only the last rank had it when it was saved."""
    saving_pair = stage(*["head"] * dist.get_rank())
    checkpoint.save(path, *saving_pair)
    loading = stage()
    step(loading, -3.0)
    before = values_of(loading)
    refused = refusal(lambda: checkpoint.load(path, *loading))
    check_values(loading, before)
    checkpoint.load(path, *loading, strict=False)
    expected = values_of(saving_pair)
    check_values(loading, {n: v for n, v in expected.items() if not n.startswith("head")})
    return refused


def test_weights_that_no_stage_has_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    for error in ranks(2).run(lack_a_module, tmp_path / "one"):
        assert isinstance(error, CheckpointError)
        assert "this model lacks model.head.bias, model.head.weight." in str(error)
