"""Train a byte-level GPT with experts; the rows that exist are kept in pages, not whole buffers.

    python examples/moe_gpt.py --steps 100
    torchrun --nproc-per-node 2 examples/moe_gpt.py --steps 100

Each token goes to two of eight experts or four null ones: how many rows a rank's experts get is not
known on the host, and the host does not ask. Tokens are gathered from all ranks, results are summed
back; the rest is FSDP2's, the optimizer's state in host memory, the text Python's sources.
"""

import argparse
import os
import sysconfig
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from fsdp_offload import HybridDeviceOptimizer, PagedStash

try:
    import triton
    import triton.language as tl
except ImportError:  # a build for CPUs
    triton = None

LAUNCHED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}  # torchrun's, or one process
VOCABULARY, EXPERTS, NULL_EXPERTS, TOP = 256, 8, 4, 2

if triton is not None:

    @triton.jit
    def swiglu_kernel(x, g, out, count, width, BACK: tl.constexpr, BLOCK: tl.constexpr):
        """Rows from the count on are neither read nor written."""
        for row in range(tl.program_id(0), tl.load(count), tl.num_programs(0)):
            for start in range(0, width, BLOCK):
                at = start + tl.arange(0, BLOCK)
                inside = at < width
                first = row.to(tl.int64) * 2 * width + at
                gate = tl.load(x + first, mask=inside, other=0).to(tl.float32)
                up = tl.load(x + first + width, mask=inside, other=0).to(tl.float32)
                s, at = tl.sigmoid(gate), row.to(tl.int64) * width + at
                if BACK:
                    above = tl.load(g + at, mask=inside, other=0).to(tl.float32)
                    tl.store(out + first, above * up * s * (1 + gate * (1 - s)), mask=inside)
                    tl.store(out + first + width, above * gate * s, mask=inside)
                else:
                    tl.store(out + at, gate * s * up, mask=inside)


class SwiGLU(torch.autograd.Function):
    """`silu(gate) * up` of the rows that exist; of all of them it is as slow as a product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: Tensor) -> Tensor:
        ctx.save_for_backward(x, count)
        out = x.new_empty(x.shape[0], x.shape[1] // 2)
        swiglu_kernel[(1024,)](x, x, out, count, out.shape[1], BACK=False, BLOCK=512)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        x, count = ctx.saved_tensors
        out = torch.empty_like(x)
        swiglu_kernel[(1024,)](x, g.contiguous(), out, count, g.shape[1], BACK=True, BLOCK=512)
        return out, None


def swiglu(x: Tensor, count: Tensor) -> Tensor:
    if x.is_cuda and triton is not None:
        return SwiGLU.apply(x, count)
    gate, up = x.chunk(2, dim=-1)  # rows beyond the count come to nothing, below
    return F.silu(gate) * up


class Gather(torch.autograd.Function):
    """Tokens of all ranks; backward sums each rank's gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return gathered(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return scattered(g)


class Scatter(torch.autograd.Function):
    """Sums over ranks, each rank its own tokens'; backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return scattered(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return gathered(g)


def gathered(x: Tensor) -> Tensor:
    out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(out, x.contiguous())
    return torch.cat(out)


def scattered(x: Tensor) -> Tensor:
    parts = [part.contiguous() for part in x.chunk(dist.get_world_size())]
    out = torch.empty_like(parts[0])
    dist.reduce_scatter(out, parts)
    return out


class Dispatch(torch.autograd.Function):
    """Rows of a buffer from tokens; gradients of rows that do not exist are not read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, exists: Tensor) -> Tensor:
        ctx.save_for_backward(token, exists)
        ctx.tokens = x.shape[0]
        return x[token]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        token, exists = ctx.saved_tensors
        out = g.new_zeros(ctx.tokens, g.shape[1])
        return out.index_add_(0, token, g.masked_fill(~exists[:, None], 0)), None, None


class Combine(torch.autograd.Function):
    """The weighted sum of each token's rows, of those that exist."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor, token: Tensor, exists: Tensor, n: int) -> Any:
        ctx.save_for_backward(y, weight, token, exists)
        rows = (y * weight[:, None]).masked_fill(~exists[:, None], 0)
        return y.new_zeros(n, y.shape[1]).index_add_(0, token, rows)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        y, weight, token, exists = ctx.saved_tensors
        rows = g[token]
        return rows * weight[:, None], (rows * y).sum(-1).masked_fill(~exists, 0), None, None, None


class MoE(nn.Module):
    def __init__(self, dim: int, width: int, stash: PagedStash | None) -> None:
        super().__init__()
        self.mine = EXPERTS // dist.get_world_size()
        self.router = nn.Linear(dim, EXPERTS + NULL_EXPERTS, bias=False)
        every = torch.randn(EXPERTS, dim, 2 * width) / dim**0.5  # the same with any number of ranks
        self.up = nn.Parameter(every.split(self.mine)[dist.get_rank()].clone())
        self.down = nn.Parameter(torch.zeros(self.mine, width, dim))
        self.stash = stash

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens, dim) to the same, and a loss that is least where experts have equal loads."""
        shares = self.router(x).float().softmax(-1)
        weight, expert = shares.topk(TOP, dim=-1)
        loads = F.one_hot(expert, EXPERTS + NULL_EXPERTS).float().mean((0, 1))
        balance = (EXPERTS + NULL_EXPERTS) * (loads * shares.mean(0)).sum()
        with self.stash.group() if self.stash else nullcontext() as group:
            return self.routed(x, weight, expert, group), balance

    def routed(self, x: Tensor, weight: Tensor, expert: Tensor, group: Any) -> Tensor:
        x, weight = Gather.apply(x), Gather.apply(weight.to(x.dtype)).flatten()
        expert = gathered(expert).flatten() - dist.get_rank() * self.mine
        expert = torch.where((expert < 0) | (expert > self.mine), self.mine, expert)  # not here
        order = expert.argsort(stable=True)[: x.shape[0] * min(TOP, self.mine)]  # the worst case
        mine = torch.arange(self.mine, device=x.device)
        ends = (expert[:, None] == mine).sum(0).cumsum(0).int()
        count = ends[-1:].clone()
        exists = torch.arange(order.numel(), device=x.device) < count
        token = order // TOP
        rows = Dispatch.apply(x, token, exists)
        if group is not None:
            group.rows(rows, count)
        hidden = swiglu(F.grouped_mm(rows, self.up, offs=ends), count)
        hidden = F.grouped_mm(hidden, self.down, offs=ends)
        return Scatter.apply(Combine.apply(hidden, weight[order], token, exists, x.shape[0]))


class Block(nn.Module):
    def __init__(self, dim: int, stash: PagedStash | None) -> None:
        super().__init__()
        self.heads = max(1, dim // 32)
        self.attention_norm, self.moe_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out = (nn.Linear(dim, n * dim, bias=False) for n in (3, 1))
        self.moe = MoE(dim, 2 * dim, stash)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        batch, seq, dim = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, seq, 3, self.heads, -1)
        mixed = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, dim))
        y, balance = self.moe(self.moe_norm(x).flatten(0, 1))
        return x + y.view_as(x), balance


class GPT(nn.Module):
    def __init__(self, layers: int, dim: int, seq: int, stash: PagedStash | None) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, dim), nn.Embedding(seq, dim)
        self.blocks = nn.ModuleList(Block(dim, stash) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x, balance = self.tokens(inputs) + self.places.weight, 0.0
        for block in self.blocks:
            x, more = block(x)
            balance = balance + more
        logits = self.head(self.norm(x)).float().flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten()) + 0.01 * balance


def read_text() -> Tensor:
    """The sources of Python's standard library, as bytes; the same on every rank."""
    data = bytearray()
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        data += file.read_bytes()
    return torch.frombuffer(data, dtype=torch.uint8)


def start_process_group() -> torch.device:
    rank, local, world = (int(os.environ.get(name, default)) for name, default in LAUNCHED.items())
    is_cuda = torch.cuda.device_count() > local
    device = torch.device("cuda", local) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    store = None if "RANK" in os.environ else dist.HashStore()  # torchrun's, or of this process
    dist.init_process_group("nccl" if is_cuda else "gloo", store=store, rank=rank, world_size=world)
    return device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-stash", action="store_true", help="keep whole buffers")
    for name, size in (("steps", 100), ("batch", 8), ("seq", 128), ("layers", 3), ("dim", 128)):
        parser.add_argument(f"--{name}", type=int, default=size)
    args = parser.parse_args()
    device, text = start_process_group(), read_text()
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # every rank draws the same weights
    stash = None if args.no_stash else PagedStash(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # of grouped products
    model = GPT(args.layers, args.dim, args.seq, stash).to(device, dtype)
    experts = [p for block in model.blocks for p in (block.moe.up, block.moe.down)]
    for module in (*model.blocks, model):
        fully_shard(module, ignored_params=set(experts))
    optimizer = HybridDeviceOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3), model)
    for step in range(args.steps):
        random = torch.Generator().manual_seed(1000 * step + rank)
        starts = torch.randint(len(text) - args.seq - 1, (args.batch,), generator=random)
        rows = torch.stack([text[i : i + args.seq + 1] for i in starts.tolist()]).long().to(device)
        forward = lambda retry, rows=rows: model(rows[:, :-1], rows[:, 1:])  # noqa: E731
        loss = forward(False) if stash is None else stash.run(forward)
        loss.backward()
        for parameter in experts:  # sums over all ranks' tokens, where FSDP2's are means
            parameter.grad.div_(world)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0 and stash is not None:
            print(f"rank {rank}: {stash.prepare().explain()}")
        if rank == 0 and (step % 10 == 0 or step + 1 == args.steps):
            print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)
    if stash is not None and rank == 0:
        now = stash.statistics()
        print(
            f"pages at most: {now.most_device_pages}, exact groups: {now.exact_groups}", flush=True
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)  # gloo's threads can abort the interpreter while it shuts down
