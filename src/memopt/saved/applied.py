"""Whether a frame may be applying a `torch.autograd.Function`, told from its code: from PyTorch 2.14 on `apply` is not
Python, so that no frame of its own says so.

A call is one of a function unless what is called is known not to be: an operator, a function of PyTorch's own C, what a
mode was given to run, or a method. An attribute of a local variable that is named as a method of tensors is taken for
that method, unless the variable is `self` or `cls`. What cannot be told counts as a function.
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
"""What a mode runs, also where its arguments branch."""
_UNBOUND = (f"{_LOCAL}self", f"{_LOCAL}cls")


def may_apply(frame: FrameType) -> bool:
    """Whether the instruction that `frame` is at may apply an autograd function."""
    code, module = frame.f_code, str(frame.f_globals.get("__name__"))
    names = _called(code, frame.f_lasti)
    if names is None or module == "torch._ops":  # an operator of the language, or one that PyTorch dispatches
        return False
    is_of_a_mode = code.co_name == "__torch_function__" or module.startswith("memopt.")
    if names in _GIVEN and is_of_a_mode and "func" in code.co_varnames[: code.co_argcount]:
        return "apply" in code.co_names  # what came through Python's dispatch is none
    found = _resolved(names, frame.f_globals)
    if found is not _UNKNOWN:
        return not _is_of_torch(found)
    is_of_a_variable = len(names) == 2 and names[0] not in _UNBOUND
    return not (names[-1] == "__torch_function__" or (is_of_a_variable and names[1] in _METHODS))


def applied(frame: FrameType) -> type | None:
    """The function that `frame` applies, where its code names it."""
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


#: A code's id and an offset -> the code, which is kept since its own hash takes long, and the names of what it calls.
_known: dict[tuple[int, int], tuple[CodeType, tuple[str, ...] | None]] = {}


def _called(code: CodeType, offset: int) -> tuple[str, ...] | None:
    """The names by which `code` finds what it calls there: a variable, and attributes. The first is empty for what is
    no variable. None: it calls nothing."""
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
        return None  # what is done in place may run through an iterator
    if instructions[place].opname not in _CALLS:
        return ("",)
    before = _before_arguments(instructions[: place + 1])
    names: list[str] = []
    for each in reversed(before):
        if each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            names.append(str(each.argval))
        elif each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            return (str(each.argval), *reversed(names))
        elif each.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
            return (f"{_LOCAL}{each.argval}", *reversed(names))
        elif each.opname not in ("PUSH_NULL", "CACHE", "EXTENDED_ARG"):
            break
    return ("", *reversed(names))


def _before_arguments(instructions: Sequence[dis.Instruction]) -> Sequence[dis.Instruction]:
    """The instructions up to the one that loads what the last of them calls; none where arguments branch."""
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
