"""Scripts in processes of their own that need not import torch: forked where it is imported."""

from __future__ import annotations

import ctypes
import datetime
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import NamedTuple, NoReturn

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import forks

LIMIT_S = 300.0  # for what hangs


class Ended(NamedTuple):
    code: int  # negative: of a signal
    said: str  # on stdout and stderr


class Launch:
    """``ranks`` processes of a script, or of source text; with 2 and more, as torchrun does it."""

    def __init__(
        self, script: Path | str, *arguments: object, ranks: int = 1, folder: Path | None = None
    ) -> None:
        self._outputs = TemporaryDirectory(prefix="fsdp-offload-scripts-")
        exported = {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
        if ranks > 1:
            # Made here, as torchrun does, so that no port can be taken in between.
            limit = datetime.timedelta(seconds=LIMIT_S)
            self._store = dist.TCPStore("localhost", 0, None, True, limit, wait_for_workers=False)
            exported |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(self._store.port)}
            exported |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "none"}
        self._processes = []
        context = forks()
        for rank in range(ranks):
            if ranks > 1:
                exported |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            where = (self._output(rank), str(folder or Path.cwd()), dict(exported))
            words = [str(script), *map(str, arguments)]
            process = context.Process(target=_run, args=(isinstance(script, str), words, *where))
            process.start()
            self._processes.append(process)

    def _output(self, rank: int) -> str:
        return str(Path(self._outputs.name) / f"rank-{rank}")

    def ended(self) -> list[Ended]:
        """How each rank ended, which it has to in time."""
        for process in self._processes:
            process.join(LIMIT_S)
        late = [process for process in self._processes if process.is_alive()]
        for process in late:
            process.kill()
            process.join()
        found = [
            Ended(process.exitcode or 0, Path(self._output(rank)).read_text())
            for rank, process in enumerate(self._processes)
        ]
        self._outputs.cleanup()
        if late:
            pytest.fail(f"still running after {LIMIT_S} s:\n" + "\n".join(e.said for e in found))
        return found

    def output(self) -> str:
        """Of ranks that have to succeed, one after the other."""
        found = self.ended()
        assert not any(ended.code for ended in found), "\n".join(ended.said for ended in found)
        return "".join(ended.said for ended in found)


def _run(
    is_source: bool, words: Sequence[str], output: str, folder: str, exported: Mapping[str, str]
) -> NoReturn:
    """The life of one rank, as of ``python SCRIPT`` once torch is imported."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.environ.update(exported)
    os.chdir(folder)
    torch.set_num_threads(1)
    sys.argv[:] = ["-c" if is_source else words[0], *words[1:]]
    main = sys.modules["__main__"] = ModuleType("__main__")
    code = 0
    try:
        if is_source:
            exec(compile(words[0], "<script>", "exec"), main.__dict__)
        else:
            main.__dict__["__file__"] = words[0]
            sys.path.insert(0, str(Path(words[0]).parent))
            exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), main.__dict__)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    # multiprocessing would leave without the interpreter's own end, and so without what scripts
    # have registered for it, or have running in threads.
    ctypes.pythonapi.Py_Exit(code)
    raise AssertionError
