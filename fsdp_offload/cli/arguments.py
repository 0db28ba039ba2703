"""Arguments of each subcommand. This file does not import torch, so that ``--help`` is fast."""

from __future__ import annotations

import argparse
import re
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
CARDS_GIB: Final = {
    "h100-80": 79.2, "h200": 139.8, "b200": 178.0, "gh200": 94.5, "a100-80": 79.1, "a100-40": 39.4,
    "l40s": 44.4, "rtx-3090": 23.5, "rtx-4090": 23.5, "rtx-5090": 31.4,
}  # fmt: skip
"""GiB of memory of one GPU."""


class Parser(argparse.ArgumentParser):
    """Reports wrong usage in the form of this package's errors."""

    def add_argument(self, *names: Any, **how: Any) -> argparse.Action:
        """Add an argument; its help ends with its default."""
        if how.get("default") not in (None, argparse.SUPPRESS):
            how["help"] += "; default: %(default)s"
        return super().add_argument(*names, **how)

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


def gpu(text: str) -> str:
    """Return the card of :data:`CARDS_GIB` that ``text`` names, or ``text`` if it is a size."""

    def key(name: str) -> str:
        return re.sub(r"nvidia|geforce|rtx|gb$|[^a-z0-9]", "", name.lower())

    found = [card for card in CARDS_GIB if key(text) in (key(card), card.partition("-")[0])]
    if len(found) == 1:
        return found[0]
    if re.fullmatch(r"\s*\d+(\.\d+)?\s*[gt]i?b\s*", text.lower()):
        return text.strip()
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a size, such as 24GiB, nor one of {', '.join(CARDS_GIB)}"
    )


def doctor(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``doctor``."""
    parser.add_argument("--device", type=int, default=0, help="index of the CUDA device")


def plan(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``plan``."""
    add = parser.add_argument
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--params", help="parameters: 8e9, 8B, 500M; plan assumes the usual shape")
    size.add_argument("--config", type=Path, help="config.json of a Hugging Face model")
    add("--gpus", type=at_least(1), default=1, help="GPUs that share the model")
    cards = f"its memory, such as 24GiB, or its model: {', '.join(CARDS_GIB)}"
    add("--gpu", type=gpu, default="h100-80", help=cards, metavar="CARD")
    link = "GB/s between GPU and host, each way with both busy, as `doctor` measures it"
    add("--link", type=at_least(0.1, float), help=link)
    add("--compute-ms", type=at_least(0.0, float), help="ms of an iteration without transfers")
    add("--tokens", type=at_least(1), default=16384, help="tokens per iteration and GPU")
    add("--weights", choices=("bf16", "fp32"), default="bf16", help="dtype of the parameters")
    add("--moments", choices=("fp32", "bf16", "int8"), default="fp32", help="how to store moments")
    add("--no-checkpointing", action="store_true", help="keep all activations, recompute none")
    kinds = "what may leave the GPU: optimizer state, or also weights and gradients"
    add("--offload", choices=("state", "all"), default="state", help=kinds)
    add("--device-memory", default="auto", help="GPU memory for what may leave: auto, 0, 8GiB")


def inspect(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``inspect``."""
    add = parser.add_argument
    add("checkpoint", type=Path, help="folder of the checkpoint")
    add("--skip-elements", action="store_true", help="do not verify the checksums of elements")


def export(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``export``."""
    add = parser.add_argument
    add("checkpoint", type=Path, help="folder of the checkpoint; the model is not needed")
    add("out", type=Path, help="new folder for the files")
    add("--dtype", choices=("bf16", "fp32"), help="default: as stored; fp32: the exact masters")
    add("--max-shard-bytes", default="5GB", help="size of one file: 5GB, 2GiB")
    add("--model-prefix", help="prefix of the weights' keys in the checkpoint")
    add("--optimizer-prefix", help="prefix of the state's keys in the checkpoint")


def bench(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``bench``."""
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), help="default: cuda if available; cpu: small sizes")
    add("--json", type=Path, help="file for all figures, as JSON")
    helps = {"tokens": "tokens per iteration and rank", "seq": "tokens per sequence"}
    for size in ("layers", "dim", "vocabulary", "tokens", "seq"):
        add(f"--{size}", type=at_least(1), help=helps.get(size, "of the GPT"))
    add("--rows", default=DEFAULT_ROWS, help="comma-separated names; a wrong one lists their words")
    add("--iterations", type=at_least(1), default=10, help="timed iterations per row")
    add("--warm-up", type=at_least(0), default=20, help="iterations before the timed ones")
    add("--micro-batches", type=at_least(1), default=1, help="forward and backward passes per step")
    add("--params", type=float, help="choose --layers for this many parameters, such as 3.14e9")
    add("--shards", choices=("bf16", "fp32"), default="bf16", help="dtype of the parameters")
    add("--checkpointed", action="store_true", help="recompute blocks in backward")
    add("--deterministic", action="store_true", help="use deterministic kernels, to compare losses")
