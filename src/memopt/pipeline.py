"""The public functions for checkpoints: patch_checkpoint, unpatch_checkpoint, report. `memopt` re-exports them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memopt.checkpoint.atomic import Note, Notes
from memopt.checkpoint.fold import Fold, FoldPlan
from memopt.checkpoint.manifest import InputsRecord
from memopt.checkpoint.names import check_names
from memopt.checkpoint.original import folds_of, named, original_of, walk_source
from memopt.checkpoint.patched import is_patched, patched_folder
from memopt.checkpoint.sources.source import MANIFEST, CheckpointSource, open_source
from memopt.checkpoint.target import check_space, check_target, default_folder
from memopt.checkpoint.unfold import Unfolded
from memopt.checkpoint.unpatch import write_unpatched
from memopt.checkpoint.writer import Progress, WriteResult, write_checkpoint
from memopt.emit import RECIPE_FILE, check_kinds, files_of, patched_step
from memopt.environment.files import patched_folder_at, path_text
from memopt.environment.garbage import collected_seldom
from memopt.environment.generators import generators_kept
from memopt.errors import MemoptError, NegativeVerdict, UsageError, printable
from memopt.plan.plan import Plan, make_plan
from memopt.plan.recipe import DEFAULT_CHECKPOINT_RECIPE, Recipe, load_recipe
from memopt.prediction.alternatives import headline
from memopt.prediction.setup import Optimizer, Setup, Sharding
from memopt.reporting.build import compare_bytes, compare_training
from memopt.reporting.compare import Comparison
from memopt.reporting.terminal import Fit
from memopt.trace.training import ALL_LINEAR, AdapterDtype, Checkpointing, Precision, Request, Train
from memopt.verification.trial import report_sections
from memopt.walk.calls.batch import PASS_INPUTS, Batch, describe, given_batch, in_words
from memopt.walk.models.attention import Implementation
from memopt.walk.models.config import load_config

#: Arguments of `fit` that `report` does not have.
_OF_FIT = {"gpu", "optimizer", "accumulation", "release_gradients", "sharding", "devices", "longest"}


@dataclass(frozen=True)
class UnpatchResult:
    """The result of :func:`unpatch_checkpoint`."""

    folder: Path
    """The patched folder."""
    out: Path
    """The stock folder that was written."""
    unfolded: Unfolded
    """The norms and tensors that were restored, and those that could not be."""
    notes: tuple[str, ...]
    """Sentences that a user should read."""


@dataclass(frozen=True)
class PatchResult:
    """The result of :func:`patch_checkpoint`, also of a dry run."""

    source: CheckpointSource
    """The checkpoint that was read."""
    plan: Plan
    """The plan as carried out: a norm is shared if the files do not allow its fold."""
    out: Path
    """The folder that was written, or would be."""
    written: WriteResult | None
    """Details of the written folder; None for a dry run."""
    notes: tuple[str, ...]
    """Sentences that a user should read."""
    emitted: tuple[str, ...] = ()
    """Files for training engines."""

    def __repr__(self) -> str:  # of `print` too
        done = f"{'Wrote' if self.written else 'Would write'} {self.out}"
        return printable("\n".join((done, str(self.plan), *self.notes)), "\n")


@generators_kept()
def patch_checkpoint(
    source: str | Path,
    out: str | Path | None = None,
    recipe: str | Path | Recipe = DEFAULT_CHECKPOINT_RECIPE,
    *,
    overrides: Iterable[str] = (),
    inputs: Mapping[str, Any] | str | Path | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    force: bool = False,
    dry_run: bool = False,
    emit: Iterable[str] = (),
    opened: Callable[[CheckpointSource], None] | None = None,
    progress: Progress | None = None,
    note: Note | None = None,
) -> PatchResult:
    """Write a patched checkpoint of `source`: same tensor names, loadable by stock transformers and `memopt.load`. It
    is written as a whole or not at all.

    Args:
        source: a local folder or a hub id.
        out: the folder to write; by default NAME-memopt in the current folder.
        recipe: name of a shipped recipe, a YAML file, or a Recipe.
        overrides: keys of the recipe to change, as ``key=value``.
        inputs: keyword arguments of a forward, or a file of them (`torch.save`, safetensors), if none can be guessed.
        revision: branch, tag or commit; hub ids only.
        trust_remote_code: run the Python files that come with the model.
        allow_pickle: read ``pytorch_model*.bin`` (with ``weights_only=True``) where there is no safetensors file.
        force: replace a folder that memopt wrote before and that nobody changed since.
        dry_run: plan and check, download no weights and write nothing.
        emit: training engines for which configuration files are added: ``trainer``, ``accelerate``, ``deepspeed``,
            ``fsdp``, ``axolotl``, ``torchtitan``.
        opened: called with the source once it is open and `out` is known to be usable, before the model is walked.
        progress: called with (bytes done, bytes to do) while the folder is written.
        note: called with each note of the result as soon as it is known.

    Raises:
        ModelError: the checkpoint or its model cannot be found, read, built or run.
        InputsError: the file of inputs cannot be read, or the model does not take them.
        RecipeError: the recipe is unknown, or an override does not fit it.
        OutputError: `out` cannot be used or written.
        NegativeVerdict: `source` is already patched, or the recipe rewrites nothing in it.
        UsageError: an engine of `emit` is unknown, or cannot express the recipe.
    """
    kinds = check_kinds(emit)
    rules = load_recipe(recipe, overrides)
    batch = given_batch(inputs)
    name = path_text(source)
    target = default_folder(name) if out is None else Path(path_text(out))
    notes = Notes(note)
    checkpoint = _open(name, revision=revision, allow_pickle=allow_pickle, weights=not dry_run)
    if not dry_run:  # the writer would refuse these only after the walk
        check_space(check_target(target, checkpoint.root, force=force), checkpoint.space_needed)
    if opened is not None:
        opened(checkpoint)
    if checkpoint.shards:
        config = load_config(checkpoint.root, trust_remote_code=trust_remote_code)
        for text in check_names(checkpoint, config).notes:
            notes.tell(text)
    checkpoint, sites, driven = walk_source(checkpoint, rules, batch, trust_remote_code)
    plan = make_plan(sites, rules)
    _tell(plan, notes.tell, made_by_processor=driven if batch is None else None)
    if plan.does_nothing:
        message = f"Nothing in '{checkpoint.model}' is rewritten by recipe '{plan.recipe.name}': {plan.why_nothing}."
        raise NegativeVerdict(message, None if plan.sites.ran else PASS_INPUTS)
    if not plan.folds():
        notes.tell(
            "No norm is folded, so no weight changes: the folder is a copy. memopt.patch(model) saves as much without "
            "one."
        )
    emitted = _emitted(checkpoint, plan, target, kinds, notes.tell) if kinds else {}
    if dry_run:
        return PatchResult(
            checkpoint, _check_files(checkpoint, plan, notes.tell), target, None, tuple(notes), tuple(sorted(emitted))
        )
    file = Path(inputs).name if isinstance(inputs, str | Path) else None
    written = write_checkpoint(
        checkpoint,
        plan,
        target,
        force=force,
        inputs=None if driven is None else InputsRecord(file, describe(driven)),
        emitted=emitted,
        progress=progress,
        note=notes.tell,
    )
    return PatchResult(checkpoint, written.plan, target, written, tuple(notes), written.manifest.emitted)


@generators_kept()
def bytes_saved(result: PatchResult) -> Comparison | None:
    """Bytes that a training step saves for backward, stock and patched; None if the config is not enough."""
    try:
        return compare_bytes(result.source.model, load_config(result.source.root), result.plan)
    except MemoptError:
        return None


def report(
    model: str | Path,
    recipe: str | Path | Recipe | None = None,
    *,
    batch: int | None = None,
    seq: int | None = None,
    precision: Precision = "bf16",
    train: Train = "full",
    lora_rank: int = 8,
    lora_targets: Sequence[str] = (ALL_LINEAR,),
    lora_dtype: AdapterDtype = "fp32",
    lora_dropout: float = 0.0,
    use_dora: bool = False,
    modules_to_save: Sequence[str] = (),
    freeze: Sequence[str] = (),
    checkpointing: Checkpointing = "none",
    attention: Implementation | None = None,
    overrides: Sequence[str] = (),
    inputs: Mapping[str, Any] | str | Path | None = None,
    images: int | None = None,
    image_side: int | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    note: Note | None = None,
    **of_fit: Any,
) -> Comparison:
    """The bytes that a training step of `model` saves for backward, before and after patching; `print` shows tables.

    Computed from the config alone. Only if the recipe samples and the weights are in a local folder, one training step
    on the CPU measures the noise of the gradients.

    Args:
        model: a local folder, a hub id, or a folder that `memopt patch` wrote.
        recipe: by default the patched folder's own recipe, or else ``exact-unfolded``.
        batch: rows in a batch, by default 1; `inputs` override it.
        seq: tokens in a row, by default the config's limit, at most 2048; `inputs` override it.
        precision: dtype of the weights; ``mixed`` is fp32 weights under autocast, ``bf16-autocast`` bf16 ones.
        train: everything, LoRA adapters on frozen weights, or the same on weights in bitsandbytes' 4 bits (``qlora``).
        lora_rank: rank of the adapters.
        lora_targets: linears that get an adapter: ``all-linear``, or ends of module names.
        lora_dtype: ``fp32``, as PEFT makes adapters, or ``base``, the dtype of the base weights.
        lora_dropout: probability of the adapters' dropouts.
        use_dora: whether the adapters are DoRA's, as PEFT's argument of this name.
        modules_to_save: modules that are trained in full beside the adapters, as PEFT's argument of this name.
        freeze: names of modules and parameters, with wildcards, that full tuning does not train: ``layers.[0-7]``.
        checkpointing: activation checkpointing of every block, or none.
        attention: the ``attn_implementation`` with which the model is loaded; by default transformers' choice.
        overrides: keys of the recipe to change, as ``key=value``.
        inputs: a batch of the size to report, or a file that holds one.
        images: images in each row of text; the tokens of their features are among the `seq`.
        image_side: height and width of an image in pixels, by default those in the config.
        revision: branch, tag or commit; hub ids only.
        trust_remote_code: run the Python files that come with the model.
        note: called with a sentence before a step that takes long.

    Raises:
        ModelError: the config cannot be found, built or traced.
        InputsError: `inputs` cannot be read, or the model does not take them.
        RecipeError: the recipe is unknown.
        UsageError: an argument belongs to :func:`fit`, or is unknown.
    """
    if names := ", ".join(f"{name}=..." for name in of_fit):
        hint = f"Whether a step fits is answered by memopt.fit(model, {names})." if of_fit.keys() <= _OF_FIT else None
        raise UsageError(f"memopt.report does not take {names}.", hint)
    return report_on(Request.of(locals()), note)


@generators_kept()
@collected_seldom()
def report_on(request: Request, note: Note | None = None, setup: Setup | None = None) -> Comparison:
    """:func:`report` with its arguments as one object, for a device of `setup`."""
    return replace(compare_training(request, setup), sections=report_sections(request, note))


@generators_kept()
@collected_seldom()
def fit(
    model: str | Path,
    recipe: str | Path | Recipe | None = None,
    *,
    gpu: str | None = None,
    optimizer: Optimizer = "adamw-fused",
    accumulation: int = 1,
    release_gradients: bool = False,
    sharding: Sharding = "none",
    devices: int = 1,
    longest: bool = False,
    batch: int | None = None,
    seq: int | None = None,
    precision: Precision = "bf16",
    train: Train = "full",
    lora_rank: int = 8,
    lora_targets: Sequence[str] = (ALL_LINEAR,),
    lora_dtype: AdapterDtype = "fp32",
    lora_dropout: float = 0.0,
    use_dora: bool = False,
    modules_to_save: Sequence[str] = (),
    freeze: Sequence[str] = (),
    checkpointing: Checkpointing = "none",
    attention: Implementation | None = None,
    overrides: Sequence[str] = (),
    inputs: Mapping[str, Any] | str | Path | None = None,
    images: int | None = None,
    image_side: int | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Fit:
    """Whether a training step of `model` fits, its peak with and without memopt, and what would change it.

    ``print(memopt.fit("meta-llama/Llama-3.1-8B", gpu="rtx4090", train="lora"))`` shows what ``memopt report --gpu``
    prints. Computed from the config alone: no weights, no GPU. The arguments are those of :func:`report`, and:

    Args:
        gpu: a card or its memory (``rtx4090``, ``24GiB``); without it, only the peaks are predicted.
        optimizer: the optimizer whose states and temporary tensors are counted.
        accumulation: micro-batches in a step, each of `batch` rows; with several, gradients also live during forward.
        release_gradients: whether the optimizer steps in backward, as with :func:`memopt.release_gradients`.
        sharding: how `devices` share weights, gradients and states: ``ddp``, ``fsdp``, ``zero1`` to ``zero3``.
        devices: number of devices.
        longest: search the longest sequence of each way to train instead of the largest batch; takes minutes.

    Raises:
        UsageError: the card is unknown, or the options do not go together.
        ModelError: the config cannot be found, built or traced.
        InputsError: `inputs` cannot be read, or the model does not take them.
        RecipeError: the recipe is unknown.
    """
    request = Request.of(locals())
    setup = Setup(
        optimizer, accumulation=accumulation, release_gradients=release_gradients, sharding=sharding, devices=devices
    )
    setup.check_precision(request.precision)
    return Fit(**vars(headline(request, gpu=gpu, setup=setup, longest=longest)))


def unpatch_checkpoint(
    folder: str | Path,
    against: str | Path | None = None,
    out: str | Path | None = None,
    *,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    progress: Progress | None = None,
    note: Note | None = None,
) -> UnpatchResult:
    """Write the stock form of a patched folder, trained or not. `memopt patch` accepts the result again.

    Tensors that were not trained are the original's, bit by bit. Trained ones are divided by the scales of the original
    norms, with one rounding an element.

    Args:
        folder: a folder that `memopt patch` wrote, or to which a patched model was saved.
        against: the model that `folder` was made from, a folder or hub id; by default the place in memopt.json.
        out: the folder to write; by default NAME-unpatched in the current folder.
        trust_remote_code: run the Python files that come with the model.
        allow_pickle: read ``pytorch_model*.bin`` (with ``weights_only=True``) of `against`.
        progress: called with (bytes done, bytes to do).
        note: called with each note of the result as soon as it is known.

    Raises:
        ModelError: `folder` is not patched, or was not made from `against`.
        OutputError: `out` cannot be used or written.
    """
    patched = open_source(str(patched_folder_at(folder)))
    record = patched_folder(patched.root)
    if record.manifest is not None and record.manifest.emitted:
        kept = (name for name in patched.side_files if name not in record.manifest.emitted)
        patched = replace(patched, side_files=tuple(kept))
    target = Path(out) if out is not None else Path(f"{patched.root.name}-unpatched")
    original, folds = None, tuple[Fold, ...]()
    if record.folded_norms():
        original = original_of(record, against, allow_pickle)
        folds = folds_of(record, patched, original, trust_remote_code)
        patched, original = (named(each, trust_remote_code) for each in (patched, original))
    notes = Notes(note)
    unfolded = write_unpatched(patched, original, folds, target, progress=progress, note=notes.tell)
    for name, reason in unfolded.kept:
        notes.tell(f"{name} keeps its folded form: {reason}.")
    return UnpatchResult(patched.root, target, unfolded, tuple(notes))


def _open(model: str, *, revision: str | None, allow_pickle: bool, weights: bool) -> CheckpointSource:
    source = open_source(model, revision=revision, allow_pickle=allow_pickle, weights=weights)
    if not is_patched(source.root):
        return source
    if (source.root / MANIFEST).is_file():
        raise NegativeVerdict(f"'{model}' is already patched.", "Patch the model that it was made from.")
    base = patched_folder(source.root).base_model
    raise NegativeVerdict(
        f"'{model}' is already patched: it was made from {base}, loaded and saved again.",
        f"Continue training with memopt.load, or restore it first: memopt unpatch {model} --against {base}",
    )


def _tell(plan: Plan, note: Note, *, made_by_processor: Batch | None) -> None:
    for text in (*filter(None, (plan.sites.unseen,)), *plan.sites.notes, *plan.notes):
        note(text)
    if made_by_processor is not None:
        note(f"the model's processor made the inputs: {in_words(made_by_processor)}")
    if not plan.sites.ran:
        note(PASS_INPUTS)


def _emitted(source: CheckpointSource, plan: Plan, out: Path, kinds: Iterable[str], note: Note) -> dict[str, bytes]:
    """The files for training engines, whose weights are in the dtype of the checkpoint."""
    dtype = source.config.get("dtype", source.config.get("torch_dtype"))
    step = patched_step(str(out), str(out / RECIPE_FILE), plan.recipe, plan.sites.blocks, dtype)
    files, notes = files_of(step, kinds)
    for text in notes:
        note(text)
    return files


def _check_files(source: CheckpointSource, plan: Plan, note: Note) -> Plan:
    """The plan that the files allow, as the writer carries it out."""
    if not source.shards:
        note("There are no weights here yet, so their names and dtypes were not checked.")
        return plan
    folds = FoldPlan.from_plan(plan, source.tensors, source.weights.aliases, source.renamed)
    for norm, reason in folds.refused:
        note(f"{norm} is shared instead of folded: {reason}.")
    return plan.without_folds(dict(folds.refused))
