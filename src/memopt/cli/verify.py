"""`memopt verify`: prove that a patched checkpoint is the same model. Options and printing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from memopt.cli import common
from memopt.environment.files import inputs_file, patched_folder_at
from memopt.patches.checks import Check, Level

if TYPE_CHECKING:
    from memopt.verification.run import Verdict


def verify(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder that `memopt patch` wrote.", show_default=False)
    ],
    against: common.AgainstOption = None,
    level: Annotated[Literal[Level, "all"], typer.Option(help="What to verify.")] = "all",
    allow_skips: Annotated[bool, typer.Option("--allow-skips", help="Exit 0 although a check was skipped.")] = False,
    trust_remote_code: common.TrustOption = False,
    inputs: common.InputsOption = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print every check with its limit, its reference and its reason.")
    ] = False,
    json_output: common.JsonOption = False,
) -> int:
    """Prove that DIR holds the same model as its original.

    Prints a line for each level, and each check that did not pass. Exits with 0 if every check passed, 1 if one
    failed, 3 if one was skipped.
    """
    # Errors that show without torch, which takes seconds to import.
    from memopt.checkpoint.patched import check_patched

    check_patched(patched_folder_at(directory))
    if inputs is not None:
        inputs_file(inputs)
    common.note(f"Verifying {directory}")
    with common.only_results_on_stdout(), common.waiting("Verifying"):
        from memopt.verification.run import verify as run_levels

        verdict = run_levels(
            directory, against=against, level=level, trust_remote_code=trust_remote_code, inputs=inputs, progress=_tell
        )
    code = verdict.exit_code(allow_skips=allow_skips)
    if json_output:
        fields = verdict.to_dict()
        common.print_json(common.document("verify", fields.pop("status"), model=str(directory), **fields))
        return code
    from memopt.reporting.terminal import checks_summary, checks_table

    if verbose:
        common.print_rich(checks_table(verdict.checks))
    else:
        common.print_rich(checks_summary(verdict.checks))
        common.say("Of each level, the check that is nearest to its limit; --verbose prints all.")
    common.say(_summary(verdict, directory, code))
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
            return f"{directory}: it does not save as many bytes as its plan says; see the failed checks."
        return f"{directory}: NOT the same model; see the failed checks."
    end = "." if code else "; the other checks passed."
    return f"{directory}: inconclusive, a check was skipped{end}"
