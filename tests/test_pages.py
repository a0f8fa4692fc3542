"""The pages of docs/: computed parts, links, named files and examples are those of the source."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.plot import plot
from tests.support.processes import run_code
from tools.pages import ROOT, current, definition, direct

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
PROSE = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md"]
#: Pages for somebody who reads the source for the first time.
WAYS_IN = [DOCS / name for name in ("architecture.md", "follow-a-tensor.md", "add-a-patch.md")]
FOLDERS = ("src", "tests", "docs", "tools", "configs", "benchmarks", "examples")
#: What commands write.
WRITTEN = {"memopt.json", "config.json", "models", "build/aot", "build/walks"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_computed_parts_are_up_to_date(page: Path) -> None:
    assert current(page) == page.read_text(), "run: python -m tools.pages"


def test_a_moved_definition_moves_its_link(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("\n\nclass A:\n    def b(self): ...\n")
    page = tmp_path / "page.md"
    page.write_text("[`A`](code.py#L1) and [`A.b`](code.py)")
    assert current(page) == "[`A`](code.py#L3) and [`A.b`](code.py#L4)"
    page.write_text("[`A.c`](code.py#L1)")
    with pytest.raises(ValueError, match=r"page\.md: code\.py does not define A\.c"):
        current(page)
    assert definition(tmp_path / "code.py", "A.b.c") is None


def test_an_import_that_another_one_implies_has_no_arrow() -> None:
    imports = {"top": {"middle", "bottom"}, "middle": {"bottom"}, "bottom": set()}
    assert [direct(imports, room) for room in imports] == [{"middle"}, {"bottom"}, set()]


def test_the_page_on_architecture_is_read_in_ten_minutes() -> None:
    assert len((DOCS / "architecture.md").read_text().split()) <= 1800


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)", _without_code(page.read_text()))
    for target, anchor in links:
        path = page if not target else (page.parent / target)
        assert path.exists(), f"{page.name}: there is no {target}"
        if anchor and path.suffix == ".md":
            assert anchor in _anchors(path), f"{page.name}: {path.name} has no heading #{anchor}"


@pytest.mark.parametrize("page", [*WAYS_IN, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_named_files_and_folders_exist(page: Path) -> None:
    there = {f"/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*")}
    there |= {f"/{path.name}" for path in ROOT.iterdir()}
    named = re.findall(r"`((?:\w+/)+(?:\w+\.\w+)?|[\w/]+\.(?:py|json|yaml|toml|md))`", page.read_text())
    names = {name.rstrip("/") for name in named if "NAME" not in name and name.rstrip("/") not in WRITTEN}
    assert [name for name in names if not any(path.endswith(f"/{name}") for path in there)] == []


def test_the_tensor_that_is_followed_is_saved_as_the_page_says() -> None:
    blocks = re.findall(r"```(python|text)\n(.*?)```", (DOCS / "follow-a-tensor.md").read_text(), re.DOTALL)
    ran = run_code("\n".join(text for language, text in blocks if language == "python"))
    assert ran.code == 0, ran.err
    assert ran.out == "".join(text for language, text in blocks if language == "text")


def test_the_worked_patch_is_the_one_that_is_tested() -> None:
    files = "\n".join(path.read_text() for path in sorted((ROOT / "tests" / "toy_patch").glob("*.py")))
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "add-a-patch.md").read_text(), re.DOTALL)
    assert len(blocks) >= 4
    assert [block for block in blocks if block not in files] == []


def _anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub forms them."""
    headings = re.findall(r"^#+ (.+)$", _without_code(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


PEAKS = json.loads((ROOT / "benchmarks" / "results" / "step_cpu.json").read_text())


def test_the_readme_is_read_in_five_minutes() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 700


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "savings.md"], ids=lambda page: page.stem)
def test_peaks_of_a_step_are_those_of_the_result(page: Path) -> None:
    written = re.findall(
        r"^\| ([^|]+) \| (\d+ x \d+) \| (\d+) \| \*\*(\d+)\*\* \| (\d+) \| \*\*(\d+)\*\* \|$", page.read_text(), re.M
    )
    assert len(written) == 2
    for model, size, *peaks in written:
        (case,) = {row["case"] for row in PEAKS["rows"] if row["case"].startswith(model) and row["case"].endswith(size)}
        found = {
            row["variant"]: row["peak"] for row in PEAKS["rows"] if (row["case"], row["trained"]) == (case, "full")
        }
        assert peaks == [f"{found[name] / 2**20:.0f}" for name in ("stock", "memopt", "ck", "memopt + ck")]


def test_the_chart_is_that_of_the_result(tmp_path: Path) -> None:
    plot(PEAKS, tmp_path / "step.svg")
    assert (tmp_path / "step.svg").read_text() == (DOCS / "images" / "step.svg").read_text()
