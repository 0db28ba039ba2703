"""What users may call, as text: ``python -m tests.public_surface`` writes ``public_surface.txt``.

A line is a public name of this package's own code, with its signature as it is written. What
classes inherit from torch is left out, so the text is the same under every version of it.
Attributes that constructors set are not seen.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

FILE = Path(__file__).with_suffix(".txt")
MODULES = (
    "fsdp_offload",
    "fsdp_offload.checkpoint",
    "fsdp_offload.checkpoint.megatron_fsdp",
    "fsdp_offload.phases",
)
"""Those that a user imports from; each has ``__all__``."""
PROTOCOLS = ("__call__", "__enter__", "__exit__")
"""Methods with underscores that have a syntax of their own."""


class _Written(str):
    """An annotation, shown without quotation marks."""

    __repr__ = str.__str__


def surface() -> list[str]:
    """One line for each name; what two modules offer is described under the first."""
    found: list[str] = []
    first: dict[int, str] = {}
    for module in MODULES:
        names = import_module(module)
        for name in sorted(names.__all__):
            path, value = f"{module}.{name}", getattr(names, name)
            if id(value) in first:
                found.append(f"{path} = {first[id(value)]}")
            else:
                first[id(value)] = path
                found += _lines(path, value)
    return found


def _lines(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, type):
        bases = ", ".join(base.__name__ for base in value.__bases__)
        yield f"class {path}({bases})"
        members = _members(value)
        for name in sorted(members):
            yield f"    {name}{_described(members[name])}"
    elif isinstance(value, ModuleType):
        yield f"module {path}"
    else:
        yield f"{path}{_described(value)}"


def _members(cls: type) -> dict[str, Any]:
    """Public ones, constructor and syntax, of the class and of its bases in this package."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.split(".")[0] != "fsdp_offload":
            continue
        fields = {name: _Written(text) for name, text in inspect.get_annotations(base).items()}
        found |= {
            name: value
            for name, value in {**vars(base), **fields}.items()
            if not name.startswith("_") or name in ("__init__", *PROTOCOLS)
        }
    return found


def _described(value: Any) -> str:
    """What stands behind a name: signature, type of a property or of a field, or nothing."""
    if isinstance(value, _Written):
        return f": {value}"
    if isinstance(value, property | cached_property):
        getter: Any = value.fget if isinstance(value, property) else value.func
        setter = " (may be set)" if getattr(value, "fset", None) else ""
        return f": {getter.__annotations__['return']}{setter}"
    kind = f" ({type(value).__name__})" if isinstance(value, classmethod | staticmethod) else ""
    function = getattr(value, "__func__", value)
    return f"{_signature(function)}{kind}" if callable(function) else f": {type(value).__name__}"


def _signature(function: Any) -> str:
    signature = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=_written(parameter.annotation))
        for parameter in signature.parameters.values()
    ]
    returned = _written(signature.return_annotation)
    return str(signature.replace(parameters=parameters, return_annotation=returned))


def _written(annotation: Any) -> Any:
    return _Written(annotation) if isinstance(annotation, str) else annotation


if __name__ == "__main__":
    FILE.write_text("".join(f"{line}\n" for line in surface()))
