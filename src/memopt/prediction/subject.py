"""Turn a user's request into a training step that can be traced from the model's config alone."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass, replace
from pathlib import Path

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from memopt.checkpoint.fold import parameters_of
from memopt.checkpoint.names import made_by_load
from memopt.checkpoint.patched import PatchedFolder, is_patched, patched_folder
from memopt.environment.files import user_path
from memopt.errors import ModelError
from memopt.plan.plan import make_plan
from memopt.plan.recipe import DEFAULT_MEMORY_RECIPE, Recipe, load_recipe
from memopt.trace.arguments import DTYPES
from memopt.trace.estimate import max_positions
from memopt.trace.quantised import other_method, quantisation_of
from memopt.trace.training import Request, Step, check_peft
from memopt.walk.calls.batch import Batch, check_names, given_batch, in_words, placed, rows_of, tokens_of
from memopt.walk.deep import find_deep_sites
from memopt.walk.models.build import build_meta
from memopt.walk.models.config import load_config, model_class, named_classes
from memopt.walk.observe import find_sites, walk_config
from memopt.walk.sites import Sites

_LONGEST_DEFAULT_SEQ = 2048


@dataclass(frozen=True)
class Subject:
    """A request together with its config, its recipe and, for a patched folder, the folder's record."""

    request: Request
    config: PreTrainedConfig
    rules: Recipe
    record: PatchedFolder | None
    """The record of the patched folder; None if the model is not a patched folder."""

    @property
    def any_size(self) -> bool:
        """Whether the request leaves the size of the step open."""
        return self.request.batch is None and self.request.seq is None and self.request.inputs is None

    def batch(self) -> Batch | None:
        """The inputs of the request; if its size is open, the batch with which the folder was patched, if known."""
        if self.any_size:
            return None if self.record is None else self.record.batch()
        return given_batch(self.request.inputs)

    def step(self, batch: Batch | None) -> Step:
        """The training step of the request; `batch`, if given, sets the number of rows and tokens."""
        config, training, seq = self.config, self.request.training, self.request.seq
        if quantisation_of(config) is not None:
            if training.train == "full":
                raise ModelError(
                    "The checkpoint holds its weights in bitsandbytes' 4 bits, which cannot be trained.",
                    "Use --train qlora, or the model that it was quantised from.",
                )
            training = replace(training, train="qlora")
        if training.has_adapters:
            check_peft()
        notes, found, named = [], model_class(config).__name__, named_classes(config)
        if named and found not in named:
            why = "does not take this config" if hasattr(transformers, named[0]) else "is unknown here"
            notes.append(f"The config names {named[0]}, which {why}; counted is {found}.")
        if (method := other_method(config)) is not None:
            counted = (
                "its linears are counted in bitsandbytes' 4 bits"
                if training.train == "qlora"
                else "its weights are counted as not quantised"
            )
            notes.append(f"The checkpoint is quantised ({method}), which memopt does not count: {counted}.")
        if batch is not None:
            training = replace(training, batch=rows_of(batch), seq=tokens_of(batch))
            notes.append(f"Inputs: a batch of {in_words(batch)}.")
        elif not reads_tokens(config):
            notes += ["The model reads no tokens, so --seq has no effect."] if seq else []
            training = replace(training, seq=None)
        else:
            training = replace(training, seq=seq or default_seq(config))
        attention = training.attention or self.rules.runs_attention
        if self.record is not None or not self.rules.folds:
            # The folded norms are known, so no fold has to be proved.
            sites = _sites_alone(build_meta(config, dtype=DTYPES[training.precision][0]), batch, attention)
            folded = self.record.folded_norms() if self.record is not None else frozenset()
        else:
            sites = walk_config(config, inputs=batch, attention=attention)
            made = made_by_load(build_meta(config))
            folds = make_plan(sites, self.rules).folds()
            folded = frozenset(norm.name for norm in folds if made.isdisjoint(parameters_of(norm)))
        return Step(config, training, sites, self.rules, folded, batch, tuple(notes))


def subject_of(request: Request) -> Subject:
    """Read the config, recipe and patched folder of `request`; raises the errors of `memopt.report`."""
    rules = chosen_recipe(request)  # first, since it takes no time
    config = load_config(request.model, revision=request.revision, trust_remote_code=request.trust_remote_code)
    return Subject(request, config, rules, record_of(request.model))


def step_of(request: Request) -> Step:
    """The training step of `request`; raises the errors of `memopt.report`."""
    return subject_of(request).step(given_batch(request.inputs))


def chosen_recipe(request: Request) -> Recipe:
    """The recipe of `request`; if it names none, the recipe of its patched folder, or else ``exact-unfolded``. Raises a
    RecipeError if the recipe is unknown."""
    record = None if request.recipe is not None else record_of(request.model)
    return load_recipe(request.recipe or (record.recipe if record else DEFAULT_MEMORY_RECIPE), request.overrides)


def code_of(request: Request, rules: Recipe) -> str:
    """The code with which a user trains by the recipe of `request`, which is `rules`."""
    model, settings = json.dumps(str(request.model)), json.dumps([*request.overrides])
    if request.recipe is None and record_of(request.model) is not None:
        return f"memopt.load({model}{f', overrides={settings}' if request.overrides else ''})"
    is_object = isinstance(request.recipe, Recipe)
    recipe = rules.name if is_object else str(request.recipe or DEFAULT_MEMORY_RECIPE)
    if rules.folds:
        options = "".join(f" --set {each}" for each in request.overrides)
        return f"memopt.load of the folder that `memopt patch {request.model} --recipe {recipe}{options}` writes"
    name = "recipe" if is_object else json.dumps(recipe)
    if request.overrides:
        return f"memopt.patch(model, memopt.load_recipe({name}, {settings}))"
    return "memopt.patch(model)" if recipe == DEFAULT_MEMORY_RECIPE else f"memopt.patch(model, {name})"


def record_of(model: str | Path) -> PatchedFolder | None:
    """The record in the patched folder `model`; None if `model` is not a patched folder."""
    folder = user_path(model)
    return patched_folder(folder) if folder.is_dir() and is_patched(folder) else None


def default_seq(config: PreTrainedConfig) -> int:
    """Default number of tokens in a row: the limit in the config, but at most 2048."""
    return min(_LONGEST_DEFAULT_SEQ, max_positions(config) or _LONGEST_DEFAULT_SEQ)


def reads_tokens(config: PreTrainedConfig) -> bool:
    """Whether the model of `config` reads token ids (and not images or sounds alone)."""
    return not {"input_ids", "decoder_input_ids"}.isdisjoint(inspect.signature(model_class(config).forward).parameters)


def _sites_alone(model: PreTrainedModel, batch: Batch | None, attention: str | None) -> Sites:
    """Sites of `model` without proofs; found with guessed inputs if there is no batch that runs without values."""
    if batch is not None:
        check_names(model, batch)
        sites = find_sites(model, placed(batch, None, model.dtype), attention=attention)
        if sites.ran:
            return sites
    return find_deep_sites(model, attention=attention)
