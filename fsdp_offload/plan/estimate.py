"""What a job takes, and how long an iteration is, from its size alone: no GPU is asked.

[Note: memory]
An iteration has two peaks. When the backward begins, activations and logits are there and no
gradients; when it ends, all gradients, and what one block needs. FSDP2 keeps the shards, and beside
them whole copies of the root's parameters and of two blocks, with one rank too.

[Note: time]
Matrix products take their FLOPs over what the card reaches at that width (:data:`REACHED`), but not
less than the host takes to enqueue them; updates take their bytes over the card's bandwidth. State
that travels passes the link both ways at the same time. With ``"forward"`` it is hidden behind the
forward, and behind the rest of the iteration as much of it as slots hold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from ..core.config import GIB, SMALL_BUCKET_BYTES
from .residency import margin_bytes, most_slots

MOST_GPUS: Final = 4096
CONTEXT_BYTES: Final = 600 << 20
"""That CUDA, cuBLAS and NCCL take beside torch's allocator."""


@dataclass(frozen=True)
class Card:
    """One GPU and its link to host memory, as the makers' sheets have them; the link as measured or
    three quarters of the sheet's."""

    memory_bytes: int
    flops_per_s: float  # bf16, dense
    bytes_per_s: float  # of device memory
    link_bytes_per_s: float  # each way, while both are busy


CARDS: Final = {
    "h100-80": Card(int(79.2 * GIB), 989e12, 3.35e12, 41e9),
    "h200": Card(int(139.8 * GIB), 989e12, 4.8e12, 41e9),
    "b200": Card(int(178 * GIB), 2250e12, 8e12, 41e9),
    "gh200": Card(int(94.5 * GIB), 989e12, 4e12, 200e9),
    "a100-80": Card(int(79.1 * GIB), 312e12, 2.04e12, 20e9),
    "a100-40": Card(int(39.4 * GIB), 312e12, 1.56e12, 20e9),
    "l40s": Card(int(44.4 * GIB), 362e12, 0.86e12, 20e9),
    "rtx-4090": Card(int(23.5 * GIB), 165e12, 1.01e12, 20e9),
    "rtx-5090": Card(int(31.4 * GIB), 210e12, 1.79e12, 41e9),
}

REACHED: Final = ((1024, 0.33), (2048, 0.51), (4096, 0.64), (8192, 0.66))
"""Share of a card's FLOPs that forward and backward reach, by width: H100, whole iterations."""

HOST_MS_PER_BLOCK: Final = 4.5
"""That the host takes for one FSDP2 group, forward, backward and update: 3.7 on one H100, 5 on two
(docs/benchmarks/iteration_h100_2026-11-24.md, jobs of 2048 and 4096 tokens)."""


@dataclass(frozen=True)
class Model:
    """A decoder of equal blocks, embedding and output projection."""

    params: int
    layers: int
    width: int
    vocabulary: int
    saved_widths: float = 16.0
    """Elements that a block saves for its backward, per token, in widths: 8 and, of the MLP, two
    per unit (four where it is gated)."""

    @classmethod
    def of_size(cls, params: float, vocabulary: int = 60000) -> Model:
        """The usual shape for so many parameters: 128 elements of width for each layer."""
        width = 128 * max(1, round((params * 128 / 12) ** (1 / 3) / 128))
        layers = max(1, round((params - vocabulary * width) / (12 * width * width)))
        return cls(int(params), layers, width, vocabulary)

    @property
    def block_params(self) -> float:
        """Of one block, without embedding and projection."""
        return (self.params - self.root_params) / self.layers

    @property
    def root_params(self) -> int:
        """Embedding and norm; a projection of its own is counted among the blocks."""
        return self.vocabulary * self.width


@dataclass(frozen=True)
class Workload:
    """What each GPU trains with."""

    tokens: int  # per iteration and GPU
    seq: int = 2048
    gpus: int = 1
    checkpointed: bool = True
    shard_bytes: int = 2  # of one element: 2 (bf16), 4 (fp32)
    moments: str = "fp32"

    @property
    def state_bytes(self) -> float:
        """Optimizer state of one parameter that travels each way."""
        moments = {"fp32": 8.0, "bf16": 4.0, "int8": 2.125}[self.moments]
        return moments + (2 if self.shard_bytes == 2 else 0)  # the remainder of the master


@dataclass(frozen=True)
class Estimate:
    """Of one GPU; bytes and milliseconds."""

    weights_bytes: float
    gradients_bytes: float
    unsharded_bytes: float
    activations_bytes: float
    """Activations, logits and their gradients at the higher of the two peaks."""
    state_bytes: float
    stays_bytes: float
    """Of the state, on the device all the time."""
    slots_bytes: float
    host_bytes: float
    peak_bytes: float
    """Of torch's allocator, what stays and slots counted."""
    compute_ms: float
    update_ms: float
    exposed_ms: float
    """Travel that nothing hides."""

    @property
    def travels_bytes(self) -> float:
        """Of the state, each way in each iteration."""
        return self.state_bytes - self.stays_bytes

    @property
    def iteration_ms(self) -> float:
        """All of it."""
        return self.compute_ms + self.update_ms + self.exposed_ms

    @property
    def share_of_bound(self) -> float:
        """The time of an iteration whose state is free, over this one's."""
        return (self.compute_ms + self.update_ms) / self.iteration_ms


def estimate(
    model: Model, work: Workload, card: Card, device_memory_bytes: float | None = None
) -> Estimate | None:
    """What a GPU takes, with so much memory for state, or (None) with what is to spare, as
    ``device_memory="auto"``. Returns None where it does not fit."""
    shards = model.params / work.gpus
    weights, gradients = work.shard_bytes * shards, work.shard_bytes * shards
    unsharded = 2 * (model.root_params + 2 * model.block_params)
    bare = _bare_peak(model, work, weights, gradients, unsharded)
    state = work.state_bytes * shards
    most = card.memory_bytes - CONTEXT_BYTES - margin_bytes(card.memory_bytes) - bare
    allowed = most if device_memory_bytes is None else min(device_memory_bytes, most)
    stays, slots = _divide(state, max(0.0, allowed))
    if stays + slots > most:
        return None
    compute_ms = 1e3 * _flops(model, work) / (card.flops_per_s * reached(model.width))
    compute_ms = max(compute_ms, HOST_MS_PER_BLOCK * model.layers)
    passes = 2 * work.state_bytes + 3 * work.shard_bytes  # state and shard both ways, gradient
    forward_ms = compute_ms / (4 if work.checkpointed else 3)
    link_ms = 1e3 * (state - stays) / card.link_bytes_per_s
    ahead_ms = 1e3 * slots / card.link_bytes_per_s
    return Estimate(
        weights_bytes=weights,
        gradients_bytes=gradients,
        unsharded_bytes=unsharded,
        activations_bytes=max(bare - weights - gradients - unsharded, 0.0),
        state_bytes=state,
        stays_bytes=stays,
        slots_bytes=slots,
        host_bytes=state,
        peak_bytes=bare + stays + slots,
        compute_ms=compute_ms,
        update_ms=1e3 * shards * passes / card.bytes_per_s / 0.8,
        exposed_ms=max(0.0, link_ms - forward_ms - ahead_ms),
    )


def _bare_peak(
    model: Model, work: Workload, weights: float, gradients: float, unsharded: float
) -> float:
    """Without optimizer state: see [Note: memory]."""
    block = 2 * model.saved_widths * model.width * work.tokens
    kept = 2 * model.width * work.tokens if work.checkpointed else block
    logits = 3 * 2 * model.vocabulary * work.tokens  # with the log-probabilities and a gradient
    begins = weights + model.layers * kept + logits + 2 * model.root_params
    block_gradients = 2 * 2 * model.block_params  # and the buffer of their reduction
    ends = weights + gradients + unsharded + block + block_gradients
    return max(begins, ends)


def _divide(state: float, allowed: float) -> tuple[float, float]:
    """What stays, and slots: as :func:`.residency.choose`."""
    if state <= allowed:
        return state, 0.0
    slots = float(SMALL_BUCKET_BYTES * most_slots(int(allowed), SMALL_BUCKET_BYTES))
    return max(0.0, allowed - slots), slots


def _flops(model: Model, work: Workload) -> float:
    passes = 4 if work.checkpointed else 3  # forward, backward twice that, and forward again
    products = 2 * model.params * work.tokens
    attention = 2 * model.layers * work.tokens * work.seq * model.width  # causal
    return float(passes * (products + attention))


def reached(width: int) -> float:
    """Share of the card's FLOPs, between two entries of :data:`REACHED` by the logarithm."""
    (first, share), *rest = REACHED
    if width <= first:
        return share
    for second, upper in rest:
        if width <= second:
            part = math.log(width / first) / math.log(second / first)
            return share + part * (upper - share)
        first, share = second, upper
    return share


def fewest_gpus(model: Model, work: Workload, card: Card) -> int | None:
    """The smallest power of two of GPUs on which it fits; None: not on
    :data:`MOST_GPUS`."""
    gpus = 1
    while gpus <= MOST_GPUS:
        if estimate(model, replace(work, gpus=gpus), card) is not None:
            return gpus
        gpus *= 2
    return None
