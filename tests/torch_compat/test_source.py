"""Private names of PyTorch stand in `memopt.torch_compat` alone, and each has a test."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import ModuleType

import pytest

from memopt import torch_compat

ROOT = Path(__file__).parents[2]


_ATTRIBUTE = re.compile(
    r"_(raw_)?saved_[a-z_0-9]+|_schema|_cdata|_sequence_nr|_input_metadata|_orig_mod|_new_with_weak_ptr"
    r"|_(forward|backward)(_pre)?_hooks|_has_any_global_hook"
)
_STABLE = {"__version__"}


def private_names(source: str) -> list[str]:
    """Private names of PyTorch that `source` uses, but those that ``torch_compat`` says are stable."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
        elif isinstance(node, ast.Attribute):
            path = ast.unparse(node)
            rooted = re.fullmatch(r"(torch|nn|forward_ad)(\.\w+)+", path) and not path.startswith("torch.ops.")
            found += [path] if _ATTRIBUTE.fullmatch(node.attr) else []
            paths = [path] if rooted else []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += [node.value] if _ATTRIBUTE.fullmatch(node.value) else []
            continue
        else:
            continue
        private = (p for p in paths if any(s.startswith("_") and s not in _STABLE for s in p.split(".")[1:]))
        found += private
        found += [path for path in paths if path.endswith("StorageWeakRef")]
    return found


@pytest.mark.parametrize(
    "line",
    [
        "from torch.utils._pytree import tree_map",
        "from torch.utils import _pytree",
        "import torch._dynamo",
        "torch._C._get_tracing_state()",
        "node._saved_self",
        "getattr(node, '_raw_saved_tensors')",
        "h._backward_hooks",
        "nn.modules.module._has_any_global_hook()",
        "from torch.multiprocessing.reductions import StorageWeakRef",
    ],
)
def test_a_private_name_is_found_in_source(line: str) -> None:
    assert private_names(line)


def test_no_other_file_of_the_package_uses_a_private_name() -> None:
    package = ROOT / "src" / "memopt"
    files = [path for path in package.rglob("*.py") if package / "torch_compat" not in path.parents]
    found = {str(path.relative_to(package)): private_names(path.read_text()) for path in files}
    assert {path: names for path, names in found.items() if names} == {}


def test_every_public_name_has_a_test() -> None:
    source = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    said = {"Missing", "warn_once_of_missing"}  # tested by the message that is said once
    public = {
        name for name, value in vars(torch_compat).items() if name[0] != "_" and not isinstance(value, ModuleType)
    }
    assert len(public) > 40
    assert [name for name in public - said if f"torch_compat.{name}" not in source] == []
