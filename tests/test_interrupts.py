"""SIGINT inside of :func:`fsdp_offload.core.interrupts.defer_sigint`."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from fsdp_offload.core.interrupts import defer_sigint


def strike() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def _handler_is_put_back() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    found = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    assert found is before


@defer_sigint()
def held(n_strikes: int, done: list[str], error: Exception | None = None) -> None:
    with defer_sigint():  # inside of another one, which arrives at the outer end
        for _ in range(n_strikes):
            strike()
    done.append("inside")
    if error is not None:
        raise error


def test_it_arrives_at_the_end_and_once() -> None:
    done: list[str] = []
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            held(2, done)
        held(0, done)
    assert done == ["inside"] * 4
    with pytest.raises(KeyboardInterrupt):
        strike()


def test_an_exception_is_the_context_of_the_interrupt() -> None:
    error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        held(0, [], error)
    with pytest.raises(KeyboardInterrupt) as caught:
        held(1, [], error)
    assert caught.value.__context__ is error


def test_it_goes_through_the_handler_that_was_there() -> None:
    calls: list[tuple[int, Any]] = []
    before = signal.signal(signal.SIGINT, lambda *call: calls.append(call))
    try:
        held(2, [])
        assert calls == [(signal.SIGINT, None)]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        held(1, [])
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_systems_handler_ends_the_process_at_the_end() -> None:
    script = (
        "import signal; from fsdp_offload.core.interrupts import defer_sigint\n"
        "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        "with defer_sigint():\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    print('all of it', flush=True)\n"
        "print('never')\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (-signal.SIGINT, "all of it\n")


def test_other_threads_hold_nothing_back() -> None:
    found = []

    def look() -> None:
        with defer_sigint():
            found.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [before]
