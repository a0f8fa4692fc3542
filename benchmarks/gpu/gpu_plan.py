"""The runs on a GPU, in parts of a few minutes each, the most valuable first.

    python -m benchmarks.gpu_plan                     print them: number, command, question, minutes, result
    python -m benchmarks.gpu_plan --run 2             run part 2 (several numbers: one after the other)
    python -m benchmarks.gpu_plan --run checks        run every part that says whether memopt is right
    python -m benchmarks.gpu_plan --run benchmarks    run every part that measures

`make gpu-plan`, `make gpu-check` and `make gpu-bench` call this; `make gpu-check PART=2` runs one part. Each part
writes its JSON as it goes, with device and versions: a part that is stopped loses what it was measuring at that moment,
and no more. A part is stopped after nine minutes, because machines that are lent often end a command after ten.

Only the standard library is imported here, so that a machine which lacks a package is told so in one line.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path("benchmarks/results")
#: Packages that `make gpu-wheels` has unpacked; used where the interpreter lacks one.
WHEELS = ROOT / "build" / "gpu-wheels"
LIMIT_MINUTES = 9.0
EXIT_OK, EXIT_SHORT, EXIT_CANNOT_RUN, EXIT_INTERRUPTED = 0, 1, 2, 130
CHECKS, BENCHMARKS = "checks", "benchmarks"
#: Processes of pytest: each compiles kernels on a core of its own. Of 16 cores some are left to PyTorch's own threads.
_PROCESSES = 12
#: Names of tests that take tens of GB of the GPU, and so run alone.
_HUGE = "to_the_31 or to_the_32"
_MODELS = ("tests/gpu/test_patched_models.py", "tests/gpu/test_sampled_models.py", "tests/triton/test_models.py")
_SANITIZER = "tests/gpu/test_sanitizer.py"


@dataclass(frozen=True)
class Part:
    """One call of `python -m MODULE`."""

    kind: str
    question: str
    """What it answers."""
    result: str
    """Name of the file that it writes."""
    minutes: float
    """Expected on one H100 and 16 cores; estimated, not measured."""
    module: str
    arguments: tuple[str, ...] = ()
    parallel: bool = False
    """Whether it is a run of tests that several processes share."""
    plot: bool = False
    """Whether it draws a chart beside its result."""

    def command(self, out: Path, *, processes: int = _PROCESSES, dry_run: bool = False) -> list[str]:
        """Arguments of the interpreter; results go to the folder `out`. Without `processes` xdist is not used."""
        result = out / self.result
        if self.module == "pytest":
            spread = ["-n", str(processes), "--dist", "worksteal"] if self.parallel and processes else []
            dry = ["--collect-only", "-q"] if dry_run else []
            plugin = ["-p", "benchmarks.gpu_tests", "--results", str(result)]
            return ["-m", "pytest", *plugin, *spread, *dry, *self.arguments]
        dry = ["--dry-run"] if dry_run else []
        plot = ["--plot", str(result.with_suffix(".svg"))] if self.plot else []
        return ["-m", self.module, *self.arguments, *dry, "--json", str(result), *plot]


def _tests(question: str, result: str, minutes: float, *arguments: str, parallel: bool = True) -> Part:
    return Part(CHECKS, question, result, minutes, "pytest", arguments, parallel)


#: In the order of their value: a machine that is lent for half an hour answers the first ones.
PARTS: tuple[Part, ...] = (
    Part(
        CHECKS,
        "Does it import, and is a step of Llama, BERT, ViT and T5 right, smaller and free of waits, in six ways?",
        "first_step.json", 5, "benchmarks.first_step", ("--check",),
    ),
    _tests(
        "Are the kernels right: values, streams, graphs, torch.compile, synchronisation?", "kernel_tests.json", 5,
        "tests/gpu", "tests/triton", *(f"--ignore={path}" for path in (*_MODELS, _SANITIZER)),
        "-k", f"not ({_HUGE})",
    ),
    _tests("Are whole patched models right, and smaller?", "model_tests.json", 4, *_MODELS),
    Part(
        BENCHMARKS, "Do the kernels reach 85 % of a copy's bandwidth?", "kernels.json", 8,
        "benchmarks.kernels", ("--check", "--minutes", "7"), plot=True,
    ),
    Part(
        BENCHMARKS, "Does the chunked loss cost its products, and no more memory than it says?", "loss.json", 2,
        "benchmarks.loss", ("--check",),
    ),
    Part(
        BENCHMARKS, "Is a patched block as fast as eager and Liger, and does it keep what it says?", "block.json", 8,
        "benchmarks.block", ("--check", "--minutes", "5.5"), plot=True,
    ),
    Part(
        BENCHMARKS, "Are predicted peaks what the allocator reports?", "peaks.json", 8,
        "benchmarks.peaks", ("--check", "--minutes", "7.5"),
    ),
    Part(
        BENCHMARKS, "Which launch configurations are faster than the shipped ones, and by how much?", "tuning.json", 8,
        "benchmarks.tuning", ("--minutes", "7.5"),
    ),
    Part(
        BENCHMARKS, "What do the steps of a sampled linear cost?", "sampled_kernels.json", 1,
        "benchmarks.sampled_kernels",
    ),
    _tests(
        "Do the kernels read and write nothing out of bounds, and race nowhere (compute-sanitizer)?",
        "sanitizer.json", 8, _SANITIZER,
    ),
    _tests(
        "Are tensors of more than 2^31 elements right? One after the other: each needs most of the GPU's memory.",
        "large_tensors.json", 3, "tests/gpu", "tests/triton", "-k", _HUGE, parallel=False,
    ),
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run", nargs="+", metavar="PART", help=f"numbers of parts, or '{CHECKS}' or '{BENCHMARKS}'")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help=f"where results go ({RESULTS})")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes; tests are collected, and not run")
    arguments = parser.parse_args(argv)
    if not arguments.run:
        print("\n".join(listing(arguments.out)))
        return EXIT_OK
    numbers: list[int] = []
    for name in arguments.run:
        found = _numbers(name)
        if not found:
            parser.error(f"there is no part '{name}': say {CHECKS}, {BENCHMARKS} or 1 to {len(PARTS)}")
        numbers += found
    environment = environment_of(dict(os.environ))
    if isinstance(environment, str):
        print(environment, file=sys.stderr)
        return EXIT_CANNOT_RUN
    arguments.out.mkdir(parents=True, exist_ok=True)
    worst = EXIT_OK
    for number in numbers:
        code = run(number, arguments.out.resolve(), environment, dry_run=arguments.dry_run)
        if code == EXIT_INTERRUPTED:
            return code
        worst = max(worst, code)
    return worst


def listing(out: Path) -> Iterator[str]:
    """The plan for people: three lines a part."""
    total = 0.0
    for number, part in enumerate(PARTS, start=1):
        total += part.minutes
        yield f"{number:2d}. {part.question}"
        yield f"    PYTHONPATH=src:. python {shlex.join(part.command(out))}"
        target = "gpu-check" if part.kind == CHECKS else "gpu-bench"
        yield f"    make {target} PART={number}; about {part.minutes:g} minutes; writes {out / part.result}"
    yield f"About {total:g} minutes in all on one H100 and 16 cores (estimated); a part ends after {LIMIT_MINUTES:g}."


def _numbers(name: str) -> list[int]:
    if name in (CHECKS, BENCHMARKS):
        return [number for number, part in enumerate(PARTS, start=1) if part.kind == name]
    return [int(name)] if name.isdecimal() and 1 <= int(name) <= len(PARTS) else []


# --- what the machine has ------------------------------------------------------------------------------------------


def environment_of(variables: dict[str, str]) -> dict[str, str] | str:
    """Variables of the parts' processes; a sentence where this interpreter lacks a package that they need."""
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [variables.get("PYTHONPATH")])]
    missing = list(lacking(sys.path))
    if missing and WHEELS.is_dir():
        missing = list(lacking([*sys.path, str(WHEELS)]))
        paths.append(str(WHEELS))
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    if "torch" in missing or "transformers" in missing:
        words = "names one that has torch and transformers: make gpu-check MEMOPT_PYTHON=/path/to/python."
        return f"{sys.executable} (Python {python}) lacks {', '.join(missing)}. MEMOPT_PYTHON {words}"
    if missing:
        names = " ".join(missing)
        return (
            f"{sys.executable} (Python {python}) lacks {', '.join(missing)}. Where there is a package index, run: "
            f"make gpu-wheels GPU_WHEELS='{names}' GPU_PYTHON_VERSION={python}; then bring {WHEELS.relative_to(ROOT)} "
            "along with the repository: it is used from there."
        )
    environment = {**variables, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    tried = subprocess.run(
        [sys.executable, "-c", "import memopt; memopt.patch"], env=environment, capture_output=True, text=True, cwd=ROOT
    )
    if tried.returncode:
        words = tried.stderr.strip().splitlines() or ["it said nothing"]
        return f"memopt cannot be imported by {sys.executable} (Python {python}): {words[-1]}"
    return environment


def lacking(path: Sequence[str]) -> Iterator[str]:
    """Packages that memopt or its tests need and that are in no folder of `path`."""
    for name in needed():
        if name == "triton":  # its package for ROCm has another name
            is_there = importlib.machinery.PathFinder.find_spec(name, list(path)) is not None
        else:
            is_there = any(True for _ in importlib.metadata.distributions(name=name, path=list(path)))
        if not is_there:
            yield name


def needed() -> list[str]:
    """Names of the packages that pyproject.toml says memopt needs here, and pytest."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = text.partition("\ndependencies = [\n")[2].partition("\n]\n")[0]
    return [*re.findall(r'^ *"([\w.-]+)', block, re.MULTILINE), "pytest"]


def _processes() -> int:
    """In how many processes pytest runs here; 0 where pytest-xdist is missing."""
    return min(_PROCESSES, os.cpu_count() or 1) if importlib.util.find_spec("xdist") else 0


# --- one part ------------------------------------------------------------------------------------------------------


def run(
    number: int, out: Path, environment: dict[str, str], *, dry_run: bool = False, limit: float = 60 * LIMIT_MINUTES
) -> int:
    """Run a part for at most `limit` seconds; returns its exit code, 2 where it was stopped."""
    part = PARTS[number - 1]
    command = [sys.executable, *part.command(out, processes=_processes(), dry_run=dry_run)]
    print(f"==> part {number} of {len(PARTS)}, about {part.minutes:g} minutes: {part.question}", flush=True)
    print(f"    {shlex.join(['python', *command[1:]])}", flush=True)
    if part.parallel and not _processes():
        print("    pytest-xdist is missing, so one process runs all tests: this may not end in time.", flush=True)
    begun = time.monotonic()
    # A group of its own, to be stopped as a whole, in this session: who ends the session ends the part.
    process = subprocess.Popen(command, env=environment, cwd=ROOT, process_group=0)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        _stop(process)
        print(f"    stopped after {limit / 60:g} minutes; what it has measured is in {out / part.result}", flush=True)
        return EXIT_CANNOT_RUN
    except KeyboardInterrupt:
        _stop(process)
        return EXIT_INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
    said = {EXIT_OK: "fine", EXIT_SHORT: "falls short"}.get(code, f"could not run (exit code {code})")
    where = f"; {out / part.result}" if (out / part.result).is_file() and code in (EXIT_OK, EXIT_SHORT) else ""
    print(f"    {said} after {(time.monotonic() - begun) / 60:.1f} minutes{where}", flush=True)
    return code if code >= 0 else EXIT_CANNOT_RUN


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a part with the processes that it started: first politely, so that it can write what it has."""
    for kind in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, kind)
            process.wait(timeout=10)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


if __name__ == "__main__":
    raise SystemExit(main())
