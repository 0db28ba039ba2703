"""Draws the diagrams beside it: when bytes move, and where they lie.

python docs/pictures/draw.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

sys.path.append(str(Path(__file__).resolve().parent))
from svg import WIDTH, Picture

FOLDER = Path(__file__).resolve().parent
MODULES: Final = 6
"""FSDP2 modules of the model."""
STRETCH: Final = 1.75
"""How much longer the forward takes with the updates beside it."""
LEFT: Final = 90
LANES: Final = ("model", "updates", "to the GPU", "to the CPU")
SHOWN: Final = {"model": "GPU: model", "updates": "GPU: update"}
LANE: Final = 19
COLOURS: Final = {"state": "green", "weights": "blue", "gradients": "orange"}
Span = tuple[float, float, str]
"""Begin and length in units of one module's forward, colour."""


def update(lanes: dict[str, list[Span]], begin: float, *, has_gradient: bool) -> None:
    """One module's: what it needs comes, then it runs, then what it wrote goes."""
    came = begin + 0.85
    lanes["to the GPU"].append((begin, 0.85, "state"))
    if has_gradient:
        lanes["to the GPU"].append((came, 0.25, "gradients"))
        came += 0.25
    lanes["to the GPU"].append((came, 0.25, "weights"))
    lanes["updates"].append((came + 0.3, 0.4, "violet"))
    lanes["to the CPU"].append((came + 0.7, 0.85, "state"))
    lanes["to the CPU"].append((came + 1.55, 0.25, "weights"))


def modes() -> dict[str, tuple[str, dict[str, list[Span]]]]:
    """Of each ``overlap``: what it does, and what each lane does."""
    found: dict[str, tuple[str, dict[str, list[Span]]]] = {}
    every = range(MODULES)
    ahead = 0.9  # of a fetch before what it is for
    # "step": weights come for each module, gradients leave; the rest waits for step().
    lanes: dict[str, list[Span]] = {lane: [] for lane in LANES}
    lanes["to the GPU"] = [(i + 0.1, 0.5, "weights") for i in every]
    lanes["to the GPU"] += [(MODULES + 2 * i + 0.1, 0.5, "weights") for i in every]
    lanes["to the CPU"] = [(MODULES + 2 * i + 2, 0.5, "gradients") for i in every]
    end = 3 * MODULES
    for i in every:
        begin = end + 1.5 * i
        update(lanes, begin, has_gradient=True)
    found["step"] = ("all updates inside step()", lanes)
    # "forward": updates run ahead of the forward that needs them.
    lanes = {lane: [] for lane in LANES}
    for i in every:
        begin = STRETCH * i - ahead
        update(lanes, begin, has_gradient=True)
        lanes["to the GPU"].append((begin + STRETCH + 1.4, 0.25, "weights"))  # for the forward
        after = STRETCH * MODULES + 2 * i
        lanes["to the GPU"].append((after + 0.4, 0.5, "weights"))
        lanes["to the CPU"].append((after + 2.1, 0.5, "gradients"))
    found["forward"] = ("updates beside the next forward; clipping works", lanes)
    # "backward": each module is updated once its gradients are reduced.
    lanes = {lane: [] for lane in LANES}
    lanes["to the GPU"] = [(i + 0.1, 0.5, "weights") for i in every]
    for i in every:
        after = MODULES + 2 * i
        lanes["to the GPU"].append((after + 0.1, 0.5, "weights"))
        update(lanes, after + 0.9, has_gradient=False)
    found["backward"] = ("updates beside the backward; no clipping", lanes)
    return found


def iteration() -> str:
    """One iteration with ``offload="all"`` in the three modes."""
    top = 84
    picture = Picture(top + 3 * (4 * LANE + 30) - 16, "What moves when, by overlap")
    picture.text(12, 20, 'One iteration with offload="all"', 14, font_weight="bold")
    picture.text(12, 38, "Between uses, all of it lies in CPU memory:", fill="faint")
    x = 12.0
    for kind, colour in COLOURS.items():
        picture.box(x, 47, 12, 12, colour, rx=2)
        picture.text(x + 17, 57, kind)
        x += 85
    picture.box(x, 47, 12, 12, "violet", rx=2)
    picture.text(x + 17, 57, "update on the GPU")
    unit = (WIDTH - LEFT - 14) / 30

    def at(time: float) -> float:
        return LEFT + 10 + time * unit

    for index, (mode, (text, lanes)) in enumerate(modes().items()):
        y = top + index * (4 * LANE + 30)
        picture.text(12, y, f'"{mode}"', font_weight="bold")
        picture.text(LEFT + 10, y, text, fill="faint")
        y += 8
        stretch = STRETCH if mode == "forward" else 1.0
        for row, lane in enumerate(LANES):
            picture.text(12, y + row * LANE + 13, SHOWN.get(lane, lane), fill="faint")
            picture.line([(LEFT, y + (row + 1) * LANE - 1), (WIDTH - 8, y + (row + 1) * LANE - 1)],
                         "grid")  # fmt: skip
        for name, begin, length in (
            ("forward", 0.0, stretch * MODULES),
            ("backward", stretch * MODULES, 2.0 * MODULES),
        ):
            picture.box(at(begin), y + 1, length * unit - 1, LANE - 4, "grid", rx=2)
            picture.text(at(begin + length / 2), y + 13, name, 11, anchor="middle")
        end = (stretch + 2) * MODULES
        if mode == "step":
            picture.box(at(end), y + 1, 11.4 * unit - 1, LANE - 4, "no", rx=2)
            picture.text(at(end + 5.7), y + 13, "step() updates", 11, anchor="middle")
        else:
            picture.box(at(end), y + 1, 3, LANE - 4, "red")
            picture.text(at(end) + 8, y + 13, "step()", 11)
        for row, lane in enumerate(LANES[1:], 1):
            for begin, length, kind in lanes[lane]:
                colour = COLOURS.get(kind, kind)
                picture.box(at(begin), y + row * LANE + 2, length * unit - 0.7, LANE - 6, colour)
    return picture.svg()


BYTES_GB: Final = {
    "AdamW, fp32 master": ({"weights": 16, "gradients": 16, "state": 96}, {}),
    "AdamW, bf16 moments, no master": ({"weights": 16, "gradients": 16, "state": 32}, {}),
    'this package, offload="state"': ({"weights": 16, "gradients": 16}, {"state": 80}),
    'this package, offload="all"': (
        {"slots": 3},
        {"weights": 16, "gradients": 16, "state": 80},
    ),
}  # fmt: skip
"""Of 8B bf16 parameters: on the GPU, in CPU memory. A weight is half of its master."""
CARDS_GB: Final = {"RTX 4090": 24, "H100": 80}


def bytes_by_option() -> str:
    """Where 8B parameters' weights, gradients and state lie."""
    top, row_height = 76, 58
    bottom = top + row_height * len(BYTES_GB)
    picture = Picture(bottom + 26, "Where the bytes of 8B parameters lie")
    scale = (WIDTH - 48 - 34) / 130

    def at(gigabytes: float) -> float:
        return 48 + gigabytes * scale

    picture.text(12, 20, "8B bf16 parameters and AdamW: GB by place", 14, font_weight="bold")
    x = 12
    for kind, colour in COLOURS.items():
        picture.box(x, 32, 12, 12, colour, rx=2)
        picture.text(x + 17, 42, kind)
        x += 90
    for card, size_gb in CARDS_GB.items():
        picture.text(at(size_gb), top - 12, f"{card}, {size_gb} GB", 11, "red", anchor="middle")
    for index, (option, places) in enumerate(BYTES_GB.items()):
        y = top + index * row_height
        picture.text(12, y + 12, option, font_weight="bold")
        for row, (place, kinds) in enumerate(zip(("GPU", "CPU"), places, strict=True)):
            level = y + 17 + row * 17
            picture.text(12, level + 12, place, fill="faint")
            begin = 0.0
            for kind, size_gb in kinds.items():
                colour = COLOURS.get(kind, "grey")
                opacity = 0.45 if place == "CPU" else 1
                picture.box(at(begin), level + 1, size_gb * scale - 1, 14, colour, opacity=opacity)
                begin += size_gb
            for size_gb in CARDS_GB.values() if place == "GPU" else ():
                edge = [(at(size_gb), level - 2), (at(size_gb), level + 18)]
                picture.line(edge, "red", stroke_width=2)
            text = f"{begin:.0f}" + (": slots" if "slots" in kinds else "")
            picture.text(at(begin) + 5, level + 12, text)
    picture.text(12, bottom + 16, "Activations come on top. Pale: in CPU memory.", 11, "faint")
    return picture.svg()


def pictures() -> dict[Path, str]:
    """Files and what they hold."""
    return {FOLDER / "overlap.svg": iteration(), FOLDER / "bytes.svg": bytes_by_option()}


if __name__ == "__main__":
    for path, text in pictures().items():
        path.write_text(text)
