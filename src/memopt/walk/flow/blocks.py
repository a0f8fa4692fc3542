"""The repeated blocks of a model, found by the shape of the module tree."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from torch import nn


def find_blocks(
    model: nn.Module, norms: Collection[str], linears: Collection[str], visited: Iterable[str]
) -> tuple[str, ...]:
    """Names of the blocks in the order in which they first ran; blocks that never ran come last.

    Blocks are the children of a list in which each child holds a norm and a linear (in a model without norms: two
    linears). Of nested lists with children of one type, the innermost counts. A list with children of several types
    counts if no list of one type is above or inside it; of nested mixed lists, the outermost counts.

    Args:
        norms: names of norm modules.
        linears: names of modules that run a contraction with a parameter.
        visited: names of modules in the order in which they first ran.
    """
    lists = list(_lists(model, norms, linears))
    uniform = [(name, children) for name, children, one_type in lists if one_type]
    uniform = [(name, children) for name, children in uniform if not any(_inside(other, name) for other, _ in uniform)]
    mixed = [
        (name, children)
        for name, children, one_type in lists
        if not one_type and not any(_inside(other, name) or _inside(name, other) for other, _ in uniform)
    ]
    mixed = [(name, children) for name, children in mixed if not any(_inside(name, other) for other, _ in mixed)]
    blocks = [child for _, children in uniform + mixed for child in children]
    order = {name: position for position, name in enumerate(visited)}
    return tuple(sorted(dict.fromkeys(blocks), key=lambda name: order.get(name, len(order))))


def _lists(model: nn.Module, norms: Collection[str], linears: Collection[str]) -> Iterator[tuple[str, list[str], bool]]:
    """(name, names of children, whether these have one type) of every list whose children all look like blocks."""
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        children = [f"{name}.{child}" if name else child for child, _ in module.named_children()]
        few_norms, few_linears = (1, 1) if norms else (0, 2)
        if children and all(_count(norms, c) >= few_norms and _count(linears, c) >= few_linears for c in children):
            yield name, children, len({type(child) for child in module.children()}) == 1


def _count(names: Collection[str], ancestor: str) -> int:
    return sum(_inside(name, ancestor) for name in names)


def _inside(name: str, ancestor: str) -> bool:
    return name.startswith(ancestor + ".")
