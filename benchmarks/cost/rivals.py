"""Other ways to save less for backward: selective checkpointing, and blocks compiled under a budget of activations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule, Interpreter
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

_ATEN = torch.ops.aten
#: What selective checkpointing saves in its usual form: the results of products and of attention.
PRODUCTS = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN.bmm.default,
        _ATEN.baddbmm.default,
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
    }
)


def checkpoint_selectively(model: PreTrainedModel, every_second: bool = False) -> None:
    """Switch on transformers' checkpointing such that products and attention are saved and the rest is recomputed.

    Args:
        every_second: save every second product alone, and attention (torchtitan's policy).
    """
    contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
    if every_second:
        contexts = functools.partial(_every_second)
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def _every_second() -> Any:
    counts = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator in (_ATEN.mm.default, _ATEN.addmm.default):
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return _policy(context, operator)

    return create_selective_checkpoint_contexts(policy)


def compile_blocks(model: nn.Module, blocks: Sequence[str], budget: float) -> None:
    """Let each block of `model` run as one graph that the compiler's partitioner has cut at `activation_memory_budget`.

    Graphs run operation by operation, so that they can be traced on fake tensors. Blocks of one shape share a graph.
    """
    graphs: dict[Any, Callable[..., Any]] = {}
    for name in blocks:
        block = model.get_submodule(name)
        block.forward = functools.partial(_run, block, block.forward, graphs, budget)


def _run(
    block: nn.Module,
    stock: Callable[..., Any],
    graphs: dict[Any, Callable[..., Any]],
    budget: float,
    *args: Any,
    **kwargs: Any,
) -> Any:
    held = {**dict(block.named_parameters()), **dict(block.named_buffers())}
    leaves, tree = tree_flatten((args, kwargs))
    places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    given = [*held.values(), *(leaves[at] for at in places)]
    key = tuple((tuple(each.shape), each.dtype, each.requires_grad) for each in given)
    if key not in graphs:

        def pure(*tensors: Tensor) -> Any:
            filled = list(leaves)
            for at, tensor in zip(places, tensors[len(held) :], strict=True):
                filled[at] = tensor
            its_args, its_kwargs = tree_unflatten(filled, tree)
            block.forward = stock
            try:
                return torch.func.functional_call(block, dict(zip(held, tensors, strict=False)), its_args, its_kwargs)
            finally:
                block.forward = functools.partial(_run, block, stock, graphs, budget)

        graphs[key] = aot_function(
            pure,
            fw_compiler=_interpreted,
            bw_compiler=_interpreted,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=_decompositions(),
            num_params_buffers=len(held),
        )
        with _disable_current_modes(), functorch_config.patch(activation_memory_budget=budget):
            graphs[key](*(each.detach().requires_grad_(each.requires_grad) for each in given))
    return graphs[key](*given)


def _interpreted(graph: GraphModule, inputs: Any) -> Callable[..., Any]:
    def run(arguments: list[Any]) -> Any:
        return Interpreter(graph).boxed_run(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@functools.cache
def _decompositions() -> dict[Any, Any]:
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()
