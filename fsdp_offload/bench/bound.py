"""The physical bound of an iteration, and what a row is compared with. Pure arithmetic.

Bound without clipping: the same iteration with the optimizer on the device, or the time in which
the link, both directions at once, carries the state out and back, whichever is longer. With
clipping nothing can be updated before the backward has ended, hence backward + max(forward, link).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def link_ms(state_bytes: int, both_ways_gbps: float) -> float:
    """Milliseconds in which ``state_bytes`` travel to the device and back again.

    All state counts both ways: with some of it kept on the device, in stated budgets, an iteration
    may be shorter than that.

    Args:
        state_bytes: bytes that travel in each direction.
        both_ways_gbps: measured GB/s of both directions together, at once.
    """
    return 2 * state_bytes / both_ways_gbps / 1e6


def bound_ms(on_device_ms: float, link: float) -> float:
    """Shortest possible iteration without clipping, in ms."""
    return max(on_device_ms, link)


def clipped_bound_ms(
    on_device_ms: float, forward_ms: float, backward_ms: float, link: float
) -> float:
    """The same when gradients are clipped: updates start when the backward has ended."""
    return max(on_device_ms, backward_ms + max(forward_ms, link))


def predicted_peak_bytes(baseline: Mapping[str, Any], row: Mapping[str, Any]) -> int:
    """Device peak to be expected: on-device peak, minus state, plus slots and stated budgets.

    ``staging_bytes`` of ``statistics()`` holds both: prefetched state lies in slots, too.
    """
    kept = row["device_state_bytes"] + row["staging_bytes"]
    return int(baseline["device_peak_bytes"] - baseline["device_state_bytes"] + kept)


def baseline_of(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Row | None:
    """The on-device row to compare with: the clipping one for rows that clip, where it was run."""
    plain = [r for r in rows if r["kind"] == "plain" and r["status"] == "ok"]
    same = [r for r in plain if (r["clip"] == "none") == (row["clip"] == "none")]
    found = next(iter(same or plain), None)
    return None if found is None else dict(found)


def derived(
    row: Mapping[str, Any], baseline: Mapping[str, Any] | None, link: Mapping[str, Any] | None
) -> Row:
    """What follows from a measured row, its on-device baseline and the link of the same run.

    ``bound_ms`` and ``of_bound`` (iteration over bound: 1.0 is the bound itself) need state
    that travels, so peers, which do not say what they move, have none.
    """
    if row["status"] != "ok":
        return {}
    found: Row = {}
    moved, ms = row.get("moved_bytes", 0), row["iteration_ms"]
    if moved:
        found["gbps"] = (moved + row.get("fetched_bytes", moved)) / ms / 1e6
    if baseline is None:
        return found
    found["exposed_ms"] = ms - baseline["iteration_ms"]
    found["of_on_device"] = ms / baseline["iteration_ms"]
    if "staging_bytes" in row and row.get("device_peak_bytes"):
        found["predicted_peak_bytes"] = predicted_peak_bytes(baseline, row)
    if link is None or not moved:
        return found
    travel = link_ms(row.get("link_bytes", moved), link["h2d+d2h_gbps"])
    if row["clip"] == "none":
        bound = bound_ms(baseline["iteration_ms"], travel)
    else:
        parts = baseline["forward_ms"], baseline["backward_ms"]
        bound = clipped_bound_ms(baseline["iteration_ms"], *parts, travel)
    return found | {"link_ms": travel, "bound_ms": bound, "of_bound": ms / bound}
