"""Decides from a frame's code whether it may apply a `torch.autograd.Function`: from PyTorch 2.14 on, `apply` is not
Python and has no frame of its own.

A call counts as one of an autograd function unless the callee is known to be something else: an operator, a C function
of PyTorch, the `func` of a mode, or a method. An attribute of a local variable with the name of a tensor method counts
as that method, unless the variable is `self` or `cls`. An unknown callee counts as an autograd function.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Sequence
from types import BuiltinFunctionType, CodeType, FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionMeta

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
