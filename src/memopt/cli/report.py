"""`memopt report`: whether a step fits, and which operation saves how many bytes, before and after patching."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from memopt.cli import common, outputs
from memopt.environment.files import inputs_file, model_folder
from memopt.environment.forks import forking
from memopt.errors import ModelError, UsageError
from memopt.prediction.cards import find_card, setup_on
from memopt.prediction.headline import Steps
from memopt.prediction.setup import OPTIMIZERS, Optimizer, Setup, Sharding
from memopt.trace.training import ALL_LINEAR, AdapterDtype, Checkpointing, Precision, Request, Train, check_peft
from memopt.walk.models.attention import Implementation

if TYPE_CHECKING:
    from memopt.prediction.measure import Comparison as Measured


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
        common.optional(
            "Name or YAML file; default: the patched folder's own, else exact-unfolded.",
            "NAME|FILE",
            "--recipe",
            "-r",
            autocompletion=common.recipe_names,
        ),
    ] = None,
    inputs: common.InputsOption = None,
    overrides: Annotated[
        list[str] | None, common.optional("Change a key of the recipe; repeatable.", "KEY=VALUE", "--set")
    ] = None,
    batch: Annotated[int | None, common.optional("Rows in a batch; default: 1.", "ROWS", min=1)] = None,
    seq: Annotated[
        int | None, common.optional("Tokens in a row; default: the config's limit, at most 2048.", "TOKENS", min=1)
    ] = None,
    images: Annotated[
        int | None, common.optional("Images in a row of text; their features are among its tokens.", "IMAGES", min=1)
    ] = None,
    image_side: Annotated[
        int | None, common.optional("Height and width of an image; default: the config's.", "PIXELS", min=1)
    ] = None,
    precision: Annotated[
        Precision, typer.Option(help="Dtype of the weights; mixed: fp32 ones under autocast; bf16-autocast: bf16 ones.")
    ] = "bf16",
    train: Annotated[
        Train, typer.Option(help="Train everything, LoRA adapters, or adapters on 4-bit weights.")
    ] = "full",
    lora_rank: Annotated[int, typer.Option(min=1, metavar="RANK", help="Rank of the LoRA adapters.")] = 8,
    lora_targets: Annotated[
        str,
        typer.Option(
            metavar="NAMES", help="Linears that get an adapter: all-linear, or names, e.g. q,v or q_proj,down_proj."
        ),
    ] = ALL_LINEAR,
    lora_dtype: Annotated[
        AdapterDtype, typer.Option(help="Adapters in fp32, as PEFT makes them, or in the dtype of the weights.")
    ] = "fp32",
    lora_dropout: Annotated[
        float, typer.Option(min=0.0, max=1.0, metavar="PROBABILITY", help="Of the adapters' dropouts.")
    ] = 0.0,
    use_dora: Annotated[bool, typer.Option("--use-dora", help="With LoRA: DoRA adapters, as PEFT's.")] = False,
    modules_to_save: Annotated[
        str | None,
        common.optional("With LoRA: modules that are trained in full, as PEFT's, e.g. embed_tokens,lm_head.", "NAMES"),
    ] = None,
    freeze: Annotated[
        str | None,
        common.optional("Parts that full tuning does not train, e.g. visual,embed_tokens or 'layers.[0-7]'.", "NAMES"),
    ] = None,
    checkpointing: Annotated[
        Checkpointing, typer.Option(help="Activation checkpointing of every block, or none.")
    ] = "none",
    attention: Annotated[
        Implementation | None, typer.Option(help="The model's attn_implementation; default: transformers' choice.")
    ] = None,
    gpu: Annotated[
        str | None, common.optional("Will it fit? A card, or its memory: rtx4090, 24GiB.", "CARD|SIZE")
    ] = None,
    longest: Annotated[
        bool, typer.Option("--longest", help="With --gpu: the longest sequence of each way to train. Takes minutes.")
    ] = False,
    optimizer: Annotated[
        Optimizer,
        typer.Option(metavar="NAME", help=f"Optimizer whose states and transients count: {', '.join(OPTIMIZERS)}."),
    ] = "adamw-fused",
    accumulation: Annotated[
        int,
        typer.Option(min=1, metavar="NUMBER", help="Micro-batches in a step (gradient accumulation), each of --batch."),
    ] = 1,
    release_gradients: Annotated[
        bool,
        typer.Option("--release-gradients", help="The optimizer steps in backward and frees gradients one by one."),
    ] = False,
    sharding: Annotated[Sharding, typer.Option(help="How the devices share weights, gradients and states.")] = "none",
    devices: Annotated[int, typer.Option(min=1, metavar="NUMBER", help="Number of devices.")] = 1,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print every saved tensor, by block, before and after patching.")
    ] = False,
    html: outputs.HtmlOption = None,
    snapshot: outputs.SnapshotOption = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Run real steps in fresh processes (GPU, else CPU), and print them beside the prediction."
        ),
    ] = False,
    budget: outputs.BudgetOption = None,
    out: outputs.OutOption = None,
    allow: outputs.AllowOption = None,
    emit: common.EmitOption = None,
    force: outputs.ForceOption = False,
    frontier: outputs.FrontierOption = False,
    revision: common.RevisionOption = None,
    trust_remote_code: common.TrustOption = False,
    json_output: common.JsonOption = False,
) -> int:
    """Show whether a training step fits, its peak, and what would change it.

    It computes everything from the model's config: no weights, no GPU. With -v it lists which operation saves which
    bytes for backward, before and after patching. Only if a recipe samples and the weights are in a local folder, it
    runs one training step on the CPU to measure the noise of the sampling.

    Example: memopt report meta-llama/Llama-3.1-8B --seq 8192 --train lora --gpu rtx4090
    """
    sizes = {"--batch": batch, "--seq": seq, "--images": images, "--image-side": image_side}
    if inputs is not None and (given := [option for option, value in sizes.items() if value is not None]):
        raise UsageError(
            f"--inputs and {given[0]} cannot go together: the file says how large the batch is.",
            f"Leave out {' and '.join(given)}, or --inputs.",
        )
    if train == "full":
        for option in ("--lora-rank", "--lora-targets", "--lora-dtype", "--lora-dropout"):
            source = ctx.get_parameter_source(option[2:].replace("-", "_"))
            if source is not None and source.name == "COMMANDLINE":
                raise UsageError(
                    f"{option} needs LoRA, and --train is full.", f"Add --train lora, or leave out {option}."
                )
    if longest and (gpu is None or inputs is not None):
        remedy = "Add --gpu CARD." if gpu is None else "Leave out --inputs."
        raise UsageError("--longest needs a card, and no given inputs.", remedy)
    asked = outputs.Outputs(html, snapshot, out, emit or (), force, budget, frontier, allow)
    asked.check_options(gpu)
    if release_gradients and emit:
        raise UsageError("--release-gradients and --emit cannot go together.", "Add the call to the training yourself.")
    if freeze and emit:
        common.note("note: no engine's file freezes weights: your training has to, before its first step.")
    mode = asked.planner or ("--measure" if measure else None)
    left_out = {"--gpu": gpu is not None and not asked.planner, "--verbose": verbose, "--longest": longest}
    if mode == "--measure":
        left_out |= {"--html": html is not None, "--snapshot": snapshot is not None, "--devices": devices > 1}
    else:
        left_out |= {"--measure": measure, "--checkpointing": checkpointing != "none"}
    for option in (option for option, is_given in left_out.items() if is_given and mode is not None):
        raise UsageError(f"{mode} and {option} cannot go together.", f"Leave out {option}.")
    asked = asked.checked()
    targets = tuple(name.strip() for name in lora_targets.split(",") if name.strip())
    if not targets:
        raise UsageError("--lora-targets names no linear.", f"Give names, or {ALL_LINEAR}.")
    # Errors that show without torch, which takes seconds to import.
    folder = model_folder(model, revision)
    if inputs is not None:
        inputs_file(inputs)
    if force and not any((html, snapshot, out)):
        common.note("note: --force has no effect: no file is to be written.")
    from memopt.checkpoint.patched import is_patched

    if recipe is not None or folder is None or not is_patched(folder):  # a patched folder may have its own
        from memopt.plan.recipe import DEFAULT_MEMORY_RECIPE, load_recipe

        load_recipe(DEFAULT_MEMORY_RECIPE if recipe is None else recipe, overrides or ())
    if train != "full":
        check_peft()
    names = {"lora_targets": targets, "modules_to_save": modules_to_save or (), "freeze": freeze or ()}
    request = Request.of({**locals(), **names, "overrides": tuple(overrides or ())})
    setup = Setup(
        optimizer, accumulation=accumulation, release_gradients=release_gradients, sharding=sharding, devices=devices
    )
    setup.check_precision(precision)
    card = budget if gpu is None else gpu
    setup = setup if card is None else setup_on(find_card(card), setup)
    if asked.planner is not None:
        return outputs.show_plan(request, setup, asked, card=gpu, json_output=json_output)
    if measure:
        return _show_measured(request, setup, json_output=json_output)
    steps = Steps("Tracing training steps")
    with common.only_results_on_stdout(), common.waiting(steps), forking():
        with common.importing():
            from memopt.pipeline import report_on
            from memopt.prediction.alternatives import headline

        first, comparison = None, None
        if verbose or json_output or asked.drawn:
            comparison = report_on(request, common.note, setup)
        try:
            step, traces = (comparison.step, comparison.traces) if comparison is not None else (None, (None, None))
            first = headline(request, gpu=gpu, setup=setup, step=step, traces=traces, steps=steps, longest=longest)
        except ModelError:
            if gpu is not None:
                raise
            # `report_on` below may still count the saved bytes, or raise an error with the reason.
        if comparison is None and (first is None or first.approximate):
            comparison = report_on(request, common.note, setup)
        if comparison is not None:
            outputs.draw(comparison, setup, asked, headline=first)
    if json_output and comparison is not None:
        head = None if first is None else first.to_dict()
        common.print_json(common.document("report", "pass", headline=head, **comparison.to_dict()))
        return common.EXIT_OK
    if first is not None:
        from memopt.reporting.terminal import headline_tables

        common.print_rich(*headline_tables(first))
    if comparison is not None:
        from memopt.reporting.compare import comparison_tables

        all_of_it = verbose or first is None
        if first is not None:  # its notes stand above
            comparison = replace(comparison, notes=tuple(each for each in comparison.notes if each not in first.notes))
        sections = (line for section in comparison.sections for line in ("", *section.lines()))
        common.print_rich(*(comparison_tables(comparison) if all_of_it else sections))
    return common.EXIT_OK


def _show_measured(request: Request, setup: Setup, *, json_output: bool) -> int:
    """Predict and run a step of the stock and of the patched model, and print both."""
    with common.only_results_on_stdout(), common.waiting("Running real steps"):
        from memopt.prediction.measure import check_measurable, compare
        from memopt.prediction.subject import step_of

        check_measurable(setup)
        of = step_of(request)
        found = {"stock": compare(of.stock, setup), of.rules.name: compare(of, setup)}
    if json_output:
        from dataclasses import asdict

        rows = {name: asdict(each) for name, each in found.items()}
        words, name = f"{of.training}, {setup}", str(request.model)
        common.print_json(common.document("report", "pass", model={"id": name}, training=words, measured=rows))
    else:
        common.print_rich(f"{request.model}: {of.training}, {setup}")
        _print_measured(found)
    return common.EXIT_OK


def _print_measured(found: dict[str, Measured]) -> None:
    from rich.table import Column, Table

    device = next(iter(found.values())).measured.device
    numbers = (Column(heading, justify="right") for heading in ("predicted", "measured", "off by"))
    table = Table("", "peak in", *numbers, title=f"The second step on {device}, MiB", title_justify="left")
    for name, each in found.items():
        real = each.measured
        rows = [(name, each.moment, each.predicted, real.allocated)]
        if real.reserved is not None:
            rows.append(("  reserved", "", each.predicted_reserved, real.reserved))
        for title, moment, predicted, measured in rows:
            sizes = (f"{nbytes / 2**20:,.1f}" for nbytes in (predicted, measured))
            table.add_row(title, moment, *sizes, f"{predicted / measured - 1:+.2%}")
        table.add_row("  RSS", "", "", f"{real.rss / 2**20:,.1f}", "")
    what = "live storages" if device == "cpu" else "what its allocator gave"
    common.print_rich(table, f"Measured: {what}, with random weights. RSS is that of the whole process.")
