"""Bytes that a block keeps for backward with sampled linears, storage by storage.

    python -m benchmarks.sampled_bytes            print the tables
    python -m benchmarks.sampled_bytes --check    and exit 1 where a number falls short of its target

First the MLP tail (what activation and second linear keep) of blocks with an ungated GELU, full tuning in bf16, exact
and with the recipe `sampled`: 8 units stock, at most 1.8 wanted.

Then every storage of one encoder block of an unmodified T5 (ReLU, eager attention, dropout 0.1, fp32), the model of the
paper (arXiv 2305.15265): full tuning and LoRA of rank 32 on query, key and value, stock and with the recipe `wta-crs`
at 0.3. Dropout masks count as on a CUDA device, one byte an element. The paper's own factors are those of the whole
memory on an A100, with weights and optimizer, and with the products inside attention sampled as well, which is not
done here; they stand beside, for the reader to compare.

One unit is tokens x hidden size x bytes of the dtype. Storages count once, whoever holds them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import nn

import memopt
from benchmarks import saved_bytes
from benchmarks.measure import EXIT_OK, EXIT_SHORT, write_json
from memopt.trace.account import SavedStorage, account
from memopt.trace.emulate import CudaChoices
from memopt.walk.observe import walk_model

HIDDEN, HEADS, TOKENS, BATCH, RANK = 512, 8, 128, 8, 32
MOST_TAIL = 1.8
#: What the paper reports for T5-base against full tuning (its Table 2): peak memory, everything counted.
PUBLISHED = {"full, wta-crs": 2.1, "LoRA": 1.3, "LoRA, wta-crs": 2.7}
LINEAR_INPUTS = frozenset({"linear input", "sampled rows"})
LEAST_RATIO = 2.1


@dataclass(frozen=True)
class Tail:
    """What the activation and the second linear of one MLP keep, in units."""

    model: str
    recipe: str
    block: float
    tail: float


@dataclass(frozen=True)
class Line:
    """Storages of one kind in one block of T5, in units, by column of :data:`COLUMNS`."""

    what: str
    units: tuple[float, ...]


#: Name -> (recipe, changes, LoRA).
COLUMNS: dict[str, tuple[str | None, tuple[str, ...], bool]] = {
    "full": (None, (), False),
    "full, exact": ("exact-unfolded", ("dropouts.method=seed",), False),
    "full, wta-crs": ("wta-crs", (), False),
    # Stock norms, so that q, k, v and wi alone hold their inputs, and all of them are sampled.
    "full, linears only": ("wta-crs", ("norms.method=none", "activations.relu=none", "dropouts.method=none"), False),
    "LoRA": (None, (), True),
    "LoRA, wta-crs": ("wta-crs", (), True),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="exit 1 where a number falls short of its target")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers to FILE")
    arguments = parser.parse_args(argv)
    torch.manual_seed(0)
    tails = [tail for model in ("ViT", "BERT") for tail in tails_of(model)]
    lines = t5_lines()
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(tail_table(tails))
    console.print(t5_table(lines))
    if arguments.json:
        columns, rows = list(COLUMNS), [asdict(line) for line in lines]
        write_json(
            arguments.json, {"tails": [asdict(tail) for tail in tails], "t5": {"columns": columns, "rows": rows}}
        )
    short = list(shortfalls(tails, lines))
    for line in short:
        print(f"falls short: {line}", file=sys.stderr)
    return EXIT_SHORT if arguments.check and short else EXIT_OK


def shortfalls(tails: Sequence[Tail], lines: Sequence[Line]) -> list[str]:
    """One sentence for each target that is missed."""
    found = [
        f"{tail.model}: the MLP keeps {tail.tail:.2f} units, at most {MOST_TAIL} wanted"
        for tail in tails
        if tail.recipe == "sampled" and not tail.tail <= MOST_TAIL
    ]
    ratio = linear_inputs(lines, "full") / linear_inputs(lines, "full, linears only")
    if ratio < LEAST_RATIO:
        found.append(f"T5: inputs of linears shrink {ratio:.2f} times, at least {LEAST_RATIO} wanted")
    return found


def tails_of(model: str) -> list[Tail]:
    """Of one block in full tuning, exact and sampled."""
    build, inputs, tokens = {
        "ViT": (saved_bytes._vit, saved_bytes._image, 2 * 197),
        "BERT": (saved_bytes._bert, saved_bytes._text, 512),
    }[model]
    unit = tokens * saved_bytes.HIDDEN * saved_bytes.DTYPE.itemsize
    tails = []
    for recipe in (None, "exact-unfolded", "sampled"):
        stock = build(3).to(saved_bytes.DTYPE).train()
        batch = inputs()
        kept = _kept_by_a_block(stock, recipe, (), lambda model, batch=batch: model(**batch))
        mlp = [row for row in kept if _is_mlp(row, 4 * saved_bytes.HIDDEN)]
        tails.append(Tail(model, recipe or "stock", _units(kept, unit), _units(mlp, unit)))
    return tails


def _is_mlp(row: SavedStorage, width: int) -> bool:
    """Whether it is as wide as the MLP, or a code, or says which rows of such a tensor were kept."""
    return row.shape[-1:] == (width,) or row.cause in ("codes", "sampled rows")


def t5_lines() -> list[Line]:
    """Every storage of an encoder block that is not tiny, by kind and holder."""
    unit = BATCH * TOKENS * HIDDEN * torch.float32.itemsize
    ids = torch.randint(3, 1000, (BATCH, TOKENS))

    def run(model: nn.Module) -> Any:
        with CudaChoices():
            return model(input_ids=ids)

    table: dict[str, list[float]] = {}
    for column, (recipe, changes, lora) in enumerate(COLUMNS.values()):
        model = _t5(lora)
        for row in _kept_by_a_block(model, recipe, changes, run):
            cells = table.setdefault(_in_words(row), [0.0] * len(COLUMNS))
            cells[column] += row.nbytes / unit
    return [Line(what, tuple(units)) for what, units in table.items()]


def _kept_by_a_block(model: nn.Module, recipe: str | None, changes: tuple[str, ...], run: Any) -> list[SavedStorage]:
    """The second block's storages."""
    sites = walk_model(model)
    if recipe is not None:
        memopt.patch(model, memopt.load_recipe(recipe, changes))

    return account(model, lambda: run(model), blocks=sites.blocks, sites=sites).of_block(sites.blocks[1])


def _t5(lora: bool) -> nn.Module:
    config = transformers.T5Config(
        d_model=HIDDEN,
        d_kv=HIDDEN // HEADS,
        d_ff=4 * HIDDEN,
        num_heads=HEADS,
        num_layers=3,
        vocab_size=1000,
        dropout_rate=0.1,
        attn_implementation="eager",
    )
    model: Any = transformers.T5EncoderModel(config).train()
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=RANK, lora_dropout=0.0, target_modules=["q", "k", "v"]))
    return model


def _in_words(row: SavedStorage) -> str:
    cause = str(row.cause)
    last = [module.split(".") for module, _ in row.savers]
    names = sorted({part for module in last for part in module[-3:] if part in _NAMES})
    small = row.nbytes < 0.01 * BATCH * TOKENS * HIDDEN * 4
    if small:
        return "statistics, indices and weights of rows"
    return f"{cause}: {', '.join(names)}" if names else cause


_NAMES = frozenset({"q", "k", "v", "o", "wi", "wo", "act", "lora_B", "DenseReluDense", "SelfAttention", "layer_norm"})


def linear_inputs(lines: Sequence[Line], column: str) -> float:
    """Units of inputs that linears hold, whole or as rows; a norm's output that the norm keeps too is not theirs."""
    number = list(COLUMNS).index(column)
    return sum(line.units[number] for line in lines if line.what.partition(":")[0] in LINEAR_INPUTS)


def _units(rows: Sequence[SavedStorage], unit: int) -> float:
    return sum(row.nbytes for row in rows) / unit


def tail_table(tails: Sequence[Tail]) -> Table:
    """The MLP tails for people."""
    result = Table(title="Ungated GELU blocks, bf16, full tuning: units a block", title_justify="left")
    for name in ("model", "recipe"):
        result.add_column(name, no_wrap=True)
    for name in ("block", "of which the MLP's tail"):
        result.add_column(name, justify="right", no_wrap=True)
    for tail in tails:
        result.add_row(tail.model, tail.recipe, f"{tail.block:.2f}", f"{tail.tail:.2f}")
    return result


def t5_table(lines: Sequence[Line]) -> Table:
    """T5's storages for people."""
    title = "T5 encoder block (ReLU, eager attention, dropout 0.1, fp32): units a block"
    result = Table(title=title, title_justify="left")
    result.add_column("kept", overflow="fold")
    for column in COLUMNS:
        result.add_column(column, justify="right")
    for line in lines:
        result.add_row(line.what, *(f"{units:.2f}" if units else "" for units in line.units))
    result.add_section()
    totals = [sum(line.units[i] for line in lines) for i in range(len(COLUMNS))]
    result.add_row("the block", *(f"{total:.2f}" for total in totals), style="bold")
    result.add_row("stock, full / this", *(f"{totals[0] / total:.2f}x" for total in totals))
    inputs = [linear_inputs(lines, column) for column in COLUMNS]
    result.add_row("inputs of linears", *(f"{units:.2f}" for units in inputs))
    result.add_row("stock, full / this", *(f"{inputs[0] / units:.2f}x" for units in inputs))
    published = [f"{PUBLISHED[column]}x" if column in PUBLISHED else "" for column in COLUMNS]
    result.add_row("published, whole memory of T5-base", *published)
    return result


if __name__ == "__main__":
    raise SystemExit(main())
