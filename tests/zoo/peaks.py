"""The peak of a training step of one model type at the widths of its config, traced without weights."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig

from memopt.errors import ModelError
from memopt.plan.recipe import DEFAULT_MEMORY_RECIPE, Recipe, load_recipe
from memopt.prediction.subject import reads_tokens
from memopt.trace.estimate import max_positions, quiet, traced
from memopt.trace.events import Activations
from memopt.trace.timeline import record
from memopt.trace.trace import activations
from memopt.trace.training import Precision, Step, Training
from memopt.walk.models.build import build_meta
from memopt.walk.models.config import one_line
from memopt.walk.models.shrink.config import name_placeholders
from memopt.walk.models.shrink.depth import MAX_DEPTH, with_depth
from memopt.walk.models.shrink.width import fit_rotary
from memopt.walk.observe import find_sites
from memopt.walk.sites import Sites
from tests.zoo.build import Row, Stop, runnable
from tests.zoo.config import complete_for_runs

#: What a traced step is: rows in the batch, tokens in a row (where there are positions for them), layers.
STEP_ROWS, STEP_TOKENS, STEP_LAYERS = 4, 512, 3
_OF_PEAK = "peak of a step"
_NO_PEAK = f"{_OF_PEAK} not traced"


def examine_peak(model_type: str, classes: Mapping[str, str]) -> Row:
    """The peaks alone, of a type that ran before with this class."""
    row = Row(model_type, model_class=classes.get(model_type, ""))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if not row.model_class:
                raise Stop("not run", "the type did not run before")
            trace_steps(row, runnable(row)[0])
        except Stop as stop:
            row.notes.append(f"{_NO_PEAK}: {stop.reason}")
    return row


def with_peaks(rows: Iterable[dict[str, Any]], peaks: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """`rows` with what `examine_peak` found of their types; a row whose type is not among `peaks` stays as it is."""
    found = {peak["model_type"]: peak for peak in peaks}
    merged = []
    for row in rows:
        if (peak := found.get(row["model_type"])) is not None:
            notes = [note for note in row["notes"] if not note.startswith(_OF_PEAK)] + peak["notes"]
            if peak["status"] != "ok":  # its process ended before it could say why
                notes.append(f"{_NO_PEAK}: {peak['reason']}")
            row = {**row, "step_peak": peak["step_peak"], "has_loss_head": peak["has_loss_head"], "notes": notes}
        merged.append(row)
    return merged


def trace_steps(row: Row, config: PreTrainedConfig) -> None:
    """The peak of a step, stock and patched; the model is as wide as its config says."""
    failure: Exception | None = None
    for form, remark in _forms(config):
        form.architectures = [row.model_class]
        name_placeholders(form)
        try:
            fit_rotary(form, build_meta(form))
            sites = find_sites(build_meta(form))
            stock, patched = _steps(form, sites)
        except Exception as error:
            failure = failure or error
            continue
        if not stock.kept:
            row.notes.append(
                f"{_OF_PEAK} not counted: the model saves nothing for backward, since nothing of it is trained"
            )
            return
        row.notes.extend(remark)
        row.step_peak = (stock.peak.nbytes, patched.peak.nbytes)
        row.has_loss_head = sites.loss_head is not None and stock.most["loss"] > 0
        return
    assert failure is not None
    row.notes.append(f"{_NO_PEAK}: {type(failure).__name__}: {one_line(failure)}")


def _forms(config: PreTrainedConfig) -> Iterator[tuple[PreTrainedConfig, list[str]]]:
    """Of few layers; with the fields filled that only some layers read; of more, where few are not enough. Remarks."""
    yield with_depth(config, STEP_LAYERS), []
    filled = with_depth(config, STEP_LAYERS)
    if complete_for_runs(filled):
        yield filled, []
    yield with_depth(config, MAX_DEPTH), [f"{_OF_PEAK} traced with up to {MAX_DEPTH} layers, since few do not run"]


@quiet()
def _steps(config: PreTrainedConfig, sites: Sites) -> tuple[Activations, Activations]:
    """Stock and patched, in bf16, or in fp32 where the model's code does not run in that."""
    seq = min(STEP_TOKENS, max_positions(config) or STEP_TOKENS) if reads_tokens(config) else None
    patched = load_recipe(DEFAULT_MEMORY_RECIPE)

    def step_of(precision: Precision, recipe: Recipe | None) -> Activations:
        training = Training(batch=STEP_ROWS, seq=seq, precision=precision, dropout=False)
        with traced(Step(config, training, sites, recipe)) as model:
            return activations(record(model.model, model.run, during_backward=model.choices()))

    try:
        return step_of("bf16", None), step_of("bf16", patched)
    except ModelError as error:
        with contextlib.suppress(ModelError):
            return step_of("fp32", None), step_of("fp32", patched)
        raise error
