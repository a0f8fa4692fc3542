"""Plants faults in patched folders and patched models, and shows that `memopt verify` notices each, and where it is.

    python -m tests.mutation.catalogue                every row; exit 1 where one is missed
    python -m tests.mutation.catalogue --slice 2/20   every twentieth row from the second on
    python -m tests.mutation.catalogue --only TEXT    rows whose name contains this
    python -m tests.mutation.catalogue --list         what they are; nothing is run
    python -m tests.mutation.catalogue --json FILE    writes the results, for `python -m tests.mutation.table`

A row is a fault of one size in a folder of one architecture and dtype. Digests are forged, so that they fit what was
changed. A fault in a module is in one module of the model only. Where no check fails, the patched model runs in fp64
with and without the fault: what changes no output, no gradient and no saved byte is no fault there.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tests.mutation.approximate_faults
import tests.mutation.file_faults
import tests.mutation.norm_faults
import tests.mutation.product_faults
import tests.mutation.saved_faults
import tests.mutation.side_faults
import tests.mutation.situation_faults  # noqa: F401 - they enter their faults
from memopt.errors import MemoptError
from memopt.patches.checks import Check
from memopt.verification.run import verify
from tests.mutation.effect import effect
from tests.mutation.folders import Workshop, same_files, workshop
from tests.mutation.models import DTYPES, Checkpoint
from tests.mutation.options import add_options, choose, summary, write_json
from tests.mutation.planted import FAULTS, SIZES, Fault
from tests.mutation.site import Site

#: Kinds of faults for which it does not matter what the weights are.
_NO_WEIGHTS = ("config", "side files", "manifest")
#: Which of the modules that come by holds the fault: the first of these where it changes something.
_SITES = (2, 1, 3)
#: Outcomes that are as they should be.
GOOD = ("caught", "no effect", "rounded")


@dataclass(frozen=True)
class Row:
    """One fault in one folder."""

    fault: Fault
    size: float | None
    architecture: str
    dtype: str

    def __str__(self) -> str:
        size = "" if self.size is None else f" by {100 * self.size:g} %"
        return f"{self.fault.kind}: {self.fault.name}{size} ({self.architecture}, {self.dtype})"


@dataclass(frozen=True)
class Found:
    """What verify said of a fault."""

    outcome: str
    """``caught``; ``elsewhere``: a check failed that does not name the place; ``refused``: verify ended with an error;
    ``no effect``: it changes nothing, as was shown; ``rounded``: less than one rounding of the stored dtype;
    ``MISSED``; ``ERROR``: it was not planted."""
    level: str = ""
    check: str = ""
    """Identifier of the check that names the place."""
    place: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Result(Found):
    """The same with the row, as plain data."""

    kind: str = ""
    fault: str = ""
    size: float | None = None
    architecture: str = ""
    dtype: str = ""
    seconds: float = 0.0
    """Of the processor."""


def rows() -> list[Row]:
    """Every row: faults in weights everywhere, in other files once, in modules in one folder for each size and dtype.

    Architectures and dtypes take turns where there is one for each.
    """
    found = []
    for number, fault in enumerate(FAULTS):
        names, dtypes = fault.architectures, fault.dtypes
        if fault.kind in _NO_WEIGHTS:
            pairs = [(None, name, dtypes[(number + turn) % len(dtypes)]) for turn, name in enumerate(names)]
        else:
            sizes = [(size, dtype) for size in fault.sizes for dtype in dtypes if size != SIZES[-1] or dtype == "fp32"]
            if fault.damage is not None:
                pairs = [(size, name, dtype) for size, dtype in sizes for name in names]
            else:
                turns = enumerate(sizes, number)
                pairs = [(size, names[turn % len(names)], dtype) for turn, (size, dtype) in turns]
        found += [Row(fault, *pair) for pair in pairs]
    return found


def run(row: Row, place: Workshop) -> Result:
    """Plant the fault of a row and verify."""
    started = time.process_time()
    try:
        found = _found(row, place)
    except Exception as error:  # whatever it is, nothing was found out
        found = Found("ERROR", detail=f"{type(error).__name__}: {error}".splitlines()[0])
    seconds = round(time.process_time() - started, 2)
    return Result(**vars(found), **_described(row), seconds=seconds)


def _described(row: Row) -> dict[str, Any]:
    data = {"kind": row.fault.kind, "fault": row.fault.name, "size": row.size}
    return data | {"architecture": row.architecture, "dtype": row.dtype}


def _found(row: Row, place: Workshop) -> Found:
    fault = row.fault
    folder = place.patched(Checkpoint(row.architecture, row.dtype), fault.recipe, sides=fault.sides)
    arguments = () if row.size is None else (row.size,)
    if fault.damage is not None:
        with place.copy(folder) as copy:
            places = fault.damage(copy, *arguments)
            if same_files(folder, copy.path):
                return Found("ERROR", detail="no file was changed")
            return _verified(fault, copy.path, (places,) if isinstance(places, str) else places)
    assert fault.plant is not None
    found = Found("ERROR", detail="it was planted nowhere")
    for number in _SITES:
        site = Site(number)
        plant = functools.partial(fault.plant, site, *arguments)
        with site.watched(), plant(), place.stock_runs.remembered():
            said = _verified(fault, folder, site)
        if not site.acted:
            continue
        if said.outcome != "MISSED":
            return said
        size = effect(folder, site, plant)
        outcome = "no effect" if size.is_nothing else "rounded" if size.is_below(DTYPES[row.dtype]) else "MISSED"
        found = Found(outcome, place=site.module or "", detail=str(size))
        if not size.is_nothing:
            break
    return found


def _verified(fault: Fault, folder: Path, places: tuple[str, ...] | Site) -> Found:
    """What the levels of the fault say; a site knows its names once the fault has acted."""
    for level in fault.levels:
        try:
            checks = verify(folder, level=level).checks
        except MemoptError as error:
            said = str(error).splitlines()[0]
            named = next((place for place in _names(places) if place in said), "")
            outcome = "caught" if named and fault.may_refuse else "refused"
            return Found(outcome, level, "an error", named, said)
        failed = [check for check in checks if check.status in fault.statuses]
        if failed:
            return _named(level, failed, _names(places))
    return Found("MISSED", place=_names(places)[0])


def _names(places: tuple[str, ...] | Site) -> tuple[str, ...]:
    """Texts of which a check has to say one; of a module, its name or that of its block."""
    return places.names if isinstance(places, Site) else places


def _named(level: str, failed: list[Check], places: tuple[str, ...]) -> Found:
    for place in places:
        for check in failed:
            if place in check.subject or place in check.detail:
                return Found("caught", level, check.id, place)
    said = "; ".join(f"{check.id} of {check.subject}" for check in failed)
    return Found("elsewhere", level, failed[0].id, places[0], said)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation.catalogue", description=(__doc__ or "").partition("\n")[0]
    )
    add_options(parser)
    options = parser.parse_args(arguments)
    chosen = choose(rows(), options)
    if options.list:
        print(*chosen, sep="\n")
        return 0
    results = []
    with workshop() as place:
        for row in chosen:
            result = run(row, place)
            results.append(result)
            found = " ".join(filter(None, (result.level, result.check, result.place, result.detail)))
            print(f"{result.outcome:9} {result.seconds:5.1f} s  {row}: {found}", flush=True)
    print(f"{len({row.fault for row in chosen})} faults in {len(results)} rows: {summary(results)}")
    write_json(options, results)
    return 0 if {result.outcome for result in results} <= {*GOOD} else 1


if __name__ == "__main__":
    sys.exit(main())
