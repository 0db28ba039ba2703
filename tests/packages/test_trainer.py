"""The Trainer of transformers, and TRL's, with FSDP2: they train and resume as without."""

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


def train(
    offloads: bool,
    folder: str,
    full: bool = False,
    resume: str = "",
    optim: str = "adamw_torch",
    **options: Any,
) -> list[Any]:
    """What the Trainer has logged, but for times."""
    from transformers import Trainer, TrainingArguments

    with accelerate_with_fsdp2():
        trainer = Trainer(
            model=make_model(),
            args=arguments(TrainingArguments, folder, full, optim=optim),
            train_dataset=rows(),
            eval_dataset=rows()[:4],
        )
        return finished(trainer, offloads, resume, options)


def finished(trainer: Any, offloads: bool, resume: str, options: dict[str, Any]) -> list[Any]:
    from fsdp_offload.integrations.transformers import offload

    if offloads:
        offload(trainer, **options)
    trainer.train(resume_from_checkpoint=resume or None)
    if offloads:
        held = trainer.optimizer.optimizer
        check(isinstance(held, HybridDeviceOptimizer), f"{type(held)} stepped")
        check(held.statistics().steps > 0, "no step was its own")
    kept = ("step", "loss", "grad_norm", "learning_rate", "eval_loss")
    return [{k: v for k, v in row.items() if k in kept} for row in trainer.state.log_history]


def test_smoke(ranks: Ranks, tmp_path: Path) -> None:
    expected = ranks(2).run(train, False, str(tmp_path / "plain"))
    assert ranks(2).run(train, True, str(tmp_path / "ours")) == expected


def train_twice(offloads: bool, folder: str) -> list[Any]:
    from transformers import Trainer, TrainingArguments

    settings = dict(use_cpu=True, max_steps=2, logging_steps=1, learning_rate=0.01, seed=3)
    settings |= dict(report_to=[], disable_tqdm=True, save_strategy="no")
    args = TrainingArguments(output_dir=folder, **settings)
    trainer = Trainer(model=make_model(), args=args, train_dataset=rows())
    return finished(trainer, offloads, "", {}) + finished(trainer, False, "", {})


def test_a_second_train_goes_on(tmp_path: Path) -> None:
    """Without a launcher: Accelerate prepares the same optimizer again."""
    expected, found = (train_twice(offloads, str(tmp_path)) for offloads in (False, True))
    assert found == expected
    assert sum("loss" in row for row in found) == 4


@pytest.mark.long
@pytest.mark.parametrize("full", [False, True])
def test_the_trainer_trains_saves_and_resumes_the_same(
    ranks: Ranks, tmp_path: Path, full: bool
) -> None:
    beside = {"overlap": "forward"}
    expected = ranks(2).run(train, False, str(tmp_path / "False"), full)
    assert any("eval_loss" in row for row in expected[0])
    assert sum("grad_norm" in row for row in expected[0]) == STEPS
    assert ranks(2).run(train, True, str(tmp_path / "True"), full, **beside) == expected
    for first, second in ((True, True), (False, True), (True, False)):
        folder, again = tmp_path / str(first) / "checkpoint-2", tmp_path / f"{first}-{second}"
        more = beside if second else {}
        found = ranks(2).run(train, second, str(again), full, str(folder), **more)
        assert found == expected, (first, second)
    assert os.listdir(tmp_path / "True" / "checkpoint-4")


def clipped_in_backward(folder: str) -> str:
    try:
        train(True, folder, overlap="backward")
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
    ("optim", "package"),
    [
        ("adamw_torch_fused", "torch"),
        ("rmsprop", "torch"),
        ("sgd", "torch"),
        ("adamw_torch_8bit", "torchao"),
        ("schedule_free_adamw", "schedulefree"),
        ("adamw_bnb_8bit", "bitsandbytes"),
    ],
)
def test_classes_of_transformers_give_the_bits_that_they_give_alone(
    ranks: Ranks, tmp_path: Path, optim: str, package: str
) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed")
    try:
        expected = ranks(2).run(train, False, str(tmp_path / "plain"), optim=optim)
    except RankError as error:
        pytest.skip(f"{optim} does not run alone here: {str(error).strip().splitlines()[-1]}")
    assert ranks(2).run(train, True, str(tmp_path / "ours"), optim=optim) == expected


def fine_tune(offloads: bool, folder: str, resume: str = "", **options: Any) -> list[Any]:
    """TRL's SFTTrainer with LoRA and gradient checkpointing."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    with accelerate_with_fsdp2():
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
        trainer = SFTTrainer(
            model=make_model(),
            args=settings,
            train_dataset=data,
            eval_dataset=data.select(range(4)),
            processing_class=tokenizer(),
            peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0),
        )
        return finished(trainer, offloads, resume, options)


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
    expected = ranks(2).run(fine_tune, False, str(tmp_path / "plain"))
    assert ranks(2).run(fine_tune, True, str(tmp_path / "ours")) == expected


@pytest.mark.long
@pytest.mark.parametrize("overlap", ["step", "forward"])
def test_trl_with_lora_trains_and_resumes_the_same(
    ranks: Ranks, tmp_path: Path, overlap: str
) -> None:
    for package in ("trl", "peft", "datasets"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    expected = ranks(2).run(fine_tune, False, str(tmp_path / "plain"))
    assert sum("grad_norm" in row for row in expected[0]) == STEPS
    ours, again = str(tmp_path / "ours"), str(tmp_path / "again")
    assert ranks(2).run(fine_tune, True, ours, overlap=overlap) == expected
    half = f"{ours}/checkpoint-2"
    assert ranks(2).run(fine_tune, True, again, half, overlap=overlap) == expected


def test_a_trainer_whose_optimizer_accelerate_does_not_prepare_is_refused(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    from fsdp_offload.integrations.transformers import offload

    settings = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], max_steps=1)
    with forgetting():
        trainer = offload(Trainer(make_model(), settings, train_dataset=rows()))
        trainer.accelerator.prepare = lambda *given, **_: given[0] if len(given) == 1 else given
        with pytest.raises(ConfigError, match="did not prepare it"):
            trainer.train()
