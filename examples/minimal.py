"""The smallest job: wrap an optimizer, train, save, and go on after a kill.

Start it with python or torchrun; `--resume` goes on from the last complete checkpoint.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_offload import HybridDeviceOptimizer, checkpoint

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--folder", type=Path, default=Path("checkpoints/run/minimal"))
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
if dist.is_torchelastic_launched():  # by torchrun
    if device.type != "cpu":
        torch.accelerator.set_device_index(dist.get_node_local_rank())
    dist.init_process_group()
    fully_shard(model)
model.to(device)
optimizer = HybridDeviceOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model=model)

first = 0
newest = checkpoint.latest(args.folder)  # complete ones only, whatever a kill has left
if args.resume and newest:
    first = checkpoint.load(newest, model, optimizer)["step"]
    print(f"resumed at step {first}", flush=True)

for step in range(first, args.steps):
    batch = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)).to(device)
    loss = (model(batch) - batch.sin()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"step {step} loss {loss.item():.9f}", flush=True)
    if (step + 1) % 5 == 0:
        path = args.folder / f"step-{step + 1:06d}"
        extra = {"step": step + 1}
        checkpoint.save(path, model, optimizer, extra=extra, overwrite=True, keep_last=3)
optimizer.close()
if dist.is_initialized():
    dist.destroy_process_group()
