"""The job that is measured: a GPT under FSDP2, next-token loss, synthetic tokens."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..core import dtensor
from ..core.errors import ConfigError
from ..core.sharding import shard, shard_of

LOGIT_TOKENS = 4096  # tokens whose logits exist at a time, if they are recomputed
SMALL = {"layers": 2, "dim": 128, "vocabulary": 512, "tokens": 128, "seq": 128}  # on the CPU
BATCHES = 4  # so that neighbouring iterations do not see the same tokens


def layers_for(params: float, dim: int, vocabulary: int) -> int:
    """Choose the layers of a GPT nearest to ``params`` parameters; at least one."""
    return max(1, round((params - vocabulary * dim - dim) / (12 * dim * dim + 2 * dim)))


@dataclass(frozen=True)
class Job:
    """The job of every row, from the same seed, on the same tokens."""

    layers: int = 24
    dim: int = 2048
    vocabulary: int = 60000
    tokens: int = 8192  # per iteration and rank
    seq: int = 2048
    shards: Literal["bf16", "fp32"] = "bf16"
    """dtype of the shards and of reductions. Gathers and compute use bf16."""
    checkpointed: bool = False  # whether backward recomputes each block

    def __post_init__(self) -> None:
        if self.tokens % self.seq or self.dim % self.heads:
            raise ConfigError(
                f"tokens={self.tokens}, seq={self.seq}, dim={self.dim}",
                reason=f"tokens must be a multiple of seq, and dim of {self.heads} heads",
                remedy="change --tokens, --seq or --dim",
            )

    @classmethod
    def of(cls, options: Namespace) -> Job:
        """Build a job from the command-line options named like its fields."""
        names = {field.name for field in fields(cls)}
        given = {k: v for k, v in vars(options).items() if k in names and v is not None}
        job = cls(**((SMALL if options.device == "cpu" else {}) | given))
        params = getattr(options, "params", None)
        layers = layers_for(params, job.dim, job.vocabulary) if params else job.layers
        return replace(job, layers=layers)

    @property
    def heads(self) -> int:
        """Attention heads: 128 wide, 64 wide in small models."""
        return max(1, self.dim // (128 if self.dim >= 1024 else 64))

    @property
    def params(self) -> int:
        """Parameters of the whole model."""
        per_layer = 12 * self.dim * self.dim + 2 * self.dim
        return self.layers * per_layer + self.vocabulary * self.dim + self.dim

    def model(self) -> GPT:
        """Build the model. Other jobs change it here, before it is sharded."""
        return GPT(self)


class TransformerBlock(nn.Module):
    """Attention and MLP, each after a norm; no bias, no dropout."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, seq, dim)`` to the same shape."""
        batch, seq, dim = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, seq, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, dim))
        widened: Tensor = self.down(F.gelu(self.up(self.mlp_norm(x))))
        return x + widened


class GPT(nn.Module):
    """A GPT whose embedding is also the output projection."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.is_checkpointed = job.checkpointed
        self.tokens = nn.Embedding(job.vocabulary, job.dim)
        self.blocks = nn.ModuleList(TransformerBlock(job.dim, job.heads) for _ in range(job.layers))
        self.norm = nn.RMSNorm(job.dim)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean next-token loss, fp32, of ``(batch, seq)`` tokens.

        Logits stay in bf16; kernels and mean accumulate in fp32. If backward recomputes blocks, it
        also recomputes logits, in parts.
        """
        x = self.tokens(inputs)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        x, wanted, weight = self.norm(x).flatten(0, 1), targets.flatten(), self.tokens.weight
        if not self.is_checkpointed:
            return _losses(x, weight, wanted).float().mean()
        parts = zip(x.split(LOGIT_TOKENS), wanted.split(LOGIT_TOKENS), strict=True)
        losses = [checkpoint(_losses, a, weight, b, use_reentrant=False) for a, b in parts]
        return torch.cat(losses).float().mean()


def _losses(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), targets, reduction="none")


def meta_model(job: Job) -> GPT:
    with torch.device("meta"):
        return job.model().to(torch.bfloat16 if job.shards == "bf16" else torch.float32)


@torch.no_grad()
def initialize(model: GPT, job: Job, device: torch.device) -> GPT:
    """Fill all parameters from the same seed, one whole parameter at a time.

    Matrices are normal, projections into the residual stream smaller; norms are ones.
    """
    generator = torch.Generator(device).manual_seed(0)
    narrow = 0.02 / (2 * job.layers) ** 0.5
    for name, parameter in model.named_parameters():
        std = narrow if name.endswith(("out.weight", "down.weight")) else 0.02
        whole = torch.ones(parameter.shape, dtype=parameter.dtype, device=device)
        if parameter.dim() > 1:
            whole.normal_(std=std, generator=generator)
        part = shard_of(parameter, whole) if isinstance(parameter, DTensor) else whole
        dtensor.local(parameter).copy_(part)
    return model


def sharded_model(
    job: Job, device: torch.device, offload_policy: OffloadPolicy | None = None
) -> GPT:
    """Build the model under FSDP2 over all ranks, with a group for each block and the root."""
    model = meta_model(job)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    options: dict[str, Any] = {"offload_policy": offload_policy or OffloadPolicy()}
    if job.shards == "fp32":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = shard(model, model.blocks, mesh=mesh, **options)
    home = torch.device("cpu") if isinstance(offload_policy, CPUOffloadPolicy) else device
    return initialize(model.to_empty(device=home), job, device)


def synthetic_batches(job: Job, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Make inputs and targets on the device, different on each rank, equal in each row."""
    generator = torch.Generator(device).manual_seed(1 + 1000 * dist.get_rank())
    shape = (BATCHES, job.tokens // job.seq, job.seq + 1)
    tokens = torch.randint(job.vocabulary, shape, device=device, generator=generator)
    return [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in tokens]
