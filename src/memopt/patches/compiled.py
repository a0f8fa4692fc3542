"""Behaviour of patched modules while torch.compile traces them.

They run their stock forward, so the compiler gets the whole graph of the stock model. PyTorch's partitioner chooses the
tensors that are saved for backward, by a minimum cut through the joint graph of forward and backward. By default it
saves the output of a norm, of an activation or of a gated product beside the inputs of that operation, because a matrix
product in backward reads the output. This module lets the partitioner recompute every elementwise result, in the traced
graph alone. The graph then saves the same tensors as eager memopt. No matrix product is computed twice.

A minimum cut may save the terms of a sum in place of the sum. Along a residual stream that saves no more bytes, but
backward would first recompute the whole stream and hold all of it. So sums of two computed tensors are always saved.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from memopt.torch_compat import is_operator, keep_result, partition_traced_graph

_SUMS = (torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor)
_COPIES = (
    torch.ops.aten._to_copy.default,
    torch.ops.aten.clone.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.prims.convert_element_type.default,
)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_being_compiled(off: str = "") -> bool:
    """Called by a patched forward that torch.compile traces; always returns True. `off` is the text of a warning, given
    once: a clause about the difference between compiled code and eager mode, and perhaps a remedy. Empty: there is no
    difference."""
    partition_traced_graph(keep_sums)
    if off:
        _warn_once(off)
    return True


def keep_sums(graph: Graph) -> None:
    """Forbid the partitioner to recompute sums of tensors from different products, attentions or embeddings."""
    for node in sums(graph):
        keep_result(node)


def sums(graph: Graph) -> Iterator[Node]:
    """Sums and differences of two tensors, each made from a tensor of the result's size that the other does not use."""
    sources: dict[Node, frozenset[Node]] = {}
    for node in graph.nodes:
        terms = [sources[term] for term in node.all_input_nodes]
        sources[node] = frozenset[Node]().union(*terms) if terms and _is_elementwise(node) else frozenset([node])
        if node.target in _SUMS and len(terms) == 2:
            one, other = ({source for source in term if _fills(source, node)} for term in terms)
            if one - other and other - one:
                sources[node] = frozenset([node])
                yield node


def _is_elementwise(node: Node) -> bool:
    operation: Any = node.target
    if not is_operator(operation):
        return False
    return torch.Tag.pointwise in operation.tags or getattr(operation, "is_view", False) or operation in _COPIES


def _fills(source: Node, result: Node) -> bool:
    """Whether `source` has at least as many elements as `result`. No guard is set on sizes that are symbols."""
    here, there = source.meta.get("val"), result.meta.get("val")
    if not isinstance(here, Tensor) or not isinstance(there, Tensor):
        return False
    return statically_known_true(here.numel() >= there.numel())


@functools.cache
def _warn_once(off: str) -> None:
    warnings.warn(f"memopt: under torch.compile {off}.", stacklevel=2)
