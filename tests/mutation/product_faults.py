"""Faults in patched activations, gated products and linears, each in one module of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from memopt.kernels.activation import function as activation
from memopt.kernels.gated_mlp import function as gated
from memopt.kernels.linear import function as linear
from memopt.kernels.linear.weighted import WeightedFunction
from memopt.kernels.replay.function import ReplayedCallFunction
from memopt.patches.activation import module as activation_module
from memopt.patches.linear import module as linear_module
from tests.mutation.acting import (
    Gradients,
    changed_at,
    changed_in_backward,
    gradients_changed,
    in_backward,
    recomputed_as,
    scaled,
    together,
)
from tests.mutation.planted import in_modules
from tests.mutation.site import Site, replaced

_GATED = ("llama", "gemma2", "t5", "phi3")
_COMPOSED = ("gpt2",)
"""Their activation takes several operations."""
_READERS = ("bert", "vit", "gpt2", "llama", "mixtral", "gemma2", "qwen3_moe", "phi3")
"""Where no norm is folded, their linears recompute its output."""
_UNFOLDED = "exact-unfolded"
_BIASES = ("bert", "vit", "gpt2")

# --- activations ----------------------------------------------------------------------------------------------------


def _differentiated(site: Site, change: Callable[[Tensor, Tensor], Tensor]) -> Any:
    def changed(ctx: Any, found: Gradients) -> Gradients:
        return change(ctx.saved_tensors[0], found[0]), *found[1:]

    return gradients_changed(site, activation.ActivationFunction, changed)


@in_modules("activations", "the gradient is scaled", *_COMPOSED, sized=True)
def _(site: Site, size: float) -> Any:
    return _differentiated(site, lambda z, dz: dz * (1 + size))


@in_modules("activations", "the gradient is zero for negative inputs", *_COMPOSED)
def _(site: Site) -> Any:
    return _differentiated(site, lambda z, dz: dz * (z > 0))


@in_modules("activations", "the output is scaled", *_COMPOSED, sized=True)
def _(site: Site, size: float) -> Any:
    def change(stock: Any, z: Tensor, function: Any, *rest: Any, **options: Any) -> Tensor:
        y: Tensor = stock(z, lambda t: function(t) * (1 + size), *rest, **options)
        return y

    return changed_at(site, activation_module, "recomputed_activation", change)


@in_modules("activations", "the recomputed output is scaled", *_COMPOSED, sized=True)
def _(site: Site, size: float) -> Any:
    return recomputed_as(site, activation, lambda h, z: h * (1 + size))


@in_modules("activations", "the input is read instead of the output", *_COMPOSED)
def _(site: Site) -> Any:
    return recomputed_as(site, activation, lambda h, z: z)


# --- gated products -------------------------------------------------------------------------------------------------


@contextmanager
def _product_gradients(site: Site, change: Callable[..., tuple[Any, ...]]) -> Iterator[None]:
    """(dgate, dup, h) of a product at the site; with gate and up in one tensor dgate holds both."""
    stock = gated._gradients
    with in_backward(site, linear.FusedLinearFunction) as acts:

        def gradients(*given: Any, **options: Any) -> Any:
            found, h = stock(*given, **options)
            if not acts():
                return found, h
            dgate, dup, h = change(*found, *[None] * (2 - len(found)), h)
            return (dgate,) if dup is None else (dgate, dup), h

        with replaced(gated, "_gradients", gradients), _steps_anew():
            yield


def _product_again(site: Site, change: Callable[[Tensor], Tensor]) -> Any:
    """The product that the backward of the linear behind it computes again."""

    def value(stock: Any, *given: Any, **options: Any) -> Tensor:
        return change(stock(*given, **options))

    return together(changed_in_backward(site, gated, "_value", value, linear.FusedLinearFunction), _steps_anew())


def _steps_anew() -> Any:
    """Inside, a product looks its functions up, which are cached elsewhere."""
    return replaced(gated, "_steps", gated._steps.__wrapped__)


def _times(value: Tensor | None, factor: float) -> Tensor | None:
    return None if value is None else value * factor


@in_modules("gated products", "the gradient of the gate is scaled", *_GATED, sized=True)
def _(site: Site, size: float) -> Any:
    return _product_gradients(site, lambda dgate, dup, h: (dgate * (1 + size), dup, h))


@in_modules("gated products", "the gradient of up is scaled", "llama", "gemma2", "t5", sized=True)
def _(site: Site, size: float) -> Any:
    return _product_gradients(site, lambda dgate, dup, h: (dgate, _times(dup, 1 + size), h))


@in_modules("gated products", "gradients of gate and up are exchanged", *_GATED)
def _(site: Site) -> Any:
    def change(dgate: Tensor, dup: Tensor | None, h: Any) -> tuple[Any, ...]:
        return (dup, dgate, h) if dup is not None else (torch.cat(dgate.chunk(2, -1)[::-1], -1), None, h)

    return _product_gradients(site, change)


@in_modules("gated products", "the recomputed product is scaled", *_GATED, sized=True)
def _(site: Site, size: float) -> Any:
    return _product_again(site, lambda h: h * (1 + size))


@in_modules("gated products", "the recomputed product is that of another row", *_GATED)
def _(site: Site) -> Any:
    return _product_again(site, lambda h: h.roll(1, -2))


@in_modules("gated products", "the product is scaled", *_GATED, sized=True)
def _(site: Site, size: float) -> Any:
    change = changed_at(site, gated, "_value", lambda stock, *given, **kind: stock(*given, **kind) * (1 + size))
    return together(change, _steps_anew())


@in_modules("gated products", "the gate is not activated", *_GATED)
def _(site: Site) -> Any:
    def change(stock: Any, gate: Tensor, up: Any, *rest: Any, **kind: Any) -> Tensor:
        first, second = (gate, up) if up is not None else gate.chunk(2, -1)
        return first * second

    return together(changed_at(site, gated, "_value", change), _steps_anew())


# --- linears --------------------------------------------------------------------------------------------------------

#: Where the results of both functions' backward are.
_WEIGHT, _BIAS = (1, 2), (2, 3)


def _linears(site: Site, places: tuple[int, int], change: Callable[[Tensor], Tensor | None]) -> Any:
    def at(place: int) -> Callable[[Any, Gradients], Gradients]:
        def changed(ctx: Any, found: Gradients) -> Gradients:
            new = None if found[place] is None else change(found[place])
            return *found[:place], new, *found[place + 1 :]

        return changed

    functions = (linear.RecomputedInputFunction, linear.FusedLinearFunction)
    return together(
        *(gradients_changed(site, function, at(place)) for function, place in zip(functions, places, strict=True))
    )


@in_modules("linears", "the gradient of the weight is scaled", *_READERS, sized=True, recipe=_UNFOLDED)
def _(site: Site, size: float) -> Any:
    return _linears(site, _WEIGHT, lambda found: found * (1 + size))


@in_modules("linears", "no gradient of the weight", *_READERS, recipe=_UNFOLDED)
def _(site: Site) -> Any:
    return _linears(site, _WEIGHT, lambda found: None)


@in_modules("linears", "no gradient of the bias", *_BIASES, recipe=_UNFOLDED)
def _(site: Site) -> Any:
    return _linears(site, _BIAS, lambda found: None)


@in_modules("linears", "the gradient of the bias is scaled", *_BIASES, sized=True, recipe=_UNFOLDED)
def _(site: Site, size: float) -> Any:
    return _linears(site, _BIAS, lambda found: found * (1 + size))


@in_modules("linears", "the gradient of the input is scaled", *_READERS, sized=True, recipe=_UNFOLDED)
def _(site: Site, size: float) -> Any:
    return gradients_changed(site, linear.RecomputedInputFunction, lambda ctx, found: scaled(found, 0, 1 + size))


def _without(found: Tensor, *place: int) -> Tensor:
    found = found.clone()
    found[place] = 0
    return found


@in_modules("linears", "an element of the gradient of the weight is lost", *_READERS, recipe=_UNFOLDED)
def _(site: Site) -> Any:
    return _linears(site, _WEIGHT, lambda found: _without(found, found.size(0) // 2, found.size(1) // 2))


@in_modules("linears", "a row of the gradient of the weight is lost", *_READERS, recipe=_UNFOLDED)
def _(site: Site) -> Any:
    return _linears(site, _WEIGHT, lambda found: _without(found, found.size(0) // 2))


@contextmanager
def _recomputed_input(site: Site, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """The recomputed input of one linear at the site, and not of other readers of the same tensor."""
    gradient = linear.weight_gradient

    def alone(stock: Any, *given: Any, fuses: bool) -> Tensor:
        y: Tensor = stock(*given, fuses=False)
        return y

    with in_backward(site, linear.RecomputedInputFunction) as acts:

        def changed(dy: Tensor, h: Tensor, weight: Tensor) -> Tensor:
            return gradient(dy, change(h) if acts() else h, weight)

        with (
            changed_at(site, linear_module, "recomputed_linear", alone, acts=False),
            replaced(linear, "weight_gradient", changed),
        ):
            yield


@in_modules("linears", "the recomputed input is off", *_READERS, sized=True, recipe=_UNFOLDED)
def _(site: Site, size: float) -> Any:
    return _recomputed_input(site, lambda x: x * (1 + size))


@in_modules("linears", "the recomputed input is that of another row", *_READERS, recipe=_UNFOLDED)
def _(site: Site) -> Any:
    return _recomputed_input(site, lambda x: x.roll(1, 0))


@in_modules("linears", "the recomputed input lacks a row", *_READERS, recipe=_UNFOLDED)
def _(site: Site) -> Any:
    return _recomputed_input(site, lambda x: _without(x, 0))


@contextmanager
def _output(site: Site, change: Callable[[Tensor, Any], Tensor]) -> Iterator[None]:
    """The output of linears at the site is change(y, bias)."""

    def changed(function: Any, bias_at: int) -> Any:
        forward = function.forward

        def run(ctx: Any, *given: Any) -> Any:
            y = forward(ctx, *given)
            if not site.here():
                return y
            site.acted += 1
            return change(y, given[bias_at]).detach()

        return replaced(function, "forward", staticmethod(run))

    with changed(linear.RecomputedInputFunction, 2), changed(linear.FusedLinearFunction, 3):
        yield


@in_modules("linears", "the output is scaled", *_READERS, sized=True, recipe=_UNFOLDED)
def _(site: Site, size: float) -> Any:
    return _output(site, lambda y, bias: y * (1 + size))


@in_modules("linears", "the bias is added twice", *_BIASES, recipe=_UNFOLDED)
def _(site: Site) -> Any:
    return _output(site, lambda y, bias: y + bias)


# --- products with weighted rows ------------------------------------------------------------------------------------

_EXPERTS = ("mixtral", "qwen3_moe")


def _rows_weights(site: Site, change: Callable[[Tensor, Tensor], Tensor | None]) -> Any:
    """The gradient of the rows' weights s is change(ds, s)."""
    return gradients_changed(
        site, WeightedFunction, lambda ctx, found: (found[0], change(found[1], ctx.saved_tensors[0]), *found[2:])
    )


@in_modules("weighted rows", "the gradient of the weights is scaled", *_EXPERTS, sized=True)
def _(site: Site, size: float) -> Any:
    return _rows_weights(site, lambda ds, s: ds * (1 + size))


@in_modules("weighted rows", "the gradient of the weights is weighted itself", *_EXPERTS)
def _(site: Site) -> Any:
    return _rows_weights(site, lambda ds, s: ds * s)


@in_modules("weighted rows", "the gradient of the weights is that of another row", *_EXPERTS)
def _(site: Site) -> Any:
    return _rows_weights(site, lambda ds, s: ds.roll(1, 0))


@in_modules("weighted rows", "no gradient of the weights", *_EXPERTS)
def _(site: Site) -> Any:
    return _rows_weights(site, lambda ds, s: None)


@in_modules("weighted rows", "the gradient of the input is not weighted", *_EXPERTS)
def _(site: Site) -> Any:
    def change(ctx: Any, found: Gradients) -> Gradients:
        return *found[:2], found[2] / ctx.saved_tensors[0].reshape(-1, *[1] * (found[2].dim() - 1)), *found[3:]

    return gradients_changed(site, WeightedFunction, change)


# --- functions that run again ---------------------------------------------------------------------------------------


def _arguments(site: Site, change: Callable[[Tensor], Tensor | None]) -> Any:
    """The gradient of the first argument x of functions is change(dx)."""
    return gradients_changed(
        site,
        ReplayedCallFunction,
        lambda ctx, found: (*found[:3], None if found[3] is None else change(found[3]), *found[4:]),
    )


@in_modules("functions", "the gradient of an argument is scaled", "mamba2", sized=True)
def _(site: Site, size: float) -> Any:
    return _arguments(site, lambda dx: dx * (1 + size))


@in_modules("functions", "the gradient of an argument is that of another token", "mamba2")
def _(site: Site) -> Any:
    return _arguments(site, lambda dx: dx.roll(1, 1))


@in_modules("functions", "no gradient of an argument", "mamba2")
def _(site: Site) -> Any:
    return _arguments(site, lambda dx: None)
