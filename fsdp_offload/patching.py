"""Methods of single objects: replaced for a while, or called without keeping the object."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

_ABSENT = object()


class Patch:
    """One method of one object, replaced until :meth:`remove`.

    Args:
        owner: has the method by its class, or by somebody else's replacement.
        name: of the method.
        replacement: called with the bound method as it was, then with the call's arguments.
        into: gets the patch.
    """

    def __init__(
        self,
        owner: Any,
        name: str,
        replacement: Callable[..., Any],
        into: list[Patch] | None = None,
    ) -> None:
        self._owner, self._name, self._is_active = owner, name, True
        self._before = owner.__dict__.get(name, _ABSENT)
        self._original, self._replacement = getattr(owner, name), replacement

        @functools.wraps(self._original)
        def patched(_: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._is_active:  # somebody has wrapped it meanwhile, and still calls it
                return self._original(*args, **kwargs)
            return self._replacement(self._original, *args, **kwargs)

        patched.patch = self  # type: ignore[attr-defined]
        # Bound, as methods are: a scheduler that is built meanwhile takes it apart.
        self._patched: types.MethodType | None = types.MethodType(patched, owner)
        owner.__dict__[name] = self._patched
        if into is not None:
            into.append(self)

    def remove(self) -> None:
        """Put the method back; it is not called any more, by whatever way. Idempotent."""
        self._is_active = False
        table = self._owner.__dict__
        if self._patched is None or table.get(self._name) is not self._patched:
            return
        before = self._before
        while (below := getattr(before, "patch", None)) is not None:
            if below._is_active or below._patched is not before:  # or a copy of its attributes
                break
            before = below._before  # removed while this one lay on it
        if before is _ABSENT:
            del table[self._name]
        else:
            table[self._name] = before
        self._patched = None  # a cycle of references, which a slow collection would have to find


def checked(check: Callable[[str], None], what: str) -> Callable[..., Any]:
    """A replacement that calls ``check`` with ``what`` before the method, and may raise there."""

    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        check(what)
        return original(*args, **kwargs)

    return call


def remove_all(patches: Iterable[Patch]) -> None:
    """The last one first, as they may lie on top of each other."""
    for patch in reversed(list(patches)):
        patch.remove()


def weakly(method: Callable[[], None]) -> Callable[..., None]:
    """Call a bound method, whatever the arguments, as long as its object is not gone."""
    return functools.partial(_call, weakref.WeakMethod(method))


def _call(find: Callable[[], Callable[[], None] | None], *_: object) -> None:
    method = find()
    if method is not None:
        method()
