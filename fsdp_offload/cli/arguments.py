"""Arguments of each subcommand. This file does not import torch, so that ``--help`` is quick."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NoReturn

PROGRAM: Final = "fsdp-offload"
DEFAULT_ROWS: Final = (
    "plain-torchclip,step-f0-torchclip,default-torchclip,default-d2GiB-torchclip,"
    "default-d0-torchclip,plain,backward-d2GiB,backward-d2GiB-bf16,backward-d2GiB-int8,torchao,"
    "cpuoffload-torchclip"
)
"""Default of ``bench --rows``."""
CARDS: Final = (
    "h100-80", "h200", "b200", "gh200", "a100-80", "a100-40", "l40s", "rtx-4090", "rtx-5090",
)  # fmt: skip
"""Those that :mod:`..plan.estimate` knows; it imports torch."""


class Parser(argparse.ArgumentParser):
    """Reports wrong usage in the form of this package's errors."""

    def error(self, message: str) -> NoReturn:
        """Exit with 2."""
        self.exit(2, f"{PROGRAM}: {message}. Remedy: see {self.prog} --help\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and let a subcommand report unknown words with its own help as remedy."""
        found = super().parse_known_args(args, namespace)
        if found[1]:
            self.error(f"unrecognized arguments: {' '.join(found[1])}")
        return found


def at_least(least: float, kind: type[int] | type[float] = int) -> Callable[[str], float]:
    """Return a parser of numbers that are not smaller."""

    def read(text: str) -> float:
        with suppress(ValueError):
            if (number := kind(text)) >= least:
                return number
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least {least}")

    return read


def doctor(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``doctor``."""
    parser.add_argument("--device", type=int, default=0, help="CUDA device by its number")


def plan(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``plan``."""
    add = parser.add_argument
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--params", help="parameters: 8e9, 8B, 500M; the usual shape is assumed")
    size.add_argument("--config", type=Path, help="config.json of a Hugging Face model")
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
    kinds = "what may leave the GPU: state alone, or weights and gradients as well"
    add("--offload", choices=("state", "all"), default="state", help=kinds)
    add("--device-memory", default="auto", help="as of HybridDeviceOptimizer: auto, 0, 8GiB")


def inspect(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``inspect``."""
    add = parser.add_argument
    add("checkpoint", type=Path, help="its folder")
    add("--skip-elements", action="store_true", help="do not read them to compare checksums")


def export(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``export``."""
    add = parser.add_argument
    add("checkpoint", type=Path, help="its folder; the model is not needed")
    add("out", type=Path, help="a new folder for the files")
    add("--dtype", choices=("bf16", "fp32"), help="default: as stored; fp32: the masters, exactly")
    add("--max-shard-bytes", default="5GB", help="of one file's elements: 5GB, 2GiB")
    add("--model-prefix", help="before the FQNs of weights in the checkpoint")
    add("--optimizer-prefix", help="before state.FQN in the checkpoint")


def bench(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``bench``."""
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), help="default: cuda if there is one; cpu: small sizes")
    add("--json", type=Path, help="file for all figures")
    helps = {"tokens": "per iteration and rank", "seq": "tokens of one sequence"}
    for size in ("layers", "dim", "vocabulary", "tokens", "seq"):
        add(f"--{size}", type=at_least(1), help=helps.get(size, "of the GPT"))
    add("--rows", default=DEFAULT_ROWS, help="names joined by commas; default: all")
    add("--iterations", type=at_least(1), default=10, help="timed ones per row")
    add("--warm-up", type=at_least(0), default=20, help="before them, for memory to be steady")
    add("--micro-batches", type=at_least(1), default=1, help="forwards and backwards per step")
    add("--params", type=float, help="choose --layers for this many parameters, such as 3.14e9")
    add("--shards", choices=("bf16", "fp32"), default="bf16", help="dtype of the parameters")
    add("--checkpointed", action="store_true", help="blocks are computed again in backward")
    add("--deterministic", action="store_true", help="kernels whose bits repeat, to compare losses")
