"""The command line itself: what it imports, how it fails."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest

from fsdp_offload.cli import doctor, main
from fsdp_offload.core.errors import CheckpointError
from tests.helpers.scripts import Launch

LIST_MODULES = """
import sys
from fsdp_offload.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print(*sorted(sys.modules), file=sys.stderr)
"""


def modules_after(*words: str) -> tuple[str, set[str]]:
    """What a fresh interpreter prints, and what it has imported then."""
    command = [sys.executable, "-c", LIST_MODULES, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout, set(done.stderr.split())


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        ["doctor", "--help"],
        ["plan", "--help"],
        ["inspect", "--help"],
        ["bench", "--help"],
    ],
)
def test_help_does_without_torch(words: list[str]) -> None:
    text, modules = modules_after(*words)
    assert text.startswith(("usage: fsdp-offload", "fsdp-offload 0"))
    assert "fsdp_offload.core.errors" in modules
    assert not {name for name in modules if name.split(".")[0] in ("torch", "numpy", "tqdm")}


def test_help_tells_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["plan", "--help"])
    found = " ".join(capsys.readouterr().out.split())
    assert "tokens per iteration and GPU; default: 16384 " in found
    assert found.count("; default: ") == 7
    assert "None" not in found
    assert "SUPPRESS" not in found


def test_help_names_all_commands() -> None:
    command = [sys.executable, "-m", "fsdp_offload", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert all(f"    {name} " in text for name in main.COMMANDS)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nothing"],
        ["doctor", "--device", "x"],
        ["doctor", "--dev"],
        ["bench", "--layer", "2"],
        ["bench", "--iterations", "0"],
        ["bench", "--layers", "two"],
    ],
)
def test_wrong_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main.main(words)
    assert left.value.code == 2
    found = capsys.readouterr()
    assert found.err.startswith("fsdp-offload: ")
    assert "Remedy: see fsdp-offload" in found.err
    assert found.err.endswith(" --help\n")
    assert (found.err.count("\n"), found.out) == (1, "")


@pytest.mark.parametrize(
    ("words", "unknown"),
    [
        (["plan", "--params", "8B", "--gpux", "8"], "--gpux 8"),
        (["inspect", "a", "b"], "b"),
        (["doctor", "--devise", "1"], "--devise 1"),
        (["bench", "--iteration", "2"], "--iteration 2"),
    ],
)
def test_unknown_words_lead_to_the_help_of_their_command(
    words: list[str], unknown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main.main(words)
    line = capsys.readouterr().err
    assert line.startswith(f"fsdp-offload: unrecognized arguments: {unknown}. Remedy: see fsdp-of")
    assert f" {words[0]} " in line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (CheckpointError("a\nb", reason="c", remedy="d"), "a b: c. Remedy: d"),
        (FileNotFoundError(2, "No such file", "x.json"), "x.json: No such file. Remedy: use a "),
        (OSError(28, "No space left", "out"), "out: No space left. Remedy: use a path that this "),
        (OSError("libcudart.so.12: cannot open"), "libcudart.so.12: cannot open. Remedy: see fsd"),
        (ImportError("no libfoo", name="torch"), "torch: no libfoo. Remedy: see fsdp-offload doct"),
    ],
)
def test_a_failure_is_one_line(
    error: Exception,
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(options: object) -> int:
        raise error

    monkeypatch.setattr(doctor, "run", fail)
    assert main.main(["doctor", "--json"]) == 1
    found = capsys.readouterr()
    assert found.err.startswith(f"fsdp-offload: {line}")
    assert (found.err.count("\n"), found.out) == (1, "")


def test_of_warnings_only_that_numpy_is_missing_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(options: object) -> int:
        warnings.warn("Failed to initialize NumPy: No module named 'numpy'", stacklevel=1)
        warnings.warn("another", stacklevel=1)
        return 0

    monkeypatch.setattr(doctor, "run", run)
    with pytest.warns(UserWarning, match="another") as found:
        assert main.main(["doctor"]) == 0
    assert [str(each.message) for each in found] == ["another"]


def test_a_mistake_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(options: object) -> int:
        raise AssertionError

    monkeypatch.setattr(doctor, "run", fail)
    with pytest.raises(AssertionError):
        main.main(["doctor"])


NOBODY_READS = """
import os, sys
from fsdp_offload.cli.main import main
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 1)
sys.exit(main(["doctor"]))
"""


def test_a_reader_that_stops_early() -> None:
    assert Launch(NOBODY_READS).ended() == [(1, "")]
