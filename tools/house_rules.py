"""Rules of the source tree that no linter knows; `make lint` runs them.

    python tools/house_rules.py [ROOT]     exit 1 where a rule is broken, and print the sizes of src and tests

Import contracts (layers, no circle) are import-linter's and stand in pyproject.toml.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Container, Iterable, Iterator
from pathlib import Path

import tomllib

#: Lines of src/memopt, all files together. It goes down when something is merged, and up with a new method or proof.
LINE_CAP = 56_912
#: A file fits one sitting.
FILE_CAP = 400
#: Names of PyTorch that may change without notice, as attributes of `torch`, of autograd nodes or of modules.
PRIVATE_OF_TORCH = re.compile(r"torch(?!\.ops\.)(\.\w+)*\._(?!_)\w+")
PRIVATE_ATTRIBUTES = re.compile(
    r"(_saved_\w+|_raw_saved_\w+|_schema|_cdata|_sequence_nr|_forward_hooks|_forward_pre_hooks|_backward_hooks"
    r"|_backward_pre_hooks)"
)
COMPAT = "torch_compat"
#: Expressions for which the field has a term; see docs/glossary.md.
WORDS = {
    r"ma(?:de|kes?|king) (?:\w+ )?again": "recompute",
    r"what stays|that stays": "saved tensors that cannot be recomputed",
    r"who keeps|who holds": "which operation saves it",
    r"gives? way": "is replaced",
    r"remade|remakes?\b": "recomputed",
    r"\bhangs? on a\b": "depends on",
}
#: Words in names of functions: code does none of this.
PERSONIFIED = {r"\b(?:told|knows?|asks?|wants?)\b": "it reports, recognises, reads, names"}
#: Folders of kernels/ that several methods share.
SHARED_KERNELS = {"base", "replay"}
#: Files outside of patches/ and kernels/ that may name a method.
NAMES_METHODS = {
    "sampling/__init__.py": "the public path of patches/sampled_linear",
    "trace/causes.py": "functions of PyTorch, by which a saved tensor is explained",
    "torch_compat/activations.py": "operations of PyTorch",
    "torch_compat/compiling.py": "a mark on the nodes of PyTorch's graphs",
}
#: Words of methods that mean something else where they stand outside of plans.
OTHER_MEANINGS = {
    "fold": "rich breaks long lines so; and checkpoint/ and verification/ fold weights",
    "loss": "a field of the output of a Hugging Face model",
    "seed": "an argument of kernels that draw random numbers",
    "compression": "an attribute of scopes",
    "attention": "what models compute, and its saved tensors",
}
#: An operator's folder -> the operators that its own calls.
OPERATORS: dict[str | None, tuple[str, ...]] = {
    "activation": ("linear",),
    "derivative_codes": ("activation",),
    "gated_mlp": ("activation", "linear"),
    "sampled_linear": ("linear",),
}
PROSE = ("src", "tests", "benchmarks", "examples", "docs", "README.md", "CONTRIBUTING.md", "configs")


def main(root: Path) -> int:
    source = root / "src" / "memopt"
    broken = [*long_files(source), *private_names(source), *folder_rule(source), *words(root)]
    files = _files(source)
    lines, of_tests = _lines(files), _lines(_files(root / "tests"))
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    if lines > LINE_CAP:
        broken.append(f"src/memopt has {lines} lines; the cap is {LINE_CAP}")
    for line in broken:
        print(line)
    print(f"src/memopt: {lines} lines of at most {LINE_CAP}; {len(broken)} broken rules")
    print(f"{len(files)} files, {len(contracts[0]['layers'])} layers of imports; tests: {of_tests} lines")
    return 1 if broken else 0


def _lines(files: Iterable[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in files)


def long_files(source: Path) -> Iterator[str]:
    """Files that do not fit one sitting."""
    for path in _files(source):
        count = len(path.read_text().splitlines())
        if count > FILE_CAP:
            yield f"{path}: {count} lines, at most {FILE_CAP}"


def private_names(source: Path) -> Iterator[str]:
    """Private names of PyTorch outside `torch_compat`."""
    for path in _files(source):
        if COMPAT in path.relative_to(source).as_posix():
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            name = _private_name(node)
            if name is not None:
                yield f"{path}:{getattr(node, 'lineno', 0)}: {name} is private to PyTorch: it belongs in {COMPAT}"


def _private_name(node: ast.AST) -> str | None:
    if isinstance(node, ast.Attribute):
        dotted = ast.unparse(node)
        if PRIVATE_ATTRIBUTES.fullmatch(node.attr) or PRIVATE_OF_TORCH.fullmatch(dotted):
            return dotted
    elif isinstance(node, ast.ImportFrom) and node.module is not None:
        for alias in node.names:
            if PRIVATE_OF_TORCH.match(f"{node.module}.{alias.name}"):
                return f"{node.module}.{alias.name}"
    elif isinstance(node, ast.Import):
        for alias in node.names:
            if PRIVATE_OF_TORCH.match(alias.name):
                return alias.name
    return None


def words(root: Path) -> Iterator[str]:
    """Expressions of our own where the field has a term, in names of functions too."""
    patterns = [(re.compile(pattern, re.IGNORECASE), term) for pattern, term in WORDS.items()]
    of_names = [*patterns, *((re.compile(pattern), term) for pattern, term in PERSONIFIED.items())]
    for path in _prose(root):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            is_name = line.lstrip().startswith("def ")
            text = line.replace("_", " ") if is_name else line
            for pattern, term in of_names if is_name else patterns:
                if found := pattern.search(text):
                    yield f"{path}:{number}: '{found[0]}': the field says '{term}'"


def _prose(root: Path) -> Iterator[Path]:
    for name in PROSE:
        path = root / name
        if path.is_file():
            yield path
        else:
            yield from sorted(p for p in path.rglob("*") if p.suffix in (".py", ".md", ".yaml"))


def _files(source: Path) -> list[Path]:
    return sorted(path for path in source.rglob("*.py") if "__pycache__" not in path.parts)


def folder_rule(source: Path) -> Iterator[str]:
    """Files outside patches/X and kernels/X that name X: import it, or hold its name, recipe key or action as a string.

    A patch may name those in its `after` and `requires`, an operator those of `OPERATORS`. In walk/ a norm
    is what was observed, not what is done to it.
    """
    words, beside = _methods()
    for path in _files(source):
        name = path.relative_to(source).as_posix()
        tree = ast.parse(path.read_text())
        own = _home(name, words)
        if name in NAMES_METHODS:
            continue
        declared = {own, *(OPERATORS if name.startswith("kernels/") else beside).get(own, ())}
        for module in _imports(tree):
            _, _, inside = module.partition("memopt.")
            room, _, rest = inside.partition(".")
            method = rest.partition(".")[0]
            if room in ("patches", "kernels") and method in words.keys() - declared:
                yield f"{path}: imports {module}, and {method} is neither its own nor declared"
        if name.startswith("walk/"):
            continue
        allowed = {word for method in declared for word in words.get(method, ())} | OTHER_MEANINGS.keys()
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in allowed:
                for method in (method for method, its in words.items() if node.value in its):
                    yield f"{path}:{node.lineno}: '{node.value}' is a word of {method}"


def _methods() -> tuple[dict[str, set[str]], dict[str | None, tuple[str, ...]]]:
    """Folder of patches/ or kernels/ -> its words, and -> the folders that it declares beside itself."""
    import memopt
    from memopt.patches.registry import patches

    rooms = [Path(memopt.__file__).parent / room for room in ("patches", "kernels")]
    folders = {path.parent.name for room in rooms for path in room.glob("*/__init__.py")} - SHARED_KERNELS
    words = {folder: {folder} for folder in folders}
    for patch in patches():
        own = {patch.rules.key} if patch.rules is not None and "key" in vars(patch.rules) else set()
        words[patch.name] = {patch.name, *own, *(patch.rows.actions if patch.rows is not None else ())}
    return words, {patch.name: (*patch.after, *patch.requires) for patch in patches()}


def _home(name: str, methods: Container[str]) -> str | None:
    room, _, rest = name.partition("/")
    folder = rest.partition("/")[0]
    return folder if room in ("patches", "kernels") and folder in methods else None


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path()))
