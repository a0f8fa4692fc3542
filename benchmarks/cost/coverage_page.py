"""docs/coverage.md from the rows of `benchmarks.coverage`. Text only: nothing is computed here but sums."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from benchmarks.families_page import families_section
from tests.zoo.coverage_sums import Row, Sum, block_bytes, count, runs, sites, sums

_INTRO = """\
## Every model type

Written by `make coverage`; do not edit. `python -m benchmarks.coverage --check` recomputes the sums from coverage.json.

Every model type of transformers {transformers} that has a model class is built small and random from its default
config (its head class where there is one), driven with inputs made from its forward's signature and its config, walked,
planned with recipe `exact`, patched and compared. torch {torch}, Python {python}, CPU.

- **Right** means: in fp64, in eval and in train mode, for every call that runs, all outputs and the gradient of every
  parameter of the patched model equal the stock model's to 1e-9, with the original weights and with folded ones.
- **Recipes for long training**: `python -m benchmarks.coverage --ways` compares steps with checkpointed blocks, tiles,
  kept attention, offloaded inputs and recomputed outputs of linears alike (benchmarks/results/zoo_ways.json).
- **Norms**: folded (by default + on request, where only an auxiliary output changes) / shared / left, of those found.
- **MLPs** are gated ones. **Activations**: recomputed in backward / left.
- **Layer** is what one more layer keeps for backward (3 layers less 2; bf16, no dropout): patched less stock. Empty
  where the config has no depth to change, or bytes were not measured.
"""


def page(document: Mapping[str, Any], families: Mapping[str, Any] | None = None) -> str:
    """The whole page; `families` is what `benchmarks.families` wrote."""
    rows = document["rows"]
    parts = [
        "# Coverage\n",
        "What memopt does in every model type of transformers, and what a layer and a step then keep.\n",
        *(families_section(families) if families else ()),
        _INTRO.format(**document["versions"]),
        *_sums("Sums", [each for each in sums(rows) if not each.is_mean]),
        *_libraries(document.get("libraries", [])),
        *_table(rows),
        *_not_run(rows),
        *_reasons(rows),
        *_sums("Means over all types", [each for each in sums(rows) if each.is_mean]),
    ]
    return "\n".join(parts).rstrip() + "\n"


def _sums(title: str, results: list[Sum]) -> Iterator[str]:
    yield f"## {title}\n"
    yield "| | | wanted |\n|---|---|---|"
    for result in results:
        mark = "" if result.holds else " **short**"
        yield f"| {result.name} | {result.text}{mark} | {result.target} |"
    yield ""


_OF_LIBRARIES = """\
## Models of other libraries

Written by `python -m benchmarks.coverage --libraries`, where the libraries are installed. `memopt.patch(model)` gets no
inputs: it guesses them. Models are small and random. **Saved** is what a whole forward saves for backward (fp32, batch
2), stock and patched, in KiB. **Right**: outputs and every gradient equal stock's to 1e-9 in fp64, in eval and in train
mode, on a batch that memopt has not seen.

| library | model | patched | saved | | right |
|---|---|---|---:|---:|---|"""


def _libraries(rows: list[Row]) -> Iterator[str]:
    if not rows:
        return
    yield _OF_LIBRARIES
    for row in rows:
        library = f"{row['library']} {row['version']}".strip()
        if row["saved_bytes"] is None:
            yield f"| {library} | {row['model']} | | | | {row['status']}: {_escaped(row['reason'])} |"
            continue
        stock, patched = row["saved_bytes"]
        sizes = f"{stock / 1024:.0f} -> {patched / 1024:.0f} | {100 * (patched - stock) / stock:+.0f} %"
        right = "yes" if row["status"] == "ok" else f"**no**: {_escaped(row['reason'])}"
        yield f"| {library} | {row['model']} | {row['patched']} | {sizes} | {right} |"
    yield ""


def _table(rows: list[Row]) -> Iterator[str]:
    yield "## Model types that run\n"
    yield "| type | class | norms | MLPs | activations | linears | layer | right |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in filter(runs, rows):
        yield "| " + " | ".join(_cells(row)) + " |"
    yield ""


def _cells(row: Row) -> Iterator[str]:
    yield row["model_type"]
    yield row["model_class"]
    folded, shared, left = (count([row], "norm", action) for action in ("fold", "share", "keep"))
    more = row["foldable_on_request"]
    yield (
        f"{folded}{f'+{more}' if more else ''} / {shared - more} / {left} of {sites(row, 'norm')}"
        if sites(row, "norm")
        else ""
    )
    yield str(count([row], "gated_mlp", "recompute") or "")
    yield (
        f"{count([row], 'activation', 'recompute')} / {count([row], 'activation', 'keep')}"
        if sites(row, "activation")
        else ""
    )
    yield str(sites(row, "linear") or "")
    stock, patched, measured = block_bytes([row])
    yield f"{100 * (patched - stock) / stock:+.0f} %" if measured else ""
    yield {"ok": "yes", "wrong": f"**no**: {row['reason']}"}.get(row["status"], _escaped(row["reason"]))


def _not_run(rows: list[Row]) -> Iterator[str]:
    yield "## Model types that do not run here\n"
    yield "| type | reason |\n|---|---|"
    for row in rows:
        if row["status"] in ("not built", "not run"):
            yield f"| {row['model_type']} | {_escaped(row['reason'])} |"
    without = [row["model_type"] for row in rows if row["status"] == "no model"]
    yield f"\nWithout a model class of their own: {', '.join(without)}.\n"


def _reasons(rows: list[Row]) -> Iterator[str]:
    titles = (("norm", "not folded, or left"), ("activation", "left"), ("gated_mlp", "left"))
    for kind, what in titles:
        totals: Counter[str] = Counter()
        types: Counter[str] = Counter()
        for row in filter(runs, rows):
            seen: set[str] = set()
            for reason, number in row["reasons"].get(kind, {}).items():
                for part in _parts(reason):
                    totals[part] += number
                    seen.add(part)
            types.update(seen)
        if not totals:
            continue
        yield f"## Why a {kind.replace('_', ' ')} is {what}\n"
        yield "A site can have several reasons.\n"
        yield "| reason | sites | types |\n|---|---:|---:|"
        for reason, number in totals.most_common():
            yield f"| {_escaped(reason)} | {number} | {types[reason]} |"
        yield ""


def _parts(reason: str) -> Iterable[str]:
    """The single reasons in a sentence, without the names of modules and numbers that differ from site to site."""
    for part in reason.removeprefix("not folded: ").split("; "):
        general = re.sub(r" \([^()]*\)", "", part)
        general = re.sub(r"\b[\w*]+(\.[\w*]+)+\b", "…", general)
        yield re.sub(r"\b\d+(\.\d+)?(e-?\d+)?\b", "#", general)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
