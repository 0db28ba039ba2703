"""``shard``: what becomes an FSDP2 module, what is refused, and the bits of the plain module."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import fsdp_offload
from fsdp_offload import ConfigError, HybridDeviceOptimizer, UnsupportedParameterError, checkpoint
from tests.helpers.compare import assert_same
from tests.helpers.ranks import RankPool
from tests.helpers.scripts import Launch

WIDTH, STEPS = 16, 4


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * sum(expert(self.norm(x)).tanh() for expert in self.experts)


class Model(nn.Module):
    """A head tied to the embedding, and a frozen parameter of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.shift = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.head = nn.Linear(WIDTH, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.shift)


def sharded(model: nn.Module) -> list[str]:
    return [name for name, each in model.named_modules() if isinstance(each, FSDPModule)]


def train(
    model: nn.Module, optimizer: Any, *, clip: bool = True, steps: int = STEPS
) -> list[float]:
    losses = []
    for step in range(steps):
        tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(step))
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


# --------------------------------------------------------------------------- bits


def norms_in_fp32(model: Model) -> None:
    model.bfloat16()
    for block in model.blocks:
        block.norm.float()


@pytest.mark.parametrize("cast", [Model.float, Model.bfloat16, norms_in_fp32])
@pytest.mark.parametrize("overlap", ["step", "forward", "backward", None])
def test_bits_are_those_of_the_plain_module(
    cast: Callable[[Model], object], overlap: str | None
) -> None:
    plain = Model()
    cast(plain)
    mine = copy.deepcopy(plain)
    assert fsdp_offload.shard(mine) is mine
    optimizer: Any = adamw(mine)
    if overlap:
        optimizer = HybridDeviceOptimizer(optimizer, mine, overlap=overlap, master_weights=False)
    clip = overlap != "backward"
    assert train(mine, optimizer, clip=clip) == train(plain, adamw(plain), clip=clip)
    if overlap:
        optimizer.synchronize()
    assert mine.head.weight is mine.embed.weight
    assert_same([*mine.parameters(), *mine.buffers()], [*plain.parameters(), *plain.buffers()])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's own
def test_compiled_blocks_train() -> None:
    plain = Model()
    mine = copy.deepcopy(plain)
    for block in mine.blocks:
        block.compile(backend="aot_eager")
    fsdp_offload.shard(mine)
    optimizer = HybridDeviceOptimizer(adamw(mine), mine)
    torch.testing.assert_close(train(mine, optimizer), train(plain, adamw(plain)))


def load_an_old_state_dict(offload: str | None) -> None:
    """On a rank: rows that are split unevenly, and none for some ranks."""
    torch.manual_seed(0)
    old = nn.Sequential(*(nn.Linear(5, 3) for _ in range(2)))
    model = fsdp_offload.shard(nn.Sequential(*(nn.Linear(5, 3) for _ in range(2))))
    optimizer: Any = torch.optim.SGD(model.parameters())
    if offload:
        optimizer = HybridDeviceOptimizer(optimizer, model, offload=offload, device_memory=0)
    given = old.state_dict()
    model.load_state_dict(given)
    found = [parameter.full_tensor() for parameter in model.parameters()]
    assert_same(found, [*old.parameters()])
    assert all(type(tensor) is Tensor for tensor in given.values())
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        model.load_state_dict(given | {"0.weight": torch.ones(3, 3)})


@pytest.mark.parametrize("offload", [None, "all"])
def test_state_dicts_of_the_plain_module_load(
    ranks: Callable[..., RankPool], offload: str | None
) -> None:
    ranks(4).run(load_an_old_state_dict, offload)


@pytest.mark.parametrize("to_plain", [False, True])
def test_checkpoints_go_to_and_from_a_model_that_is_not_sharded(
    tmp_path: Path, to_plain: bool
) -> None:
    whole = Model()
    source, target = copy.deepcopy(whole), copy.deepcopy(whole)
    fsdp_offload.shard(source if to_plain else target)
    first: Any = adamw(source)
    second: Any = adamw(target)
    if to_plain:
        first = HybridDeviceOptimizer(first, source)
    else:
        second = HybridDeviceOptimizer(second, target)
    train(source, first)
    checkpoint.save(tmp_path / "saved", source, first)
    checkpoint.load(tmp_path / "saved", target, second)
    assert train(target, second) == train(source, first)


# --------------------------------------------------------------------------- what is sharded


def layers(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


class Stages(nn.Module):
    """Lists in lists: of one class, of several, without parameters, without a forward."""

    forward = nn.Identity.forward

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(layers(4, 4, 4) for _ in range(2))
        self.mixed = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), layers(4, 4, 4))
        self.silent = nn.Sequential(nn.ReLU(), nn.ReLU())
        self.lists = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4)] * 2) for _ in range(2))


MODEL = Model()


@pytest.mark.parametrize(
    ("model", "blocks", "expected"),
    [
        (Model(), None, ["", "blocks.0", "blocks.1", "blocks.2"]),
        (MODEL, MODEL.blocks[1:], ["", "blocks.1", "blocks.2"]),
        (Stages(), None, ["", "stages.0", "stages.1", "mixed.2.0", "mixed.2.1"]),
        (nn.Linear(2, 2), None, [""]),
        (nn.Sequential(), None, [""]),  # empty
        (nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2)), None, [""]),
        (layers(2, 2, 2), None, ["", "0", "1"]),
        (layers(2, 2, 2), [], [""]),
        (Stages(), nn.Sequential, ["", "stages.0", "stages.1", "mixed", "mixed.2"]),
    ],
)
def test_what_becomes_an_fsdp2_module(model: nn.Module, blocks: Any, expected: list[str]) -> None:
    fsdp_offload.shard(model, blocks)
    assert [name for name in sharded(model) if name != "silent"] == expected


def test_blocks_that_share_parameters_stay_with_the_root() -> None:
    model = Model()
    model.blocks[2].norm = model.blocks[0].norm
    model.blocks[1].experts[0].weight = model.shift = nn.Parameter(torch.eye(WIDTH))
    model.forward = lambda tokens: Model.forward(model, tokens) + 0 * model.shift.sum()
    plain = copy.deepcopy(model)
    fsdp_offload.shard(model)
    assert sharded(model) == [""]
    assert model.blocks[2].norm is model.blocks[0].norm
    assert len([*model.parameters()]) == len([*plain.parameters()])


def test_options_reach_every_group() -> None:
    model = Model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fsdp_offload.shard(model, mp_policy=policy, reshard_after_forward=False)
    logits = model(torch.arange(8)[None])
    assert logits.dtype == torch.bfloat16
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())  # gathered


def test_meta_weights_are_filled_afterwards() -> None:
    with torch.device("meta"):
        model = Model()
    fsdp_offload.shard(model).to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    assert train(model, HybridDeviceOptimizer(adamw(model), model), steps=1)


# --------------------------------------------------------------------------- what is refused


class Own(nn.Parameter):
    pass


def holding(parameter: nn.Parameter) -> nn.Module:
    model = Model()
    model.blocks[1].register_parameter("own", parameter)
    return model


def replicated() -> nn.Module:
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    return nn.Sequential(DistributedDataParallel(nn.Linear(2, 2)))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: holding(nn.Parameter(torch.tensor(1.0))),
            r"blocks\.1\.own of shape \(\) on cpu",
        ),
        (lambda: holding(nn.Parameter(torch.ones(2, 3).t())), "contiguous"),
        (lambda: holding(Own(torch.ones(2))), r"blocks\.1\.own of type Own"),
        (lambda: holding(nn.Parameter(torch.ones(2).half())), r"blocks\.1\.own of torch\.float16"),
        (lambda: nn.Sequential(nn.LazyLinear(2)), "initialise"),
    ],
)
def test_parameters_are_refused_before_a_change(make: Callable[[], Any], text: str) -> None:
    model = make()
    with pytest.raises(UnsupportedParameterError, match=text):
        fsdp_offload.shard(model)
    assert sharded(model) == []
    assert not dist.is_initialized()


def test_a_frozen_parameter_may_have_another_dtype() -> None:
    model = holding(nn.Parameter(torch.ones(2).half(), requires_grad=False))
    assert sharded(fsdp_offload.shard(model)) == ["", "blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: fsdp_offload.shard(Model()), "model of type FSDPModel: it is sharded"),
        (replicated, "0 of type DistributedDataParallel"),
        (lambda: nn.ModuleList([nn.Linear(2, 2)]), "a ModuleList with blocks=None"),
        (lambda: Model().parameters(), "model of type generator: not a torch.nn.Module"),
    ],
)
def test_models_are_refused(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        fsdp_offload.shard(make())


@pytest.mark.parametrize(
    "blocks", [nn.Conv2d, [nn.Linear(2, 2)], "Block", Model().blocks, [nn.ModuleList]]
)
def test_blocks_are_refused(blocks: Any) -> None:
    model = Model()
    with pytest.raises(ConfigError, match="blocks="):
        fsdp_offload.shard(model, blocks)
    with pytest.raises(ConfigError, match="blocks="):
        fsdp_offload.shard(model, [model.blocks])
    assert sharded(model) == []


# --------------------------------------------------------------------------- process group


def test_the_group_of_the_caller_is_used() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    group = dist.group.WORLD
    fsdp_offload.shard(Model())
    assert dist.group.WORLD is group


SCRIPT = """
import torch, torch.distributed as dist
from torch import nn
import fsdp_offload
torch.manual_seed(0)
model = fsdp_offload.shard(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))
optimizer = fsdp_offload.HybridDeviceOptimizer(torch.optim.AdamW(model.parameters()), model)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
optimizer.synchronize()
print(dist.get_world_size(), model[0].weight.to_local().shape[0], optimizer.statistics().overlap)
"""


def test_one_process_ends_without_a_word() -> None:
    assert Launch(SCRIPT).output().splitlines()[-1] == "1 4 forward"


def test_a_launcher_gives_all_ranks() -> None:
    end = "\nimport torch.distributed as dist; dist.destroy_process_group()"
    output = Launch(SCRIPT + end, ranks=2).output()
    assert output.splitlines().count("2 2 forward") == 2
