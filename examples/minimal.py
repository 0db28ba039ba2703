"""The smallest job: wrap an optimizer, train, save, and go on after a kill.

Start it with python or torchrun; `--resume` goes on from the last complete checkpoint.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fsdp_offload
from fsdp_offload import HybridDeviceOptimizer, checkpoint

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--folder", type=Path, default=Path("checkpoints/run/minimal"))
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
model = fsdp_offload.shard(model)  # on one GPU, or on those of torchrun
device = next(model.parameters()).device
optimizer = HybridDeviceOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model=model)

first = 0
newest = checkpoint.latest(args.folder)  # complete ones only, whatever a kill has left
if args.resume and not newest:
    print(f"no checkpoint in {args.folder}: begins at step 0", flush=True)
elif args.resume:
    first = checkpoint.load(newest, model, optimizer)["step"]
    print(f"resumed at step {first}", flush=True)
if first >= args.steps:
    print(f"nothing left to train: give more than --steps {args.steps}", flush=True)

for step in range(first, args.steps):
    batch = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)).to(device)
    loss = (model(batch) - batch.sin()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step} loss {loss.item():.9f}", flush=True)
    if (step + 1) % 5 == 0:
        path = args.folder / f"step-{step + 1:06d}"
        extra = {"step": step + 1}
        checkpoint.save(path, model, optimizer, extra=extra, overwrite=True, keep_last=3)
if dist.get_rank() == 0:
    print(optimizer)  # says what is in CPU memory
optimizer.close()
dist.destroy_process_group()
