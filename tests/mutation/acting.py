"""How a fault acts in autograd functions: in their forward at the site, and in the backward of such a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from memopt.torch_compat import DirectFunction, call_its_backward
from tests.mutation.site import Site, replaced

Gradients = tuple[Any, ...]


@contextmanager
def together(*contexts: Any) -> Iterator[None]:
    """All of these."""
    with ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield


@contextmanager
def gradients_changed(site: Site, function: Any, change: Callable[[Any, Gradients], Gradients]) -> Iterator[None]:
    """What the backward of `function` returns for calls at the site is change(ctx, gradients)."""
    backward = function.backward

    def changed(ctx: Any, *dy: Tensor) -> Gradients:
        gradients = backward(ctx, *dy)
        if not ctx.planted:
            return gradients  # type: ignore[no-any-return]
        site.acted += 1
        return change(ctx, tuple(gradients))

    with _marked(site, function), backward_replaced(function, changed):
        yield


@contextmanager
def in_backward(site: Site, *functions: Any) -> Iterator[Callable[[], bool]]:
    """Gives a function that tells whether the backward of one of `functions` runs, for a call at the site."""
    running = [False]

    def announced(function: Any) -> Any:
        backward = function.backward

        def run(ctx: Any, *dy: Tensor) -> Any:
            running.append(ctx.planted)
            try:
                return backward(ctx, *dy)
            finally:
                running.pop()

        return together(_marked(site, function), backward_replaced(function, run))

    def acts() -> bool:
        site.acted += running[-1]
        return running[-1]

    with together(*map(announced, functions)):
        yield acts


@contextmanager
def changed_in_backward(
    site: Site, owner: Any, name: str, change: Callable[..., Any], *functions: Any
) -> Iterator[None]:
    """`owner.name` is change(itself, *arguments) where the backward of a call at the site calls it."""
    stock = getattr(owner, name)
    with in_backward(site, *functions) as acts:

        def changed(*given: Any, **options: Any) -> Any:
            return change(stock, *given, **options) if acts() else stock(*given, **options)

        with replaced(owner, name, changed):
            yield


@contextmanager
def changed_at(site: Site, owner: Any, name: str, change: Callable[..., Any], *, acts: bool = True) -> Iterator[None]:
    """`owner.name` is change(itself, *arguments) where it is called at the site; with `acts` that is the fault."""
    stock = getattr(owner, name)

    def changed(*given: Any, **options: Any) -> Any:
        if not site.here():
            return stock(*given, **options)
        site.acted += acts
        return change(stock, *given, **options)

    with replaced(owner, name, changed):
        yield


@contextmanager
def recomputed_as(site: Site, producer: Any, change: Callable[..., Tensor]) -> Iterator[None]:
    """What a producer of the module `producer` lets its readers recompute is change(output, *saved tensors)."""

    def attach(stock: Any, output: Tensor, saved: Any, recomputed: Any, **options: Any) -> None:
        recompute = recomputed.function

        def changed(*given: Any) -> Tensor:
            site.acted += 1
            return change(recompute(*given), *given)

        recomputed.function = changed
        stock(output, saved, recomputed, **options)

    with changed_at(site, producer, "attach_spec", attach, acts=False):
        yield


@contextmanager
def backward_replaced(function: Any, backward: Callable[..., Any]) -> Iterator[None]:
    """The autograd function `function` has another backward."""
    try:
        with replaced(function, "backward", staticmethod(backward)):
            _bind(function)
            yield
    finally:
        _bind(function)


def _bind(function: Any) -> None:
    # Nodes of these look their backward up once.
    if issubclass(function, DirectFunction):
        call_its_backward(function)


def scaled(gradients: Gradients, place: int, factor: float | None) -> Gradients:
    """With the gradient at `place` scaled, or lost for None."""
    value = gradients[place]
    new = None if value is None or factor is None else value * factor
    return tuple(new if each is value and value is not None else each for each in gradients)


def _marked(site: Site, function: Any) -> Any:
    """Contexts of calls at the site are marked."""
    forward = function.forward

    def marking(ctx: Any, *given: Any) -> Any:
        ctx.planted = site.here()
        return forward(ctx, *given)

    return replaced(function, "forward", staticmethod(marking))
