"""Level "memory": the bytes that the patched model saves for backward agree with the plan, by block and by module.

The stock model runs stock code only. The limit of bytes for each patched module follows from the sizes of the stock
modules' outputs and the plan's arithmetic (`memopt.patches.capabilities.Saves`), not from patched code. The trace of
the plan on the config, which `memopt report` prints, is compared with the measurement as well. The patched model's live
storages are counted too, so that a tensor hidden in an attribute is found.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memopt.errors import ModelError
from memopt.patches.base import PlanView
from memopt.patches.capabilities import Checks, Output
from memopt.patches.checks import Check, limited, skipped, worst_name
from memopt.patches.record import record_of
from memopt.patches.registry import having, patches
from memopt.patches.scope import choose_scopes
from memopt.patches.swap import is_swapped
from memopt.saved.scope import RecomputeScope
from memopt.trace.account import Account, account, live_by_module, live_bytes
from memopt.trace.arguments import PRECISIONS
from memopt.trace.timeline import Timeline
from memopt.trace.trace import trace_account
from memopt.trace.training import Step, Training
from memopt.verification.inputs import Probes
from memopt.verification.models import cast_inputs, load_patched, load_run_free, stored_dtype
from memopt.verification.trial import CheckpointTrial, loss_of
from memopt.walk.calls.batch import Batch
from memopt.walk.observe import walk_model
from memopt.walk.sites import Sites, is_inside

#: Share by which prediction and measurement may differ, to pass and to fail; PyTorch's tests of its own memory tracker
#: tolerate 10 %.
PASS_DRIFT, WARN_DRIFT = 0.03, 0.10


@dataclass(frozen=True)
class _Stock:
    """The saved tensors of the stock model, and the inputs and sites of all runs."""

    account: Account
    config: Any
    dtype: torch.dtype
    probes: Probes
    driven: Batch | None
    """The batch that the walk runs with; None to guess one."""
    sites: Sites
    outputs: Mapping[str, list[Output]]
    """Module -> the outputs of its calls."""
    parameters: Mapping[str, int]
    """Module -> bytes of its parameters."""
    hidden: int
    """Live bytes after a forward that are in no saved tensor: the model's own cache."""


@dataclass(frozen=True)
class _Patched:
    """The saved tensors of the patched model, and its plan."""

    account: Account
    in_scopes: Account
    """The same with a scope around each block that the check opens itself, whatever the patched code opens."""
    live: int
    hidden_in: str
    """The module that allocated most of the live bytes that `account` does not have."""
    plan: PlanView | None
    modules: frozenset[str]
    """Names of the modules that are patched."""


def verify_memory(trial: CheckpointTrial) -> list[Check]:
    """Measure one forward of both models on real tensors (eval mode, so no dropout masks) and compare."""

    def run_stock(model: nn.Module) -> _Stock:
        probes = trial.probes(model)
        # Without a batch of the user's or a processor's, the walk guesses inputs itself, in all variants.
        driven = None if probes.guessed else cast_inputs(probes.batches[0], stored_dtype(model))
        sites = walk_model(model, driven)
        run = _forward(model, probes)
        with _outputs(model) as outputs:
            measured = account(model, run, blocks=sites.blocks, sites=sites)
        parameters = {name: sum(each.nbytes for each in module.parameters()) for name, module in model.named_modules()}
        hidden = max(live_bytes(run) - measured.saved, 0)
        return _Stock(measured, model.config, stored_dtype(model), probes, driven, sites, outputs, parameters, hidden)

    def run_patched(model: nn.Module) -> _Patched:
        run = _forward(model, probes)
        measured, live = account(model, run, blocks=sites.blocks, sites=sites), live_bytes(run)
        hidden_in = _hidden_in(model, run, measured) if live - stock.hidden > measured.saved else ""
        record = record_of(model)
        plan = None if record is None else record.plan
        swapped = frozenset(name for name, module in model.named_modules() if is_swapped(module))
        if plan is None:
            return _Patched(measured, measured, live, hidden_in, plan, swapped)
        with _in_scopes(model, plan):
            in_scopes = account(model, run, blocks=sites.blocks, sites=sites)
        return _Patched(measured, in_scopes, live, hidden_in, plan, swapped)

    stock = load_run_free(trial.stock, run_stock)
    probes, driven, sites = stock.probes, stock.driven, stock.sites
    load = functools.partial(load_patched, trial.source, trust_remote_code=trial.trust_remote_code, inputs=driven)
    run = load_run_free(load, run_patched)
    patched = run.account
    checks = [*_compare(stock, run), *_each_module(stock, run)]
    precision = PRECISIONS.get(stock.dtype)
    if precision is None:
        return [*checks, _skipped("no trace is made for checkpoints in this dtype")]
    recipe = trial.recipe.unfolded()
    training = Training(probes.rows, probes.tokens_per_row, precision, dropout=False, cuda_kernels=False)
    # Rows and tokens determine a batch of tokens; with sounds and images, the trace needs the measured batch.
    others = any(isinstance(value, Tensor) and value.is_floating_point() for value in probes.batches[0].values())
    batch = probes.batches[0] if others or probes.tokens_per_row is None else driven
    try:
        predicted = trace_account(Step(stock.config, training, sites, recipe, trial.folded, batch))
    except ModelError as error:
        return [*checks, _skipped(str(error))]
    return [*checks, *_against_plan(patched, predicted)]


def _hidden_in(model: nn.Module, run: Callable[[], Tensor], measured: Account) -> str:
    """The module that allocated most of the live bytes that `measured` does not have, read from the stack: an account
    registers hooks, and modules may take another path under hooks."""
    hidden = live_by_module(run, Timeline(model))
    for each in measured.storages:
        hidden[each.module] -= each.nbytes
    return max(hidden, key=lambda name: hidden[name], default="")


def _forward(model: nn.Module, probes: Probes) -> Callable[[], Tensor]:
    """A forward of the model, which has run once: what a model keeps from its first forward on is no saved tensor."""
    inputs = cast_inputs({**probes.batches[0], **probes.targets[0]}, stored_dtype(model))

    def run() -> Tensor:
        return loss_of(model(**inputs))

    run()
    return run


def _compare(of_stock: _Stock, run: _Patched) -> Iterator[Check]:
    stock, patched, live = of_stock.account, run.account, run.live - of_stock.hidden
    blocks = list(stock.blocks)
    before, after = _of_blocks(stock), _of_blocks(patched)
    subject = f"{len(blocks)} blocks" if blocks else "whole model"
    ratio = after / before if before else float("nan")
    yield Check(
        id="memory.kept", level="memory", subject=subject, status="pass" if ratio < 1 else "fail",
        metric="bytes saved for backward / the stock model's", value=ratio, threshold=1.0,
        threshold_reason="patching must save", reference="stock modules, same weights and inputs", n=after,
        detail=f"{_mib(before)} -> {_mib(after)} in the {subject}, "
        f"whole model {_mib(stock.total)} -> {_mib(patched.total)}",
    )  # fmt: skip
    growing = [block for block in blocks if patched.per_block()[block] > stock.per_block()[block]]
    yield limited(
        "memory.no_block_grows", growing[0] if growing else subject, float(len(growing)), 0.0,
        "blocks that save more than before", reference="stock modules, same weights and inputs", n=len(blocks),
    )  # fmt: skip
    hidden = max(live - patched.saved, 0)
    yield Check(
        id="memory.nothing_hidden", level="memory", subject=run.hidden_in or "whole model",
        status="pass" if hidden == 0 else "fail", metric="live bytes after forward that are in no saved tensor",
        value=float(hidden), threshold=0.0, threshold_reason="every live byte belongs to a saved tensor",
        reference="live storages after the forward beyond stock's", n=live, detail=f"inputs: {of_stock.probes.source}",
    )  # fmt: skip


@contextlib.contextmanager
def _outputs(model: nn.Module) -> Iterator[dict[str, list[Output]]]:
    """Inside, collect the outputs of the modules of `model` that return one tensor, by module."""
    found: dict[str, list[Output]] = {}

    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.dim():
            width = max(output.shape[-1], 1)
            found.setdefault(name, []).append(Output(output.numel() // width, width, output.element_size()))

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(functools.partial(note, name)))
        yield found


@contextlib.contextmanager
def _in_scopes(model: nn.Module, plan: PlanView) -> Iterator[None]:
    """Inside, each block that has a scope in `plan` runs in one that is opened here, whatever its own code opens."""

    def run(forward: Callable[..., Any], families: frozenset[str], *args: Any, **kwargs: Any) -> Any:
        with RecomputeScope(families):
            return forward(*args, **kwargs)

    scopes = choose_scopes(plan, [patch.scope(plan) for patch in patches()])
    with contextlib.ExitStack() as replaced:
        for name, scope in scopes.items():
            if name in plan.sites.blocks and scope.compression is None:
                block: Any = model.get_submodule(name)
                replaced.callback(setattr, block, "forward", block.forward)
                block.forward = functools.partial(run, block.forward, scope.families)
        yield


def _each_module(stock: _Stock, patched: _Patched) -> Iterator[Check]:
    """The bytes that each patched module saves of its own results, and the bytes saved of recomputed results."""
    plan = patched.plan
    if plan is None:
        return
    allowed, own = _own(stock.account), _own(patched.account)
    stock_saves, saves = _all_saves(stock.account), _all_saves(patched.account)
    planned = [patch.saves(plan, stock.outputs) for patch in having(Checks)]
    producers = {name for each in planned for name in each.recomputed}
    for saves_at_most in (each.own for each in planned):
        for name, nbytes in saves_at_most.items():
            # A module whose parameters have another dtype than its input runs stock code.
            if saves[name].keys() <= stock_saves[name].keys():
                producers.discard(name)
            else:
                allowed[name], own[name] = nbytes, saves[name].total()
    for name in (name for each in planned for name in each.copies):
        allowed[name] += stock.parameters[name]
    # The model itself may be patched to run another attention; its own forward saves the tensors of its loss.
    more = {name: nbytes - allowed[name] for name, nbytes in own.items() if name and name in patched.modules}
    if plan.recipe.without("approximate", "sampled"):  # codes and samples replace saved tensors
        more = {name: nbytes for name, nbytes in more.items() if allowed[name]}
    worst = worst_name(more)
    yield _no_bytes(
        "memory.module", worst, max(more.get(worst, 0), 0), "bytes that a module saves beyond its plan",
        "a norm saves x_hat, a number a row and its affine; others save no more than stock", len(patched.modules),
    )  # fmt: skip
    linears = {linear.module for linear in plan.sites.linears}
    producers -= linears  # experts, whose own code runs their last linear: others may save its output
    kept = Counter[str]()
    for each in patched.account.storages:
        if each.part == "block" and each.module in producers and each.savers_modules <= linears:
            kept[each.module] += each.nbytes
    unsaved = {name for each in planned for name in each.unsaved}
    for each in patched.account.storages:
        # A smaller tensor is no output: a rule copies the statistics of the batch norm before, when this module reads.
        smallest = min((output.nbytes for output in stock.outputs.get(each.module, ())), default=0)
        is_output = each.module in unsaved and each.module in patched.modules and each.nbytes >= smallest
        if is_output and each.savers_modules - {each.module}:
            kept[each.module] += each.nbytes
    in_scopes = patched.in_scopes.per_block()
    for block, nbytes in patched.account.per_block().items():
        # Its bytes are among those above, which are named more closely.
        if not any(is_inside(name, block) for name in kept):
            kept[block] = max(nbytes - in_scopes[block], 0)
    worst = worst_name(kept)
    yield _no_bytes(
        "memory.recomputed", worst, kept[worst], "bytes saved of a result that is recomputed",
        "the plan recomputes it", len(producers | unsaved),
    )  # fmt: skip


def _own(measured: Account) -> Counter[str]:
    """Module -> bytes of the tensors that it both computed and saves."""
    own = Counter[str]()
    for each in measured.storages:
        if each.module in each.savers_modules:
            own[each.module] += each.nbytes
    return own


def _all_saves(measured: Account) -> defaultdict[str, Counter[str]]:
    """Module -> operation -> bytes that it saves, whichever module computed them."""
    saves: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for each in measured.storages:
        for module in each.savers_modules:
            saves[module][next(operation for saver, operation in each.savers if saver == module)] += each.nbytes
    return saves


def _no_bytes(id: str, subject: str, nbytes: int, metric: str, reason: str, modules: int) -> Check:
    reference = "sizes of the stock modules' outputs, and the plan"
    return limited(
        id, subject if nbytes else f"{modules} modules", float(nbytes), 0.0, metric, reason, reference, modules
    )


def _against_plan(patched: Account, predicted: Account) -> Iterator[Check]:
    measured, planned = _of_blocks(patched), _of_blocks(predicted)
    drift = abs(measured - planned) / planned if planned else float("nan")
    yield limited(
        "memory.plan", f"{len(patched.blocks)} blocks" if patched.blocks else "whole model", drift, PASS_DRIFT,
        "difference to the plan's bytes", "10 % is PyTorch's own tolerance for its memory tracker; 3 % is this tool's",
        "trace of the plan from the config alone", measured, f"planned {_mib(planned)}, measured {_mib(measured)}",
        warns=WARN_DRIFT,
    )  # fmt: skip


def _of_blocks(kept: Account) -> int:
    """Bytes of all blocks, shared ones included; of the whole model if it has no blocks."""
    if not kept.blocks:
        return kept.total
    return sum(kept.per_block().values()) + kept.per_part().get("shared", 0)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f} MiB"


_skipped = functools.partial(skipped, "memory.plan", "blocks")
