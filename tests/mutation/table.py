"""Writes the results of the catalogue and of the clean runs into docs/verify.md.

python -m tests.mutation.table FILE...   files that `--json` of either command wrote, slices too
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.mutation.catalogue import GOOD

DOCS = Path(__file__).resolve().parents[2] / "docs" / "verify.md"
#: The section is what stands between these lines.
_FIRST, _LAST = "<!-- python -m tests.mutation.table writes from here -->", "<!-- to here -->"
_Record = dict[str, Any]


def main(arguments: Sequence[str]) -> int:
    """The command; returns its exit code."""
    records: list[_Record] = [record for name in arguments for record in json.loads(Path(name).read_text())]
    faults = _each_once([record for record in records if "fault" in record])
    clean = _each_once([record for record in records if "checkpoint" in record])
    before, _, rest = DOCS.read_text().partition(_FIRST)
    after = rest.partition(_LAST)[2]
    DOCS.write_text("\n".join((before + _FIRST, "", *_section(faults, clean), "", _LAST)) + after)
    return 0


def _each_once(records: list[_Record]) -> list[_Record]:
    """The last result of each row or run."""
    names = ("kind", "fault", "size", "architecture", "dtype", "checkpoint", "recipe")
    return list({tuple(record.get(name) for name in names): record for record in records}.values())


def _section(faults: list[_Record], clean: list[_Record]) -> Iterator[str]:
    outcomes = Counter(record["outcome"] for record in faults)
    groups: dict[tuple[str, str], list[_Record]] = {}
    for record in faults:
        groups.setdefault((record["kind"], record["fault"]), []).append(record)
    architectures = sorted({record["architecture"] for record in faults})
    yield (
        f"{len(groups)} faults in {len(faults)} rows, each one size of a fault in a folder of one architecture "
        f"({', '.join(architectures)}) and dtype: {_counts(outcomes)}."
    )
    if clean:
        families = {record["checkpoint"].rsplit("-", 3)[0] for record in clean}  # then weights, seed and dtype
        recipes = {record["recipe"] for record in clean}
        yield ""
        yield (
            f"{len(clean)} clean runs over {len(families)} architectures and {len(recipes)} recipes: "
            f"{_counts(Counter(record['outcome'] for record in clean))}."
        )
    yield ""
    yield "| where | fault | sizes | rows | caught by | for example in |"
    yield "|---|---|---|---:|---|---|"
    for (kind, fault), records in groups.items():
        caught = [record for record in records if record["outcome"] == "caught"]
        others = Counter(record["outcome"] for record in records if record["outcome"] != "caught")
        by = ", ".join(_most_common(f"`{record['check']}`" for record in caught))
        sizes = ", ".join(f"{100 * size:g} %" for size in sorted({record["size"] or 0 for record in records}) if size)
        place = f"`{caught[0]['place']}` ({caught[0]['architecture']})" if caught else ""
        rows = f"{len(caught)}" + "".join(f" + {count} {outcome}" for outcome, count in sorted(others.items()))
        yield f"| {kind} | {fault} | {sizes} | {rows} | {by} | {place} |"


def _most_common(words: Iterable[str]) -> list[str]:
    return [word for word, _ in Counter(words).most_common()]


def _counts(outcomes: Counter[str]) -> str:
    good = [each for each in (*GOOD, "clean") if each in outcomes]
    names = [*good, *sorted(outcomes.keys() - {*good})]
    return ", ".join(f"{outcomes[name]} {name}" for name in names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
