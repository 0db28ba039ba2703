"""What options give where others are left out."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_offload.core.config import GIB, MIB, OffloadConfig


@pytest.mark.parametrize(
    ("options", "mib"),
    [
        ({"overlap": "forward"}, 128),
        ({"overlap": "forward", "offload": "all"}, 64),
        ({"overlap": "forward", "offload": "all", "device_memory": GIB}, 128),
        ({"overlap": "forward", "device_memory": GIB - 1}, 32),
        ({"overlap": "step"}, 32),
    ],
)
def test_buckets_are_as_large_as_device_memory_allows(options: dict[str, Any], mib: int) -> None:
    assert OffloadConfig(**options).bucket_bytes == mib * MIB
