"""The job that is measured: a GPT under FSDP2, next-token loss, synthetic tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn import functional as F

from ..errors import ConfigError

BATCHES = 4  # so that neighbouring iterations do not see the same tokens


def gpt_shapes(layers: int, dim: int = 2048, vocabulary: int = 60000) -> list[tuple[int, ...]]:
    """Parameter shapes of a GPT: 12 dim^2 per layer, one embedding."""
    layer = [(3 * dim, dim), (dim, dim), (4 * dim, dim), (dim, 4 * dim), (dim,), (dim,)]
    return [(vocabulary, dim), *(shape for _ in range(layers) for shape in layer), (dim,)]


def layers_for(params: float, dim: int, vocabulary: int) -> int:
    """Layers of the GPT whose size is nearest to ``params`` parameters; at least one."""
    return max(1, round((params - vocabulary * dim - dim) / (12 * dim * dim + 2 * dim)))


@dataclass(frozen=True)
class Job:
    """What every row trains, from the same seed, on the same tokens."""

    layers: int = 24
    dim: int = 2048
    vocabulary: int = 60000
    tokens: int = 8192
    """Tokens per iteration and rank."""
    seq: int = 2048
    shards: Literal["bf16", "fp32"] = "bf16"
    """dtype of the shards. bf16: gathered and reduced in bf16. fp32: gathered in bf16, reduced
    in fp32. The model computes in bf16 in both."""
    lr: float = 1e-4
    seed: int = 0
    rotary: bool = False
    """Rotary positions in the attention; without them nothing but the mask tells the order."""
    fp32_loss: bool = False
    """Logits and their gradient in fp32, for small vocabularies."""
    blocks_per_group: int = 1
    """Blocks that FSDP2 gathers and reduces together."""

    def __post_init__(self) -> None:
        if self.shards not in ("bf16", "fp32"):
            raise ConfigError(
                f"shards={self.shards!r}", reason="unknown choice", remedy="use bf16 or fp32"
            )
        for name in ("layers", "dim", "vocabulary", "tokens", "seq", "blocks_per_group"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name}={getattr(self, name)}", reason="not positive", remedy="use 1 or more"
                )
        if self.tokens % self.seq:
            raise ConfigError(
                f"tokens={self.tokens}",
                reason=f"not a multiple of the sequence length {self.seq}",
                remedy="change --tokens or --seq",
            )
        if self.dim % self.heads:
            raise ConfigError(
                f"dim={self.dim}",
                reason=f"not divisible into {self.heads} heads",
                remedy="use a multiple of 128",
            )

    @property
    def heads(self) -> int:
        """Attention heads: 128 wide, 64 wide in small models."""
        return max(1, self.dim // (128 if self.dim >= 1024 else 64))

    @property
    def batch(self) -> int:
        """Sequences per iteration and rank."""
        return self.tokens // self.seq

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the shards."""
        return torch.bfloat16 if self.shards == "bf16" else torch.float32


def rotary_table(seq: int, width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions, fp32, each ``(seq, width / 2)``."""
    speeds = 1000 ** -torch.linspace(0, 1, width // 2)
    angles = torch.outer(torch.arange(seq, dtype=torch.float32, device=speeds.device), speeds)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn ``(..., seq, width)`` by its positions."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)


class Block(nn.Module):
    """Attention and MLP, each behind a norm; no bias, no dropout."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        """``(batch, seq, dim)`` to the same."""
        batch, seq, dim = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, seq, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        if turn is not None:
            query, key = rotate(query, *turn), rotate(key, *turn)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, dim))
        widened: Tensor = F.gelu(self.up(self.mlp_norm(x)))
        x = x + self.down(widened)
        return x


class GPT(nn.Module):
    """The parameters of :func:`gpt_shapes`; the embedding is also the output projection."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job
        self.tokens = nn.Embedding(job.vocabulary, job.dim)
        self.blocks = nn.ModuleList(Block(job.dim, job.heads) for _ in range(job.layers))
        self.norm = nn.RMSNorm(job.dim)
        cos, sin = rotary_table(job.seq, job.dim // job.heads)
        self.turn = (cos.bfloat16(), sin.bfloat16()) if job.rotary else None

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean next-token loss, fp32, of ``(batch, seq)`` tokens.

        Unless the job says otherwise, logits and what is kept of them for the backward stay in
        bf16 (60000 x 8192 of them are 1 GB); the kernels accumulate in fp32, and so does the mean.
        """
        x = self.tokens(inputs)
        for block in self.blocks:
            x = block(x, self.turn)
        logits = F.linear(self.norm(x), self.tokens.weight)
        if self.job.fp32_loss:
            logits = logits.float()
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.float().mean()


def initialise(model: GPT) -> None:
    """Normal matrices, the projections into the residual stream smaller; norms are ones."""
    narrow = 0.02 / (2 * model.job.layers) ** 0.5
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            ends_block = name.endswith(("out.weight", "down.weight"))
            nn.init.normal_(parameter, std=narrow if ends_block else 0.02)


def unsharded_model(job: Job, device: torch.device) -> GPT:
    """The whole model on every rank, from the job's seed."""
    torch.manual_seed(job.seed)
    with device:
        model = GPT(job).to(job.dtype)
        initialise(model)
    return model


def sharded_model(
    job: Job, device: torch.device, offload_policy: OffloadPolicy | None = None
) -> GPT:
    """The model under FSDP2 over all ranks: every ``blocks_per_group`` blocks are a group, and the
    root is one."""
    model = unsharded_model(job, device)
    options: dict[str, Any] = {}
    if job.shards == "fp32":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if offload_policy is not None:
        options["offload_policy"] = offload_policy
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    blocks, count = list[nn.Module](model.blocks), job.blocks_per_group
    for first in range(0, len(blocks), count):
        fully_shard(blocks[first : first + count], mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def synthetic_batches(job: Job, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets on the device, other ones on each rank, the same in each row."""
    generator = torch.Generator(device).manual_seed(1 + job.seed + 1000 * dist.get_rank())
    shape = (BATCHES, job.batch, job.seq + 1)
    tokens = torch.randint(job.vocabulary, shape, device=device, generator=generator)
    return [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in tokens]
