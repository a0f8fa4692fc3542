"""Run the levels of a verification, cheapest first, and sum up their checks."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from memopt.checkpoint.patched import PatchedFolder, check_patched, is_patched, patched_folder
from memopt.checkpoint.sources.source import MANIFEST
from memopt.environment.files import patched_folder_at
from memopt.environment.generators import generators_kept
from memopt.errors import MemoptError, ModelError, NegativeVerdict, UsageError
from memopt.patches.capabilities import Checks
from memopt.patches.checks import LEVELS, Check, Level, Status, skipped
from memopt.patches.registry import having
from memopt.reporting.terminal import checks_table
from memopt.reporting.text import as_text
from memopt.walk.calls.batch import Batch, given_batch

if TYPE_CHECKING:
    from memopt.verification.trial import CheckpointTrial


@dataclass(frozen=True)
class Verdict:
    """All checks of one verification."""

    checks: tuple[Check, ...]

    def __str__(self) -> str:
        """The table that `memopt verify` prints, and the status."""
        return f"{as_text([checks_table(self.checks)])}\n\nstatus: {self.status}"

    __repr__ = __str__

    @property
    def status(self) -> Literal["pass", "fail", "inconclusive"]:
        statuses = Counter(check.status for check in self.checks)
        if statuses["fail"]:
            return "fail"
        return "inconclusive" if statuses["skip"] or not self.checks else "pass"

    def exit_code(self, *, allow_skips: bool = False) -> int:
        """0 all passed, 1 a check failed, 3 a check was skipped (0 with `allow_skips`)."""
        if self.status == "fail":
            return 1
        return 3 if self.status == "inconclusive" and not (allow_skips and self.checks) else 0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {"status": self.status, "checks": [asdict(check) for check in self.checks]}


@generators_kept()
def verify(
    directory: str | Path,
    *,
    against: str | Path | None = None,
    level: Level | Literal["all"] | Iterable[Level] = "all",
    trust_remote_code: bool = False,
    inputs: Batch | str | Path | None = None,
    progress: Callable[[Level, list[Check]], None] | None = None,
) -> Verdict:
    """Prove that a folder written by `memopt patch` holds the same model as its original.

    Args:
        directory: the patched folder.
        against: the original model, if it is not where the manifest says; folder or hub id.
        level: ``weights``, ``forward``, ``gradient``, ``training`` or ``memory``, several of these, or ``all``.
        trust_remote_code: run the Python files that come with the model.
        inputs: keyword arguments of the forward to run both models with, or a file of them; made by default.
        progress: called with each level and its checks when the level is done.

    Raises:
        UsageError: there is no such level.
        ModelError: the folder is not there or is not a patched checkpoint.
        InputsError: the batch cannot be read, or does not fit the model.
    """
    levels, folder = _levels(level), patched_folder_at(directory)
    check_patched(folder)
    if against is not None:
        against = str(against)
        from memopt.walk.models.config import load_config

        load_config(against, trust_remote_code=trust_remote_code)
        if is_patched(Path(against)):
            raise ModelError(f"'{against}' is itself patched.", "Give the model that it was made from.")
    batch = given_batch(inputs)
    checks: list[Check] = []
    for each in levels:
        try:
            record = patched_folder(folder)
        except ModelError as error:
            return Verdict((Check(f"{each}.manifest", each, MANIFEST, "fail", detail=str(error)),))
        done = _run(each, record, against, trust_remote_code, batch)
        checks += done
        if progress is not None:
            progress(each, done)
    return Verdict(tuple(checks))


def _levels(level: str | Iterable[str]) -> tuple[Level, ...]:
    """The levels to run, cheapest first."""
    wanted = {level} if isinstance(level, str) else set(level)
    if wanted == {"all"}:
        return LEVELS
    if unknown := sorted(wanted.difference(LEVELS)):
        raise UsageError(f"There is no level '{unknown[0]}'.", f"Levels: {', '.join(LEVELS)}, all.")
    return tuple(each for each in LEVELS if each in wanted)


def _run(
    level: Level, record: PatchedFolder, against: str | None, trust_remote_code: bool, inputs: Batch | None
) -> list[Check]:
    folder, trained = record.folder, record.manifest is None
    if level == "weights":
        from memopt.verification.side_files import verify_names, verify_saved_again, verify_sites
        from memopt.verification.weights import verify_weights

        names = verify_names(folder, trust_remote_code=trust_remote_code)
        if trained:
            return [*verify_saved_again(record, against, trust_remote_code=trust_remote_code), names]
        sites = verify_sites(record, trust_remote_code=trust_remote_code)
        return [*verify_weights(folder, against), names, *sites]
    if level == "forward" and trained:
        why = (
            f"its weights were saved after it was patched, so its outputs may differ from those of {record.base_model}"
        )
        return [skipped("forward.original", "original model", why)]
    from memopt.verification.inputs import NoInputs
    from memopt.verification.side_files import random_tensors
    from memopt.verification.trial import CheckpointTrial

    trial = CheckpointTrial(folder, record.recipe, trust_remote_code, inputs, record.folded_norms())
    try:
        if level == "forward":
            from memopt.verification.forward import verify_forward

            original, revision = (against, None) if against is not None else record.origin()
            if original is None:
                why = "the original is not where memopt.json says; name it with --against MODEL"
                return [skipped("forward.original", "original model", why)]
            unknown = random_tensors(level, record, trust_remote_code, original, revision)
            return unknown or verify_forward(trial, record, original, revision)
        if level == "memory":
            from memopt.verification.memory import verify_memory
            from memopt.verification.step_memory import verify_step

            return verify_memory(trial) + verify_step(trial)
        unknown = random_tensors(level, record, trust_remote_code)
        return unknown or (_gradient(trial) if level == "gradient" else _training(trial))
    except NoInputs as error:
        return [skipped(f"{level}.inputs", "inputs", str(error))]
    except (NegativeVerdict, ModelError) as error:
        return [Check(id=f"{level}.load", level=level, subject=str(folder), status="fail", detail=str(error))]
    except MemoptError:
        raise
    except Exception as error:  # flex attention has no backward on a CPU; Reformer refuses gradients in eval mode
        from memopt.verification.gradient import stock_runs

        status: Status
        lacks = isinstance(error, NotImplementedError)
        why, status = "this machine cannot run the model" if lacks else "stock modules do not run either", "skip"
        stock_does = stock_runs(trial)
        if stock_does is not False and not lacks:  # an error of patched modules, or it may be one
            raise
        if stock_does:
            why, status = "stock modules run on this machine, patched ones end in", "fail"
        detail = f"{why}: {error or type(error).__name__}"
        return [Check(f"{level}.machine", level, str(folder), status, detail=detail)]


def _gradient(trial: CheckpointTrial) -> list[Check]:
    from memopt.verification.gradient import verify_gradient
    from memopt.verification.streamed import blocks_to_stream, verify_streamed

    checks: list[Check] = []
    if "approximate" in trial.recipe.effects:
        from memopt.verification.approximation import verify_approximation

        checks += verify_approximation(trial)
    with _exact(trial):
        streamed = blocks_to_stream(trial)
        checks += verify_gradient(trial) if streamed is None else verify_streamed(trial, *streamed)
    for patch in having(Checks):
        checks += patch.checks(trial)
    return checks


def _training(trial: CheckpointTrial) -> list[Check]:
    from memopt.verification.training import verify_training

    checks: list[Check] = []
    with _exact(trial):
        checks += verify_training(trial)
    return checks


def _exact(trial: CheckpointTrial) -> AbstractContextManager[None, bool | None]:
    """Context of an exact comparison; left out (`NegativeVerdict`) if a recipe approximates everything it patches."""
    approximates = "approximate" in trial.recipe.effects
    return contextlib.suppress(NegativeVerdict) if approximates else contextlib.nullcontext()
