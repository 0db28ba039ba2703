"""Models of transformers: sharded by layers, made on the meta device, filled from a folder."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

import fsdp_offload
from fsdp_offload import CheckpointError, HybridDeviceOptimizer, checkpoint
from tests.helpers.compare import assert_same

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64}


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def config_of(kind: str) -> Any:
    if kind == "gpt2":
        return transformers.GPT2Config(
            n_embd=32, n_layer=2, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=0
        )
    scaling = (
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4} if kind == "scaled" else None
    )
    return transformers.LlamaConfig(
        **LLAMA,
        num_hidden_layers=2,
        tie_word_embeddings=kind == "tied",
        rope_parameters=scaling,
    )


def make(config: Any) -> Any:
    model: Any = transformers.AutoModelForCausalLM
    return model.from_config(config, dtype=torch.bfloat16).eval()


def train(model: Any, optimizer: Any) -> list[float]:
    losses = []
    for step in range(3):
        tokens = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adamw(model: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


@pytest.mark.parametrize("kind", ["tied", "untied", "scaled", "gpt2"])
def test_a_folder_fills_a_model_that_never_was_whole(tmp_path: Path, kind: str) -> None:
    plain = make(config_of(kind))
    plain.save_pretrained(tmp_path, max_shard_size="20KB")
    with torch.device("meta"):
        model = make(transformers.AutoConfig.from_pretrained(tmp_path))
    fsdp_offload.shard(model)
    checkpoint.load(tmp_path, model)
    names = {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    layers = "transformer.h" if kind == "gpt2" else "model.layers"
    assert names == {"", f"{layers}.0", f"{layers}.1"}
    assert_same([*map(whole, model.parameters())], [*map(whole, plain.parameters())])
    assert_same([*model.buffers()], [*plain.buffers()])
    mine = HybridDeviceOptimizer(adamw(model), model, master_weights=False)
    assert train(model, mine) == train(plain, adamw(plain))


def test_sharded_models_generate() -> None:
    plain = make(config_of("tied"))
    model = fsdp_offload.shard(copy.deepcopy(plain))
    tokens = torch.arange(1, 8)[None]
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert_same([model.generate(tokens, **options)], [plain.generate(tokens, **options)])


def test_folders_whose_names_transformers_converts(tmp_path: Path) -> None:
    """Experts that it fuses while it loads: the names in the folder are not the model's."""
    config = transformers.Qwen2MoeConfig(
        **LLAMA,
        num_hidden_layers=1,
        num_key_value_heads=4,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=4,
    )
    plain = make(config)
    plain.save_pretrained(tmp_path / "published")
    with torch.device("meta"):
        model = make(config)
    with pytest.raises(CheckpointError, match=r"lacks .*experts"):
        checkpoint.load(tmp_path / "published", model)
    plain.save_pretrained(tmp_path / "own", save_original_format=False)
    checkpoint.load(tmp_path / "own", model)
    assert_same([*model.parameters()], [*plain.parameters()])
