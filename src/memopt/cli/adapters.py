"""`memopt patch --adapter` and `memopt unpatch --adapter`: an adapter for the other form of its model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from memopt.cli import common

AdapterOption = Annotated[
    Path | None,
    typer.Option(
        "--adapter",
        metavar="DIR",
        help="Convert this PEFT adapter instead: between the stock model and the folded one, same function.",
        show_default=False,
    ),
]


def convert(command: str, adapter: Path, model: str, out: Path | None, *, json_output: bool, **options: Any) -> int:
    """Convert `adapter` and print what was done; `options` are those of `memopt.adapters.convert_adapter`."""
    with common.only_results_on_stdout():
        from memopt.adapters import convert_adapter

        result = convert_adapter(adapter, model, out, note=lambda text: common.note(f"note: {text}"), **options)
    with common.result(f"'{result.out}' was written and is complete."):
        if json_output:
            fields = {
                "adapter": str(result.adapter),
                "output": str(result.out),
                "fits": dataclasses.asdict(result.fits),
                "base": result.base,
                "changed": result.changed,
                "tensors": result.tensors,
                "notes": result.notes,
            }
            common.print_json(common.document(command, "pass", model=model, **fields))
            return common.EXIT_OK
        tensors = f"{len(result.changed)} of {common.plural(result.tensors, 'tensor')} changed"
        common.say(f"Wrote {result.out}: an adapter of the {result.fits.form} model, {tensors}; the same function.")
        load = "memopt.load" if result.fits.form == "folded" else "from_pretrained"
        if result.fits.form == "folded" and not Path(result.base).is_dir():
            common.say("Next:", f"  memopt patch {common.quoted(model)} --out {common.quoted(result.base)}")
        common.say(f"In Python: PeftModel.from_pretrained({load}({result.base!r}), {str(result.out)!r})")
    return common.EXIT_OK
