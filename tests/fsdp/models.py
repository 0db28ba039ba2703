"""Small FSDP2 models, meshes, twin runs and comparisons by bits, for tests on the rank pool.

Everything here runs inside the ranks, which do not rewrite assertions: failures carry their own
words.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
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

VOCABULARY = 23
WIDTH = 45
TRANSFER = TransferConfig(bucket_bytes=4096, slots=2, host_threads=1)
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


def shard(model: Toy, on: DeviceMesh, **options: Any) -> Toy:
    """FSDP2 over ``on``: every block, then the root."""
    for block in model.blocks:
        fully_shard(block, mesh=on, **options)
    fully_shard(model, mesh=on, **options)
    return model


def toy(on: DeviceMesh, *, dtype: torch.dtype = torch.float32, **options: Any) -> Toy:
    """The same sharded model at every call, on every rank."""
    torch.manual_seed(0)
    return shard(Toy().to(dtype), on, **options)


def tokens(step: int) -> Tensor:
    """Data of this rank at ``step``: (batch, time) int64."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randint(VOCABULARY, (2, 6), generator=generator)


def backward(model: nn.Module, step: int, *, scale: float = 1.0) -> float:
    """Forward and backward on this rank's data; block 1 is unused at steps 1 and 5."""
    data = tokens(step)
    logits = model(data, skip=1 if step in (1, 5) else None)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), data.roll(1, 1).flatten()) * scale
    loss.backward()
    return loss.item()


def groups(model: nn.Module, *, lr: float = 0.01, matrices_only: bool = False) -> list[Any]:
    """Two param groups of different ``lr``, both with parameters of every block."""
    named = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.dim() == 2 or not matrices_only
    ]
    down = [p for name, p in named if "down" in name]
    rest = [p for name, p in named if "down" not in name]
    return [{"params": rest, "lr": lr}, {"params": down, "lr": lr / 4}]


def wrap(optimizer: Optimizer, model: Any = None, **options: Any) -> HybridDeviceOptimizer:
    """A wrapper with small buckets."""
    options.setdefault("transfer", TRANSFER)
    return HybridDeviceOptimizer(optimizer, model=model, **options)


def mixed_lanes(optimizer: Optimizer, cycle: Iterable[str]) -> list[str]:
    """The lanes of ``cycle`` in turn, one per trainable parameter."""
    lanes, names = list(cycle), []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                names.append(lanes[len(names) % len(lanes)])
    return names


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All parameters, in the order of the groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# --------------------------------------------------------------------------- looking at bits


def local(tensor: Tensor) -> Tensor:
    """This rank's piece."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def bits(tensor: Tensor) -> Tensor:
    """The bits of this rank's piece as integers, so that NaNs and signed zeros are compared."""
    piece = local(tensor).contiguous()
    views = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return piece.view(views[piece.itemsize]) if piece.is_floating_point() else piece


def check(condition: object, message: str) -> None:
    """``assert`` with words: the ranks run without pytest's rewriting."""
    if not condition:
        raise AssertionError(f"rank {dist.get_rank()}: {message}")


def check_same(found: Any, expected: Any, what: str) -> None:
    """Same type of value, dtype, shape, placement and bits."""
    if not isinstance(expected, Tensor):
        check(found == expected, f"{what}: {found!r} is not {expected!r}")
        return
    check(isinstance(found, Tensor), f"{what}: {type(found)} is not a tensor")
    check(isinstance(found, DTensor) == isinstance(expected, DTensor), f"{what}: DTensor or not")
    if isinstance(expected, DTensor):
        check(found.placements == expected.placements, f"{what}: placed {found.placements}")
        check(found.device_mesh == expected.device_mesh, f"{what}: on mesh {found.device_mesh}")
    for name in ("dtype", "shape"):
        a, b = getattr(found, name), getattr(expected, name)
        check(a == b, f"{what}: {name} {a} is not {b}")
    a, b = bits(found), bits(expected)
    check(a.shape == b.shape, f"{what}: shard {tuple(a.shape)} is not {tuple(b.shape)}")
    wrong = int((a != b).sum())
    check(wrong == 0, f"{what}: {wrong} of {a.numel()} elements differ")


def check_twins(wrapped: Optimizer, plain: Optimizer, what: str, *, skip: tuple[str, ...] = ()) -> None:
    """Parameters and state of ``wrapped`` equal those of ``plain``, bit for bit.

    A parameter that never had a gradient has no state in ``plain``; ``skip`` names extra entries
    of the wrapper's state.
    """
    state = wrapped.state
    pairs = zip(parameters_of(wrapped), parameters_of(plain), strict=True)
    for index, (mine, theirs) in enumerate(pairs):
        check_same(mine, theirs, f"{what}, parameter {index}")
        expected = plain.state.get(theirs)
        if not expected:
            continue
        names = sorted(set(state[mine]) - set(skip))
        check(names == sorted(expected), f"{what}, parameter {index}: state {names}")
        for name, value in expected.items():
            check_same(state[mine][name], value, f"{what}, parameter {index}, {name}")


def gradients_of(optimizer: Optimizer) -> list[Tensor | None]:
    """A copy of every gradient (DTensors stay DTensors)."""
    found = [parameter.grad for parameter in parameters_of(optimizer)]
    return [None if gradient is None else gradient.detach().clone() for gradient in found]


def give(optimizer: Optimizer, gradients: list[Tensor | None]) -> None:
    """Set copies of ``gradients``."""
    for parameter, gradient in zip(parameters_of(optimizer), gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.clone()


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
