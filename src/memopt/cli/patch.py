"""`memopt patch`: write a patched checkpoint. Options, the order of steps and what is printed; no logic of its own."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memopt.cli import common

if TYPE_CHECKING:
    from memopt.checkpoint.manifest import InputsRecord
    from memopt.checkpoint.sources.source import CheckpointSource
    from memopt.checkpoint.writer import WriteResult
    from memopt.plan.plan import Plan
    from memopt.plan.recipe import Recipe
    from memopt.walk.calls.batch import Batch

_FOLD_SENTENCE = (
    "Folding keeps the function: the loss at step 0 is the same. It re-parametrises training, so the path after that\n"
    "differs from the stock model's. `--recipe exact-unfolded` or `--set norms.fold=never` keeps the path."
)


def patch(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A local folder or a hub id.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder to write, else ./NAME-memopt.", show_default=False)
    ] = None,
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="Name or YAML file; see `memopt recipes`.")] = "exact",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the recipe; repeatable.", show_default=False),
    ] = None,
    inputs: common.InputsOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done and write nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a folder that memopt wrote before.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.", show_default=False)] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the Python files that come with the model.")
    ] = False,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read pytorch_model.bin where there is no safetensors file.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="One row for every site of the model.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Write a patched checkpoint of MODEL.

    The result is a plain checkpoint with the same tensor names, which stock transformers loads too.
    """
    from memopt.plan.recipe import load_recipe

    rules = load_recipe(recipe, settings or ())
    target = out or Path(f"{_model_name(model)}-memopt")
    batch = _read(inputs)
    source = _open(model, revision=revision, allow_pickle=allow_pickle, weights=not dry_run)
    if not dry_run:
        _check_target(source, target, force)
    common.note(f"Read {common.plural(len(source.tensors), 'tensor')} of {model}; observing its data flow")
    notes: list[str] = []
    with common.only_results_on_stdout():
        plan, driven = _plan(source, rules, trust_remote_code, batch, notes.append)
    if dry_run:
        plan = _check_files(source, plan, notes.append)
        result = None
    else:
        result = _write(source, plan, target, force, _record(inputs, driven), notes.append)
        plan = result.plan
    if json_output:
        common.print_json(_document(source, plan, target, result, notes))
    else:
        _print(source, plan, target, result, verbose)
    return common.EXIT_OK


def _model_name(model: str) -> str:
    name = Path(model).expanduser().resolve().name if Path(model).expanduser().exists() else Path(model).name
    return name or "model"


def _open(model: str, *, revision: str | None, allow_pickle: bool, weights: bool) -> CheckpointSource:
    from memopt.checkpoint.manifest import is_patched
    from memopt.checkpoint.sources.source import open_source
    from memopt.errors import NegativeVerdict

    source = open_source(model, revision=revision, allow_pickle=allow_pickle, weights=weights)
    if is_patched(source.root):
        raise NegativeVerdict(f"'{model}' is already patched.", "Patch the model that it was made from.")
    return source


def _check_target(source: CheckpointSource, out: Path, force: bool) -> None:
    """Refuse early what the writer would refuse after the walk."""
    from memopt.checkpoint.atomic import check_space, check_target

    check_space(check_target(out, source.root, force=force), source.space_needed)


def _read(inputs: Path | None) -> Batch | None:
    from memopt.walk.calls.batch import given_batch

    return given_batch(inputs)


def _plan(
    source: CheckpointSource,
    recipe: Recipe,
    trust_remote_code: bool,
    batch: Batch | None,
    remember: Callable[[str], None],
) -> tuple[Plan, Batch | None]:
    """The plan, and the batch that drove the walk: the user's, one of the model's processor, or None."""
    from memopt.errors import NegativeVerdict
    from memopt.plan.plan import make_plan
    from memopt.walk.calls.batch import PASS_INPUTS, in_words
    from memopt.walk.models.config import load_config
    from memopt.walk.observe import walk_folder

    config = load_config(source.root, trust_remote_code=trust_remote_code)
    sites, driven = walk_folder(config, source.root, inputs=batch, trust_remote_code=trust_remote_code)
    plan = make_plan(sites, recipe)
    for text in (*sites.notes, *plan.notes):
        _tell(text, remember)
    if driven is not None and batch is None:
        _tell(f"the model's processor made the inputs: {in_words(driven)}", remember)
    if not sites.ran:
        _tell(PASS_INPUTS, remember)
    if plan.does_nothing:
        message = f"Nothing in '{source.model}' is rewritten by recipe '{recipe.name}': {plan.why_nothing}."
        raise NegativeVerdict(message, None if sites.ran else PASS_INPUTS)
    return plan, driven


def _record(inputs: Path | None, driven: Batch | None) -> InputsRecord | None:
    from memopt.checkpoint.manifest import InputsRecord
    from memopt.walk.calls.batch import describe

    return None if driven is None else InputsRecord(None if inputs is None else inputs.name, describe(driven))


def _check_files(source: CheckpointSource, plan: Plan, remember: Callable[[str], None]) -> Plan:
    """The plan that the files allow, as the writer would find it."""
    from memopt.checkpoint.fold import FoldPlan

    if not source.shards:
        _tell("The weights are not downloaded yet, so their names and dtypes were not checked.", remember)
        return plan
    folds = FoldPlan.from_plan(plan, source.tensors, source.aliases)
    for norm, reason in folds.refused:
        _tell(f"{norm} is shared instead of folded: {reason}.", remember)
    return folds.revise(plan)


def _write(
    source: CheckpointSource,
    plan: Plan,
    out: Path,
    force: bool,
    inputs: InputsRecord | None,
    remember: Callable[[str], None],
) -> WriteResult:
    from memopt.checkpoint.writer import write_checkpoint

    with common.progress("Writing") as progress:
        return write_checkpoint(
            source, plan, out, force=force, inputs=inputs, progress=progress, note=lambda text: _tell(text, remember)
        )


def _tell(text: str, remember: Callable[[str], None]) -> None:
    remember(text)
    common.note(f"note: {text}")


def _print(source: CheckpointSource, plan: Plan, out: Path, result: WriteResult | None, verbose: bool) -> None:
    from memopt.report.terminal import coverage_table

    common.print_rich(coverage_table(plan, verbose=verbose))
    common.print_text()
    if result is None:
        files = common.plural(len(source.shards), "weight file")
        size = f", {common.format_bytes(source.nbytes)}" if source.shards else ""
        common.print_text(f"Dry run: nothing was written. It would write {files}{size} to {out}")
        return
    changed = (
        f"{common.plural(result.changed_tensors, 'tensor')} ({common.format_bytes(result.changed_nbytes)}) changed"
    )
    common.print_text(f"Wrote {out}: {common.format_bytes(result.nbytes)} of weights, {changed}.")
    if result.changed_tensors:
        common.print_text(_FOLD_SENTENCE)
    near_zero = sum(record.near_zero for record in result.manifest.folds)
    if near_zero:
        channels = common.plural(near_zero, "channel")
        common.print_text(f"{channels} had a scale near zero: the fold cannot be undone there, so keep the original.")
    common.print_text(f"Next:\n  memopt verify {shlex.quote(str(out))}\n  memopt report {shlex.quote(str(out))}")


def _document(
    source: CheckpointSource, plan: Plan, out: Path, result: WriteResult | None, notes: list[str]
) -> dict[str, Any]:
    return common.document(
        "patch",
        "pass",
        dry_run=result is None,
        model={
            "name": source.model,
            "path": str(source.root),
            "revision": source.revision,
            "commit": source.commit,
        },
        output=str(out),
        **plan.to_dict(),
        weights={
            "files": len(source.shards),
            "bytes": source.nbytes,
            "tensors": len(source.tensors),
            "changed_tensors": result.changed_tensors if result else None,
            "changed_bytes": result.changed_nbytes if result else None,
        },
        folds=json.loads(result.manifest.to_json())["folds"] if result else None,
        notes=notes,
    )
