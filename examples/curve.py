"""A notebook in cells: train a small GPT with and without offload, and draw both losses.

``python examples/curve.py`` runs all cells; editors that know ``# %%`` run them one by one.
"""

# %% Text as bytes, and batches that are the same in both runs
import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fsdp_offload
from fsdp_offload import HybridDeviceOptimizer

STEPS, BATCH, LENGTH, WIDTH = 60, 4, 32, 64
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
text = torch.tensor([*Path(argparse.__file__).read_bytes()], device=device)


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=generator)
    return torch.stack([text[start : start + LENGTH + 1] for start in starts])


# %% The model: its blocks are what `shard` shards
class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.bytes(inputs) + self.places(torch.arange(LENGTH, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=tokens.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


# %% One training loop; `offloads` adds the two lines of this package
def train(offloads: bool) -> list[float]:
    torch.manual_seed(0)
    model = GPT().to(device)
    if offloads:
        model = fsdp_offload.shard(model)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    if offloads:
        optimizer = HybridDeviceOptimizer(optimizer, model, offload="all", device_memory=0)
    losses = []
    for step in range(STEPS):
        loss = model(batch(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if offloads:
        print(optimizer)
    return torch.stack(losses).tolist()


# %% Both runs
plain, offloaded = train(offloads=False), train(offloads=True)

# %% The curve: `o` with offload, `.` without where they differ
for step in range(0, STEPS, 3):
    places = {round(10 * plain[step]): ".", round(10 * offloaded[step]): "o"}
    line = "".join(places.get(place, " ") for place in range(60))
    print(f"step {step:3} loss {offloaded[step]:.4f} |{line.rstrip()}")
print("the losses are", "equal, bit for bit" if plain == offloaded else "not equal")
