"""Runs a script, or with -m a module, on the emulated device: python -m tests.device.emulator SCRIPT [ARGUMENT ...]."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from tests.device.emulator.build import CannotBuild

if len(sys.argv) < 2 or sys.argv[1:] == ["-m"]:
    print("usage: python -m tests.device.emulator [-m MODULE | SCRIPT] [ARGUMENT ...]", file=sys.stderr)
    sys.exit(2)
if sys.argv[1] != "-m" and not Path(sys.argv[1]).is_file():
    print(f"There is no script {sys.argv[1]}.", file=sys.stderr)
    sys.exit(2)
try:
    import tests.device.emulator.install  # noqa: F401
except CannotBuild as error:
    print(f"There is no emulated device: {error}.", file=sys.stderr)
    sys.exit(2)
if sys.argv[1] == "-m":
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    del sys.argv[:1]
    runpy.run_path(sys.argv[0], run_name="__main__")
