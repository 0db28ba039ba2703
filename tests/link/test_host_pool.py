"""One ledger: who holds how much host memory, and one bound for all of them."""

from __future__ import annotations

import threading

import pytest
import torch

from fsdp_offload.core.config import TransferConfig
from fsdp_offload.core.devices import CpuBackend
from fsdp_offload.core.errors import ConfigError, HostMemoryError, PinningError
from fsdp_offload.link import HostPool, held_bytes, host_pool
from tests.link.test_host_memory import Driver, in_child

CPU = torch.device("cpu")


class Pinning(CpuBackend):
    can_pin = True


def pool(
    holder: str, host_memory: int | None = None, backend: type[CpuBackend] = CpuBackend
) -> HostPool:
    size = None if host_memory is None else f"{host_memory}B"
    return HostPool(holder, backend(CPU), TransferConfig(host_memory=size))


def test_the_ledger_says_who_holds_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    one, two, other = (pool(name, backend=Pinning) for name in ("one", "one", "two"))
    some, more = one.take(1000), one.take(500)
    two.take(0)
    other.take(4000)
    assert held_bytes() == {"two": 4000, "one": 1500}
    assert list(held_bytes()) == ["two", "one"]
    assert (one.n_bytes, one.pinned_bytes) == (1500, 1500)
    one.give(some)
    assert held_bytes() == {"two": 4000, "one": 500}
    assert [n_bytes for _, n_bytes in driver.pinned] == [500, 4000]
    view = more.tensor(0, 500, torch.uint8)
    one.close()
    one.close()
    assert held_bytes() == {"two": 4000}
    assert not view.any()
    del other
    assert held_bytes() == {}
    assert driver.pinned == []


class Closing(str):
    """The name of a holder that closes another pool when it is looked at, as a finalizer may."""

    other: HostPool | None = None

    def __hash__(self) -> int:
        if self.other is not None:
            self.other.close()
        return super().__hash__()


def test_a_finalizer_may_close_a_pool_while_the_ledger_is_read() -> None:
    made = [pool(Closing("x")) for _ in range(3)]
    for each in made:
        each.holder.other = made[-1]  # type: ignore[attr-defined]
    assert held_bytes() == {}


def test_one_bound_counts_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    unbounded, bounded = pool("optimizer"), pool("phases", 20_000)
    unbounded.take(6000)
    bounded.take(3000)
    third = pool("save")
    third.take(1000)
    for short in (unbounded, bounded, third):
        with pytest.raises(HostMemoryError) as caught:
            short.take(1)
        for part in (f"{short.holder}: 1 bytes", "is 20000 bytes, of which 20000 bytes are taken",
                     "optimizer = 6000 bytes, phases = 3000 bytes, save = 1000 bytes",
                     "2 bytes on the 2 ranks"):  # fmt: skip
            assert part in str(caught.value)
    assert held_bytes() == {"optimizer": 6000, "phases": 3000, "save": 1000}
    unbounded.close()
    third.take(6000)


def test_a_second_value_is_refused_until_the_first_is_gone() -> None:
    first = pool("phases", 5000)
    second = pool("optimizer", 5000)
    with pytest.raises(ConfigError, match=r"='6000B' of save: (phases|optimizer) has '5000B'"):
        pool("save", 6000)
    left_out = pool("save")
    with pytest.raises(HostMemoryError, match="is 5000"):
        left_out.take(6000)
    first.close()
    del second
    larger = pool("phases", 6000)
    larger.take(6000)
    with pytest.raises(ConfigError):
        first.take(1)  # it has 5000 still


def test_a_bound_that_was_too_small_does_not_stay() -> None:
    first = pool("phases", 5000)
    with pytest.raises(HostMemoryError):
        first.take(5001)
    assert held_bytes() == {}
    pool("phases", 6000).take(5001)


def test_cycles_do_not_keep_memory_or_a_bound() -> None:
    for size in (1000, 2000):
        cycle = [pool("kept by itself", size)]
        cycle[0].take(size)
        cycle.append(cycle)  # type: ignore[arg-type]
        del cycle
    pool("other", 3000).take(3000)


@pytest.mark.parametrize("refuses", ["map", "pin"])
def test_what_was_refused_is_not_held(refuses: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch, refuse=refuses == "pin")
    one = pool("one", 1 << 61, Pinning)
    with pytest.raises((HostMemoryError, PinningError)):
        one.take(1 << 60 if refuses == "map" else 1000)
    assert held_bytes() == {}
    assert one.n_bytes == 0


def test_a_child_has_a_ledger_of_its_own() -> None:
    one = pool("parent", 5000)
    one.take(5000)

    def check() -> None:
        assert held_bytes() == {}
        own = pool("child", 7000)
        own.take(7000)
        one.close()
        assert held_bytes() == {"child": 7000}

    forked, is_held = threading.Event(), threading.Event()

    def hold() -> None:
        with host_pool._lock:
            is_held.set()
            forked.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    status = in_child(check)
    forked.set()
    thread.join()
    assert status == 0
    assert held_bytes() == {"parent": 5000}
