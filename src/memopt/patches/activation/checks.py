"""Check of coded activations, module by module: their backward applies the levels of their code. And the errors of
their derivatives on the inputs that the modules get in a model (:func:`code_errors`).

Each module runs alone on random inputs. The derivative that its backward applies must be the level that the code's
definition gives (`memopt.kernels.derivative_codes.schemes`), recomputed here from thresholds or the exact derivative.
The error of the module's code for z ~ N(0, 1) must be the error that is stored with the shipped code.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from memopt.kernels.derivative_codes.codes import apply_code, derivative_code, encode
from memopt.kernels.derivative_codes.schemes import DerivativeCode, derivative
from memopt.patches.activation.module import ActivationRewrite
from memopt.patches.capabilities import Trial
from memopt.patches.checks import Check, limited, worst_name
from memopt.patches.swap import original_class, states_in
from memopt.torch_compat.activations import ACTIVATIONS

_INPUTS, _SCALE = 8192, 3.0
#: Largest difference of an applied derivative from its level, relative to the largest level: rounding in fp32.
_ROUNDING = 1e-5
#: Inputs this near a border between codes are left out: distance in z, or about this part of a value code's range.
_BORDER = 1e-3
#: Largest relative difference between two quadratures of a code's error.
_QUADRATURE = 0.01
_REACH, _POINTS = 12.0, 240_001


def verify_codes(trial: Trial, settings: tuple[str, ...]) -> Iterator[Check]:
    """Two checks: the derivatives that coded modules apply, and the errors of their codes."""
    model = trial.patched(*settings)
    off, tables = {}, {}
    for name, module, state in states_in(model, ActivationRewrite):
        if state.code is not None and state.is_always_coded:
            stock = functools.partial(original_class(module).forward, module)
            shipped = derivative_code(state.kind, state.code.scheme) if state.kind in ACTIVATIONS else state.code
            off[name] = _off_its_levels(module, stock, shipped)
            tables[name] = abs(_error(stock, state.code) / shipped.error - 1)
    if off:
        yield _check("codes.levels", off, "largest difference to the level of the code", _ROUNDING, "rounding in fp32",
                     "the code's definition, on random inputs")  # fmt: skip
        yield _check("codes.table", tables, "relative difference of the code's error at N(0, 1)", _QUADRATURE,
                     "two quadratures", "the shipped error of the code")  # fmt: skip


def _check(id: str, values: dict[str, float], metric: str, limit: float, reason: str, reference: str) -> Check:
    worst = worst_name(values)
    return limited(id, worst, values[worst], limit, metric, reason, reference, len(values), level="gradient")


def _off_its_levels(module: nn.Module, stock: functools.partial[Tensor], code: DerivativeCode) -> float:
    generator = torch.Generator().manual_seed(0)
    z = (_SCALE * torch.randn(_INPUTS, generator=generator)).requires_grad_()
    (applied,) = torch.autograd.grad(module(z), z, torch.ones_like(z))
    z = z.detach().double()
    levels = torch.tensor(code.levels, dtype=torch.float64)
    expected, is_certain = _levels(z, stock, code, levels)
    return float((applied.double() - expected).abs().where(is_certain, 0.0).max() / levels.abs().max())


def _levels(z: Tensor, stock: functools.partial[Tensor], code: DerivativeCode, levels: Tensor) -> tuple[Tensor, Tensor]:
    """The level of each input, and whether the input is too far from a border for rounding to choose another level."""
    if code.thresholds:
        thresholds = torch.tensor(code.thresholds, dtype=torch.float64)
        near = (z[:, None] - thresholds).abs().min(1).values
        return levels[(z[:, None] > thresholds).sum(1)], near > _BORDER
    place = ((derivative(stock, z) - code.levels[0]) / code.step).clamp(0, len(levels) - 1)
    return levels[place.round().long()], ((place - place.floor()) - 0.5).abs() > _BORDER * len(levels)


def _error(stock: functools.partial[Tensor], code: DerivativeCode) -> float:
    """Relative RMS error of the derivative for z ~ N(0, 1), by quadrature."""
    z = torch.linspace(-_REACH, _REACH, _POINTS, dtype=torch.float64)
    density, exact = torch.exp(-z.square() / 2), derivative(stock, z)
    applied, _ = _levels(z, stock, code, torch.tensor(code.levels, dtype=torch.float64))
    return float((((applied - exact).square() * density).sum() / (exact.square() * density).sum()).sqrt())


@contextmanager
def code_errors(model: nn.Module) -> Iterator[list[float]]:
    """Inside, each call of a coded activation adds the relative error of its derivative on that input to the list."""
    errors: list[float] = []

    def measure(code: DerivativeCode, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        z = args[0].detach().float()
        stock = functools.partial(original_class(module).forward, module)
        with torch.no_grad():
            exact = derivative(stock, z).double()
            approximate = apply_code(torch.ones_like(z), encode(z, code), code).double()
        off, size = float((approximate - exact).square().sum()), float(exact.square().sum())
        errors.append((off / size) ** 0.5 if size else float("inf") if off else 0.0)

    with ExitStack() as hooks:
        for _, module, state in states_in(model, ActivationRewrite):
            if state.code is not None:
                hooks.enter_context(module.register_forward_hook(functools.partial(measure, state.code)))
        yield errors
