"""``plan``: bytes of a job from its size, without a GPU, and bounds of its time."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

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
"""Of the fields of a ``config.json``."""
_PLAIN_MLP: Final = frozenset(("gpt2", "gpt_neox", "opt", "bloom", "phi"))
"""Models whose MLP has two matrices; others have a gate, which is a third."""


def run(options: argparse.Namespace) -> int:
    """Print the plan; 0: it fits, 1: it does not.

    Raises:
        ConfigError: the size of the model is not known, or no number.
    """
    model = model_of(options)
    memory_bytes = CARDS[options.gpu]
    work = Workload(
        tokens=options.tokens,
        gpus=options.gpus,
        checkpointed=not options.no_checkpointing,
        shard_bytes=2 if options.weights == "bf16" else 4,
        moments=options.moments,
    )
    given = options.device_memory
    found = estimate(model, work, memory_bytes, None if given == "auto" else parse_bytes(given))
    fewest = fewest_gpus(model, work, memory_bytes)
    bounds = None
    if found is not None and None not in (options.compute_ms, options.link):
        bounds = bounds_ms(found.travels_bytes, options.compute_ms, options.link)
    if options.json:
        report = {
            "model": asdict(model),
            "work": asdict(work),
            "memory_bytes": memory_bytes,
            "fits": found is not None,
            "fewest_gpus": fewest,
            "estimate": None,
            "bounds_ms": bounds,
        }
        if found is not None:
            report["estimate"] = asdict(found) | {"travels_bytes": found.travels_bytes}
        print(json.dumps(report, indent=1))
    else:
        print(text_of(model, work, options.gpu, found, bounds, fewest))
    return 0 if found is not None else 1


# --------------------------------------------------------------------------- what is asked


def model_of(options: argparse.Namespace) -> Model:
    """By ``--params``, ``--config`` or ``--model``."""
    if options.params is not None:
        return Model.of_size(number_of(options.params))
    if options.config is not None:
        try:
            return model_of_config(json.loads(options.config.read_text()))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--config {options.config}", reason=str(error), remedy="name a config.json"
            ) from None
    return model_of_function(options.model)


def number_of(text: str) -> float:
    """``8B``, ``8e9``, ``500M``."""
    unit = _UNITS.get(text[-1:].upper())
    try:
        number = float(text[:-1]) * unit if unit else float(text)
        if number > 0:
            return number
    except ValueError:
        pass
    raise ConfigError(
        f"--params {text}", reason="no number of parameters", remedy="write 8e9, 8B or 500M"
    )


def model_of_config(config: Mapping[str, Any]) -> Model:
    """Of a decoder by the fields of its ``config.json``."""
    config = config.get("text_config", config)
    kind = str(config.get("model_type", "unknown"))
    if any("expert" in name for name in config):
        raise ConfigError(
            f"a config of {kind}",
            reason="experts are not counted",
            remedy="use --params with all parameters: weights and state are then right",
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
        reason="the size of the model is not known",
        remedy="use --model module:function, or --params",
    )


def model_of_function(name: str) -> Model:
    """Of what ``module:function`` returns, with ``torch.device("meta")`` as the default device."""
    module, _, function = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"--model {name}", reason=str(error), remedy="name module:function"
        ) from None
    finally:
        sys.path.pop(0)
    with torch.device("meta"):
        model = make()
    embedding = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    blocks = max((len(m) for m in model.modules() if isinstance(m, nn.ModuleList)), default=0)
    if embedding is None or not blocks:
        raise ConfigError(
            f"--model {name}",
            reason="it has no nn.Embedding, or no nn.ModuleList of blocks",
            remedy="use --params",
        )
    params = sum(parameter.numel() for parameter in set(model.parameters()))
    return Model(params, blocks, embedding.embedding_dim, embedding.num_embeddings)


# --------------------------------------------------------------------------- what is said


def text_of(
    model: Model,
    work: Workload,
    name: str,
    found: Estimate | None,
    bounds: tuple[float, float] | None,
    fewest: int | None,
) -> str:
    """A line for each figure."""
    weights = "bf16" if work.shard_bytes == 2 else "fp32"
    memory = f"{CARDS[name] / GIB:.1f}"
    lines = [
        f"{model.params / 1e9:.2f} G parameters ({model.layers} blocks, {model.width} wide), "
        f"{weights} weights, {work.moments} moments, {work.gpus} x {name}, "
        f"{work.tokens} tokens per GPU",
        "",
    ]
    if found is None:
        lines.append(f"It does not fit into {memory} GiB.")
    else:
        on_gpu = {
            "weights": found.weights_bytes,
            "gradients": found.gradients_bytes,
            "whole parameters of blocks": found.unsharded_bytes,
            "activations and logits": found.activations_bytes,
            "state that stays": found.stays_bytes,
            "slots of state that travels": found.slots_bytes,
            f"peak, of {memory}": found.peak_bytes,
        }
        for_gpu = {
            "host memory, page-locked": found.host_bytes,
            "state that travels, each way": found.travels_bytes,
        }
        for title, sizes in (("GiB on each GPU", on_gpu), ("GiB for each GPU", for_gpu)):
            lines += [title, *(f"  {what:<34}{n / GIB:8.2f}" for what, n in sizes.items())]
        if bounds is None:
            lines.append("ms per iteration: give --compute-ms and --link")
        else:
            lines.append("ms per iteration: {:.0f} to {:.0f}".format(*bounds))
    enough = f"more than {MOST_GPUS}: try fewer --tokens" if fewest is None else str(fewest)
    lines += [f"fewest GPUs that it fits on: {enough}"]
    return "\n".join(lines)
