"""Row names."""

from __future__ import annotations

import pytest
import torch

from fsdp_offload.bench.cases import DEFAULT_ROWS, Case
from fsdp_offload.errors import ConfigError


def test_words_of_a_name() -> None:
    case = Case.parse("forward-clip-bf16-stochastic-p4GiB-b64MiB-s6-f0.5", slots=3)
    assert (case.kind, case.clip, case.update_on, case.offload_fraction) == (
        "forward", "ours", "device", 0.5
    )  # fmt: skip
    assert case.transfer == {"bucket_bytes": 64 << 20, "slots": 6, "prefetch_bytes": 4 << 30}
    assert case.precision == {"moments": torch.bfloat16, "rounding": "stochastic"}


def test_only_what_was_chosen_is_passed_on() -> None:
    case = Case.parse("backward", prefetch_bytes="1GiB")
    assert case.transfer == {"prefetch_bytes": "1GiB"}
    assert case.precision == {}
    assert Case.parse("step-int8-host").precision == {"moments": "int8"}


def test_default_rows_are_names() -> None:
    assert [Case.parse(name).name for name in DEFAULT_ROWS] == list(DEFAULT_ROWS)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("backwards", "'backwards' is no kind of row"),
        ("step-fp8", "the word 'fp8' is unknown"),
        ("step-pmuch", "the word 'pmuch' is unknown"),
        ("plain-bf16", "only rows of ours"),
        ("torchao-f0.5", "only rows of ours"),
    ],
)
def test_wrong_name(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Case.parse(name)


def test_who_promises_the_same_bits() -> None:
    def key(name: str, shards: str) -> object:
        return Case.parse(name).same_bits_as(shards)

    assert key("plain", "fp32") == key("backward", "fp32") == key("step-f0.5", "fp32")
    assert key("plain", "bf16") != key("backward", "bf16")
    assert key("forward-clip", "bf16") == key("step-torchclip", "bf16") != key("step", "bf16")
    assert key("step-host", "fp32") == key("backward-host", "fp32") != key("step", "fp32")
    assert key("step-bf16", "fp32") != key("step", "fp32")
    assert key("cpuoffload", "fp32") is key("step-auto", "fp32") is None
