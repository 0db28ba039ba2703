"""Blocks between files and a device pass through the thread's scratch; others are used in place."""

from __future__ import annotations

from unittest import mock

import torch

from fsdp_offload.link import link
from fsdp_offload.link.link import fill, on_host, scratch

DATA = torch.randint(256, (700,), dtype=torch.uint8)


def on_a_device() -> mock.Mock:
    return mock.Mock(device=torch.device("cuda"), numel=lambda: 700)


def test_a_block_on_a_device_is_read_through_scratch() -> None:
    with mock.patch.object(link, "scratch") as own:
        own.return_value.copy_.return_value = DATA
        assert on_host(on_a_device()) is DATA
    own.assert_called_once_with(700)
    assert on_host(DATA) is DATA


def test_a_block_on_a_device_is_filled_through_scratch() -> None:
    target, here = on_a_device(), torch.empty_like(DATA)
    for each in (target, here):
        fill(each, lambda block: block.copy_(DATA))
    (copied,) = target.copy_.call_args.args
    assert torch.equal(copied, DATA)
    assert copied.data_ptr() == scratch(700).data_ptr()
    assert torch.equal(here, DATA)
