"""Try what ``make dist`` has built: ``python tests/distributions.py dist``.

Wheel and source distribution are compared with the files that git tracks, and installed one after
the other into the environment of the interpreter that runs this. ``AssertionError`` and
``CalledProcessError`` name what is wrong.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
IMPORT = """
import json, sys, sysconfig
from importlib.metadata import distribution
import fsdp_offload
assert "torch" not in sys.modules
assert fsdp_offload.__file__.startswith(sysconfig.get_path("purelib")), fsdp_offload.__file__
print(json.loads(distribution("fsdp-offload").read_text("direct_url.json"))["url"])
"""


def tracked() -> set[str]:
    """Files that git knows, from the root of the repository."""
    return set(output("git", "ls-files", folder=REPOSITORY).split())


def output(*command: str | Path, folder: Path) -> str:
    """Of a command that has to succeed, run in ``folder``; it sees installed packages alone."""
    others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=folder, env=others, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def check_wheel(wheel: Path) -> None:
    """It holds all of the package, and metadata besides, with a README for a package index."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        readme = archive.read(name).decode()
    assert "Description-Content-Type: text/markdown" in readme
    assert "HybridDeviceOptimizer(optimizer, model)" in readme
    assert not (links := re.findall(r"\]\((?!\w+:|#)[^)\s]+\)", readme)), links
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert "fsdp_offload/py.typed" in names
    check_same(names, {name for name in tracked() if name.startswith("fsdp_offload/")})


def check_sdist(sdist: Path) -> None:
    """It holds what a checkout has, so that its tests run; ``PKG-INFO`` besides."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    check_same(names, tracked() | {"PKG-INFO"})


def check_same(names: set[str], expected: set[str]) -> None:
    """Name what one of them lacks: a file that is not committed is in the archive, too."""
    assert names == expected, f"besides: {names - expected}; missing: {expected - names}"


def check_installed(archive: Path, version: str) -> None:
    """Install it, import it, run its command, train with it."""
    scripts = Path(sys.executable).parent
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        output(*pip, "uninstall", "--yes", "fsdp-offload", folder=folder)
        output(*pip, "install", "-c", REPOSITORY / "constraints.txt", archive, folder=folder)
        assert output(sys.executable, "-c", IMPORT, folder=folder).strip().endswith(archive.name)
        said = output(scripts / "fsdp-offload", "--version", folder=folder)
        assert said == f"fsdp-offload {version}\n", said
        said = output(scripts / "fsdp-offload", "plan", "--params", "1B", folder=folder)
        assert "fewest GPUs that hold the job: 1\n" in said, said
        script = REPOSITORY / "examples" / "minimal.py"
        said = output(sys.executable, script, "--folder", folder / "run", folder=folder)
        losses = [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", said, re.MULTILINE)]
        assert len(losses) == 20, said
        assert losses[-1] < losses[0], said
        assert (folder / "run" / "step-000020").is_dir()
    print(f"{archive.name}: installed, imported, trained")


def main(folder: Path) -> None:
    """Check the only wheel and the only source distribution of a folder."""
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    version = wheel.name.split("-")[1]
    assert sdist.name == f"fsdp_offload-{version}.tar.gz", sdist
    check_wheel(wheel)
    check_sdist(sdist)
    check_installed(wheel, version)
    check_installed(sdist, version)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
