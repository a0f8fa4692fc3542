"""What patched modules do while torch.compile traces them.

They run their stock forward, so the graph is that of the stock model, whole and visible to the compiler. What it saves
for backward is decided by PyTorch's partitioner, a minimum cut through the joint graph of forward and backward. By
default it saves the output of a norm, of an activation or of a gated product beside what these are computed from, since
a product in backward reads it. Here it is told that every elementwise result may be recomputed, in this graph alone.
Then it saves what eager memopt saves. No product is computed twice.

Such a cut saves the terms of a sum as gladly as the sum. Along a residual stream that would keep no bytes more, but
backward would begin with recomputing the whole stream and hold all of it. So sums of two computed tensors are saved.
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
    """Called by a patched forward that torch.compile traces; always true.

    Args:
        off: what is otherwise in compiled code than in eager mode, as a clause, and perhaps what to do; a warning says
            it once. Empty where compiled code saves as little.
    """
    partition_traced_graph(keep_sums)
    if off:
        _warn_once(off)
    return True


def keep_sums(graph: Graph) -> None:
    """Forbid to recompute sums of tensors that come from different products, attentions or embeddings."""
    for node in sums(graph):
        keep_result(node)


def sums(graph: Graph) -> Iterator[Node]:
    """Sums of two tensors of the result's size that are no elementwise functions of the same tensors."""
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
