"""Faults in handles, and tensors that are saved without need; each in one module of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from memopt.kernels.gated_mlp import function as gated
from memopt.kernels.linear import function as linear
from memopt.kernels.norm import function as norm
from memopt.patches import scope
from memopt.patches.gated_mlp import module as gated_module
from memopt.patches.linear import output
from memopt.saved.handles import Handle
from tests.mutation.acting import backward_replaced, changed_at, together
from tests.mutation.planted import in_modules
from tests.mutation.site import Site, replaced

_WITH_HANDLES = ("bert", "vit", "mixtral", "qwen3", "qwen3_moe")
_READERS = ("bert", "vit", "llama", "qwen3_moe")

# --- handles --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Wrong:
    """In place of a handle."""

    handle: Handle
    change: Callable[[Tensor], Tensor]
    site: Site

    def unpack(self) -> Tensor:
        self.site.acted += 1
        return self.change(self.handle.unpack())


def _handles(site: Site, change: Callable[[Tensor], Tensor]) -> Any:
    taken = Handle.taken

    def wrong(self: Handle) -> Any:
        return _Wrong(taken(self), change, site) if site.here() else taken(self)

    return replaced(Handle, "taken", wrong)


@in_modules("handles", "the tensor is scaled", *_WITH_HANDLES, sized=True)
def _(site: Site, size: float) -> Any:
    return _handles(site, lambda value: value * (1 + size))


@in_modules("handles", "the tensor of another row", *_WITH_HANDLES)
def _(site: Site) -> Any:
    return _handles(site, lambda value: value.roll(1, -2))


@in_modules("handles", "one element is stale", *_WITH_HANDLES)
def _(site: Site) -> Any:
    def change(value: Tensor) -> Tensor:
        value = value.clone()
        value.view(-1)[value.numel() // 3] += value.abs().max()
        return value

    return _handles(site, change)


@in_modules("handles", "the tensor of the call before", *_WITH_HANDLES)
def _(site: Site) -> Any:
    before: dict[Any, Tensor] = {}

    def change(value: Tensor) -> Tensor:
        stale = before.get(value.shape, torch.zeros_like(value)).to(value.dtype)
        before[value.shape] = value
        return stale

    return _handles(site, change)


@in_modules("handles", "the tensor of another column", *_WITH_HANDLES)
def _(site: Site) -> Any:
    return _handles(site, lambda value: value.roll(1, -1))


# --- rotated queries and keys ---------------------------------------------------------------------------------------


@in_modules("handles", "queries and keys are rotated for the token before", "qwen3", "qwen3_moe")
def _(site: Site) -> Any:
    taken = Handle.taken

    def wrong(self: Handle) -> Any:
        is_rotated = bool(self._expression.to_prove) and site.here()
        return _Wrong(taken(self), lambda value: value.roll(1, -2), site) if is_rotated else taken(self)

    return replaced(Handle, "taken", wrong)


# --- memory ---------------------------------------------------------------------------------------------------------

_MEMORY = ("memory", "gradient")


class _WithoutLast:
    """The context of an autograd function that saved a tensor more than its backward knows of."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ctx, name)
        return value[:-1] if name == "saved_tensors" else value


@contextmanager
def _saves_too(site: Site, function: Any, what: Callable[..., Tensor]) -> Iterator[None]:
    """`function` saves what(ctx's arguments) beside its own tensors, for calls at the site."""
    forward, backward = function.forward, function.backward

    def saving(ctx: Any, *given: Any) -> Any:
        ctx.planted = site.here()
        if ctx.planted:
            site.acted += 1
            save = ctx.save_for_backward
            ctx.save_for_backward = lambda *tensors: save(*tensors, what(*given))
        return forward(ctx, *given)

    def trimmed(ctx: Any, *dy: Tensor) -> Any:
        return backward(_WithoutLast(ctx) if ctx.planted else ctx, *dy)

    with replaced(function, "forward", staticmethod(saving)), backward_replaced(function, trimmed):
        yield


_NORMS = (norm.NormFunction,)


@in_modules("memory", "a norm saves a second copy", levels=_MEMORY)
def _(site: Site) -> Any:
    return together(*(_saves_too(site, each, lambda x, *_: x.detach().clone()) for each in _NORMS))


@in_modules("memory", "a norm saves a second copy (int8)", "llama", "gpt2", levels=_MEMORY, recipe="int8")
def _(site: Site) -> Any:
    return together(*(_saves_too(site, each, lambda x, *_: x.detach().clone()) for each in _NORMS))


@in_modules("memory", "a norm saves its input too", levels=_MEMORY)
def _(site: Site) -> Any:
    return together(*(_saves_too(site, each, lambda x, *_: x) for each in _NORMS))


@contextmanager
def _holds(site: Site, function: Any, hold: Callable[[Any, Tensor], None]) -> Iterator[None]:
    forward = function.forward

    def holding(ctx: Any, x: Tensor, *given: Any) -> Any:
        if site.here():
            site.acted += 1
            hold(ctx, x.detach().clone())
        return forward(ctx, x, *given)

    with replaced(function, "forward", staticmethod(holding)):
        yield


@in_modules("memory", "a norm holds a copy in an attribute", levels=_MEMORY)
def _(site: Site) -> Any:
    return together(*(_holds(site, each, lambda ctx, copy: setattr(ctx, "held", copy)) for each in _NORMS))


@in_modules("memory", "a norm holds copies in a list of its own", levels=_MEMORY)
def _(site: Site) -> Any:
    held: list[Tensor] = []
    return together(*(_holds(site, each, lambda ctx, copy: held.append(copy)) for each in _NORMS))


@in_modules("memory", "a linear saves a copy of its input", *_READERS, levels=_MEMORY, recipe="exact-unfolded")
def _(site: Site) -> Any:
    return _saves_too(site, linear.RecomputedInputFunction, lambda x, *_: x.detach().clone())


@in_modules("memory", "a linear saves a copy of its weight", *_READERS, levels=_MEMORY, recipe="exact-unfolded")
def _(site: Site) -> Any:
    return _saves_too(site, linear.RecomputedInputFunction, lambda x, weight, *_: weight.detach().clone())


@in_modules("memory", "a gated product is saved", "llama", "gemma2", "t5", "phi3", levels=_MEMORY)
def _(site: Site) -> Any:
    def change(stock: Any, *given: Any) -> Tensor:
        *of_product, weight, bias = given
        product = gated._product(*of_product)
        # No reader of a matrix product computes it again.
        return torch.nn.functional.linear(product @ torch.eye(product.size(-1), dtype=product.dtype), weight, bias)

    return changed_at(site, gated_module, "gated_linear", change)


@in_modules("memory", "a block opens no scope", *_WITH_HANDLES, levels=_MEMORY)
def _(site: Site) -> Any:
    def change(stock: Any, rewrite: Any, run: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        return run(module, *args, **kwargs)

    return changed_at(site, scope, "run_in_scope", change)


# --- outputs of linears ----------------------------------------------------------------------------------------------

_OUTPUTS = "exact linears.recompute=auto"
_LINEARS = ("llama", "bert", "gpt2")
_Run = Callable[[Tensor], Tensor]


def _outputs(site: Site, change: Callable[[_Run, Tensor], Tensor]) -> Any:
    stock = output.recomputed_output

    def wrong(y: Tensor, x: Tensor, run: _Run) -> Tensor:
        def changed(saved: Tensor) -> Tensor:
            site.acted += 1
            return change(run, saved)

        return stock(y, x, changed if site.here() else run)

    return replaced(output, "recomputed_output", wrong)


@in_modules("outputs", "the recomputed output is scaled", *_LINEARS, sized=True, recipe=_OUTPUTS)
def _(site: Site, size: float) -> Any:
    return _outputs(site, lambda run, x: run(x) * (1 + size))


@in_modules("outputs", "it is recomputed from the input of another row", *_LINEARS, recipe=_OUTPUTS)
def _(site: Site) -> Any:
    return _outputs(site, lambda run, x: run(x.roll(1, -2)))


@in_modules("outputs", "it is saved", *_LINEARS, recipe=_OUTPUTS, levels=("memory",))
def _(site: Site) -> Any:
    stock = output.recomputed_output

    def wrong(y: Tensor, x: Tensor, run: _Run) -> Tensor:
        here = site.here()
        site.acted += here
        return y if here else stock(y, x, run)

    return replaced(output, "recomputed_output", wrong)
