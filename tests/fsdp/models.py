"""Small FSDP2 models, meshes, twin runs and comparisons by bits, for tests on the rank pool.

Everything here runs inside the ranks, which do not rewrite assertions: failures carry their own
words.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim import Optimizer

from fsdp_offload import HybridDeviceOptimizer, TransferConfig
from tests.helpers.compare import differences, local
from tests.helpers.lanes import in_lanes
from tests.helpers.ranks import RankPool

Ranks = Callable[..., RankPool]
"""The fixture ``ranks``."""
VOCABULARY = 23
WIDTH = 45
TRANSFER = TransferConfig(bucket_bytes="4KiB", host_threads=1)
"""Small buckets: the largest parameters are cut, most buckets hold several small ones."""


class Block(nn.Module):
    """A residual block whose parameters shard unevenly (7, 3) and to nothing ((1,) and (3,))."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((1,), 0.7))
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(x)))


class Toy(nn.Module):
    """Embedding tied to the head, three blocks, one frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.blocks = nn.ModuleList([Block(7), Block(3), Block(70)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, *, skip: int | None = None) -> Tensor:
        """Logits; block ``skip`` is left out, so that its parameters get no gradient."""
        x = self.embed(tokens) + self.frozen
        for index, block in enumerate(self.blocks):
            if index != skip:
                x = block(x)
        return self.head(x)


@functools.cache
def mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """One mesh per shape and process: groups live as long as the rank does."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def flat_mesh(size: int) -> DeviceMesh:
    """A 1-D mesh over all ranks, or (``size`` 1) of this rank alone."""
    world = dist.get_world_size()
    if size == world:
        return mesh((world,), ("shard",))
    assert size == 1, f"a mesh of {size} of {world} ranks is not made here"
    return mesh((world, 1), ("each", "one"))["one"]


def shard(model: Toy, on: DeviceMesh, *, together: int = 1, **options: Any) -> Toy:
    """FSDP2 over ``on``: every block, or every few ``together``, then the root."""
    blocks: list[nn.Module] = list(model.blocks)
    for first in range(0, len(blocks), together):
        fully_shard(blocks[first : first + together], mesh=on, **options)
    fully_shard(model, mesh=on, **options)
    return model


def toy(
    on: DeviceMesh,
    *,
    dtype: torch.dtype = torch.float32,
    then: torch.dtype | None = None,
    **options: Any,
) -> Toy:
    """The same sharded model at every call, on every rank; ``then``: converted once more."""
    torch.manual_seed(0)
    return shard(Toy().to(dtype).to(then or dtype), on, **options)


def tokens(step: int) -> Tensor:
    """Data of this rank at ``step``: (batch, time) int64."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randint(VOCABULARY, (2, 6), generator=generator)


def backward(
    model: nn.Module, step: int, *, scale: Callable[[Tensor], Tensor] = lambda loss: loss
) -> float:
    """Forward and backward on this rank's data; block 1 is unused at steps 1 and 5."""
    data = tokens(step)
    logits = model(data, skip=1 if step in (1, 5) else None)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), data.roll(1, 1).flatten())
    scale(loss).backward()
    return loss.item()


def train(made: tuple[nn.Module, Optimizer], steps: range) -> None:
    """One update for each of the steps."""
    model, optimizer = made
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def groups(model: nn.Module, *, lr: float = 0.01, matrices_only: bool = False) -> list[Any]:
    """Two param groups of different ``lr``, both with parameters of every block.

    ``matrices_only`` (Muon): no vectors, and nothing with fewer rows than ranks, which DTensor's
    own matrix products refuse.
    """
    named = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if not matrices_only or (parameter.dim() == 2 and len(parameter) >= dist.get_world_size())
    ]
    down = [p for name, p in named if "down" in name]
    rest = [p for name, p in named if "down" not in name]
    return [{"params": rest, "lr": lr}, {"params": down, "lr": lr / 4}]


def wrap(optimizer: Optimizer, model: Any = None, **options: Any) -> HybridDeviceOptimizer:
    """A wrapper with small buckets, some of which stay on the device. A tuple of lanes is given to
    the parameters in turn."""
    options = {"transfer": TRANSFER, "device_memory": "30000B", **options}
    return in_lanes(optimizer, model=model, **options)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All parameters, in the order of the groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def on_shards(optimizer: Optimizer, dtype: torch.dtype | None = None) -> Optimizer:
    """A plain optimizer of the same class and settings over copies of this rank's shards.

    For what plain torch cannot do on DTensors, and for masters (``dtype`` fp32). Every parameter
    is a group of its own, because plain fused SGD raises where some of a group have no state yet.
    """
    copies = []
    for origin, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            piece = nn.Parameter(local(p).clone().to(dtype or p.dtype), p.requires_grad)
            copies.append({**group, "params": [piece], "origin": origin})
    cls = type(optimizer)
    accepted = inspect.signature(cls).parameters
    return cls(copies, **{n: v for n, v in optimizer.defaults.items() if n in accepted})


def change_lr(optimizers: Iterable[Optimizer], step: int) -> None:
    """Group 0 at step 3, group 1 at step 7."""
    for optimizer in optimizers:
        for position, group in enumerate(optimizer.param_groups):
            origin = group.get("origin", position)
            if (step, origin) in ((3, 0), (7, 1)):
                group["lr"] *= 0.5 if origin == 0 else 3.0


def copy_gradients(source: Optimizer, target: Optimizer) -> None:
    """Give ``target`` copies of the gradients of ``source``, as its own parameters need them."""
    for theirs, mine in zip(parameters_of(source), parameters_of(target), strict=True):
        if theirs.grad is None:
            mine.grad = None
        elif isinstance(mine, DTensor):
            mine.grad = theirs.grad.detach().clone().to(mine.dtype)
        else:
            mine.grad = local(theirs.grad).clone().to(mine.dtype)


@functools.cache
def tape(size: int) -> list[dict[str, Tensor]]:
    """Gradients by FQN of ten real steps (FSDP2 forward and backward, AdamW)."""
    model = toy(flat_mesh(size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    steps = []
    for step in range(1, 11):
        backward(model, step)
        named = model.named_parameters()
        steps.append({n: p.grad.detach().clone() for n, p in named if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return steps


def play(model: nn.Module, gradients: Mapping[str, Tensor]) -> None:
    """Set copies of one step of the tape; the others become None."""
    for name, parameter in model.named_parameters():
        found = gradients.get(name)
        parameter.grad = None if found is None else found.clone()


# --------------------------------------------------------------------------- looking at bits


def check(condition: object, message: str) -> None:
    """``assert`` with words: the ranks run without pytest's rewriting."""
    if not condition:
        raise AssertionError(f"rank {dist.get_rank()}: {message}")


def check_same(found: Any, expected: Any, what: str, *, placed: bool = True) -> None:
    """Same type of value, dtype, bits and (``placed``) global shape, mesh and placements."""
    if not isinstance(expected, Tensor):
        check(found == expected, f"{what}: {found!r} is not {expected!r}")
        return
    if placed:
        check(isinstance(found, Tensor), f"{what}: {type(found)} is not a tensor")
        check(found.shape == expected.shape, f"{what}: shape {found.shape}")
        check(placement(found) == placement(expected), f"{what}: placed {placement(found)}")
    wrong = differences(found, expected, what)
    check(not wrong, str(wrong))


def placement(tensor: Tensor) -> Any:
    """Mesh and placements of a DTensor, None of a plain tensor."""
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def check_twins(wrapped: Optimizer, plain: Optimizer, what: str, *, placed: bool = True) -> None:
    """Parameters and state of ``wrapped`` equal those of ``plain``, bit for bit.

    A parameter that never had a gradient has no state in ``plain``. ``placed`` False: ``plain``
    is :func:`on_shards`.
    """
    state = wrapped.state
    pairs = zip(parameters_of(wrapped), parameters_of(plain), strict=True)
    for index, (mine, theirs) in enumerate(pairs):
        label = f"{what}, parameter {index}"
        check_same(mine, theirs, label, placed=placed)
        if expected := plain.state.get(theirs):
            names = sorted(state[mine])
            check(names == sorted(expected), f"{label}: state {names}")
            for name, value in expected.items():
                check_same(state[mine][name], value, f"{label}, {name}", placed=placed)


def flat_items(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested dicts and lists with their paths."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from flat_items(each, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from flat_items(each, f"{path}/{index}")
    else:
        yield path, value


def check_same_dicts(found: Any, expected: Any, what: str) -> None:
    """Nested state dicts with the same keys and the same bits."""
    mine, theirs = dict(flat_items(found)), dict(flat_items(expected))
    check(mine.keys() == theirs.keys(), f"{what}: keys differ: {mine.keys() ^ theirs.keys()}")
    for path, value in theirs.items():
        check_same(mine[path], value, f"{what} {path}")
