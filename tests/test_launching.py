"""Cached launches: a variant is launched again only where Triton would choose it again."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp_offload import driver as driver_module
from fsdp_offload import launching
from fsdp_offload.launching import Kernel, _Variant

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


def test_constants_come_in_the_order_of_the_kernel() -> None:
    with pytest.raises(AssertionError):
        Kernel(Function()).launch(1, (words(), words()), (8,), (1.0,), BLOCK=64, FLAG=True)


# --------------------------------------------------------------------------- without Triton


class Driver:
    """Stands for ``libcuda``: notes launches, and reads parameters where they are said to be."""

    def __init__(self, types: str) -> None:
        self.types, self.code = types, 0
        self.sizes = [*map(struct.calcsize, types), 8, 8]
        self.launched: list[tuple[Any, ...]] = []
        self.meanwhile: Callable[[], object] = int

    @property
    def cuFuncGetParamInfo(self) -> Any:
        def tell(function: int, index: int, place: Any, size: Any) -> int:
            assert function == 77
            if index >= len(self.sizes):
                return 1
            size._obj.value = self.sizes[index]
            return 0

        return tell

    def cuLaunchKernel(self, function: int, *how: Any) -> int:
        *shape, pointers, extra = how
        assert extra is None
        values = []
        for index, code in enumerate(self.types):
            (value,) = struct.unpack(code, ctypes.string_at(pointers[index], struct.calcsize(code)))
            values.append(value)
        added = [ctypes.string_at(pointers[len(self.types) + i], 8) for i in range(8)]
        assert added == [bytes(8)] * 8
        self.launched.append((function, shape, values))
        self.meanwhile()
        return self.code


SIGNATURE = {
    "a": "*i32", "b": "*bf16", "numel": "i64", "one": "constexpr", "count": "i32", "scale": "fp32",
    "FLAG": "constexpr", "BLOCK": "constexpr",
}  # fmt: skip
METADATA: dict[str, Any] = {
    "num_warps": 4, "num_ctas": 1, "shared": 1024, "launch_cooperative_grid": False,
    "launch_pdl": False, "global_scratch_size": 0, "profile_scratch_size": 0,
}  # fmt: skip


class Compiled:
    """Stands for ``triton.compiler.CompiledKernel``."""

    function = 77

    def __init__(self, signature: dict[str, str], **metadata: Any) -> None:
        self.src = SimpleNamespace(signature=signature)
        self.metadata = SimpleNamespace(**(METADATA | metadata))
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *values: self.launched.append(values)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver("QQqif")
    monkeypatch.setattr(driver_module, "_library", lambda kind: found)
    monkeypatch.setattr(launching, "_current_stream", lambda: lambda device: 1000 + device)
    return found


ARGUMENTS = [1 << 60, 64, -(1 << 40), 1, -5, 0.25]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["a signal", "another thread"])
def test_a_launch_within_a_launch_is_left_to_triton(driver: Driver, elsewhere: bool) -> None:
    """Parameters lie in one place, and may not have been read yet."""
    compiled = Compiled(SIGNATURE)
    variant = _Variant(compiled, [True, 64])

    def launch() -> None:
        variant.launch(1, 0, [*ARGUMENTS[:4], 7, -1.5])

    def meanwhile() -> None:
        if not elsewhere:
            return launch()
        thread = threading.Thread(target=launch)
        thread.start()
        thread.join()
        return None

    driver.meanwhile = meanwhile
    variant.launch(9, 3, ARGUMENTS)
    assert len(driver.launched) == 1
    assert compiled.launched == [(*ARGUMENTS[:4], 7, -1.5, True, 64)]
    driver.meanwhile = int
    variant.launch(9, 3, ARGUMENTS)
    assert len(driver.launched) == 2


def test_what_was_added_is_null(driver: Driver) -> None:
    driver.sizes += [8] * 6
    compiled = Compiled(SIGNATURE)
    _Variant(compiled, [True, 64]).launch(9, 3, ARGUMENTS)
    assert len(driver.launched) == 1


def test_a_variant_is_launched_by_the_driver(driver: Driver) -> None:
    compiled = Compiled(SIGNATURE)
    variant = _Variant(compiled, [True, 64])
    variant.launch(9, 3, ARGUMENTS)
    variant.launch(8, 0, [*ARGUMENTS[:4], 7, -1.5])
    values = [1 << 60, 64, -(1 << 40)]
    assert driver.launched == [
        (77, [9, 1, 1, 128, 1, 1, 1024, 1003], [*values, -5, 0.25]),
        (77, [8, 1, 1, 128, 1, 1, 1024, 1000], [*values, 7, -1.5]),
    ]
    assert compiled.launched == []


@pytest.mark.parametrize(
    "metadata",
    [
        {"num_ctas": 2},
        {"launch_pdl": True},
        {"launch_cooperative_grid": True},
        {"global_scratch_size": 16},
        {"profile_scratch_size": 16},
    ],
    ids=str,
)
def test_what_needs_more_is_launched_by_triton(driver: Driver, metadata: dict[str, Any]) -> None:
    compiled = Compiled(SIGNATURE, **metadata)
    _Variant(compiled, [True, 64]).launch(9, 0, ARGUMENTS)
    assert compiled.launched == [(*ARGUMENTS, True, 64)]
    assert driver.launched == []


@pytest.mark.parametrize("strange", [{"a": "nvTmaDesc"}, {"scale": "fp64"}], ids=str)
def test_other_types_are_left_to_triton(driver: Driver, strange: dict[str, str]) -> None:
    compiled = Compiled(SIGNATURE | strange)
    _Variant(compiled, [True, 64]).launch(9, 0, ARGUMENTS)
    assert compiled.launched == [(*ARGUMENTS, True, 64)]


@pytest.mark.parametrize("other", ["metadata", "double", "fewer", "large", "many", "old driver"])
def test_another_triton_is_left_to_itself(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    compiled = Compiled(SIGNATURE)
    if other == "metadata":
        del compiled.metadata.shared
    elif other == "old driver":
        monkeypatch.delattr(Driver, "cuFuncGetParamInfo")
    else:
        sizes = driver.sizes
        driver.sizes = {
            "double": [*sizes[:4], 8, 8, 8],
            "fewer": sizes[:4],
            "large": [*sizes, 64],
            "many": [*sizes, *[8] * 7],
        }[other]
    _Variant(compiled, [True, 64]).launch(9, 0, ARGUMENTS)
    assert compiled.launched == [(*ARGUMENTS, True, 64)]


@pytest.mark.parametrize("reason", ["driver", "value"])
def test_what_the_driver_refuses_triton_launches(driver: Driver, reason: str) -> None:
    compiled, arguments = Compiled(SIGNATURE), list(ARGUMENTS)
    if reason == "driver":
        driver.code = 201  # no context on this thread
    else:
        arguments[-1] = 1e300  # infinite in fp32
    _Variant(compiled, [True, 64]).launch(9, 0, arguments)
    assert compiled.launched == [(*arguments, True, 64)]
