"""Arguments as a docstring describes them: ``actions (`torch.Tensor` of shape `(batch_size, length, act_dim)`)``.

transformers documents the arguments of every forward in this form, with sizes named like the fields of the config.
The legal values are not documented, so ids are 0 or 1.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from memopt.walk.calls.arguments.request import Request

_SHAPE = re.compile(r"^\s*(\w+) \(([^()]*)of shape\s+`?[(\[]([^`]*)[)\]]`?\s*(.*)$", re.MULTILINE)
_WHOLE = re.compile(r".*(ids?|indices|index|timesteps?|positions|freq|codes?)")
_FEW = re.compile(r"(bs|b|(.*_)?batch(_size)?|(num|n)_(audios|images|samples|videos))")


@dataclass(frozen=True)
class Description:
    """One argument in the docstring."""

    shape: tuple[int, ...]
    type: str
    optional: bool
    of_one_row: bool
    """Whether the shape has no batch dimension."""

    def value(self, request: Request, name: str) -> torch.Tensor:
        """A tensor of this shape: ones for masks and counts, 0 or 1 for ids, else normally distributed numbers."""
        if "padding" in name and not name.endswith("mask"):
            return torch.zeros(self.shape, dtype=torch.long)
        if name.endswith("mask") or name.startswith("num_"):
            return torch.ones(self.shape, dtype=torch.bool if "Bool" in self.type else torch.long)
        if _WHOLE.fullmatch(name) or any(kind in self.type for kind in ("Long", "Int")):
            return torch.randint(0, 2, self.shape, generator=request.generator)
        return request.normal(*self.shape)


def described(request: Request) -> dict[str, Description]:
    """Description of every argument whose documented shape can be computed from the config."""
    found: dict[str, Description] = {}
    documentation = inspect.getdoc(getattr(request.model, request.method)) or ""
    for name, kind, shape, rest in _SHAPE.findall(documentation):
        if name in request.names and name not in found:
            sizes = tuple(_sizes(request, shape))
            if sizes and all(size > 0 for size in sizes):
                of_one_row = not _FEW.fullmatch(shape.partition(",")[0])
                found[name] = Description(sizes, kind, "optional" in rest, of_one_row)
    return found


def _sizes(request: Request, shape: str) -> Iterator[int]:
    try:
        dimensions = ast.parse(f"({shape.rstrip(',')},)", mode="eval").body
    except SyntaxError:
        return
    if isinstance(dimensions, ast.Tuple):
        for position, node in enumerate(dimensions.elts):
            yield request.batch if position == 0 and isinstance(node, ast.Name) else _size(request, node)


def _size(request: Request, node: ast.expr) -> int:
    """Value of a documented size; 0 if it is unknown."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Attribute(value=ast.Name(id="config"), attr=field):
            return request.whole(field, default=0)
        case ast.Call(func=ast.Name(id="len"), args=[ast.Attribute(value=ast.Name(id="config"), attr=field)]):
            return len(request.setting(field, default=()))
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _size(request, left) * _size(request, right)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _size(request, left) + _size(request, right)
        case ast.Name(id=name):
            return _named_size(request, name)
    return 0


def _named_size(request: Request, name: str) -> int:
    if _FEW.fullmatch(name):
        return request.batch
    if name in ("hidden_size", "dim", "embed_dim", "hidden_dim"):
        return request.hidden
    if name == "feature_dim":
        return request.first_width or request.hidden
    if size := request.whole(name, default=0):
        return size
    return request.length if re.search(r"length|frames|number|num_|seq|time|^n_", name) else 0
