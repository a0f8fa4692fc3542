"""Modules that multiply the rows of a linear's output with weights: routed experts, shared experts behind a gate.

While such a module runs, a function mode notes the factors of products (`memopt.kernels.linear.weighted`), and follows
the outputs through views and biases to the weights. PyTorch's multiplication runs if the mode cannot follow an output,
or if the product's input would be saved for this alone and is larger than the output.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memopt.kernels.linear.function import is_plain
from memopt.kernels.linear.weighted import Product, Products, followed, weighted
from memopt.patches.functions import FollowingMode, may_follow
from memopt.saved.kept import ShapeOnly
from memopt.saved.scope import recomputes, saving_shape_of
from memopt.torch_compat import checkpointing_hook, grouped_mm, no_torch_function, tensor_hooks

_ADDS = frozenset({torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__})
_MULTIPLIES = frozenset({torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__})
#: Operations that keep the rows of a matrix; casts to a wider dtype are among them.
_NAMES = ("view", "reshape", "squeeze", "unsqueeze", "flatten", "contiguous", "to", "float")
_SAME_ROWS = frozenset(getattr(Tensor, name) for name in _NAMES)


def weighted_products(module: nn.Module, given: object) -> AbstractContextManager[object]:
    """The context of one call of `module`, which multiplies outputs of linears with weights of their rows."""
    return nullcontext() if followed.products is not None or not may_follow(module) else _Following()


class _Following(FollowingMode):
    def __enter__(self) -> Any:
        self._before, self._products = followed.held, Products()
        followed.held = self._products, checkpointing_hook()
        self._chosen: tuple[weakref.ref[Tensor], Tensor, Tensor] | None = None
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        followed.held = self._before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        look = _LOOKS.get(func) if torch.is_grad_enabled() and followed.products is self._products else None
        return func(*args, **kwargs) if look is None else look(self, func, args, kwargs)

    def _product(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
        y: Tensor = func(*args, **kwargs)
        with no_torch_function():
            product = _FACTORS[func](*args, **kwargs)
            is_known = product is not None and is_plain(product.a) and is_plain(product.matrix)
            if product is not None and is_known and is_plain(y) and y.requires_grad:
                self._products.note(y, replace(product, dtype=y.dtype))
        return y

    def _same_rows(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        y, output = args[0], func(*args, **kwargs)
        product = None if output is y else self._products.of(y)
        if product is not None:
            with no_torch_function():
                widens = torch.promote_types(y.dtype, output.dtype) is output.dtype
                if output.numel() == y.numel() and product.matrix.size(-1) == output.size(-1) and widens:
                    self._products.note(output, product)
        return output

    def _added(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        product = self._products.of(args[0]) if len(args) == 2 and not kwargs else None
        if product is None or not is_plain(args[1]):
            return func(*args, **kwargs)
        y, bias = args
        with no_torch_function():
            chosen = self._chosen[1:] if self._chosen is not None and self._chosen[0]() is bias else None
            is_small, form = chosen is not None or bias.numel() * 2 <= y.numel(), (y.shape, y.dtype)
        output: Tensor = func(y, bias)
        with no_torch_function():
            if is_small and product.bias is None and (output.shape, output.dtype) == form:
                self._products.note(output, replace(product, bias=bias, chosen=chosen))
        return output

    def _rows(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Note the last rows read by an index, which may be the biases of the experts of each row."""
        output = func(*args, **kwargs)
        with no_torch_function():
            source, index = args
            if isinstance(index, Tensor) and index.dim() and not index.is_floating_point() and source.dim() == 2:
                self._chosen = weakref.ref(output), source, index
        return output

    def _rows_added(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        context: AbstractContextManager[object] = nullcontext()
        if len(args) == 4 and is_plain(args[3]) and _adding_reads_shape_only():
            with no_torch_function():
                context = saving_shape_of(args[3])
        with context:
            return func(*args, **kwargs)

    def _weighted(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if len(args) == 2 and not kwargs:
            for y, s in (args, args[::-1]):
                product = self._products.of(y)
                if product is not None and is_plain(s):
                    with no_torch_function():
                        if _are_weights(s, y) and _costs_less(product, y):
                            return weighted(y, s, product)
        return func(*args, **kwargs)


def _are_weights(s: Tensor, y: Tensor) -> bool:
    """Whether `s` has one weight for each row of `y`, and only the gradient of `s` needs `y`."""
    if not s.requires_grad or tensor_hooks(y) or y.retains_grad or y.size(-1) == 1:
        return False
    per_row = s.dim() == 0 or (s.size(-1) == 1 and s.dim() <= y.dim())
    return per_row and all(mine in (1, its) for mine, its in zip(s.shape[::-1], y.shape[::-1], strict=False))


def _costs_less(product: Product, y: Tensor) -> bool:
    """Whether the product's input needs a gradient, and is saved anyway, recomputable or no larger than `y`."""
    a, is_saved = product.a, product.matrix.requires_grad or product.spec is not None
    return a.requires_grad and (is_saved or a.nbytes <= y.nbytes or recomputes(a))


@functools.cache
def _adding_reads_shape_only() -> bool:
    """Whether the backward of `index_add` reads no values of the added rows, which its node saves."""
    with ThreadPoolExecutor(1) as alone:  # no mode, autocast or hook of the caller is active in that thread
        return alone.submit(_agrees).result()


def _agrees() -> bool:
    rows, index = torch.ones(4, 2, device="cpu", requires_grad=True), torch.tensor([2, 0, 2, 1], device="cpu")
    sums, weights = torch.zeros(3, 2, device="cpu"), torch.arange(6.0, device="cpu").view(3, 2)
    with saved_tensors_hooks(
        lambda saved: ShapeOnly(saved) if saved.shape == rows.shape else saved,
        lambda packed: packed.unpack() if isinstance(packed, ShapeOnly) else packed,
    ):
        z = sums.index_add(0, index, rows)
    (found,) = torch.autograd.grad(z, rows, weights)
    return torch.equal(found, weights[index])


def _matmul(left: Tensor, right: Tensor) -> Product | None:
    return Product(left, right) if left.dim() > 1 and right.dim() == 2 else None


def _bmm(left: Tensor, right: Tensor) -> Product | None:
    """A product of one row with each matrix, or of each matrix with one column (then `left` has the weights)."""
    if left.size(1) == 1:
        return Product(left, right)
    return Product(right.mT, left.mT) if right.size(2) == 1 else None


def _grouped(x: Tensor, matrix: Tensor, offs: Tensor | None = None, **others: Any) -> Product | None:
    is_known = x.dim() == 2 and matrix.dim() == 3 and not any(each is not None for each in others.values())
    return Product(x, matrix, offsets=offs) if is_known and offs is not None else None


_FACTORS: dict[Any, Callable[..., Product | None]] = {
    F.linear: lambda x, weight, bias=None: Product(x, weight.t(), bias=bias),
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.__matmul__, Tensor.mm), _matmul),
    **dict.fromkeys((torch.bmm, Tensor.bmm), _bmm),
    grouped_mm: _grouped,
}
_LOOKS: dict[Any, Callable[[_Following, Any, Any, Mapping[str, Any]], Any]] = {
    **dict.fromkeys(_FACTORS, _Following._product),
    **dict.fromkeys(_SAME_ROWS, _Following._same_rows),
    **dict.fromkeys(_ADDS, _Following._added),
    **dict.fromkeys(_MULTIPLIES, _Following._weighted),
    **dict.fromkeys((torch.index_add, Tensor.index_add, Tensor.index_add_), _Following._rows_added),
    Tensor.__getitem__: _Following._rows,
}
