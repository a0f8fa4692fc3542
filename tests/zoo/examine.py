"""One model type of transformers, from its default config through everything that memopt does to a model.

`examine` builds a small random model of the type, walks it, makes the plan of recipe `exact`, proves the folds,
patches and compares: outputs and gradients in fp64, and the bytes that a block keeps for backward. It knows no model;
what it cannot build or run it says, with the reason. `benchmarks.coverage` runs it on all types, `tests/zoo` on some.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

import memopt
from memopt.errors import MemoptError, NegativeVerdict
from memopt.patches.apply import apply, undo
from memopt.plan.plan import Plan, make_plan
from memopt.plan.recipe import load_recipe
from memopt.trace.account import account
from memopt.walk.aten.precision import precise
from memopt.walk.calls.inputs import Call, Calls, runnable_calls
from memopt.walk.calls.outputs import output_tensors
from memopt.walk.calls.preserve import preserved
from memopt.walk.folds.proof import folded
from memopt.walk.models.build import instantiate
from memopt.walk.models.config import one_line
from memopt.walk.models.shrink.config import shrunken
from memopt.walk.models.shrink.depth import with_depth
from memopt.walk.observe import walk_config
from memopt.walk.sites import NormSite
from tests.zoo.build import Row, completed, runnable
from tests.zoo.peaks import trace_steps

#: Largest relative difference of an output or a gradient in fp64: a single rounding to fp32 (6e-8) would be seen.
TOLERANCE = 1e-9
#: Gradients are compared relative to their own size, or to this share of the model's largest where they are smaller.
SMALL = 1e-4
#: A model that is less certain of its own outputs and gradients could hide a rounding to fp32, and more.
UNCERTAIN = 1e-7
#: Small forms of each depth whose bytes are tried to be counted.
MAX_WEIGHED = 4


def examine(model_type: str, *, memory: bool = True) -> Row:
    """Take one model type through the walk, the plan, the patch and every comparison."""
    return completed(Row(model_type), lambda row: _examine(row, memory))


def _examine(row: Row, memory: bool) -> None:
    config, twin, calls = runnable(row)
    row.model_class = type(twin).__name__
    row.main_input = str(getattr(twin, "main_input_name", ""))
    sites = walk_config(twin.config)
    plan = make_plan(sites, load_recipe("exact"))
    _describe(row, plan)
    _compare(row, twin, plan, calls)
    if memory:
        _weigh(row, config)
        trace_steps(row, config)


#: Reasons for modules and functions that are no norms of the last dimension.
_NO_LAST_DIMENSION = (
    "not a scale and shift of a normalised input",
    "normalises nothing",
    "normalises over the batch",
    "it saves only its input",
    "(native_batch_norm)",
    "(native_group_norm)",
)


# --- what the plan says ---------------------------------------------------------------------------------------------


def _describe(row: Row, plan: Plan) -> None:
    row.counts = plan.counts()
    reasons: dict[str, Counter[str]] = {}
    for entry in plan.entries:
        if entry.action in ("keep", "share") and entry.kind in ("norm", "activation", "gated_mlp"):
            reasons.setdefault(entry.kind, Counter())[_of_all_layers(entry.reason)] += 1
    row.reasons = {kind: dict(counter) for kind, counter in reasons.items()}
    row.foldable_on_request = sum(
        bool(norm.cautions) and norm.foldable_with_cautions and norm.proof is not None for norm in plan.sites.norms
    )
    row.unexplained = sum(not entry.reason for entry in plan.refusals)
    left = [entry.reason for entry in plan.refusals if entry.kind == "norm"]
    row.unshared = sum(not any(words in reason for words in _NO_LAST_DIMENSION) for reason in left)
    row.notes += plan.sites.notes
    proofs = [norm.proof for norm in plan.folds() if norm.proof is not None]
    row.proof_error = max(proofs, default=None)


def _of_all_layers(reason: str) -> str:
    """`reason` with the indices in module names left open."""
    return re.sub(r"(?<=\.)\d+(?=\W|$)", "*", reason)


# --- comparisons --------------------------------------------------------------------------------------------------


def _compare(row: Row, twin: PreTrainedModel, plan: Plan, calls: Calls) -> None:
    """Stock and patched modules on the same weights, in fp64: the original weights, then folded ones.

    Training forwards of every call, where something can go wrong; the first call also in eval mode.
    """
    shared = make_plan(plan.sites, load_recipe("exact-unfolded"))
    runs = [(calls[0], False), *((call, True) for call in calls)]
    compare_modules(row, "shared", twin, shared, (), runs)
    if norms := plan.folds():
        compare_modules(row, "folded", twin, plan, norms, [(calls[0], True), (calls[0], False)])


_Runs = Sequence[tuple[Call, bool]]


def compare_modules(
    row: Row, name: str, twin: PreTrainedModel, plan: Plan, norms: Sequence[NormSite], runs: _Runs
) -> None:
    """Compare the `runs` of `twin` before and after `plan`, whose folds of `norms` are made for the while."""
    with folded(twin, norms):
        stock = [_run(twin, *run) for run in runs]
        applied = apply(twin, plan, folded={norm.name for norm in norms})
        patched = [_run(twin, *run) for run in runs]
        undo(twin)
        pairs = zip(stock, patched, strict=True)
        row.notes += [f"{name}: {ours.error}" for its, ours in pairs if ours.error and not its.error]
        row.refused += [refusal for refusal in applied.refused if refusal not in row.refused]
        gone = {parameter for norm in norms for parameter in (norm.weight, norm.bias)}
        differences = _differences(stock, patched, gone)
        allowed = dict.fromkeys(differences, TOLERANCE)
        if max(differences.values()) > TOLERANCE:
            # Random forwards, and ill-conditioned ones, in which the last bit of a parameter changes as much.
            again = _differences(stock, [_run(twin, *run) for run in runs])
            with _last_bits_changed(twin):
                rounded = _differences(stock, [_run(twin, *run) for run in runs])
            noise = {kind: max(again[kind], rounded[kind]) for kind in differences}
            row.notes.append(f"{name}: the stock model is certain to {max(noise.values()):.0e} only")
            if max(noise.values()) > UNCERTAIN:
                _not_compared(row, f"{name}: stock does not repeat itself")
                return
            allowed = {kind: max(TOLERANCE, 10 * value) for kind, value in noise.items()}
    for kind, value in differences.items():
        row.differences[f"{name} {kind}"] = value
        if not value <= allowed[kind]:
            row.status = "wrong"
            row.reason = f"{name}: {kind} differ by {value:.1e}"
    if not any(result.gradients for result in stock):
        error = next((result.error for result in stock if result.error), "no output depends on a parameter")
        _not_compared(row, f"{name}: no gradients to compare ({error})")


def _not_compared(row: Row, reason: str) -> None:
    if row.status == "ok":
        row.status, row.reason = "not compared", reason


@contextlib.contextmanager
def _last_bits_changed(model: nn.Module) -> Iterator[None]:
    """Inside, every parameter is off by up to one rounding."""
    generator = torch.Generator().manual_seed(0)
    values = {name: parameter.data for name, parameter in model.named_parameters()}
    try:
        for parameter in model.parameters():
            if parameter.is_floating_point():
                up = torch.rand(parameter.shape, generator=generator) < 0.5
                towards = torch.where(up, torch.inf, -torch.inf).to(parameter.dtype)
                parameter.data = torch.nextafter(parameter.data, towards)
        yield
    finally:
        for name, parameter in model.named_parameters():
            parameter.data = values[name]


@dataclass(frozen=True)
class _Result:
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    error: str = ""


def compared(model: nn.Module, change: Callable[[nn.Module], object], call: Call) -> dict[str, float]:
    """Differences of outputs and gradients, in eval and in train mode, before and after `change` of an fp64 model."""
    before = [_run(model, call, training) for training in (False, True)]
    change(model)
    if not all(result.gradients for result in before):
        raise MemoptError(next((result.error for result in before if result.error), "no gradients to compare"))
    return _differences(before, [_run(model, call, training) for training in (False, True)])


def _run(model: nn.Module, call: Call, training: bool) -> _Result:
    """Outputs, and the gradient of every parameter from a random combination of them."""
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad and p.is_floating_point()}
    try:
        with preserved(model), precise(torch.float64):
            model.train(training)
            torch.manual_seed(0)
            np.random.seed(0)
            random.seed(0)
            outputs = {f"{i} {key}": t for i, (key, t) in enumerate(output_tensors(call.copied().run(model)))}
            numbers = {key: t for key, t in outputs.items() if t.is_floating_point() or t.is_complex()}
            terms = [_term(t) for t in numbers.values() if t.requires_grad and t.numel()]
            gradients: dict[str, Tensor] = {}
            if terms:
                found = torch.autograd.grad(sum(terms), list(parameters.values()), allow_unused=True)  # type: ignore[arg-type]
                gradients = {n: g for n, g in zip(parameters, found, strict=True) if g is not None}
        return _Result({key: t.detach().clone() for key, t in numbers.items()}, gradients)
    except Exception as error:
        return _Result({}, {}, f"{type(error).__name__}: {one_line(error)}")


def _term(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    finite = torch.nan_to_num(real, 0.0, 0.0, 0.0)
    return (finite * torch.randn(finite.shape, dtype=torch.float64)).mean()


def _differences(stock: list[_Result], patched: list[_Result], gone: Collection[str | None] = ()) -> dict[str, float]:
    """Largest difference of any output and of any gradient; parameters that are `gone` are not trained any more."""
    worst = {"outputs": 0.0, "gradients": 0.0}
    for one, other in zip(stock, patched, strict=True):
        if one.error or other.error:
            same = one.error == other.error
            worst = {kind: max(value, 0.0 if same else float("inf")) for kind, value in worst.items()}
            continue
        worst["outputs"] = max(worst["outputs"], difference(one.outputs, other.outputs, 0.0))
        trained = {name: gradient for name, gradient in one.gradients.items() if name not in gone}
        worst["gradients"] = max(worst["gradients"], difference(trained, other.gradients, SMALL))
    return worst


def difference(one: dict[str, Tensor], other: dict[str, Tensor], small: float) -> float:
    if one.keys() != other.keys() or any(one[key].shape != other[key].shape for key in one):
        return float("inf")
    sizes = {key: _size(tensor) for key, tensor in one.items()}
    largest = max(sizes.values(), default=0.0)
    worst = 0.0
    for key, tensor in one.items():
        finite = tensor.isfinite()
        if not torch.equal(finite, other[key].isfinite()):
            return float("inf")
        scale = max(sizes[key], small * largest)
        if scale:
            difference = tensor - other[key]
            worst = max(worst, _size(difference if finite.all() else difference[finite]) / scale)
        elif _size(other[key]):
            return float("inf")
    return worst


def _size(tensor: Tensor) -> float:
    """Largest finite element in size."""
    largest = float(tensor.abs().max()) if tensor.numel() else 0.0
    if math.isfinite(largest):
        return largest
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


# --- bytes -------------------------------------------------------------------------------------------------------


def _weigh(row: Row, config: PreTrainedConfig) -> None:
    """Bytes kept for backward by three layers and by the third; no dropout; bf16, or fp32 where that does not run."""
    error = "no small form builds"
    for deep, shallow in _two_depths(config):
        try:
            of_deep, of_shallow = _kept_bytes(deep), _kept_bytes(shallow)
            break
        except Exception as failure:
            error = f"{type(failure).__name__}: {one_line(failure)}"
    else:
        row.notes.append(f"bytes not measured: {error}")
        return
    row.model_bytes = of_deep
    stock, patched = (more - less for less, more in zip(of_shallow, of_deep, strict=True))
    if stock > 0:
        row.block_bytes = (stock, patched)


def _two_depths(config: PreTrainedConfig) -> Iterator[tuple[PreTrainedConfig, PreTrainedConfig]]:
    """The same small form with one layer more and less; some models hand on the outputs of four layers."""
    for depth in (3, 5):
        with contextlib.suppress(MemoptError):
            for form in itertools.islice(shrunken(config, depth=depth), MAX_WEIGHED):
                yield form, with_depth(form, depth - 1)


def _kept_bytes(config: PreTrainedConfig) -> tuple[int, int]:
    """(stock, patched) bytes that one forward of the model keeps for backward."""
    for dtype in (torch.bfloat16, torch.float32):
        torch.manual_seed(0)
        model = instantiate(config, device="cpu", dtype=torch.float32).eval()
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        calls = runnable_calls(model, variants=("plain",))
        if calls:
            break
    else:
        raise MemoptError(calls.errors[0][1] if calls.errors else "no inputs")

    def run() -> Any:
        return calls[0].copied().run(model)

    stock = account(model, run).total
    try:
        memopt.patch(model)
    except NegativeVerdict:
        return stock, stock
    return stock, account(model, run).total
