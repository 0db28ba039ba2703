"""Training jobs that are saved and resumed on any number of ranks, and what they consist of.

Everything here runs inside the ranks. A job sees the same global batch at every world size, so
that runs on 4 ranks and on 3 differ by the order of sums alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.optim import Optimizer

from fsdp_offload import HybridDeviceOptimizer, checkpoint
from tests.fsdp import models
from tests.fsdp.models import Block, Toy, local
from tests.helpers.compare import master_of
from tests.helpers.ranks import RankPool

BF16 = torch.bfloat16
BATCH = 12  # sequences, over all ranks: 1, 2, 3 and 4 divide it
LAST_BEFORE = 3  # the step after which jobs are saved
AFTER = range(LAST_BEFORE + 1, LAST_BEFORE + 4)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
NESTED = StateDictOptions()
MIXED = ("host", "streamed", "resident")
Ranks = Callable[..., RankPool]
Lanes = tuple[str, ...] | float  # one lane per parameter in turn, or a fraction


class Tiny(Toy):
    """A tied embedding, a frozen parameter, and two blocks that shard unevenly or to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(7), Block(3)])


class Parallel(nn.Module):
    """Tensor-parallel layers, whose shards are strided under FSDP, and two that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCABULARY, 12)
        self.up = nn.Linear(12, 8)
        self.down = nn.Linear(8, 12)
        self.head = nn.Linear(12, models.VOCABULARY)

    def forward(self, tokens: Tensor, *, skip: int | None = None) -> Tensor:
        x = self.embed(tokens)
        if skip is None:
            x = x + self.down(torch.tanh(self.up(x)))
        return self.head(x) * 1.0  # a view would make FSDP2 warn


@dataclass(frozen=True)
class Variant:
    """What a job is made of.

    Args:
        wrapped: by ``HybridDeviceOptimizer``, or plain ``AdamW``.
        lanes: of a wrapped one.
        dtype: of the shards.
        mesh: ``"flat"``; ``"hsdp"``, two replicas where there are four ranks; or ``"tp"``.
        away: weights and gradients are in host memory, as all of the state is.
    """

    wrapped: bool = True
    lanes: Lanes = MIXED
    dtype: torch.dtype = torch.float32
    mesh: str = "flat"
    away: bool = False

    def __str__(self) -> str:
        lanes = self.lanes if isinstance(self.lanes, float) else "+".join(self.lanes)
        kind = f"ours({'all' if self.away else lanes})" if self.wrapped else "plain"
        mesh = "" if self.mesh == "flat" else f"-{self.mesh}"
        return f"{kind}-{str(self.dtype).removeprefix('torch.')}{mesh}"


OURS, PLAIN = Variant(), Variant(wrapped=False)
OURS_BF16, PLAIN_BF16 = Variant(dtype=BF16), Variant(wrapped=False, dtype=BF16)


@dataclass
class Job:
    """A model and its optimizer on this rank."""

    variant: Variant
    model: nn.Module
    optimizer: Optimizer

    @property
    def pair(self) -> tuple[nn.Module, Optimizer]:
        """As torch's helpers want them."""
        return self.model, self.optimizer


def make(variant: Variant, *, lr: float = 0.01) -> Job:
    """A fresh job, the same on all ranks and world sizes."""
    torch.manual_seed(0)
    model = _parallel(variant) if variant.mesh == "tp" else _sharded(variant)
    # torch takes the tensors of one fused call from one mesh only.
    fused = variant.mesh != "tp"
    inner = torch.optim.AdamW(_groups(model, lr), weight_decay=0.1, fused=fused, foreach=False)
    return Job(variant, model, wrap(inner, model, variant) if variant.wrapped else inner)


def wrap(inner: Optimizer, model: nn.Module, variant: Variant) -> HybridDeviceOptimizer:
    """With the lanes of ``variant``."""
    if variant.away:
        return models.wrap(inner, model, offload="all", device_memory=0)
    if isinstance(variant.lanes, float):
        return models.wrap(inner, model, offload_fraction=variant.lanes)
    return models.wrap(inner, model, update_on=variant.lanes)


def _sharded(variant: Variant) -> nn.Module:
    world = dist.get_world_size()
    on = models.flat_mesh(world)
    if variant.mesh == "hsdp":
        outer = 2 if world % 2 == 0 else 1
        on = models.mesh((outer, world // outer), ("replicate", "shard"))
    return models.shard(Tiny().to(variant.dtype), on)


def _parallel(variant: Variant) -> nn.Module:
    world = dist.get_world_size()
    on = models.mesh((world // 2, 2) if world % 2 == 0 else (world, 1), ("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(Parallel().to(variant.dtype), on["tp"], plan)
    return fully_shard(model, mesh=on["dp"])


def _groups(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for name, p in named if "down" not in name], "lr": lr},
        {"params": [p for name, p in named if "down" in name], "lr": lr / 4},
    ]


def share(variant: Variant) -> tuple[int, int]:
    """Which part of the global batch this rank has, and of how many."""
    if variant.mesh != "tp":
        return dist.get_rank(), dist.get_world_size()
    tp = 2 if dist.get_world_size() % 2 == 0 else 1
    return dist.get_rank() // tp, dist.get_world_size() // tp


def train(job: Job, steps: range) -> None:
    """Block 1 gets its first gradient after ``LAST_BEFORE``; options change at step 2."""
    part, parts = share(job.variant)
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step)
        batch = torch.randint(models.VOCABULARY, (BATCH, 5), generator=generator)
        data = batch.chunk(parts)[part]
        logits = job.model(data, skip=1 if step <= LAST_BEFORE else None)
        F.cross_entropy(logits.flatten(0, 1).float(), data.roll(1, 1).flatten()).backward()
        if step == 2:
            first, second = job.optimizer.param_groups
            first["lr"] *= 0.5
            second["betas"], second["weight_decay"] = (0.8, 0.95), 0.03
        job.optimizer.step()
        job.optimizer.zero_grad()


def trained(variant: Variant, steps: int = LAST_BEFORE) -> Job:
    """A job after its first steps, in which block 1 has no gradient."""
    job = make(variant)
    train(job, range(1, steps + 1))
    return job


def elsewhere(variant: Variant) -> Job:
    """A job that has gone another way: everything in it has to be replaced."""
    job = make(variant, lr=0.5)
    train(job, range(20, 21))
    return job


def whole(job: Job) -> dict[str, Any]:
    """Weights, state, masters and options of the whole job by name, gathered; a collective.

    State of a parameter that never had a gradient is zeros, as plain optimizers leave it out.
    """
    names = {p: name for name, p in job.model.named_parameters()}
    found: dict[str, Any] = {f"weight {name}": gather(p) for p, name in names.items()}
    state = job.optimizer.state
    for group in job.optimizer.param_groups:
        for p in group["params"]:
            entry = state.get(p) or {}
            for kind in ("exp_avg", "exp_avg_sq"):
                value = entry.get(kind)
                found[f"{kind} {names[p]}"] = gather(
                    torch.zeros_like(p) if value is None else value
                )
            found[f"step {names[p]}"] = float(entry.get("step", 0.0))
            found[f"options {names[p]}"] = options(group)
            if any(name.startswith("master") for name in entry):
                found[f"master {names[p]}"] = master(p, entry)
    return found


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Of a group, but for which kernel is used."""
    left_out = ("params", "fused", "foreach")
    return {k: copy.deepcopy(v) for k, v in sorted(group.items()) if k not in left_out}


def master(parameter: Tensor, entry: Mapping[str, Any]) -> Tensor:
    """The gathered parameter, or its master; a collective."""
    kept = {name: gather(v) for name, v in entry.items() if name.startswith("master")}
    return master_of(gather(parameter), kept)


def gather(tensor: Tensor) -> Tensor:
    """All of it, on all ranks."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def addresses(optimizer: Optimizer) -> list[int]:
    """Where every state tensor lies."""
    state = optimizer.state
    return [
        local(value).data_ptr()
        for parameter in models.parameters_of(optimizer)
        for value in state.get(parameter, {}).values()
        if isinstance(value, Tensor)
    ]


def save_ours(job: Job, path: Path) -> None:
    checkpoint.save(path, *job.pair, extra={"step": LAST_BEFORE})


def save_flat(job: Job, path: Path) -> None:
    dcp.save(job_state(job, FLAT), checkpoint_id=path)


def save_nested(job: Job, path: Path) -> None:
    dcp.save(job_state(job, NESTED), checkpoint_id=path)


def save_stateful(job: Job, path: Path) -> None:
    state = {
        "model": get_model_state_dict(job.model),
        "optim": checkpoint.OptimizerState(*job.pair),
    }
    dcp.save(state, checkpoint_id=path)


def job_state(job: Job, how: StateDictOptions) -> dict[str, Any]:
    """What a job saves with DCP alone, and loads into."""
    return {
        "model": get_model_state_dict(job.model),
        "optim": get_optimizer_state_dict(*job.pair, options=how),
    }


def load_by_torch(job: Job, path: Path, how: StateDictOptions) -> None:
    """With DCP alone, as documented by torch."""
    state = job_state(job, how)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(job.model, state["model"])
    set_optimizer_state_dict(*job.pair, state["optim"], options=how)


SAVERS: dict[str, Callable[[Job, Path], None]] = {
    "save": save_ours,
    "flat": save_flat,
    "nested": save_nested,
    "stateful": save_stateful,
}


@dataclass(frozen=True)
class Source:
    """A checkpoint: of which job, and written how."""

    variant: Variant
    way: str = "save"

    def __str__(self) -> str:
        return f"{self.variant}-{self.way}"

    def folder(self, root: Path) -> Path:
        """Where it is."""
        return root / str(self)


@dataclass
class Course:
    """A job as it was when it was saved or loaded, and three steps later."""

    at_save: dict[str, Any]
    at_end: dict[str, Any]


def follow(job: Job) -> Course:
    """Look, train on, look again."""
    at_save = whole(job)
    train(job, AFTER)
    return Course(at_save, whole(job))


def save_all(root: Path, sources: tuple[Source, ...]) -> dict[Variant, Course] | None:
    """Train each variant once, save it in all wanted ways, train on; rank 0 tells."""
    courses = {}
    for variant in dict.fromkeys(source.variant for source in sources):
        job = trained(variant)
        for source in sources:
            if source.variant == variant:
                SAVERS[source.way](job, source.folder(root))
        courses[variant] = follow(job)
    return courses if dist.get_rank() == 0 else None


def load_one(root: Path, source: Source, target: Variant) -> Course | None:
    """Load into a job that had gone elsewhere, and train on; rank 0 tells."""
    job = elsewhere(target)
    before = addresses(job.optimizer)
    extra = checkpoint.load(source.folder(root), *job.pair)
    models.check(extra == ({"step": LAST_BEFORE} if source.way == "save" else {}), f"{extra}")
    moved = target.wrapped and addresses(job.optimizer) != before
    models.check(not moved, "loading moved the state")
    course = follow(job)
    return course if dist.get_rank() == 0 else None
