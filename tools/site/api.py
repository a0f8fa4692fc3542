"""The page of the Python interface: every name that `import memopt` offers, with its docstring."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Title of a section -> its names, in the order of use.
SECTIONS = {
    "A model in memory": ("patch", "unpatch", "summary", "plan_for"),
    "Checkpoints": ("load", "patch_checkpoint", "unpatch_checkpoint", "convert_adapter", "verify"),
    "Memory of a step": ("fit", "report"),
    "Training": ("TrainerCallback", "release_gradients"),
    "Recipes and plans": ("Recipe", "load_recipe", "Plan", "make_plan", "PatchResult", "UnpatchResult"),
}
#: Names of other modules, by their section.
BESIDE = {
    "Training": ("memopt.integrations.lightning.MemoptCallback",),
    "Sampled gradients": (
        "memopt.sampling.IndexedDataset",
        "memopt.sampling.GradientMemoryCallback",
        "memopt.sampling.remember_gradients",
    ),
    "Errors": ("memopt.errors",),
}


def page() -> str:
    """One section after the other.

    Raises:
        ValueError: a public name is in no section, or a name of a section is not public.
    """
    named = {name for names in SECTIONS.values() for name in names}
    if odd := named ^ (public() - {"__version__"}):
        raise ValueError(f"tools/site/api.py: names of memopt.__all__ and of SECTIONS differ: {', '.join(sorted(odd))}")
    return "\n".join(_lines()) + "\n"


def public() -> set[str]:
    """`memopt.__all__`, read without an import."""
    tree = ast.parse((ROOT / "src" / "memopt" / "__init__.py").read_text())
    (value,) = (
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return set(ast.literal_eval(value))


def _lines() -> Iterator[str]:
    yield "# Python reference"
    yield ""
    yield "Every name that `import memopt` offers. [Quick start](quick-start.md) shows the first three lines."
    for title in dict.fromkeys([*SECTIONS, *BESIDE]):
        yield from ("", f"## {title}", "")
        for name in (*(f"memopt.{name}" for name in SECTIONS.get(title, ())), *BESIDE.get(title, ())):
            yield from (f"::: {name}", "")
