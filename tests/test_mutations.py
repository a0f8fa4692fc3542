"""Every fault of the list can still be planted, and the command tells a fault that is caught from one that is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import mutations
from tests.mutation.fault import Fault
from tests.mutation.faults import FAULTS
from tests.mutations import ROOT, place, planted

MORE = "from arithmetic import more\n\n\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "arithmetic.py").write_text("def more(x):\n    return x + 1\n")
    (tmp_path / "test_right.py").write_text(f"{MORE}def test_more():\n    assert more(1) == 2\n")
    (tmp_path / "test_weak.py").write_text(f"{MORE}def test_more():\n    assert more(1)\n")
    return tmp_path


def fault(old: str = "x + 1", test: str = "test_right.py") -> Fault:
    return Fault("one less", old, "x - 2", (test,))


def test_there_are_forty_faults_and_each_text_stands_once_in_the_sources() -> None:
    assert len({each.name for each in FAULTS}) == len(FAULTS) >= 40
    for each in FAULTS:
        assert each.old != each.new
        place(each, ROOT)


def test_every_fault_names_tests_that_are_there() -> None:
    paths = {name for each in FAULTS for name in each.tests if name.startswith("tests/")}
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    ("planned", "outcome"),
    [
        (fault(), "caught"),
        (fault(test="test_weak.py"), "NOT CAUGHT"),
        (fault(test="test_missing.py"), "ERROR"),
        (fault(old="x + 2"), "ERROR"),
    ],
    ids=["caught", "not caught", "no such test", "no such text"],
)
def test_the_outcome_is_what_the_tests_say(planned: Fault, outcome: str, tree: Path) -> None:
    assert mutations._with(planned, tree).outcome == outcome


def test_the_sources_are_put_back(tree: Path) -> None:
    before = (tree / "src" / "arithmetic.py").read_text()
    with planted(fault(), tree):
        assert "x - 2" in (tree / "src" / "arithmetic.py").read_text()
    assert (tree / "src" / "arithmetic.py").read_text() == before


def test_a_text_that_stands_twice_is_refused(tree: Path) -> None:
    (tree / "src" / "other.py").write_text("y = x + 1\n")
    with pytest.raises(LookupError, match=r"stands: src/arithmetic\.py"):
        place(fault(), tree)
