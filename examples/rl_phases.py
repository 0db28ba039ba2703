"""Train a policy, leave the device, generate there, come back: one loop of reinforcement learning.

    python examples/rl_phases.py
    torchrun --nproc-per-node 2 examples/rl_phases.py --iterations 60

A character-level transformer learns to write words of Python's standard library. In each
iteration the trainer (FSDP2 shards, their gradients, the optimizer's state) leaves the device, and
a generation copy (bf16 weights and a cache of keys and values, at fixed addresses) takes its place.
On a GPU one step of decoding is a CUDA graph, captured once and replayed in every iteration. What
is written is rewarded by how many of its characters belong to words that are new in their row, and
REINFORCE trains on it. At the end a table says where the time went.
"""

import argparse
import contextlib
import os
import re
import statistics
import sys
import sysconfig
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from fsdp_offload import FixedAddressRegion, HybridDeviceOptimizer, PhaseOffloader

CHARACTERS = " abcdefghijklmnopqrstuvwxyz"
MIN_WORD, COMMON = 2, 20  # a word has so many letters and comes so often in the text
DISCOUNT = 0.8  # of later rewards: a character matters for its own word and the next


class Block(nn.Module):
    WIDTH = 32  # of a head

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def split(self, x: Tensor) -> Tensor:
        """Query, key and value, `(3, batch, heads, time, width)`."""
        qkv = self.qkv(self.attention_norm(x))
        return qkv.unflatten(2, (3, -1, self.WIDTH)).permute(2, 0, 3, 1, 4)

    def join(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        return self.join(x, F.scaled_dot_product_attention(*self.split(x), is_causal=True))

    def decode(self, x: Tensor, position: Tensor, cache: Tensor) -> Tensor:
        """One more character of each row; `cache` holds keys and values of those before it."""
        query, key, value = self.split(x)
        cache[0].index_copy_(2, position, key)
        cache[1].index_copy_(2, position, value)
        seen = (torch.arange(cache.shape[3], device=x.device) <= position)[None]
        return self.join(x, F.scaled_dot_product_attention(query, *cache, attn_mask=seen))


class Writer(nn.Module):
    """The policy. Trainer and generator are two of it."""

    def __init__(self, layers: int, dim: int, length: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(CHARACTERS), dim)
        self.places = nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, len(CHARACTERS), bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        """`(batch, time)` characters to logits of the next ones."""
        x = self.characters(rows) + self.places.weight[: rows.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).float()


class Generator:
    """A copy of the policy that writes. All it holds is in one region of fixed addresses.

    Nothing in there has to survive a pause: weights are copied anew, the cache starts empty.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.region = FixedAddressRegion("generator", device)
        with torch.device("meta"):
            self.model = Writer(args.layers, args.dim, args.length).requires_grad_(False)
        for name, shape_only in list(self.model.named_parameters()):
            owner, _, last = name.rpartition(".")
            kept = self.region.empty(shape_only.shape, dtype=torch.bfloat16)
            setattr(self.model.get_submodule(owner), last, nn.Parameter(kept, False))
        heads = (args.batch, args.dim // Block.WIDTH, args.length, Block.WIDTH)
        self.cache = self.region.empty((args.layers, 2, *heads), dtype=torch.bfloat16)
        self.rows = self.region.empty((args.batch, args.length + 1), dtype=torch.int64)
        self.position = self.region.empty((1,), dtype=torch.int64)
        self.graph: torch.cuda.CUDAGraph | None = None

    def copy_weights(self, trainer: nn.Module) -> None:
        """The trainer's shards, gathered from all ranks, rounded to bf16."""
        for mine, theirs in zip(self.model.parameters(), trainer.parameters(), strict=True):
            mine.copy_(theirs.detach().full_tensor())

    def write(self) -> Tensor:
        """`(batch, length + 1)` characters, the first a space: one decode step per character."""
        self._begin()
        if self.rows.is_cuda and self.graph is None:
            self._capture()
            self._begin()
        for _ in range(self.cache.shape[4]):
            self.graph.replay() if self.graph else self._decode()
        return self.rows.clone()

    def _begin(self) -> None:
        for kept in (self.cache, self.rows, self.position):
            kept.zero_()

    def _decode(self) -> None:
        """Everything is on the device, the position and the draw too, so a graph can hold it."""
        x = self.model.characters(self.rows.index_select(1, self.position))
        x = x + self.model.places(self.position)
        for block, cache in zip(self.model.blocks, self.cache, strict=True):
            x = block.decode(x, self.position, cache)
        chances = self.model.head(self.model.norm(x)).float().softmax(-1)
        drawn = (chances / torch.empty_like(chances).exponential_()).argmax(-1)
        self.position += 1
        self.rows.index_copy_(1, self.position, drawn)

    def _capture(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # a first run loads kernels and libraries: not in a capture
            self._decode()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._decode()


class Text:
    """The standard library's sources as lower-case letters and single spaces."""

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:40]
        text = " ".join(file.read_text(errors="ignore") for file in files)
        text = re.sub("[^a-z]+", " ", text.lower())
        counts = Counter(text.split())
        self.words = {w for w, n in counts.items() if n >= COMMON and len(w) >= MIN_WORD}
        self.codes = torch.tensor([CHARACTERS.index(letter) for letter in text])

    def rewards(self, rows: Tensor) -> Tensor:
        """`(batch, length)`: 1 for each character of a word that is new in its row, else 0."""
        found = torch.zeros(rows.shape)
        for reward, row in zip(found, rows.tolist(), strict=True):
            new = set(self.words)
            for run in re.finditer("[a-z]+", self.spelled(row)):
                reward[run.start() : run.end()] = run[0] in new
                new.discard(run[0])
        return found[:, 1:].to(rows.device)

    def spelled(self, row: list[int]) -> str:
        return "".join(CHARACTERS[code] for code in row)

    def batch(self, step: int, rows: int, length: int) -> Tensor:
        """`(rows, length + 1)` characters of the text, others on each rank."""
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        starts = torch.randint(len(self.codes) - length, (rows, 1), generator=generator)
        return self.codes[starts + torch.arange(length + 1)]


def advantages(rewards: Tensor) -> Tensor:
    """What came after each character, against the average of all rows at that place."""
    returns = rewards.clone()
    for place in reversed(range(returns.shape[1] - 1)):
        returns[:, place] += DISCOUNT * returns[:, place + 1]
    returns -= returns.mean(0)
    return returns / (returns.std() + 1e-6)


class Timeline:
    """Milliseconds and bytes of each phase."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = defaultdict(list)
        self.bytes: dict[str, int] = defaultdict(int)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times[name].append((time.perf_counter() - began) * 1e3)

    def show(self) -> None:
        whole = sum(map(sum, self.times.values()))
        print("phase          first ms   later ms    share   MB moved")
        for name, times in self.times.items():
            later, share = statistics.median(times[1:] or times), 100 * sum(times) / whole
            moved = f"{self.bytes[name] / 1e6:.2f}" if name in self.bytes else ""
            print(f"{name:14s} {times[0]:8.1f} {later:10.1f} {share:6.1f} % {moved:>10s}")


class Trainer:
    """The policy under FSDP2; half of its optimizer's state is in host memory at all times."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(0)  # every rank builds the same weights and keeps its shard of them
        self.model = Writer(args.layers, args.dim, args.length).to(device)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for module in (*self.model.blocks, self.model):
            fully_shard(module, mesh=mesh)
        adam = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.optimizer = HybridDeviceOptimizer(adam, model=self.model, offload_fraction=0.5)
        self.phases = PhaseOffloader(self.model, self.optimizer)

    def step(self, rows: Tensor, weights: Tensor | float) -> None:
        """Make each character of `(batch, length + 1)` but the first likelier, by its weight."""
        logits = self.model(rows[:, :-1]).transpose(1, 2)
        losses = F.cross_entropy(logits, rows[:, 1:], reduction="none")
        (weights * losses).mean().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def start_process_group() -> torch.device:
    """One GPU per rank where the host has that many, otherwise the CPU."""
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(dist.get_default_backend_for_device(device), **alone)
    return device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--iterations", type=int, default=40)
    add("--warm-up", type=int, default=100, help="steps on the text itself before")
    add("--batch", type=int, default=64, help="rows of each rank")
    add("--length", type=int, default=32, help="characters of a row")
    add("--layers", type=int, default=2)
    add("--dim", type=int, default=64, help="a multiple of 32")
    args = parser.parse_args()
    device = start_process_group()
    say = print if dist.get_rank() == 0 else lambda _: None
    text, trainer, timeline = Text(), Trainer(args, device), Timeline()
    generator = Generator(args, device)
    generator.region.pause(save=False)
    torch.manual_seed(1 + dist.get_rank())
    say(f"{dist.get_world_size()} x {device.type}, {len(text.words):,} words to write")
    for step in range(args.warm_up):
        trainer.step(text.batch(step, args.batch, args.length).to(device), 1.0)
    for iteration in range(args.iterations):
        with timeline.phase("sync weights"):
            generator.region.resume()
            generator.copy_weights(trainer.model)
        with timeline.phase("leave"):
            timeline.bytes["leave"] = trainer.phases.offload().n_bytes
        with timeline.phase("generate"):
            rows = generator.write()
            rewards = text.rewards(rows)
        with timeline.phase("come back"):
            generator.region.pause(save=False)
            timeline.bytes["come back"] = trainer.phases.reload().n_bytes
        with timeline.phase("train"):
            trainer.step(rows, advantages(rewards))
        dist.all_reduce(reward := rewards.mean() / dist.get_world_size())
        if iteration % 5 == 0 or iteration + 1 == args.iterations:
            say(f"iteration {iteration:3d}  reward {reward:.3f}  {text.spelled(rows[0].tolist())}")
    if dist.get_rank() == 0:
        timeline.show()
    trainer.phases.close()
    trainer.optimizer.close()
    generator.region.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # Gloo's threads can abort the interpreter while it shuts down; there is nothing left to do.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
