"""The tensors of a model's output, and the reads of values in Python, which the dispatcher does not see."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from memopt.walk.models.plain import exchanged

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
    """Secondary fields of a model's output, by the names that all models of transformers use: hidden states and outputs
    of inner models next to logits, an encoder's outputs next to a decoder's; not the hidden states of a base model."""
    if not isinstance(output, Mapping):
        return frozenset()
    has_logits = any("logits" in str(field) for field in output)
    return frozenset(
        str(field)
        for field, value in output.items()
        if (has_logits and ("hidden_state" in str(field) or isinstance(value, Mapping)))
        or ("last_hidden_state" in output and str(field).startswith("encoder_"))
    )


def watched_reads(report: Callable[[Tensor, str], None]) -> AbstractContextManager[None]:
    """Reports calls of `numpy()`, `tolist()` and `__array__`, which read values without the dispatcher."""

    def reporting(name: str) -> Callable[..., Any]:
        original = getattr(Tensor, name)

        def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            report(self, name)
            return original(self, *args, **kwargs)

        return method

    return exchanged([(Tensor, name, reporting(name)) for name in ("numpy", "tolist", "__array__")])
