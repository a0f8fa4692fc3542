"""Private names of `torch.compile`: the graph that is being traced, and the settings of its partitioner."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from memopt.torch_compat.lookup import find, is_found

_CONFIG = "torch._functorch.config"
_LOST = (
    "a compiled model saves what its stock model saves "
    f"(a {_CONFIG}.activation_memory_budget just below 1 recomputes elementwise results)"
)
#: Rules that make the partitioner save results which elementwise operations could recompute from other saved tensors.
_RULES = ("ban_recompute_materialized_backward", "ban_recompute_used_far_apart", "ban_recompute_long_fusible_chains")
_current_translator: Any = find("torch._dynamo.symbolic_convert.InstructionTranslator.current_tx", None, _LOST)
_SETTINGS = (*_RULES, "activation_memory_budget", "patch")
for _name in _SETTINGS:
    find(f"{_CONFIG}.{_name}", None, _LOST)
_PASS = f"{_CONFIG}.joint_custom_pass"
find(_PASS, None, "a compiled model saves casts of its activations (fp32 adapters)")


eagerly: Callable[[Any], Any] = find(
    "torch._disable_dynamo", lambda function: function, "a compiled function that reads the logits of a model fails"
)
"""Decorator: compiled code leaves its graph for calls of the function, which then run in eager mode."""


def partition_traced_graph(mark: Callable[[Graph], None]) -> bool:
    """Let the partitioner recompute every elementwise result in backward, in the graph that is being traced right now;
    False if none is, or this PyTorch lacks names that this needs.

    The backend runs with changed, thread-local settings, so other graphs and the user's settings do not change. If the
    user has chosen an ``activation_memory_budget``, these settings do not apply. `mark` gets the joint graph of forward
    and backward first. Results that it passes to :func:`keep_result` are not recomputed.
    """
    if _current_translator is None or not all(is_found(f"{_CONFIG}.{name}") for name in _SETTINGS):
        return False
    try:
        output = _current_translator().output
        backend = output.compiler_fn
    except AttributeError:  # nothing is traced here, as in an export without Dynamo
        return False
    if backend is not None and not hasattr(backend, "_memopt_backend"):
        output.compiler_fn = _wrapped(backend, mark)
    return True


def keep_result(node: Node) -> None:
    """Forbid the partitioner to recompute the result of a node: it is saved if backward needs it. A decision of
    activation checkpointing about this node takes precedence."""
    node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)


def _wrapped(backend: Any, mark: Callable[[Graph], None]) -> Any:
    @functools.wraps(backend)
    def partitioning(*args: Any, **kwargs: Any) -> Any:
        from torch._functorch import config

        if config.activation_memory_budget != 1:
            return backend(*args, **kwargs)
        rules: tuple[str, ...] = _RULES
        changes: dict[str, Any] = {}
        if is_found(_PASS):
            changes["joint_custom_pass"] = functools.partial(_run_passes, config.joint_custom_pass, mark)
        else:
            rules = _RULES[:1]  # without marks, the other two must stay on: they keep the residual stream saved
        with config.patch(dict.fromkeys(rules, False) | changes):
            return backend(*args, **kwargs)

    partitioning._memopt_backend = backend  # type: ignore[attr-defined]
    return partitioning


def _run_passes(users: Any, mark: Callable[[Graph], None], module: Any, inputs: Any) -> Any:
    if callable(users):
        module = users(module, inputs)
    mark(module.graph)
    return module
