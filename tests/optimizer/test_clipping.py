"""Norm and coefficient of clipping have torch's bits, with no more all-reduces than needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from fsdp_offload.core.errors import ConfigError, NonFiniteGradientError
from fsdp_offload.optimizer.gradients import coefficient, gradients_of, scale, total_norm
from tests.fsdp import models
from tests.fsdp.models import Ranks, check, check_same
from tests.fsdp.test_meshes import normed, normed_loss

NORMS = (2.0, 1.0, math.inf, 3.0, 0.5, -math.inf, 0.0)
FP32, BF16 = torch.float32, torch.bfloat16


def whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def check_clipping(gradients: Sequence[Tensor], p: float, what: str, max_norm: float = 0.7) -> None:
    """Norm and scaled gradients equal those of torch, which get copies."""
    what = f"{what}, p={p}"
    parameters = [nn.Parameter(g.detach().clone()) for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.detach().clone()
    expected = get_total_norm([x.grad for x in parameters], p)
    found = total_norm(gradients, p)
    check(isinstance(found, DTensor) == isinstance(expected, DTensor), f"{what}: {type(found)}")
    check_same(whole(found), whole(expected), what)
    check(found.item() == whole(expected).item(), f"{what}: item() is {found.item()}")
    if isinstance(found, DTensor):
        check(all(x.is_replicate() for x in found.placements), f"{what}: {found.placements}")
    clip_grads_with_norm_(parameters, max_norm, expected)
    factor = coefficient(found, max_norm)
    check(type(factor) is Tensor and factor.dim() == 0, f"{what}: coefficient is {factor!r}")
    scaled = [gradient.detach().clone() for gradient in gradients]
    scale(scaled, factor)
    for i, (gradient, parameter) in enumerate(zip(scaled, parameters, strict=True)):
        if isinstance(gradient, DTensor) and any(x.is_partial() for x in gradient.placements):
            continue  # torch sums it first
        assert parameter.grad is not None
        check_same(models.local(gradient), models.local(parameter.grad), f"{what}, gradient {i}")


def n_all_reduces(gradients: Sequence[Tensor], p: float) -> int:
    with CommDebugMode() as counts:
        total_norm(gradients, p)
    return counts.get_total_counts()


# --------------------------------------------------------------------------- plain tensors


def plain_gradients(dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(n, generator=generator).to(dtypes[i % len(dtypes)])
        for i, n in enumerate((7, 1, 64, 1000, 3, 129))
    ]


@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize("dtypes", [(FP32,), (BF16, FP32)], ids=str)
def test_plain_tensors_as_torch(dtypes: tuple[torch.dtype, ...], p: float) -> None:
    check_clipping(plain_gradients(dtypes), p, str(dtypes))


def test_no_gradients_have_norm_zero_on_the_cpu() -> None:
    parameters = [nn.Parameter(torch.ones(3))]

    norm = total_norm(gradients_of(parameters))

    assert torch.equal(norm, get_total_norm([]))
    assert coefficient(norm, 1.0).item() == 1.0


def test_parameters_without_a_gradient_are_left_out() -> None:
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    second.grad = torch.full((2,), 3.0)
    first.decoupled_grad = torch.full((2,), 4.0)  # type: ignore[attr-defined]

    found = gradients_of([first, second, nn.Parameter(torch.ones(5))])

    assert [g.tolist() for g in found] == [[4.0, 4.0], [3.0, 3.0]]


@pytest.mark.parametrize(("p", "expected"), [(math.inf, 5.0), (-math.inf, 1.0), (1.0, 6.0)])
def test_empty_tensors_change_nothing(p: float, expected: float) -> None:
    """torch has no infinity norm of them and raises."""
    gradients = [torch.empty(0), torch.tensor([-5.0]), torch.empty(0, 3), torch.tensor([1.0])]

    assert total_norm(gradients, p).item() == expected


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_norms_that_are_not_finite_raise_when_asked_for(bad: float) -> None:
    gradients = [torch.tensor([bad, 1.0])]

    assert not total_norm(gradients).isfinite()
    with pytest.raises(NonFiniteGradientError, match=f"order 2.0 is {bad}"):
        total_norm(gradients, error_if_nonfinite=True)


@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
def test_limits_that_are_no_norms_are_refused(max_norm: float) -> None:
    with pytest.raises(ConfigError, match="max_norm"):
        coefficient(torch.tensor(1.0), max_norm)


def test_an_order_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="norm_type"):
        total_norm([torch.ones(1)], math.nan)


# --------------------------------------------------------------------------- placements

S0, S1, R = Shard(0), Shard(1), Replicate()
STRIDED = (_StridedShard(0, split_factor=2), S0)
PLACED: dict[str, list[tuple[Placement, ...]]] = {
    "sharded": [(S0,), (S0,), (S1,)],
    "replicated": [(R,), (R,), (R,)],
    "some replicated": [(R,), (S0,), (R,), (S1,)],
    "HSDP": [(R, S0), (R, S0), (R, S0)],
    "FSDP and TP": [(S0, R), STRIDED, (S0, S1), (R, R), (S0, R), (R, S0)],
    "TP replicated first": [(R, R), (S0, R), (R, S1)],
}


def placed(
    placements: Sequence[tuple[Placement, ...]],
    dtypes: Sequence[torch.dtype],
    rows: tuple[int, int],
) -> list[DTensor]:
    """Tensors of that many rows of 7, in turn; cut by hand, because a strided cut is wanted too."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for i, each in enumerate(placements):
        on = models.flat_mesh(4) if len(each) == 1 else models.mesh((2, 2), ("dp", "tp"))
        tensor = torch.randn(rows[i % 2], 7, generator=generator).to(dtypes[i % len(dtypes)])
        cut = tensor
        for axis, placement in enumerate(each):
            if not placement.is_replicate():
                parts = cut.chunk(on.size(axis), placement.dim)
                here = on.get_local_rank(axis)
                cut = parts[here] if here < len(parts) else parts[0].narrow(placement.dim, 0, 0)
        whole = {"shape": tensor.shape, "stride": tensor.stride()}
        made.append(DTensor.from_local(cut.contiguous(), on, each, run_check=False, **whole))
    return made


def clip_placed(case: str, dtypes: tuple[torch.dtype, ...]) -> int:
    """3 rows leave the last of 4 ranks empty; torch has no infinity norm of that, and hangs."""
    for p in NORMS[:4]:
        gradients = placed(PLACED[case], dtypes, (7, 8) if math.isinf(p) else (7, 3))
        check_clipping(gradients, p, f"{case}, {dtypes}")
    return n_all_reduces(gradients, 2.0)


@pytest.mark.parametrize("dtypes", [(FP32, BF16)], ids=str)
@pytest.mark.parametrize("case", PLACED)
def test_every_placement_as_torch(ranks: Ranks, case: str, dtypes: tuple[torch.dtype, ...]) -> None:
    axes = {"replicated": 0, "FSDP and TP": 2, "TP replicated first": 2}.get(case, 1)

    assert ranks(4).run(clip_placed, case, dtypes) == [axes] * 4


# --------------------------------------------------------------------------- real models


def clip_model(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[int]:
    on = models.flat_mesh(size) if len(shape) == 1 else models.mesh(shape, ("replicate", "shard"))
    model = models.toy(on, dtype=dtype)
    counts = []
    for step in (1, 2):  # in the first a block is unused
        models.backward(model, step)
        gradients = gradients_of(model.parameters())
        for p in (2.0, 1.0):
            check_clipping(gradients, p, f"{shape} {dtype}, step {step}")
        check(math.isfinite(total_norm(gradients, math.inf).item()), "infinity norm")
        counts.append(n_all_reduces(gradients, 2.0))
        model.zero_grad()
    return counts


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1,), FP32), ((2,), BF16), ((4,), FP32), ((2, 2), FP32)],
    ids=str,
)
def test_fsdp_models_as_torch_with_one_all_reduce(
    ranks: Ranks, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    size = math.prod(shape)
    expected = [0 if size == 1 else 1] * 2
    found = ranks(max(size, 2)).run(clip_model, size, shape, dtype)

    assert all(counts == expected for counts in found)


def clip_normed() -> None:
    model = normed()
    normed_loss(model, 1).backward()
    for p in (2.0, 1.0, math.inf):
        check_clipping(gradients_of(model.parameters()), p, "partial gradients")


def test_partial_gradients_as_torch(ranks: Ranks) -> None:
    ranks(2).run(clip_normed)


def inf_of_empty_shards() -> list[float]:
    on = models.flat_mesh(4)
    tensor = torch.arange(6.0).view(3, 2) + 2.0
    spread = torch.distributed.tensor.distribute_tensor(tensor, on, [Shard(0)])
    return [total_norm([spread, spread], p).item() for p in (math.inf, -math.inf)]


def test_infinity_norms_with_empty_shards(ranks: Ranks) -> None:
    assert ranks(4).run(inf_of_empty_shards) == [[7.0, 2.0]] * 4


def several_meshes() -> list[Any]:
    """Norm and number of all-reduces of parameters on two meshes beside a plain one."""
    grid = models.mesh((2, 2), ("dp", "tp"))
    tensors = [torch.arange(1.0, 13.0).view(6, 2), torch.full((4,), 2.0), torch.tensor([3.0])]
    spread = torch.distributed.tensor.distribute_tensor
    gradients = [
        spread(tensors[0], models.flat_mesh(4), [S0]),
        spread(tensors[1], grid, [R, S0]),
        tensors[2],
    ]
    norm = total_norm(gradients, 2.0)
    expected = torch.linalg.vector_norm(torch.cat([t.flatten() for t in tensors]))
    torch.testing.assert_close(whole(norm), expected, rtol=1e-6, atol=0)
    check(type(norm) is Tensor, "on no mesh")
    largest = total_norm(gradients, math.inf).item()
    return [norm.item(), largest, n_all_reduces(gradients, 2.0)]


def test_parameters_on_several_meshes_and_on_none(ranks: Ranks) -> None:
    results = ranks(4).run(several_meshes)

    assert results == [results[0]] * 4
    assert results[0][1:] == [12.0, 2]
