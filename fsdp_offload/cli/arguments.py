"""Arguments of each subcommand; nothing here imports torch, so that ``--help`` is quick."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from ..bench.arguments import at_least

CARDS: Final = (
    "h100-80", "h200", "b200", "gh200", "a100-80", "a100-40", "l40s", "rtx-4090", "rtx-5090",
)  # fmt: skip
"""Those that :mod:`..plan.estimate` knows; it imports torch."""


def doctor(parser: argparse.ArgumentParser) -> None:
    """Of ``doctor``."""
    parser.add_argument("--device", type=int, default=0, help="CUDA device by its number")


def plan(parser: argparse.ArgumentParser) -> None:
    """Of ``plan``."""
    add = parser.add_argument
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--params", help="parameters: 8e9, 8B, 500M; the usual shape is assumed")
    size.add_argument("--config", type=Path, help="config.json of a Hugging Face model")
    size.add_argument("--model", help="module:function that returns the model; built on 'meta'")
    add("--gpus", type=at_least(1), default=1, help="that the model is sharded over")
    add("--gpu", choices=CARDS, default="h100-80", help=", ".join(CARDS), metavar="CARD")
    link = "GB/s to host memory each way, while both are busy, as `doctor` measures it"
    add("--link", type=at_least(0.1, float), help=link)
    compute = "an iteration's milliseconds without this package, or of a job whose state fits"
    add("--compute-ms", type=at_least(0.0, float), help=compute)
    add("--tokens", type=at_least(1), default=16384, help="per iteration and GPU")
    add("--weights", choices=("bf16", "fp32"), default="bf16", help="dtype of the parameters")
    add("--moments", choices=("fp32", "bf16", "int8"), default="fp32")
    add("--no-checkpointing", action="store_true", help="keep all activations")
    add("--device-memory", default="auto", help="as of HybridDeviceOptimizer: auto, 0, 8GiB")


def inspect(parser: argparse.ArgumentParser) -> None:
    """Of ``inspect``."""
    add = parser.add_argument
    add("checkpoint", type=Path, help="its folder")
    add("--skip-elements", action="store_true", help="do not read them to compare checksums")


def export(parser: argparse.ArgumentParser) -> None:
    """Of ``export``."""
    add = parser.add_argument
    add("checkpoint", type=Path, help="its folder; the model is not needed")
    add("out", type=Path, help="a new folder for the files")
    add("--dtype", choices=("bf16", "fp32"), help="default: as stored; fp32: the masters, exactly")
    add("--max-shard-bytes", default="5GB", help="of one file's elements: 5GB, 2GiB")
    add("--names", type=Path, help="JSON object: name in the files by FQN; null: left out")
    add("--model-prefix", help="before the FQNs of weights in the checkpoint")
    add("--optimizer-prefix", help="before state.FQN in the checkpoint")


ADD: Final = {"doctor": doctor, "plan": plan, "inspect": inspect, "export": export}
