"""What packed optimizer state is: torch's keys, the live memory, no collective and no copy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fsdp_offload.checkpoint.state import OptimizerState, collect, pack
from fsdp_offload.core.errors import OffloadError, StateDictError
from tests.checkpoint import jobs
from tests.checkpoint.jobs import BF16, FLAT, Ranks, Variant
from tests.checkpoint.test_interop import refusal
from tests.fsdp import models
from tests.fsdp.models import check, check_same, local
from tests.helpers.own_optimizers import Own


def compare_with_torch(variant: Variant) -> list[str]:
    job = jobs.trained(variant)
    packed = pack(*job.pair)
    expected = get_optimizer_state_dict(*job.pair, options=FLAT)
    check(list(packed) == sorted(packed), "not sorted")
    models.check_same_dicts(packed, expected, "packed")
    return list(packed)


@pytest.mark.parametrize("variant", [Variant(), Variant(dtype=BF16), Variant(mesh="tp")], ids=str)
def test_keys_and_values_are_those_of_torch_on_all_ranks(ranks: Ranks, variant: Variant) -> None:
    """Also where shards are empty, and for parameters that never had a gradient."""
    keys = ranks(4).run(compare_with_torch, variant)

    assert all(each == keys[0] for each in keys)
    last = "up.bias" if variant.mesh == "tp" else "blocks.1.up.bias"
    assert {f"state.{last}.{name}" for name in ("step", "exp_avg", "exp_avg_sq")} <= {*keys[0]}


def look_at_memory(dtype: torch.dtype) -> int:
    job = jobs.trained(Variant(dtype=dtype))
    live = {
        local(value).data_ptr()
        for record in job.optimizer._updates.reserved.params
        for value in record.tensors.values()
        if value.numel()
    }
    packed, again = (pack(*job.pair) for _ in range(2))
    empty = 0
    for key, value in packed.items():
        check_same(again[key], value, f"{key}, packed twice")
        if not isinstance(value, DTensor):
            continue
        piece, empty = local(value), empty + (local(value).numel() == 0)
        check(local(again[key]).data_ptr() == piece.data_ptr(), f"{key} moved")
        check(piece.numel() == 0 or piece.data_ptr() in live, f"{key} is a copy")
        check(piece.storage_offset() == 0, f"{key} at offset {piece.storage_offset()}")
        size, needed = piece.untyped_storage().nbytes(), piece.numel() * piece.itemsize
        check(size == needed, f"{key}: {size} bytes of storage under {needed}")
    return empty


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_values_are_the_live_state_in_storages_of_its_size(
    ranks: Ranks, dtype: torch.dtype
) -> None:
    empty = ranks(4).run(look_at_memory, dtype)

    assert empty[0] == 0
    assert empty[3] > 0, "no shard was empty"


def pack_factored() -> OffloadError | None:
    """A class that reads its shard: torch's own Adafactor does not step on DTensors."""
    model = fully_shard(nn.Linear(6, 8), mesh=models.flat_mesh(2))
    optimizer = models.wrap(LocalRows(model.parameters()), model)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return refusal(lambda: pack(model, optimizer))


class LocalRows(Own):
    """A mean per row of this rank's shard."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state.setdefault("row", local(p).new_zeros(len(local(p)))).add_(1.0)


def test_state_of_a_shard_that_is_not_cut_like_it_is_refused(ranks: Ranks) -> None:
    for error in ranks(2).run(pack_factored):
        assert isinstance(error, StateDictError)
        assert "'row'" in error.what
        assert "gather" in error.remedy


def wrapped_by_torch() -> nn.Module:
    """With what other tools put between the names of modules."""
    inner = nn.Sequential(nn.Linear(4, 4), checkpoint_wrapper(nn.Linear(4, 4)))
    inner[0] = torch.compile(inner[0], backend="eager")
    return torch.compile(inner, backend="eager")


def test_names_are_those_that_torch_saves() -> None:
    model = wrapped_by_torch()
    optimizer = models.wrap(torch.optim.AdamW(model.parameters()), model)
    packed = pack(model, optimizer)

    assert "_orig_mod.0._orig_mod.weight" in dict(model.named_parameters())
    assert packed.keys() == get_optimizer_state_dict(model, optimizer, options=FLAT).keys()
    assert {"state.0.weight.step", "state.1.weight.step"} <= packed.keys()


def test_parts_of_a_pipeline_are_packed_together() -> None:
    """Under the same names as with a plain optimizer."""
    parts = [nn.Sequential(nn.Linear(3, 3)), nn.ModuleDict({"last": nn.Linear(3, 1)})]
    both = [parameter for part in parts for parameter in part.parameters()]
    packed = pack(parts, torch.optim.AdamW(both, fused=False, foreach=False))
    ours = models.wrap(torch.optim.AdamW(both, foreach=False), parts)

    assert packed.keys() == pack(parts, ours).keys()
    assert {"state.0.weight.step", "state.last.weight.step"} <= packed.keys()


def left_to_plan() -> list[str]:
    job = jobs.trained(Variant(dtype=BF16))
    state = collect([job.model], job.optimizer, None)
    optim = {k.removeprefix("optim."): v for k, v in state.items() if k.startswith("optim.")}
    return [key for key, value in optim.items() if not isinstance(value, DTensor)]


def test_a_module_named_state_keeps_its_options() -> None:
    """Where another parameter has its name without ``state.``, and another first rank."""
    model = nn.ModuleDict({"state": nn.Linear(2, 2, bias=False), "up": nn.Linear(2, 2)})
    model.register_parameter("weight", nn.Parameter(torch.ones(2)))
    optimizer = torch.optim.AdamW(model.parameters())

    with mock.patch("fsdp_offload.core.dtensor.is_first", lambda p: p is not model.weight):
        keys = collect([model], optimizer, None)

    assert "optim.param_groups.state.weight.lr" in keys
    assert "optim.param_groups.weight.lr" not in keys


def test_options_and_step_counts_are_planned_by_one_rank(ranks: Ranks) -> None:
    """All ranks have the same, and plans travel to the coordinator."""
    first, second = ranks(2).run(left_to_plan)

    assert {key.rpartition(".")[2] for key in first} >= {"lr", "betas", "step"}
    assert second == []


@contextlib.contextmanager
def watched(calls: list[str]) -> Iterator[None]:
    """Note collectives of objects; all that is sent goes over one gloo group of its own."""

    def over(group: Any, name: str) -> None:
        check(group is not None and group is not dist.group.WORLD, f"{name} over {group}")
        check(dist.get_backend(group) == "gloo", f"{name} not over gloo")

    def noted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            over(kwargs.get("group"), name)
            calls.append(name)
            return real(*args, **kwargs)

        return call

    def checked(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: Any, *args: Any) -> Any:
            over(group, name)
            return real(group, *args)

        return call

    with contextlib.ExitStack() as stack:
        for name in ("gather_object", "scatter_object_list", "broadcast_object_list",
                     "all_gather_object", "new_group"):  # fmt: skip
            for owner in (dist, dist.distributed_c10d):
                patch = mock.patch.object(owner, name, noted(name, getattr(owner, name)))
                stack.enter_context(patch)
        for name in ("allgather", "gather", "scatter", "broadcast", "allreduce", "send", "recv"):
            real = getattr(dist.ProcessGroup, name)
            stack.enter_context(mock.patch.object(dist.ProcessGroup, name, checked(name, real)))
        yield


def list_collectives(path: Path) -> dict[str, list[str]]:
    job = jobs.trained(Variant())
    jobs.checkpoint.save(path / "first", *job.pair)  # makes the group
    found: dict[str, list[str]] = {"pack": [], "save": [], "async_save": [], "load": []}
    actions: dict[str, Callable[[], Any]] = {
        "pack": lambda: OptimizerState(*job.pair).load_state_dict(pack(*job.pair)),
        "save": lambda: jobs.checkpoint.save(path / "second", *job.pair),
        "async_save": lambda: jobs.checkpoint.async_save(path / "third", *job.pair).result(),
        "load": lambda: jobs.checkpoint.load(path / "second", *job.pair),
    }
    for name, act in actions.items():
        with watched(found[name]):
            act()
    return found


def test_saves_and_loads_issue_few_collectives_of_objects(ranks: Ranks, tmp_path: Path) -> None:
    """The documentation states these."""
    plan = ["gather_object", "scatter_object_list"]
    for found in ranks(2).run(list_collectives, tmp_path):
        assert found == {
            "pack": [],
            "save": [*plan, "gather_object", "broadcast_object_list"],
            "async_save": [*plan, "gather_object", "broadcast_object_list"],
            "load": [*plan, "all_gather_object"],
        }
