"""Parts of the documentation site that mkdocs does not have (`tools/site`); pages that read alike without it."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
import typer

import memopt
from memopt.cli.main import COMMANDS, build_app
from tools.site import api, commands, diagram, index, links

ROOT = links.ROOT
PAGES = [*sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")), *links.ELSEWHERE]


@pytest.mark.parametrize(
    ("page", "link", "there"),
    [
        ("docs/fit.md", "(recipes.md#keys)", "(recipes.md#keys)"),
        ("README.md", "(docs/fit.md)", "(fit.md)"),
        ("README.md", "(docs/images/step.svg)", "(images/step.svg)"),
        ("docs/fit.md", "(../examples/README.md)", "(examples.md)"),
        ("examples/README.md", "(multi_gpu.md)", "(multi-gpu.md)"),
        ("docs/walk.md", "(../src/memopt/api.py#L60)", "(source/src/memopt/api.py.md#L-60)"),
        ("docs/walk.md", "(../benchmarks/results/a.json)", "(source/benchmarks/results/a.json)"),
        ("docs/fit.md", "(https://pytorch.org/a.md)", "(https://pytorch.org/a.md)"),
        ("docs/fit.md", "(#how)", "(#how)"),
    ],
)
def test_a_link_leads_to_the_same_place_in_the_site(page: str, link: str, there: str) -> None:
    assert links.rewritten(f"[a]{link}", page) == f"[a]{there}"


def test_no_link_in_code_is_rewritten() -> None:
    text = "```python\nx = f[a](docs/fit.md)\n```\n"
    assert links.rewritten(text, "README.md") == text
    assert links.targets(text, "README.md") == set()


def test_the_page_of_commands_has_every_option() -> None:
    page = commands.page()
    for name, command in typer.main.get_command(build_app()).commands.items():
        section = page.partition(f"## memopt {name}\n")[2].partition("\n## ")[0]
        assert [
            each.opts for each in command.params if each.param_type_name == "option" and each.opts[0] not in section
        ] == []
    assert page.count("\n## memopt ") == len(COMMANDS)


def test_the_page_of_the_python_interface_has_every_public_name() -> None:
    named = set(re.findall(r"^::: memopt\.(\w+)$", api.page(), re.MULTILINE))
    assert named >= set(memopt.__all__) - {"__version__"}


def test_a_public_name_without_a_section_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "public", lambda: {"__version__", "patch", "new_verb"})
    with pytest.raises(ValueError, match="new_verb"):
        api.page()


def test_a_graph_is_drawn_with_a_box_for_each_name_and_a_line_for_each_edge() -> None:
    picture = ElementTree.fromstring(diagram.drawn("graph TD\n  a --> b\n  b --> c\n  x --> c\n", "three rooms"))
    tags = [element.tag.rpartition("}")[2] for element in picture.iter()]
    assert (tags.count("text"), tags.count("rect"), tags.count("path")) == (4, 4, 4)  # one path is the arrow's head
    assert picture.get("aria-label") == "three rooms"
    places = {(rect.get("x"), rect.get("y")) for rect in picture.iter() if rect.tag.endswith("rect")}
    assert len(places) == 4


@pytest.mark.parametrize(
    "graph", ["graph LR\n  a --> b\n", "graph TD\n  a -.-> b\n", "graph TD\n  a --> b\n  b --> a\n"]
)
def test_a_graph_that_cannot_be_drawn_is_an_error(graph: str) -> None:
    with pytest.raises(ValueError, match=r"draws only|circle"):
        diagram.drawn(graph, "")


@pytest.mark.parametrize("page", PAGES)
def test_every_page_has_a_line_for_llms_txt(page: str) -> None:
    line = index.summary((ROOT / page).read_text())
    assert 20 <= len(line) <= 300
    assert "](" not in line


@pytest.mark.parametrize("page", PAGES)
def test_lists_and_tables_are_understood_by_both_readers_of_markdown(page: str) -> None:
    # Python's Markdown wants a blank line before a list or table, and four blanks before a list in a list.
    text = re.sub(r"^( *)```.*?^\1```$", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    before = ""
    for line in text.split("\n"):
        found = re.match(r"( *)(?:[-*]|\d+\.) ", line)
        if found:
            assert len(found[1]) % 4 == 0, line
        starts = {"list": found and not found[1], "table": line.startswith("| ")}
        inside = before.startswith((" ", "-", "*", "|", "<!--")) or re.match(r"\d+\. ", before) or not before
        assert inside or not any(starts.values()), line
        before = line


def test_the_page_on_exactness_is_short() -> None:
    assert len((ROOT / "docs" / "how-exact.md").read_text().split()) <= 700


def test_nothing_of_the_site_is_loaded_from_elsewhere() -> None:
    config = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in config
    assert not re.search(r"https?://", config)
    for path in (ROOT / "tools" / "site" / "static").iterdir():
        assert not re.search(r"https?://|@import", path.read_text()), path.name
