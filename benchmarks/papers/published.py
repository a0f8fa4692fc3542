"""Predicted steps of a paper's setting beside what the paper says, from the config alone: no GPU and no weights."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from rich.table import Table
from transformers import PreTrainedConfig

from benchmarks.ways import CHECKPOINTING, STOCK
from memopt.plan.recipe import Recipe, load_recipe
from memopt.prediction.peak import Prediction
from memopt.prediction.peak import predict as predicted
from memopt.trace.training import Step, Training
from memopt.walk.models.build import build_meta
from memopt.walk.observe import find_sites
from memopt.walk.sites import Sites

Of = Literal["peak", "activations"]
EAGER = "eager"
#: A recipe that rewrites nothing, to change the attention of a stock model.
NOTHING = ("norms.method=none", "activations.method=none", "gated_mlps.method=none", "loss.method=none")
MIB = 1 << 20


@dataclass(frozen=True)
class Point:
    """One way to train at the paper's size, and what the paper says of it."""

    way: str = STOCK
    published: float | None = None
    """Change of memory to the point `against`: -0.29 is 29 % less."""
    label: str = ""
    of: Of = "peak"
    """What changes: the peak of the step, or the most bytes that live in it beside weights, gradients, states."""
    against: int = 0
    nbytes: float | None = None
    """What the paper measured."""
    attention: str | None = None
    training: Mapping[str, Any] = field(default_factory=dict)
    """Fields that differ from the preset's."""
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Predicted:
    """A point and its prediction, in bytes."""

    name: str
    peak: int
    activations: int
    of: Of
    change: float
    """Of `of`, to the point that it is compared with."""
    published: float | None
    published_bytes: float | None


def predict(
    config: PreTrainedConfig, training: Training, points: Sequence[Point], labels: int | None, attention: str = "sdpa"
) -> list[Predicted]:
    """Trace a step of every point.

    Args:
        config: the model's at the paper's size.
        training: the paper's.
        points: the first is the baseline of those that name no other.
        labels: tokens of the target, of an encoder with a decoder.
        attention: of the model, where a point has none of its own.
    """
    found: list[Predicted] = []
    walked: dict[str, tuple[PreTrainedConfig, Sites]] = {}
    for point in points:
        if repr(point.config) not in walked:
            changed = copy.deepcopy(config)
            for name, value in point.config.items():
                setattr(changed, name, value)
            walked[repr(point.config)] = (changed, find_sites(build_meta(changed)))
        asked = replace(training, **point.training)
        step = _step(*walked[repr(point.config)], asked, point, labels, point.attention or attention)
        sizes: dict[Of, int] = {"peak": step.peak.nbytes, "activations": _activations(step)}
        base = found[point.against] if found else None
        before = sizes[point.of] if base is None else getattr(base, point.of)
        found.append(
            Predicted(
                point.label + point.way,
                sizes["peak"],
                sizes["activations"],
                point.of,
                sizes[point.of] / before - 1,
                point.published,
                point.nbytes,
            )
        )
    return found


def _step(
    config: PreTrainedConfig, sites: Sites, training: Training, point: Point, labels: int | None, attention: str
) -> Prediction:
    keys = [f"attention.implementation={attention}"] if attention == EAGER else []
    recipe: Recipe | None = None
    if point.way == CHECKPOINTING:
        training = replace(training, checkpointing="full")
    elif point.way != STOCK:
        recipe = load_recipe(point.way, keys)
    if recipe is None and keys:
        recipe = load_recipe("exact-unfolded", [*NOTHING, *keys])
    inputs = None
    if labels is not None:
        ids = torch.zeros(training.batch, training.seq or 1, dtype=torch.int64)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, :labels].clone()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return predicted(Step(config, training, sites, recipe, inputs=inputs))


_LASTING = ("weights", "gradients", "optimizer states", "optimizer transients", "workspaces", "communication", "batch")


def _activations(step: Prediction) -> int:
    live = most = 0
    for event in step.events:
        if event.storage.part not in _LASTING:
            live += event.change
            most = max(most, live)
    return most


def table(rows: Sequence[Predicted], title: str, source: str) -> Table:
    """The points, MiB."""
    result = Table(title=f"Predicted at the paper's size: {title}", title_justify="left", caption=source)
    result.caption_justify = "left"
    result.add_column("way")
    for name in ("peak", "activations", "change", "the paper's", "the paper's MiB"):
        result.add_column(name, justify="right")
    for number, row in enumerate(rows):
        result.add_row(
            row.name,
            f"{row.peak / MIB:,.0f}",
            f"{row.activations / MIB:,.0f}",
            f"{row.change:+.0%} of {row.of}" if number else "",
            "" if row.published is None else f"{row.published:+.0%}",
            "" if row.published_bytes is None else f"{row.published_bytes / MIB:,.0f}",
        )
    return result
