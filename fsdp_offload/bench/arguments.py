"""Arguments of the benchmarks; nothing here imports torch, so that ``--help`` is quick."""

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
PHASES_ROWS: Final = ("offloader", "fixed", "swap", "loop")
SIZES: Final = {"layers": 24, "dim": 2048, "vocabulary": 60000, "tokens": 8192, "seq": 2048}
SMALL: Final = {"layers": 2, "dim": 128, "vocabulary": 512, "tokens": 128, "seq": 128}
"""On the CPU, where figures say whether it works, and nothing about GPUs."""


class Parser(argparse.ArgumentParser):
    """Tells wrong usage in the form of this package's errors."""

    def error(self, message: str) -> NoReturn:
        """Leave with 2."""
        self.exit(2, f"{PROGRAM}: {message}. Remedy: see {self.prog} --help\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Words that a subcommand does not know are its error: the remedy is its own help."""
        found = super().parse_known_args(args, namespace)
        if found[1]:
            self.error(f"unrecognized arguments: {' '.join(found[1])}")
        return found


def at_least(least: float, kind: type[int] | type[float] = int) -> Callable[[str], float]:
    """Reads a number; a smaller one, or none, is wrong usage."""

    def read(text: str) -> float:
        with suppress(ValueError):
            if (number := kind(text)) >= least:
                return number
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least {least}")

    return read


def _parser(name: str, text: str, *sizes: str) -> Parser:
    """With what all benchmarks have, and those ``sizes`` of the job that this one asks for."""
    parser = Parser(prog=f"{PROGRAM} {name}", description=text, allow_abbrev=False)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), help="default: cuda if there is one; cpu: small sizes")
    add("--json", type=Path, help="file for all figures")
    helps = {"tokens": "per iteration and rank", "seq": "tokens of one sequence"}
    for size in sizes:
        text = f"{helps.get(size, 'of the GPT')}; default: {SIZES[size]}"
        add(f"--{size}", type=at_least(1), help=text)
    return parser


def iterations() -> Parser:
    """Of ``bench``."""
    parser = _parser("bench", "whole iterations of one job, with each optimizer in turn", *SIZES)
    add = parser.add_argument
    add("--rows", default=DEFAULT_ROWS, help="names joined by commas; default: all")
    add("--iterations", type=at_least(1), default=10, help="timed ones per row")
    add("--warm-up", type=at_least(0), default=20, help="before them, for memory to be steady")
    add("--params", type=float, help="choose --layers for this many parameters, such as 3.14e9")
    add("--shards", choices=("bf16", "fp32"), default="bf16", help="dtype of the parameters")
    add("--checkpointed", action="store_true", help="blocks are computed again in backward")
    add("--deterministic", action="store_true", help="kernels whose bits repeat, to compare losses")
    return parser


def phases() -> Parser:
    """Of ``bench phases``."""
    parser = _parser("bench phases", "a model and its optimizer leave the device and come back")
    add = parser.add_argument
    add("--params", type=float, help="of each rank's shards; default: 1.33e9, on the CPU 1e6")
    add("--cycles", type=at_least(2), default=6, help="the first and at least one more")
    add("--rows", default=",".join(PHASES_ROWS), help="names joined by commas; default: all")
    return parser


PARSERS: Final = {"": iterations, "phases": phases}
"""By the word behind ``bench``."""
