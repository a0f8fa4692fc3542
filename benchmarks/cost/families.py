"""What memopt keeps of the model families that are fine-tuned most, beside the least that an exact method keeps.

    python -m benchmarks.families                     every family -> docs/families.json and docs/coverage.md
    python -m benchmarks.families Qwen3 BERT          these families only, to the terminal
    python -m benchmarks.families --only Qwen3 BERT   these rows of docs/families.json again
    python -m benchmarks.families --check             trace the layers of three families again; exit 1 where a number
                                                      differs, or is above the limit for no known cause

Real widths, bf16, full tuning, no dropout, fake tensors with the kernels of a CUDA device; nothing runs on a device.
Bytes of a layer are those of a model less those of one with fewer layers; where kinds of layers alternate, the mean of
one group. Peaks are of whole models: activations, without weights, their gradients and the optimizer.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from torch import nn

from benchmarks.coverage import coverage_page, versions
from benchmarks.family_list import CAUSES, FAMILIES, LIMIT, Family
from benchmarks.floor import Floor, floor_of
from benchmarks.step import chunk_loss
from memopt.errors import ModelError
from memopt.plan.recipe import DEFAULT_MEMORY_RECIPE, load_recipe
from memopt.trace import emulate
from memopt.trace.account import Account, account
from memopt.trace.estimate import quiet, traced
from memopt.trace.events import Storage, Trace, peak_of
from memopt.trace.kernels import STAND_INS
from memopt.trace.trace import subject, trace
from memopt.trace.tracer import Tracer
from memopt.trace.training import Checkpointing, Step, Training
from memopt.walk.deep import find_deep_sites
from memopt.walk.models.build import build_meta
from memopt.walk.models.plain import _wrapper as kernel_wrapper
from memopt.walk.models.plain import homes, is_kernel
from tests.zoo.coverage_sums import COVERAGE

FAMILIES_FILE = Path(__file__).resolve().parents[2] / "docs" / "families.json"
#: Part by which the bytes of a layer may differ from those in the file.
SAME = 0.005
QUICK = ("Llama 3", "Qwen3-MoE", "BERT")
LARGEST = 5
MIB = 1 << 20


@dataclass(frozen=True)
class Row:
    """One family. Bytes; a layer is the mean of a group of layers."""

    name: str
    model: str
    publisher: str
    size: str
    unit: int
    stock: float
    memopt: float
    floor: float
    beyond: list[tuple[str, float]]
    """What memopt keeps in a group of layers beyond the floor: (what, bytes a layer), the largest first."""
    peaks: list[dict[str, int]]
    """For each size: variant -> bytes."""
    largest: list[tuple[str, str, int, int]]
    """Of the larger size, memopt with checkpointing: the largest that lives at the peak (part, what, number, bytes)."""
    notes: list[str]
    seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """Of what memopt keeps, to the floor."""
        return self.memopt / self.floor


def main(argv: Sequence[str] | None = None) -> int:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.families",
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="by default all")
    parser.add_argument("--only", nargs="+", default=[], metavar="FAMILY", help="measure these rows of the file again")
    parser.add_argument("--check", action="store_true", help="hold the file's rows to the limit, trace three again")
    parser.add_argument("--no-peaks", action="store_true", help="bytes of a layer alone")
    parser.add_argument("--render", action="store_true", help="write the page from the files, trace nothing")
    arguments = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    if arguments.check:
        return _check()
    chosen = arguments.families or arguments.only
    unknown = set(chosen) - {family.name for family in FAMILIES}
    if unknown:
        parser.error(f"no family {', '.join(sorted(unknown))}; there are {', '.join(f.name for f in FAMILIES)}")
    rows = []
    for family in FAMILIES:
        if not arguments.render and (family.name in chosen or not chosen):
            try:
                rows.append(_measured(family, not arguments.no_peaks))
                if not arguments.families:
                    _write(rows)  # an interrupted run keeps its rows
            except Exception as error:
                print(f"{family.name} FAILED {type(error).__name__}: {error}", flush=True)
    if not arguments.families:
        _write(rows)
    return 1 if any(row is not None and row["ratio"] > LIMIT for row in rows) else 0


def _measured(family: Family, peaks: bool) -> dict[str, Any]:
    begun = time.perf_counter()
    row = dataclasses.replace(measure(family, peaks=peaks), seconds=0.0)
    row = dataclasses.replace(row, seconds=round(time.perf_counter() - begun, 1))
    units = " ".join(f"{name} {getattr(row, name) / row.unit:.2f}" for name in ("stock", "memopt", "floor"))
    print(f"{row.name}: {units}, ratio {row.ratio:.3f} ({row.seconds:.0f} s)", flush=True)
    for what, nbytes in row.beyond:
        print(f"    {nbytes / row.unit:+.3f} {what}", flush=True)
    for size in row.peaks:
        print("    " + ", ".join(f"{name} {nbytes / MIB:.0f}" for name, nbytes in size.items()), flush=True)
    for part, what, count, nbytes in row.largest:
        print(f"    {nbytes / MIB:8.0f} MiB {count:3d} {part}: {what}", flush=True)
    return {**asdict(row), "ratio": row.ratio}


def measure(family: Family, *, peaks: bool = True) -> Row:
    """Trace the layers of `family` and, with `peaks`, its whole steps."""
    with assumed(build_meta(family.config(family.depths[0]))), windows_in_kernels(), quiet():
        return _measure(family, peaks)


def _measure(family: Family, peaks: bool) -> Row:
    (_, less), (_, more) = (_layers(family, depth) for depth in family.depths)
    count = family.depths[1] - family.depths[0]
    stock, memopt, floor = ((b - a) / count for a, b in zip(_bytes(less), _bytes(more), strict=True))
    rows, tokens = family.sizes[0]
    size = f"{rows} x {tokens}" if tokens else f"{rows} rows"
    found, largest = _peaks(family, more[0].unit) if peaks else ([], [])
    return Row(
        family.name, family.model, family.publisher, size, more[0].unit, stock, memopt, floor,
        _beyond(less, more, count), found, largest, [*([family.note] if family.note else []), *_kernels(more[1])],
    )  # fmt: skip


_Layers = tuple[Floor, Account, Account]


@contextlib.contextmanager
def windows_in_kernels() -> Iterator[None]:
    """Inside, attention over a window runs in FlashAttention, which takes the window and needs no mask."""
    stock: Callable[..., Any] = emulate._mask
    emulate._mask = lambda *, local_size=None, **more: stock(local_size=None, **more)
    try:
        yield
    finally:
        emulate._mask = stock


@contextlib.contextmanager
def assumed(model: nn.Module) -> Iterator[None]:
    """Inside, the code of `model` finds the packages of the kernels of which memopt knows what they keep."""
    before = []
    for home in homes(model):
        for wrapper in filter(None, map(kernel_wrapper, vars(home).values())):
            cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True))
            stand_in = STAND_INS.get(cells["func_name"].cell_contents)
            for name, value in (("implementation", stand_in), ("is_new_implementation", True)) if stand_in else ():
                before.append((cells[name], cells[name].cell_contents))
                cells[name].cell_contents = value
    is_kernel.cache_clear()
    try:
        yield
    finally:
        for cell, value in reversed(before):
            cell.cell_contents = value
        is_kernel.cache_clear()


def _layers(family: Family, depth: int) -> tuple[Any, _Layers]:
    config = family.config(depth)
    sites = find_deep_sites(build_meta(config))
    rows, tokens = family.sizes[0]
    step = Step(config, Training(batch=rows, seq=tokens), sites, load_recipe(DEFAULT_MEMORY_RECIPE))
    accounts = []
    for each in (step.stock, step):
        with traced(each) as model:
            model.arguments.pop("labels", None)  # blocks alone
            accounts.append(account(model.model, model.run, blocks=sites.blocks, sites=sites, notes=model.notes))
    return sites, (floor_of(step), accounts[0], accounts[1])


def _bytes(layers: _Layers) -> tuple[int, int, int]:
    floor, stock, memopt = layers
    return stock.total, memopt.total, floor.nbytes


def _beyond(less: _Layers, more: _Layers, count: int) -> list[tuple[str, float]]:
    """Differences between what memopt and the floor keep, by shape and dtype, of at least a hundredth of the floor."""
    sums: dict[tuple[int, str], float] = {}
    names: dict[tuple[int, str], str] = {}
    for sign, (floor, _, memopt) in ((1, more), (-1, less)):
        for storage in memopt.storages:
            key = storage.nbytes, storage.dtype
            sums[key] = sums.get(key, 0.0) + sign * storage.nbytes / count
            names[key] = f"{storage.cause} {list(storage.shape)} {storage.dtype} ({storage.module.rpartition('.')[2]})"
        for node in floor.kept:
            key = node.nbytes, node.dtype
            sums[key] = sums.get(key, 0.0) - sign * node.nbytes / count
            names.setdefault(
                key, f"{node.operation} {list(node.shape)} {node.dtype} ({node.module.rpartition('.')[2]})"
            )
    least = 0.01 * (more[0].nbytes - less[0].nbytes) / count
    found = [(names[key], nbytes) for key, nbytes in sums.items() if abs(nbytes) > least]
    return sorted(found, key=lambda each: -abs(each[1]))


def _kernels(of: Account) -> list[str]:
    return [note for note in of.notes if note.startswith(("Assumes", "Attention", "Of "))]


# --- peaks -----------------------------------------------------------------------------------------------------------


#: Name, whether patched, checkpointing. ``free``: transformers' checkpointing, and a loss in chunks of rows.
_VARIANTS: tuple[tuple[str, bool, Checkpointing], ...] = (
    ("stock", False, "none"),
    ("memopt", True, "none"),
    ("free", False, "full"),
    ("memopt + ck", True, "full"),
)


class _ChunkedTracer(Tracer):
    """Of a model whose loss is computed in chunks of rows."""

    def _trace(self, training: Training, groups: int | None = None) -> Trace:
        of = dataclasses.replace(self.of, training=training)
        model = subject(of, groups)
        chunk_loss(model.built.model)
        return trace(of, model)


def _peaks(family: Family, unit: int) -> tuple[list[dict[str, int]], list[tuple[str, str, int, int]]]:
    """For each size: variant -> bytes; ``inputs``: of the blocks' inputs, but one. `unit` is that of the first size.

    And `Row.largest`.
    """
    config = family.config()
    sites = find_deep_sites(build_meta(config))
    patched = load_recipe(DEFAULT_MEMORY_RECIPE)
    found: list[dict[str, int]] = [{} for _ in family.sizes]
    alive: list[Storage] = []
    has_loss = sites.loss_head is not None and family.architecture.endswith("CausalLM")
    for name, recipe, checkpointing in _VARIANTS:
        rules = patched if recipe else None
        first = Training(checkpointing=checkpointing)
        tracer = (_ChunkedTracer if name == "free" and has_loss else Tracer)(Step(config, first, sites, rules))
        for at_size, (rows, tokens) in zip(found, family.sizes, strict=True):
            training = dataclasses.replace(first, batch=rows, seq=tokens)
            with contextlib.suppress(ModelError):  # a class without activation checkpointing
                at_size[name], alive = _activations(tracer.at(training))
    small, large = (rows * (tokens or 1) for rows, tokens in family.sizes)
    for at_size, size in zip(found, (small, large), strict=True):
        at_size["inputs"] = (len(sites.blocks) - 1) * unit * size // small
    return found, _largest(alive, sites.blocks) if "memopt + ck" in found[-1] else []


def _activations(found: Trace) -> tuple[int, list[Storage]]:
    """The most bytes that live at one time, without weights and their gradients, and the storages that then live."""
    left_out = set(found.gradients)
    events = [each for each in found.events if each.storage not in left_out and each.storage.part != "gradients"]
    peak = peak_of((), events)
    return peak.nbytes, list(peak.alive)


def _largest(alive: Sequence[Storage], blocks: Collection[str]) -> list[tuple[str, str, int, int]]:
    """The `LARGEST` largest kinds of storages: (part, what, number, bytes)."""
    kinds: dict[tuple[str, str], list[int]] = {}
    for each in alive:
        is_input = each.part == "saved tensors" and each.module in blocks
        module = re.sub(r"\.\d+(?=\.|$)", ".*", each.module)
        what = "inputs of blocks" if is_input else f"{module} {each.operation}".strip()
        kinds.setdefault((each.part, what), []).append(each.nbytes)
    found = [(part, what, len(sizes), sum(sizes)) for (part, what), sizes in kinds.items()]
    return sorted(found, key=lambda kind: -kind[-1])[:LARGEST]


# --- files -----------------------------------------------------------------------------------------------------------


def _write(rows: Sequence[dict[str, Any]]) -> None:
    before = json.loads(FAMILIES_FILE.read_text())["rows"] if FAMILIES_FILE.exists() else []
    found = {row["name"]: row for row in (*before, *rows)}
    document = {
        "command": "python -m benchmarks.families",
        "device": "cpu",
        "versions": versions(),
        "rows": [found[family.name] for family in FAMILIES if family.name in found],
    }
    FAMILIES_FILE.write_text(json.dumps(document, indent=1) + "\n")
    COVERAGE.with_suffix(".md").write_text(coverage_page(json.loads(COVERAGE.read_text())))


def _check() -> int:
    rows = {row["name"]: row for row in json.loads(FAMILIES_FILE.read_text())["rows"]}
    wrong = [f"{family.name} is not in the file" for family in FAMILIES if family.name not in rows]
    above = [name for name, row in rows.items() if row["ratio"] > LIMIT]
    wrong += [
        f"{name}: {rows[name]['ratio']:.2f} of the floor, for no known cause" for name in above if name not in CAUSES
    ]
    for name in QUICK:
        wrong += _changed(rows[name], measure(next(each for each in FAMILIES if each.name == name), peaks=False))
    for line in wrong:
        print(f"SHORT {line}")
    for name in above:
        print(f"above {name}: {rows[name]['ratio']:.2f} of the floor. {CAUSES.get(name, '')}")
    print(
        f"{'SHORT' if wrong else 'ok   '} {len(rows)} families, {len(above)} above {LIMIT}, {len(QUICK)} traced again"
    )
    return 1 if wrong else 0


def _changed(before: dict[str, Any], now: Row) -> list[str]:
    """What differs between a row of the file and the same family, traced again."""
    pairs = (
        (name, before[name] / before["unit"], getattr(now, name) / now.unit) for name in ("stock", "memopt", "floor")
    )
    return [
        f"{now.name}: {name} was {was:.3f} units, is {found:.3f}"
        for name, was, found in pairs
        if abs(found - was) > SAME * was
    ]


if __name__ == "__main__":
    raise SystemExit(main())
