"""``examples/finetune.py``, started as a user would: a resumed job has the bits of one that
was never interrupted, and what comes out is what was trained."""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_offload import checkpoint
from tests.test_examples import EXAMPLES, TORCHRUN, finish, losses, start

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.long
VOCABULARY, STEPS, SEQ = 96, 6, 32
OPTIONS = ("--batch=4", f"--seq={SEQ}", "--log-every=1")
EXPORTED = f"model-{STEPS:06d}"
TRAIN = (*OPTIONS, f"--steps={STEPS}", "--save-every=2", "--lr=1e-2", "--warmup=2")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Two files of a few KB, one of them in a folder."""
    (tmp_path / "texts" / "more").mkdir(parents=True)
    for name, source in (("a.txt", "minimal.py"), ("more/b.txt", "rl_phases.py")):
        (tmp_path / "texts" / name).write_bytes((EXAMPLES / source).read_bytes()[:3000])
    return tmp_path / "texts"


def config_of(tied: bool) -> Any:
    return transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQ,
        attention_dropout=0.1,  # a resumed job has to draw the same
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
    )


def launch(ranks: int, *arguments: object) -> Any:
    script = [str(EXAMPLES / "finetune.py"), *map(str, arguments)]
    return start([*([] if ranks == 1 else [*TORCHRUN, f"--nproc-per-node={ranks}"]), *script])


def interrupted(whole: Path, step: int, folder: Path) -> Path:
    """What a kill in the middle of the save after that of ``step`` would have left of a job."""
    for path in (whole / "checkpoints").iterdir():
        shutil.copytree(path, folder / "checkpoints" / path.name)
    newest = checkpoint.latest(folder / "checkpoints")
    assert newest is not None
    (newest / "manifest.json").rename(newest / "manifest.json.partial")
    (newest / ".metadata").unlink()
    left = checkpoint.latest(folder / "checkpoints")
    assert left is not None
    assert left.name == f"step-{step:06d}"
    return folder


def load(folder: Path, **options: Any) -> Any:
    """As anybody would; nothing of the example."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(2 * SEQ).view(2, SEQ) % VOCABULARY
    with torch.no_grad():
        return model(input_ids=tokens).logits


@pytest.mark.parametrize(("ranks", "dtype", "tied"), [(1, "bfloat16", False), (2, "float32", True)])
def test_a_resumed_job_has_the_same_bits_and_exports_what_it_trained(
    ranks: int, dtype: str, tied: bool, tmp_path: Path, texts: Path
) -> None:
    config = config_of(tied)
    config.save_pretrained(tmp_path)
    job = (tmp_path / "config.json", texts, *TRAIN, "--dtype", dtype, "--recompute", "--resume")
    whole = tmp_path / "whole"

    output = finish(launch(ranks, *job, "--out", whole))
    expected = losses(output)
    assert list(expected) == list(range(1, STEPS + 1))
    assert expected[STEPS] < expected[1] - 0.5
    assert output.count("HybridDeviceOptimizer") == 1
    assert 'overlap="forward"' in output

    killed = interrupted(whole, 4, tmp_path / "killed")
    output = finish(launch(ranks, *job, "--out", killed))
    assert re.search("^resumed at step 4$", output, re.MULTILINE)
    assert losses(output) == {step: expected[step] for step in range(5, STEPS + 1)}
    weights = [(out / EXPORTED / "model.safetensors").read_bytes() for out in (whole, killed)]
    assert weights[0] == weights[1]

    make = transformers.AutoModelForCausalLM.from_config
    trained = make(config, dtype=getattr(torch, dtype)).eval()
    untrained = logits(trained)
    newest = checkpoint.latest(whole / "checkpoints")
    assert newest is not None
    assert checkpoint.load(newest, trained)["step"] == STEPS
    exported = load(whole / EXPORTED)
    assert exported.dtype == getattr(torch, dtype)  # without being told
    assert torch.equal(logits(exported), logits(trained))
    assert not torch.equal(logits(trained), untrained)


@pytest.mark.parametrize(
    ("model", "texts", "out", "more", "message"),
    [
        ("model", "texts", "new", (), r"no \*.safetensors; for random weights, pass .*config.json"),
        ("model/config.json", "nowhere", "new", (), "nowhere is not there"),
        ("model/config.json", "texts", "old", (), "holds checkpoints: go on with --resume"),
        ("model/config.json", "texts", "old", ("--resume",), "exists already: give more --steps"),
        ("model/config.json", "texts", "old", ("--resume", "--steps=9"), None),
        ("model/config.json", "texts", "new", (), None),
    ],
)
def test_what_would_fail_after_the_training_is_refused_before_it(
    model: str,
    texts: str,
    out: str,
    more: tuple[str, ...],
    message: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for folder in ("model", "texts", f"old/{EXPORTED}"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "model" / "config.json").write_text("{}")
    checkpoint.save(tmp_path / "old" / "checkpoints" / "one", torch.nn.Linear(2, 2))
    monkeypatch.chdir(tmp_path)
    example = imported(monkeypatch)

    args = example.parser.parse_args([model, texts, "--out", out, f"--steps={STEPS}", *more])
    given = args, args.out / "checkpoints", args.out / f"model-{args.steps:06d}"
    if message is None:
        example.check(*given)
        return
    with pytest.raises(SystemExit, match=message):
        example.check(*given)


def imported(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example as a module."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "finetune", raising=False)
    return importlib.import_module("finetune")


def words() -> Any:
    """A tokenizer of words: far fewer tokens than bytes."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel

    known = {"<unk>": 0} | {word: i + 1 for i, word in enumerate(("import", "def", "=", "return"))}
    inner = Tokenizer(WordLevel(known, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


@pytest.mark.parametrize("offload", ["state", "all"])
def test_weights_tokenizer_and_config_of_a_folder_are_used_and_come_out_again(
    offload: str, tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks get their shards from the first; what is in no state dict has to be there, too."""
    torch.manual_seed(1)  # not the example's
    config = config_of(tied=True)
    config.attention_dropout, config.initializer_range = 0.0, 0.3  # so that positions matter
    source = transformers.LlamaForCausalLM(config).eval()
    source.generation_config.max_length = 77
    folder, out = tmp_path / "source", tmp_path / "out"
    source.save_pretrained(folder, max_shard_size="10KB")  # several files
    words().save_pretrained(folder)
    assert (folder / "model.safetensors.index.json").exists()

    still = ("--steps=1", "--lr=0", "--dtype=float32", f"--offload={offload}")
    output = finish(launch(2, folder, texts, *OPTIONS, *still, "--out", out))

    text = [file.read_text() for file in (texts / "a.txt", texts / "more" / "b.txt")]
    assert f"{sum(len(each.split()) for each in text):,} tokens of text" in output
    again = transformers.AutoTokenizer.from_pretrained(out / "model-000001")
    tokens = torch.tensor([token for each in text for token in again(each).input_ids])
    assert set(tokens.unique().tolist()) == {0, 1, 2, 3, 4}
    exported = load(out / "model-000001")
    assert exported.config.to_diff_dict() == load(folder).config.to_diff_dict()
    assert exported.generation_config.max_length == 77
    assert torch.equal(logits(exported), logits(source))

    example = imported(monkeypatch)
    rows = example.rows_of(1, tokens, Namespace(batch=4, seq=SEQ))
    with torch.no_grad():
        loss = source(input_ids=rows, labels=rows).loss.item()
    assert losses(output)[1] == pytest.approx(loss, abs=1e-5)
