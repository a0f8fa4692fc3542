"""Check a command line before torch is imported, which takes seconds."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from memopt.environment.files import model_folder, patched_folder_at
from memopt.trace.training import Train, check_peft


def check_report(model: str, recipe: str | None, overrides: Iterable[str], train: Train) -> None:
    """Raise the errors of `memopt.report` that show without torch."""
    model_folder(model)
    if recipe is not None:  # else a patched folder may have its own
        _check_recipe(recipe, overrides)
    if train != "full":
        check_peft()


def check_patch(model: str, recipe: str, overrides: Iterable[str], out: Path | None, *, force: bool | None) -> None:
    """Raise the errors of `memopt.patch_checkpoint` that show without torch; `force` None: do not check `out`."""
    from memopt.checkpoint.target import check_target, default_folder

    folder = model_folder(model)
    _check_recipe(recipe, overrides)
    if folder is not None and force is not None:
        check_target(default_folder(model) if out is None else out, folder, force=force)


def check_patched(directory: str | Path) -> None:
    """Raise the errors of `memopt.verify` that show without torch."""
    patched_folder_at(directory)


def _check_recipe(recipe: str, overrides: Iterable[str]) -> None:
    from memopt.plan.recipe import load_recipe

    load_recipe(recipe, overrides)
