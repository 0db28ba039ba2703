"""``plan``: compute bytes of a job from its size, without a GPU, and bounds of its time."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, Final

from ..core.config import GIB, parse_bytes
from ..core.errors import ConfigError
from ..link.budget import host_memory
from ..plan.estimate import MOST_GPUS, Estimate, Model, Workload, bounds_ms, estimate, fewest_gpus
from .arguments import CARDS_GIB

LINKS_GBPS: Final = {"h100-80": 46.5}
"""Of one GPU alone on its host, GB/s each way with both busy, as measured: see docs/memory.md."""
_UNITS: Final = {"M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "width": ("hidden_size", "n_embd", "d_model"),
    "vocabulary": ("vocab_size",),
    "mlp": ("intermediate_size", "n_inner", "ffn_dim"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "head_width": ("head_dim",),
}
"""Names of fields in a ``config.json``."""
_PLAIN_MLP: Final = frozenset(("gpt2", "gpt_neox", "opt", "bloom", "phi"))
"""Models whose MLP has two matrices; others have a gate, which is a third."""


def run(options: argparse.Namespace) -> int:
    """Print the plan; returns 1 if the job does not fit.

    Raises:
        ConfigError: the options do not give the size of the model or of the GPU.
    """
    model = model_of(options)
    size = f"{CARDS_GIB[options.gpu]}GiB" if options.gpu in CARDS_GIB else options.gpu
    memory_bytes = parse_bytes(size, "--gpu")
    work = Workload(
        tokens=options.tokens,
        gpus=options.gpus,
        checkpointed=not options.no_checkpointing,
        shard_bytes=2 if options.weights == "bf16" else 4,
        moments=options.moments,
        offload=options.offload,
    )
    given = options.device_memory
    kept = None if given == "auto" else parse_bytes(given, "--device-memory")
    found = estimate(model, work, memory_bytes, kept)
    fewest = fewest_gpus(model, work, memory_bytes)
    link = options.link or (LINKS_GBPS.get(options.gpu) if options.gpus == 1 else None)
    compute_ms, bounds = options.compute_ms or 0.0, None
    if found.fits and link is not None:
        forward_ms = compute_ms / (4 if work.checkpointed else 3)
        sizes = found.out_bytes - found.gradients_away_bytes, found.gradients_away_bytes
        bounds = bounds_ms(*sizes, forward_ms, compute_ms - forward_ms, link)
    if options.json:
        figures = asdict(found) | {n: getattr(found, n) for n in ("in_bytes", "out_bytes")}
        report = {"model": asdict(model), "work": asdict(work), "memory_bytes": memory_bytes}
        report |= {"fits": found.fits, "fewest_gpus": fewest, "estimate": figures}
        print(json.dumps(report | {"bounds_ms": bounds}, indent=1))
        return int(not found.fits)
    least = estimate(model, replace(work, offload="all"), memory_bytes, 0)
    print(sizes_text(model, work, options.gpu, memory_bytes, found))
    if found.fits:
        print(f"time per iteration: {_time(bounds, options.compute_ms, link)}")
    else:
        print(
            f"The job does not fit: {found.missing_bytes / GIB:.2f} GiB are missing. "
            f"{(found.peak_bytes - found.missing_bytes) / GIB:.2f} of {memory_bytes / GIB:.2f} GiB "
            "are usable; CUDA and a margin take the rest."
        )
        if least.fits:
            print(
                f"hint: --offload all --device-memory 0 fits: {least.peak_bytes / GIB:.2f} GiB on "
                f"the GPU, {least.host_bytes / GIB:.2f} GiB of host memory"
            )
    here_bytes = min((each.total_bytes for each in host_memory()), default=math.inf)
    host_bytes = (least if least.fits and not found.fits else found).host_bytes
    if host_bytes > here_bytes:
        print(
            f"note: this machine has {here_bytes / GIB:.2f} GiB of host memory, less than the "
            f"{host_bytes / GIB:.2f} GiB that the job takes for each GPU"
        )
    print("fewest GPUs that hold the job:", fewest or f"more than {MOST_GPUS}; try fewer --tokens")
    return int(not found.fits)


# --------------------------------------------------------------------------- what is asked


def model_of(options: argparse.Namespace) -> Model:
    """Build the model of ``--params`` or ``--config``."""
    if options.params is not None:
        return Model.of_size(number_of(options.params))
    try:
        return model_of_config(json.loads(options.config.read_text()))
    except (OSError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise ConfigError(
            f"--config {options.config}", reason=str(error), remedy="name a config.json"
        ) from None


def number_of(text: str) -> float:
    """Parse ``8B``, ``8e9``, ``500M``."""
    unit = _UNITS.get(text[-1:].upper())
    with suppress(ValueError):
        number = float(text[:-1]) * unit if unit else float(text)
        if 1e6 <= number <= 1e15:
            return number
    raise ConfigError(
        f"--params {text}",
        reason="not a number of parameters, below a million or above 1e15",
        remedy="write 8B or 8e9 for 8 billion, 500M for 500 million",
    )


def model_of_config(config: Mapping[str, Any]) -> Model:
    """Build the model of a decoder from the fields of its ``config.json``."""
    config = config.get("text_config", config)
    kind = str(config.get("model_type", "unknown"))
    if any("expert" in name for name in config):
        raise ConfigError(
            f"a config of {kind}",
            reason="plan does not count experts",
            remedy="pass --params with the total; weights and state are then right",
        )
    layers, width, vocabulary = (_field(config, name) for name in ("layers", "width", "vocabulary"))
    heads = _field(config, "heads")
    head_width = _field(config, "head_width", width // heads)
    kv_heads = _field(config, "kv_heads", heads)
    mlp = _field(config, "mlp", 4 * width)
    matrices = 2 if kind in _PLAIN_MLP else 3
    # Matrices for queries and output, keys and values; then the MLP's, and two norms.
    attention = 2 * width * head_width * (heads + kv_heads)
    block = attention + matrices * width * mlp + 2 * width
    copies = 1 if config.get("tie_word_embeddings", kind in _PLAIN_MLP) else 2
    params = layers * block + copies * vocabulary * width + width
    # Gated: two more elements per unit, for the gate and its product.
    saved = 8 + (2 if matrices == 2 else 4) * mlp / width
    return Model(params, layers, width, vocabulary, saved)


def _field(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = next((config[key] for key in _NAMES[name] if config.get(key) is not None), default)
    if value is not None:
        return int(value)
    raise ConfigError(
        f"a config without {' or '.join(_NAMES[name])}",
        reason="the size of the model depends on it",
        remedy="use --params",
    )


# --------------------------------------------------------------------------- what is said


def sizes_text(model: Model, work: Workload, card: str, memory_bytes: int, found: Estimate) -> str:
    """Format the bytes of a job, a line for each kind."""
    weights = "bf16" if work.shard_bytes == 2 else "fp32"
    stay = " that stay" if work.offload == "all" else ""
    # On one GPU, FSDP2 copies weights before their use although there is nothing to gather.
    sizes: dict[str, float | None] = {
        "GiB of memory on each GPU, at its peak": None,
        f"weights{stay}": found.weights_bytes,
        f"gradients{stay}": found.gradients_bytes,
        "all-gathered parameters"
        if work.gpus > 1
        else "FSDP2's copies of weights in use": found.unsharded_bytes,
        "activations and logits": found.activations_bytes,
        "optimizer state that stays": found.stays_bytes,
        "transfer slots": found.slots_bytes,
        f"peak (the GPU has {memory_bytes / GIB:.1f})": found.peak_bytes,
        "GiB of host memory and transfers, for each GPU": None,
        "page-locked memory": found.host_bytes,
    }
    if work.offload == "state":
        sizes["moved each way, per iteration"] = found.in_bytes
    else:
        sizes |= {
            "moved to the GPU, per iteration": found.in_bytes,
            "moved to the host, per iteration": found.out_bytes,
        }
    head = (
        f"{model.params / 1e9:.4g}B parameters ({model.layers} blocks, {model.width} wide), "
        f"{weights} weights, {work.moments} moments, {work.gpus} x {card}, "
        f"{work.tokens} tokens per GPU\n"
    )
    lines = (s if n is None else f"  {s:<34}{n / GIB:8.2f}" for s, n in sizes.items())
    return "\n".join((head, *lines))


def _time(bounds: dict[str, float] | None, compute_ms: float | None, link: float | None) -> str:
    if bounds is None:
        return "unknown without --compute-ms and --link"
    more = "; give --compute-ms for bounds"
    if compute_ms is not None:
        more = f', {bounds["backward"]:.0f} without clipping and with overlap="backward"'
    return f"at least {bounds['forward']:.0f} ms at {link:g} GB/s each way{more}"
