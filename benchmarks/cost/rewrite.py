"""What rewriting a checkpoint costs beside copying it, and what verifying its weights costs beside reading it.

    python -m benchmarks.rewrite                       print the tables
    python -m benchmarks.rewrite --check               and exit 1 where a number is over its limit
    python -m benchmarks.rewrite --sizes 1 --rounds 2 --folder /mnt/disk

Setting: Llama-shaped bf16 checkpoints in one file, every norm folded, in one folder of one disk. `cp -r` with fsync and
`write_checkpoint` take turns, and so do reading source and result and what `memopt verify --level weights` does. The
limits hold where the files come from the disk, as those of a model that is larger than memory do; the rows "in memory"
have the source in the page cache, where copying costs almost nothing and two SHA-256 are most of the work. Each phase
runs in a process of its own and the least of the rounds counts, since neighbours on a machine only ever add to them: it
should have two idle cores. Seconds are those of the phase without the imports; the last lines have whole commands.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

LIMIT, MEBIBYTES = 1.5, 300
_GB = 10**9
_LARGE = 140
_HIDDEN, _INNER, _VOCABULARY = 2048, 5632, 32000
_BLOCK = 4 << 20


@dataclass(frozen=True)
class Cost:
    """One run of one phase: seconds on the clock, CPU seconds, and peak bytes above those of a bare interpreter."""

    seconds: float
    cpu: float
    peak: int


@dataclass(frozen=True)
class Row:
    """A phase of memopt and the command that it is measured by."""

    size: float
    """GB of weights."""
    phase: str
    command: str
    ours: Cost
    theirs: Cost
    limit: float | None = LIMIT

    @property
    def ratio(self) -> float:
        return self.ours.seconds / self.theirs.seconds

    def too_much(self) -> list[str]:
        over = []
        if self.limit is not None and self.ratio > self.limit:
            over.append(f"{self.phase}, {self.size:g} GB: {self.ratio:.2f} times {self.command}, limit {self.limit}")
        if self.ours.peak > MEBIBYTES << 20:
            over.append(f"{self.phase}, {self.size:g} GB: {self.ours.peak >> 20} MiB, limit {MEBIBYTES}")
        return over


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit 1 where a number is over its limit")
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 2, 4], metavar="GB", help="sizes of the models")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured; the least counts")
    parser.add_argument("--folder", type=Path, help="where models are written, on the disk to measure")
    parser.add_argument("--no-commands", action="store_true", help="leave out the table of whole commands")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to FILE")
    parser.add_argument("--worker", nargs=3, metavar=("PHASE", "SOURCE", "OUT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        phase, source, out = arguments.worker
        print(json.dumps(asdict(_measured(phase, Path(source), Path(out)))))
        return 0
    with tempfile.TemporaryDirectory(prefix="memopt-rewrite-", dir=arguments.folder) as folder:
        rows: list[Row] = []
        for size in arguments.sizes:
            rows += measure(Path(folder), size, arguments.rounds)
        commands = {} if arguments.no_commands else whole_commands(Path(folder), arguments.sizes[-1])
    _print(rows, commands)
    if arguments.json:
        content = {
            "command": "python -m benchmarks.rewrite",
            "rows": [asdict(row) for row in rows],
            "whole": {name: asdict(cost) for name, cost in commands.items()},
        }
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    over = [line for row in rows for line in row.too_much()]
    for line in over:
        print(f"over its limit: {line}", file=sys.stderr)
    return 1 if arguments.check and over else 0


def measure(folder: Path, size: float, rounds: int) -> list[Row]:
    """The rows of one size; what was written is removed, but for the source and the result of the last size."""
    source, copy, out = folder / "model", folder / "copy", folder / "out"
    for old in (source, out):
        shutil.rmtree(old, ignore_errors=True)
    make_model(source, size)
    costs: dict[str, list[Cost]] = {}
    for _ in range(rounds):
        for where, before in (("", _forget), (" in memory", _read)):
            for phase, target in (("copy", copy), ("write", out)):
                shutil.rmtree(target, ignore_errors=True)
                os.sync()
                before(source)
                costs.setdefault(phase + where, []).append(_in_a_process(phase, source, target))
            shutil.rmtree(copy)
        for phase in ("read", "verify"):
            os.sync()
            _forget(source, out)
            costs.setdefault(phase, []).append(_in_a_process(phase, source, out))
    least = {phase: min(found, key=lambda cost: cost.seconds) for phase, found in costs.items()}
    return [
        Row(size, "writing", "cp -r and fsync", least["write"], least["copy"]),
        Row(size, "writing, in memory", "cp -r and fsync", least["write in memory"], least["copy in memory"], None),
        Row(size, "verify --level weights", "reading both", least["verify"], least["read"]),
    ]


def whole_commands(folder: Path, size: float) -> dict[str, Cost]:
    """What the commands cost from start to end, once each, on the model that lies in `folder`."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    calls = {
        f"memopt patch, {size:g} GB": ["patch", str(folder / "model"), "--out", str(folder / "out")],
        f"memopt verify --level weights, {size:g} GB": ["verify", str(folder / "out"), "--level", "weights"],
    }
    found = {}
    for name, call in calls.items():
        found[name] = _watched([sys.executable, "-c", "import memopt.cli.main as main; main.run()", *call])
    return found


def make_model(folder: Path, size: float) -> None:
    """A Llama-shaped checkpoint of about `size` GB; its values repeat, but no shape does without reason."""
    import numpy as np

    from memopt.checkpoint.sources.header import build_header

    layers = max(1, round((size * _GB / 2 - 2 * _VOCABULARY * _HIDDEN) / (4 * _HIDDEN**2 + 3 * _HIDDEN * _INNER)))
    shapes = {"model.embed_tokens.weight": (_VOCABULARY, _HIDDEN), "lm_head.weight": (_VOCABULARY, _HIDDEN)}
    for i in range(layers):
        block = f"model.layers.{i}."
        shapes |= {f"{block}self_attn.{name}_proj.weight": (_HIDDEN, _HIDDEN) for name in "qkvo"}
        shapes |= {f"{block}mlp.{name}_proj.weight": (_INNER, _HIDDEN) for name in ("gate", "up")}
        shapes[f"{block}mlp.down_proj.weight"] = (_HIDDEN, _INNER)
        shapes |= {f"{block}{name}_layernorm.weight": (_HIDDEN,) for name in ("input", "post_attention")}
    shapes["model.norm.weight"] = (_HIDDEN,)
    header = build_header("model.safetensors", {name: ("BF16", shape) for name, shape in shapes.items()})
    numbers = np.random.default_rng(0).standard_normal(_BLOCK // 2, dtype=np.float32) * np.float32(0.02)
    values = (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    folder.mkdir(parents=True)
    with open(folder / "model.safetensors", "wb", buffering=0) as file:
        file.write(header.raw)
        left = header.file_size - len(header.raw)
        while left:
            left -= file.write(values[: min(left, len(values))])
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "hidden_size": _HIDDEN,
        "intermediate_size": _INNER, "vocab_size": _VOCABULARY, "num_hidden_layers": layers,
        "num_attention_heads": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _measured(phase: str, source: Path, out: Path) -> Cost:
    """Run one phase in this process."""
    run = {"copy": _copy, "write": _writer, "read": _reader, "verify": _verifier}[phase](source, out)
    started, cpu = time.perf_counter(), _cpu()
    run()
    return Cost(time.perf_counter() - started, _cpu() - cpu, _peak() - _bare_peak())


def _copy(source: Path, out: Path) -> Callable[[], None]:
    def run() -> None:
        subprocess.run(["cp", "-r", str(source), str(out)], check=True)
        for path in (*out.iterdir(), out):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

    return run


def _writer(source: Path, out: Path) -> Callable[[], object]:
    from memopt.checkpoint.sources.source import open_source
    from memopt.checkpoint.writer import write_checkpoint
    from memopt.plan.plan import make_plan
    from memopt.plan.recipe import load_recipe
    from memopt.walk.sites import Consumer, NormSite, Sites

    opened = open_source(str(source))
    norms = []
    for name in sorted(opened.tensors):
        block = name.partition(".input_layernorm")[0] + ".self_attn."
        readers = [f"{block}{one}_proj" for one in "qkv"]
        if "post_attention" in name:
            readers = [name.replace("post_attention_layernorm.weight", f"mlp.{one}_proj") for one in ("gate", "up")]
        elif name == "model.norm.weight":
            readers = ["lm_head"]
        elif "input_layernorm" not in name:
            continue
        consumers = tuple(Consumer(f"{one}.weight", one, axis=1) for one in readers)
        site = NormSite(
            name.removesuffix(".weight"), kind="rms", hidden_size=_HIDDEN, eps=1e-6, weight=name, consumers=consumers
        )
        norms.append(site)
    sites = Sites(model_class="LlamaForCausalLM", model_type="llama", norms=tuple(norms))
    plan = make_plan(sites, load_recipe("exact"))
    assert len(plan.folds()) == len(norms)
    return lambda: write_checkpoint(opened, plan, out)


def _reader(source: Path, out: Path) -> Callable[[], None]:
    return lambda: _read(source, out)


def _verifier(source: Path, out: Path) -> Callable[[], None]:
    from memopt.verification.weights import verify_weights

    def run() -> None:
        checks = verify_weights(out)
        assert {check.status for check in checks} == {"pass"}, checks

    return run


def _read(*folders: Path) -> None:
    buffer = memoryview(bytearray(_BLOCK))
    for path in (path for folder in folders for path in sorted(folder.iterdir())):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _forget(*folders: Path) -> None:
    """Drop the files from the page cache; they have been synced."""
    for path in (path for folder in folders for path in folder.iterdir()):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _in_a_process(phase: str, source: Path, out: Path) -> Cost:
    command = [sys.executable, "-m", "benchmarks.rewrite", "--worker", phase, str(source), str(out)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


def _watched(command: list[str]) -> Cost:
    """Run a command and see what it used."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return Cost(seconds, usage.ru_utime + usage.ru_stime, 1024 * usage.ru_maxrss - _bare_peak())


def _cpu() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _peak(status: str | None = None) -> int:
    """Peak bytes of this process; not ru_maxrss, which a process inherits from the one that started it."""
    found = re.search(r"VmHWM:\s+(\d+)", status or Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def _bare_peak() -> int:
    """Peak memory of an interpreter that does nothing."""
    show = "print(open('/proc/self/status').read())"
    done = subprocess.run([sys.executable, "-c", show], check=True, capture_output=True, text=True)
    return _peak(done.stdout)


def _print(rows: list[Row], commands: dict[str, Cost]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(title="memopt beside the commands that only move the bytes", title_justify="left")
    for column in ("GB", "phase", "seconds", "CPU s", "against", "seconds", "CPU s", "ratio", "limit", "MiB", "limit"):
        table.add_column(column, justify="left" if column in ("phase", "against") else "right")
    for row in rows:
        table.add_row(
            f"{row.size:g}", row.phase, f"{row.ours.seconds:.2f}", f"{row.ours.cpu:.2f}", row.command,
            f"{row.theirs.seconds:.2f}", f"{row.theirs.cpu:.2f}", f"{row.ratio:.2f}", f"{row.limit or ''}",
            f"{row.ours.peak >> 20}", f"{MEBIBYTES}", style="bold red" if row.too_much() else None,
        )  # fmt: skip
    console.print(table)
    for row in (row for row in rows[-3:] if row.limit):
        minutes = (_LARGE / row.size * seconds / 60 for seconds in (row.ours.seconds, row.theirs.seconds))
        ours, theirs = (f"{minute:.0f} minutes" for minute in minutes)
        console.print(f"At this rate, {_LARGE} GB: {row.phase} {ours}, {row.command} {theirs}.", highlight=False)
    for name, cost in commands.items():
        console.print(
            f"{name}: {cost.seconds:.1f} s, {cost.cpu:.1f} CPU s, {cost.peak >> 20} MiB, imports and walk included",
            highlight=False,
        )


if __name__ == "__main__":
    raise SystemExit(main())
