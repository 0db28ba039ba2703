"""A small writer of SVG, for the scripts that draw the pictures of README and documentation.

Pictures are 440 units wide and their letters at least 11 high: readable on a phone, too.
Each has its own background. Colours follow the reader's setting, or are those of one theme.
"""

from __future__ import annotations

from typing import Any
from xml.sax.saxutils import escape

WIDTH = 440
THEMES = {
    "light": dict(back="#ffffff", ink="#1f2328", faint="#59636e", grid="#d1d9e0", no="#f6e3e1",
                  blue="#0969da", green="#1a7f37", orange="#bc4c00", red="#cf222e",
                  violet="#8250df", grey="#818b98"),
    "dark": dict(back="#0d1117", ink="#e6edf3", faint="#9198a1", grid="#3d444d", no="#3a1d1d",
                 blue="#4493f8", green="#3fb950", orange="#f0883e", red="#f85149",
                 violet="#ab7df8", grey="#7d8590"),
}  # fmt: skip


class Picture:
    """Elements in the order in which they are drawn. Colours are names of :data:`THEMES`."""

    def __init__(self, height: float, title: str, theme: str | None = None) -> None:
        self.height, self.title, self.theme = height, title, theme
        self.elements: list[str] = []

    def add(self, tag: str, text: str = "", **attributes: Any) -> None:
        """One element; ``stroke_width`` becomes ``stroke-width``."""
        found = []
        for name, value in attributes.items():
            if isinstance(value, float):
                value = f"{value:.1f}".removesuffix(".0")
            if name in ("fill", "stroke") and value != "none":
                if self.theme is None:
                    value = f"var(--{value})"
                else:
                    value = THEMES[self.theme][value]
            found.append(f' {name.replace("_", "-")}="{value}"')
        end = f">{escape(text)}</{tag}>" if text else "/>"
        self.elements.append(f"<{tag}{''.join(found)}{end}")

    def text(
        self, x: float, y: float, text: str, size: int = 12, fill: str = "ink", **more: Any
    ) -> None:
        """A line of text; ``anchor`` is ``start``, ``middle`` or ``end``."""
        if "anchor" in more:
            more["text_anchor"] = more.pop("anchor")
        self.add("text", text, x=float(x), y=float(y), font_size=size, fill=fill, **more)

    def box(self, x: float, y: float, width: float, height: float, fill: str, **more: Any) -> None:
        """A filled rectangle."""
        self.add("rect", x=float(x), y=float(y), width=float(width), height=float(height),
                 fill=fill, **more)  # fmt: skip

    def line(self, points: list[tuple[float, float]], stroke: str, **more: Any) -> None:
        """From point to point."""
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        more.setdefault("stroke_width", 1)
        self.add("path", d=path, fill="none", stroke=stroke, **more)

    def svg(self) -> str:
        """The file."""
        back = "var(--back)" if self.theme is None else THEMES[self.theme]["back"]
        colours = [";".join(f"--{k}:{v}" for k, v in THEMES[t].items()) for t in ("light", "dark")]
        style = (
            f"<style>svg{{{colours[0]}}}"
            f"@media(prefers-color-scheme:dark){{svg{{{colours[1]}}}}}</style>\n"
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height:g}" '
            f'width="600" font-family="system-ui,Segoe UI,Helvetica,Arial,sans-serif">\n'
            f"<title>{escape(self.title)}</title>\n{style if self.theme is None else ''}"
            f'<rect width="{WIDTH}" height="{self.height:g}" rx="8" fill="{back}"/>\n'
            + "\n".join(self.elements)
            + "\n</svg>\n"
        )
