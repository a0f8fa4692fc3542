"""Tensors that are saved as they are, by autograd or by the outer hook; and the tests whether an operation of PyTorch
or a `torch.autograd.Function` saves them.

From PyTorch 2.14 on, the `apply` of an autograd function is not Python and has no frame of its own; so the code of the
calling frame decides. A call counts as one of an autograd function unless the callee is known to be something else: an
operator, a C function of PyTorch, the `func` of a mode, or a method. An attribute of a local variable with the name of
a tensor method counts as that method, unless the variable is `self` or `cls`.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, CodeType, FrameType, ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionMeta

from memopt.recompute.versions import check_version
from memopt.saved.handles import remaking
from memopt.torch_compat import DIRECT_APPLY


class Kept:
    """A tensor kept as it is. Hooks switch autograd's own version check off, so this class makes it."""

    __slots__ = ("__weakref__", "_version", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.keep(alias_of(tensor))

    def keep(self, tensor: Tensor) -> None:
        self.tensor, self._version = tensor, tensor._version

    def instead(self, tensor: Tensor) -> Kept:
        return Kept(tensor)

    def unpack(self) -> Tensor:
        check_version(self.tensor, self._version)
        return self.tensor


class ShapeOnly:
    """The shape of a saved tensor, for an operation that reads no values in backward: they would be NaN."""

    __slots__ = ("_device", "_dtype", "_shape")

    def __init__(self, tensor: Tensor) -> None:
        self._shape, self._dtype, self._device = tensor.shape, tensor.dtype, tensor.device

    def unpack(self) -> Tensor:
        return torch.full((), torch.nan, dtype=self._dtype, device=self._device).expand(self._shape)


def alias_of(tensor: Tensor) -> Tensor:
    """The tensor to hold for a saved tensor: a detached alias, or a parameter itself. A non-leaf would own the node
    that owns it, a reference cycle. Aliases also make the storage's reference count show whether anything else refers
    to it. A parameter is held itself, because sharded training may exchange its data between forward and backward."""
    is_parameter = isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad)
    return tensor if is_parameter else tensor.detach()


class Forwarded:
    """A tensor that the outer hook keeps. Checkpointing's hook unpacks each tensor only once per backward: if a handle
    unpacks it first, this object holds the tensor until the node itself unpacks it."""

    __slots__ = ("_early", "_packed", "memopt_unpack")

    def __init__(self, packed: Any, unpack: Callable[[Any], Tensor] | None) -> None:
        self._packed, self.memopt_unpack = packed, unpack
        self._early: Tensor | None = None

    def unpack(self) -> Tensor:
        tensor = self._early
        if tensor is None:
            assert self.memopt_unpack is not None
            tensor = self.memopt_unpack(self._packed)
        self._early = tensor if remaking.depth else None
        return tensor

    def beside(self, tensor: Tensor) -> Any:
        """The object that holds `tensor` for the node that saved this one: an observer's, else `tensor` itself."""
        seen = getattr(self._packed, "beside", None)
        return tensor if seen is None else seen(tensor)


#: The code that runs while a `torch.autograd.Function` saves its tensors; None if it is not Python.
APPLY: CodeType | None = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)


def may_be_a_function(frame: FrameType | None) -> bool:
    """Whether a hook that was called from `frame` may have got a tensor that a `torch.autograd.Function` saves."""
    return APPLY is None if frame is None else _is_apply(frame) or (APPLY is None and may_apply(frame))


def may_write_into_saved(frame: FrameType | None) -> bool:
    """Whether the hook may have got a tensor that a foreign autograd function saves, which may write into its copy."""
    if frame is None or APPLY is not None:
        return frame is None or frame.f_code is APPLY
    return frame.f_code is not DIRECT_APPLY and may_apply(frame)


def function_of(frame: FrameType) -> type | None:
    """The `torch.autograd.Function` that `frame` applies, if it is known."""
    if _is_apply(frame):
        return cast("type", frame.f_locals["cls"])
    return applied(frame) if APPLY is None else None


def _is_apply(frame: FrameType) -> bool:
    return frame.f_code is APPLY or frame.f_code is DIRECT_APPLY


_UNKNOWN = object()
_CALLS = ("CALL", "CALL_FUNCTION", "CALL_METHOD", "CALL_KW", "CALL_FUNCTION_KW", "CALL_FUNCTION_EX")
_OPERATORS = ("BINARY_", "UNARY_", "COMPARE_")
_METHODS = frozenset(name for name in dir(Tensor) if name != "apply")
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_LOCAL = "local "
"""Before the name of a local variable."""
_GIVEN = ((f"{_LOCAL}func",), ("",))
"""Names of a mode's `func`; the second for a call whose arguments branch."""
_UNBOUND = (f"{_LOCAL}self", f"{_LOCAL}cls")


def may_apply(frame: FrameType) -> bool:
    """Whether the instruction that `frame` is at may apply an autograd function."""
    code, module = frame.f_code, str(frame.f_globals.get("__name__"))
    names = _called(code, frame.f_lasti)
    if names is None or module == "torch._ops":  # a Python operator, or an operator that PyTorch dispatches
        return False
    is_of_a_mode = code.co_name == "__torch_function__" or module.startswith("memopt.")
    if names in _GIVEN and is_of_a_mode and "func" in code.co_varnames[: code.co_argcount]:
        return "apply" in code.co_names  # `func` from Python's dispatch is no autograd function
    found = _resolved(names, frame.f_globals)
    if found is not _UNKNOWN:
        return not _is_of_torch(found)
    is_of_a_variable = len(names) == 2 and names[0] not in _UNBOUND
    return not (names[-1] == "__torch_function__" or (is_of_a_variable and names[1] in _METHODS))


def applied(frame: FrameType) -> type | None:
    """The autograd function that `frame` applies, if its code names it."""
    names = _called(frame.f_code, frame.f_lasti)
    found = getattr(_resolved(names or (), frame.f_globals), "__self__", None)
    return found if isinstance(found, FunctionMeta) else None


def _is_of_torch(found: Any) -> bool:
    if not isinstance(found, BuiltinFunctionType) or isinstance(found.__self__, FunctionMeta):
        return False
    owner = found.__self__
    if owner is None:
        return getattr(torch, found.__name__, None) is found
    home = owner.__name__ if isinstance(owner, ModuleType) else getattr(owner, "__module__", None)
    return isinstance(owner, Tensor) or str(home).partition(".")[0] == "torch"


def _resolved(names: Sequence[str], known: dict[str, Any]) -> Any:
    first, *rest = names or ("",)
    found = known.get(first, _UNKNOWN)
    for name in rest:
        found = _UNKNOWN if found is _UNKNOWN else getattr(found, name, _UNKNOWN)
    return found


#: (id of a code, offset) -> the code, which keeps its id valid (its hash would take long), and the callee's names.
_known: dict[tuple[int, int], tuple[CodeType, tuple[str, ...] | None]] = {}


def _called(code: CodeType, offset: int) -> tuple[str, ...] | None:
    """The names in the callee at `offset` of `code`: a variable, then attributes. The first is empty if the callee does
    not start with a variable. None: a Python operator, which calls no function."""
    key = id(code), offset
    if key not in _known:
        _known[key] = code, _read(code, offset)
    return _known[key][1]


def _read(code: CodeType, offset: int) -> tuple[str, ...] | None:
    instructions = list(dis.get_instructions(code))
    place = next((at for at, each in enumerate(instructions) if each.offset == offset), -1)
    if place < 0:
        return ("",)
    if instructions[place].opname.startswith(_OPERATORS) and not instructions[place].argrepr.endswith("="):
        return None  # only if not in place: an in-place operator may run an iterator
    if instructions[place].opname not in _CALLS:
        return ("",)
    before = _before_arguments(instructions[: place + 1])
    names: list[str] = []
    for each in reversed(before):
        if each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            names.append(str(each.argval))
        elif each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            return (str(each.argval), *reversed(names))
        elif "LOAD_FAST" in each.opname or each.opname.startswith("LOAD_DEREF"):
            # From Python 3.13 on, one instruction may load or store another variable before this one.
            variable = each.argval[-1] if isinstance(each.argval, tuple) else each.argval
            return (f"{_LOCAL}{variable}", *reversed(names))
        elif each.opname not in ("PUSH_NULL", "CACHE", "EXTENDED_ARG"):
            break
    return ("", *reversed(names))


def _before_arguments(instructions: Sequence[dis.Instruction]) -> Sequence[dis.Instruction]:
    """The instructions up to the load of the callee of the last one, a call; empty if its arguments branch."""
    *rest, call = instructions
    count = call.arg or 0
    waiting = count + (call.opname in ("CALL_KW", "CALL_FUNCTION_KW"))
    if call.opname == "CALL_FUNCTION_EX":
        waiting = 2 if sys.version_info >= (3, 14) else 1 + (count & 1)
    while rest and rest[-1].opname in ("PRECALL", "KW_NAMES"):
        rest.pop()
    while waiting > 0:
        if not rest or rest[-1].is_jump_target or rest[-1].opcode in _JUMPS:
            return ()
        each = rest.pop()
        waiting -= dis.stack_effect(each.opcode, each.arg if each.opcode >= dis.HAVE_ARGUMENT else None)
    return rest if waiting == 0 else ()
