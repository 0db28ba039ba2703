"""The examples run as a user would start them, in processes of their own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.helpers.scripts import Launch

REPOSITORY = Path(__file__).parents[1]
EXAMPLES = REPOSITORY / "examples"
LIMIT_S = 300  # for what hangs
# A port chosen by the system: several launches can run on one machine at once.
TORCHRUN = ("-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
SMALL = ("--batch", "4", "--seq", "32", "--layers", "1", "--dim", "64", "--log-every", "1")


# What torchrun exports to the only rank of a job.
ALONE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "0",
}


def start(
    arguments: list[str], *, folder: Path = REPOSITORY, **exported: str
) -> subprocess.Popen[str]:
    """A Python process in a session of its own, so that its ranks can be ended with it."""
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    # The tests run on the CPU wherever they run; one thread per rank leaves cores to the others.
    quiet = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment = {**quiet, "PYTHONFAULTHANDLER": "1", **exported}  # says where it was aborted
    return subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """The output of a process that has to succeed in time."""
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"still running after {LIMIT_S} s:\n{process.communicate()[0]}")
    assert process.returncode == 0, output
    return output


def train_gpt(ranks: int, *arguments: object) -> str:
    text = Path(json.__file__).parent
    script = [str(EXAMPLES / "train_gpt.py"), "--data", str(text), *SMALL, *map(str, arguments)]
    if ranks == 1:  # without torchrun, which is one more process that imports torch
        return finish(start(script, **ALONE))
    return finish(start([*TORCHRUN, f"--nproc-per-node={ranks}", *script]))


def losses(output: str) -> dict[int, float]:
    """Training loss by step, as printed."""
    found = re.findall(r"^step +(\d+) +loss (\d+\.\d+)", output, re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


@pytest.mark.long
def test_gpt_trains_on_two_ranks_and_goes_on_on_one(tmp_path: Path) -> None:
    schedule = ("--schedule-steps", 30)
    first = train_gpt(2, "--steps", 20, *schedule, "--save", tmp_path)
    second = train_gpt(1, "--steps", 30, *schedule, "--resume", tmp_path)

    before, after = losses(first), losses(second)
    assert list(before) == list(range(20))
    assert list(after) == list(range(20, 30))
    assert before[19] < before[0] - 0.5
    assert max(after.values()) < before[0] - 0.5
    saved = re.search(r"^saved .*validation loss (\S+)$", first, re.MULTILINE)
    resumed = re.search(r"validation loss (\S+), when saved (\S+)$", second, re.MULTILINE)
    assert saved
    assert resumed
    assert resumed[2] == saved[1]
    # Sums over one and two ranks round differently: at most one unit of the last printed digit.
    assert float(resumed[1]) == pytest.approx(float(saved[1]), abs=1.01e-4)
    assert len(re.findall(r"optimizer state: [\d,]+ bytes on the device", first)) == 2


TWICE = """
import runpy, sys
command = sys.argv[1:]
for steps in "557":
    sys.argv = [*command, steps]
    runpy.run_path(sys.argv[0], run_name="__main__")
    print("again", flush=True) if steps == "5" else None
assert "numpy" not in sys.modules
"""


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_minimal_saves_and_resumes_on_one_rank_without_numpy(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch is installed without numpy, and its own collectives of objects need it."""
    hidden = tmp_path / "hidden" / "numpy.py"
    hidden.parent.mkdir()
    hidden.write_text("raise ModuleNotFoundError('no numpy', name='numpy')\n")
    paths = (str(hidden.parent), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    folder, script = tmp_path / "saved", EXAMPLES / "minimal.py"
    command = [str(script), "--resume", "--folder", str(folder), "--steps"]
    if ranks > 1:
        first = finish(start([*TORCHRUN, f"--nproc-per-node={ranks}", *command, "5"]))
        output = finish(start([*command, "7"], **ALONE))
    else:
        both = finish(start(["-c", TWICE, *command], **ALONE))
        first, done, output = both.split("again\n")
        text = "resumed at step 5\nnothing left to train: give more than --steps 5\n"
        assert done.partition("HybridDeviceOptimizer")[0] == text
        assert not losses(done)
    assert f"no checkpoint in {folder}: begins at step 0" in first
    assert sorted(losses(first)) == list(range(5))
    assert "resumed at step 5" in output
    assert sorted(losses(output)) == [5, 6]


@pytest.mark.long
def test_minimal_goes_on_after_a_kill(tmp_path: Path) -> None:
    command = [str(EXAMPLES / "minimal.py"), "--folder", str(tmp_path)]
    lines = []
    with start([*command, "--steps", "100000"]) as process:
        assert process.stdout is not None
        watchdog = threading.Timer(LIMIT_S, process.kill)
        watchdog.start()
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step 12 "):
                process.kill()  # what it printed until then still comes
        watchdog.cancel()
    assert process.returncode == -signal.SIGKILL, "".join(lines)
    # As if the kill had come in the middle of the newest save, so some steps are run twice.
    max(tmp_path.glob("step-*/manifest.json")).unlink()

    before = losses("".join(lines))
    assert 12 in before, "".join(lines)
    last = max(before) + 1
    output = finish(start([*command, "--resume", "--steps", str(last)]))
    after = losses(output)

    resumed = re.search(r"^resumed at step (\d+)$", output, re.MULTILINE)
    assert resumed
    assert int(resumed[1]) >= 5
    assert list(after) == list(range(int(resumed[1]), last))
    assert after == {step: before[step] for step in after}
    assert before[last - 1] < before[0]


MOE = (
    EXAMPLES / "moe_gpt.py",
    "--steps=12",
    "--layers=2",
    "--dim=64",
    "--seq=64",
    "--batch=4",
)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_experts_train_on_the_same_losses_with_pages(ranks: int) -> None:
    paged = Launch(*MOE, ranks=ranks).output()
    assert losses(paged) == losses(Launch(*MOE, "--no-stash", ranks=ranks).output())
    assert losses(paged)[10] < losses(paged)[0] - 0.5
    assert re.search(r"^pages at most: [1-9]", paged, re.MULTILINE), paged


def rewards(output: str) -> list[float]:
    """As printed every five iterations."""
    return [float(reward) for reward in re.findall(r"reward (\d\.\d+) ", output)]


@pytest.mark.long
def test_the_notebook_draws_one_curve_of_both_runs() -> None:
    output = finish(start([str(EXAMPLES / "curve.py")]))
    losses = [float(loss) for loss in re.findall(r"loss (\S+) \|", output)]
    assert len(losses) == 20
    assert losses[-1] < 0.6 * losses[0]
    assert output.endswith("the losses are equal, bit for bit\n")


RL = (str(EXAMPLES / "rl_phases.py"), "--batch=32", "--length=24", "--warm-up=120")


@pytest.mark.long
def test_policy_learns_although_it_leaves_in_every_iteration() -> None:
    output = finish(start([*RL, "--iterations=16"]))
    found = rewards(output)
    assert len(found) == 4
    assert found[-1] > 2 * found[0] + 0.02, output
    moved = re.findall(r"^(leave|come back) .* % +(\d+\.\d+)$", output, re.MULTILINE)
    assert [name for name, _ in moved] == ["leave", "come back"], output
    assert moved[0][1] == moved[1][1] != "0.00"
    assert re.search(r"^generate .* %", output, re.MULTILINE)


@pytest.mark.long
def test_policy_learns_on_two_ranks() -> None:
    output = finish(start([*TORCHRUN, "--nproc-per-node=2", *RL, "--iterations=21"]))
    found = rewards(output)
    assert len(found) == 5  # told by one rank
    assert found[-1] > 2 * found[0] + 0.02, output
