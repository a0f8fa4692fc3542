"""What the rows of `benchmarks.coverage` add up to, and what memopt promises of it. No torch, no models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from memopt.patches.base import LEFT, READS

#: What the last `make coverage` recorded.
COVERAGE = Path(__file__).parents[2] / "docs" / "coverage.json"
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Sum:
    """One promise: what it is about, what the rows say, and whether that is enough."""

    name: str
    text: str
    target: str
    holds: bool
    is_mean: bool = False
    """Over all types, in which common ones count as much as rare ones."""


def sums(rows: Sequence[Row]) -> list[Sum]:
    """Every promise, recomputed from `rows`."""
    with_class = [row for row in rows if row["status"] != "no model"]
    ran = [row for row in rows if runs(row)]
    wrong = [row["model_type"] for row in rows if row["status"] == "wrong"]
    compared = sum(row["status"] != "not compared" for row in ran)
    folded = count(ran, "norm", "fold")
    on_request = sum(row["foldable_on_request"] for row in ran)
    unshared = sum(row["unshared"] for row in ran)
    candidates = [row for row in ran if sites(row, "norm") or sites(row, "activation")]
    untouched = [row["model_type"] for row in candidates if not rewrites(row)]
    touched = len(candidates) - len(untouched)
    unexplained = sum(row["unexplained"] for row in ran)
    return [
        Sum("model types built and run", f"{len(ran)} of {len(with_class)}", ">= 690 of 774", len(ran) >= 690),
        Sum(
            "model types where patched and stock disagree",
            f"{', '.join(wrong) or 0} of {compared} compared",
            "0",
            not wrong,
        ),
        Sum(
            "norms folded, each proved in fp64",
            f"{folded + on_request} of {sites_of(ran, 'norm')} ({folded} by default, {on_request} on request)",
            ">= 3450",
            folded + on_request >= 3450,
        ),
        Sum("norms of the last dimension neither folded nor shared", str(unshared), "0", unshared == 0),
        Sum(
            "model types with a norm or an activation in which something is rewritten",
            f"{touched} of {len(candidates)} ({_share(touched, len(candidates))})",
            ">= 98 %",
            touched >= 0.98 * len(candidates),
        ),
        Sum("sites left without a reason", str(unexplained), "0", unexplained == 0),
        _peaks("with a loss over a vocabulary", [row for row in ran if row.get("has_loss_head")], 0.50),
        _peaks("without one", [row for row in ran if not row.get("has_loss_head")], 0.30),
    ]


def _peaks(which: str, rows: Sequence[Row], wanted: float) -> Sum:
    """The average saving of a step's peak; every type counts once. Rows of an older file have none."""
    pairs = [pair for row in rows if (pair := row.get("step_peak"))]
    saved = fmean(1 - patched / stock for stock, patched in pairs) if pairs else 0.0
    text = f"-{_share(saved, 1)} on average of {len(pairs)} types" if pairs else "not measured"
    name = f"peak of a training step at real widths, 3 layers, {which}"
    return Sum(name, text, f"-{100 * wanted:.0f} % or more", saved >= wanted, is_mean=True)


def lost(before: Iterable[Row], now: Iterable[Row]) -> list[str]:
    """What held in the rows `before` and does not hold `now`: a type that ran, a comparison, a fold that was proved."""
    rows = {row["model_type"]: row for row in now}
    losses = []
    for old in before:
        name = old["model_type"]
        new = rows.get(name)
        if not runs(old) or new is None:  # a type that a release has dropped is no loss of ours
            continue
        if not runs(new):
            losses.append(f"{name} ran before: {new['reason']}")
        elif new["status"] == "not compared" != old["status"]:
            losses.append(f"{name} was compared before: {new['reason']}")
        elif count([new], "norm", "fold") < count([old], "norm", "fold"):
            folds = [count([row], "norm", "fold") for row in (old, new)]
            losses.append(f"{name}: {folds[0]} norms were folded, now {folds[1]}")
    return losses


def runs(row: Row) -> bool:
    """Whether the type was built and ran, right, wrong or impossible to compare."""
    return row["status"] in ("ok", "wrong", "not compared")


def count(rows: Iterable[Row], kind: str, *actions: str) -> int:
    """Sites of `kind` to which one of `actions` happens."""
    return sum(row["counts"].get(kind, {}).get(action, 0) for row in rows for action in actions)


def sites(row: Row, kind: str) -> int:
    """Sites of `kind`, whatever happens to them."""
    return sum(row["counts"].get(kind, {}).values())


def sites_of(rows: Iterable[Row], kind: str) -> int:
    """Sites of `kind` in all `rows`."""
    return sum(sites(row, kind) for row in rows)


def rewrites(row: Row) -> int:
    """Sites of a row that are not left as they were."""
    every = ((action, number) for actions in row["counts"].values() for action, number in actions.items())
    return sum(number for action, number in every if action not in (LEFT, READS))


def block_bytes(rows: Iterable[Row]) -> tuple[int, int, int]:
    """(stock, patched, types): bytes that one more layer keeps, over the types where that could be measured."""
    pairs = [row["block_bytes"] for row in rows if row["block_bytes"]]
    return sum(stock for stock, _ in pairs), sum(patched for _, patched in pairs), len(pairs)


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "0 %"
