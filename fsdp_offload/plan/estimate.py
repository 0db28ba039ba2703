"""Estimate the memory of a job from its size alone, without a GPU.

An iteration has two peaks. When the backward begins, memory holds activations and logits, but no
gradients; when it ends, all gradients and the activations of one block. FSDP2 keeps the shards and
all-gathered copies of the root's parameters and of two blocks, even with one rank.

Nothing here models how fast a GPU is: :func:`bounds_ms` takes the caller's figures.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Final

from ..core.config import SMALL_BUCKET_BYTES
from .residency import LEAST_SLOTS, choose_travelling, margin_bytes, most_slots

MOST_GPUS: Final = 4096
CONTEXT_BYTES: Final = 600 << 20
"""Bytes that CUDA, cuBLAS and NCCL take outside torch's allocator."""
GATHER_SLOTS: Final = 3
"""Groups of offloaded weights on the device at a time."""
GRADIENT_SLOTS: Final = 2
"""Groups of offloaded gradients on the device at a time."""


@dataclass(frozen=True)
class Model:
    """A decoder of equal blocks, embedding and output projection."""

    params: int
    layers: int
    width: int
    vocabulary: int
    saved_widths: float = 16.0
    """Elements that a block saves for backward, per token, in widths: 8, plus two per unit of the
    MLP (four if it is gated)."""

    @classmethod
    def of_size(cls, params: float, vocabulary: int = 60000) -> Model:
        """Assume the usual shape for so many parameters: 128 elements of width per layer."""
        # A block has 12 width ** 2 parameters: 4 in attention, 8 in the MLP.
        width = 128 * max(1, round((params * 128 / 12) ** (1 / 3) / 128))
        vocabulary = min(vocabulary, int(params / 2 / width))  # else small models have no blocks
        layers = max(1, round((params - vocabulary * width) / (12 * width * width)))
        return cls(int(params), layers, width, vocabulary)

    @property
    def block_params(self) -> float:
        """Parameters of one block, without embedding and projection."""
        return (self.params - self.root_params) / self.layers

    @property
    def root_params(self) -> int:
        """Parameters of embedding and norm; the blocks count an untied projection."""
        return self.vocabulary * self.width


@dataclass(frozen=True)
class Workload:
    """Work of each GPU."""

    tokens: int  # per iteration and GPU
    gpus: int = 1
    checkpointed: bool = True
    shard_bytes: int = 2  # per element: 2 (bf16), 4 (fp32)
    moments: str = "fp32"
    offload: str = "state"  # "all": weights and gradients may leave as well

    @property
    def state_bytes(self) -> float:
        """Bytes of optimizer state per parameter that move each way."""
        moments = {"fp32": 8.0, "bf16": 4.0, "int8": 2.125}[self.moments]
        return moments + (2 if self.shard_bytes == 2 else 0)  # the remainder of the master


@dataclass(frozen=True)
class Estimate:
    """Bytes of one GPU."""

    weights_bytes: float
    gradients_bytes: float
    unsharded_bytes: float
    activations_bytes: float
    """Activations, logits and their gradients at the higher of the two peaks."""
    state_bytes: float
    stays_bytes: float
    """State that stays on the device."""
    slots_bytes: float
    """Transfer slots for state, weights and gradients."""
    host_bytes: float
    peak_bytes: float
    """Peak of torch's allocator, with state that stays and slots."""
    missing_bytes: float
    """Bytes of the peak beyond the GPU's memory less CUDA's own and a margin; 0: the job fits."""
    weights_away_bytes: float = 0.0
    gradients_away_bytes: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether the job fits into the GPU."""
        return self.missing_bytes == 0

    @property
    def in_bytes(self) -> float:
        """Bytes to the device per iteration. Weights move for backward and update."""
        state = self.state_bytes - self.stays_bytes
        return state + self.gradients_away_bytes + 2 * self.weights_away_bytes

    @property
    def out_bytes(self) -> float:
        """Bytes to the host per iteration."""
        state = self.state_bytes - self.stays_bytes
        return state + self.gradients_away_bytes + self.weights_away_bytes


def estimate(
    model: Model, work: Workload, memory_bytes: int, device_memory_bytes: float | None = None
) -> Estimate:
    """Estimate the memory of one GPU.

    Args:
        memory_bytes: memory of the GPU.
        device_memory_bytes: limit for state; ``None``: what remains, as with
            ``device_memory="auto"``.
    """
    shards = model.params / work.gpus
    weights = gradients = work.shard_bytes * shards
    unsharded = 2 * (model.root_params + 2 * model.block_params)
    state = work.state_bytes * shards
    total = memory_bytes - CONTEXT_BYTES - margin_bytes(memory_bytes)
    weights_stay, gradients_stay, lent = weights, gradients, 0.0
    if work.offload == "all" and device_memory_bytes is None:
        kept = estimate(model, replace(work, offload="state"), memory_bytes)
        if kept.fits:  # state leaves first
            return kept
    if work.offload == "all":
        free_bytes = total - _bare_peak(model, work, 0.0, 0.0, unsharded)
        given = free_bytes if device_memory_bytes is None else min(free_bytes, device_memory_bytes)
        weights_stay, gradients_stay, lent = _stay(model, work, weights, given)
    bare = _bare_peak(model, work, weights_stay, gradients_stay, unsharded)
    most = total - bare - lent
    allowed = most
    if device_memory_bytes is not None:
        shared = weights_stay + gradients_stay + lent if work.offload == "all" else 0.0
        allowed = min(most, max(0.0, device_memory_bytes - shared))
    stays, slots = _divide(state, max(0.0, allowed))
    return Estimate(
        weights_bytes=weights_stay,
        gradients_bytes=gradients_stay,
        unsharded_bytes=unsharded,
        activations_bytes=max(bare - weights_stay - gradients_stay - unsharded, 0.0),
        state_bytes=state,
        stays_bytes=stays,
        slots_bytes=slots + lent,
        host_bytes=state + weights - weights_stay + gradients - gradients_stay,
        peak_bytes=bare + stays + slots + lent,
        missing_bytes=max(0.0, stays + slots - most),
        weights_away_bytes=weights - weights_stay,
        gradients_away_bytes=gradients - gradients_stay,
    )


def _stay(
    model: Model, work: Workload, weights: float, free_bytes: float
) -> tuple[float, float, float]:
    """Divide memory: bytes of weights and of gradients that stay, and slots for the rest.

    Sorted by what a byte saves on the link: weights stay first, then gradients, then state.
    """
    scale = work.shard_bytes / work.gpus
    block, root = scale * model.block_params, scale * model.root_params
    left = free_bytes - float(LEAST_SLOTS * SMALL_BUCKET_BYTES) - 1024  # for rounding
    lent = least = 0.0
    if 2 * weights > left:
        lent += GRADIENT_SLOTS * max(block, root)
    if weights > left - lent:  # a large root takes less memory than slots of its size
        groups = [int(root), *[int(block)] * model.layers]
        least = 0.0 if 0 in choose_travelling(groups, 0, GATHER_SLOTS) else root
        lent += GATHER_SLOTS * (block if least else max(block, root))
    left = max(least, left - lent)
    return min(weights, left), min(weights, max(0.0, left - weights)), lent


def bounds_ms(
    update_bytes: float,
    gradient_bytes: float,
    forward_ms: float,
    backward_ms: float,
    link_gbps: float,
) -> dict[str, float]:
    """Bound an iteration, by ``overlap=``: updates hide behind the forward or the backward.

    Args:
        update_bytes: state and weights, which travel each way for updates.
        gradient_bytes: gradients that come back for them; with ``"backward"`` they do not leave.
        forward_ms, backward_ms: if nothing travels.
        link_gbps: GB/s each way, while both directions are busy.
    """
    return {
        "forward": backward_ms
        + max(forward_ms, (update_bytes + gradient_bytes) / (1e6 * link_gbps)),
        "backward": forward_ms + max(backward_ms, update_bytes / (1e6 * link_gbps)),
    }


def _bare_peak(
    model: Model, work: Workload, weights: float, gradients: float, unsharded: float
) -> float:
    # bf16: 2 bytes per element.
    block = 2 * model.saved_widths * model.width * work.tokens
    kept = 2 * model.width * work.tokens if work.checkpointed else block
    logits = 3 * 2 * model.vocabulary * work.tokens  # logits, log-probabilities and their gradient
    begins = weights + model.layers * kept + logits + 2 * model.root_params
    block_gradients = 2 * 2 * model.block_params  # gradients and their reduction buffer
    ends = weights + gradients + unsharded + block + block_gradients
    return max(begins, ends)


def _divide(state: float, allowed: float) -> tuple[float, float]:
    if state <= allowed:
        return state, 0.0  # nothing moves, so no slots
    slots = float(SMALL_BUCKET_BYTES * most_slots(int(allowed), SMALL_BUCKET_BYTES))
    return max(0.0, allowed - slots), slots


def fewest_gpus(model: Model, work: Workload, memory_bytes: int) -> int | None:
    """Find the fewest GPUs that hold the job; None if :data:`MOST_GPUS` do not."""
    # What fits on some GPUs also fits on more: bisect.
    fewest = 1 + bisect_left(
        range(1, MOST_GPUS + 1),
        True,
        key=lambda gpus: estimate(model, replace(work, gpus=gpus), memory_bytes).fits,
    )
    return fewest if fewest <= MOST_GPUS else None
