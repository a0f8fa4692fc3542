"""Whether a frame may be applying a `torch.autograd.Function`, told from its code: from PyTorch 2.14 on `apply` is not
Python, so that no frame of its own says so.

A call is one of a function unless what is called is known not to be: an operator, a method of tensors, a function of C
that is no `apply`. What cannot be told counts as one.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Sequence
from types import BuiltinFunctionType, CodeType, FrameType
from typing import Any

from torch import Tensor
from torch.autograd.function import FunctionMeta

_UNKNOWN = object()
_CALLS = ("CALL", "CALL_FUNCTION", "CALL_METHOD", "CALL_KW", "CALL_FUNCTION_KW", "CALL_FUNCTION_EX")
_OPERATORS = ("BINARY_", "INPLACE_", "UNARY_", "COMPARE_", "STORE_SUBSCR")
_METHODS = frozenset(name for name in dir(Tensor) if name != "apply")
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))


def may_apply(frame: FrameType) -> bool:
    """Whether the instruction that `frame` is at may apply an autograd function."""
    code, module = frame.f_code, str(frame.f_globals.get("__name__"))
    if code.co_name == "__torch_function__" or module == "torch._ops":
        return False  # such a call has come through Python's dispatch, which `apply` does not
    if module.startswith("memopt.") and "func" in code.co_varnames[: code.co_argcount]:
        return False  # what a mode of memopt's was given
    names = _called(frame.f_code, frame.f_lasti)
    return names is not None and not _is_operator(names, frame.f_globals)


def applied(frame: FrameType) -> type | None:
    """The function that `frame` applies, where its code names it."""
    names = _called(frame.f_code, frame.f_lasti)
    found = getattr(_resolved(names or (), frame.f_globals), "__self__", None)
    return found if isinstance(found, FunctionMeta) else None


def _is_operator(names: Sequence[str], known: dict[str, Any]) -> bool:
    found = _resolved(names, known)
    if found is _UNKNOWN:
        return len(names) > 1 and names[-1] in _METHODS
    return isinstance(found, BuiltinFunctionType) and not isinstance(found.__self__, FunctionMeta)


def _resolved(names: Sequence[str], known: dict[str, Any]) -> Any:
    first, *rest = names or ("",)
    found = known.get(first, _UNKNOWN)
    for name in rest:
        found = _UNKNOWN if found is _UNKNOWN else getattr(found, name, _UNKNOWN)
    return found


#: A code's id and an offset -> the code, which is kept since its own hash takes long, and the names of what it calls.
_known: dict[tuple[int, int], tuple[CodeType, tuple[str, ...] | None]] = {}


def _called(code: CodeType, offset: int) -> tuple[str, ...] | None:
    """The names by which `code` finds what it calls there, a global variable first; an empty first name is no global
    variable. None: it calls nothing."""
    key = id(code), offset
    if key not in _known:
        _known[key] = code, _read(code, offset)
    return _known[key][1]


def _read(code: CodeType, offset: int) -> tuple[str, ...] | None:
    instructions = list(dis.get_instructions(code))
    place = next((at for at, each in enumerate(instructions) if each.offset == offset), -1)
    if place < 0:
        return ("",)
    if instructions[place].opname.startswith(_OPERATORS):
        return None
    if instructions[place].opname not in _CALLS:
        return ("",)
    before = _before_arguments(instructions[: place + 1])
    names: list[str] = []
    for each in reversed(before):
        if each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            names.append(str(each.argval))
        elif each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            return (str(each.argval), *reversed(names))
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
