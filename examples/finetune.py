"""Fine-tune a causal language model of Hugging Face; the optimizer's state lies in host memory.

    python examples/finetune.py MODEL TEXTS --out runs/tuned         # one GPU
    torchrun --nproc-per-node 8 examples/finetune.py MODEL TEXTS --out runs/tuned

MODEL is a folder that `from_pretrained` reads, or a `config.json`: then weights are random. TEXTS
is a folder of text files. `--resume` goes on after a kill. `from_pretrained` reads the result,
`OUT/model-<steps>`. It needs `pip install transformers`.
"""

import argparse
import functools
import math
import os
import shutil
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from fsdp_offload import HybridDeviceOptimizer, checkpoint, shard

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("model", type=Path, help="folder with weights, or a config.json")
parser.add_argument("texts", type=Path, help="folder of text files")
parser.add_argument("--out", type=Path, required=True, help="for checkpoints and the result")
parser.add_argument("--resume", action="store_true", help="go on from the latest checkpoint")
parser.add_argument("--steps", type=int, default=1000, help="in all, with those before a resume")
parser.add_argument("--batch", type=int, default=8, help="rows of a step, all ranks together")
parser.add_argument("--seq", type=int, default=1024, help="tokens of a row")
parser.add_argument("--lr", type=float, default=1e-5)
parser.add_argument("--warmup", type=int, default=50, help="steps before --lr is reached")
parser.add_argument("--clip", type=float, default=1.0, help="largest norm of all gradients")
parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
parser.add_argument("--offload", choices=("state", "all"), default="state", help="all: weights too")
parser.add_argument("--recompute", action="store_true", help="activation checkpointing")
parser.add_argument("--save-every", type=int, default=200)
parser.add_argument("--log-every", type=int, default=10)


def read_tokens(folder, tokenizer, vocabulary):
    """Of all files, in sorted order, so the same on every rank. Without a tokenizer: bytes."""
    tokens = []
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        if tokenizer:
            tokens += tokenizer(file.read_text(), verbose=False).input_ids
        else:
            tokens += [byte % vocabulary for byte in file.read_bytes()]
    return torch.tensor(tokens)


def rows_of(step, tokens, args):
    """Of all ranks; a function of the step, so that a resumed job sees the same ones."""
    last = len(tokens) - args.seq
    starts = torch.randint(last + 1, (args.batch,), generator=torch.Generator().manual_seed(step))
    return torch.stack([tokens[start : start + args.seq] for start in starts.tolist()])


def build(config, args):
    """The model in shards. No rank holds it whole, if MODEL is a folder."""
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    with torch.device("meta" if args.model.is_dir() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if args.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    # With --offload all the weights go from the CPU to the optimizer: the GPU never holds them all.
    place = OffloadPolicy() if args.offload == "state" else CPUOffloadPolicy(pin_memory=False)
    shard(model, mp_policy=policy, offload_policy=place)
    if args.model.is_dir():
        checkpoint.load(args.model, model)  # from the files to the shards
    return model.train()


def check(args, runs, exported):
    """Refuse before the training what would fail after it, or replace another job's checkpoints."""
    if args.model.is_dir() and not any(args.model.glob("*.safetensors")):
        config = args.model / "config.json"
        raise SystemExit(f"{args.model} has no *.safetensors; for random weights, pass {config}")
    if not args.texts.is_dir():
        raise SystemExit(f"{args.texts} is not there, or not a folder: name a folder of text files")
    if not args.resume and checkpoint.latest(runs):
        raise SystemExit(f"{runs} holds checkpoints: go on with --resume, or use another --out")
    if exported.exists():
        raise SystemExit(f"{exported} exists already: give more --steps, or use another --out")


def main():
    args = parser.parse_args()
    runs, exported = args.out / "checkpoints", args.out / f"model-{args.steps:06d}"
    check(args, runs, exported)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)))
    config = AutoConfig.from_pretrained(args.model)
    model = build(config, args)
    rank, world = dist.get_rank(), dist.get_world_size()
    say = functools.partial(print, flush=True) if rank == 0 else lambda _: None

    folder = args.model if args.model.is_dir() else args.model.parent
    has_tokenizer = [*folder.glob("tokenizer*"), *folder.glob("vocab*")]
    tokenizer = AutoTokenizer.from_pretrained(folder) if has_tokenizer else None
    tokens = read_tokens(args.texts, tokenizer, config.vocab_size)
    say(f"{len(tokens):,} tokens of text, {world} x {device.type}")
    if args.batch % world:
        raise SystemExit(f"--batch {args.batch} is not a multiple of {world} ranks")
    if args.seq > len(tokens):
        raise SystemExit(f"--seq {args.seq} is more than the {len(tokens)} tokens of {args.texts}")

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    optimizer = HybridDeviceOptimizer(optimizer, model, offload=args.offload)  # <- the one line

    def factor(step):
        cosine = 0.5 + 0.5 * math.cos(math.pi * step / args.steps)
        return min((step + 1) / max(1, args.warmup), cosine)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    first, latest = 0, checkpoint.latest(runs)  # complete ones only, whatever a kill has left
    if latest:
        extra = checkpoint.load(latest, model, optimizer)
        scheduler.load_state_dict(extra["scheduler"])
        first = extra["step"]
        say(f"resumed at step {first}")
    elif args.resume:
        say(f"no checkpoint in {runs}: begins at step 0")

    logged, begin = first, time.perf_counter()
    for step in range(first + 1, args.steps + 1):
        torch.manual_seed(step * world + rank)  # dropout, too, is a function of the step
        rows = rows_of(step, tokens, args)[rank::world].to(device)
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step % args.log_every == 0 or step == args.steps:
            mean = loss.detach() / world
            dist.all_reduce(mean)
            line = f"step {step} loss {mean.item():.9f}"  # waits for the device
            n_tokens, seconds = (step - logged) * args.batch * args.seq, time.perf_counter() - begin
            say(f"{line} {n_tokens / seconds:,.0f} tokens/s")
            logged, begin = step, time.perf_counter()
        if step % args.save_every == 0 or step == args.steps:
            extra = {"step": step, "scheduler": scheduler.state_dict()}
            path = runs / f"step-{step:06d}"
            checkpoint.save(path, model, optimizer, extra=extra, overwrite=True, keep_last=2)

    say(optimizer)
    if device.type != "cpu":
        say(f"GPU peak {torch.accelerator.max_memory_allocated() / 2**30:.1f} GiB")
    checkpoint.export_safetensors(model, exported)
    say(f"exported to {exported}")
    if rank == 0:
        model.config.save_pretrained(exported)
        if tokenizer:
            tokenizer.save_pretrained(exported)
        if (folder / "generation_config.json").exists():
            shutil.copy(folder / "generation_config.json", exported)
    optimizer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
