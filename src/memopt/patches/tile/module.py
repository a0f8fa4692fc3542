"""Modules that map each token on its own, run by tiles of tokens inside blocks that run again in backward.

Forward computes the output tile by tile and saves only the input. Backward runs a tile again, differentiates it, adds
its part to the gradients of the parameters, and frees it. So memory beside input and output does not grow with the
number of tokens. Each parameter gets one gradient in all, as hooks of DDP and FSDP expect.

In the second run of a block that ends in such a module, PyTorch's checkpoint stops when the input is saved, before any
tile has run. So each tile runs forward only once more, in its backward, as in a plain checkpointed block.

Sources: TiledMLP of ALST (arXiv:2506.13996, section 3.2) and StreamBP (arXiv:2506.03077).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memopt.environment.partitioned import gather_at_once, is_of_zero
from memopt.kernels.base.autograd import (
    are_from_checkpoint,
    autocast_as,
    is_batched,
    may_be_overwritten,
    refuse_double_backward,
)
from memopt.kernels.base.pieces import slices
from memopt.kernels.replay.function import added, gradients_again
from memopt.patches.rerun import Around, has_gradient, have_moved, random_states, standing
from memopt.patches.swap import Layer, Rewrite, is_watched, layer_of, restore_forward, steps_aside, swap_forward
from memopt.patches.tile.probe import by_rows
from memopt.recompute.pure import is_compound, with_tensors, without_tensors
from memopt.torch_compat import is_checkpointed_region, module_hooks, tree_leaves, without_foreign_hooks

_WHY = ", since the module runs again in backward, by tiles of tokens. Change weights after backward"
#: A tile has a multiple of this many tokens, to fill the tiles of matrix product kernels.
_STEP = 256
#: Copies of a product that live while its tile is differentiated: results, gradients and intermediate values.
_COPIES = 3
#: Attributes of a module that hold its parameters, buffers and children; ZeRO-3 adds another table of parameters.
_TABLES = ("_parameters", "_buffers", "_modules", "_original_parameters")
#: (one tile of tokens) -> the module's result for it
Run = Callable[[Tensor], Any]


@dataclass(frozen=True)
class TileRewrite(Rewrite):
    """State of a module that runs by tiles."""

    numbers: int
    """Elements that the outputs of the module's matrix products have for one token."""
    room: int
    """Bytes that a tile may take."""
    at_once: int
    """Tokens of a tile; 0: as many as there is room for."""
    layer: Layer | None
    """The forward that another patch gave the module, which runs each tile; None: the stock forward."""
    is_leaf: bool
    """Whether ZeRO-3 was to gather its weights at once before."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Children that the other patch's forward reads instead of calling them."""
        return getattr(self.layer and self.layer.state, "reads", ())

    def undo(self, module: nn.Module) -> None:
        gather_at_once(module, self.is_leaf)
        if self.layer is not None and isinstance(self.layer.state, Rewrite):
            self.layer.state.undo(module)

    def tokens(self, x: Tensor) -> int:
        """The number of tokens in a tile of `x`."""
        return self.at_once or max(self.room // (_COPIES * self.numbers * x.element_size()) // _STEP, 1) * _STEP


def patch_tiles(module: nn.Module, numbers: int, room: int, at_once: int = 0) -> None:
    """Let `module` run by tiles of tokens where its block runs again in backward.

    Args:
        module: maps each token on its own (`memopt.patches.tile.probe`).
        numbers: elements that the outputs of its matrix products have for one token.
        room: bytes that a tile may take.
        at_once: tokens of a tile; 0: as many as there is room for.

    Raises:
        ValueError: the module cannot be swapped, or ZeRO-3 has hooks inside.
    """
    inside = [hooks for each in module.modules() if each is not module for hooks in module_hooks(each)]
    if any(map(is_of_zero, (hook for hooks in inside for hook in hooks.values()))):
        raise ValueError("ZeRO-3 gathers the weights of each module inside by hooks; patch before deepspeed.initialize")
    layer = layer_of(module)
    if layer is not None:
        restore_forward(module)
    rewrite = TileRewrite(numbers, room, at_once, layer, gather_at_once(module))
    try:
        swap_forward(module, _forward, rewrite, None if layer is None else layer.reads)
    except ValueError:
        gather_at_once(module, rewrite.is_leaf)
        raise


def _forward(stock: Callable[..., Any], rewrite: TileRewrite, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if rewrite.layer is not None:
        stock = functools.partial(rewrite.layer.forward, stock, rewrite.layer.state)
    given = [*args, *kwargs.values()]
    tensors = [each for each in tree_leaves(given) if isinstance(each, Tensor)]
    # Each tile might add to a container: a list of a router's losses.
    may_run = len(tensors) == 1 and not any(map(is_compound, given))
    if not may_run or not _runs_by_tiles(rewrite, module, tensors[0]):
        return stock(module, *args, **kwargs)

    template = without_tensors((args, kwargs))

    def run(tile: Tensor) -> Any:
        positional, named = with_tensors(template, [tile])
        return stock(module, *positional, **named)

    x = tensors[0]
    size = rewrite.tokens(x)
    if not torch.is_grad_enabled():
        return _joined(run, x, size).value
    parameters = [each for each in module.parameters() if each.requires_grad]
    if not x.requires_grad and not parameters:
        return stock(module, *args, **kwargs)
    kept = _Kept.apply(x) if x.requires_grad else x  # type: ignore[no-untyped-call]
    around, random = Around.of(module, x), random_states(x)
    # The tiles have graphs, since code may ask for them, and an experts' parameter that no token reaches has no
    # gradient. No cache of autocast: its casts would keep the graph of a tile.
    with without_foreign_hooks(), autocast_as(around.autocast, x):
        joined = _joined(run, x, size, parameters)
    around.held.settle()
    again = _Again(run, around, size, random if have_moved(random, x) else ())
    reached = [each for each in parameters if id(each) in joined.reached]
    outputs = _Tiles.apply(again, joined, kept.grad_fn, kept, *reached)  # type: ignore[no-untyped-call]
    return with_tensors(without_tensors(joined.value), outputs)


def _runs_by_tiles(rewrite: TileRewrite, module: nn.Module, x: Tensor) -> bool:
    if x.dim() != 3 or not x.is_floating_point() or x.size(0) * x.size(1) <= rewrite.tokens(x):
        return False
    # Without gradients, train mode stands for the first run of a block by reentrant checkpointing.
    is_inside = is_checkpointed_region() if torch.is_grad_enabled() else module.training
    if not is_inside or steps_aside(without_gradients=False):
        return False
    # A hook on a child would get single tiles, and a hook that gathers weights would gather them for every tile.
    return all(_may_run_again(each) and (each is module or not is_watched(each)) for each in module.modules())


def _may_run_again(module: nn.Module) -> bool:
    """Whether no attribute of `module` but its tables holds a tensor with a gradient: a tile would give it none."""
    return not any(has_gradient(value) for name, value in vars(module).items() if name not in _TABLES)


@dataclass(frozen=True, eq=False)
class _Joined:
    """The result of all tiles."""

    value: Any
    outputs: list[Tensor]
    """The tensors in `value`, without graphs."""
    differentiable: list[bool]
    """Whether each of them had a graph."""
    reached: set[int]
    """Ids of the parameters in their graphs."""


def _joined(run: Run, x: Tensor, size: int, parameters: Sequence[Tensor] = ()) -> _Joined:
    """The result of ``run(x)``, which reads `parameters`, computed by tiles of `size` tokens."""
    rows = x.detach().reshape(-1, x.size(-1))
    template: Any = None
    outputs: list[Tensor] = []
    differentiable: list[bool] = []
    reached: set[int] = set()
    for part in slices(rows, size):
        tokens = rows[part].unsqueeze(0).requires_grad_(x.requires_grad and torch.is_grad_enabled())
        result = run(tokens)
        tile = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        if template is None:
            template = without_tensors(result)
            outputs = [_whole(each, x, tokens.size(1)) for each in tile]
            differentiable = [False] * len(tile)
        for output, each in zip(outputs, tile, strict=True):
            by_rows(output, *x.shape[:2])[part] = by_rows(each.detach(), 1, tokens.size(1))
        differentiable = [had or each.requires_grad for had, each in zip(differentiable, tile, strict=True)]
        reached.update(_reached(tile, parameters))
        del tokens, result, tile, each  # their graph, before the next tile has one
    return _Joined(with_tensors(template, outputs), outputs, differentiable, reached)


def _reached(outputs: Iterable[Tensor], parameters: Iterable[Tensor]) -> Iterator[int]:
    """Ids of the `parameters` in the graph of `outputs`."""
    # Weights that `torch.func.functional_call` lends may be results of operations, whose graph is not the tile's.
    computed = {(each.grad_fn, each.output_nr): id(each) for each in parameters if each.grad_fn is not None}
    left: list[tuple[Any, int]] = [(each.grad_fn, each.output_nr) for each in outputs]
    seen: set[tuple[Any, int]] = set()
    while left:
        edge = left.pop()
        if edge[0] is None or edge in seen:
            continue
        seen.add(edge)
        if edge in computed:
            yield computed[edge]
        elif (leaf := getattr(edge[0], "variable", None)) is not None:
            yield id(leaf)
        else:
            left.extend(edge[0].next_functions)


def _whole(tile: Tensor, x: Tensor, tokens: int) -> Tensor:
    """Empty memory for the output of all tokens of `x`, given the output of one tile."""
    rest = by_rows(tile, 1, tokens).shape[1:]
    leading = x.shape[:2] if tile.shape[:2] == (1, tokens) else (x.size(0) * x.size(1),)
    return tile.new_empty((*leading, *rest))


class _Kept(torch.autograd.Function):
    """Saves the input before any tile runs, so that checkpointing can stop there."""

    __memopt_saves__ = "input of tiles"

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.is_ours = are_from_checkpoint()
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


@dataclass(frozen=True, eq=False)
class _Again:
    """The way in which the tiles of one call run, in forward and in backward."""

    run: Run
    around: Around
    size: int
    """Tokens of a tile."""
    random: Any
    """The states of the generators before the forward, if it drew random numbers."""


class _Tiles(torch.autograd.Function):
    """Passes on the outputs that tiles have computed; its backward runs the tiles again."""

    __memopt_saves__ = "input of tiles"

    @staticmethod
    def forward(ctx: Any, again: _Again, joined: _Joined, source: Any, x: Tensor, *parameters: Tensor) -> Any:
        ctx.again, ctx.source, ctx.parameters = again, source, parameters
        if source is None:
            ctx.is_ours = False
            ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        outputs = zip(joined.outputs, joined.differentiable, strict=True)
        ctx.mark_non_differentiable(*(each for each, is_differentiable in outputs if not is_differentiable))
        return tuple(joined.outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        again, source = ctx.again, ctx.source or ctx
        (x,) = source.saved_tensors
        with again.around.again(x, again.random, _WHY):
            return None, None, None, *_gradients(ctx, again, x, source.is_ours, gradients)


def _gradients(
    ctx: Any, again: _Again, x: Tensor, is_ours: bool, gradients: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients of `x` and of the parameters; each parameter's gradient is summed over tiles."""
    needs = ctx.needs_input_grad[3:]
    run = functools.partial(_outputs, again, ctx.parameters)
    if is_batched([each for each in gradients if each is not None]):
        return gradients_again(run, [x, *ctx.parameters], needs, gradients)
    rows = x.reshape(-1, x.size(-1))
    dx = None if not needs[0] else rows if is_ours and may_be_overwritten(x) else torch.empty_like(rows)
    sums: list[Tensor | None] = [None] * len(ctx.parameters)
    for part in slices(rows, again.size):
        incoming = [None if dy is None else _tile_of(dy, x, part) for dy in gradients]
        found, *others = gradients_again(run, [rows[part].unsqueeze(0), *ctx.parameters], needs, incoming)
        if dx is not None:
            dx[part] = 0 if found is None else found.squeeze(0)
        for place, each in enumerate(others):
            if each is not None:
                sums[place] = added(sums[place], each)
        del found, others, incoming
    whole = [None if total is None else total.to(p.dtype) for total, p in zip(sums, ctx.parameters, strict=True)]
    return [None if dx is None else dx.view(x.shape), *whole]


def _outputs(again: _Again, parameters: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that the module returns for the tile ``given[0]``. The other tensors of `given` replace `parameters`,
    so that hooks of the parameters see one gradient only."""
    x, *others = given
    instead = {id(each): other for each, other in zip(parameters, others, strict=True)}
    held = zip(again.around.held.slots, again.around.held.values, strict=True)
    with standing([(slot, instead[id(value)]) for slot, value in held if id(value) in instead]):
        return [each for each in tree_leaves(again.run(x)) if isinstance(each, Tensor)]


def _tile_of(gradient: Tensor, x: Tensor, part: slice) -> Tensor:
    tile = by_rows(gradient, *x.shape[:2])[part]
    return tile.unsqueeze(0) if gradient.shape[:2] == x.shape[:2] else tile
