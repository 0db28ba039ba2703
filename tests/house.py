"""Measures of the package: ``python tests/house.py`` prints them, each with what is wanted;
``test_house.py`` bounds them. All but :func:`climbs` read the syntax tree alone."""

from __future__ import annotations

import ast
import functools
import gc
import re
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fsdp_offload"
if str(ROOT) not in sys.path:  # as a script
    sys.path.insert(0, str(ROOT))

TORCH_FILES = tuple(
    f"fsdp_offload.core.{name}" for name in ("dtensor", "fsdp", "fsdp_names", "storage")
)
"""Modules that private API of torch is for."""

EXCEPTIONS = {
    "_disable_dynamo": "torch.compiler.disable imports the compiler, which takes seconds",
    "_StorageInfo": "what DCP's readers and writers put into the metadata of a checkpoint",
    "_make_wrapper_subclass": "torch's notes on extending it make tensors without memory so",
    "_foreach_copy_": "many copies in one call; there is no public form",
    "_foreach_mul_": "torch.optim's and clip_grad_norm_'s own operation; results have its bits",
    "_foreach_norm": "clip_grad_norm_'s own operation; results have its bits",
    "_base": "whether a tensor is a view: in its repr, not in torch's documentation",
    "_version": "counts writes in place, as autograd does; torch's notes on autograd name it",
    "_global_optimizer_post_hooks": "an optimizer that replaces step() must call them itself",
    "_optimizer_step_post_hooks": "likewise, those of one optimizer",
    "_optimizer_load_state_dict_pre_hooks": "likewise, of load_state_dict()",
    "_optimizer_load_state_dict_post_hooks": "likewise",
    "_load_state_dict_post_hooks": "to put a hook before those that the caller has registered",
    "_state_dict_hooks": "likewise",
    "_wrapped_by_lr_sched": "torch's schedulers look for this mark on step()",
    "_init_weights": "transformers' models write it; no other call makes their buffers",
    "_mfsdp_parameter_group": "Megatron-FSDP tells in no other way where its shards begin",
    "_get_owned_range": "likewise",
}
"""Private names of torch and of Megatron-FSDP that other modules use, with the reason."""

DOCUMENTED = "torch._C.DisableTorchFunctionSubclass"
"""Has an underscore, and a page in torch's documentation."""

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

NO_PAYLOAD = {
    ("fsdp_offload.bench.rows", "CPUOffloadPolicy"): "the peer's own option",
    ("fsdp_offload.update.kernels.launching", "copy_"): "addresses and sizes, a few KB, for a "
    "kernel that follows on the same stream",
}
"""Calls by module and name that look like motion, with the reason why they are none."""

BACKENDS = ("fsdp_offload.core.backend", "fsdp_offload.core.devices")
"""Modules below the link, which make what it uses."""

NOTE = re.compile(r"\[Note:\s([^\]]+)\]")


# --------------------------------------------------------------------------- sources


def sources() -> list[Path]:
    """The modules that the wheel holds."""
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """Dotted name of a module."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def tree(path: Path) -> ast.Module:
    """Parsed."""
    return ast.parse(path.read_text())


@functools.cache
def trees() -> dict[str, ast.Module]:
    """All modules by name, parsed."""
    return {name_of(path): tree(path) for path in sources()}


@functools.cache
def nodes() -> tuple[tuple[str, ast.AST], ...]:
    """All nodes of all modules, with the module's name."""
    return tuple((name, node) for name, module in trees().items() for node in ast.walk(module))


# --------------------------------------------------------------------------- size


def lines(paths: Collection[Path] | None = None) -> int:
    """Of all modules of the package."""
    return sum(len(path.read_text().splitlines()) for path in paths or sources())


def statements() -> int:
    """In the syntax tree, docstrings not counted: denser code has as many."""
    kinds = ast.stmt
    found = (node for _, node in nodes() if isinstance(node, kinds))
    return sum(not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)) for n in found)


def comment_share() -> float:
    """Lines that are, or end in, a comment."""
    count = 0
    for path in sources():
        with path.open("rb") as file:
            count += sum(t.type == tokenize.COMMENT for t in tokenize.tokenize(file.readline))
    return count / lines()


def long_files() -> dict[str, int]:
    """Modules of more than 500 lines."""
    found = {name_of(path): lines([path]) for path in sources()}
    return {name: count for name, count in found.items() if count > 500}


def files_in_root() -> list[str]:
    """Modules that are in no folder."""
    return sorted(path.name for path in PACKAGE.glob("*.py"))


def classes() -> int:
    """All of them, nested ones too."""
    return sum(isinstance(node, ast.ClassDef) for _, node in nodes())


def long_functions() -> list[str]:
    """Those of more than 60 lines."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        f"{name}.{node.name}"
        for name, node in nodes()
        if isinstance(node, kinds) and (node.end_lineno or 0) - node.lineno >= 60
    ]


# --------------------------------------------------------------------------- names


def types_named_twice() -> list[str]:
    """Names that several classes of the package have."""
    names = Counter(node.name for _, node in nodes() if isinstance(node, ast.ClassDef))
    return sorted(name for name, count in names.items() if count > 1)


def banned_words() -> dict[str, int]:
    """How often names that the package defines have one of the words."""
    names = [path.stem for path in sources()]
    for _, node in nodes():
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.arg):
            names.append(node.arg)
    found: dict[str, int] = defaultdict(int)
    for name in names:
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_")
        for word in words:
            singular = word.removesuffix("s")
            if word in BANNED or singular in BANNED:
                found[singular if singular in BANNED else word] += 1
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def notes() -> dict[str, int]:
    """Blocks that a line ``[Note: name]`` begins, with the number of places that cite each."""
    texts = [path.read_text() for path in (*sources(), *ROOT.glob("docs/**/*.md"))]
    found = [match for text in texts for match in NOTE.finditer(text)]
    named = Counter(re.sub(r"\s+", " ", match[1]) for match in found)
    begin = re.compile(rf"^\s*{NOTE.pattern}$", re.MULTILINE)
    begun = {match[1] for text in texts for match in begin.finditer(text)}
    return {name: named[name] - 1 for name in sorted(begun)}


def _words(text: ast.AST, named: dict[str, int]) -> int:
    """Of a text; an expression in it is one word, code in backticks, too."""
    if isinstance(text, ast.BinOp):
        return _words(text.left, named) + _words(text.right, named)
    if not isinstance(text, ast.Constant | ast.JoinedStr):
        return named.get(ast.unparse(text), 1)
    parts = text.values if isinstance(text, ast.JoinedStr) else [text]
    whole = "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in parts)
    return len(re.sub(r"`.*?`", "x", whole).split())


def error_words() -> dict[str, int]:
    """Words of each error of the package where it is made; 0 without a reason or a remedy.

    A name counts as the longest text that its module assigns to it.
    """
    module = tree(PACKAGE / "core/errors.py")
    kinds = {node.name for node in module.body if isinstance(node, ast.ClassDef)}
    named: dict[str, dict[str, int]] = defaultdict(dict)
    for name, node in nodes():
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = [*zip(target.elts, value.elts, strict=True)]
            for left, right in pairs:
                if isinstance(right, ast.Constant | ast.JoinedStr):
                    known = named[name].setdefault(ast.unparse(left), 1)
                    named[name][ast.unparse(left)] = max(known, _words(right, {}))
    found = {}
    for name, node in nodes():
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in kinds:
            texts = {each.arg: each.value for each in node.keywords}
            is_whole = {"reason", "remedy"} <= texts.keys()
            words = sum(_words(text, named[name]) for text in (*node.args, *texts.values()))
            found[f"{name}:{node.lineno}"] = words * is_whole
    return found


# --------------------------------------------------------------------------- state of the process

_CONTAINERS = {"dict", "list", "set", "deque", "defaultdict", "Counter", "OrderedDict"}
_CHANGES = set(
    "add append clear discard extend insert pop popitem remove setdefault update".split()
)


def global_tables(modules: dict[str, ast.Module] | None = None) -> list[str]:
    """Containers that a module holds and its code changes, and names that functions rebind.

    Not counted: results of pure functions (``functools.cache``), and locks.
    """
    found = []
    for name, module in (modules or trees()).items():
        bound = {
            target.id: statement.value
            for statement in module.body
            if isinstance(statement, ast.Assign | ast.AnnAssign)
            for target in getattr(statement, "targets", [getattr(statement, "target", None)])
            if isinstance(target, ast.Name)
        }
        changed = {each for node in ast.walk(module) for each in _changed_by(node)}
        for each, value in bound.items():
            is_rebound = each in changed and "Lock" not in ast.unparse(value or ast.Constant(0))
            if is_rebound and (_is_container(value) or _is_rebound(module, each)):
                found.append(f"{name}.{each}")
    return found


def _is_container(value: ast.expr | None) -> bool:
    made = _called(value) if isinstance(value, ast.Call) else ""
    displays = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
    return isinstance(value, displays) or made in _CONTAINERS or made.startswith("Weak")


def _is_rebound(module: ast.Module, name: str) -> bool:
    return any(isinstance(node, ast.Global) and name in node.names for node in ast.walk(module))


def _changed_by(node: ast.AST) -> list[str]:
    """Names of what a statement or expression changes."""
    if isinstance(node, ast.Global):
        return node.names
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        return [getattr(node.value, "id", "")]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return [getattr(node.func.value, "id", "")] if node.func.attr in _CHANGES else []
    return []


# --------------------------------------------------------------------------- private API of torch


def private_torch(modules: dict[str, ast.Module] | None = None) -> list[str]:
    """Where, outside of :data:`TORCH_FILES`, private API of torch is used that has no exception.

    Private is what is imported from torch, or asked of an object, by a name that begins with an
    underscore and that no code of the package defines; and what
    :data:`~core.fsdp_names.NAMES` lists.
    """
    modules = modules or trees()
    known = set(EXCEPTIONS)
    known.update(n for module in modules.values() for node in ast.walk(module) for n in _own(node))
    return [
        f"{name}:{node.lineno} {used}"  # type: ignore[attr-defined]
        for name, module in modules.items()
        for node in ast.walk(module)
        if name not in TORCH_FILES
        for used in _private_names(node)
        if used not in known
    ]


def unused_exceptions() -> set[str]:
    """:data:`EXCEPTIONS` that nothing needs."""
    used = {n for name, node in nodes() if name not in TORCH_FILES for n in _private_names(node)}
    return EXCEPTIONS.keys() - used


def _own(node: ast.AST) -> list[str]:
    """Names that the package defines: of functions, classes, variables and its objects."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return [node.attr] if getattr(node.value, "id", "") in ("self", "cls") else []
    return []


@functools.cache
def _names_of_fsdp2() -> frozenset[str]:
    """The second argument of each ``Name`` that ``core/fsdp_names.py`` lists."""
    found = (n for n in ast.walk(tree(PACKAGE / "core/fsdp_names.py")) if isinstance(n, ast.Call))
    named = [ast.literal_eval(n.args[1]) for n in found if _called(n) == "Name"]
    return frozenset(name for name in named if name.startswith(("_", "fsdp_", "unsharded_")))


def _private_names(node: ast.AST) -> list[str]:
    names: list[str] = []
    if isinstance(node, ast.ImportFrom) and not node.level:
        module = (node.module or "").split(".")
        names = [n for each in node.names for n in (*module, each.name) if module[0] == "torch"]
    elif isinstance(node, ast.Import):
        names = [n for a in node.names if a.name.startswith("torch.") for n in a.name.split(".")]
    elif isinstance(node, ast.Attribute):
        if not re.match(r"(os|sys|ctypes)\.", text := ast.unparse(node)) and text != DOCUMENTED:
            names = [node.attr]
        if text == "torch._C":  # what is asked of it counts
            names = []
    elif isinstance(node, ast.Call) and _called(node) in ("getattr", "hasattr", "setattr"):
        names = [n.value for n in node.args[1:2] if isinstance(n, ast.Constant)]
    standard = {"_asdict", "_replace", "_fields"}
    return [
        name
        for name in names
        if (re.match(r"_(?!_)\w", name) and name not in standard) or name in _names_of_fsdp2()
    ]


# --------------------------------------------------------------------------- bytes in motion


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


def motion(modules: dict[str, ast.Module] | None = None) -> dict[str, list[str]]:
    """Where streams are made, memory is page-locked and bytes are copied between host and device,
    but for the link and the backend below it."""
    found: dict[str, list[str]] = {kind: [] for kind in MOTION}
    for name, module in (modules or trees()).items():
        if name.startswith("fsdp_offload.link.") or name in BACKENDS:
            continue
        for node in ast.walk(module):
            if not isinstance(node, ast.Call) or (name, _called(node)) in NO_PAYLOAD:
                continue
            if kind := _kind_of_motion(node):
                found[kind].append(f"{name}:{node.lineno}")
    return found


def movers() -> list[str]:
    """Classes that keep a stream that they made."""
    found = []
    for name, made in nodes():
        if isinstance(made, ast.ClassDef) and name not in BACKENDS:
            assigned = [n for n in ast.walk(made) if isinstance(n, ast.Assign | ast.AnnAssign)]
            calls = [n for each in assigned for n in ast.walk(each) if isinstance(n, ast.Call)]
            if any(_called(call) in MOTION["streams"] for call in calls):
                found.append(f"{name}.{made.name}")
    return found


# --------------------------------------------------------------------------- floors


@functools.cache
def floors() -> dict[str, int]:
    """The floor of each folder, as ``pyproject.toml`` has them; 0 is the lowest."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(each["layers"] for each in settings["contracts"] if each["type"] == "layers")
    return {
        folder.strip(): index
        for index, layer in enumerate(reversed(layers))
        for folder in layer.split("|")
    }


def cycles() -> list[set[str]]:
    """Modules that import each other, in whatever way: for typing, and in functions, too."""
    known = set(trees())
    imports = {
        name: {n for node in ast.walk(m) for n in _imported(name, node) if n in known}
        for name, m in trees().items()
    }
    reach = {name: _reached(name, imports) for name in imports}
    found: list[set[str]] = []
    for name in imports:
        ring = {other for other in reach[name] if name in reach[other]}
        if ring and ring not in found:
            found.append(ring)
    return found


def _imported(importer: str, node: ast.AST) -> list[str]:
    """Modules that a statement names. A folder that is on the way to one is not counted."""
    if isinstance(node, ast.Import):
        return [each.name for each in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    parts = importer.split(".") if node.level else []
    above = node.level - (ROOT / importer.replace(".", "/")).is_dir()  # a folder is its own
    base = ".".join([*parts[: len(parts) - above], *filter(None, [node.module])])
    modules = [f"{base}.{each.name}" for each in node.names]
    return [each if each in trees() else base for each in modules]


def _reached(start: str, imports: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = list(imports[start])
    while waiting:
        if (name := waiting.pop()) not in found:
            found.add(name)
            waiting += imports[name]
    return found


def climbs(overlap: str | None = None) -> list[str]:
    """Calls of functions in folders above the caller's, each pair once, while one FSDP2 parameter
    gets from ``HybridDeviceOptimizer.__init__`` to the update of its first bucket.

    The calls are those that happen, on the CPU. Where torch's code is between two functions of the
    package, the lower one still counts as the caller: so FSDP2's calls of what was hung into it are
    seen. A generator expression belongs to the function that it stands in.
    """
    import torch.distributed as dist
    from torch import nn, ones, optim
    from torch.distributed.fsdp import fully_shard

    from fsdp_offload import HybridDeviceOptimizer
    from fsdp_offload.update.bucket import BucketUpdate

    found: dict[str, None] = {}
    gc.collect()  # no finalizer of an earlier run counts in this one

    def look(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or sys.getprofile() is None:
            return
        if frame.f_code is BucketUpdate.run.__code__:
            sys.setprofile(None)
        elif (to := _place(frame.f_code)) and (caller := _caller(frame)):
            if to[0] > caller[0]:
                found[f"{caller[1]} -> {to[1]}"] = None

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = fully_shard(nn.Linear(64, 64, bias=False), mesh=dist.init_device_mesh("cpu", (1,)))
        plain = optim.AdamW(model.parameters())
        sys.setprofile(look)
        wrapped = HybridDeviceOptimizer(plain, model, overlap=overlap)
        model(ones(1, 64)).sum().backward()
        wrapped.step()
        assert sys.getprofile() is None, "no bucket was updated"
        wrapped.close()
    finally:
        sys.setprofile(None)
        dist.destroy_process_group()
    return list(found)


@functools.cache
def _place(code: CodeType) -> tuple[int, str] | None:
    """Floor and name of a function of the package."""
    if not code.co_filename.startswith(str(PACKAGE)) or code.co_name == "<genexpr>":
        return None
    folder = Path(code.co_filename).relative_to(PACKAGE).parts[0]
    return (floors()[folder], f"{folder}.{code.co_qualname}") if folder in floors() else None


def _caller(frame: FrameType) -> tuple[int, str] | None:
    caller = frame.f_back
    while caller is not None and _place(caller.f_code) is None:
        caller = caller.f_back
    return None if caller is None else _place(caller.f_code)


# --------------------------------------------------------------------------- table


class Row(NamedTuple):
    """One measure."""

    name: str
    now: object
    wanted: str
    places: Collection[object] = ()


def table() -> Iterator[Row]:
    """All measures, with what is wanted of each in the end."""
    tests = list((ROOT / "tests").rglob("*.py"))
    all_notes = notes()
    places: list[tuple[str, Callable[[], Collection[object]], str]] = [
        ("files over 500 lines", lambda: [f"{n} {c}" for n, c in long_files().items()], "0"),
        ("files in no folder", files_in_root, "2"),
        ("functions over 60 lines", long_functions, "0"),
        ("types named twice", types_named_twice, "0"),
        ("words that are ours", lambda: [*banned_words().items()], "0"),
        ("process-global tables", global_tables, "3"),
        ("private torch API", private_torch, "0"),
        ("import cycles", cycles, "0"),
        ("climbs", climbs, "6"),
        ("climbs, in backward", lambda: climbs("backward"), "6"),
        ("classes with a stream", movers, "1"),
    ]
    yield Row("package lines", lines(), "19,000")
    yield Row("test lines", lines(tests), "25,000")
    yield Row("statements", statements(), "as the lines")
    yield Row("files", len(sources()), "85")
    yield Row("classes", classes(), "150")
    yield Row("comment lines", f"{comment_share():.1%}", "about 7 %")
    yield Row("notes", len(all_notes), "15")
    seldom = [name for name, count in all_notes.items() if count < 2]
    yield Row("notes cited less than twice", len(seldom), "0", seldom)
    yield Row("import floors", len(set(floors().values())), "9")
    yield Row("private torch API, excepted", len(EXCEPTIONS), "each with its reason")
    yield Row("words of an error, the most", max(error_words().values()), "40")
    for name, find, wanted in places:
        found = find()
        yield Row(name, len(found), wanted, found)
    for kind, found in motion().items():
        yield Row(f"{kind}, not in link", len(found), "0", found)


def main() -> None:
    """Print the table, and what is behind each figure."""
    for row in table():
        print(f"{row.name:<30} {row.now:>8}   wanted: {row.wanted}")
        for place in row.places:
            print(f"    {place}")


if __name__ == "__main__":
    main()
