"""Where a tensor's bytes are, asked while its storage is away, on its way, and back."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from fsdp_offload import AwayError
from fsdp_offload.moving import whereabouts
from fsdp_offload.moving.whereabouts import here, is_away, left, returned, twin, twin_at


class Trip:
    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


def test_a_view_is_read_and_written_in_its_place() -> None:
    whole = torch.arange(24, dtype=torch.float32)
    view = whole[4:16].view(3, 4).T
    expected, storage = view.clone(), whole.untyped_storage()
    place = whole.clone().view(torch.uint8)
    assert here(view) is view
    trip = Trip()
    left(storage, place, trip)
    storage.resize_(0)
    assert is_away(view)
    found = here(view)
    assert trip.waits == 1
    assert torch.equal(found, expected)
    assert found.stride() == view.stride()
    found[0, 0] = -1
    assert place.view(torch.float32)[4] == -1
    storage.resize_(24 * 4)
    back = Trip()
    returned(storage, back)
    assert not is_away(view)
    assert here(view) is view
    assert back.waits == 1
    assert here(view) is view
    assert back.waits == 1  # once is enough
    assert storage._cdata not in whereabouts._entries


def test_memory_that_nobody_knows_of_is_refused() -> None:
    tensor = torch.zeros(5)
    tensor.untyped_storage().resize_(0)
    assert is_away(tensor)
    with pytest.raises(AwayError, match="reload"):
        here(tensor)
    assert not is_away(torch.empty(0))


def test_a_storage_that_is_away_keeps_its_identity() -> None:
    """Else a new one could get it, and be taken for the one that is away."""
    tensor = torch.zeros(5)
    storage = tensor.untyped_storage()
    identity = storage._cdata
    left(storage, torch.zeros(20, dtype=torch.uint8))
    storage.resize_(0)
    del tensor, storage
    gc.collect()
    made = [torch.zeros(5) for _ in range(200)]
    assert identity not in {t.untyped_storage()._cdata for t in made}
    entry = whereabouts._entries.pop(identity)
    assert entry.storage is not None
    assert entry.storage._cdata == identity


def test_a_storage_that_is_back_is_not_kept() -> None:
    tensor = torch.zeros(5)
    left(tensor.untyped_storage(), torch.zeros(20, dtype=torch.uint8))
    returned(tensor.untyped_storage(), Trip())
    gone = weakref.ref(tensor.untyped_storage())
    del tensor
    gc.collect()
    assert gone() is None


def test_a_twin_inside_of_a_larger_place_takes_nothing_else_along() -> None:
    place = torch.arange(64, dtype=torch.uint8)
    tensor = torch.empty(2, 4, dtype=torch.int16)
    made = twin_at(tensor, place[8:], 16)
    assert made.untyped_storage().nbytes() == 16
    assert made.storage_offset() == 0
    assert made.view(-1).view(torch.uint8).tolist() == list(range(24, 40))
    made.zero_()
    assert int(place[24:40].sum()) == 0
    assert twin(torch.empty(4, dtype=torch.int32), place[16:]).view(torch.uint8)[0] == 16
