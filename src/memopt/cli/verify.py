"""`memopt verify`: prove that a patched checkpoint is the same model. Options and printing; no logic of its own."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memopt.cli import common

if TYPE_CHECKING:
    from memopt.checks import Check, Level
    from memopt.verification.verdict import Verdict


class LevelChoice(str, Enum):
    """What to verify."""

    weights = "weights"
    forward = "forward"
    gradient = "gradient"
    memory = "memory"
    all = "all"


def verify(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder that `memopt patch` wrote.", show_default=False)
    ],
    against: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="The original, if it is not where memopt.json says.", show_default=False),
    ] = None,
    level: Annotated[LevelChoice, typer.Option(help="What to verify.")] = LevelChoice.all,
    allow_skips: Annotated[bool, typer.Option("--allow-skips", help="Exit 0 although a check was skipped.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the Python files that come with the model.")
    ] = False,
    inputs: common.InputsOption = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Prove that DIR holds the same model as the one it was made from.

    Exits with 0 if every check passed, 1 if one failed, 3 if one could not be made.
    """
    from memopt.verification.run import verify as run_levels

    common.note(f"Verifying {directory}")
    with common.only_results_on_stdout():
        verdict = run_levels(
            directory,
            against=against,
            level=level.value,
            trust_remote_code=trust_remote_code,
            inputs=inputs,
            progress=_tell,
        )
    code = verdict.exit_code(allow_skips=allow_skips)
    if json_output:
        fields = verdict.to_dict()
        common.print_json(common.document("verify", fields.pop("status"), model=str(directory), **fields))
        return code
    from memopt.reporting.terminal import checks_table

    common.print_rich(checks_table(verdict.checks))
    common.print_text(_summary(verdict, directory, code))
    return code


def _tell(level: Level, checks: list[Check]) -> None:
    worst = next((s for s in ("fail", "skip", "warn") if any(check.status == s for check in checks)), "pass")
    common.note(f"  {level}: {worst}")


def _summary(verdict: Verdict, directory: Path, code: int) -> str:
    if verdict.status == "pass":
        warnings = sum(check.status == "warn" for check in verdict.checks)
        return f"{directory}: all checks passed" + (f", {common.plural(warnings, 'warning')}." if warnings else ".")
    if verdict.status == "fail":
        if all(check.level == "memory" for check in verdict.checks if check.status == "fail"):
            return f"{directory}: it does not keep the bytes that the plan promises, see the failed checks."
        return f"{directory}: NOT the same model, see the failed checks."
    end = "." if code else "; the other checks passed."
    return f"{directory}: inconclusive, a check was skipped{end}"
