"""Saves beside which training goes on: the bytes of the moment at which they were called."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.testing._internal.two_tensor import TwoTensor

from fsdp_offload import UnsupportedParameterError, checkpoint
from fsdp_offload.checkpoint import Stager, Writer
from fsdp_offload.core.errors import CheckpointError, ConfigError, OffloadError
from tests.checkpoint import jobs
from tests.checkpoint.jobs import OURS_BF16, Ranks, Variant
from tests.fsdp.models import check, check_same_dicts
from tests.helpers.simulator import ADVERSARIES, StreamSimulator


def files_of(path: Path) -> dict[str, bytes]:
    """The content of a checkpoint; manifests have the time and are left out."""
    return {f.name: f.read_bytes() for f in path.iterdir() if f.name != "manifest.json"}


@contextlib.contextmanager
def gate() -> Iterator[threading.Event]:
    """Holds the saving thread until the event is set, at the end at the latest."""
    opened, real = threading.Event(), Writer.write_data

    def write_data(writer: Writer, *args: Any) -> Any:
        if threading.current_thread().name == "fsdp-offload-save":
            assert opened.wait(60), "the gate stayed closed"
        return real(writer, *args)

    with mock.patch.object(Writer, "write_data", write_data):
        try:
            yield opened
        finally:
            opened.set()


def save_both_ways(variant: Variant, root: Path) -> None:
    """Twice, as the memory for copies is used again."""
    job = jobs.trained(variant)
    for turn, first in enumerate((4, 7)):
        checkpoint.save(root / f"sync {turn}", *job.pair, extra={"turn": turn})
        with gate():
            path = root / f"async {turn}"
            future = checkpoint.async_save(path, *job.pair, extra={"turn": turn})
            jobs.train(job, range(first, first + 3))
            check(not future.done(), "it did not wait for the gate")
            check(not path.exists(), "it was published too early")
        check(future.result(60) is None, "a result")
    dist.barrier()
    for turn in range(2):
        found, expected = (files_of(root / f"{how} {turn}") for how in ("async", "sync"))
        check(found.keys() == expected.keys(), f"files {sorted(found)}")
        for name, data in expected.items():
            if name != ".metadata":  # pickles memo by identity: compared through a load
                check(found[name] == data, f"{name} of save {turn} differs")
        check(not list(root.glob(".*")), f"left behind: {list(root.glob('.*'))}")


@pytest.mark.parametrize(
    "variant",
    [
        OURS_BF16,
        pytest.param(Variant(), marks=pytest.mark.long),
        pytest.param(Variant(wrapped=False), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_bytes_are_those_of_a_save_at_that_step(
    ranks: Ranks, tmp_path: Path, variant: Variant
) -> None:
    ranks(2).run(save_both_ways, variant, tmp_path)


def save_twice(root: Path) -> None:
    job = jobs.trained(Variant())
    with gate() as opened:
        first = checkpoint.async_save(root / "first", *job.pair)
        threading.Timer(0.3, opened.set).start()
        second = checkpoint.async_save(root / "second", *job.pair)
        check(first.done(), "the second save did not wait for the first")
        checkpoint.save(root / "third", *job.pair)
        check(second.done(), "a save did not wait for the one before")
    dist.barrier()
    check(checkpoint.latest(root) == root / "third", "the last save is not the latest")


def test_saves_wait_for_each_other(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(save_twice, tmp_path)


def fail_while_copying(root: Path) -> str:
    """Staging fails on one rank; none may publish, and none may wait for it for ever."""
    job = jobs.trained(Variant())
    stage = Stager.stage

    def failing(*args: Any) -> Any:
        if dist.get_rank() == 1:
            raise ValueError("it broke")
        return stage(*args)

    with mock.patch.object(Stager, "stage", failing):
        future = checkpoint.async_save(root / "broken", *job.pair)
    with pytest.raises(CheckpointError) as caught:
        future.result(60)
    dist.barrier()
    check(not list(root.iterdir()), f"left behind: {list(root.iterdir())}")
    return str(caught.value)


def test_an_error_while_copying_reaches_the_future_of_all(ranks: Ranks, tmp_path: Path) -> None:
    told = ranks(2).run(fail_while_copying, tmp_path)

    assert all("it broke" in each for each in told)
    assert "rank 1" in told[0]


def test_a_thread_that_cannot_be_started_is_an_error(tmp_path: Path) -> None:
    refused = mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("no thread"))
    with refused, pytest.raises(CheckpointError, match="no thread"):
        checkpoint.async_save(tmp_path / "one", nn.Linear(2, 2))
    checkpoint.save(tmp_path / "one", nn.Linear(2, 2))


def test_errors_of_arguments_are_those_of_the_future_but_for_the_path(tmp_path: Path) -> None:
    for wrong in ((3,), (nn.Linear(2, 2), "adam")):
        with pytest.raises(OffloadError):
            checkpoint.async_save(tmp_path / "one", *wrong).result(60)
    with pytest.raises(ConfigError, match="not a path"):
        checkpoint.async_save(nn.Linear(2, 2), tmp_path / "one")
    assert checkpoint.async_save(tmp_path / "nothing", []).result(60) is None


def by_torch(root: Path, process: bool, plugins: bool) -> None:
    job = jobs.trained(OURS_BF16)
    expected = jobs.whole(job)
    model, optimizer = get_model_state_dict(job.model), checkpoint.OptimizerState(*job.pair)
    kind = dcp.state_dict_saver.AsyncCheckpointerType
    future = dcp.async_save(
        {"model": model, "optim": optimizer},
        checkpoint_id=root,
        process_group=dist.new_group(backend="gloo"),  # training uses the default one meanwhile
        async_checkpointer_type=kind.PROCESS if process else kind.THREAD,
        **({"storage_writer": Writer(root), "async_stager": Stager()} if plugins else {}),
    )
    jobs.train(job, jobs.AFTER)
    future.result()
    other = jobs.elsewhere(OURS_BF16)
    checkpoint.load(root, *other.pair)
    check_same_dicts(jobs.whole(other), expected, "whole job")


@pytest.mark.parametrize(
    ("process", "plugins"),
    [(False, False), (False, True), pytest.param(True, False, marks=pytest.mark.long)],
)
def test_async_save_of_torch_takes_the_state_of_that_step(
    ranks: Ranks, tmp_path: Path, process: bool, plugins: bool
) -> None:
    ranks(2).run(by_torch, tmp_path / "one", process, plugins)


class Marked(Tensor):
    """A subclass that adds nothing."""


class Node:
    """An object of the user's own, with a way back to itself."""

    def __init__(self, value: Tensor) -> None:
        self.value, self.me = value, self


Pair = collections.namedtuple("Pair", "first second")


@dataclasses.dataclass
class Record:
    value: Tensor


def weight() -> Tensor:
    return torch.arange(6.0).view(2, 3)


HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], Tensor]]] = {
    "list": (lambda: [weight()], lambda held: held[0]),
    "named tuple": (lambda: Pair(weight(), 2), lambda held: held.first),
    "dataclass": (lambda: Record(weight()), lambda held: held.value),
    "deque": (lambda: collections.deque([weight()], maxlen=3), lambda held: held[0]),
    "set": (lambda: {(1, weight())}, lambda held: next(iter(held))[1]),
    "default dict": (
        lambda: collections.defaultdict(list, a=[weight()]),
        lambda held: held["a"][0],
    ),
    "object": (lambda: Node(weight()), lambda held: held.me.me.value),
    "parameter": (lambda: nn.Parameter(weight()), lambda held: held),
    "transposed": (lambda: weight().t(), lambda held: held),
    "expanded": (lambda: torch.ones(1, 3).expand(2, 3), lambda held: held),
    "conjugate": (
        lambda: torch.ones(3, dtype=torch.complex64).mul(2 + 1j).conj(),
        lambda held: held,
    ),
    "negative": (
        lambda: torch.ones(3, dtype=torch.complex64).mul(1j).conj().imag,
        lambda held: held,
    ),
    "without elements": (lambda: torch.empty(0, 4), lambda held: held),
    "quantized": (
        lambda: torch.quantize_per_tensor(weight(), 0.1, 0, torch.qint8),
        torch.dequantize,
    ),
    "sparse": (lambda: weight().to_sparse(), lambda held: held.to_dense()),
    "nested": (lambda: torch.nested.nested_tensor([weight()]), lambda held: held[0]),
    "subclass": (lambda: weight().as_subclass(Marked), lambda held: held),
    "subclass of two": (lambda: TwoTensor(weight(), weight() + 1), lambda held: held.b),
}


@pytest.mark.filterwarnings("ignore:.*(quantized tensor|nested tensor)")
@pytest.mark.parametrize("kind", HELD)
def test_staged_values_do_not_change_with_what_they_are_copies_of(kind: str) -> None:
    make, of = HELD[kind]
    held = make()
    value = of(held).detach().clone().resolve_conj().resolve_neg()
    staged = Stager().stage({"a": held})["a"]

    with torch.no_grad(), contextlib.suppress(RuntimeError):  # some cannot be written
        for tensor in (of(held), held if isinstance(held, Tensor) else None):
            if tensor is not None:
                (tensor._values() if tensor.layout is torch.sparse_coo else tensor).zero_()

    assert type(staged) is (Tensor if type(held) is nn.Parameter else type(held))
    assert torch.equal(of(staged), value)


def test_one_memory_is_copied_once_and_plain_values_stay_what_they_are() -> None:
    tensor, options = weight(), (0.125, "a name that is not interned")
    stager = Stager()
    staged = stager.stage({"a": tensor, "b": tensor.detach(), "row": tensor[1], "lr": options})

    assert staged["a"].data_ptr() == staged["b"].data_ptr()
    assert torch.equal(staged["row"], tensor[1])
    assert [id(value) for value in staged["lr"]] == [id(value) for value in options]
    assert stager._arena.n_bytes == 128, "two tensors, each at a multiple of 64 bytes"


class OnDevice(Tensor):
    """CPU memory that says it is a GPU's."""

    device = property(lambda self: torch.device("cuda", 0))  # type: ignore[assignment]


@pytest.mark.parametrize("policy", ADVERSARIES)
def test_device_memory_is_copied_when_the_current_stream_has_written_it(policy: str) -> None:
    source, copy, here, here_too = torch.zeros(4, 64, dtype=torch.uint8)
    with StreamSimulator(policy) as simulator:
        simulator.current_stream().launch(Tensor.fill_, source, 7)
        Stager()._fill([(copy, source.as_subclass(OnDevice)), (here_too, here.fill_(8))])
        assert bool((copy == 7).all())
    assert bool((here_too == 8).all())


def without_memory() -> Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(3)


@pytest.mark.parametrize(
    "make", [without_memory, fake, lambda: weight().to_mkldnn(), lambda: (i for i in range(3))]
)
def test_what_cannot_be_copied_is_refused_before_a_thread_starts(
    make: Callable[[], Any],
) -> None:
    with pytest.raises(
        UnsupportedParameterError, match=r"(copying it failed|no memory of its own).*leave it out"
    ):
        Stager().stage({"a": {"b": make()}})


@pytest.mark.parametrize("make", [fake, lambda: TwoTensor(weight(), weight())])
def test_save_refuses_a_buffer_without_memory_of_its_own(
    make: Callable[[], Tensor], tmp_path: Path
) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("b", make())
    with pytest.raises(UnsupportedParameterError, match="no memory of its own"):
        checkpoint.save(tmp_path / "one", model)
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:.*quantized tensor")
def test_a_buffer_that_no_save_can_write_is_an_error_of_the_future(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("q", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))
    with pytest.raises(CheckpointError, match="qtensor"):
        checkpoint.async_save(tmp_path / "one", model).result(60)
    assert not list(tmp_path.iterdir())
