"""Level "weights", names: the files hold the tensors of their config's model, so that no level runs random tensors."""

from __future__ import annotations

from pathlib import Path

from memopt.checkpoint.names import SHOWN, Names, compare_names
from memopt.checkpoint.patched import PatchedFolder
from memopt.checkpoint.sources.source import needs_allow_pickle, open_source
from memopt.errors import ModelError, first_of
from memopt.patches.checks import Check, Level
from memopt.verification.models import Pair
from memopt.walk.models.config import load_config


def verify_names(folder: Path, *, trust_remote_code: bool = False) -> Check:
    """Whether the tensors of a patched folder are those of its config's model, by name and shape."""
    try:
        names = _names(str(folder), trust_remote_code)
    except ModelError as error:
        return Check("weights.names", "weights", str(folder), "fail", detail=str(error))
    return Check(
        "weights.names",
        "weights",
        names.model,
        "fail" if names.wrong else "warn" if names.random else "pass",
        metric="tensors that the model and the files do not share",
        value=len(names.wrong),
        threshold=0,
        threshold_reason="a load of the folder draws missing tensors at random",
        reference="the model of config.json, as transformers loads it",
        detail=first_of(names.wrong, SHOWN, "; ") or "; ".join(names.notes),
    )


def random_tensors(level: Level, record: PatchedFolder, pair: Pair | None, trust_remote_code: bool) -> list[Check]:
    """A check for each model that `level` cannot use, because a load would leave tensors random.

    The models are the patched folder and, where there is a `pair`, the original.
    """
    models: list[tuple[str, str | None, bool]] = [(str(record.folder), None, False)]
    if pair is not None:
        pickled = record.manifest is not None and needs_allow_pickle(record.manifest.source.files)
        models.append((pair.original, pair.revision, pickled))
    checks = []
    for model, revision, pickled in models:
        names = _names(model, trust_remote_code, revision, pickled)
        if names.wrong or names.random:
            unknown = names.wrong or tuple(f"{name} is missing" for name in names.random)
            status = "fail" if names.wrong else "skip"
            detail = (
                f"{first_of(unknown, SHOWN, '; ')}: such tensors are drawn at random, so the models cannot be compared"
            )
            checks.append(Check(f"{level}.names", level, model, status, detail=detail))  # type: ignore[arg-type]
    return checks


def _names(model: str, trust_remote_code: bool, revision: str | None = None, pickled: bool = False) -> Names:
    source = open_source(model, revision=revision, allow_pickle=pickled)
    return compare_names(source, load_config(source.root, trust_remote_code=trust_remote_code))
