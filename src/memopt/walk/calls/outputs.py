"""The tensors of a model's output, and the reads of values in Python, which the dispatcher does not see."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

#: Depth to which nested containers are searched (a cache of layers of states).
_DEPTH = 6


def output_tensors(output: Any, key: str = "output", depth: int = _DEPTH) -> Iterator[tuple[str, Tensor]]:
    """(field name, tensor) of everything in a model's output."""
    if isinstance(output, Tensor):
        yield key, output
    elif depth == 0 or isinstance(output, (str, nn.Module, type)) or callable(output):
        return
    elif isinstance(output, Mapping):
        for name, value in output.items():
            named = key if depth < _DEPTH else str(name)
            yield from output_tensors(value, named, depth - 1)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from output_tensors(value, key, depth - 1)
    elif hasattr(output, "__dict__"):
        for value in vars(output).values():
            yield from output_tensors(value, key, depth - 1)


def auxiliary_fields(output: Any) -> frozenset[str]:
    """Secondary fields of a model's output, by the names that all models of transformers use.

    Hidden states and outputs of inner models next to logits, and an encoder's outputs next to a decoder's. The hidden
    states that a base model returns are not secondary.
    """
    if not isinstance(output, Mapping):
        return frozenset()
    has_logits = any("logits" in str(field) for field in output)
    return frozenset(
        str(field)
        for field, value in output.items()
        if (has_logits and ("hidden_state" in str(field) or isinstance(value, Mapping)))
        or ("last_hidden_state" in output and str(field).startswith("encoder_"))
    )


@contextlib.contextmanager
def watched_reads(report: Callable[[Tensor, str], None]) -> Iterator[None]:
    """Reports calls of `numpy()`, `tolist()` and `__array__`, which read values without the dispatcher."""
    originals = {name: getattr(Tensor, name) for name in ("numpy", "tolist", "__array__")}
    own = {name for name in originals if name in vars(Tensor)}

    def reporting(name: str) -> Callable[..., Any]:
        def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            report(self, name)
            return originals[name](self, *args, **kwargs)

        return method

    for name in originals:
        setattr(Tensor, name, reporting(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            if name in own:
                setattr(Tensor, name, original)
            else:
                delattr(Tensor, name)
