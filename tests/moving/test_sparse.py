"""Tensors without a storage: they never leave, and nobody trips over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_offload import HybridDeviceOptimizer, PhaseOffloader
from fsdp_offload.moving import absent
from fsdp_offload.moving.whereabouts import here, is_away

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta"),
]
MAKERS: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": Tensor.to_sparse,
    "csr": Tensor.to_sparse_csr,
}


@pytest.mark.parametrize("layout", MAKERS)
def test_a_sparse_tensor_is_itself(layout: str) -> None:
    sparse = MAKERS[layout](torch.eye(4))
    assert not is_away(sparse)
    assert not absent.is_absent(sparse)
    assert here(sparse) is sparse
    assert absent.host_view(sparse) is None
    assert absent.present(sparse) is sparse


@pytest.mark.parametrize("layout", MAKERS)
def test_a_model_with_a_sparse_buffer(layout: str) -> None:
    model: Any = nn.Linear(4, 4)
    model.register_buffer("edges", MAKERS[layout](torch.eye(4) * 3))
    optimizer = HybridDeviceOptimizer(
        torch.optim.AdamW(model.parameters()), model=model, update_on="host"
    )
    phases, edges = PhaseOffloader(model, optimizer), model.edges
    expected = {name: each.to_dense().clone() for name, each in model.state_dict().items()}
    for _ in range(2):
        phases.offload()
        assert absent.is_absent(model.weight)
        shown = {name: each.to_dense().clone() for name, each in model.state_dict().items()}
        model.load_state_dict({**model.state_dict(), "edges": model.edges.clone()})
        phases.reload()
        assert model.edges is edges
        back = {name: each.to_dense() for name, each in model.state_dict().items()}
        torch.testing.assert_close([shown, back], [expected, expected], rtol=0, atol=0)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    phases.close()
