"""Fresh processes of a test, forked from one that has imported torch and transformers, but nothing of memopt.

A process that is started anew spends five seconds on these imports.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

#: Imported once, for ranks (`tests.support.ranks`) too. Nothing here starts a thread, which a fork would lose.
_IMPORTED = ("torch.distributed.fsdp", "transformers.models.llama.modeling_llama")


@dataclass(frozen=True)
class Ran:
    """What a process did."""

    code: int
    out: str
    err: str


def preload() -> None:
    """Let the process that others are forked from import what is slow."""
    multiprocessing.set_forkserver_preload([*_IMPORTED])


def run_code(code: str, *arguments: str, folder: Path | None = None, path: Sequence[Path] = ()) -> Ran:
    """Run Python `code` in a process of its own, with `arguments` in ``sys.argv[1:]``.

    Args:
        folder: the working directory; the parent's without it.
        path: folders that come first where modules are looked for.
    """
    preload()
    with TemporaryDirectory() as name:
        outputs = Path(name, "out"), Path(name, "err")
        process = multiprocessing.get_context("forkserver").Process(
            target=_run, args=(code, arguments, folder, [str(each) for each in path], outputs)
        )
        process.start()
        process.join()
        assert process.exitcode is not None
        return Ran(process.exitcode, *(each.read_text() if each.exists() else "" for each in outputs))


def _run(
    code: str, arguments: Sequence[str], folder: Path | None, path: Sequence[str], outputs: tuple[Path, Path]
) -> None:
    for number, output in enumerate(outputs, start=1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), number)
    sys.argv[1:] = arguments
    sys.path[:0] = path
    gc.freeze()  # collections would look at everything that was imported
    try:
        os.chdir(folder or Path.cwd())
        exec(code, {"__name__": "__main__"})
    except Exception:
        traceback.print_exc()
        sys.exit(1)
