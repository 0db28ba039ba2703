"""``plan``: compute bytes of a job from its size, without a GPU, and bounds of its time."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Final

from ..core.config import GIB, parse_bytes
from ..core.errors import ConfigError
from ..plan.estimate import (
    CARDS,
    MOST_GPUS,
    Estimate,
    Model,
    Workload,
    bounds_ms,
    estimate,
    fewest_gpus,
)

Bounds = tuple[float, float] | None
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
        ConfigError: the options do not give the size of the model.
    """
    model = model_of(options)
    memory_bytes = CARDS[options.gpu]
    work = Workload(
        tokens=options.tokens,
        gpus=options.gpus,
        checkpointed=not options.no_checkpointing,
        shard_bytes=2 if options.weights == "bf16" else 4,
        moments=options.moments,
        offload=options.offload,
    )
    given = options.device_memory
    found = estimate(model, work, memory_bytes, None if given == "auto" else parse_bytes(given))
    fewest = fewest_gpus(model, work, memory_bytes)
    bounds: Bounds = None
    if found is not None and None not in (options.compute_ms, options.link):
        bounds = bounds_ms(found.travels_bytes, options.compute_ms, options.link)
    if options.json:
        more = ("travels_bytes", "in_bytes", "out_bytes")
        figures = found and asdict(found) | {name: getattr(found, name) for name in more}
        report = {"model": asdict(model), "work": asdict(work), "memory_bytes": memory_bytes}
        report |= {"fits": found is not None, "fewest_gpus": fewest, "estimate": figures}
        print(json.dumps(report | {"bounds_ms": bounds}, indent=1))
    else:
        print(text_of(model, work, options.gpu, found, bounds, fewest))
    return 0 if found is not None else 1


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
        if 0 < number < math.inf:
            return number
    raise ConfigError(
        f"--params {text}", reason="not a number of parameters", remedy="write 8e9, 8B or 500M"
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
    attention = 2 * width * head_width * (heads + kv_heads)
    block = attention + matrices * width * mlp + 2 * width
    copies = 1 if config.get("tie_word_embeddings", kind in _PLAIN_MLP) else 2
    params = layers * block + copies * vocabulary * width + width
    saved = 8 + (2 if matrices == 2 else 4) * mlp / width
    return Model(params, layers, width, vocabulary, saved)


def _field(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    for key in _NAMES[name]:
        if config.get(key) is not None:
            return int(config[key])
    if default is not None:
        return default
    raise ConfigError(
        f"a config without {' or '.join(_NAMES[name])}",
        reason="the size of the model depends on it",
        remedy="use --params",
    )


# --------------------------------------------------------------------------- what is said


def text_of(
    model: Model,
    work: Workload,
    card: str,
    found: Estimate | None,
    bounds: Bounds,
    fewest: int | None,
) -> str:
    """Format the plan, a line for each figure."""
    weights = "bf16" if work.shard_bytes == 2 else "fp32"
    memory = f"{CARDS[card] / GIB:.1f}"
    lines = [
        f"{model.params / 1e9:.2f}B parameters ({model.layers} blocks, {model.width} wide), "
        f"{weights} weights, {work.moments} moments, {work.gpus} x {card}, "
        f"{work.tokens} tokens per GPU",
        "",
    ]
    if found is None:
        lines.append(f"The job does not fit into {memory} GiB.")
    else:
        stay = " that stay" if work.offload == "all" else ""
        sizes: dict[str, float | None] = {
            "GiB of memory on each GPU": None,
            f"weights{stay}": found.weights_bytes,
            f"gradients{stay}": found.gradients_bytes,
            "all-gathered parameters": found.unsharded_bytes,
            "activations and logits": found.activations_bytes,
            "optimizer state that stays": found.stays_bytes,
            "transfer slots": found.slots_bytes,
            f"peak (the GPU has {memory})": found.peak_bytes,
            "GiB of host memory and transfers, for each GPU": None,
            "page-locked memory": found.host_bytes,
        }
        if work.offload == "state":
            sizes["moved each way, per iteration"] = found.travels_bytes
        else:
            sizes |= {"moved to the GPU, per iteration": found.in_bytes}
            sizes |= {"moved to the host, per iteration": found.out_bytes}
        lines += [s if n is None else f"  {s:<34}{n / GIB:8.2f}" for s, n in sizes.items()]
        figures = "unknown without --compute-ms and --link"
        if bounds is not None:
            figures = "{:.0f} to {:.0f} ms".format(*bounds)
        lines.append(f"time per iteration: {figures}")
    enough = f"more than {MOST_GPUS}; try fewer --tokens" if fewest is None else str(fewest)
    return "\n".join([*lines, f"fewest GPUs that hold the job: {enough}"])
