"""What memopt does to every model type of the installed transformers, and whether it is right.

    python -m benchmarks.coverage                  every type -> docs/coverage.json and docs/coverage.md (over an hour)
    python -m benchmarks.coverage llama bert       these types only, to the terminal
    python -m benchmarks.coverage --check          the sums of docs/coverage.json; exit 1 where they fall short
    python -m benchmarks.coverage --out FILE --against docs/coverage.json
                                                   every type -> FILE; exit 1 where less holds than in the other file
    python -m benchmarks.coverage --losses         losses of types with a head -> docs/losses.json, docs/losses.md
    python -m benchmarks.coverage --peaks [TYPE…]  the peaks of a step alone, into the rows of docs/coverage.json
    python -m benchmarks.coverage --ways [TYPE…]   steps of the recipes for long training, into benchmarks/results
    python -m benchmarks.coverage --libraries [NAME…]
                                                   timm, diffusers, ..., where installed, into docs/coverage.json

A type is one process (`tests.zoo.examine`), so that a crash or a hang costs that type alone. Rows are kept beside
the output as they come: an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import multiprocessing
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError, as_completed
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from pebble import ProcessExpired, ProcessPool
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.coverage_page import page
from tests.zoo.build import Row, model_types
from tests.zoo.coverage_sums import COVERAGE, Sum, lost, sums
from tests.zoo.examine import examine
from tests.zoo.library_rows import library_rows
from tests.zoo.losses import LOSSES, LossRow, examine_loss, loss_page, loss_sums, types_with_a_head
from tests.zoo.peaks import examine_peak, with_peaks
from tests.zoo.ways import WAYS, examine_ways, types_least_alike_first, ways_sums

EXIT_OK, EXIT_SHORT, EXIT_CANNOT_RUN = 0, 1, 2
TYPE_SECONDS = 240
"""A type that takes longer is stopped; the slowest take about a minute on one core."""

Rows = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Study:
    """What is examined of a type, and what becomes of the rows."""

    options: str
    header: dict[str, Any]
    row: type[Row] | type[LossRow]
    examine: Callable[[str], Row | LossRow]
    types: Callable[[], list[str]]
    sums: Callable[[Sequence[dict[str, Any]]], list[Sum]]
    page: Callable[[dict[str, Any]], str] | None
    merged: Callable[[Rows], Rows] | None = None
    """Rows of a file, with new rows or their peaks in them."""


def main() -> int:
    arguments = _parser().parse_args()
    arguments.out = arguments.out or (LOSSES if arguments.losses else WAYS if arguments.ways else COVERAGE)
    # A terminated run stops its workers, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if arguments.libraries:
            return _libraries(arguments.out, arguments.types)
        study = _study(arguments)
        if arguments.check:
            return _check(_read(arguments.out, study.row), study)
        unknown = sorted(set(arguments.types) - set(study.types() if arguments.peaks else model_types()))
        if unknown:
            raise _Unusable(f"the installed transformers has no model type {', '.join(map(repr, unknown))} that runs.")
        if arguments.types and study.merged is None:
            return _some(arguments.types, arguments.jobs, study)
        return _all(arguments, study)
    except _Unusable as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CANNOT_RUN
    except KeyboardInterrupt:
        print("Interrupted; the rows so far are kept, the same command goes on.", file=sys.stderr)
        return 130


def coverage_page(document: dict[str, Any]) -> str:
    """docs/coverage.md, with the families that `benchmarks.families` measured last."""
    families = COVERAGE.with_name("families.json")
    return page(document, json.loads(families.read_text()) if families.exists() else None)


def _study(arguments: argparse.Namespace) -> Study:
    header: dict[str, Any] = {"versions": versions()}
    if arguments.losses:
        return Study("--losses", header, LossRow, examine_loss, types_with_a_head, loss_sums, loss_page)
    if arguments.ways:
        recorded = _recorded(arguments.out, header)
        types = partial(_missing, recorded)
        return Study("--ways", header, Row, examine_ways, types, ways_sums, None, partial(_replaced, recorded))
    if arguments.peaks:
        document = _read(arguments.out, Row)
        recorded, header["memory"] = document["rows"], document.get("memory", True)
        classes = {row["model_type"]: row["model_class"] for row in recorded if row["model_class"]}
        return Study(
            "",
            header,
            Row,
            partial(examine_peak, classes=classes),
            lambda: list(classes),
            sums,
            coverage_page,
            partial(with_peaks, recorded),
        )
    memory = not arguments.no_memory
    return Study(
        "", {**header, "memory": memory}, Row, partial(examine, memory=memory), model_types, sums, coverage_page
    )


def _recorded(out: Path, header: dict[str, Any]) -> Rows:
    """Rows of a file that the same versions wrote."""
    document = _read(out, Row) if out.exists() else {}
    return list(document["rows"]) if document.get("versions") == header["versions"] else []


def _missing(recorded: Rows) -> list[str]:
    """Types that have no row yet; all if each has one."""
    done, every = {row["model_type"] for row in recorded}, types_least_alike_first()
    return [name for name in every if name not in done] or every


def _replaced(recorded: Rows, rows: Rows) -> Rows:
    """`recorded` with `rows` in place of those of their types."""
    new = {row["model_type"] for row in rows}
    return [row for row in recorded if row["model_type"] not in new] + rows


class _Unusable(Exception):
    """Why nothing could be done, for the person at the terminal."""


def _parser() -> argparse.ArgumentParser:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.coverage",
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("types", nargs="*", metavar="TYPE", help="model types, by default all")
    parser.add_argument("--check", action="store_true", help="recompute the sums of --out and run nothing")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON; the page is written beside it")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--losses", action="store_true", help="compare losses, of types with a head over a vocabulary")
    part.add_argument("--peaks", action="store_true", help="trace the peaks of a step into the rows that --out has")
    part.add_argument("--ways", action="store_true", help="checkpointed blocks, tiles, kept attention, offloading")
    part.add_argument("--libraries", action="store_true", help="models of other libraries, into what --out has")
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="exit 1 where less holds than in this earlier file"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="types at a time (default: one a core)")
    parser.add_argument("--no-memory", action="store_true", help="do not measure bytes (a third of the time)")
    return parser


def _some(types: Sequence[str], jobs: int, study: Study) -> int:
    rows = list(examined(types, jobs, study.examine, study.row))
    print(json.dumps(rows, indent=1))
    return EXIT_SHORT if any(row["status"] == "wrong" for row in rows) else EXIT_OK


def _all(arguments: argparse.Namespace, study: Study) -> int:
    before = _read(arguments.against, study.row)["rows"] if arguments.against else []
    partial_rows = arguments.out.with_suffix(".peaks.jsonl" if arguments.peaks else ".partial.jsonl")
    rows = _resumed(partial_rows, study.header)
    types = [name for name in arguments.types or study.types() if name not in {row["model_type"] for row in rows}]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with partial_rows.open("a") as stream:
        if not stream.tell():
            print(json.dumps(study.header), file=stream, flush=True)
        for row in with_progress(examined(types, arguments.jobs, study.examine, study.row), len(rows), len(types)):
            rows.append(row)
            print(json.dumps(row), file=stream, flush=True)
    rows = sorted(rows if study.merged is None else study.merged(rows), key=lambda row: row["model_type"])
    command = f"python -m benchmarks.coverage {study.options}".rstrip()
    document = {"command": command, "device": "cpu", **study.header, "rows": rows}
    if study.page is coverage_page and (libraries := _of_libraries(arguments.out)):
        document["libraries"] = libraries
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    if study.page is not None:
        arguments.out.with_suffix(".md").write_text(study.page(document))
    partial_rows.unlink()
    losses = lost(before, rows) if study.row is Row else []
    for loss in losses:
        print(f"lost: {loss}", file=sys.stderr)
    _print(study.sums(rows))
    return EXIT_SHORT if losses or any(row["status"] == "wrong" for row in rows) else EXIT_OK


def _libraries(out: Path, names: Sequence[str]) -> int:
    """Rows of models of other libraries, each kept where its library is not installed here."""
    document = _read(out, Row)
    known = {(row["library"], row["model"]): row for row in _of_libraries(out)}
    for row in library_rows(list(names)):
        key = row["library"], row["model"]
        print(f"{row['status']:8} {' '.join(filter(None, key))}: {row['reason'] or row['patched']}", flush=True)
        if row["status"] != "skipped" or key not in known:
            known[key] = row
    document["libraries"] = list(known.values())
    out.write_text(json.dumps(document, indent=1) + "\n")
    out.with_suffix(".md").write_text(coverage_page(document))
    return EXIT_SHORT if any(row["status"] in ("wrong", "not run") for row in known.values()) else EXIT_OK


def _of_libraries(out: Path) -> Rows:
    """The rows of other libraries that a file has."""
    return list(_read(out, Row).get("libraries", [])) if out.exists() else []


def versions() -> dict[str, str]:
    """What the numbers depend on."""
    import torch
    import transformers

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _resumed(partial: Path, header: dict[str, Any]) -> Rows:
    """Rows of an interrupted run with the same versions and options; its file is removed if they differ."""
    if not partial.exists():
        return []
    lines = []
    for line in partial.read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:  # the line that was being written
            break
    if not lines or lines[0] != header:
        partial.unlink()
        return []
    # What was written of a broken last line would make the next one unreadable.
    partial.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines[1:]


def examined(
    types: Sequence[str], jobs: int, examine: Callable[[str], Any], row: Callable[[str, str, str], Any]
) -> Iterator[dict[str, Any]]:
    """What `examine` returns for each type, in a process of its own, in the order in which they are ready.

    `row` makes (type, status, reason) a row where the process fails.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.zoo.losses"])  # transformers is imported once
    with ProcessPool(max_workers=jobs, max_tasks=1, context=context) as pool:
        futures = {pool.schedule(_work, args=(examine, name), timeout=TYPE_SECONDS): name for name in types}
        try:
            for future in as_completed(futures):
                yield _row(row, futures[future], future)
        except BaseException:
            pool.stop()
            raise


def _row(row: Callable[[str, str, str], Any], model_type: str, future: Any) -> dict[str, Any]:
    try:
        found = future.result()
    except TimeoutError:
        found = row(model_type, "not run", f"it takes more than {TYPE_SECONDS} seconds")
    except ProcessExpired as error:
        found = row(model_type, "not run", f"its process ended with exit code {error.exitcode}")
    except Exception as error:  # memopt itself failed, which is never right
        found = row(model_type, "wrong", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return dataclasses.asdict(found)


def _work(examine: Callable[[str], Any], model_type: str) -> Any:
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # what transformers has loaded is not looked through again and again
    with (
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        return examine(model_type)  # models print what they like


def with_progress(rows: Iterator[dict[str, Any]], done: int, left: int) -> Iterator[dict[str, Any]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("Model types", total=done + left, completed=done)
        for count, row in enumerate(rows, 1):
            bar.update(task, advance=1)
            if not console.is_terminal and count % 25 == 0:
                print(f"{done + count} of {done + left} model types", file=sys.stderr, flush=True)
            yield row


def _read(path: Path, kind: type[Row] | type[LossRow]) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
        rows = document["rows"]
    except FileNotFoundError:
        raise _Unusable(f"there is no file {path}; make it with: python -m benchmarks.coverage --out {path}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _Unusable(f"{path} is not what this command writes ({type(error).__name__}: {error}).") from None
    fields = {field.name for field in dataclasses.fields(kind)}
    if not isinstance(rows, list) or any(
        not isinstance(row, dict) or not {"model_type", "status"} <= set(row) <= fields for row in rows
    ):
        raise _Unusable(f"{path} was written by another version of this command; write a new one.")
    return dict(document)


def _check(document: dict[str, Any], study: Study) -> int:
    results = study.sums(document["rows"])
    _print(results)
    return EXIT_OK if all(result.holds for result in results) else EXIT_SHORT


def _print(results: Sequence[Sum]) -> None:
    for result in results:
        wanted = f" (wanted: {result.target})" if result.target else ""
        print(f"{'ok   ' if result.holds else 'SHORT'} {result.name}: {result.text}{wanted}")


if __name__ == "__main__":
    raise SystemExit(main())
