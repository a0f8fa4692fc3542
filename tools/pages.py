"""The parts of docs/ that are computed from the source: the picture of the rooms, and links to lines.

    python -m tools.pages            write both into the pages
    python -m tools.pages --check    exit 1 if a page is out of date, and name it

The picture shows which room of src/memopt imports which, deferred imports included. An import that another path
implies has no arrow. A link such as [`patch_norm`](../src/memopt/patches/norm/module.py#L60) names a function, a class
or a method (`Class.method`) of that file, and gets the line of its definition.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- rooms: python -m tools.pages -->\n", "<!-- end of rooms -->"
#: Files beside the rooms that are no room of their own.
NO_ROOM = {"__init__", "__main__"}
LINK = re.compile(r"\[`(?P<name>[\w.]+)`\]\((?P<file>[\w./-]+\.py)(?:#L\d+)?\)")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the computed parts of docs/.")
    parser.add_argument("--check", action="store_true", help="exit 1 if a page is out of date")
    check = parser.parse_args(arguments).check
    stale = [page for page in sorted((ROOT / "docs").glob("*.md")) if current(page) != page.read_text()]
    for page in stale:
        if not check:
            page.write_text(current(page))
        print(f"{page.relative_to(ROOT)}: {'out of date; run python -m tools.pages' if check else 'written'}")
    return 1 if check and stale else 0


def current(page: Path) -> str:
    """The text of `page`, with its computed parts as the source has them now.

    Raises:
        ValueError: a link names something that its file does not define.
    """
    text = page.read_text()
    before, begin, rest = text.partition(BEGIN)
    if begin:
        text = before + begin + picture(rooms(ROOT / "src" / "memopt")) + END + rest.partition(END)[2]
    return LINK.sub(lambda found: _linked(page, found["name"], found["file"]), text)


def picture(imports: dict[str, set[str]]) -> str:
    """The rooms as a Mermaid graph, upper rooms first."""
    edges = [f"  {room} --> {other}\n" for room in imports for other in sorted(direct(imports, room))]
    return "```mermaid\ngraph TD\n" + "".join(edges) + "```\n"


def direct(imports: dict[str, set[str]], room: str) -> set[str]:
    """Rooms that `room` imports, and that none of the other rooms that it imports leads to."""
    return imports[room] - {far for near in imports[room] for far in _reached(imports, near)}


def _reached(imports: dict[str, set[str]], room: str) -> set[str]:
    found = set(imports[room])
    return found.union(*(_reached(imports, near) for near in found))


def rooms(package: Path) -> dict[str, set[str]]:
    """Room (a folder or a file of `package`) -> the rooms that it imports; upper rooms first.

    Imports for type checking do not count.
    """
    files: dict[str, list[Path]] = {}
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).parts[0].removesuffix(".py")
        if name not in NO_ROOM:
            files.setdefault(name, []).append(path)
    found = {
        name: {room for path in its for room in _imported(path)} & files.keys() - {name} for name, its in files.items()
    }
    return {name: found[name] for name in sorted(found, key=lambda name: (-len(_reached(found, name)), name))}


def _imported(path: Path) -> Iterator[str]:
    """Rooms that a file imports."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (module.split(".")[1] for module in modules if module.startswith("memopt."))


def _linked(page: Path, name: str, file: str) -> str:
    line = definition(page.parent / file, name)
    if line is None:
        raise ValueError(f"{page.name}: {file} does not define {name}")
    return f"[`{name}`]({file}#L{line})"


def definition(path: Path, name: str) -> int | None:
    """The line of the function, class or method `name` in a file; None where it is not defined."""
    body: list[ast.stmt] = ast.parse(path.read_text()).body
    node: ast.stmt | None = None
    for part in name.split("."):
        node = next((each for each in body if getattr(each, "name", None) == part), None)
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            return None
        body = node.body
    return None if node is None else node.lineno


if __name__ == "__main__":
    sys.exit(main())
