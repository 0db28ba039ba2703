"""Docstrings as Markdown: Sphinx's roles become code; ``mkdocs.yml`` names this file."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

ROLE = re.compile(r":\w+:`~?\.?([^`]+)`")
CODE_FOLLOWS = re.compile(r"::$", re.MULTILINE)


class Roles(Extension):
    """Changes each docstring as it is read."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = CODE_FOLLOWS.sub(":", text)
