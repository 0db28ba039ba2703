"""Weights of a job as safetensors files, as transformers reads them; no tensor is gathered.

[Note: an export]
Names, shapes and dtypes are known before any element is read, and with them the place of every
element in the files. So the first rank makes the files with their headers, and then every rank
writes the *boxes* it holds straight into their byte ranges: nobody holds more of a tensor than it
did before, but for a few blocks. Three collectives of small objects: a gather and a scatter
(who has which boxes; who writes which), an all-gather and a broadcast (how it went).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from ..config import parse_bytes
from ..errors import ConfigError
from ..progress import progress as bar_over
from .export_checkpoint import open_checkpoint
from .export_files import Output, Source
from .export_model import open_model
from .export_plan import Found, Names, Share, plan_export
from .team import Team

_DTYPES: Final = {None: None, "bf16": torch.bfloat16, "fp32": torch.float32}


def export_safetensors(
    source: nn.Module | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    dtype: Literal["bf16", "fp32"] | None = None,
    max_shard_bytes: int | str = "5GB",
    progress: bool | None = None,
    names: Names | None = None,
    model_prefix: str | None = None,
    optimizer_prefix: str | None = None,
) -> tuple[Path, ...]:
    """Write the weights into folder ``out``: ``model.safetensors``, or several with an index.

    ``source`` is the model, sharded or not, and then all ranks call this and see the same folder;
    or the folder of a checkpoint in ``torch.distributed.checkpoint``'s format, which one process
    reads alone: no process group, no device, no model.

    Args:
        optimizer: of a model: holds the fp32 masters of bf16 and fp16 weights. Several are
            allowed. A checkpoint has its own.
        dtype: ``"fp32"``: masters, exactly; weights without one are widened. ``"bf16"``: the
            weights that the training computed with. ``None``: as stored. Integers, buffers and
            quantised weights keep their dtype. A checkpoint does not tell what is a buffer: where
            it has optimizer state, what the optimizer does not know keeps its dtype too.
        max_shard_bytes: of one file's elements; a tensor is never cut.
        progress: show a bar on the first rank; ``None``: if stderr is a terminal.
        names: the name in the file for an FQN: a mapping (others keep theirs), or a function,
            whose ``None`` leaves the tensor out. Of tied weights the first name is written, and
            others only where a mapping has them.
        model_prefix: what stands before the FQNs of weights in a checkpoint (``"model."``), if
            not to be found.
        optimizer_prefix: what stands before ``state.{fqn}`` (``"optim."``), likewise.

    Returns:
        The files, the index last.

    Raises:
        ConfigError: an argument is wrong.
        UnsupportedParameterError: a tensor cannot be stored.
        CheckpointError: weights are missing, several models fit, the file system refused, or
            another rank failed. Then nothing new stands in ``out`` under a final name.
        CheckpointCorruptError: the checkpoint is not as it was written.
    """
    team = Team.of_world() if isinstance(source, nn.Module) else Team(None)
    opened: list[Source] = []
    output = Output(Path(out))

    def prepare() -> tuple[Sequence[Found], int]:
        limit = parse_bytes(max_shard_bytes, "max_shard_bytes")
        opened.append(_open(source, optimizer, dtype, model_prefix, optimizer_prefix))
        return opened[0].found, limit

    def create(ranks: list[tuple[Sequence[Found], int]]) -> list[list[Share]]:
        files, shares = plan_export([found for found, _ in ranks], names, ranks[0][1])
        output.create(files)
        return shares

    shown = sys.stderr.isatty() if progress is None else progress
    try:
        shares = team.reduce_scatter(prepare, create)
        todo = sum(share.nbytes for share in shares) if shown and team.is_lead else 0
        with bar_over(todo, "exporting") as bar:
            team.together(lambda: output.write(shares, opened[0], bar.advance))
        return team.lead(output.publish)
    except BaseException:
        output.discard()
        raise


def _open(
    source: object,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    dtype: str | None,
    model_prefix: str | None,
    optimizer_prefix: str | None,
) -> Source:
    """Check the arguments and read the names."""
    if dtype not in _DTYPES:
        raise ConfigError(
            f"dtype={dtype!r}", reason="unknown choice", remedy='use "bf16", "fp32" or None'
        )
    if isinstance(source, nn.Module):
        if model_prefix is not None or optimizer_prefix is not None:
            raise ConfigError(
                f"prefixes {model_prefix!r} and {optimizer_prefix!r} with a model",
                reason="only keys of a checkpoint have them",
                remedy="leave them out; names= renames tensors",
            )
        return open_model(source, _optimizers_of(optimizer), _DTYPES[dtype])
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"source of type {type(source).__name__}",
            reason="neither a torch.nn.Module nor the folder of a checkpoint",
            remedy="pass the model that is trained, or the path of its checkpoint",
        )
    if optimizer is not None:
        raise ConfigError(
            "optimizer= with a checkpoint",
            reason="masters are read from the checkpoint",
            remedy="leave it out",
        )
    return open_checkpoint(Path(source), _DTYPES[dtype], model_prefix, optimizer_prefix)


def _optimizers_of(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    given = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
    for each in given:
        if not isinstance(each, Optimizer):
            raise ConfigError(
                f"optimizer of type {type(each).__name__}",
                reason="not a torch.optim.Optimizer",
                remedy="pass the optimizer of the model, or several",
            )
    return given
