"""Train a byte-level GPT with FSDP2; the optimizer's state lives in host memory.

    torchrun --nproc-per-node 2 examples/train_gpt.py --save checkpoints/run/gpt --steps 100
    torchrun --nproc-per-node 1 examples/train_gpt.py --resume checkpoints/run/gpt --steps 200

It needs torchrun, also for one rank. The text is the Python standard library unless `--data` names
a file or a folder. The one line that differs from a plain FSDP2 script is the one with
`HybridDeviceOptimizer`.
"""

import argparse
import math
import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from fsdp_offload import HybridDeviceOptimizer, checkpoint

VOCABULARY = 256  # one token per byte: no tokenizer to fetch, any text will do
MAX_DATA_BYTES = 16 << 20
NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def rotate(x: Tensor) -> Tensor:
    """Rotary positions: a head then sees distances, which it learns in fewer steps."""
    seq, width = x.shape[-2:]
    speeds = 1000 ** -torch.linspace(0, 1, width // 2, device=x.device)
    angles = torch.outer(torch.arange(seq, device=x.device), speeds)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.heads = max(1, dim // 64)
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)
        for last in (self.out, self.down):  # so that a block starts as the identity
            nn.init.zeros_(last.weight)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, seq, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, dim))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, dim: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(inputs)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_text(source: Path | None) -> Tensor:
    """The bytes of every text file below `source`, in sorted order, so the same on every rank."""
    root = source or Path(sysconfig.get_paths()["stdlib"])
    files = [root] if root.is_file() else sorted(root.rglob("*" if source else "*.py"))
    data, skipped = bytearray(), set() if source else NOT_STDLIB
    for file in files:
        if file.is_file() and skipped.isdisjoint(file.relative_to(root).parts):
            with file.open("rb") as stream:
                content = stream.read(MAX_DATA_BYTES - len(data))
            if b"\0" not in content:  # what tells text from binary without a list of suffixes
                data += content
    return torch.frombuffer(data, dtype=torch.uint8)


def windows(data: Tensor, starts: Tensor, seq: int, device: torch.device) -> tuple[Tensor, Tensor]:
    rows = torch.stack([data[start : start + seq + 1] for start in starts.tolist()])
    rows = rows.to(device, torch.long)
    return rows[:, :-1], rows[:, 1:]


def train_starts(step: int, batch: int, limit: int) -> Tensor:
    """Where the rows of one global batch begin.

    A function of the step and the row's index in the global batch alone: a job that resumes, on
    however many ranks, trains on the rows that the first run would have trained on.
    """
    return torch.randint(limit, (batch,), generator=torch.Generator().manual_seed(step))


def learning_rate_factor(step: int, total: int) -> float:
    warmup = max(1, total // 10)
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def mean_over_ranks(value: Tensor) -> float:
    total = value.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def evaluate(model: Any, rows: tuple[Tensor, Tensor]) -> float:
    with torch.no_grad():
        loss = mean_over_ranks(model(*rows))
    # FSDP2 leaves the root gathered after a forward without a backward, and then its parameters
    # are not the ones that the optimizer knows.
    model.reshard()
    return loss


class Job:
    """What is trained and saved."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(0)  # every rank builds the same weights and keeps its shard of them
        self.model = GPT(args.layers, args.dim).to(device, DTYPES[args.param_dtype])
        gathered = DTYPES[args.compute_dtype or args.param_dtype]
        policy = MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for module in (*self.model.blocks, self.model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        self.optimizer = HybridDeviceOptimizer(
            torch.optim.AdamW(self.model.parameters(), lr=args.lr, betas=(0.9, 0.95), fused=True),
            model=self.model,
            offload_fraction=args.offload_fraction,
            update_on=args.update_on,
        )
        total = args.schedule_steps
        self.scheduler = LambdaLR(self.optimizer, lambda step: learning_rate_factor(step, total))
        self.step = 0
        self.validation_loss = math.nan

    def save(self, path: Path) -> None:
        schedule, loss = self.scheduler.state_dict(), self.validation_loss
        extra = {"scheduler": schedule, "step": self.step, "validation_loss": loss}
        checkpoint.save(path, self.model, self.optimizer, extra=extra, overwrite=True)

    def load(self, path: Path) -> None:
        extra = checkpoint.load(path, self.model, self.optimizer)
        self.scheduler.load_state_dict(extra["scheduler"])
        self.step, self.validation_loss = extra["step"], extra["validation_loss"]


def report_memory(optimizer: HybridDeviceOptimizer) -> None:
    figures = optimizer.statistics()
    device = optimizer.param_groups[0]["params"][0].device
    mine = torch.tensor([figures.device_state_bytes, figures.host_state_bytes], device=device)
    of_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, mine)
    if dist.get_rank() == 0:
        for rank, (on_device, on_host) in enumerate(each.tolist() for each in of_ranks):
            places = f"{on_device:,} bytes on the device, {on_host:,} bytes on the host"
            print(f"rank {rank}: optimizer state: {places}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, help="file or folder of text; default: Python's standard library")
    add("--steps", type=int, default=200, help="train until this step, counted from the first run")
    add("--schedule-steps", type=int, default=200, help="length of the learning rate schedule")
    add("--batch", type=int, default=16, help="sequences of a step, all ranks together")
    add("--seq", type=int, default=128)
    add("--layers", type=int, default=3)
    add("--dim", type=int, default=192, help="a multiple of 64")
    add("--lr", type=float, default=3e-3)
    add("--clip", type=float, default=1.0, help="largest norm of all gradients together")
    add("--param-dtype", choices=DTYPES, default="fp32", help="what the shards are stored in")
    add("--compute-dtype", choices=DTYPES, help="what they are gathered in; default: the same")
    add("--offload-fraction", type=float, default=1.0, help="part of the state that leaves")
    add("--update-on", choices=("device", "host"), default="device")
    add("--save", type=Path, metavar="DIR")
    add("--resume", type=Path, metavar="DIR")
    add("--log-every", type=int, default=10)
    return parser.parse_args(argv)


def start_process_group() -> torch.device:
    """One accelerator per rank where the host has that many, otherwise the CPU."""
    local_ranks, local_rank = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator and torch.accelerator.device_count() >= local_ranks:
        device = torch.device(accelerator.type, local_rank)
        torch.accelerator.set_device_index(local_rank)
    dist.init_process_group(dist.get_default_backend_for_device(device))
    return device


def train_step(job: Job, rows: tuple[Tensor, Tensor], clip: float) -> tuple[Tensor, Any]:
    loss = job.model(*rows)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(job.model.parameters(), clip)
    job.optimizer.step()
    job.optimizer.zero_grad()
    job.scheduler.step()
    job.step += 1
    return loss, norm


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    device = start_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()
    if args.batch % world:
        raise SystemExit(f"--batch {args.batch} must be a multiple of the {world} ranks")
    say = tqdm.write if rank == 0 else lambda _: None
    data = read_text(args.data)
    split = len(data) * 19 // 20
    # The validation rows are the same for every run, spread over the last part of the text.
    starts = torch.linspace(split, len(data) - args.seq - 1, args.batch, dtype=torch.float64)
    validation = windows(data, starts.long()[rank::world], args.seq, device)
    job = Job(args, device)
    numel = sum(parameter.numel() for parameter in job.model.parameters())
    say(f"{world} x {device.type}, {numel:,} parameters, {len(data):,} bytes of text")
    if args.resume:
        job.load(args.resume)
        found, saved = evaluate(job.model, validation), job.validation_loss
        say(f"resumed at step {job.step}: validation loss {found:.4f}, when saved {saved:.4f}")
    # `disable=None`: a bar on a terminal, nothing but the lines below in a file or a pipe.
    for step in tqdm(range(job.step, args.steps), disable=None if rank == 0 else True):
        rate = job.scheduler.get_last_lr()[0]
        starts = train_starts(step, args.batch, split - args.seq)[rank::world]
        loss, norm = train_step(job, windows(data, starts, args.seq, device), args.clip)
        if step % args.log_every == 0 or step + 1 == args.steps:
            mean, size = mean_over_ranks(loss), float(norm.full_tensor())
            say(f"step {step:5d}  loss {mean:.4f}  gradient norm {size:.2f}  lr {rate:.1e}")
    report_memory(job.optimizer)
    if args.save:
        job.validation_loss = evaluate(job.model, validation)
        job.save(args.save)
        say(f"saved {args.save} at step {job.step}: validation loss {job.validation_loss:.4f}")
    job.optimizer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # Gloo's threads can abort the interpreter while it shuts down; there is nothing left to do.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
