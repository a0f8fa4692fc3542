"""A module or function that saves only its inputs, and runs its own code again in backward.

For modules without an operator here, in which autograd saves more than the inputs: a gated norm, written as a dozen
operations in fp32, saves most of their results. Value and gradients equal the stock module's to the last bit, since the
same code computes them. The cost is one more forward, or two if a reader needs the output again. A module of rows runs
on large inputs by pieces, so that its intermediates stay small: only then results may differ by a rounding.

Saved for backward: the inputs, and copies of the parameters (small vectors). The output can be recomputed, so its
readers save a handle inside a `memopt.saved.RecomputeScope`.

:func:`replayed_call` is for a pure function, of which only the arguments are saved. Linear attention in plain PyTorch
(the gated delta rule, state space models) saves dozens of fp32 intermediates for each chunk of tokens, more than the
rest of its block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memopt.kernels.base.autograd import autocast_as, autocast_dtype, is_batched, refuse_double_backward
from memopt.kernels.base.pieces import pieces
from memopt.recompute.pure import call_on, with_tensors, without_tensors
from memopt.recompute.rules import ELEMENTWISE, NORMALISED, register_operator
from memopt.recompute.specs import Recomputed, attach_spec
from memopt.recompute.versions import versions_of
from memopt.torch_compat import PLAIN_TYPES, tree_leaves

#: run(inputs, parameters) -> the module's output
Replay = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]
#: run(tensors) -> the result of a pure function: tensors and plain values, in tuples and lists.
Run = Callable[[Sequence[Tensor]], Any]
#: Least elements of a piece: an operation on it takes longer than its launch.
LEAST = 1 << 23


def replayed(run: Replay, inputs: Sequence[Tensor], parameters: Sequence[Tensor], *, by_rows: bool = False) -> Tensor:
    """``run(inputs, parameters)``, saving only `inputs` and copies of `parameters`.

    Args:
        run: without randomness and side effects; equal tensors give equal results.
        inputs: of any shape and dtype, saved as they are.
        parameters: small ones. They are copied, because sharded training may free them before a reader of the output,
            in another shard unit, runs its backward.
        by_rows: whether inputs of one shape give an output of this shape, each row of them its row of the output.
    """
    again = _ByRows(run) if by_rows else run
    y: Tensor = ReplayFunction.apply(again, len(inputs), None, *inputs, *parameters)  # type: ignore[no-untyped-call]
    return y


def recomputed_chain(value: Tensor, run: Replay, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """`value`, a new tensor equal to ``run(inputs, parameters)``, as the result of an operation like :func:`replayed`.

    Args:
        run, inputs, parameters: as in :func:`replayed`.
    """
    y: Tensor = ChainFunction.apply(run, len(inputs), [value], *inputs, *parameters)  # type: ignore[no-untyped-call]
    if y.grad_fn is not None:
        node: Any = y.grad_fn
        attach_spec(y, node.saved_for_readers, node.recomputed)
        del node.saved_for_readers
    return y


class ReplayFunction(torch.autograd.Function):
    """Saves its inputs; backward runs `run` again and differentiates it."""

    @staticmethod
    def forward(ctx: Any, run: Replay, count: int, made: list[Tensor] | None, *tensors: Tensor) -> Tensor:
        """`made` holds the value if it is computed already; its spec then gets the tensors that the node saves."""
        ctx.recomputes_output, ctx.count, ctx.is_by_rows = True, count, isinstance(run, _ByRows)
        ctx.recomputed = Recomputed(functools.partial(_value, run, count, autocast_dtype(tensors[0])))
        saved = *tensors[:count], *(parameter.detach().clone() for parameter in tensors[count:])
        ctx.save_for_backward(*saved)
        if made is not None:
            ctx.saved_for_readers = saved
        value = run(tensors[:count], tensors[count:]) if made is None else made.pop()
        # Its readers can recompute no view of another tensor, and none that was changed in place.
        return value if value._base is None and not value._version else value.data

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        ctx.recomputed.finish()
        saved, function = ctx.saved_tensors, ctx.recomputed.function
        needs = ctx.needs_input_grad[-len(saved) :]
        cut = _cut((*saved[: ctx.count], dy)) if ctx.is_by_rows else None
        if cut is None:
            return None, None, None, *gradients_again(lambda tensors: [function(*tensors)], saved, needs, [dy])
        return None, None, None, *_gradients_by_pieces(function, saved[: ctx.count], saved[ctx.count :], needs, dy, cut)


class ChainFunction(ReplayFunction):
    """As :class:`ReplayFunction`, for a value that is computed already: its nodes are of elementwise functions."""


def gradients_again(
    run: Callable[[Sequence[Tensor]], list[Tensor]],
    saved: Sequence[Tensor],
    needs: Sequence[bool],
    gradients: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """The needed gradients of `saved`, from the `gradients` of the tensors that ``run(saved)`` returns."""
    if all(each is None for each in gradients):
        return [None] * len(needs)

    def again() -> tuple[list[Tensor], list[Tensor]]:
        leaves = [tensor.detach().requires_grad_(need) for tensor, need in zip(saved, needs, strict=True)]
        with torch.enable_grad():
            return leaves, run(leaves)

    if is_batched([each for each in gradients if each is not None]):
        # A function transform refuses new leaves and random numbers, but only in the thread that entered it.
        with ThreadPoolExecutor(1) as outside:
            leaves, outputs = outside.submit(again).result()
    else:
        leaves, outputs = again()
    wanted = [leaf for leaf, need in zip(leaves, needs, strict=True) if need]
    pairs = [(y, dy) for y, dy in zip(outputs, gradients, strict=True) if dy is not None and y.requires_grad]
    if not pairs:
        return [None] * len(needs)
    reached, given = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(reached, wanted, given, allow_unused=True))
    return [next(found) if need else None for need in needs]


def _gradients_by_pieces(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    needs: Sequence[bool],
    dy: Tensor,
    cut: Iterator[tuple[slice, ...]],
) -> list[Tensor | None]:
    count = len(inputs)
    found = [torch.empty_like(each) if need else None for each, need in zip(inputs, needs[:count], strict=True)]
    sums: list[Tensor | None] = [None] * len(parameters)
    for part in cut:
        given = [*(each[part].contiguous() for each in inputs), *parameters]
        of_piece = gradients_again(lambda tensors: [function(*tensors)], given, needs, [dy[part]])
        for whole, piece in zip(found, of_piece[:count], strict=True):
            if whole is not None:
                whole[part] = 0 if piece is None else piece
        for place, piece in enumerate(of_piece[count:]):
            if piece is not None:
                sums[place] = added(sums[place], piece)
        del given, of_piece
    totals = zip(sums, parameters, strict=True)
    return [*found, *(None if total is None else total.to(each.dtype) for total, each in totals)]


def added(total: Tensor | None, part: Tensor) -> Tensor:
    """`total` plus `part`, in at least fp32: the sum is then rounded once, like one product over all rows."""
    if total is not None:
        return total.add_(part)
    return part.to(torch.promote_types(part.dtype, torch.float32), copy=True)


@dataclass(frozen=True)
class _ByRows:
    """A function of rows, which runs by pieces where its inputs are large and it records no graph."""

    run: Replay

    def __call__(self, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
        cut = None if torch.is_grad_enabled() else _cut(inputs)
        if cut is None:
            return self.run(inputs, parameters)
        y: Tensor | None = None
        for part in cut:
            piece = self.run([each[part].contiguous() for each in inputs], parameters)
            if y is None:
                y = torch.empty(inputs[0].shape, dtype=piece.dtype, device=piece.device)
            y[part] = piece
        assert y is not None
        return y.data  # an alias with version 0: a tensor changed in place would not be recomputed


def _cut(tensors: Sequence[Tensor]) -> Iterator[tuple[slice, ...]] | None:
    """The pieces of `tensors`, in the longest dimension but the last; None if they are small, or of several shapes."""
    first = tensors[0]
    if first.numel() < 2 * LEAST or first.is_meta or any(each.shape != first.shape for each in tensors):
        return None
    if is_batched(tensors) or not all(type(each) in PLAIN_TYPES for each in tensors):
        return None
    dim = max(range(first.dim() - 1), key=first.size, default=None)
    if dim is None or first.size(dim) < 2:
        return None
    rows = max(1, LEAST * first.size(dim) // first.numel())
    parts = (slice(start, start + rows) for start in range(0, first.size(dim), rows))
    return ((*[slice(None)] * dim, part) for part in pieces(parts, first))


def _value(run: Replay, count: int, autocast: torch.dtype | None, *tensors: Tensor) -> Tensor:
    """The output. Backward runs outside the forward's autocast region, which decides in what dtype each step is
    computed."""
    with autocast_as(autocast, tensors[0]):
        return run(tensors[:count], tensors[count:])


register_operator("ReplayFunctionBackward", NORMALISED)
register_operator("ChainFunctionBackward", ELEMENTWISE)


def replayed_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], differentiable: Sequence[bool]
) -> Any:
    """``function(*args, **kwargs)``, saving only the tensors among its arguments. It can be differentiated once.

    Args:
        function: pure (`memopt.recompute.pure`).
        differentiable: for each tensor of the result, in order, whether it requires a gradient.

    Raises:
        RuntimeError: `function` changed an argument in place.
    """
    values = tuple(args), dict(kwargs)
    tensors, run = _tensors(values), functools.partial(call_on, function, without_tensors(values))
    returned: list[Any] = []
    outputs = ReplayedCallFunction.apply(run, tuple(differentiable), returned, *tensors)  # type: ignore[no-untyped-call]
    return with_tensors(returned[0], outputs)


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


class ReplayedCallFunction(torch.autograd.Function):
    """Saves the tensors among the arguments; backward runs `run` again and differentiates it."""

    __memopt_saves__ = "function input"

    @staticmethod
    def forward(
        ctx: Any, run: Run, differentiable: tuple[bool, ...], returned: list[Any], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        ctx.run, ctx.autocast = run, autocast_dtype(tensors[0])
        ctx.set_materialize_grads(False)
        before = versions_of(tensors)
        result = run(tensors)
        outputs = _tensors(result)
        returned.append(without_tensors(result))
        if versions_of(tensors) != before:  # autograd saves the changed tensors
            why = "A function of the model's code changed its arguments in place: it cannot run again in backward."
            raise RuntimeError(f"{why} Patch the model with functions.method=none.")
        constants = (each for each, known in zip(outputs, differentiable, strict=True) if not known)
        ctx.mark_non_differentiable(*constants)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_double_backward()

        def run(tensors: Sequence[Tensor]) -> list[Tensor]:
            with autocast_as(ctx.autocast, tensors[0]):
                return _tensors(ctx.run(tensors))

        return None, None, None, *gradients_again(run, ctx.saved_tensors, ctx.needs_input_grad[3:], gradients)
