"""Valid JSON made invalid in one to four places: the strategies of the fuzzer."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

#: Values in place of any other.
SCALARS: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 1.5, -0.0, 1e308, float("nan"), float("inf"), 2**31, 2**53 + 1, 2**63 - 1, 2**64,
    10**30, "", "x", "0", "F32", "I8", "F4", "Q7", "../x", "/etc/passwd", "..", ".", "a/b", "a\x00b", "a\nb", "\x1b[2J",
    "\ud800", "é" * 300, [], {}, [[]], [None], {"a": 1}, {"": {}},
)  # fmt: skip
#: Names of fields and tensors in place of any other.
NAMES = ("", "x", "__metadata__", "..", "../x", "/etc/passwd", "a\nb", "\x1b[2J", "\ud800", "dtype", "shape")


class Repeated(str):
    """A key that is written twice; each has an identity of its own, so that a dict holds both."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


@st.composite
def mutated(draw: st.DrawFn, document: Any) -> Any:
    """`document` (never changed) with one to four changes."""
    root = [copy.deepcopy(document)]
    for _ in range(draw(st.integers(1, 4))):
        _change(draw, *_place(draw, root), draw(st.sampled_from(_CHANGES)))
    return root[0]


def _place(draw: st.DrawFn, root: list[Any]) -> tuple[Any, Any]:
    """A container below `root`, and a key of it: deeper with every step, up to where the draw stops."""
    container: Any = root
    key: Any = 0
    while isinstance(container[key], dict | list) and container[key] and draw(st.integers(0, 4)):
        container = container[key]
        keys = list(container) if isinstance(container, dict) else range(len(container))
        key = keys[draw(st.integers(0, len(keys) - 1))]
    return container, key


def _change(draw: st.DrawFn, container: Any, key: Any, kind: str) -> None:
    value = container[key]
    if kind == "replace":
        container[key] = copy.deepcopy(draw(st.sampled_from(SCALARS)))
    elif kind == "number" and type(value) is int:
        container[key] = value + draw(st.sampled_from((-1, 1, 2, 8, -value, 2**32, -(2**40))))
    elif kind == "wrap":
        container[key] = [value]
    elif kind == "deepen":
        for _ in range(draw(st.sampled_from((2, 50, 500)))):
            value = [value]
        container[key] = value
    elif kind == "repeat" and isinstance(value, list):
        container[key] = value * draw(st.sampled_from((2, 3, 1_000)))
    elif kind == "remove" and container is not value and len(container) > 1:
        del container[key]
    elif isinstance(container, dict):
        name = draw(st.sampled_from(NAMES))
        if kind == "rename":
            container[name] = container.pop(key)
        elif kind == "twice":
            container[Repeated(key)] = copy.deepcopy(value)
        elif kind == "add":
            container[name] = copy.deepcopy(draw(st.sampled_from(SCALARS)))


_CHANGES = (*("replace",) * 3, "number", "number", "wrap", "deepen", "repeat", "remove", "rename", "twice", "add")


def to_bytes(draw: st.DrawFn, value: Any) -> bytes:
    """`value` as JSON: in ASCII, or as it is; now and then cut off or with a byte changed."""
    text = json.dumps(value, ensure_ascii=draw(st.booleans()))
    content = bytearray(text.encode("utf-8", "surrogatepass"))
    damage = draw(st.integers(0, 19))
    if damage == 0:
        del content[draw(st.integers(0, len(content))) :]
    elif damage == 1 and content:
        content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
    elif damage == 2:
        position = draw(st.integers(0, len(content)))
        content[position:position] = b"[" * 50_000
    return bytes(content)
