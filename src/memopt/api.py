"""The public functions for a model in memory: patch, unpatch, plan_for, load, summary. `memopt` re-exports them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from safetensors import SafetensorError
from torch import nn

from memopt.environment.files import user_path
from memopt.environment.garbage import collected_seldom
from memopt.environment.generators import generators_kept
from memopt.environment.partitioned import shape_of
from memopt.errors import ModelError, NegativeVerdict, RecipeError, first_of
from memopt.patches.apply import Applied, apply, is_patched, undo
from memopt.patches.capabilities import Reports
from memopt.patches.record import Record, drop_record, keep_record, record_of, warn_once
from memopt.patches.registry import having
from memopt.patches.swap import is_swapped, shadowed
from memopt.plan.plan import Plan, make_plan
from memopt.plan.recipe import DEFAULT_MEMORY_RECIPE, Recipe, load_recipe
from memopt.torch_compat import warn_once_of_missing
from memopt.walk.sites import Sites

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from memopt.prediction.setup import Run
    from memopt.reporting.terminal import Summary

M = TypeVar("M", bound=nn.Module)
_logger = logging.getLogger("memopt")


def patch(
    model: M,
    recipe: str | Path | Recipe = DEFAULT_MEMORY_RECIPE,
    *,
    inputs: Mapping[str, Any] | str | Path | None = None,
    budget: str | int | None = None,
    batch: int | None = None,
    seq: int | None = None,
    run: Run | None = None,
) -> M:
    """Patch a model in memory; training then saves fewer bytes for backward. Returns the same object.

    No weight changes: the loss and every gradient are the stock model's within rounding. Call it before or after
    adding LoRA adapters, and before tools that shard modules (FSDP2, DeepSpeed). The logger ``memopt`` prints one line
    about it; ``logging.getLogger("memopt").setLevel("WARNING")`` silences it.

    Args:
        model: any torch module; a Hugging Face model needs nothing else.
        recipe: name of a shipped recipe, a YAML file, or a Recipe; it must fold nothing (``norms.fold: none``).
        inputs: keyword arguments for one forward on the CPU, or a file that holds them (`torch.save` or safetensors),
            for a model whose inputs memopt cannot guess.
        budget: memory of the device (``"24GiB"``, the name of a card, or a number of bytes). `recipe` becomes the
            fastest exact plan whose training step fits; ``memopt.summary(model)`` prints it.
        batch: rows of a step, for `budget`; default: 1.
        seq: tokens in a row, for `budget`; default: the config's limit, at most 2048.
        run: optimizer, micro-batches, devices and autocast, for `budget`; default: fused AdamW, one micro-batch, one
            device, no autocast.

    Raises:
        NegativeVerdict: the model is already patched, nothing in it can be patched, or nothing fits in `budget`.
        InputsError: the file of inputs cannot be read.
        ModelError: it is no torch module, or a tool has partitioned it, so its parameters are empty.
        RecipeError: the recipe is unknown, or folds weights.
    """
    warn_once_of_missing()
    check_is_module(model)
    if is_patched(model) or shadowed(model):
        raise _already_patched(model)
    rules = memory_recipe(recipe)
    _check_values(model)
    planned: list[str] = []
    with generators_kept(), collected_seldom():
        if budget is not None:
            rules, *planned = _within(model, budget, rules, batch, seq, run)
        plan = plan_for(model, rules, inputs=inputs)
        applied = apply(model, plan)
        _finish(model, applied, given=inputs is not None)
        done, name = applied.plan.done or "linears alone", type(model).__name__
        undo_it = "memopt.summary(model) says more, memopt.unpatch(model) undoes it"
        said = f"patched {name} by recipe '{applied.plan.recipe.name}': {done}; {undo_it}"
        _say(model, *planned, said, notes=recipe != DEFAULT_MEMORY_RECIPE)
    return model


def check_is_module(model: object) -> None:
    """Raises a ModelError if `model` is no torch module."""
    if isinstance(model, nn.Module):
        return
    inside = [name for name, value in getattr(model, "__dict__", {}).items() if isinstance(value, nn.Module)]
    hint = f"Patch the module inside it: memopt.patch(model.{inside[0]})." if inside else "Pass an nn.Module."
    raise ModelError(f"memopt patches an nn.Module, and {type(model).__name__} is none.", hint)


def memory_recipe(recipe: str | Path | Recipe) -> Recipe:
    """Load `recipe` for a model in memory, where nothing can be folded. Raises a RecipeError if it is unknown, or folds
    weights."""
    rules = load_recipe(recipe)
    if rules.folds:
        raise RecipeError(
            f"Recipe '{rules.name}' folds norms into weights, which is done to checkpoints, not to a model in memory.",
            "Use `memopt patch MODEL` and memopt.load(DIR), or recipe 'exact-unfolded'.",
        )
    return rules


def unpatch(model: M) -> M:
    """Restore the stock forward of every patched module; returns the same object. Raises a ModelError if it is no torch
    module."""
    check_is_module(model)
    undo(model)
    drop_record(model)
    return model


def summary(model: nn.Module) -> Summary:
    """Summary of the patches in `model`: the recipe, the action on each site, and refused rewrites; can be printed.

    A wrapper or copy of a patched model has the same summary. Raises a ModelError if it is no torch module.
    """
    from memopt.reporting.terminal import Summary

    check_is_module(model)
    swapped, others = sum(is_swapped(module) for module in model.modules()), shadowed(model)
    remarks = [
        f"{len(names)} modules were patched, and later got a forward of {owner}, which runs in place of memopt's: "
        f"{first_of([name or 'the model' for name in names])}"
        for owner, names in others.items()
    ]
    remarks += [line for patch in having(Reports) for line in patch.remarks(model)]
    running, record = swapped - sum(map(len, others.values())), record_of(model)
    if record is None:
        return Summary(running)
    return Summary(running, record.plan, record.refused, (*remarks, *record.plan.idle))


@generators_kept()
def plan_for(
    model: nn.Module | str | Path,
    recipe: str | Path | Recipe = DEFAULT_MEMORY_RECIPE,
    *,
    inputs: Mapping[str, Any] | str | Path | None = None,
    trust_remote_code: bool = False,
) -> Plan:
    """The plan of `recipe` for a model in memory, a local folder or a hub id; changes nothing.

    `inputs` has the same meaning as in `patch`.
    """
    from memopt.walk.calls.batch import given_batch
    from memopt.walk.observe import walk_config

    rules = load_recipe(recipe)
    batch = given_batch(inputs)
    if isinstance(model, nn.Module):
        return make_plan(_walk(model, batch, rules), rules)
    attention = rules.runs_attention
    return make_plan(walk_config(model, inputs=batch, attention=attention, trust_remote_code=trust_remote_code), rules)


def load(
    directory: str | Path,
    *,
    model_class: type[nn.Module] | None = None,
    inputs: Mapping[str, Any] | str | Path | None = None,
    overrides: Iterable[str] = (),
    verify: bool = False,
    **kwargs: Any,
) -> nn.Module:
    """Load a folder that `memopt patch` wrote, or to which such a model was saved, and patch the model for training.

    Args:
        directory: the folder.
        model_class: class with `from_pretrained`, e.g. AutoModelForSequenceClassification; by default the class that
            the checkpoint names.
        inputs: as in `patch`; by default inputs of the shapes in memopt.json, or else guessed inputs.
        overrides: keys of the folder's recipe to change, as ``key=value``, except those of folding.
        verify: first compare the SHA-256 of every file with memopt.json, which reads the weights once more. Without it,
            safetensors files are checked by the list of folds and, unless `model_class` is given, names and shapes.
        **kwargs: passed to `from_pretrained` (dtype, attn_implementation, device_map, ...). With
            ``distributed_config`` (FSDP2, tensor parallel) each rank reads only its own shards.

    Raises:
        ModelError: the folder does not exist, `memopt patch` did not write it, or its files do not fit together.
    """
    from memopt.checkpoint.fits import affines_read, before_sharding, check_fits
    from memopt.checkpoint.patched import patched_folder
    from memopt.walk.calls.batch import given_batch
    from memopt.walk.models.config import load_config
    from memopt.walk.models.config import model_class as natural_class

    warn_once_of_missing()
    directory = user_path(directory)
    if not directory.is_dir():
        raise ModelError(
            f"Folder '{directory}' does not exist.", f"Write it with: memopt patch MODEL --out {directory}"
        )
    record = patched_folder(directory)
    folded, remembered = record.folded_norms(), record.batch()
    batch = given_batch(inputs)
    trust_remote_code = bool(kwargs.get("trust_remote_code", False))
    cls: Any = model_class
    config = None if cls is not None else load_config(directory, trust_remote_code=trust_remote_code)
    if verify or any(directory.glob("*.safetensors")):
        check_fits(record, config, digests=verify)
    if config is not None:
        cls = natural_class(config)
    unfolded = load_recipe(record.recipe, overrides).unfolded()
    done: list[nn.Module] = []

    def patched(model: nn.Module) -> None:
        names = {name: norm for name, _ in model.named_modules() if (norm := _same_norm(name, folded))}
        with generators_kept():  # keep their state after `from_pretrained`, which draws a new head's weights
            sites = _walk(model, remembered if batch is None else batch, unfolded)
            if batch is None and not sites.ran:  # a model with another head may not take that batch
                sites = _walk(model, None, unfolded)
            plan = make_plan(sites, unfolded)
            with affines_read(model, directory, names) as known:
                applied = apply(model, plan, folded=known)
        _finish(model, applied, given=batch is not None)
        done.append(model)

    with before_sharding(patched):
        model = from_pretrained(cls, directory, config, **kwargs)
    if not done:
        patched(model)
    _say(model, notes=bool(unfolded.effects))
    return model


def _already_patched(model: nn.Module) -> NegativeVerdict:
    hint = "Call memopt.unpatch(model) first."
    if record_of(model) is not None:
        return NegativeVerdict("The model is already patched.", hint)
    name = next((name for name, module in model.named_modules() if is_swapped(module)), "")
    return NegativeVerdict(f"'{name}' in this model is already patched, with another model that has it.", hint)


def _check_values(model: nn.Module) -> None:
    """Raise a ModelError if most parameters are empty, and have no shape recorded by DeepSpeed."""
    empty = [name for name, parameter in model.named_parameters() if 0 in shape_of(parameter)]
    if 2 * len(empty) > sum(1 for _ in model.parameters()):
        raise ModelError(
            f"{len(empty)} parameters of {type(model).__name__} are empty here ({empty[0]} for example): a tool has "
            "partitioned them.",
            "Patch the model before that tool takes it.",
        )


def _within(
    model: nn.Module, budget: str | int, rules: Recipe, batch: int | None, seq: int | None, run: Run | None
) -> tuple[Recipe, str]:
    """The recipe of the fastest plan that fits, and what it is for; warns if the plan needs smaller micro-batches."""
    from memopt.prediction.planner.training import plan_model

    choice = plan_model(model, budget, rules, batch=batch, seq=seq, run=run)
    plan = choice.plan
    if plan.accumulation > choice.setup.accumulation:
        warnings.warn(
            f"A batch of {batch} rows fits in the budget only as {plan.accumulation} micro-batches: train with "
            f"per_device_train_batch_size={plan.batch}, gradient_accumulation_steps={plan.accumulation}.",
            stacklevel=3,
        )
    return plan.recipe, f"planned for: {choice.training}"


def _walk(model: nn.Module, inputs: Mapping[str, Any] | None, rules: Recipe) -> Sites:
    """`walk_model`; inputs that do not run are cast to the model's dtype and tried again."""
    from memopt.walk.calls.batch import placed
    from memopt.walk.observe import walk_model

    sites = walk_model(model, inputs, attention=rules.runs_attention)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    if inputs is None or sites.ran or dtype is None:
        return sites
    return walk_model(model, placed(inputs, None, dtype), attention=rules.runs_attention)


def from_pretrained(cls: Any, source: str | Path, known: PreTrainedConfig | None, **kwargs: Any) -> nn.Module:
    """`cls.from_pretrained`; `known` is the config by which `cls` was found, for a class that reads only others.

    Raises a ModelError if a weight file is missing or damaged, or does not fit the class."""
    from memopt.walk.models.config import takes

    if known is not None and not takes(cls, known):  # as an Auto class gives its config and settings
        known.update({name: kwargs.pop(name) for name in [*kwargs] if name != "dtype" and hasattr(known, name)})
        kwargs.setdefault("config", known)
    try:
        model: nn.Module = cls.from_pretrained(source, **kwargs)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"Cannot load '{source}': {reason}") from error
    return model


def _same_norm(name: str, folded: frozenset[str]) -> str | None:
    """The name in `folded` of the norm that is called `name` in a loaded model; None if that is not folded."""
    # A class with another head adds the base model's prefix to the name, or removes it.
    same = (each for each in folded if each and (name.endswith("." + each) or each.endswith("." + name)))
    return name if name in folded else next(same, None)


def _say(model: nn.Module, *lines: str, notes: bool) -> None:
    """Log `lines`, and the plan's `notes`; warn of idle patterns and of settings of the model."""
    if not _logger.hasHandlers():  # logging is not configured, so it shows only warnings
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("memopt: %(message)s"))
        _logger.addHandler(handler)
        if _logger.level == logging.NOTSET:
            _logger.setLevel(logging.INFO)
    of = summary(model)
    for line in (*lines, *of.notes) if notes else lines:
        _logger.info("%s", line)
    warn_once(model, of.remarks)


def _finish(model: nn.Module, applied: Applied, *, given: bool) -> None:
    """Warn of sites that could not be patched, and record the patch on the model; an error if nothing was patched.
    `given`: the user gave inputs, so no message advises that."""
    reasons = dict.fromkeys(reason for _, reason in applied.refused)
    for reason in reasons:
        names = list(dict.fromkeys(name or "the forward of the model" for name, w in applied.refused if w == reason))
        warnings.warn(f"memopt did not change {first_of(names)}: {reason}", stacklevel=3)
    sites = applied.plan.sites
    advice = "The given inputs do not change this." if given else _batch_to_pass(model)
    if not sites.ran:
        # Norms are patched nevertheless; blocks are guessed from the module tree.
        warnings.warn(f"memopt could observe little of this model: {'; '.join(sites.notes)}. {advice}", stacklevel=3)
    elif sites.unseen:
        warnings.warn(f"memopt has not seen all of this model: {sites.unseen}. {advice}", stacklevel=3)
    if not is_patched(model) and (sites.unseen or not sites.ran):
        raise NegativeVerdict(
            "Nothing was patched, because memopt could not run this model.",
            f"The reason: {sites.unseen or '; '.join(sites.notes)}." if given else advice,
        )
    if not is_patched(model):
        raise NegativeVerdict(
            "Nothing in this model can be patched.",
            " ".join((*applied.plan.idle, "See memopt.plan_for(model, recipe).refusals for the reasons.")),
        )
    keep_record(model, Record(applied.plan, applied.refused))


def _batch_to_pass(model: nn.Module) -> str:
    """Advice to pass a batch, with the names of the arguments that the forward requires."""
    from memopt.walk.calls.arguments.request import parameters_of

    required = [name for name, each in parameters_of(model).items() if each.default is each.empty]
    batch = ", ".join(f"'{name}': ..." for name in required) or "..."
    return f"Pass inputs={{{batch}}}, a training batch."
