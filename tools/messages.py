"""Errors and warnings that memopt prints to users, read from the source; docs/troubleshooting.md has each.

    python -m tools.messages              print each message, the hint after it, and its place
    python -m tools.messages --missing    print those without an entry; exit 1 if there are any

In the page a message stands as code, with words in capitals for its parts that vary: `'DIR' was not patched.`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
#: What stands for a part that varies.
VARIES = "\N{HORIZONTAL ELLIPSIS}"
#: A message with fewer fixed words is told apart by what its parts can be.
_TELLING = 2
_WORD = re.compile(r"[A-Za-z]{2,}")
_WARNS = re.compile(r"(warnings\.warn|_?logger\.warning)")
_ENTRY = re.compile(r"^ *- `` ?(.*?) ?``|^ *- `(.*?)`", re.MULTILINE)
#: Messages that another object holds: they are raised elsewhere, or are a library's.
PASSED_ON = re.compile(
    r"(first|error)\.message|str\(error\)|_explain\(.*\)|full\.rstrip\(.*"
    r"|f'{message}{end}'|f'{one_line\(error\)}\.'|'%s'"
)


@dataclass(frozen=True)
class Message:
    """A message as the source has it."""

    text: str
    """With `VARIES` for each part that varies."""
    hint: str
    place: str


def main(arguments: list[str]) -> int:
    found = messages(ROOT / "src" / "memopt")
    if "--missing" in arguments:
        found = missing(found, PAGE.read_text())
    for each in found:
        print(f"{each.place}: {each.text}" + (f"  -> {each.hint}" if each.hint else ""))
    return 1 if found and "--missing" in arguments else 0


def missing(found: list[Message], page: str) -> list[Message]:
    """Those of `found` that have no entry in the page."""
    entries = {_comparable(entry) for entry in _entries(page)}
    return [each for each in found if _comparable(each.text) not in entries]


def unused(found: list[Message], page: str) -> list[str]:
    """Entries of the page that are no message of the source."""
    known = {_comparable(each.text) for each in found}
    return [entry for entry in _entries(page) if _comparable(entry) not in known]


def _entries(page: str) -> list[str]:
    return [short or long for long, short in _ENTRY.findall(page)]


def _comparable(entry: str) -> str:
    """A message or an entry with `VARIES` for its words in capitals, and one for several beside each other."""
    return re.sub(f"[ {VARIES}]*{VARIES}[ {VARIES}]*", VARIES, re.sub(r"\b[A-Z][A-Z_]+\b|%s", VARIES, entry))


def messages(source: Path) -> list[Message]:
    """All messages, file by file.

    Raises:
        ValueError: an error or warning has a message that cannot be read from the source.
    """
    trees = {path: ast.parse(path.read_text()) for path in sorted(source.rglob("*.py"))}
    errors = _errors(trees.values())
    found: dict[str, Message] = {}
    for path, tree in trees.items():
        for scope, node in _inside(tree, (tree,)):
            said, hint = _said(node, scope, errors)
            if said is None:
                continue
            place = f"{path.relative_to(source)}:{said.lineno}"
            texts = [" ".join(text.split()) for text in _texts(said, scope)]
            if not texts and not PASSED_ON.fullmatch(ast.unparse(said)):
                raise ValueError(f"{place}: the message {ast.unparse(said)} cannot be read")
            hints = " / ".join(_texts(hint, scope)) if hint is not None else ""
            for text in texts:
                if not isinstance(node, ast.Raise) or text.endswith("."):
                    found.setdefault(text, Message(text, hints, place))
    return list(found.values())


def _errors(trees: Iterable[ast.Module]) -> set[str]:
    """Names of `MemoptError` and of every class below it."""
    bases = {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    names = {"MemoptError"}
    while more := {name for name, its in bases.items() if its & names} - names:
        names |= more
    return names


def _inside(node: ast.AST, scope: tuple[ast.AST, ...]) -> Iterator[tuple[tuple[ast.AST, ...], ast.AST]]:
    """Every node, and the functions around it."""
    for child in ast.iter_child_nodes(node):
        yield scope, child
        inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _inside(child, (*scope, child) if inside else scope)


def _said(node: ast.AST, scope: tuple[ast.AST, ...], errors: set[str]) -> tuple[ast.expr | None, ast.expr | None]:
    """The message and the hint of an error, a warning, a remark of a patch, or of a RuntimeError that is a sentence."""
    if isinstance(node, ast.Yield) and getattr(scope[-1], "name", "") == "remarks":
        return node.value, None
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and ast.unparse(node.exc.func) == "RuntimeError":
        return node.exc.args[0], None
    if not isinstance(node, ast.Call) or not node.args:
        return None, None
    name = ast.unparse(node.func)
    if name.rpartition(".")[2] in errors:
        return node.args[0], node.args[1] if len(node.args) > 1 else None
    return (node.args[0], None) if _WARNS.fullmatch(name) else (None, None)


def _texts(node: ast.AST, scope: tuple[ast.AST, ...]) -> Iterator[str]:
    """The texts that an expression may have; none where that cannot be seen."""
    match node:
        case ast.Constant(value=str(text)) if text != "%s":
            yield text
        case ast.JoinedStr(values=parts):
            plain = "".join(_fixed(part) for part in parts)
            if len(_WORD.findall(plain)) >= _TELLING:
                yield plain
                return
            texts = [""]
            for part in parts:
                texts = [text + more for text in texts for more in _variants(part, scope)]
            yield from (text for text in texts if _WORD.search(text))
        case ast.IfExp(body=body, orelse=other):
            yield from (*_texts(body, scope), *_texts(other, scope))
        case ast.BinOp(left=left, right=right):
            yield from (a + b for a in _texts(left, scope) for b in _texts(right, scope))
        case ast.Name(id=name):
            for value in _assigned(name, scope):
                yield from () if isinstance(value, ast.Name) else _texts(value, scope)


def _fixed(part: ast.AST) -> str:
    return part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else VARIES


def _variants(part: ast.AST, scope: tuple[ast.AST, ...]) -> list[str]:
    """The texts of a part that is a name; `VARIES` where they cannot be seen."""
    seen = list(_texts(part.value, scope)) if isinstance(part, ast.FormattedValue) else [_fixed(part)]
    return seen or [VARIES]


def _assigned(name: str, scope: tuple[ast.AST, ...]) -> Iterator[ast.AST]:
    """Values that the innermost function that assigns to `name` gives it."""
    for function in reversed(scope):
        values = []
        for node in ast.walk(function):
            if isinstance(node, ast.Assign):
                values += [value for target in node.targets for value in _of(name, target, node.value)]
        values += _given(name, function, scope[0])
        if values:
            yield from values
            return


def _given(name: str, function: ast.AST, module: ast.AST) -> Iterator[ast.AST]:
    """What calls in the same file give a parameter of `function`."""
    if not isinstance(function, ast.FunctionDef):
        return
    names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    names = names[names[:1] in (["self"], ["cls"]) :]
    for call in ast.walk(module):
        if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] == function.name:
            yield from (value for its, value in zip(names, call.args, strict=False) if its == name)
            yield from (keyword.value for keyword in call.keywords if keyword.arg == name)


def _of(name: str, target: ast.AST, value: ast.AST) -> Iterator[ast.AST]:
    if isinstance(target, ast.Name) and target.id == name:
        yield value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for inner, its in zip(target.elts, value.elts, strict=True):
            yield from _of(name, inner, its)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
