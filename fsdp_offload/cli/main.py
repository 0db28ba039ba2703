"""The command line: a table of subcommands, one line for an error.

Exit codes: 0, and 2 for wrong usage. 1: the command failed, or found what its page
(docs/command-line.md) says.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Final, NamedTuple

from .. import __version__
from ..bench.arguments import PROGRAM, Parser
from ..core.errors import OffloadError
from . import arguments


class Command(NamedTuple):
    """One subcommand.

    Args:
        help: what it is for, in a line.
        module: of this folder, imported when the subcommand is to run; its function ``run`` does
            the work and gives the exit code.
        add_arguments: adds them to a parser, which has ``--json`` already; ``None``: ``run`` gets
            the words behind the subcommand as they are.
    """

    help: str
    module: str
    add_arguments: Callable[[argparse.ArgumentParser], None] | None = None


COMMANDS: Final = {
    "plan": Command("memory and time of a job from its size", "plan", arguments.plan),
    "doctor": Command(
        "what makes offload slow or fail on this machine", "doctor", arguments.doctor
    ),
    "inspect": Command(
        "what a checkpoint holds, whether it is intact, what differs",
        "inspection",
        arguments.inspect,
    ),
    "export": Command("weights of a checkpoint as safetensors files", "export", arguments.export),
    "bench": Command("iterations; 'bench phases', 'bench checkpoint': those", "bench"),
}


def main(words: Sequence[str] | None = None) -> int:
    """Run one subcommand; gives the exit code.

    Args:
        words: of the command line; ``None``: those of this process.

    Raises:
        SystemExit: for wrong usage, and behind ``--help``.
    """
    words = sys.argv[1:] if words is None else words
    try:
        code = _work(words)()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, such as head, has had enough: not worth a line
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OffloadError as error:
        return _failed(str(error))
    except OSError as error:
        remedy = "name a path that this user may read, or write"
        return _failed(f"{error.filename or type(error).__name__}: {error.strerror}", remedy)
    except ImportError as error:
        return _failed(f"{error.name or 'import'}: {error}", f"see {PROGRAM} doctor")


def _work(words: Sequence[str]) -> Callable[[], int]:
    """What the words ask for."""
    command = COMMANDS.get(words[0]) if words else None
    if command is not None and command.add_arguments is None:
        return partial(_run(command), words[1:])
    options = _parser().parse_args(words)
    return partial(_run(COMMANDS[options.command]), options)


def _parser() -> argparse.ArgumentParser:
    """Of all subcommands."""
    parser = Parser(prog=PROGRAM, description="State of optimizers in host memory: tools.")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        own = commands.add_parser(
            name, help=command.help, description=command.help, allow_abbrev=False
        )
        if command.add_arguments is not None:
            own.add_argument("--json", action="store_true", help="one JSON document on stdout")
            command.add_arguments(own)
    return parser


def _run(command: Command) -> Callable[..., int]:
    function: Callable[..., int] = import_module(f".{command.module}", __package__).run
    return function


def _failed(text: str, remedy: str = "") -> int:
    text += f". Remedy: {remedy}" if remedy else ""
    print(f"{PROGRAM}: {' '.join(text.split())}", file=sys.stderr)
    return 1
