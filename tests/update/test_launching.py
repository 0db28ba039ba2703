"""Cached launches: a variant is launched again only where Triton would choose it again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp_offload.update.kernels.launching import Kernel

MEMORY = torch.zeros(4096, dtype=torch.uint8)
START = -MEMORY.data_ptr() % 16


class Function:
    """Stands for what ``triton.jit`` makes: notes what it is asked for, and gives a variant."""

    arg_names = ("a", "b", "numel", "scale", "FLAG", "BLOCK")

    def __init__(self) -> None:
        self.compiled = 0
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        def run(*arguments: Any, **constants: Any) -> Any:
            self.compiled += 1
            number, launched = self.compiled, self.launched

            class Variant:
                def __getitem__(self, grid: tuple[int, ...]) -> Any:
                    return lambda *values: launched.append((number, grid, *values))

            assert constants.pop("num_warps") == 2
            assert list(constants) == ["FLAG", "BLOCK"]
            return Variant()

        return run


def words(offset: int = 0, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return MEMORY[START + offset : START + offset + 64].view(dtype)


def launch(kernel: Kernel, a: Any, numel: int, *, scale: float = 0.5, flag: bool = True) -> None:
    kernel.launch(7, (a, words(128)), (numel,), (scale,), FLAG=flag, BLOCK=64)


def test_what_triton_does_not_look_at_takes_the_same_variant() -> None:
    function = Function()
    kernel = Kernel(function, num_warps=2)
    launch(kernel, words(), 48)
    launch(kernel, words(256), 96, scale=-3.0)
    assert function.compiled == 1
    addresses = words(256).data_ptr(), words(128).data_ptr()
    assert function.launched == [(1, (7, 1, 1), *addresses, 96, -3.0, True, 64)]


@pytest.mark.parametrize(
    "other",
    [
        {"a": words(0, torch.int16)},
        {"numel": 49},
        {"numel": 1},
        {"numel": 1 << 31},
        {"flag": False},
    ],
    ids=["dtype", "not divisible", "one", "wide", "constant"],
)
def test_what_triton_looks_at_takes_another_variant(other: dict[str, Any]) -> None:
    function = Function()
    kernel = Kernel(function, num_warps=2)
    usual: dict[str, Any] = {"a": words(), "numel": 48}
    for _ in range(2):
        launch(kernel, **usual)
        launch(kernel, **(usual | other))
    assert function.compiled == 2
    assert [number for number, *_ in function.launched] == [1, 2]


def test_what_is_not_aligned_is_left_to_triton() -> None:
    function = Function()
    kernel = Kernel(function, num_warps=2)
    launch(kernel, words(), 48)
    for _ in range(3):
        launch(kernel, words(4), 48)
    assert (function.compiled, function.launched) == (4, [])


def test_an_empty_grid_launches_nothing() -> None:
    function = Function()
    Kernel(function).launch(0, (words(), words()), (0,), (1.0,), FLAG=True, BLOCK=64)
    assert (function.compiled, function.launched) == (0, [])
