"""The command line: a table of subcommands, one line for an error.

Exit codes: 0; 1 if the command failed, or found a fault that docs/command-line.md lists; 2 for
wrong usage, which includes values out of range.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Final

from .. import __version__
from ..core.errors import ConfigError, OffloadError
from . import arguments
from .arguments import PROGRAM, Parser

COMMANDS: Final = {
    "plan": ("plan", "estimate the memory of a job, and bound its time"),
    "doctor": ("doctor", "find what makes offload slow or fail on this machine"),
    "inspect": ("inspection", "list a checkpoint and verify its checksums"),
    "export": ("export", "write the weights of a checkpoint as safetensors files"),
    "bench": (".bench.iteration", "time training iterations with several optimizers"),
}
"""Module and help of each; :mod:`.arguments` has a function of its name. :func:`main` imports the
module when its command runs; its function ``run`` does the work and returns the exit code."""


def main(words: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code.

    Args:
        words: the command line; ``None``: that of this process.

    Raises:
        SystemExit: for wrong usage, and behind ``--help``.
    """
    # torch works without NumPy, but says in two lines that it is missing.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    try:
        options = parser().parse_args(words)
        code = int(import_module(f".{COMMANDS[options.command][0]}", __package__).run(options))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # a reader such as head has closed the pipe: not an error to print
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OffloadError as error:
        # An option's value is wrong: 2, because 1 may be an answer, as plan's is.
        return _failed(str(error), code=2 if isinstance(error, ConfigError) else 1)
    except OSError as error:
        if error.errno is None:  # torch cannot load a library
            return _failed(str(error), f"see {PROGRAM} doctor")
        remedy = "use a path that this user may read or write, with space for the files"
        return _failed(f"{error.filename or type(error).__name__}: {error.strerror}", remedy)
    except ImportError as error:
        return _failed(f"{error.name or 'import'}: {error}", f"see {PROGRAM} doctor")


def parser() -> argparse.ArgumentParser:
    """Build the parser of all subcommands."""
    made = Parser(prog=PROGRAM, description="Tools for training with state in host memory.")
    made.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = made.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, text) in COMMANDS.items():
        own = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        if name != "bench":  # its --json names a file
            own.add_argument("--json", action="store_true", help="print one JSON document")
        getattr(arguments, name)(own)
    return made


def _failed(text: str, remedy: str = "", code: int = 1) -> int:
    text += f". Remedy: {remedy}" if remedy else ""
    print(f"{PROGRAM}: {' '.join(text.split())}", file=sys.stderr)
    return code
