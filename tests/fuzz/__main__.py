"""``python -m tests.fuzz --ranks 1 --first 0 --count 1000``; see ``--help``."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time

from tests.helpers.ranks import RankPool

from .events import EVENTS
from .plants import PLANTS, planted
from .runner import run_again, run_seeds


def main() -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--ranks", type=int, default=1, help="processes, with FSDP2 if several")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=1000, help="how many sequences")
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--keep", help="positions of its events: 0,2,5")
    parser.add_argument("--most-failures", type=int, default=1, help="stop after so many")
    parser.add_argument(
        "--without", action="append", default=[], choices=sorted(EVENTS), metavar="EVENT",
        help=f"leave one out: {', '.join(sorted(EVENTS))}",
    )  # fmt: skip
    parser.add_argument("--plant", choices=PLANTS, help="a fault, which must be found")
    chosen = parser.parse_args()
    with planted(chosen.plant) if chosen.plant else contextlib.nullcontext():
        return run(chosen)


def run(chosen: argparse.Namespace) -> int:
    """What :func:`main` was told; whether something differed."""
    if chosen.seed is not None:
        kept = [int(p) for p in chosen.keep.split(",")] if chosen.keep else None
        arguments = (chosen.seed, chosen.ranks, kept, chosen.without)
        if chosen.ranks == 1:
            report = run_again(*arguments)
        else:
            with RankPool(chosen.ranks) as pool:
                report = pool.run(run_again, *arguments)[0]
        print(report or "no difference")
        return bool(report)
    seeds = range(chosen.first, chosen.first + chosen.count)
    began, most = time.monotonic(), chosen.most_failures
    if chosen.ranks == 1:
        outcome = run_seeds(seeds, 1, chosen.without, most_failures=most)
    else:
        with RankPool(chosen.ranks) as pool:
            arguments = (seeds, chosen.ranks, chosen.without)
            outcome = pool.run(run_seeds, *arguments, most_failures=most, timeout_s=86400)[0]
    seconds = time.monotonic() - began
    for failure in outcome.failures:
        print(failure, end="\n\n")
    print(
        f"{outcome.count} sequences on {chosen.ranks} rank(s), {len(outcome.failures)} failed; "
        f"{seconds:.0f} s, {outcome.cpu_s:.0f} s of a core on each rank"
    )
    for what, count in sorted(outcome.counts.items()):
        print(f"{count:8} {what}")
    return bool(outcome.failures)


if __name__ == "__main__":
    sys.exit(main())
