"""The largest tensor of a computation."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from memopt.patches.loss.lazy import LazyLogits
from memopt.torch_compat import TorchDispatchMode, tree_leaves


class Largest(TorchDispatchMode):
    """The largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and not isinstance(leaf, LazyLogits) and not leaf.is_meta:
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result
