"""One model type's step with the ways of long training: stock, and with checkpointed blocks, tiles of tokens, kept
attention, offloaded inputs and recomputed outputs of linears.

`benchmarks.coverage --ways` runs it on every type, `tests/zoo/test_ways.py` on some.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from memopt.patches.checkpointing.patch import BOTH
from memopt.plan.plan import make_plan
from memopt.plan.recipe import load_recipe
from memopt.walk.calls.inputs import Call, Calls, training_targets
from memopt.walk.models.config import config_nodes
from memopt.walk.observe import walk_config
from tests.zoo.build import Row, completed, model_types, runnable
from tests.zoo.coverage_sums import COVERAGE, Sum, count, runs
from tests.zoo.examine import compare_modules

#: What the last `benchmarks.coverage --ways` recorded.
WAYS = Path(__file__).parents[2] / "benchmarks" / "results" / "zoo_ways.json"
#: Recipe -> settings. Batches here are small: tiles have three tokens, and attention's backward takes one head at once.
RECIPES = {"long-context": ("tiles.tokens=3", "checkpointing.attention_room=0.001"), "exact-levels": ()}


def types_least_alike_first() -> list[str]:
    """Every model type: first one, the quickest, of each kind by input and by what memopt does to its modules."""
    seen: Counter[str] = Counter()
    order: dict[str, tuple[float, float]] = {}
    for row in sorted(json.loads(COVERAGE.read_text())["rows"], key=lambda row: row["seconds"]):
        if runs(row):
            kind = str(
                (row["main_input"], [(kind, sorted(actions)) for kind, actions in sorted(row["counts"].items())])
            )
            order[row["model_type"]] = seen[kind], row["seconds"]
            seen[kind] += 1
    return sorted(model_types(), key=lambda name: order.get(name, (math.inf, 0.0)))


def examine_ways(model_type: str) -> Row:
    """Compare steps of one model type. Its row counts the sites of `long-context`."""
    return completed(Row(model_type), _examine)


def _examine(row: Row) -> None:
    _, twin, calls = runnable(row)
    row.model_class, row.main_input = type(twin).__name__, str(getattr(twin, "main_input_name", ""))
    _without_dropout(twin)
    sites = walk_config(twin.config)
    steps = [(call, True) for call in _steps(twin, calls)]
    for name, settings in RECIPES.items():
        plan = make_plan(sites, load_recipe(name, settings))
        row.counts = row.counts or plan.counts()
        compare_modules(row, name, twin, plan, (), steps)


def _without_dropout(model: PreTrainedModel) -> None:
    """Switch off dropouts, in place: a tile draws other random numbers than the whole."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    for each in (*model.modules(), *config_nodes(model.config)):
        for name, value in vars(each).items():
            if "drop" in name and isinstance(value, float):
                setattr(each, name, 0.0)


class _OfLoss(Call):
    """A call of which only the loss is read."""

    def run(self, model: nn.Module) -> Any:
        return super().run(model).loss


def _steps(model: PreTrainedModel, calls: Calls) -> list[Call]:
    """Plain and padded calls; where the model returns a loss for labels, it stands for the first call."""
    first, *others = calls
    targets = {} if first.target else training_targets(model, first.kwargs)
    others = [call for call in others if "odd" not in call.label]
    return [_OfLoss("loss", {**first.kwargs, **targets}) if targets else first, *others]


def ways_sums(rows: Sequence[dict[str, Any]]) -> list[Sum]:
    """How many types are right, and why the others are not compared."""
    names: dict[str, list[str]] = {}
    for row in rows:
        label = row["status"] if row["status"] in ("ok", "wrong") else f"{row['status']}: {row['reason']}"
        names.setdefault(label, []).append(row["model_type"])
    wrong, right = names.pop("wrong", []), [row for row in rows if row["status"] == "ok"]
    names.pop("ok", None)
    with_blocks, with_tiles = (
        sum(count([row], *which) > 0 for row in right) for which in (("checkpointing", BOTH), ("tile", "tiles"))
    )
    compared = len(wrong) + len(right)
    missing = set(model_types()) - {row["model_type"] for row in rows}
    return [
        Sum("steps that are not the stock model's", f"{', '.join(wrong) or 0} of {compared}", "0", not wrong),
        Sum("types whose plan checkpoints blocks", f"{with_blocks} of {compared}", "", True),
        Sum("types whose plan has tiles of tokens", f"{with_tiles} of {compared}", "", True),
        Sum("types that have no row yet", str(len(missing)), "", True),
        *(Sum(label, ", ".join(each), "", True) for label, each in sorted(names.items())),
    ]
