"""`memopt report`: which operation saves which bytes for backward, before and after patching."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from memopt.cli import budgets, common, drawings, measured
from memopt.errors import ModelError, UsageError
from memopt.forks import forking
from memopt.prediction.cards import find_card, setup_on
from memopt.prediction.setup import Optimizer, Setup, Sharding
from memopt.trace.training import ALL_LINEAR, Checkpointing, Precision, Request, Train

_Given = Mapping[str, bool]
"""Options, and whether they are on the command line."""


def report(
    ctx: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|DIR",
            help="A local folder, a hub id, or a folder that `memopt patch` wrote.",
            show_default=False,
        ),
    ],
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            "-r",
            help="Name or YAML file, else the patched folder's own, else exact-unfolded.",
            show_default=False,
            autocompletion=common.recipe_names,
        ),
    ] = None,
    inputs: common.InputsOption = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Rows in a batch, else 1.", show_default=False)] = None,
    seq: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens in a row, else what the config allows up to 2048.", show_default=False),
    ] = None,
    precision: Annotated[
        Precision, typer.Option(help="Dtype of the weights; mixed is fp32 weights under autocast.")
    ] = "bf16",
    train: Annotated[
        Train, typer.Option(help="Train everything, LoRA adapters, or adapters on 4-bit weights.")
    ] = "full",
    lora_rank: Annotated[int, typer.Option(min=1, help="Rank of the LoRA adapters.")] = 8,
    lora_targets: Annotated[
        str, typer.Option(help="Linears that get an adapter: all-linear, or names, e.g. q,v or q_proj,down_proj.")
    ] = ALL_LINEAR,
    checkpointing: Annotated[
        Checkpointing, typer.Option(help="Activation checkpointing of every block, or none.")
    ] = "none",
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu", metavar="CARD|SIZE", help="Will it fit? A card, or its memory: rtx4090, 24GiB.", show_default=False
        ),
    ] = None,
    optimizer: Annotated[Optimizer, typer.Option(help="Whose states and transients count.")] = "adamw",
    sharding: Annotated[Sharding, typer.Option(help="How the devices share weights, gradients and states.")] = "none",
    devices: Annotated[int, typer.Option(min=1, help="Number of devices.")] = 1,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Every saved tensor, by block, before and after patching.")
    ] = False,
    html: drawings.HtmlOption = None,
    snapshot: drawings.SnapshotOption = None,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Run real steps in fresh processes (GPU, else CPU), beside what is predicted."),
    ] = False,
    budget: budgets.BudgetOption = None,
    out: budgets.OutOption = None,
    allow: budgets.AllowOption = None,
    emit: common.EmitOption = None,
    force: budgets.ForceOption = False,
    frontier: budgets.FrontierOption = False,
    revision: common.RevisionOption = None,
    trust_remote_code: common.TrustOption = False,
    json_output: common.JsonOption = False,
) -> int:
    """Show whether a training step fits, its peak, and what would change it.

    Computed from the model's config alone: no weights, no GPU. With -v, which operation saves which bytes for backward,
    before and after patching. Only for a recipe that samples, and where the weights are in a local folder, one training
    step on the CPU measures the noise of the sampling.

    Example: memopt report meta-llama/Llama-3.1-8B --seq 8192 --train lora --gpu rtx4090
    """
    if inputs is not None and (given := [n for n, v in (("--batch", batch), ("--seq", seq)) if v is not None]):
        raise UsageError(
            f"--inputs and {given[0]} cannot go together: the file says how large the batch is.",
            f"Leave out {' and '.join(given)}, or --inputs.",
        )
    if train == "full":
        for option in ("--lora-rank", "--lora-targets"):
            source = ctx.get_parameter_source(option[2:].replace("-", "_"))
            if source is not None and source.name == "COMMANDLINE":
                raise UsageError(
                    f"{option} is about LoRA, and --train is full.", f"Add --train lora, or leave out {option}."
                )
    asked, files = budgets.Question(budget, frontier, allow), drawings.Files(html, snapshot, out, emit or (), force)
    asked.check(files)
    _check_together(
        asked.option or ("--measure" if measure else None),
        both={"--gpu": gpu is not None, "--verbose": verbose},
        plan={"--measure": measure, "--checkpointing": checkpointing != "none"},
        measure={"--html": html is not None, "--snapshot": snapshot is not None, "--devices": devices > 1},
    )
    files = files.checked()
    targets = tuple(name.strip() for name in lora_targets.split(",") if name.strip())
    if not targets:
        raise UsageError("--lora-targets names no linear.", f"Give names, or {ALL_LINEAR}.")
    request = Request.of({**locals(), "lora_targets": targets})
    setup = _setup(optimizer, sharding, devices, gpu or budget)
    if asked.option is not None:
        return budgets.show(request, setup, asked, files, json_output=json_output)
    if measure:
        return measured.show(request, setup, json_output=json_output)
    with common.only_results_on_stdout(), common.waiting("Tracing training steps"), forking():
        with common.importing():
            from memopt.pipeline import report_on
            from memopt.prediction.alternatives import headline

        first, comparison = None, None
        if verbose or json_output or files.drawn:
            comparison = report_on(request, common.note)
        try:
            step, traces = (comparison.step, comparison.traces) if comparison is not None else (None, (None, None))
            first = headline(request, gpu=gpu, setup=setup, step=step, traces=traces)
        except ModelError:
            if gpu is not None:
                raise
            # What is saved may be known all the same, or the report says why not.
        if comparison is None and (first is None or first.approximate):
            comparison = report_on(request, common.note)
        if comparison is not None:
            drawings.write(comparison, setup, files, headline=first)
    if json_output and comparison is not None:
        head = None if first is None else first.to_dict()
        common.print_json(common.document("report", "pass", headline=head, **comparison.to_dict()))
        return common.EXIT_OK
    if first is not None:
        from memopt.reporting.headline import headline_tables

        common.print_rich(*headline_tables(first))
    if comparison is not None:
        from memopt.reporting.compare import comparison_tables

        all_of_it = verbose or first is None
        sections = (line for section in comparison.sections for line in ("", *section.lines()))
        common.print_rich(*(comparison_tables(comparison) if all_of_it else sections))
    return common.EXIT_OK


def _setup(optimizer: Optimizer, sharding: Sharding, devices: int, card: str | None) -> Setup:
    """
    Raises:
        UsageError: the options do not go together, or no card is named so.
    """
    if sharding != "none" and devices == 1:
        raise UsageError(f"--sharding {sharding} needs more than one device.", "Add --devices N.")
    if devices > 1 and sharding == "none":
        raise UsageError(
            f"--devices {devices} does not say what the devices share.", "Add --sharding, e.g. --sharding fsdp."
        )
    try:
        setup = Setup(optimizer, sharding=sharding, devices=devices)
    except ValueError as error:
        raise UsageError(str(error), "Change --sharding or --optimizer.") from error
    return setup if card is None else setup_on(find_card(card), setup)


def _check_together(mode: str | None, *, both: _Given, plan: _Given, measure: _Given) -> None:
    """Refuse what a plan, a measurement, or both leave out of account.

    Raises:
        UsageError: it is given beside `mode`.
    """
    if mode is None:
        return
    left_out = {**both, **(measure if mode == "--measure" else plan)}
    for option in (option for option, is_given in left_out.items() if is_given):
        raise UsageError(f"{mode} and {option} cannot go together.", f"Leave out {option}.")
