"""Measures of the package: ``python tests/house.py`` prints them, ``test_house.py`` bounds them."""

from __future__ import annotations

import ast
import functools
import re
import tokenize
from collections import Counter, defaultdict
from pathlib import Path

from fsdp_offload.core import errors

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fsdp_offload"

PRIVATE_TORCH = re.compile(
    r"torch\._C\b(?!\.DisableTorchFunctionSubclass)"  # which documentation has
    r"|torch\.distributed\.\w+(?:\.\w+)*\._\w|torch\.ops\.fsdp|\._local_tensor\b"
    r"|\._spec\b|_cdata\b|torch\.(?:utils|autograd|optim|serialization|storage)\S*\._[a-z]"
    r"|fsdp_params\b|_fully_shard\b|\._swap_data_ptr_|_unsafe_\w+"
)
"""Names of torch that its documentation does not have, as far as a pattern can tell."""

BANNED = (
    "gateway trip leg passage ticket absence leaving departure member draft candidate part piece "
    "section draw recipe whereabouts twin room seat settle spare vacate team lead"
).split()
"""Words of the package's own for which the field has one."""


MOTION = {
    "streams": {"stream", "bulk_stream", "Stream"},
    "page-locked memory": {"pin", "pin_memory", "cudaHostRegister"},
    "copies": {"copy_in_turns", "copy_all"},
}
"""Calls that move bytes between host and device, or prepare that, by what they are."""


def sources() -> list[Path]:
    """The modules that the wheel holds."""
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """Dotted name of a module."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def lines() -> int:
    """Of all modules."""
    return sum(len(path.read_text().splitlines()) for path in sources())


def comment_share() -> float:
    """Lines that are, or end in, a comment."""
    count = 0
    for path in sources():
        with path.open("rb") as file:
            count += sum(t.type == tokenize.COMMENT for t in tokenize.tokenize(file.readline))
    return count / lines()


def files_in_root() -> list[str]:
    """Modules that are in no folder."""
    return sorted(path.name for path in PACKAGE.glob("*.py"))


def classes() -> int:
    """All of them, nested ones too."""
    return sum(isinstance(n, ast.ClassDef) for p in sources() for n in ast.walk(tree(p)))


def long_functions() -> list[str]:
    """Those of more than 60 lines."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        f"{name_of(path)}.{node.name}"
        for path in sources()
        for node in ast.walk(tree(path))
        if isinstance(node, kinds) and (node.end_lineno or 0) - node.lineno >= 60
    ]


@functools.cache
def tree(path: Path) -> ast.Module:
    """Parsed."""
    return ast.parse(path.read_text())


def private_torch_files() -> list[str]:
    """Modules whose code (not comments or docstrings) names private API of torch."""
    found = []
    for path in sources():
        if not PRIVATE_TORCH.search(path.read_text()):
            continue  # taking it apart takes longer
        with path.open("rb") as file:
            code = [
                (t.start[0], t.string)
                for t in tokenize.tokenize(file.readline)
                if t.type in (tokenize.NAME, tokenize.OP)
            ]
        by_line = defaultdict(str)
        for number, text in code:
            by_line[number] += f" {text} " if text in ("import", "from") else text
        if any(map(PRIVATE_TORCH.search, by_line.values())):
            found.append(name_of(path))
    return found


def banned_words() -> dict[str, int]:
    """How often names that the package defines have one of the words."""
    found: dict[str, int] = defaultdict(int)
    for path in sources():
        names = [path.stem]
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.append(node.name)
            elif isinstance(node, ast.arg):
                names.append(node.arg)
        for name in names:
            words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_")
            for word in words:
                singular = word.removesuffix("s")
                if word in BANNED or singular in BANNED:
                    found[singular if singular in BANNED else word] += 1
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def errors_without_words() -> list[str]:
    """Where an error of the package is made without a reason, or without a remedy."""
    kinds = {name for name, value in vars(errors).items() if isinstance(value, type)}
    return [
        f"{name_of(path)}:{node.lineno}"
        for path in sources()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in kinds
        if not {"reason", "remedy"} <= {each.arg for each in node.keywords}
    ]


def _called(node: ast.Call) -> str:
    """The last name of what is called."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _kind_of_motion(node: ast.Call) -> str | None:
    name, words = _called(node), {word.arg for word in node.keywords}
    is_copy = name == "copy" and isinstance(node.func, ast.Attribute) and len(node.args) == 2
    if is_copy or "non_blocking" in words:
        return "copies"
    if "pin_memory" in words:
        return "page-locked memory"
    return next((kind for kind, names in MOTION.items() if name in names), None)


def motion(trees: dict[str, ast.Module] | None = None) -> dict[str, list[str]]:
    """Where streams are made, memory is page-locked and bytes are copied between host and device,
    but for the link and the backend below it."""
    found: dict[str, list[str]] = {kind: [] for kind in MOTION}
    for name, module in (trees or {name_of(path): tree(path) for path in sources()}).items():
        if name.startswith("fsdp_offload.link.") or name == "fsdp_offload.core.backend":
            continue
        for node in ast.walk(module):
            if isinstance(node, ast.Call) and (kind := _kind_of_motion(node)):
                found[kind].append(f"{name}:{node.lineno}")
    return found


def movers() -> list[str]:
    """Classes that keep a stream that they made."""
    found = []
    for path in sources():
        for made in ast.walk(tree(path)):
            if isinstance(made, ast.ClassDef) and name_of(path) != "fsdp_offload.core.backend":
                assigned = [n for n in ast.walk(made) if isinstance(n, ast.Assign | ast.AnnAssign)]
                calls = [n for each in assigned for n in ast.walk(each) if isinstance(n, ast.Call)]
                if any(_called(call) in MOTION["streams"] for call in calls):
                    found.append(f"{name_of(path)}.{made.name}")
    return found


def types_named_twice() -> list[str]:
    """Names that several classes of the package have."""
    names = Counter(
        n.name for path in sources() for n in ast.walk(tree(path)) if isinstance(n, ast.ClassDef)
    )
    return sorted(name for name, count in names.items() if count > 1)


def main() -> None:
    """Print the measures."""
    print(f"package lines          {lines()}")
    print(f"comment lines          {comment_share():.1%}")
    print(f"files, in the root     {len(sources())}, {len(files_in_root())}")
    print(f"classes                {classes()}")
    print(f"functions over 60      {long_functions()}")
    print(f"private torch API      {private_torch_files()}")
    print(f"words, in names        {banned_words()}")
    print(f"types named twice      {types_named_twice()}")
    print(f"classes with a stream  {movers()}")
    for kind, places in motion().items():
        print(f"{kind + ', not in link':<22} {len(places)}: {places}")
    tests = [p for p in (ROOT / "tests").rglob("*.py")]
    print(f"test lines             {sum(len(p.read_text().splitlines()) for p in tests)}")


if __name__ == "__main__":
    main()
