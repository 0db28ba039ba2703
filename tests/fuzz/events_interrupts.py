"""Events in the middle of a call: at a line of the package that the seed names, a second thread or
a signal handler enters the optimizer, or Ctrl-C comes.
"""

from __future__ import annotations

import contextlib
import gc
import linecache
import os
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch

import fsdp_offload
from fsdp_offload import checkpoint
from fsdp_offload.core.errors import OffloadError

from .bits import Mismatch
from .events_state import Saved, loaded, save_both
from .events_steps import gradients, train
from .kinds import event, generator_of
from .pair import READS, Pair

PACKAGE: Final = str(Path(fsdp_offload.__file__).parent)
LINES: Final = {"step()": 1300, "backward": 1500, "save": 4500, "load": 8000}
"""So many lines of the package, or fewer, three of four calls run."""
WAIT_S: Final = 0.02
"""How long the line waits for a second thread, which may be waiting for the call."""


class Stop:
    """Inside, ``act`` is called once, before this thread runs the package's line number ``at``."""

    def __init__(self, at: int, act: Callable[[], object]) -> None:
        self._left, self._act = at, act
        # CPython 3.11 borrows them: one that was freed is called, or whatever lies there then.
        self._kept: list[object] = []
        self.place = ""  # the line, if it was reached

    def __enter__(self) -> Stop:
        self._before, trace = sys.gettrace(), self._call
        self._kept.append(trace)
        sys.settrace(trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        if self.place or not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        before = 0

        def run(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal before
            if event == "line":
                before, came_from = frame.f_lineno, before
                self._left -= 1
                if self._left <= 0 and not self.place and not _is_no_place(frame, came_from):
                    self.place = f"{frame.f_code.co_filename[len(PACKAGE) + 1 :]}:{frame.f_lineno}"
                    sys.settrace(None)
                    self._act()
            return None if self.place else run

        self._kept.append(run)
        return run


def _is_no_place(frame: FrameType, came_from: int) -> bool:
    """Whether a ``with`` is about to end, where no signal can come, but a trace can; or this is a
    finalizer, of which Python lets no exception out."""
    outer: FrameType | None = frame
    while outer is not None:
        if outer.f_code.co_name == "__del__" or outer.f_code.co_filename == weakref.__file__:
            return True
        outer = outer.f_back
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    jumps_back = came_from > frame.f_lineno and not line.startswith(("for ", "while "))
    return jumps_back or line == "pass"


class Entry:
    """One use of the optimizer from elsewhere: what it did, or why it was refused."""

    def __init__(self, pair: Pair, rng: random.Random, place: str) -> None:
        self._pair = pair
        # An update has taken the gradients: another step() would have none. Ranks come to different
        # lines, and one of them would be a step ahead.
        steps = pair.case.overlap != "backward" and pair.case.ranks == 1
        writes: tuple[str, ...] = ("zero_grad", "step") if steps else ("zero_grad",)
        if place == "backward" or not pair.case.is_torchs:
            writes = ()  # as in torch it would matter when
        # Groups are live: a class that counts steps there shows the one that is under way.
        reads = [what for what in READS if pair.case.is_torchs or what != "param_groups"]
        self.what = rng.choice((*reads, "synchronize", *writes))
        self.face = rng.choice(("wrapper", "wrapped"))
        self._before = pair.plain_state(cloned=True)
        self._found: dict[int, dict[str, Any]] = {}
        self.has_ended = False
        self.error: BaseException | None = None

    def __call__(self) -> None:
        optimizer = self._pair.wrapped if self.face == "wrapper" else self._pair.inner
        try:
            if self.what in READS:
                self._found = self._pair.read(self.face, self.what)
            elif self.what == "synchronize":
                self._pair.wrapped.synchronize()
            else:
                getattr(optimizer, self.what)()
            self.has_ended = True
        except BaseException as error:
            self.error = error

    def follow(self, seed: int) -> None:
        """The plain side does what the wrapped one did; what was read is of before or after."""
        pair = self._pair
        if self.error is not None and not isinstance(self.error, OffloadError):
            raise self.error
        pair.say(f"{self.what} of the {self.face}: {self.error or 'done'}")
        if not self.has_ended:
            return
        if self.what == "step":
            pair.step_plain(seed)
        elif self.what == "zero_grad":
            pair.zero_grad("nobody")
        elif self._found:
            try:
                pair.check_state(self._found, self._before)
            except Mismatch:
                pair.check_state(self._found, pair.plain_state())


@contextlib.contextmanager
def _second_thread(pair: Pair, entry: Entry, at: int) -> Iterator[Stop]:
    threads: list[threading.Thread] = []

    def start() -> None:
        threads.append(threading.Thread(target=entry, daemon=True))
        threads[0].start()
        threads[0].join(WAIT_S)

    with Stop(at, start) as stop:
        yield stop
    for thread in threads:
        thread.join(30)
        if thread.is_alive():
            raise Mismatch(f"a thread that entered at {stop.place} does not come back")
    may_refuse = pair.case.overlap == "backward"  # between backward and step()
    if isinstance(entry.error, OffloadError) and not may_refuse:
        raise entry.error


@contextlib.contextmanager
def _handler(pair: Pair, entry: Entry, at: int) -> Iterator[Stop]:
    before = signal.signal(signal.SIGUSR1, lambda *_: entry())
    try:
        with Stop(at, lambda: signal.raise_signal(signal.SIGUSR1)) as stop:
            yield stop
    finally:
        signal.signal(signal.SIGUSR1, before)


def _enter(pair: Pair, rng: random.Random, kind: str, place: str, call: Callable[[], Any]) -> Entry:
    """Run ``call``, which something enters."""
    entry = Entry(pair, rng, place)
    enters = _second_thread if kind == "second thread" else _handler
    with enters(pair, entry, rng.randint(1, LINES[place])) as stop:
        call()
    if not stop.place:  # too few lines; on another rank it may have come, and ranks must agree
        entry()
    pair.say(f"{kind} at {stop.place or 'no line'}")
    pair.count(kind, f"in {place}" if stop.place else "nowhere")
    return entry


def _entered(pair: Pair, rng: random.Random, kind: str) -> None:
    if pair.is_spent or pair.case.overlap == "backward":
        pair.zero_grad("wrapper")
    place = rng.choice(("step()", "save", "backward" if pair.in_backward else "step()"))
    if place == "save":
        _entered_save(pair, rng, kind)
        return
    seed = rng.getrandbits(31)
    if place == "backward":
        entry = _enter(pair, rng, kind, place, lambda: gradients(pair, rng, of_all=True))
        pair.say(f"{entry.what}: {entry.error}")
        pair.step(seed)
        return
    gradients(pair, rng, of_all=True)
    kept = [p.grad for p in pair.mine]
    entry = _enter(pair, rng, kind, place, lambda: pair.step_wrapped(seed))
    pair.step_plain(seed)
    if entry.what == "zero_grad" and entry.has_ended and not _agree(pair):
        for parameter, gradient in zip(pair.mine, kept, strict=True):  # it came before step()
            parameter.grad = gradient
        pair.step_wrapped(seed)
        pair.wrapped.zero_grad()
    entry.follow(seed)


def _agree(pair: Pair) -> bool:
    try:
        pair.compare(state=True)
    except (Mismatch, OffloadError):
        return False
    return True


def _save(pair: Pair, rng: random.Random) -> None:
    arguments = pair.folder / "checkpoint", pair.model, pair.wrapped
    pair.twin.state_dict()  # FSDP2 reshards for it
    if rng.random() < 0.7:
        checkpoint.save(*arguments, overwrite=True)
    else:
        checkpoint.async_save(*arguments, overwrite=True).result()


def _entered_save(pair: Pair, rng: random.Random, kind: str) -> None:
    seed = rng.getrandbits(31)
    gradients(pair, rng, of_all=True)
    pair.step(seed)
    moments = [save_both(pair, "copy")]
    entry = _enter(pair, rng, kind, "save", lambda: _save(pair, rng))
    entry.follow(seed)
    if entry.what == "step":
        moments.append(save_both(pair, "copy"))
    pair.compare(state=True)
    _load_one_of(pair, moments)


def _load_one_of(pair: Pair, moments: list[Saved]) -> None:
    """What the checkpoint holds is one of these, whole.

    The last is tried first: any state agrees with a plain optimizer that has none yet.
    """
    if pair.is_spent:
        pair.zero_grad("wrapper")  # a load drops them
    checkpoint.load(pair.folder / "checkpoint", pair.model, pair.wrapped)
    first, *later = moments
    for moment in reversed(later):
        loaded(pair, moment)
        if _agree(pair):
            break
    else:
        loaded(pair, first)
    pair.compare(state=True)
    pair.saved.pop(2, None)


@event(2)
def second_thread(pair: Pair, rng: random.Random) -> None:
    """It enters the optimizer while this one is in step(), in an update, or saves."""
    _entered(pair, rng, "second thread")


@event(2)
def signal_handler(pair: Pair, rng: random.Random) -> None:
    """It enters the optimizer in the middle of step(), of an update, or of a save."""
    _entered(pair, rng, "signal handler")


@contextlib.contextmanager
def _ctrl_c(pair: Pair, rng: random.Random, place: str) -> Iterator[None]:
    """Inside, it comes at one line; it must come out, and once."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    has_come = False
    try:
        act = lambda: signal.raise_signal(signal.SIGINT)  # noqa: E731
        with Stop(rng.randint(1, LINES[place]), act) as stop:
            yield
    except KeyboardInterrupt:
        has_come = True
    finally:
        signal.signal(signal.SIGINT, before)
    pair.say(f"Ctrl-C at {stop.place or 'no line'}")
    pair.count("Ctrl-C", f"in {place}" if stop.place else "nowhere")
    if has_come != bool(stop.place):
        raise Mismatch("Ctrl-C was lost")
    if not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        raise Mismatch("Ctrl-C left autograd switched off")


@event(1)
def ctrl_c_in_step(pair: Pair, rng: random.Random) -> None:
    """The step is done, or nothing of it."""
    if pair.is_spent:
        pair.zero_grad("wrapper")
    seed = rng.getrandbits(31)
    gradients(pair, rng, of_all=True)
    with _ctrl_c(pair, rng, "step()"):
        pair.step_wrapped(seed)
    pair.step_plain(seed)
    if not _agree(pair):
        pair.say("not done")
        pair.step_wrapped(seed)


@event(1, needs=lambda case: case.ranks == 1)
def ctrl_c_in_save(pair: Pair, rng: random.Random) -> None:
    """The old checkpoint is there or the new one, nothing else, and both sides can be used."""
    if pair.is_spent:
        pair.zero_grad("wrapper")
    _save(pair, rng)
    moments = [save_both(pair, "copy")]
    train(pair, rng)
    if pair.is_spent:
        pair.zero_grad("wrapper")
    moments.append(save_both(pair, "copy"))
    if not moments[0].fits(pair):
        return
    n_open = len(os.listdir("/proc/self/fd"))
    with _ctrl_c(pair, rng, "save"):
        _save(pair, rng)
    pair.compare(state=True)
    _load_one_of(pair, moments)
    left = sorted(path.name for path in pair.folder.iterdir())
    if left != ["checkpoint"]:
        raise Mismatch(f"a save that was interrupted left {left}")
    _check_open(n_open, "a save")
    _step_on(pair, rng)


@event(1, needs=lambda case: case.ranks == 1)
def ctrl_c_in_load(pair: Pair, rng: random.Random) -> None:
    """A second load makes all good."""
    if pair.is_spent:
        pair.zero_grad("wrapper")
    _save(pair, rng)
    moment = save_both(pair, "copy")
    train(pair, rng)
    if not moment.fits(pair):
        return
    if pair.is_spent:
        pair.zero_grad("wrapper")
    n_open = len(os.listdir("/proc/self/fd"))
    with _ctrl_c(pair, rng, "load"):
        checkpoint.load(pair.folder / "checkpoint", pair.model, pair.wrapped)
    _load_one_of(pair, [moment])
    _check_open(n_open, "a load")
    _step_on(pair, rng)


def _check_open(n_before: int, what: str) -> None:
    until = time.monotonic() + 2  # threads may still be closing theirs
    while len(os.listdir("/proc/self/fd")) > n_before:
        gc.collect()  # an exception and its frames may refer to each other
        if time.monotonic() > until:
            raise Mismatch(f"{what} that was interrupted left a descriptor open")
        time.sleep(0.01)


def _step_on(pair: Pair, rng: random.Random) -> None:
    pair.evaluate(generator_of(rng), [True] * len(pair.mine))
