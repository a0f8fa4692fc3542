"""Rules of the house, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import memopt
from memopt.patches.registry import patches

SOURCE = Path(memopt.__file__).parent
#: Kernels that several operators use, and the tools around them.
SHARED_KERNELS = {"base", "tools"}
METHODS = {patch.name: patch for patch in patches()}
FOLDERS = {
    folder.name
    for room in ("patches", "kernels")
    for folder in (SOURCE / room).iterdir()
    if (folder / "__init__.py").is_file() and folder.name not in SHARED_KERNELS
}
#: Files that may name a method, with the reason.
PUBLIC_PATHS = {
    "sampling.py": "the public path of patches/sampled_linear",
    "report/causes.py": "names functions of PyTorch, by which a kept tensor is explained",
    "activations.py": "names operations of PyTorch",
}
#: Words of methods that mean something else where they stand outside of plans.
OTHER_MEANINGS = {
    "fold": "rich breaks long lines so; and checkpoint/ and verify/ fold weights",
    "loss": "a field of the output of a Hugging Face model",
    "seed": "an argument of kernels that draw random numbers",
    "compression": "an attribute of scopes",
}
#: An operator folder -> the operators that its own calls.
OPERATORS = {
    "activation": {"linear"},
    "derivative_codes": {"activation"},
    "gated_mlp": {"activation", "linear"},
    "sampled_linear": {"linear"},
}


def files() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE).as_posix(), ast.parse(path.read_text())


def imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def home(name: str) -> str | None:
    """The method whose folder a file stands in."""
    room, _, rest = name.partition("/")
    folder = rest.partition("/")[0]
    return folder if room in ("patches", "kernels") and folder in FOLDERS else None


def declared(name: str) -> set[str]:
    """Methods that a file may name beside its own."""
    own = home(name)
    if own is None:
        return (
            FOLDERS if name in PUBLIC_PATHS or name.startswith("kernels/tools/") else set()
        )  # tools list all launches
    patch = METHODS.get(own)
    if name.startswith("kernels/"):
        return {own, *OPERATORS.get(own, set())}
    return {own} if patch is None else {own, *patch.after, *patch.requires}


def words(name: str) -> set[str]:
    """What a method is called in plans, recipes and tables."""
    patch = METHODS.get(name)
    return {name} if patch is None else {name, *filter(None, (patch.key,)), *patch.actions}


@pytest.mark.parametrize("room", ["patches", "kernels"])
def test_only_a_methods_own_folders_import_it(room: str) -> None:
    named = [
        f"{name}: {module}"
        for name, tree in files()
        for module in imports(tree)
        if module.startswith(f"memopt.{room}.")
        if (folder := module.split(".")[2]) in FOLDERS and folder not in declared(name)
    ]
    assert named == []


def test_only_a_methods_own_folders_name_it() -> None:
    """In walk/ a norm is what was observed, not what is done to it."""
    named = []
    for name, tree in files():
        if name.startswith("walk/") or name in PUBLIC_PATHS:
            continue
        forbidden = {word: method for method in FOLDERS - declared(name) for word in words(method)}
        allowed = {word for method in declared(name) for word in words(method)} | OTHER_MEANINGS.keys()
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and node.value in forbidden.keys() - allowed:
                named.append(f"{name}:{node.lineno}: {node.value!r} is a word of {forbidden[node.value]}")
    assert named == []
