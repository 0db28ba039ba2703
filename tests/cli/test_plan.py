"""``plan``: where the size comes from, what it prints, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_offload.cli import arguments
from fsdp_offload.cli.main import main
from fsdp_offload.plan.estimate import CARDS, Model, Workload, bounds_ms, estimate

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 128256,
    "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}  # fmt: skip
"""Llama 3 8B, whose model card says 8.03B parameters."""
GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "vocab_size": 50257, "n_head": 12}


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["plan", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_cards_are_those_of_the_estimate() -> None:
    assert arguments.CARDS == tuple(CARDS)


def test_the_words_are_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--gpus 4 --gpu h200 --link 30 --compute-ms 700 --tokens 4096 --weights fp32"
    code, found = plan(capsys, "--params", "3B", *words.split(), "--no-checkpointing",
                       "--moments", "int8", "--device-memory", "2GiB")  # fmt: skip
    assert (code, found["fits"]) == (0, True)
    work = Workload(4096, 4, False, 4, "int8")
    assert found["work"] == vars(work)
    expected = estimate(Model.of_size(3e9), work, CARDS["h200"], 2 << 30)
    assert expected is not None
    assert found["estimate"].items() >= vars(expected).items()
    assert found["bounds_ms"] == list(bounds_ms(expected.travels_bytes, 700, 30))


def test_text_has_a_line_for_each_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--params", "8B"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("8.00B parameters (34 blocks, 4352 wide), bf16 weights")
    assert text.endswith("fewest GPUs that hold the job: 1\n")
    shown = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()
    assert f"$ fsdp-offload plan --params 8B\n{text}" in shown
    assert main("plan --params 8B --device-memory 0 --compute-ms 1700 --link 40".split()) == 0
    assert "time per iteration: 2000 to 3700 ms\n" in capsys.readouterr().out


def test_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--params", "70B", "--gpu", "rtx-4090"]) == 1
    end = "fit into 23.5 GiB.\nfewest GPUs that hold the job: more than 4096; try fewer --tokens\n"
    assert end in capsys.readouterr().out
    assert main(["plan", "--params", "8B", "--gpu", "rtx-4090", "--tokens", "4096"]) == 1
    assert "fewest GPUs that hold the job: 2\n" in capsys.readouterr().out


@pytest.mark.parametrize(("config", "params"), [(LLAMA, 8.03e9), (GPT2, 124.4e6)])
def test_a_config_of_hugging_face(
    config: dict[str, Any], params: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    _, found = plan(capsys, "--config", str(path))
    assert found["model"]["params"] == pytest.approx(params, rel=0.01)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--params", "many"], "not a number of parameters"),
        (["--params", "inf"], "not a number of parameters"),
        (["--params", "8B", "--device-memory", "much"], "not a size"),
        (["--config", "nowhere.json"], "No such file"),
    ],
)
def test_what_is_refused(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    found = capsys.readouterr()
    assert reason in found.err
    assert found.out == ""


@pytest.mark.parametrize(
    "words", ["--gpu tpu", "--gpus 0", "--tokens 0", "--compute-ms x", "--link 0"]
)
def test_wrong_usage(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["plan", "--params", "8B", *words.split()])
    assert left.value.code == 2
    assert f"argument {words.split()[0]}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({k: v for k, v in LLAMA.items() if k != "vocab_size"}, "vocab_size"),
        (LLAMA | {"num_local_experts": 8}, "does not count experts"),
        (LLAMA | {"num_hidden_layers": [32]}, "int()"),
        (LLAMA | {"num_attention_heads": 0}, "zero"),
        ([LLAMA], "'list' object"),
    ],
)
def test_a_config_that_plan_cannot_use(
    config: Any, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert main(["plan", "--config", str(path)]) == 2
    assert reason in capsys.readouterr().err
