"""How large the pool of a stash is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fsdp_offload.plan.activations import GroupRows, StashPlan, make_plan

PAGE = 1 << 18
LAYER = GroupRows(rows=65536, capacity=524288, row_bytes=(4096, 3072, 1536))


def plan(layers: int = 4, device_bytes: int | None = None, host_bytes: int = 0) -> StashPlan:
    return make_plan(
        [LAYER] * layers,
        layers * LAYER.pages(PAGE),
        page_bytes=PAGE,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        margin=1.25,
    )


def test_what_is_explained() -> None:
    assert plan(device_bytes=2 << 30, host_bytes=1 << 30).explain() == (
        "pool: 2.00 GiB on the device, 1.00 GiB on the host, in pages of 262144 bytes\n"
        "groups: 4, buffers 17.00 GiB, rows in use 2.12 GiB\n"
        "in use at once: 2.12 GiB, with a margin of 1.25: 2.66 GiB"
    )
    assert plan(0, device_bytes=1 << 30).explain().endswith("no group recorded yet")


def test_full_buffers_are_said_to_be_full() -> None:
    full = GroupRows(rows=64, capacity=64, row_bytes=(64,))
    made = make_plan([full], 1, page_bytes=4096, device_bytes=None, host_bytes=0, margin=1.25)
    assert made.device_pages == 1  # not more than all rows of all buffers
    assert "every buffer was full" in made.explain()


@given(st.integers(0, 6), st.integers(0, 4 << 30), st.integers(0, 2 << 30))
def test_a_pool_is_no_larger_than_was_asked_for(
    layers: int, device_bytes: int, host_bytes: int
) -> None:
    made = plan(layers, device_bytes, host_bytes)
    assert made.device_bytes <= max(device_bytes, PAGE)
    assert made.host_bytes <= host_bytes
