"""Every Python block of the documentation runs, on one CPU rank.

A block starts with the names of :func:`names_for`. What it needs besides stands in a comment above
it, ``<!-- test: a plain optimizer, bf16 weights -->``, in the words of :data:`GIVEN`. A block that
cannot run has ``<!-- not run: REASON -->`` there, and is compiled. One that makes its own process
group is a whole script, and runs in a process of its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import fsdp_offload
from fsdp_offload import HybridDeviceOptimizer, PhaseOffloader, checkpoint
from fsdp_offload.core.storage import can_swap
from tests.helpers.scripts import Launch
from tests.test_docs import REPOSITORY, pages

COMMENT = r"(?:^<!-- (?P<kind>test|not run): (?P<said>[^>]*?) -->\n+)?"
BLOCK = re.compile(COMMENT + r"^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
GIVEN = {
    "a plain optimizer": "it is not wrapped yet",
    "a plain model": "it is not sharded, and there is no optimizer",
    "bf16 weights": "fp32 otherwise",
    "a checkpoint": "in run/step-1000",
    "safetensors": "of make_model(), in the folder llama",
    "a number": "`batch` is one",
    "an offloader": "`phases`, and all is on the device",
    "kept addresses": "which on the CPU need torch 2.13",
    "two ranks": "of a script, under torchrun",
    "a .pt file": "run.pt, of AdamW after one step",
}


class Block(NamedTuple):
    """One block of one page."""

    page: str
    line: int
    code: str
    kind: str  # of the comment
    said: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_script(self) -> bool:
        return "init_process_group" in self.code

    def compiled(self) -> Any:
        """With the page's own line numbers in tracebacks."""
        return compile("\n" * self.line + self.code, self.page, "exec")


def blocks() -> list[Block]:
    found = []
    for page in sorted(pages()):
        text = page.read_text()
        for match in BLOCK.finditer(text):
            line = text[: match.start("code")].count("\n")
            said = [match[name] or "" for name in ("kind", "said")]
            found.append(Block(str(page.relative_to(REPOSITORY)), line, match["code"], *said))
    return found


def scripts(*, are_run: bool = True) -> list[Block]:
    return [b for b in blocks() if b.kind != "not run" and b.is_script == are_run]


def compiled_only() -> list[Block]:
    return [b for b in blocks() if b.kind == "not run"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x).relu()
        return self.head(x).float().square().mean()


class Lion(torch.optim.Optimizer):
    """Element-wise, and not torch's."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    momentum = state.setdefault("exp_avg", torch.zeros_like(p))
                    momentum.lerp_(p.grad, 0.1)
                    p.sub_(momentum.sign(), alpha=group["lr"])


def save_pt_file(dtype: torch.dtype) -> None:
    model = Model().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model(torch.ones(4, 16, dtype=dtype)).backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, "run.pt")


def names_for(given: set[str]) -> dict[str, Any]:
    """What a block may use."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if "bf16 weights" in given else torch.float32
    model = Model().to(dtype)
    batch = torch.randn(4, 16, dtype=dtype)  # its rows may be micro-batches
    public: dict[str, Any] = {n: getattr(fsdp_offload, n) for n in fsdp_offload.__all__}
    names = public | dict(torch=torch, nn=nn, dist=dist, dcp=dcp, fully_shard=fully_shard)
    names |= dict(get_model_state_dict=get_model_state_dict, StateDictOptions=StateDictOptions)
    names |= dict(get_optimizer_state_dict=get_optimizer_state_dict, Lion=Lion)
    names |= dict(model=model, batch=batch, batches=[batch, batch], device=torch.device("cpu"))
    names |= dict(layers=2, heads=2, length=4, width=8, path="run/own")
    if "a .pt file" in given:
        save_pt_file(dtype)
    if "safetensors" in given:
        checkpoint.export_safetensors(model, "llama")
        names["make_model"] = Model
    if "a plain model" in given:
        return names
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if "a plain optimizer" not in given:
        optimizer = HybridDeviceOptimizer(optimizer, model)
        model(batch[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    if "a checkpoint" in given:
        checkpoint.save("run/step-1000", model, optimizer, extra={"step": 1000})
    if "an offloader" in given:
        names["phases"] = PhaseOffloader(model, optimizer)

    def nothing(*_: Any) -> None:
        """Stands for the caller's own functions."""

    class Graph:
        replay = nothing

    names.update(model=model, optimizer=optimizer, capture=lambda *_: Graph())
    names.update(dict.fromkeys(("generate", "evaluate", "train", "decode"), nothing))
    if "a number" in given:
        names["batch"] = 2
    names.update(send_weights_to_generator=nothing, llm=Mock(), prompts=[])
    return names


def run(block: Block, folder: Path) -> None:
    """On a rank."""
    os.chdir(folder)
    names = names_for({word.strip() for word in block.said.split(",")})
    try:
        exec(block.compiled(), names)
    finally:
        for value in [v for v in names.values() if isinstance(v, PhaseOffloader)]:
            value.close()
        for value in [v for v in names.values() if isinstance(v, HybridDeviceOptimizer)]:
            value.close()


def test_comments_are_understood() -> None:
    found = blocks()
    assert len(found) > 35
    words = {word.strip() for b in found if b.kind == "test" for word in b.said.split(",")}
    assert words <= set(GIVEN)
    # Each comment is above a block, and no block hides from the pattern above.
    text = "\n".join(page.read_text() for page in pages())
    comments = re.findall(r"^<!-- (?:test|not run):", text, re.MULTILINE)
    assert len(comments) == sum(bool(b.kind) for b in found)
    fences = re.findall(r"^\s*```(?:python|py)\b", text, re.MULTILINE)
    assert len(fences) == len(found)


@pytest.mark.parametrize("block", compiled_only(), ids=lambda b: b.name)
def test_what_cannot_run_compiles(block: Block) -> None:
    block.compiled()
    assert len(block.said.split()) > 3, "a reason, in words"


@pytest.mark.parametrize("block", scripts(are_run=False), ids=lambda b: b.name)
def test_blocks_run(ranks: Callable[..., Any], block: Block, tmp_path: Path) -> None:
    if "kept addresses" in block.said and not can_swap():
        pytest.skip("this torch cannot swap CPU storages")
    ranks(1).run(partial(run, block, tmp_path))


def resume_from_pt_file(block: Block, folder: Path) -> None:
    own = folder / str(dist.get_rank())  # each rank writes its file
    own.mkdir()
    os.chdir(own)
    names = names_for({"a .pt file"})
    exec(block.compiled(), names)
    saved, optimizer = torch.load("run.pt"), names["optimizer"]
    assert optimizer.param_groups[0]["lr"] == 2e-3
    for index, (name, parameter) in enumerate(names["model"].named_parameters()):
        found = {"weight": parameter, **optimizer.state[parameter]}
        expected = {"weight": saved["model"][name], **saved["optim"]["state"][index]}
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            whole = found[key].full_tensor() if key != "step" else found[key]
            assert torch.equal(whole, value), key


def test_a_pt_file_sets_all_state(ranks: Callable[..., Any], tmp_path: Path) -> None:
    [block] = [b for b in blocks() if "a .pt file" in b.said]
    ranks(2).run(partial(resume_from_pt_file, block, tmp_path))


@pytest.mark.parametrize("block", scripts(), ids=lambda b: b.name)
def test_scripts_run(block: Block, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(block.code)
    output = Launch(script, ranks=1 + ("two ranks" in block.said), folder=tmp_path).output()
    assert "step 9 " in output
    if "checkpoint.load" in block.code:
        assert "resumed" not in output
        assert "resumed at step 10" in Launch(script, folder=tmp_path).output()
