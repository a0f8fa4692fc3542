"""What was done to a model in memory, in a few lines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memopt.errors import printable
from memopt.patches.base import PlanView
from memopt.patches.record import Record
from memopt.plan.shipped import shipped
from memopt.reporting.terminal import coverage_totals


@dataclass(frozen=True)
class Summary:
    """What a patched model is; `print` shows it in a few lines."""

    modules: int
    """Number of modules that run memopt's forward; 0 for a stock model."""
    plan: PlanView | None = None
    """The action and reason of each site; None where the model carries no record."""
    refused: tuple[tuple[str, str], ...] = ()
    """(module, reason) of planned rewrites that could not be applied."""
    remarks: tuple[str, ...] = ()
    """What was set on the model itself and concerns the patches."""

    @property
    def recipe(self) -> str | None:
        """Name of the recipe."""
        return None if self.plan is None else self.plan.recipe.name

    def __str__(self) -> str:
        if not (self.modules or self.remarks):
            return "This model is not patched; memopt.patch(model) patches it."
        if self.plan is None:
            return f"Part of a patched model: {self.modules} of its modules are patched. Undo: memopt.unpatch(model)"
        lines = [f"Patched by recipe '{self.recipe}': {self.modules} modules run memopt's forward."]
        if self.plan.recipe.name not in shipped() and self.plan.recipe.description:
            lines.append(f"  {self.plan.recipe.description}")
        lines += [f"  {line}" for line in coverage_totals(self.plan)]
        lines += [f"  left as it was: {name or 'the model'}: {reason}" for name, reason in self.refused]
        if inexact := self.plan.recipe.without("approximate", "sampled"):
            keys = ", ".join(setting.partition(".")[0] for setting in inexact)
            lines.append(f"  under torch.compile what is not exact of {keys} is off")
        lines += [f"  {remark}" for remark in self.remarks]
        return "\n".join(map(printable, [*lines, "Undo: memopt.unpatch(model)"]))

    __repr__ = __str__


def summarize(modules: int, record: Record | None, remarks: Iterable[str] = ()) -> Summary:
    """Summary of a model with `modules` patched modules and the record that it carries."""
    if record is None:
        return Summary(modules)
    return Summary(modules, record.plan, record.refused, tuple(remarks))
