"""What the commands of the catalogue and of the clean runs share: which part of a long list, and its results."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slice", type=_parsed, default=(1, 1), metavar="I/N", help="every Nth from the Ith on")
    parser.add_argument("--only", default="", metavar="TEXT", help="those whose name contains this")
    parser.add_argument("--list", action="store_true", help="print what there is and run nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")


def choose(items: Sequence[T], options: argparse.Namespace) -> list[T]:
    """The part of `items` that the options name."""
    number, count = options.slice
    return [item for item in items if options.only in str(item)][number - 1 :: count]


def summary(results: Sequence[Any]) -> str:
    """How many have each `outcome`, and the processor's `seconds`."""
    counts = Counter(result.outcome for result in results)
    words = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    return f"{words}; {sum(result.seconds for result in results):.0f} CPU seconds"


def write_json(options: argparse.Namespace, results: Sequence[Any]) -> None:
    if options.json is not None:
        options.json.write_text(json.dumps([dataclasses.asdict(result) for result in results], indent=1) + "\n")


def _parsed(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"'{text}' is not I/N with I from 1 to N")
    return int(number), int(count)
