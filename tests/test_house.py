"""Rules of the house, read from the source (`tools/house_rules.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest

import memopt
from memopt.patches import capabilities
from memopt.patches.base import Patch
from memopt.patches.registry import patches
from tools.house_rules import folder_rule, words

SOURCE = Path(memopt.__file__).parent


def test_only_a_methods_own_folders_name_it() -> None:
    assert list(folder_rule(SOURCE)) == []


def test_a_patch_has_at_most_twelve_members_and_four_capabilities() -> None:
    members = [name for name in {**Patch.__annotations__, **vars(Patch)} if not name.startswith("_")]
    assert len(members) <= 12
    mixed_in = {base for patch in patches() for base in type(patch).__mro__ if base.__module__ == capabilities.__name__}
    assert len(mixed_in) <= 4


@pytest.mark.parametrize(
    ("name", "line", "word"),
    [
        ("plan/plan.py", "from memopt.patches.norm.patch import NormRules", "norm"),
        ("report/build.py", "import memopt.kernels.dropout.function", "dropout"),
        ("patches/apply.py", "if entry.kind == 'gated_mlp': pass", "gated_mlp"),
        ("cli/patch.py", "key = 'linears'", "linear"),
        ("verify/run.py", "done = action == 'share'", "norm"),
        ("patches/dropout/patch.py", "from memopt.patches.norm.module import patch_norm", "norm"),
        ("kernels/norm/function.py", "from memopt.kernels.activation.function import activation", "activation"),
    ],
)
def test_a_name_in_another_place_is_found(tmp_path: Path, name: str, line: str, word: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{line}\n")
    assert [word in found for found in folder_rule(tmp_path)] == [True]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("patches/activation/module.py", "from memopt.kernels.derivative_codes.codes import CODES"),
        ("patches/gated_mlp/module.py", "from memopt.kernels.linear.function import linear"),
        ("sampling/__init__.py", "from memopt.patches.sampled_linear.visits import INDEX"),
    ],
)
def test_what_a_method_declares_it_may_name(tmp_path: Path, name: str, line: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{line}\n")
    assert list(folder_rule(tmp_path)) == []


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("src/a.py", "# the output is made~ again"),
        ("docs/a.md", "The scope gives~ way."),
        ("tests/test_a.py", "def test_an_output_is_made~_again() -> None: ..."),
    ],
)
def test_an_expression_of_our_own_is_found_in_code_pages_and_names_of_tests(
    tmp_path: Path, name: str, line: str
) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(line.replace("~", ""))  # this file is checked too
    assert [found.startswith(f"{path}:1:") for found in words(tmp_path)] == [True]
