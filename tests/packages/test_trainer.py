"""The Trainer of transformers, and TRL's, with FSDP2: wrapped in one of four places, they train and
resume as without."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_offload import ConfigError, HybridDeviceOptimizer, SpentGradientError
from tests.fsdp.models import check
from tests.helpers.ranks import RankError, RankPool
from tests.packages.gloo_trainers import accelerate_with_fsdp2, forgetting

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")
Ranks = Callable[..., RankPool]
VOCABULARY, STEPS = 64, 4


def make_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def rows() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(VOCABULARY, (32, 12), generator=generator)
    return [{"input_ids": row, "labels": row} for row in drawn]


def arguments(cls: Any, folder: str, full: bool, **more: Any) -> Any:
    return cls(
        output_dir=folder,
        use_cpu=True,
        fsdp=True,
        fsdp_config={
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": "FULL_STATE_DICT" if full else "SHARDED_STATE_DICT",
        },
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
        seed=3,
        **more,
    )


def wrapped(optimizer: Any, model: Any, options: dict[str, Any]) -> HybridDeviceOptimizer:
    return HybridDeviceOptimizer(optimizer, model, **options)


def by_factory(base: Any, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
    class Factory:
        def __call__(self, model: Any, **settings: Any) -> Any:
            inner = torch.optim.AdamW(model.parameters(), **settings)
            return inner if options is None else wrapped(inner, model, options)

    return base, {"optimizer_cls_and_kwargs": (Factory, {"lr": 0.01})}


def by_override(base: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    class Offloading(base):  # type: ignore[misc]
        def create_optimizer(self, model: Any = None) -> Any:
            if self.optimizer is None:
                super().create_optimizer(model)
                self.optimizer = wrapped(self.optimizer, model or self.model, options)
            return self.optimizer

    return Offloading, {}


def by_callback(base: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    from transformers import TrainerCallback

    class Offload(TrainerCallback):
        def on_train_begin(self, *_: Any, model: Any, optimizer: Any, **__: Any) -> None:
            optimizer.optimizer = wrapped(optimizer.optimizer, model, options)

    return base, {"callbacks": [Offload()]}


WAYS: dict[str, Any] = {
    "plain": lambda base, _: (base, {}),
    "plain factory": lambda base, _: by_factory(base, None),
    "factory": by_factory,
    "create_optimizer": by_override,
    "on_train_begin": by_callback,
    "offload": lambda base, _: (base, {}),
}


def train(
    way: str, folder: str, full: bool, resume: str = "", optim: str = "adamw_torch", **options: Any
) -> list[Any]:
    """What the Trainer has logged, but for times, and who was asked to step."""
    from transformers import Trainer, TrainingArguments

    from fsdp_offload.integrations.transformers import offload

    with accelerate_with_fsdp2():
        cls, more = WAYS[way](Trainer, options)
        trainer = cls(
            model=make_model(),
            args=arguments(TrainingArguments, folder, full, optim=optim),
            train_dataset=rows(),
            eval_dataset=rows()[:4],
            **more,
        )
        if way == "offload":
            offload(trainer, **options)
        trainer.train(resume_from_checkpoint=resume or None)
        return finished(trainer, way)


def finished(trainer: Any, way: str) -> list[Any]:
    if not way.startswith("plain"):
        held = trainer.optimizer.optimizer
        check(isinstance(held, HybridDeviceOptimizer), f"{type(held)} stepped")
        check(held.statistics().steps > 0, "no step was its own")
    kept = ("step", "loss", "grad_norm", "learning_rate", "eval_loss")
    return [{k: v for k, v in row.items() if k in kept} for row in trainer.state.log_history]


def test_smoke(ranks: Ranks, tmp_path: Path) -> None:
    expected = ranks(2).run(train, "plain", str(tmp_path / "plain"), False)
    assert ranks(2).run(train, "offload", str(tmp_path / "ours"), False) == expected


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "full"),
    [
        ("factory", False),
        ("create_optimizer", False),
        ("on_train_begin", True),
        ("offload", False),
        ("offload", True),
    ],
)
def test_the_trainer_trains_saves_and_resumes_the_same(
    ranks: Ranks, tmp_path: Path, way: str, full: bool
) -> None:
    plain = "plain factory" if way == "factory" else "plain"
    options = {"overlap": "forward"} if way in ("on_train_begin", "offload") else {}
    expected = ranks(2).run(train, plain, str(tmp_path / "plain"), full)
    assert any("eval_loss" in row for row in expected[0])
    assert sum("grad_norm" in row for row in expected[0]) == STEPS
    assert ranks(2).run(train, way, str(tmp_path / "ours"), full, **options) == expected
    pairs = (
        [("ours", way)] if way == "factory" else [("ours", way), ("plain", way), ("ours", plain)]
    )
    for first, second in pairs:
        folder = str(tmp_path / first / "checkpoint-2")
        more = options if second == way else {}
        again = str(tmp_path / f"{first}-{second}".replace(" ", ""))
        assert ranks(2).run(train, second, again, full, folder, **more) == expected, (first, second)
    assert os.listdir(tmp_path / "ours" / "checkpoint-4")


def clipped_in_backward(folder: str) -> str:
    try:
        train("offload", folder, False, overlap="backward")
    except SpentGradientError as error:
        return str(error)
    return ""


@pytest.mark.long
def test_updates_in_backward_are_refused_where_the_trainer_takes_the_norm(
    ranks: Ranks, tmp_path: Path
) -> None:
    for said in ranks(2).run(clipped_in_backward, str(tmp_path)):
        assert 'use overlap="forward"' in said


@pytest.mark.long
@pytest.mark.parametrize(
    ("optim", "package", "way"),
    [
        ("adamw_torch_fused", "torch", "create_optimizer"),
        ("rmsprop", "torch", "create_optimizer"),
        ("sgd", "torch", "on_train_begin"),
        ("adamw_torch_8bit", "torchao", "create_optimizer"),
        ("adamw_torch_8bit", "torchao", "on_train_begin"),
        ("schedule_free_adamw", "schedulefree", "create_optimizer"),
        ("schedule_free_adamw", "schedulefree", "on_train_begin"),
        ("adamw_bnb_8bit", "bitsandbytes", "on_train_begin"),
    ],
)
def test_classes_of_transformers_give_the_bits_that_they_give_alone(
    ranks: Ranks, tmp_path: Path, optim: str, package: str, way: str
) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed")
    try:
        expected = ranks(2).run(train, "plain", str(tmp_path / "plain"), False, optim=optim)
    except RankError as error:
        pytest.skip(f"{optim} does not run alone here: {str(error).strip().splitlines()[-1]}")
    assert ranks(2).run(train, way, str(tmp_path / "ours"), False, optim=optim) == expected


def fine_tune(way: str, folder: str, resume: str = "", **options: Any) -> list[Any]:
    """TRL's SFTTrainer with LoRA and gradient checkpointing."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    from fsdp_offload.integrations.transformers import offload

    with accelerate_with_fsdp2():
        cls, more = WAYS[way](SFTTrainer, options)
        settings = arguments(
            SFTConfig,
            folder,
            False,
            bf16=False,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            max_length=None,
            dataset_kwargs={"skip_prepare_dataset": True},
        )
        data = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in rows()])
        trainer = cls(
            model=make_model(),
            args=settings,
            train_dataset=data,
            eval_dataset=data.select(range(4)),
            processing_class=tokenizer(),
            peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0),
            **more,
        )
        if way == "offload":
            offload(trainer, **options)
        trainer.train(resume_from_checkpoint=resume or None)
        return finished(trainer, way)


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(VOCABULARY - 2)} | {"<pad>": 62, "<eos>": 63}
    inner = Tokenizer(WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="w0"
    )


def test_trl_smoke(ranks: Ranks, tmp_path: Path) -> None:
    for package in ("trl", "peft", "datasets"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    expected = ranks(2).run(fine_tune, "plain", str(tmp_path / "plain"))
    assert ranks(2).run(fine_tune, "offload", str(tmp_path / "ours")) == expected


@pytest.mark.long
@pytest.mark.parametrize("overlap", ["step", "forward"])
def test_trl_with_lora_trains_and_resumes_the_same(
    ranks: Ranks, tmp_path: Path, overlap: str
) -> None:
    for package in ("trl", "peft", "datasets"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    expected = ranks(2).run(fine_tune, "plain", str(tmp_path / "plain"))
    assert sum("grad_norm" in row for row in expected[0]) == STEPS
    ours, again = str(tmp_path / "ours"), str(tmp_path / "again")
    assert ranks(2).run(fine_tune, "offload", ours, overlap=overlap) == expected
    half = f"{ours}/checkpoint-2"
    assert ranks(2).run(fine_tune, "offload", again, half, overlap=overlap) == expected


def test_a_trainer_whose_optimizer_accelerate_does_not_prepare_is_refused(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    from fsdp_offload.integrations.transformers import offload

    settings = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], max_steps=1)
    with forgetting():
        trainer = offload(Trainer(make_model(), settings, train_dataset=rows()))
        trainer.accelerator.prepare = lambda *given, **_: given[0] if len(given) == 1 else given
        with pytest.raises(ConfigError, match="did not prepare it"):
            trainer.train()
