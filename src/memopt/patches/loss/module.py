"""Patches the head that computes logits: its forward returns a tensor that stands for uncomputed logits (`lazy.py`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_compiling

from memopt.environment.generators import generators_kept
from memopt.environment.partitioned import gathers_for_its_calls, is_only_moved, is_parallel_forward, is_partitioned
from memopt.kernels.base.autograd import autocast_dtype
from memopt.patches.loss import operations, readers  # noqa: F401 - they register what they answer
from memopt.patches.loss.lazy import stand_for
from memopt.patches.loss.rows import fits, product_rows
from memopt.patches.loss.source import Head, Inside, Snapshot, Source, say_whole, tensors_of, versions_of, whole
from memopt.patches.reads import observed_reads
from memopt.patches.record import is_recorded, record_of, recorded_in, warn_once
from memopt.patches.swap import original_class, replaced_by, states_in, steps_aside, swap_forward
from memopt.torch_compat import (
    PLAIN_TYPES,
    fsdp_leaves_gathered,
    fsdp_takes_back,
    is_dropout,
    is_replica,
    makes_wrappers,
    module_hooks,
    modules_that_run,
    tracing_state,
)
from memopt.walk.calls.preserve import preserved
from memopt.walk.probes.isolate import Traces
from memopt.walk.probes.linear import is_linear
from memopt.walk.sites import is_inside, parent

if TYPE_CHECKING:
    from memopt.patches.base import Place

_NOT_ONE_TENSOR = "their head is called with something else than one tensor of hidden states"
_WHOLE = (
    "the logits are whole; to have the loss in parts, compile the blocks instead of the model "
    "(`for block in model.model.layers: block.compile()`)"
)


@dataclass(frozen=True)
class LossRewrite:
    """The state of a patched head."""

    transposed: bool | None
    """As in `memopt.patches.loss.source.Head`."""
    inputs: int
    """Width of the head's input."""
    classes: int
    lean: bool
    """Whether a cross-entropy keeps the logits whole, in their own dtype."""
    room: int
    """Bytes that the loss may take, as in `memopt.patches.loss.source.Head`."""


def patch_head(module: nn.Module, inputs: int, classes: int, *, lean: bool = False, room: int = 0) -> None:
    """Let `module` return logits that are computed when a function reads all of them.

    Args:
        module: a module that maps (..., `inputs`) to logits (..., `classes`).
        lean: whether a cross-entropy keeps the logits whole, without an fp32 copy.
        room: bytes that the loss may take beside the gradients of input and weight, if more than by default.

    Raises:
        ValueError: the module cannot be swapped, its forward changes its own state, or this PyTorch has no tensors
            without memory.
    """
    if not makes_wrappers:
        raise ValueError("this version of PyTorch makes no tensor that stands for others")
    if type(module) is not nn.Linear and _changes_state(module, inputs):
        raise ValueError("its forward changes the module's state, and a loss in parts would run it several times")
    transposed = False if is_linear(module) else True if is_linear(module, transposed=True) else None
    is_known = transposed is None or type(module) is nn.Linear
    reads = None if is_known else observed_reads(module, None)  # any other function is called as it is
    swap_forward(module, _forward, LossRewrite(transposed, inputs, classes, lean, room), reads)


def head_of(modules: Mapping[str, nn.Module], linear: str, around: Sequence[str], width: int) -> str:
    """Name of the module whose output is the logits: `linear`, or a module around it with trained adapters.

    Args:
        modules: all modules of the model, by name.
        linear: name of the linear that multiplies with the head's weight.
        around: names of modules that take the linear's input, outermost first.
        width: width of that input.
    """
    inner = {id(parameter) for parameter in modules[linear].parameters()}
    for name in around:
        if not linear.startswith(f"{name}.") or name not in modules:
            continue
        more = [p for p in modules[name].parameters() if p.requires_grad and id(p) not in inner]
        if more and _is_by_rows(modules[name], width, more[0]):
            return name
    return linear


def replaced_forwards(model: nn.Module) -> Iterator[str]:
    """A sentence for each module that contains patched heads and has a forward that another library put there."""
    named = dict(model.named_modules())
    heads = [name for name, _, _ in states_in(model, LossRewrite)]
    for name, module in named.items():
        inside = [head for head in heads if not name or head.startswith(f"{name}.")]
        if inside and (owner := replaced_by(module)) is not None:
            yield (
                f"the forward of the model is now one of {owner}: where that computes a loss from the weights of "
                f"{', '.join(inside)} itself, it is left to it; where it calls the head, the loss is memopt's"
            )


def whole_logits(model: nn.Module) -> Iterator[str]:
    """A sentence for each reason why a head of `model` computed its logits whole in a training step."""
    for name, module in model.named_modules():
        yield from (f"logits of {name} were computed whole, since {why}" for why in whole.get(module, ()))


def replaced_heads(model: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """Name, module and width of the hidden states where another module stands in the place of a patched head."""
    recorded = recorded_in(model)
    if recorded is None or (record := record_of(recorded)) is None:
        return
    plan, named = record.plan, dict(recorded.named_modules())
    heads = [name for name, _, _ in states_in(recorded, LossRewrite)]
    widths = {linear.parameter: linear.width for linear in plan.sites.linears}
    for site in plan.chosen("loss"):
        name = site.module
        if name in named and not any(is_inside(each, name) or is_inside(name, each) for each in heads):
            yield name, named[name], widths[site.parameter]


def look_at_heads(block: nn.Module, **options: Any) -> list[Place] | None:
    """Patch heads that were replaced since the patch (by a resized vocabulary, say), and warn of other replaced heads.

    Trainers may replace forwards as well: warn of :func:`replaced_forwards`.

    Args:
        block: a block of the running model.
        options: `lean` and `room` of :func:`patch_head`.

    Returns:
        The places of the heads: a change there calls for another look. None where the model does not run (in backward).
    """
    running = [block, *modules_that_run()]
    # Code around a model may call its parts: then the model is the one inside that has the block.
    around = (each for each in running[-1].modules() if is_recorded(each) and block in each.modules())
    model = next(chain(filter(is_recorded, running), around), None)
    if model is None:
        return None
    for _, head, width in list(replaced_heads(model)):
        # The forward of this class is known. Other classes need a proof, which must not run inside a forward.
        if type(head) is nn.Linear and "forward" not in vars(head) and head.in_features == width:
            with contextlib.suppress(ValueError):
                patch_head(head, width, head.out_features, **options)
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not distributed or torch.distributed.get_rank() == 0:
        warn_once(model, remarks_on(model))
    record, inside = record_of(model), recorded_in(model)
    if record is None or inside is None:
        return []
    there = dict(inside.named_modules())
    names = [site.module for site in record.plan.chosen("loss") if site.module in there]
    return [(there[parent(name)]._modules, name.rpartition(".")[2]) for name in names if name]


def remarks_on(model: nn.Module) -> Iterator[str]:
    """A sentence for each head, or forward around heads, that was replaced since the patch."""
    for name, _, _ in replaced_heads(model):
        yield (
            f"{name} was replaced since the patch, so its logits are whole. If the next training step does not patch "
            "it, unpatch the model and patch it again"
        )
    yield from replaced_forwards(model)


def patch_that_contracts(module: nn.Module, inputs: int, classes: int, **options: Any) -> None:
    """:func:`patch_head` of the module that multiplies with the head's weight; a ValueError also if the module has
    children and does more than map rows, so that it may be a whole model."""
    parameter = next(module.parameters(), None)
    is_layer = next(module.children(), None) is None
    if not (is_layer or parameter is None or _is_by_rows(module, inputs, parameter)):
        raise ValueError("the forward that computes its product does more than map rows of hidden states to logits")
    patch_head(module, inputs, classes, **options)


@torch.no_grad()
@generators_kept()
def _changes_state(module: nn.Module, width: int) -> bool:
    """Whether a forward in train mode, beside the first one, leaves traces on the module."""
    like = next(module.parameters(), torch.empty(0))
    x = torch.randn((2, width), dtype=like.dtype if like.is_floating_point() else None, device=like.device)
    with preserved(module), contextlib.suppress(Exception):  # a forward that takes something else may raise anything
        module.train()
        forward = original_class(module).forward
        forward(module, x)
        traces = Traces(module)
        forward(module, x)
        return traces.found
    return False


@torch.no_grad()
@generators_kept()
def _is_by_rows(module: nn.Module, width: int, like: Tensor) -> bool:
    """Whether each row of the module's output is a function of the same row of its input."""
    x = torch.randn((3, width), dtype=like.dtype, device=like.device)
    try:
        together, alone = module(x), [module(x[row : row + 1]) for row in range(3)]
    except Exception:  # a forward that takes something else may raise anything
        return False
    if not isinstance(together, Tensor) or together.dim() != 2 or len(together) != 3:
        return False
    if like.is_meta:
        return True  # meta tensors have no values to compare
    # A product of one row may be summed in another order than one of three.
    bound = 64 * torch.finfo(together.dtype).eps * float(together.abs().max())
    return bool((together - torch.cat(alone)).abs().max() <= bound)


def _forward(stock: Callable[..., Tensor], rewrite: LossRewrite, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if len(args) == 2 and isinstance(args[1], Inside):
        return args[1].function(args[0])
    x: Any = args[0] if len(args) == 1 and not kwargs else None
    if not is_grad_enabled() and (is_compiling() or tracing_state() is not None or not _is_large(rewrite, x)):
        return stock(module, *args, **kwargs)
    tensors = tensors_of(module)
    records = is_grad_enabled() and any(t.requires_grad for t in (*args, *tensors) if isinstance(t, Tensor))
    if steps_aside(off=_WHOLE, without_gradients=False):
        return stock(module, *args, **kwargs)
    if not (records or (_is_large(rewrite, x) and _may_wait(rewrite, module, x))):
        return stock(module, *args, **kwargs)
    own = [tensor for tensor in module._parameters.values() if tensor is not None]
    transposed = rewrite.transposed if len(own) == len(tensors) else None
    gathers = any(map(is_partitioned, tensors))
    why = _why_whole(rewrite, module, x, tensors)
    if not why and gathers and (transposed is None or not records):
        why = "modules inside their head gather weights of their own"
    if not why and records and x.is_inference():
        why = _NOT_ONE_TENSOR
    if why:
        if records:
            say_whole(module, why)
        return stock(module, *args, **kwargs)
    if transposed is not None and x.dtype != tensors[0].dtype and autocast_dtype(x) is None:
        transposed = None  # its own forward casts, or raises the stock error
    autocast = None if x.dtype == torch.float64 else autocast_dtype(x)
    snapshot = Snapshot(tensors if records else (x, *tensors), is_late=not records)
    options = (rewrite.lean, gathers, rewrite.room, records, snapshot)
    head = Head(module, stock, transposed, autocast, tensors, versions_of(tensors), *options)
    with torch.no_grad():
        one = head(x.reshape(-1, x.shape[-1])[:1]) if transposed is None else None
    dtype = one.dtype if one is not None else autocast or x.dtype
    width = tensors[0].shape[1 if transposed else 0] if one is None else one.shape[-1]  # its rows may have been resized
    x = x if records else x.detach()
    source = Source(head, x, width, dtype, records, versions=versions_of((x,)), product_width=width)
    return stand_for(replace(source, product_rows=product_rows(source)))


def _is_large(rewrite: LossRewrite, x: Any) -> bool:
    """Whether logits of a call without gradients take more memory than a loss by chunks may. False where each sequence
    has one position: generation, which reads these logits at once, calls the stock head."""
    if type(x) is not Tensor or x.dim() < 2 or (x.dim() > 2 and x.shape[-2] == 1) or rewrite.lean:
        return False
    return not fits(x, rewrite.classes, rewrite.room)


def _may_wait(rewrite: LossRewrite, module: nn.Module, x: Tensor) -> bool:
    """Whether logits of a call without gradients can be computed later, with the stock head's result. A head that is
    more than a linear may have switches (adapters) or draw random numbers. A CUDA graph under capture has to contain
    the product. FSDP2 may reshard the weights at the end of the model's forward."""
    if rewrite.transposed is None or x.is_meta or is_replica(module) or is_partitioned(next(module.parameters())):
        return False
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return not (torch.distributed.is_available() and torch.distributed.is_initialized()) or not any(
        fsdp_takes_back(around) for around in modules_that_run()
    )


def _why_whole(rewrite: LossRewrite, module: nn.Module, x: Any, tensors: Sequence[Tensor]) -> str:
    """Why chunks of rows would not be computed as all rows together are; empty where they would.

    Hooks of the module may gather its weights for this call alone: hooks of sharded training do, unless they leave the
    weights gathered. With ZeRO-3's hooks the chunks are computed inside a call of the module. Global module hooks get
    the tensor that stands for the logits.
    """
    if is_parallel_forward(vars(module).get("forward")):
        return "a parallel plan of transformers shards their head"
    if type(x) not in PLAIN_TYPES or x.dim() < 2 or not x.is_floating_point() or x.is_nested:
        return _NOT_ONE_TENSOR
    if "parametrizations" in module._modules or ("forward" in vars(module) and not is_only_moved(module)):
        return "the forward of their head was replaced"
    forward, forward_pre, *backward = module_hooks(module)
    hooks = [*forward.values(), *forward_pre.values()]
    if any(backward) or (hooks and not (fsdp_leaves_gathered(module, hooks) or gathers_for_its_calls(module, hooks))):
        return "their head has hooks of its own"
    if module.training and any(is_dropout(child) and child.training and child.p for child in module.modules()):
        return "a dropout inside their head draws one mask for all rows"
    if is_replica(module):
        return "nn.DataParallel gathers all logits on one device; processes of torchrun keep them apart"
    # `torch.func.functional_call` lends weights for one call; FSDP1 replaces them by views of its own flat tensor.
    is_lent = rewrite.transposed is not None and module._parameters.get("weight") is None
    is_lent = is_lent or not all(isinstance(parameter, nn.Parameter) for parameter in module.parameters())
    if is_lent or any(type(tensor) not in PLAIN_TYPES for tensor in tensors):
        return "the weights of their head are sharded, of another library, or lent for this call alone"
    return ""
