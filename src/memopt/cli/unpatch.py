"""`memopt unpatch`: the stock form of a patched folder. Options and printing around `memopt.pipeline`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memopt.cli import common
from memopt.cli.patch import AdapterOption, convert
from memopt.environment.files import patched_folder_at

if TYPE_CHECKING:
    from memopt.pipeline import UnpatchResult


def unpatch(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="A folder that `memopt patch` wrote, before or after training.", show_default=False
        ),
    ],
    against: common.AgainstOption = None,
    out: Annotated[
        Path | None, common.optional("Folder to write; default: ./NAME-unpatched.", "DIR", "--out", "-o")
    ] = None,
    adapter: AdapterOption = None,
    trust_remote_code: common.TrustOption = False,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read pytorch_model.bin of MODEL if it has no safetensors file.")
    ] = False,
    json_output: common.JsonOption = False,
) -> int:
    """Write the stock form of DIR: move folded weights from the linears back into their norms.

    Tensors that were not trained are the original's, bit by bit. Exits with 1 if a norm had to keep its folded form.
    With --adapter the result is an adapter for the stock model, from one that was trained on DIR.
    """
    if adapter is not None:
        return convert(
            "unpatch",
            adapter,
            str(directory),
            out,
            json_output=json_output,
            back=True,
            against=against,
            trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle,
        )
    # Errors that show without torch, which takes seconds to import.
    from memopt.checkpoint.patched import patched_folder

    patched_folder(patched_folder_at(directory))
    with common.only_results_on_stdout(), common.progress("Restoring") as progress:
        from memopt.pipeline import unpatch_checkpoint

        result = unpatch_checkpoint(
            directory,
            against,
            out,
            trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle,
            progress=progress,
            note=lambda text: common.note(f"note: {text}"),
        )
    code = common.EXIT_NEGATIVE if result.unfolded.kept else common.EXIT_OK
    if json_output:
        fields = {**dataclasses.asdict(result.unfolded), "notes": result.notes, "output": str(result.out)}
        common.print_json(common.document("unpatch", "fail" if code else "pass", model=str(directory), **fields))
    else:
        common.say(*_summary(result))
    return code


def _summary(result: UnpatchResult) -> list[str]:
    done = result.unfolded
    lines = [f"Wrote {result.out}: a stock checkpoint, {common.plural(len(done.norms), 'fold')} taken back."]
    if done.original:
        lines.append(f"{common.plural(len(done.original), 'tensor')} as in the original, bit by bit.")
    if done.computed:
        lines.append(f"{common.plural(len(done.computed), 'trained tensor')} divided by the scales, rounded once.")
    if done.kept:
        norms = ", ".join(name for name, _ in done.kept)
        lines.append(f"It computes the same function, but these norms keep their folded form (see the notes): {norms}")
    return [*lines, "Next:", f"  memopt patch {common.quoted(result.out)}"]
