"""Calls that are interrupted at any line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

Point = tuple[str, int, int]
"""A line that runs: file, number, how often it has run before."""


class Tracer:
    """Notes lines that run, and interrupts before one of them, once.

    Args:
        root: qualified name of a method: only what runs below its first call.
        files: whose lines.
        at: where to interrupt.
    """

    def __init__(self, root: str, files: set[str], at: Point | None = None) -> None:
        self._root, self._files, self._at = root, files, at
        self._inside: FrameType | None = None
        self._seen: dict[tuple[str, int], int] = {}
        self.has_struck = False

    @property
    def points(self) -> list[Point]:
        """Each line, in the middle of a loop where it is in one."""
        return [(*line, count // 2) for line, count in self._seen.items()]

    @contextmanager
    def running(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _call(self, frame: FrameType, event: str, value: object) -> Any:
        if self._inside is None and frame.f_code.co_qualname == self._root:
            self._inside = frame
        is_below = self._inside is not None and frame.f_code.co_filename in self._files
        return self._line if is_below else None

    def _line(self, frame: FrameType, event: str, value: object) -> Any:
        if event == "return" and frame is self._inside:
            self._inside = None
            sys.settrace(None)
        if event == "line":
            line = (frame.f_code.co_filename, frame.f_lineno)
            count = self._seen.get(line, 0)
            self._seen[line] = count + 1
            if self._at == (*line, count) and not self.has_struck:
                self.has_struck = True
                raise KeyboardInterrupt  # which ends tracing
        return self._line


def _interrupted(move: Callable[[], object], tracer: Tracer) -> KeyboardInterrupt | None:
    """What comes out; whoever keeps it keeps the frames that it has gone through. None: the line
    did not run this time."""
    try:
        with tracer.running():
            move()
    except KeyboardInterrupt as error:
        assert tracer.has_struck
        return error
    assert not tracer.has_struck
    return None


def at_each_line(
    move: Callable[[], object],
    root: str,
    files: set[str],
    *,
    prepare: Callable[[], object],
    settle: Callable[[], object],
    check: Callable[[int], object],
) -> None:
    """Interrupt ``move`` at each line of ``files`` that runs below ``root``.

    Args:
        move: what is interrupted.
        root: qualified name of a method that it calls.
        files: paths.
        prepare: before each call of ``move``.
        settle: after the call that is not interrupted.
        check: looks at what there is after each of the others, which are counted from 0; what came
            out of it, and the frames that it has gone through, are still alive.
    """
    prepare()
    tracer = Tracer(root, files)
    with tracer.running():
        move()
    settle()
    count = 0
    for index, point in enumerate(tracer.points):
        prepare()
        try:
            kept = _interrupted(move, Tracer(root, files, point))
            count += kept is not None
            check(index)
            del kept
        except BaseException as error:
            error.add_note(f"interrupted at {point}")
            raise
    assert count > 20
