"""Private names of dispatch: modes that see every operator, fake tensors, operators, trees, transforms and traces."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from operator import attrgetter
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import FunctionMeta
from torch.nn.attention import SDPBackend

from memopt.errors import MemoptError
from memopt.torch_compat.autograd import call_its_backward
from memopt.torch_compat.lookup import find, is_found

_NO_WALK = "memopt cannot observe a model, so nothing can be patched or reported"


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise MemoptError(
        f"memopt cannot observe models with PyTorch {torch.__version__}: it lacks names that memopt needs.",
        "memopt.torch_compat.missing() lists them; install a PyTorch that memopt was tested with (2.13).",
    )


class _Unavailable:
    __init__ = _refuse


# -- trees of tensors -----------------------------------------------------------------------------------------------


def _own_tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return type(tree)((key, _own_tree_map(function, value)) for key, value in tree.items())
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_own_tree_map(function, value) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(_own_tree_map(function, value) for value in tree)
    return function(tree)


def _own_tree_leaves(tree: Any) -> list[Any]:
    if isinstance(tree, (Mapping, list, tuple)):
        children = tree.values() if isinstance(tree, Mapping) else tree
        return [leaf for child in children for leaf in _own_tree_leaves(child)]
    return [tree]


_TREES = "tensors inside containers that only PyTorch's registry knows are not seen"

# -- modes and fake tensors -----------------------------------------------------------------------------------------

if TYPE_CHECKING:
    from torch._C import DisableTorchFunction
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
    from torch.utils._mode_utils import no_dispatch as no_dispatch
    from torch.utils._python_dispatch import TorchDispatchMode as UntypedMode
    from torch.utils._python_dispatch import _disable_current_modes
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map as tree_map

    class TorchDispatchMode(UntypedMode):
        def __init__(self) -> None: ...

    TracingMode = TorchDispatchMode
    no_torch_function, no_modes = DisableTorchFunction, _disable_current_modes
    device_read: object
else:
    _FAKE, _NO_ESTIMATE = "torch._subclasses.fake_tensor", "bytes cannot be estimated without running the model"
    TorchDispatchMode = find("torch.utils._python_dispatch.TorchDispatchMode", _Unavailable, _NO_WALK)
    # Without this setting every operator passes through two functions of the compiler. Only for traces: a mode that is
    # active in training needs them, since compiled code may run inside of it.
    _direct = {"_should_skip_dynamo": classmethod(lambda cls: False)}
    TracingMode = type("TracingMode", (TorchDispatchMode,), dict(_direct))
    is_traceable_wrapper_subclass = find(
        "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
        lambda value: False,
        "reports do not look inside sharded and quantised tensors",
    )
    FakeTensor = find(f"{_FAKE}.FakeTensor", type("FakeTensor", (Tensor,), {}), _NO_ESTIMATE)
    _MODE = f"{_FAKE}.FakeTensorMode"
    FakeTensorMode = type("FakeTensorMode", (find(_MODE, _Unavailable, _NO_ESTIMATE),), dict(_direct))
    unset_fake_temporarily = find(f"{_FAKE}.unset_fake_temporarily", contextlib.nullcontext, _NO_ESTIMATE)
    no_dispatch = find(
        "torch.utils._mode_utils.no_dispatch", contextlib.nullcontext, "models with dropout cannot be estimated"
    )
    no_modes = find(
        "torch.utils._python_dispatch._disable_current_modes", contextlib.nullcontext, "a report counts proofs as well"
    )
    no_torch_function = find("torch._C.DisableTorchFunction", contextlib.nullcontext, "traces of a step take longer")
    device_read = find("torch.ops.prim.device.default", object(), "traces of a step take longer")
    tree_map = find("torch.utils._pytree.tree_map", _own_tree_map, _TREES)
    tree_leaves = find("torch.utils._pytree.tree_leaves", _own_tree_leaves, _TREES)

#: Types of tensors that size, strides and offset describe, and whose operations nothing overrides: no sharded, nested
#: or quantised tensors.
PLAIN_TYPES: frozenset[type] = frozenset({Tensor, nn.Parameter, FakeTensor})

#: The meaning of each name:
#: TorchDispatchMode               context manager; its ``__torch_dispatch__`` gets every operator called inside
#: TracingMode                     the same, faster, where nothing inside is compiled
#: is_traceable_wrapper_subclass   whether a tensor is made of inner tensors (``__tensor_flatten__``)
#: FakeTensor, FakeTensorMode      tensors with a shape and device but no memory, and the mode that makes them
#: unset_fake_temporarily          inside it FakeTensorMode is off
#: no_dispatch                     inside it no dispatch mode gets the operators
#: no_modes                        inside it only dispatch modes that are entered inside it get the operators
#: no_torch_function               inside it no function mode gets the functions
#: device_read                     the operator that modes get when the device of a fake tensor is read
#: tree_map, tree_leaves           map a function over the leaves of nested containers, and list the leaves

grouped_mm: Any = find("torch._grouped_mm", None, "outputs of experts in grouped products are saved for the router")
"""The function that ``torch.nn.functional.grouped_mm`` calls and function modes get; None if PyTorch lacks it."""

_EXCLUDED = "torch._C._SetExcludeDispatchKeyGuard"
_exclude: Any = find(_EXCLUDED, None, "what a block keeps of its first run is not seen to be changed in place")


def view_below_autograd(tensor: Tensor) -> Tensor:
    """A new tensor without a graph on the memory of `tensor`, made below autograd (inside a TorchDispatchMode). It
    shares the version counter of `tensor`: a change in place of either counts for both."""
    with contextlib.nullcontext() if _exclude is None else _exclude(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


_VALUES = "memopt_values"


def set_known_values(fake: Tensor, values: Tensor) -> None:
    """Let :func:`known_values` of a fake tensor be `values`, a tensor with memory."""
    setattr(fake, _VALUES, values)


def known_values(tensor: Tensor | None) -> Tensor | None:
    """The values of a fake tensor that :func:`set_known_values` has set (labels in a trace); None for other tensors."""
    return vars(tensor).get(_VALUES) if isinstance(tensor, FakeTensor) else None


# -- operators ------------------------------------------------------------------------------------------------------

_overload: Any = find("torch._ops.OpOverload", (), "operators called by their own name are not recognised")
# An instance attribute: the class only annotates it.
operator_schema: Callable[[Any], Any] = attrgetter("_schema")
if find("torch.ops.aten.mm.default._schema", None, _NO_WALK) is None:
    operator_schema = _refuse
"""The schema of an operator (``OpOverload``): ``name`` with its namespace, ``arguments``, ``returns``, ``is_mutable``.

The walk reads from it what an operator does. Without it nothing can be observed.
"""


def operator_name(function: Any) -> str:
    """The name of an operator without namespace and overload: ``mm`` of ``aten::mm.default``."""
    name: str = operator_schema(function).name
    return name.split("::")[-1]


def is_operator(function: object) -> bool:
    """Whether `function` is an operator of ``torch.ops`` (an ``OpOverload``), and not a Python function."""
    return isinstance(function, _overload)


# -- function transforms, forward mode, traces ----------------------------------------------------------------------

_STEPS_ASIDE = "every patched module runs its stock forward"
_NO_KERNELS = "operators run as plain PyTorch instead of Triton kernels"


def _unknown() -> object:
    return "unknown"


def _any_kernels(*, with_priority: bool) -> None:
    return None


def _is_always(tensor: Tensor) -> bool:
    return True


interpreter_stack: Callable[[], object] = find("torch._C._functorch.peek_interpreter_stack", _unknown, _STEPS_ASIDE)
"""The innermost function transform (`torch.func`) that is running; None if none is.

Transforms need stock operations. Without this name, a transform counts as running.
"""

_LEVEL = "torch.autograd.forward_ad._current_level"
find(_LEVEL, None, _STEPS_ASIDE)
forward_mode_level: Callable[[], int] = functools.partial(
    getattr, forward_ad, "_current_level" if is_found(_LEVEL) else "_level_is_unknown", 0
)
"""The level of forward-mode derivatives (`torch.autograd.forward_ad.dual_level`); -1 outside of them.

memopt's operators have no forward-mode derivative. Without this name, a level counts as active.
"""

tracing_state: Callable[[], object] = find("torch._C._get_tracing_state", _unknown, _STEPS_ASIDE)
"""The state of the `torch.jit.trace` that is running; None if none is. Traces need stock operations.

Without this name, a trace counts as running.
"""

proxy_mode: Callable[[], object] = find("torch.fx.experimental.proxy_tensor.get_proxy_mode", _unknown, _STEPS_ASIDE)
"""The mode of the `make_fx` that is tracing; None if none is. Its graph has the operations inside of an autograd
function and not the function's backward, so it needs stock operations too.

Without this name, a trace counts as running.
"""

any_autocast_enabled: Callable[[], bool] = find(
    "torch._C._is_any_autocast_enabled", lambda: True, "memopt's operators look for autocast device by device, slowly"
)
"""Whether autocast is on for any device except MPS. Without this name, true: callers then test each device."""
if torch.backends.mps.is_built():
    any_autocast_enabled = lambda: True  # noqa: E731

is_transformed: Callable[[Tensor], bool] = find(
    "torch._C._functorch.is_functorch_wrapped_tensor", _is_always, _NO_KERNELS
)
"""Whether a tensor of plain type belongs to a function transform, so that no kernel can read its memory.

Without this name, true for every tensor.
"""

is_legacy_batched: Callable[[Tensor], bool] = find(
    "torch._C._functorch.is_legacy_batchedtensor", _is_always, _NO_KERNELS
)
"""Whether a tensor is a gradient of ``torch.autograd.grad(..., is_grads_batched=True)``; true without this name."""

kernels_of_attention: Callable[..., list[SDPBackend] | None] = find(
    "torch.nn.attention._cur_sdpa_kernel_backends",
    _any_kernels,
    "a checkpointed block runs again with other kernels of attention than sdpa_kernel allowed its forward",
)
"""The kernels that ``F.scaled_dot_product_attention`` may run here, in their order; None if they are not known."""


class _Direct(FunctionMeta):
    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> None:
        super().__init__(name, bases, namespace)  # type: ignore[no-untyped-call]
        call_its_backward(cls)
        cls._apply = super(torch.autograd.Function, cls).apply  # type: ignore[misc]


class DirectFunction(torch.autograd.Function, metaclass=_Direct):
    """An autograd function whose `apply` does not check for function transforms (`torch.func`).

    That check is half the cost of applying a function. Patched modules make it themselves, and run stock under a
    transform. Backward also does not test whether the function has `backward` or `vjp`.
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        return cls._apply(*args)


#: The code that runs while such a function saves its tensors.
DIRECT_APPLY: CodeType = DirectFunction.apply.__func__.__code__  # type: ignore[attr-defined]


# -- tensors without memory -----------------------------------------------------------------------------------------

_WRAPPER = "torch.Tensor._make_wrapper_subclass"
_make_wrapper: Any = find(_WRAPPER, None, "logits are computed whole, as the stock model does")
makes_wrappers = is_found(_WRAPPER)
"""Whether :func:`wrapper` works; otherwise no tensor can stand for uncomputed logits."""
_refuse_addresses: Any = find(
    "torch._C._set_throw_on_mutable_data_ptr", lambda _: None, "C++ code that reads uncomputed logits may crash"
)


def wrapper(cls: type[Tensor], form: Tensor, dtype: torch.dtype, device: torch.device) -> Any:
    """A tensor of the subclass `cls` with the layout of `form`, this dtype and device, and no memory. C++ code that
    takes its address (an extension, DLPack) gets an error."""
    layout = (form.shape, form.stride(), form.storage_offset())
    made = _make_wrapper(cls, *layout, dtype=dtype, device=device, storage_size=0)
    _refuse_addresses(made)
    return made
