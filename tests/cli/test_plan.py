"""``plan``: where the size comes from, what it prints, what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fsdp_offload.cli.arguments import CARDS_GIB
from fsdp_offload.cli.main import main
from fsdp_offload.link.budget import HostMemory
from fsdp_offload.plan.estimate import Model, Workload, bounds_ms, estimate

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


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> list[HostMemory]:
    """Bounds of this machine's host memory, as ``plan`` sees them: none."""
    bounds: list[HostMemory] = []
    monkeypatch.setattr("fsdp_offload.cli.plan.host_memory", lambda: bounds)
    return bounds


@pytest.mark.parametrize(
    ("word", "gib"),
    [
        ("RTX 4090", 23.5),
        ("nvidia_geforce-RTX3090", 23.5),
        ("5090", 31.4),
        ("A100 40GB", 39.4),
        ("H100", 79.2),
        ("16 GiB", 16),
    ],
)
def test_a_gpu_is_a_card_or_a_size(
    word: str, gib: float, capsys: pytest.CaptureFixture[str]
) -> None:
    _, found = plan(capsys, "--params", "1B", "--gpu", word)
    assert found["memory_bytes"] == int(gib * (1 << 30))


def test_the_words_are_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--gpus 4 --gpu h200 --link 30 --compute-ms 700 --tokens 4096 --weights fp32"
    code, found = plan(capsys, "--params", "3B", *words.split(), "--no-checkpointing",
                       "--moments", "int8", "--device-memory", "2GiB")  # fmt: skip
    assert (code, found["fits"]) == (0, True)
    work = Workload(4096, 4, False, 4, "int8")
    assert found["work"] == vars(work)
    expected = estimate(Model.of_size(3e9), work, int(CARDS_GIB["h200"] * (1 << 30)), 2 << 30)
    assert found["estimate"].items() >= vars(expected).items()
    bytes_ = expected.out_bytes - expected.gradients_away_bytes, expected.gradients_away_bytes
    assert found["bounds_ms"] == pytest.approx(bounds_ms(*bytes_, 700 / 3, 1400 / 3, 30))


def test_text_has_a_line_for_each_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--params", "8B"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("8B parameters (34 blocks, 4352 wide), bf16 weights")
    assert text.endswith("fewest GPUs that hold the job: 1\n")
    shown = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()
    assert f"$ fsdp-offload plan --params 8B\n{text}" in shown
    assert main("plan --params 8B --device-memory 0 --compute-ms 1700 --link 40".split()) == 0
    assert (
        "time per iteration: at least 3275 ms at 40 GB/s each way, "
        '2425 without clipping and with overlap="backward"\n'
    ) in capsys.readouterr().out
    assert main("plan --params 8B --gpus 2".split()) == 0
    text = capsys.readouterr().out
    assert "all-gathered parameters" in text
    assert "time per iteration: unknown without --compute-ms and --link\n" in text


def test_what_does_not_fit(capsys: pytest.CaptureFixture[str], host: list[HostMemory]) -> None:
    assert main(["plan", "--params", "70B", "--gpu", "rtx-4090"]) == 1
    text = capsys.readouterr().out
    assert text.endswith("fewest GPUs that hold the job: more than 4096; try fewer --tokens\n")
    assert "hint" not in text

    words = ["plan", "--params", "8B", "--gpu", "rtx-4090"]
    host += [HostMemory("of the host", 0, 100 << 30), HostMemory("of a cgroup", 0, 80 << 30)]
    assert main(words) == 1
    text = capsys.readouterr().out
    figures = dict(re.findall(r"^  (\w+).* (\d+\.\d\d)$", text, re.MULTILINE))
    given = re.search(r"fit: (\S+) GiB are missing. (\S+) of 23.50 GiB are usable;", text)
    assert given is not None
    missing, usable = map(float, given.groups())
    assert float(figures["peak"]) == pytest.approx(usable + missing, abs=0.02)
    hint = re.search(r"hint: (.*) fits: (\S+) GiB on the GPU, (\S+) GiB of host memory\n", text)
    assert hint is not None
    assert text.endswith(
        "note: this machine has 80.00 GiB of host memory, less than the "
        f"{hint[3]} GiB that the job takes for each GPU\n"
        "fewest GPUs that hold the job: 2\n"
    )
    assert main([*words, *hint[1].split()]) == 0  # the hint is true
    text = capsys.readouterr().out
    assert re.search(rf"^  peak .* {hint[2]}$", text, re.MULTILINE)
    assert re.search(rf"^  page-locked memory .* {hint[3]}$", text, re.MULTILINE)


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
        (["--params", "8"], "below a million or above 1e15. Remedy: write 8B"),
        (["--params", "1e30"], "above 1e15"),
        (["--params", "8B", "--device-memory", "much"], "--device-memory='much': not a size"),
        (["--config", "nowhere.json"], "No such file"),
    ],
)
def test_what_is_refused(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    found = capsys.readouterr()
    assert reason in found.err
    assert found.out == ""


@pytest.mark.parametrize(
    "words", ["--gpu tpu", "--gpu a100", "--gpus 0", "--tokens 0", "--compute-ms x", "--link 0"]
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
