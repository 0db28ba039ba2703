"""Tensors whose storage is away are read and written in host memory."""

from __future__ import annotations

import gc

import pytest
import torch

from fsdp_offload.errors import AwayError
from fsdp_offload.moving import absent


def _leave(tensor: torch.Tensor) -> tuple[torch.Tensor, absent.Absence]:
    storage = tensor.untyped_storage()
    place = torch.empty(storage.nbytes(), dtype=torch.uint8)
    place.untyped_storage().copy_(storage)
    entry = absent.Absence(storage, place)
    storage.resize_(0)
    return place, entry


def test_view_has_shape_strides_offset_and_bytes() -> None:
    base = torch.arange(24, dtype=torch.float32).view(4, 6)
    view = base[1:3, ::2].t()
    expected = view.clone()
    _, entry = _leave(base)
    shown = absent.host_view(view)
    assert shown is not None
    assert shown.stride() == view.stride()
    assert torch.equal(shown, expected)
    assert absent.is_absent(view)
    entry.end()


def test_writes_land_in_the_place() -> None:
    tensor = torch.zeros(3)
    place, _entry = _leave(tensor)
    absent.present(tensor).fill_(2.0)
    assert place.view(torch.float32).tolist() == [2.0] * 3


def test_present_tensor_is_itself() -> None:
    tensor = torch.zeros(3)
    assert absent.present(tensor) is tensor
    assert absent.host_view(tensor) is None


def test_entry_goes_with_whoever_made_it() -> None:
    tensor = torch.zeros(3)
    _, entry = _leave(tensor)
    assert absent.is_absent(tensor)
    del entry
    gc.collect()
    with pytest.raises(AwayError, match="not in host memory"):
        absent.host_view(tensor)
    tensor.untyped_storage().resize_(12)
    assert not absent.is_absent(tensor)


def test_bytes_are_waited_for_before_each_use() -> None:
    tensor, waits = torch.zeros(3), []
    place = torch.empty(12, dtype=torch.uint8)
    entry = absent.Absence(tensor.untyped_storage(), place, absent.Settle(lambda: waits.append(1)))
    absent.host_view(tensor)
    assert waits == [1]
    entry.end()
    entry.end()
    assert entry.is_over()
    absent.host_view(tensor)
    assert waits == [1]
