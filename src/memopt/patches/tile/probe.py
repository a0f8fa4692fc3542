"""Find modules that map each token on its own, and so can run by tiles of tokens: MLPs, experts, feed-forward layers.

A copy of the module runs on few tokens, as one batch and in uneven pieces. The output of a token must depend on that
token alone, among random tokens and among tokens that are nearly equal. Experts with a capacity drop tokens if many
are alike, so many equal tokens run too. Cheap functions of each row replace the matrix products, since only operations
between the products can mix rows.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from memopt.environment.generators import seed_cpu
from memopt.patches.tile.site import TileSite
from memopt.torch_compat import module_hooks, tree_leaves
from memopt.walk.probes.isolate import Traces, signature
from memopt.walk.sites import Sites, is_inside

#: Number of equal tokens: more than 64, the default capacity of the transformers experts that have a capacity.
_EQUAL = 66
_AGREES = 1e-5
#: Relative distance of tokens that are near each other.
_NEAR = 0.01
#: A module is a site if the outputs of its products have at least this many times the elements of input and outputs.
_GROWS = 1.25


def find(model: nn.Module, sites: Sites) -> Iterator[TileSite]:
    widths: dict[str, list[int]] = {}
    for site in sites.linears:
        widths.setdefault(site.module, []).append(site.width)
    known: dict[Any, int] = {}
    for block in sites.blocks:
        inside = {name: its for name, its in widths.items() if is_inside(name, block)}
        yield from _within(model.get_submodule(block), block, inside, known)


def _within(module: nn.Module, name: str, widths: dict[str, list[int]], known: dict[Any, int]) -> Iterator[TileSite]:
    """The outermost sites inside `module`."""
    for child_name, child in module.named_children():
        inner = f"{name}.{child_name}"
        tried = [width for linear, its in widths.items() if is_inside(linear, inner) for width in its]
        if len(tried) < 2:
            continue
        numbers = _numbers(child, list(dict.fromkeys(filter(None, tried))), known)
        if numbers:
            yield TileSite(inner, numbers)
        else:
            yield from _within(child, inner, widths, known)


def _numbers(module: nn.Module, widths: list[int], known: dict[Any, int]) -> int:
    """Elements that the outputs of the products in `module` have for one token; 0 if `module` is no site."""
    form = tuple(
        (type(each), *(tensor.shape for tensor in each._parameters.values() if tensor is not None))
        for each in module.modules()
    )
    if known.get(form) == 0 or not _takes_one(module):
        return 0  # a module of the same types and shapes in another layer is no site
    key = tuple((name, signature(each)) for name, each in module.named_modules())
    if key not in known:
        found = (numbers_by_row(module, width) for width in widths[:2])
        known[key] = known[form] = next((numbers for numbers in found if numbers), 0)
    return known[key]


def _takes_one(module: nn.Module) -> bool:
    """Whether the forward of `module` can be called with one argument."""
    try:
        inspect.signature(module.forward).bind(None)
    except (TypeError, ValueError):
        return False
    return True


def numbers_by_row(module: nn.Module, width: int) -> int:
    """Elements that the outputs of the products in `module` have for each row of its input (..., width); 0 if the
    module mixes rows, leaves anything on itself, or its products have little more elements than its input and outputs.
    A copy of the module (on any device, meta too) runs, on the CPU."""
    with torch.random.fork_rng(devices=[]):
        seed_cpu(0)
        try:
            alone = _alone(module)
            x, traces = torch.randn(2, 4, width, dtype=torch.float32), Traces(alone)
            maps = all(_maps_rows(alone, x, trains=trains) for trains in (False, True))
            counted = _counted(alone, x) if maps and not traces.found else 0
        except Exception:  # a forward may raise anything
            return 0
    return counted


def _alone(module: nn.Module) -> nn.Module:
    """A copy of `module` in fp32; its parameters take little memory, since they are expanded from one row."""
    alone = copy.deepcopy(module)
    for parent in list(alone.modules()):
        config: Any = getattr(parent, "config", None)
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"  # other implementations copy the weights for each token
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear) and type(child) is not nn.Linear:  # quantised
                plain = nn.Linear(child.in_features, child.out_features, child.bias is not None, device="meta")
                setattr(parent, name, plain)
    for each in alone.modules():
        tables: tuple[dict[str, Any], ...] = (each._parameters, each._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None:
                    values = torch.rand(tensor.shape[-1:] or (1,), dtype=torch.float32) + 0.5
                    values = (values if tensor.is_floating_point() else values.long()).expand(tensor.shape)
                    table[name] = nn.Parameter(values, False) if isinstance(tensor, nn.Parameter) else values
    for hooks in module_hooks(alone):
        hooks.clear()
    return alone


def _maps_rows(module: nn.Module, x: Tensor, *, trains: bool) -> bool:
    # No tensor here requires a gradient, but the module's code may ask whether gradients are on.
    with torch.set_grad_enabled(trains):
        return _is_by_rows(module.train(trains), x)


def _is_by_rows(module: nn.Module, x: Tensor) -> bool:
    rows = x.view(1, -1, x.size(-1))
    # Attention without a scale sees only itself among tokens that are far apart, and all of them among near ones.
    for tokens in (x, x[:1, :1] + _NEAR * x):
        whole = _outputs(module, tokens)
        pieces = [_outputs(module, piece) for piece in tokens.view_as(rows).split(3, dim=1)]
        if not whole or not _agree(whole, [torch.cat(each) for each in zip(*pieces, strict=True)]):
            return False
    equal = _outputs(module, rows[:, :1].expand(1, _EQUAL, -1))
    one = _outputs(module, rows[:, :1])
    many = [torch.cat([each] * _EQUAL) for each in one]
    return _agree(equal, many)


def _agree(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(
        a.shape == b.shape and bool(a.isfinite().all()) and bool((a - b).abs().max() <= _AGREES * b.abs().max())
        for a, b in zip(ours, theirs, strict=True)
    )


def _outputs(module: nn.Module, x: Tensor, products: list[int] | None = None) -> list[Tensor]:
    """The tensors that `module` returns for `x`, by rows; sizes of its products' outputs are appended to `products`."""
    with _Cheap([] if products is None else products):
        result = module.forward(x.clone())
    return [by_rows(each, *x.shape[:2]) for each in tree_leaves(result) if isinstance(each, Tensor)]


def by_rows(output: Tensor, *leading: int) -> Tensor:
    """`output` with one row for each token; a ValueError unless its first dimensions are `leading`, or one for both."""
    rows = leading[0] * leading[1]
    if output.shape[:2] == leading:
        return output.reshape(rows, *output.shape[2:])
    if output.dim() > 1 and output.size(0) == rows:
        return output
    raise ValueError("an output has no row for each token")


def _counted(module: nn.Module, x: Tensor) -> int:
    products: list[int] = []
    outputs = _outputs(module, x, products)
    rows = x.size(0) * x.size(1)
    numbers = -(-sum(products) // rows)
    if numbers < _GROWS * (x.size(-1) + sum(each.numel() // rows for each in outputs)):
        raise ValueError("its matrix products have few more elements than its input and output")
    return numbers


class _Cheap(TorchFunctionMode):
    """Replaces a product with a weight by a choice of its input's columns, notes output sizes, and skips dropouts."""

    def __init__(self, products: list[int]) -> None:
        super().__init__()
        self._products = products

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.linear:
            return self._product(*args, **kwargs)
        if function in (torch.matmul, torch.mm, Tensor.matmul, Tensor.__matmul__, Tensor.mm) and _is_weight(args[1]):
            return self._product(args[0], args[1].mT)
        if function is torch.addmm:
            return self._product(args[1], args[2].mT, args[0])
        if function in (F.dropout, torch.dropout):
            return args[0] if args else kwargs["input"]
        return function(*args, **kwargs)

    def _product(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        columns = torch.arange(weight.size(-2)) % weight.size(-1)
        y = input.index_select(-1, columns) * weight[0, 0]
        self._products.append(y.numel())
        return y if bias is None else y + bias


def _is_weight(tensor: Tensor) -> bool:
    """Whether `tensor` is a parameter, or a part of one: `_alone` has expanded these, with strides of 0."""
    return tensor.dim() == 2 and 0 in tensor.stride()
