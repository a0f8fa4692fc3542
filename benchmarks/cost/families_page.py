"""The table of families at the top of docs/coverage.md, from the rows of `benchmarks.families`. Text only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.family_list import CAUSES, LIMIT, PUBLISHERS

GIB = 1 << 30
_INTRO = """\
## The families that are fine-tuned most

Written by `python -m benchmarks.families`; do not edit. `python -m benchmarks.families --check` traces the
layers of three families again. Real widths, bf16, full tuning, no dropout, traced on fake
tensors (torch {torch}, transformers {transformers}, Python {python}, CPU): **nothing here was measured on a GPU**.

**Order.** No public ranking of single families was found. Families are ordered by their publisher, and publishers
by the number of models on the Hugging Face hub that were made of theirs: {publishers} (data set
`irenesolaiman/hf-derivatives-monthly`, whose table has the first 20 organisations). Families of other publishers
come last. Within a publisher the order is ours. Of language models alone, Qwen has 69 % of new derivatives (The
ATOM Report, arXiv 2604.07190, February 2026).

**A layer** keeps so many units for backward: units of its input, tokens x hidden size x 2 bytes, at about 4k
tokens. Where kinds of layers alternate, it is the mean of one group. The **floor** is the least that an exact
method without extra products keeps, [computed from the stock forward](methods.md#the-floor). No ratio should be
above {limit}.

**Kernels** are the recommended ones: FlashAttention, also for attention over a window; flash-linear-attention,
mamba-ssm and causal-conv1d if the model's code calls them. What they keep is what their own code saves
(`memopt.trace.kernels`). Attention that transformers computes in its own code (Gemma 2, gpt-oss, DeBERTa) is traced
so.

**Peaks** of a step of the whole model, in GiB of activations: weights, their gradients and the optimizer do not
count. *Free* is what others give away: transformers' activation checkpointing of every layer (`every_n_layers=1`,
its least) with a loss in chunks of 16 parts of the rows. That loss is [our yardstick](benchmarks.md) for the ones
of TRL and Liger, which were not run: Liger's kernels need a GPU. Models that are no causal language models have no
such loss. *Offload* is free with transformers' `offload=True`, by its rule: it holds the inputs of the blocks on
the host, all but one, so it takes at least so much. *Both* is memopt with the same checkpointing.
"""


#: Part of a storage -> letter in the table.
_LETTERS = {
    "saved tensors": "s",
    "recomputed": "r",
    "activation gradients": "g",
    "temporaries": "t",
    "loss": "l",
}
_LARGEST = """\
What lives at the peak of *both* at about 32k tokens: the five largest, each with its module in the block and the
operation that made it, in GiB, and why it must live:

- *inputs of blocks*: the second run of each block begins with its input. Offload moves them to the CPU.
- (s): another tensor that the forward saved; the backward of the module reads it.
- (r): made in the second run of one block. Its backward reads it, or the variables of a function that still runs
  refer to it (experts). [Tiles of tokens](training.md#tiles-of-tokens) make those of MLPs and experts small.
- (g): the gradient of an activation, on its way back; (t): inside of one operation; (l): a part of the logits.
"""


def families_section(document: Mapping[str, Any]) -> Iterator[str]:
    """Everything under the heading of the families."""
    publishers = ", ".join(f"{name} {count:,}" for name, count in PUBLISHERS.items())
    yield _INTRO.format(**document["versions"], publishers=publishers, limit=LIMIT)
    yield "| family | widths of | size | stock | memopt | floor | ratio |\n|---|---|---|---:|---:|---:|---:|"
    for row in document["rows"]:
        yield "| " + " | ".join(_layer_cells(row)) + " |"
    yield ""
    yield "Peaks at about 4k and 32k tokens:\n"
    names = ("stock", "memopt", "free", "offload", "both")
    yield f"| family | {' | '.join(names)} | {' | '.join(f'32k: {name}' for name in names)} |"
    yield f"|---|{10 * '---:|'}"
    for row in document["rows"]:
        yield (
            f"| {row['name']} | "
            + " | ".join(cell for size in row["peaks"] or ({}, {}) for cell in _peak_cells(size))
            + " |"
        )
    yield ""
    yield _LARGEST
    yield "| family | GiB | the largest |\n|---|---:|---|"
    for row in document["rows"]:
        peak = row["peaks"][-1].get("memopt + ck") if row["peaks"] else None
        if peak is not None:
            yield f"| {row['name']} | {peak / GIB:.2f} | {', '.join(map(_item, row['largest']))} |"
    yield ""
    yield from _beyond(document["rows"])


def _item(largest: tuple[str, str, int, int]) -> str:
    """A cell's part: why it lives, how many there are, the module in its block and the operation, GiB."""
    part, what, count, nbytes = largest
    many = f"{count} " if count > 1 else ""
    if what == "inputs of blocks":
        return f"{many}{what} {nbytes / GIB:.2f}"
    module, _, operation = what.rpartition("*.")[2].rpartition(" ")
    return f"({_LETTERS[part]}) {many}{module} `{operation}` {nbytes / GIB:.2f}".replace("*.", "")


def _layer_cells(row: Mapping[str, Any]) -> Iterator[str]:
    yield row["name"]
    yield row["model"]
    yield row["size"]
    yield from (f"{row[name] / row['unit']:.2f}" for name in ("stock", "memopt", "floor"))
    yield f"**{row['ratio']:.2f}**" if row["ratio"] > LIMIT else f"{row['ratio']:.2f}"


def _peak_cells(size: Mapping[str, int]) -> Iterator[str]:
    offloaded = {"offload": size["free"] - size["inputs"]} if "free" in size else {}
    both = {"both": size["memopt + ck"]} if "memopt + ck" in size else {}
    for name in ("stock", "memopt", "free", "offload", "both"):
        nbytes = {**size, **offloaded, **both}.get(name)
        yield "not traced" if nbytes is None else f"{nbytes / GIB:.2f}"


def _beyond(rows: list[Mapping[str, Any]]) -> Iterator[str]:
    yield "Why a family is more than 2 % above its floor:\n"
    yield "| family | ratio | kept beyond the floor | units |\n|---|---:|---|---:|"
    for row in rows:
        if row["ratio"] > 1.02:
            units = (row["memopt"] - row["floor"]) / row["unit"]
            yield f"| {row['name']} | {row['ratio']:.2f} | {CAUSES.get(row['name'], 'not examined')} | {units:.2f} |"
    yield ""
