"""Paged stash on a GPU: bits, captures and replays with other routing, spill, overflow, memory."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_offload import FixedAddressRegion, PagedStash, StashOverflowError, TransferConfig
from fsdp_offload.activations import pages as torch_pages
from fsdp_offload.activations.pages import PagePool
from fsdp_offload.activations.stash import page_kernels
from fsdp_offload.core.devices import backend_for
from fsdp_offload.link import HostRange
from tests.activations import moe
from tests.helpers.compare import bits

CUDA = torch.device("cuda", 0)
DIM, TOKENS, LAYERS = 128, 512, 4
SIZES = {"dim": DIM, "width": 256, "capacity": 4 * TOKENS}
MIB = 1 << 20


def model(dtype: torch.dtype = torch.float32) -> moe.Model:
    return moe.model(LAYERS, **SIZES).to(CUDA, dtype)


def batch(seed: int, dtype: torch.dtype = torch.float32, twice: float = 0.5) -> Tensor:
    """``twice``: share of the tokens that have two rows; the others have one."""
    x = moe.batch(seed, TOKENS, DIM).sort(dim=0).values
    x[:, 0] = 1.0
    x[: int((1 - twice) * TOKENS), 0] = -1.0
    generator = torch.Generator().manual_seed(seed)
    return x[torch.randperm(TOKENS, generator=generator)].to(CUDA, dtype)


def shares(count: int) -> list[float]:
    choose = random.Random(0)
    return [choose.choice([0.0, 0.03, 0.2, 0.5, 0.7]) for _ in range(count)]


def prepared(most: float = 0.7, **how: Any) -> PagedStash:
    """That has recorded layers in which so many tokens have two rows."""
    stash = PagedStash(CUDA, **{"page_bytes": "16KiB", "tail": "nan"} | how)
    with stash.exact():
        moe.gradients(model().use(stash), batch(0, twice=most))
    stash.prepare(margin=1.0)
    return stash


def is_idle(stash: PagedStash) -> bool:
    """The stacks are in their first order."""
    pool = stash._store.pool
    assert pool is not None
    order = torch.arange(pool.free.numel(), dtype=torch.int32, device=CUDA)
    return torch.equal(pool.free, order) and pool.tops.tolist() == [pool.n_near, pool.n_far]


class Captured:
    """Forward, loss and backward in one graph."""

    def __init__(self, module: nn.Module, x: Tensor) -> None:
        self.module, self.x, self.graph = module, x.clone(), torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.iteration()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self.graph):
            self.loss = self.iteration()
        self.gradients = [p.grad for p in module.parameters() if p.grad is not None]

    def iteration(self) -> Tensor:
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        loss = self.module(self.x).square().mean()
        loss.backward()
        return loss.detach()  # type: ignore[no-any-return]

    def replay(self, x: Tensor) -> list[Tensor]:
        self.x.copy_(x)
        self.graph.replay()
        return [self.loss.clone(), *(gradient.clone() for gradient in self.gradients)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("how", [{}, {"host_bytes": "16MiB", "device_bytes": "3MiB"}],
                         ids=["device", "spill"])  # fmt: skip
def test_eager_bits(dtype: torch.dtype, how: dict[str, Any]) -> None:
    stash, net = prepared(**how), model(dtype)
    for seed, share in enumerate(shares(8)):
        x = batch(seed, dtype, share)
        expected = moe.gradients(net.use(None), x)
        assert moe.same(moe.gradients(net.use(stash), x), expected)
    stash.check()
    assert is_idle(stash)
    now = stash.statistics()
    assert now.exact_groups == LAYERS
    assert (now.most_host_pages > 0) == bool(how)
    stash.close()


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"page_bytes": "256KiB"},
        {"host_bytes": "16MiB", "device_bytes": "3MiB"},
        {"region": FixedAddressRegion},
    ],
    ids=["device", "256KiB", "spill", "region"],
)
def test_200_replays_with_other_routing_have_the_bits_of_eager(how: dict[str, Any]) -> None:
    region = None
    if "region" in how:
        region = FixedAddressRegion("stash", CUDA)
        how = {"region": region}
    stash, net, plain = prepared(**how), model(), model()
    captured = Captured(net.use(stash), batch(0))
    for seed, share in enumerate(shares(200)):
        x = batch(seed, twice=share)
        if region is not None and seed % 20 == 10:
            region.pause(save=False)
            region.resume()
        assert moe.same(captured.replay(x), moe.gradients(plain, x)), seed
        if seed % 50 == 0:
            assert moe.same(moe.gradients(net, x), moe.gradients(plain, x))  # eager, beside it
        if seed == 100:
            captured = Captured(net, x)
    stash.check()
    assert is_idle(stash)
    stash.close()


def test_overflows_in_replays_are_flagged_and_leave_nothing() -> None:
    stash, plain = prepared(most=0.2), model()
    captured = Captured(model().use(stash), batch(0, twice=0.2))
    for seed in range(20):
        share = 0.9 if seed % 5 == 4 else 0.2
        found = captured.replay(batch(seed, twice=share))
        if share > 0.2:
            with pytest.raises(StashOverflowError, match="pages ran out"):
                stash.check()
        else:
            stash.check()
            assert moe.same(found, moe.gradients(plain, batch(seed, twice=share)))
        assert is_idle(stash)
    stash.close()


@pytest.mark.parametrize("protocol", ["forward", "replay"])
def test_what_overflowed_is_repeated_exactly(protocol: str) -> None:
    def trained(stash: PagedStash | None) -> list[Tensor]:
        torch.manual_seed(0)
        net = model().use(stash)
        found: list[Tensor] = []
        graph = Captured(net, batch(0, twice=0.2)) if stash and protocol == "replay" else None
        for seed in range(50):
            x = batch(seed, twice=0.9 if seed % 5 == 4 else 0.2)

            def forward(retry: bool, x: Tensor = x) -> Tensor:
                noise = torch.rand(1, device=CUDA) * 0.01
                return net(x * (1 + noise)).square().mean()  # type: ignore[no-any-return]

            def iteration(retry: bool, x: Tensor = x) -> Tensor:
                if graph is not None and not retry:
                    return graph.replay(x)[0]
                net.zero_grad(set_to_none=False)
                loss = net(x).square().mean()
                loss.backward()
                return loss.detach()  # type: ignore[no-any-return]

            if protocol == "forward":
                net.zero_grad(set_to_none=False)
                loss = forward(False) if stash is None else stash.run(forward)
                loss.backward()
            else:
                loss = iteration(False) if stash is None else stash.run(iteration)
            with torch.no_grad():
                for parameter in net.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=1e-3)
            found.append(loss.detach().clone())
        return [*found, *(p.detach() for p in net.parameters())]

    stash = prepared(most=0.2)
    assert moe.same(trained(stash), trained(None))
    assert is_idle(stash)
    stash.close()


# torch warms up on another stream than the one that it captures on.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_partial_graphs() -> None:
    """Graphs over three expert layers, with eager operations and an eager group in between."""
    stash, plain = prepared(), model()
    net = model().use(stash)
    between = nn.Linear(DIM, DIM).to(CUDA)
    layers: list[Callable[[Tensor], Tensor]] = list(net.layers)
    samples = tuple((batch(i).requires_grad_(),) for i in range(3))
    layers[:3] = torch.cuda.make_graphed_callables(tuple(net.layers[:3]), samples)

    def run(layers: list[Callable[[Tensor], Tensor]], x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        between.zero_grad()
        y = x
        for layer in layers:
            y = between(layer(y))
        loss = y.square().mean()
        loss.backward()
        assert x.grad is not None
        return [loss.detach(), x.grad, *(p.grad.clone() for p in between.parameters())]

    for seed, share in enumerate(shares(30)):
        x = batch(seed, twice=share)
        assert moe.same(run(layers, x), run(list(plain.layers), x)), seed
    stash.check()
    assert is_idle(stash)
    stash.close()


def test_forwards_without_a_backward_lose_no_pages() -> None:
    stash, net, plain = prepared(device_bytes="32MiB"), model(), model()
    net.use(stash)
    x = batch(0)
    graph = torch.cuda.CUDAGraph()
    net(x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = net(x)
    del y
    gc.collect()
    for _ in range(10):
        graph.replay()
    stash.check()
    pool = stash._store.pool
    assert pool is not None
    held = pool.near.numel() // pool.page_words - int(pool.tops[0])
    graph.replay()
    assert pool.near.numel() // pool.page_words - int(pool.tops[0]) == held
    for _ in range(3):  # beside what the graph holds
        assert moe.same(moe.gradients(net, x), moe.gradients(plain, x))
    stash.check()
    stash.close()


@pytest.mark.alone
def test_memory() -> None:
    """After the forward: the rows. In iterations nothing is allocated that stays."""
    capacity = 16 * TOKENS
    sizes = SIZES | {"capacity": capacity}
    net = moe.model(LAYERS, **sizes).to(CUDA)
    x = batch(0)

    def kept(stash: PagedStash | None) -> int:
        net.use(stash)
        moe.gradients(net, x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = net(x)
        after = torch.cuda.memory_allocated()
        y.sum().backward()
        del y
        return after - before

    stash = PagedStash(CUDA, page_bytes="16KiB")
    static, exact = kept(None), kept(stash)
    plan = stash.prepare(margin=1.0)
    paged = kept(stash) + plan.device_bytes
    assert paged <= 1.10 * exact
    # The model's own masks and places have all rows, too, and are kept.
    now = stash.statistics()
    kept_bytes = sum(n for why, n in now.kept_bytes.items() if why != "a parameter")
    rest = kept_bytes / now.groups * LAYERS
    assert paged - rest <= 0.2 * (static - rest)
    figures = []
    for seed in range(200):
        moe.gradients(net, batch(seed % 7, twice=0.4))
        figures.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert len(set(figures[20:])) == 1
    stash.close()


@pytest.mark.parametrize("seed", range(3))
def test_kernels_do_what_plain_operations_do(seed: int) -> None:
    """Tables, records, stacks, flags and bytes, in any order of claims and releases."""
    choose, page, capacity = random.Random(seed), 16 << 10, 3000
    backend = backend_for(CUDA)
    pools, near, far = [], 60, 30
    for kernels in (page_kernels(CUDA), torch_pages):
        arena = HostRange(
            far * page, device=CUDA, can_pin=True, transfer=TransferConfig(pin="require")
        )
        memory = torch.zeros(near * page // 8, dtype=torch.int64, device=CUDA)
        pools.append(PagePool(backend, page, memory, kernels, arena))
    live: list[tuple[Any, ...]] = []
    for _ in range(60):
        if live and choose.random() < 0.45:
            tables, row_bytes, words, rows = live.pop(choose.randrange(len(live)))
            for pool, table in zip(pools, tables, strict=True):
                back = [torch.full_like(w, -1) for w in words]
                pool.kernels.move(pool, table, back, row_bytes, out=False)
                moved = rows if int(table.record[8]) else 0
                for mine, original, each in zip(back, words, row_bytes, strict=True):
                    end = moved * each // 8
                    assert torch.equal(mine[:end], original[:end])
                    assert bool((mine[end:] == -1).all())
                pool.kernels.release(pool, table)
                pool.give_table(table)
        else:
            rows = choose.choice([0, 1, 63, 1024, 1025, capacity, -1, capacity + 1])
            row_bytes = tuple(choose.choice([16, 48, 256]) for _ in range(choose.randint(1, 8)))
            words = [torch.randint(1 << 62, (capacity * b // 8,), device=CUDA) for b in row_bytes]
            count = torch.tensor(rows, device=CUDA, dtype=choose.choice([torch.int32, torch.int64]))
            tables = [pool.take_table(90, to_capture=False) for pool in pools]
            for pool, table in zip(pools, tables, strict=True):
                pool.kernels.claim(pool, table, count, capacity, row_bytes)
                pool.kernels.move(pool, table, words, row_bytes, out=True)
            live.append((tables, row_bytes, words, rows if 0 <= rows <= capacity else 0))
            total = int(tables[0].record[8])
            assert torch.equal(tables[0].record[:11], tables[1].record[:11])
            assert torch.equal(tables[0].pages[:total], tables[1].pages[:total])
        mine, plain = pools
        assert torch.equal(mine.tops, plain.tops)
        assert torch.equal(mine.flags, plain.flags)
        for start, count in zip((0, near), mine.tops.tolist(), strict=True):
            free = slice(start, start + count)
            assert torch.equal(mine.free[free], plain.free[free])
    assert bits(mine.near).any()
