"""Patched modules against stock modules with the same weights, in fp64, where rounding hides no error.

In 16 bits two correct models differ by percents, so an error of one percent in one module looks like rounding. In fp64
they differ by 1e-13, and a wrong formula by its own error. First the whole model runs, so that a tensor that one module
saves and another reads is compared too. Then each norm and activation runs alone on inputs of several sizes: small
inputs show a wrong epsilon. Exchanging patched modules for stock ones finds the module at fault.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memopt.patches.capabilities import Checks
from memopt.patches.checks import Check, limited
from memopt.patches.record import record_of
from memopt.patches.registry import having
from memopt.patches.swap import is_swapped, stock_forwards
from memopt.torch_compat import tree_leaves
from memopt.verification.inputs import Probes
from memopt.verification.ratios import rms
from memopt.verification.trial import Step, training_step
from memopt.walk.aten.precision import precise

#: Largest relative difference. Correct modules reach 1e-12 in fp64 if outliers amplify rounding, and 1e-4 in fp32.
LIMITS = {torch.float64: 1e-9, torch.float32: 1e-3}
#: A gradient is compared relative to its own size plus this share of the model's largest gradient: a gradient that is
#: zero in theory consists of terms that cancel.
_CANCELS = 1e-4
#: Sizes of the inputs of a module alone: at 1e-6 the square of an input is as small as the smallest epsilon.
_SIZES = (1e-6, 1e-3, 1.0, 30.0)
_ROWS, _WIDTH = 4, 64
Traces = dict[str, float]


@dataclass(frozen=True)
class Worst:
    """The largest relative difference, and its place in words."""

    value: float
    where: str

    @property
    def order(self) -> tuple[bool, float]:
        return math.isnan(self.value), self.value


def verify_modules(
    model: nn.Module, probes: Probes, truth: Step, traces: Traces, dtype: torch.dtype, reference: str
) -> Iterator[Check]:
    """Two checks: all modules together, and each norm and activation alone.

    Args:
        model: patched, in `dtype`.
        truth: the step of stock modules in `dtype`.
        traces: the sizes that :func:`traced` recorded for stock modules.
        reference: a description of `truth` in words.
    """
    with precise(dtype):
        worst = compare_steps(training_step(model, probes, dtype), truth)
    # Listed after a run, since blocks patch the linears inside when they run.
    swapped = [(name, module) for name, module in model.named_modules() if is_swapped(module)]

    def run(patched: int) -> Worst:
        """The result with stock forwards in all patched modules but the first `patched`."""
        with precise(dtype), stock_forwards(module for _, module in swapped[patched:]):
            return compare_steps(training_step(model, probes, dtype), truth)

    record = record_of(model)
    refused = () if record is None else record.refused
    yield limited(
        "gradient.patched", refused[0][0] if refused else "all planned modules", len(refused), 0,
        "modules that are planned and could not be patched", "modules that are unchanged are not compared", "the plan",
        len(swapped), "; ".join(f"{name}: {reason}" for name, reason in refused[:3]), warns=math.inf,
    )  # fmt: skip
    yield check_modules(
        worst, run, swapped, truth, dtype, reference, lambda: _unlike_module(swapped, model, probes, traces, dtype)
    )
    yield from check_alone(dict(swapped), dtype)
    with precise(dtype):
        for patch in having(Checks):
            yield from patch.module_checks(dict(swapped), LIMITS[dtype])


def check_modules(
    worst: Worst,
    run: Callable[[int], Worst],
    swapped: Sequence[tuple[str, nn.Module]],
    truth: Step,
    dtype: torch.dtype,
    reference: str,
    otherwise: Callable[[], str],
) -> Check:
    """The check of the modules `swapped` together, which names the module at fault.
    `worst`: the result with all of them patched; `run`, `otherwise`: see :func:`culprit`."""
    return limited(
        "gradient.modules",
        "all patched modules" if worst.value <= LIMITS[dtype] else culprit(run, LIMITS[dtype], swapped, otherwise),
        worst.value, LIMITS[dtype], "largest relative difference of an output or gradient",
        "only the modules differ, so only roundings of this precision may", reference,
        len(truth.outputs) + len(truth.gradients), f"most in {worst.where}",
    )  # fmt: skip


def check_alone(modules: Mapping[str, nn.Module], dtype: torch.dtype) -> Iterator[Check]:
    """The check of the error of each of `modules` alone, in `dtype`; none if no module can run alone."""
    with precise(dtype):
        found = {name: _alone(module, dtype) for name, module in modules.items()}
    alone = {name: worst for name, worst in found.items() if worst is not None}
    if alone:
        name = max(alone, key=lambda each: alone[each].order)
        yield limited(
            "gradient.alone", name, alone[name].value, LIMITS[dtype],
            "largest relative difference of a norm or activation alone",
            "only the module differs, so only roundings of this precision may",
            "the stock module, on random inputs of sizes 1e-6 to 30", len(alone), f"most in {alone[name].where}",
        )  # fmt: skip


def traced(model: nn.Module, run: Callable[[], Step]) -> tuple[Step, Traces]:
    """``run()``, and the RMS of each module's output in its first call, in the order in which the calls end."""
    traces: Traces = {}

    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        leaves = tree_leaves(dict(output) if isinstance(output, dict) else output)
        tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if tensors:
            traces.setdefault(name, math.fsum(rms(tensor[tensor.isfinite()]) for tensor in tensors))

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(functools.partial(note, name)))
        return run(), traces


def compare_steps(step: Step, truth: Step) -> Worst:
    """The largest difference of the loss, an output, or a gradient that both steps have; another check compares which
    gradients exist."""
    found = [Worst(_difference(torch.tensor(step.loss), torch.tensor(truth.loss)), "the loss")]
    for name in truth.outputs.keys() | step.outputs.keys():
        both = name in truth.outputs and name in step.outputs
        error = _difference(step.outputs[name], truth.outputs[name]) if both else math.inf
        found.append(Worst(error, f"the output {name}" + ("" if both else ", which only one of them has")))
    largest = max(map(rms, truth.gradients.values()), default=0.0)
    for name in truth.gradients.keys() & step.gradients.keys():
        error = _difference(step.gradients[name], truth.gradients[name], _CANCELS * largest)
        found.append(Worst(error, f"the gradient of {name}"))
    return max(found, key=lambda each: each.order)


def _difference(value: Tensor, truth: Tensor, least: float = 0.0) -> float:
    """RMS of the difference / (RMS of `truth` + `least`); elements that are not finite have to be equal."""
    if value.shape != truth.shape:
        return math.inf
    finite = truth.isfinite()
    if not torch.equal(value[~finite].nan_to_num(), truth[~finite].nan_to_num()):
        return math.inf
    error, size = rms(value[finite].double() - truth[finite].double()), rms(truth[finite]) + least
    return error / size if size else math.inf if error else 0.0


def culprit(
    run: Callable[[int], Worst],
    limit: float,
    swapped: Sequence[tuple[str, nn.Module]],
    otherwise: Callable[[], str] = lambda: "a module that is not patched",
) -> str:
    """The first patched module, in the order of the model's modules, that makes the result wrong; found by bisection.
    `run` returns the result with the first so many modules patched; with all of them it is over the limit. `otherwise`
    names the culprit if the result is as wrong with no module patched."""
    wrong = bisect.bisect_left(range(len(swapped)), True, key=lambda patched: not run(patched).value <= limit)
    return (swapped[wrong - 1][0] or "the model") if wrong else otherwise()


def _unlike_module(
    swapped: Sequence[tuple[str, nn.Module]], model: nn.Module, probes: Probes, traces: Traces, dtype: torch.dtype
) -> str:
    """The first module whose output differs although all forwards are stock: by a weight, a buffer or a setting."""
    with precise(dtype), stock_forwards(module for _, module in swapped):
        _, found = traced(model, lambda: training_step(model, probes, dtype))
    off = {name: abs(found.get(name, math.inf) - size) for name, size in traces.items()}
    differ = (name for name, size in traces.items() if not off[name] <= LIMITS[dtype] * abs(size))
    return next(differ, "a module that is not patched")


def _alone(module: nn.Module, dtype: torch.dtype) -> Worst | None:
    """`module` against its stock forward; None if it is not a function of one tensor, or has matrices to train."""
    tensors = [*module.parameters(), *module.buffers()]
    if any(tensor.dim() > 1 for tensor in tensors):
        return None
    width = max((tensor.numel() for tensor in tensors), default=_WIDTH)
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(_ROWS, max(width, 2), generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    found = []
    for size in _SIZES:
        try:
            with stock_forwards(module.modules()):
                expected = _results(module, x * size, dy)
        except Exception:  # Any failure means that the module takes no such input.
            return None
        try:
            results = _results(module, x * size, dy)
        except Exception as error:  # The stock module runs.
            return Worst(math.inf, f"{type(error).__name__} at size {size:g}")
        # The terms that cancel in the gradient of a norm's input are as large as the gradient of its output over its
        # deviation.
        scale = rms(dy) * rms(expected["output"][expected["output"].isfinite()]) / size
        for name, tensor in expected.items():
            least = _CANCELS * (scale if name == "gradient of its input" else 0.0)
            found.append(Worst(_difference(results[name], tensor, least), f"{name}, inputs of size {size:g}"))
    return max(found, key=lambda each: each.order)


def _results(module: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """The output of the module for `x`, and the gradients for `dy`, the gradient of the output."""
    x = x.requires_grad_()
    parameters = {name: each for name, each in module.named_parameters() if each.requires_grad}
    y = module(x)
    gradients = torch.autograd.grad(y, [x, *parameters.values()], dy, allow_unused=True)
    named = zip(["gradient of its input", *(f"gradient of {name}" for name in parameters)], gradients, strict=True)
    return {"output": y.detach()} | {name: torch.zeros(()) if each is None else each for name, each in named}
