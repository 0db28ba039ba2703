"""The bound's arithmetic against figures worked out by hand."""

from __future__ import annotations

import pytest

from fsdp_offload.bench import bound

PLAIN = {
    "name": "plain",
    "kind": "plain",
    "clip": "none",
    "status": "ok",
    "iteration_ms": 147.0,
    "forward_ms": 45.0,
    "backward_ms": 95.0,
    "device_peak_bytes": 20_000,
    "device_state_bytes": 8_000,
}
CLIPPED = PLAIN | {"name": "plain-clip", "clip": "torch", "iteration_ms": 150.0}
OURS = {
    "name": "backward",
    "kind": "backward",
    "clip": "none",
    "status": "ok",
    "iteration_ms": 280.0,
    "moved_bytes": 13_300_000_000,
    "link_bytes": 13_300_000_000,
    "staging_bytes": 1_100,
    "device_state_bytes": 10,
    "device_peak_bytes": 13_000,
}
LINK = {"h2d_gbps": 55.0, "d2h_gbps": 55.0, "h2d+d2h_gbps": 100.0}


def test_link_time_counts_both_directions() -> None:
    assert bound.link_ms(13_300_000_000, 100.0) == pytest.approx(266.0)


@pytest.mark.parametrize(("link", "expected"), [(266.0, 266.0), (80.0, 147.0)])
def test_bound_is_the_longer_of_link_and_iteration(link: float, expected: float) -> None:
    assert bound.bound_ms(147.0, link) == expected


@pytest.mark.parametrize(
    ("link", "expected"), [(266.0, 95.0 + 266.0), (50.0, 95.0 + 50.0 + 5.0), (30.0, 150.0)]
)
def test_clipping_starts_the_link_after_the_backward(link: float, expected: float) -> None:
    assert bound.clipped_bound_ms(150.0, 45.0, 95.0, link) == expected


def test_row_without_clipping() -> None:
    found = bound.derived(OURS, PLAIN, LINK)
    assert found["exposed_ms"] == pytest.approx(133.0)
    assert found["bound_ms"] == pytest.approx(266.0)
    assert found["of_bound"] == pytest.approx(280.0 / 266.0)
    assert found["gbps"] == pytest.approx(95.0)
    assert found["predicted_peak_bytes"] == 20_000 - 8_000 + 10 + 1_100


def test_row_with_clipping() -> None:
    found = bound.derived(OURS | {"clip": "ours"}, CLIPPED, LINK)
    assert found["bound_ms"] == pytest.approx(95.0 + 266.0)


def test_bound_counts_state_that_a_row_kept_back() -> None:
    assert bound.derived(OURS | {"moved_bytes": 1}, PLAIN, LINK)["bound_ms"] == pytest.approx(266)


def test_baseline_clips_where_the_row_clips() -> None:
    rows = [PLAIN | {"status": "failed"}, PLAIN, CLIPPED]
    assert bound.baseline_of(OURS, rows) == PLAIN
    assert bound.baseline_of(OURS | {"clip": "torch"}, rows) == CLIPPED
    assert bound.baseline_of(OURS | {"clip": "ours"}, rows[:2]) == PLAIN
    assert bound.baseline_of(OURS, []) is None


def test_peer_has_no_bound_and_a_failed_row_nothing() -> None:
    peer = {"kind": "torchao", "clip": "none", "status": "ok", "iteration_ms": 217.0}
    assert set(bound.derived(peer, PLAIN, LINK)) == {"exposed_ms", "of_on_device"}
    assert bound.derived({"status": "failed"}, PLAIN, LINK) == {}
    assert set(bound.derived(OURS, None, LINK)) == {"gbps"}
    assert "bound_ms" not in bound.derived(OURS, PLAIN, None)
