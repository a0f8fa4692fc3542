"""`memopt patch`: write a patched checkpoint. Options and printing around `memopt.pipeline`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memopt.cli import common
from memopt.environment.files import format_bytes, inputs_file, model_folder
from memopt.errors import UsageError

if TYPE_CHECKING:
    from memopt.pipeline import PatchResult

AdapterOption = Annotated[
    Path | None,
    common.optional(
        "Convert this PEFT adapter instead, between the stock model and the folded one. Its function stays the same.",
        "DIR",
    ),
]
_FOLD_SENTENCE = (
    "Folding keeps the function: the loss at step 0 is the same. It changes the parameters, so training then takes\n"
    "another path than the stock model. `--recipe exact-unfolded` or `--set norms.fold=none` keeps the path."
)


def patch(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A local folder or a hub id.", show_default=False)],
    out: Annotated[
        Path | None, common.optional("Folder to write; default: ./NAME-memopt.", "DIR", "--out", "-o")
    ] = None,
    recipe: Annotated[
        str,
        typer.Option(
            "--recipe",
            "-r",
            metavar="NAME|FILE",
            help="Name or YAML file; see `memopt recipes`.",
            autocompletion=common.recipe_names,
        ),
    ] = "exact",
    settings: Annotated[
        list[str] | None, common.optional("Change a key of the recipe; repeatable.", "KEY=VALUE", "--set")
    ] = None,
    adapter: AdapterOption = None,
    inputs: common.InputsOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done and write nothing.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a folder that memopt wrote and nobody changed.")
    ] = False,
    emit: common.EmitOption = None,
    revision: common.RevisionOption = None,
    trust_remote_code: common.TrustOption = False,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read pytorch_model.bin if there is no safetensors file.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print a row for every site of the model, with its reason.")
    ] = False,
    json_output: common.JsonOption = False,
) -> int:
    """Write a patched checkpoint of MODEL.

    The result is a plain checkpoint with the same tensor names; stock transformers loads it too. With --adapter the
    result is an adapter for the patched folder, from one that was trained on MODEL (MODEL may be that folder).
    """
    if adapter is not None:
        if dry_run or force or emit or inputs is not None:
            raise UsageError("--adapter does not take --dry-run, --force, --emit or --inputs.", "Leave them out.")
        return convert(
            "patch",
            adapter,
            model,
            out,
            json_output=json_output,
            recipe=recipe,
            overrides=settings or (),
            revision=revision,
            trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle,
        )
    # Errors that show without torch, which takes seconds to import.
    from memopt.checkpoint.target import check_target, default_folder
    from memopt.emit import check_kinds
    from memopt.plan.recipe import load_recipe

    check_kinds(emit or ())
    folder = model_folder(model, revision)
    if inputs is not None:
        inputs_file(inputs)
    load_recipe(recipe, settings or ())
    if folder is not None and not dry_run:
        check_target(default_folder(model) if out is None else out, folder, force=force)
    with common.only_results_on_stdout(), common.progress("Writing") as progress:
        from memopt.pipeline import patch_checkpoint

        result = patch_checkpoint(
            model,
            out,
            recipe,
            overrides=settings or (),
            inputs=inputs,
            revision=revision,
            trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle,
            force=force,
            dry_run=dry_run,
            emit=emit or (),
            opened=lambda source: common.note(
                f"Read {common.plural(len(source.tensors), 'tensor')} of {source.model}; observing its data flow"
            ),
            progress=progress,
            note=lambda text: common.note(f"note: {text}"),
        )
    complete = f"'{result.out}' was written and is complete." if result.written else "Nothing was written."
    with common.result(complete):
        if json_output:
            common.print_json(_document(result))
        else:
            _print(result, verbose)
    return common.EXIT_OK


def convert(command: str, adapter: Path, model: str, out: Path | None, *, json_output: bool, **options: Any) -> int:
    """Convert `adapter` and print what was done; `options` are those of `memopt.convert_adapter`."""
    with common.only_results_on_stdout():
        from memopt.checkpoint.adapters.verb import convert_adapter

        result = convert_adapter(adapter, model, out, note=lambda text: common.note(f"note: {text}"), **options)
    with common.result(f"'{result.out}' was written and is complete."):
        if json_output:
            fields = dataclasses.asdict(result)
            common.print_json(common.document(command, "pass", model=model, output=fields.pop("out"), **fields))
            return common.EXIT_OK
        tensors = f"{len(result.changed)} of {common.plural(result.tensors, 'tensor')} changed"
        common.say(f"Wrote {result.out}: an adapter for the {result.fits.form} model, {tensors}; same function.")
        load = "memopt.load" if result.fits.form == "folded" else "from_pretrained"
        if result.fits.form == "folded" and not Path(result.base).is_dir():
            common.say("Next:", f"  memopt patch {common.quoted(model)} --out {common.quoted(result.base)}")
        common.say(f"In Python: PeftModel.from_pretrained({load}({result.base!r}), {str(result.out)!r})")
    return common.EXIT_OK


def _print(result: PatchResult, verbose: bool) -> None:
    from memopt.plan.plan import coverage_totals
    from memopt.reporting.terminal import coverage_table

    if verbose or result.written is None:
        common.print_rich(coverage_table(result.plan, verbose=verbose))
    else:
        common.say(*coverage_totals(result.plan))
    common.say("")
    with common.only_results_on_stdout():
        from memopt.pipeline import bytes_saved

        saved = bytes_saved(result)
    if saved is not None:
        before, after = (format_bytes(each.total) for each in (saved.before, saved.after))
        common.say(f"Saved for backward: {before} -> {after} ({saved.change:+.1%}), {saved.training}.")
    if result.written is None:
        source = result.source
        files = common.plural(len(source.shards), "weight file")
        size = f", {format_bytes(source.nbytes)}" if source.shards else ""
        beside = f", and beside them {', '.join(result.emitted)}" if result.emitted else ""
        common.say(f"Dry run: nothing was written. It would write {files}{size} to {result.out}{beside}")
        return
    written, out = result.written, common.quoted(result.out)
    nbytes = format_bytes(written.nbytes)
    changed = written.changed_nbytes and format_bytes(written.changed_nbytes)
    tensors = common.plural(written.changed_tensors, "tensor")
    common.say(
        f"Wrote {result.out}: {nbytes} of weights, " + (f"{tensors} ({changed}) changed." if changed else "unchanged.")
    )
    if result.emitted:
        common.say(f"Beside them: {', '.join(result.emitted)}.")
    if written.changed_tensors:
        print(_FOLD_SENTENCE)
    near_zero = sum(record.near_zero for record in written.manifest.folds)
    if near_zero:
        channels = common.plural(near_zero, "channel")
        common.say(f"{channels} had a scale near zero. Keep the original: without it, the fold cannot be undone there.")
    common.say("Next:", f"  memopt verify {out}", f"  memopt report {out}")


def _document(result: PatchResult) -> dict[str, Any]:
    source, written = result.source, result.written
    return common.document(
        "patch",
        "pass",
        dry_run=written is None,
        model={"name": source.model, "path": str(source.root), "revision": source.revision, "commit": source.commit},
        output=str(result.out),
        **result.plan.to_dict(),
        weights={
            "files": len(source.shards),
            "bytes": source.nbytes,
            "tensors": len(source.tensors),
            "changed_tensors": written.changed_tensors if written else None,
            "changed_bytes": written.changed_nbytes if written else None,
        },
        folds=json.loads(written.manifest.to_json())["folds"] if written else None,
        emitted=result.emitted,
        notes=result.notes,
    )
