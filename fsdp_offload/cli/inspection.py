"""``inspect``: list a checkpoint's content, and compare it with its checksums."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..checkpoint import Reader
from ..checkpoint.files import typed
from ..checkpoint.planner import read_values
from ..checkpoint.state import EXTRA, decode
from ..core.config import exact
from ..core.errors import CheckpointError

_CHECKSUMS: Final = {
    "elements": "all checksums match",
    "tables": "checksum tables match, elements were not read",
    "none": "no checksums: another program wrote it",
}
_SHOWN: Final = 60  # characters of a value in a line


def run(options: argparse.Namespace) -> int:
    """Print the report; return 1 if the checkpoint has a fault.

    Raises:
        CheckpointError: no checkpoint is there, or reading its ``.metadata`` would run code.
    """
    report = look(options.checkpoint, elements=not options.skip_elements)
    print(json.dumps(report, indent=1) if options.json else _text(report))
    return int(bool(report["faults"]))


def look(path: Path, *, elements: bool) -> dict[str, Any]:
    """Report on one checkpoint; ``elements``: read all files to compare checksums."""
    reader = Reader(path)
    reader.read_metadata()
    reader.set_up_storage_reader(reader.metadata, False)  # raises a failure of it
    report: dict[str, Any] = {"path": str(path), "faults": [], "checksums": "none"}
    try:
        reader.set_up_storage_reader(reader.metadata, True)
        if reader.manifest is not None:
            report["checksums"] = "tables"
        if elements and reader.check_blocks():
            report["checksums"] = "elements"
        report |= _values(reader)
    except CheckpointError as error:
        report["faults"].append(str(error))
    if (manifest := reader.manifest) is not None:
        report |= {
            "completed": datetime.fromtimestamp(manifest.time_ns / 1e9, UTC).isoformat(),
            "ranks": manifest.world_size,
            "optimizer": manifest.optimizer,
        }
    stored = reader.metadata.state_dict_metadata
    tensors: list[dict[str, Any]] = [
        {
            "name": name,
            "dtype": str(entry.properties.dtype).removeprefix("torch."),
            "shape": list(entry.size),
            "tensor_bytes": entry.size.numel() * entry.properties.dtype.itemsize,
        }
        for name, entry in sorted(stored.items())
        if isinstance(entry, TensorStorageMetadata)
    ]
    return report | {
        "tensor_bytes": sum(row["tensor_bytes"] for row in tensors),
        "tensors": tensors,
        "other_values": sorted(stored.keys() - {row["name"] for row in tensors}),
    }  # fmt: skip


def _values(reader: Reader) -> dict[str, Any]:
    """Read ``extra``, and the smallest and largest step count of the optimizer's state."""
    found: dict[str, Any] = {}
    stored = reader.metadata.state_dict_metadata
    if EXTRA in stored and isinstance(data := read_values(reader, [EXTRA])[EXTRA], bytes):
        with typed(EXTRA):  # another program's may be anything
            found["extra"] = _plain(decode(io.BytesIO(data)))
    sizes = {k: v.size for k, v in stored.items() if isinstance(v, TensorStorageMetadata)}
    if keys := [k for k, size in sizes.items() if k.endswith(".step") and size.numel() == 1]:
        steps = [float(step) for step in read_values(reader, keys).values()]
        found["optimizer_steps"] = [min(steps), max(steps)]
    return found


def _plain(value: Any) -> Any:
    """Convert to JSON's types; a tensor becomes its dtype and shape."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(each) for each in value]
    return value if isinstance(value, str | int | float | None) else str(value)


# --------------------------------------------------------------------------- what is shown


def _text(report: Mapping[str, Any]) -> str:
    lines = [report["path"], *(f"fault: {fault}" for fault in report["faults"])]
    if not report["faults"]:
        lines.append(f"complete; {_CHECKSUMS[report['checksums']]}")
    if "ranks" in report:
        who = report["optimizer"] or "no optimizer"
        lines.append(f"saved {report['completed']}, ranks: {report['ranks']}, {who}")
    if "optimizer_steps" in report:
        lines.append(
            "optimizer steps: "
            + " to ".join(dict.fromkeys(f"{count:g}" for count in report["optimizer_steps"]))
        )
    for name, value in (report.get("extra") or {}).items():
        text = json.dumps(value)
        lines.append(f"extra {name} = {text[:_SHOWN]}{'...' * (len(text) > _SHOWN)}")
    lines.append(
        f"tensors: {len(report['tensors'])}, "
        f"{exact(report['tensor_bytes'])}; other values: "
        f"{len(report['other_values'])}"
    )
    lines += [
        f"{row['tensor_bytes']:>15}  {row['dtype']:<8}  {row['name']}  {row['shape']}"
        for row in report["tensors"]
    ]
    return "\n".join(lines)
