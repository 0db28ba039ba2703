"""The benchmark's job in one file: nothing of this package but the optimizer.

    python one_file_job.py plain-clip,default-clip,default-d2GiB-clip [--size big] [--json out.json]

A row is a kind and words, joined by ``-``. Kinds: ``plain`` (fused AdamW on the device),
``by_hand`` (over fp32 masters that a loop keeps), ``default`` (HybridDeviceOptimizer, no options),
``step``, ``forward``, ``backward`` (with that overlap). Words: ``clip`` (torch's clip_grad_norm_),
``bf16`` and ``int8`` (moments), ``f0`` (nothing is offloaded), ``d0``, ``d2GiB`` (device_memory),
``b64MiB`` (bucket_bytes), ``plainmodule`` (no FSDP2). Sizes: ``small`` (for a CPU), ``main``
(1.33 G parameters, 8192 tokens), ``deep`` (60 narrow layers, 4096), ``big`` (6.69 G, 16384,
activations are checkpointed), ``bigger`` (7.9 G). Times are from the beginning of the first timed
iteration to the end of the last one, over their number; peaks are those of the timed iterations.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fsdp_offload import HybridDeviceOptimizer, TransferConfig

SIZES = {  # dim, vocabulary, layers, tokens, sequence, checkpointed
    "small": (128, 1000, 2, 256, 128, False),
    "main": (2048, 60000, 24, 8192, 2048, False),
    "deep": (1280, 60000, 60, 4096, 2048, False),
    "big": (4096, 60000, 32, 16384, 2048, True),
    "bigger": (4096, 60000, 38, 16384, 2048, True),
}
PART = 4096
"""Tokens whose logits are made at a time, where activations are checkpointed."""


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.heads = max(1, dim // 128)
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, seq, 3, self.heads, -1)
        mixed = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, dim))
        return x + torch.as_tensor(self.down(F.gelu(self.up(self.mlp_norm(x)))))


def summed_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), targets, reduction="sum")


class Gpt(nn.Module):
    def __init__(self, size: str) -> None:
        super().__init__()
        dim, vocabulary, layers, _, _, self.is_checkpointed = SIZES[size]
        self.tokens = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        x, targets, weight = self.norm(x).flatten(0, 1), targets.flatten(), self.tokens.weight
        if not self.is_checkpointed:
            return F.cross_entropy(F.linear(x, weight), targets)
        parts = zip(x.split(PART), targets.split(PART), strict=True)
        losses = [checkpoint(summed_loss, a, weight, b, use_reentrant=False) for a, b in parts]
        return torch.stack(losses).sum() / len(targets)


class MastersByHand:
    """AdamW over fp32 copies; weights are rounded to nearest after each step."""

    def __init__(self, parameters: list[Any]) -> None:
        self._parameters = parameters
        self._masters = [nn.Parameter(p.to_local().detach().float()) for p in parameters]
        self._inner = torch.optim.AdamW(self._masters, lr=1e-4, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            master.grad = parameter.grad.to_local().float()
        self._inner.step()
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            parameter.to_local().copy_(master)

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def make_model(size: str, device: torch.device, mesh: DeviceMesh | None) -> nn.Module:
    torch.manual_seed(0)
    with device:
        model = Gpt(size).to(torch.bfloat16)
    narrow = 0.02 / (2 * SIZES[size][2]) ** 0.5
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            std = narrow if name.endswith(("out.weight", "down.weight")) else 0.02
            nn.init.normal_(parameter, std=std)
    if mesh is not None:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def make_optimizer(kind: str, words: list[str], model: nn.Module) -> Any:
    parameters = list(model.parameters())
    if kind == "by_hand":
        return MastersByHand(parameters)
    inner = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    if kind == "plain":
        return inner
    options: dict[str, Any] = {} if kind == "default" else {"overlap": kind}
    for word in words:
        if word in ("bf16", "int8"):
            options["moments"] = word
        elif word == "f0":
            options["offload_fraction"] = 0.0
        elif word[0] == "d" and word[1:2].isdigit():
            options["device_memory"] = word[1:]
        elif word[0] == "b" and word[1:2].isdigit():
            options["transfer"] = TransferConfig(bucket_bytes=word[1:])
    return HybridDeviceOptimizer(inner, model, **options)


def run(name: str, options: argparse.Namespace, device: torch.device, mesh: Any) -> dict[str, Any]:
    kind, *words = name.split("-")
    model = make_model(options.size, device, None if "plainmodule" in words else mesh)
    parameters, began = list(model.parameters()), time.perf_counter()
    optimizer = make_optimizer(kind, words, model)
    built_s = time.perf_counter() - began
    _, vocabulary, _, tokens, seq, _ = SIZES[options.size]
    generator = torch.Generator(device).manual_seed(1)
    shape = (4, tokens // seq, seq + 1)
    data = torch.randint(vocabulary, shape, device=device, generator=generator)
    is_cuda, count = device.type == "cuda", options.warm_up + options.iterations
    losses, starts = torch.zeros(count, device=device), []
    for index in range(count):
        if index == options.warm_up and is_cuda:
            torch.cuda.reset_peak_memory_stats()
        if is_cuda:
            starts.append(torch.cuda.Event(enable_timing=True))
            starts[-1].record()
        batch = data[index % 4]
        loss = model(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        loss.backward()
        losses[index].copy_(loss.detach())
        if "clip" in words:
            nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    row: dict[str, Any] = {"name": name, "built_s": built_s, "losses": losses.tolist()}
    if is_cuda:
        starts.append(torch.cuda.Event(enable_timing=True))
        starts[-1].record()
        torch.cuda.synchronize()
        timed = starts[options.warm_up :]
        each = [a.elapsed_time(b) for a, b in itertools.pairwise(timed)]
        row |= {"ms": timed[0].elapsed_time(timed[-1]) / options.iterations, "each_ms": each}
        row |= {"median_ms": statistics.median(each), "free": torch.cuda.mem_get_info()[0]}
        row |= {"peak": torch.cuda.max_memory_allocated(), "kept": torch.cuda.memory_reserved()}
        row["retries"] = torch.cuda.memory_stats()["num_alloc_retries"]
    if isinstance(optimizer, HybridDeviceOptimizer):
        row["optimizer"] = str(optimizer.statistics())
        optimizer.close()
    local = [p.to_local() if hasattr(p, "to_local") else p.detach() for p in parameters]
    row["weights"] = sum(int(p.view(torch.int16).long().sum()) for p in local)
    return row


def show(row: dict[str, Any], label: str) -> None:
    text = f"| {label} | {row['name']} "
    if "ms" in row:
        text += f"| {row['ms']:.1f} ms | median {row['median_ms']:.1f} "
        text += f"| peak {row['peak'] / 2**30:.2f} GiB, kept {row['kept'] / 2**30:.2f} "
        text += f"| free {row['free'] / 2**30:.1f}, retries {row['retries']} "
    last = row.get("losses", [0.0])[-1]
    print(f"{text}| loss {last:.4f} | weights {row.get('weights')} | {row.get('error', '')}")
    for line in str(row.get("optimizer", "")).splitlines()[3:4]:
        print("   ", line.strip(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows")
    parser.add_argument("--size", choices=SIZES, default="main")
    parser.add_argument("--warm-up", type=int, default=14)
    parser.add_argument("--iterations", type=int, default=14)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--label", default="")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.deterministic:  # with CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    device = torch.device("cpu") if options.size == "small" else torch.device("cuda", 0)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        mesh = init_device_mesh(device.type, (1,))
        for name in options.rows.split(","):
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            try:
                rows.append(run(name, options, device, mesh))
            except torch.OutOfMemoryError as error:
                rows.append({"name": name, "error": str(error)[:200]})
            show(rows[-1], options.label or options.size)
            if options.json is not None:
                options.json.write_text(json.dumps(rows))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
