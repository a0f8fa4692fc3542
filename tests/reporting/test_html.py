"""The report as one HTML page: whole, self-contained, escaped, readable."""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from memopt.cli.main import main
from memopt.environment.files import format_bytes
from memopt.errors import ModelError
from memopt.plan.recipe import load_recipe
from memopt.prediction.headline import gib
from memopt.prediction.peak import Prediction
from memopt.prediction.planner.choice import Frontier, Plan
from memopt.prediction.setup import Setup
from memopt.reporting.charts import chart, drawn_frontier, predictions, ways_table
from memopt.reporting.compare import Comparison
from memopt.reporting.html.page import page
from memopt.reporting.html.shapes import Chart
from memopt.trace.trace import trace_account
from memopt.trace.training import Step, Training
from tests.reporting.test_headline import HEADLINE
from tests.trace.builders import named_config, sites_of

HOSTILE = "</script><script>alert(1)</script>&\"'<!--"
VOID = {"meta", "input", "br", "wbr"}


class Parsed(HTMLParser):
    """The elements of a page; fails where a tag is not closed as it was opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, self.getpos()

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self._open[-1] if self._open else "", []).append(data)

    def all(self, *tags: str) -> list[dict[str, str]]:
        return [attributes for tag, attributes in self.elements if tag in tags]


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    config, training = named_config("llama"), Training(batch=2, seq=32)
    sites, recipe = sites_of(config), load_recipe("exact-unfolded")
    return Comparison(
        model="acme/tiny",
        model_class="LlamaForCausalLM",
        recipe="exact-unfolded",
        training=training,
        before=trace_account(Step(config, training, sites)),
        after=trace_account(Step(config, training, sites, recipe)),
        notes=("A note.",),
        step=Step(config, training, sites, recipe),
    )


@pytest.fixture(scope="module")
def predicted(comparison: Comparison) -> list[Prediction]:
    return predictions(comparison, Setup())


@pytest.fixture(scope="module")
def charts(predicted: list[Prediction]) -> list[Chart]:
    return [chart(name, each) for name, each in zip(("stock", "patched"), predicted, strict=True)]


@pytest.fixture(scope="module")
def full_page(comparison: Comparison, charts: list[Chart]) -> str:
    frontier = drawn_frontier(frontier_of("a card", ("as it is", 2**30, 0.0), ("checkpointed", 2**28, 0.3)))
    return page(comparison, charts=charts, lines=["It fits."], tables=[ways_table(HEADLINE)], frontier=frontier)


def frontier_of(card: str, *plans: tuple[str, int, float]) -> Frontier:
    recipe = load_recipe("exact-unfolded")
    points = (Plan(recipe, words, 1, 1, total, 1.0, extra) for words, total, extra in plans)
    return Frontier("acme/tiny", "batch 1", card, tuple(points))


def data_of(parsed: Parsed) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(parsed.texts["script"][0])
    return found


def test_the_page_loads_nothing_and_runs_only_its_own_script(full_page: str) -> None:
    parsed = Parsed(full_page)
    assert not [
        value for _, attributes in parsed.elements for name, value in attributes.items() if name in ("src", "href")
    ]
    assert not re.search(r"url\(|@import|https?:", full_page)
    policy = next(each["content"] for each in parsed.all("meta") if "http-equiv" in each)
    digest = base64.b64encode(hashlib.sha256(parsed.texts["script"][1].encode()).digest()).decode()
    assert policy.startswith("default-src 'none';")
    assert f"script-src 'sha256-{digest}'" in policy


def test_text_of_a_stranger_stays_text(comparison: Comparison) -> None:
    hostile = replace(comparison, model=HOSTILE, model_class=HOSTILE, notes=(HOSTILE,))
    ways = ways_table(replace(HEADLINE, card=HOSTILE, stock=replace(HEADLINE.stock, name=HOSTILE)))
    frontier = drawn_frontier(frontier_of(HOSTILE, (HOSTILE, 1, 1.0)))
    parsed = Parsed(page(hostile, lines=[HOSTILE], tables=[ways], frontier=frontier))
    assert len(parsed.all("script")) == 2
    assert HOSTILE in parsed.texts["title"][0] + "".join(parsed.texts["span"])


def test_a_module_named_like_markup_is_data(comparison: Comparison, charts: list[Chart]) -> None:
    text = page(comparison, charts=[replace(charts[0], modules=(HOSTILE, *charts[0].modules[1:]))])
    assert len(Parsed(text).all("script")) == 2
    assert HOSTILE in data_of(Parsed(text))["charts"][0]["modules"]


def test_every_name_that_a_screen_reader_follows_is_there(full_page: str) -> None:
    parsed = Parsed(full_page)
    names = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
    assert len(names) == len(set(names))
    followed = [
        name
        for _, attributes in parsed.elements
        for key in ("aria-labelledby", "aria-describedby", "for")
        for name in attributes.get(key, "").split()
    ]
    assert set(followed) <= set(names)
    for picture in parsed.all("svg"):
        assert picture.get("aria-hidden") == "true" or {"role", "aria-labelledby"} <= picture.keys()
    assert all("aria-labelledby" in table for table in parsed.all("table"))
    for head in parsed.all("th"):
        assert head.get("scope") in ("col", "row")
    assert [each for each in parsed.all("th") if each.get("aria-sort") == "descending"]


def test_the_page_shows_the_peaks_and_what_they_are_made_of(predicted: list[Prediction], full_page: str) -> None:
    charts = data_of(Parsed(full_page))["charts"]
    for drawn, prediction in zip(charts, predicted, strict=True):
        assert f"peak {format_bytes(prediction.peak.nbytes)}" in full_page
        at_top = sum(values[drawn["top"]] for values in drawn["live"])
        assert abs(at_top * 1024 - prediction.peak.nbytes) <= 512 * len(drawn["live"])  # each kind is rounded to KiB
        assert at_top == max(map(sum, zip(*drawn["live"], strict=True)))


def test_the_saved_tensors_add_up(full_page: str, comparison: Comparison) -> None:
    body = full_page.split('id="h-saved"')[1].split("<tfoot>")[0]
    sizes = [
        [int(value) for value in re.findall(r'<td class="n" data-sort="(-?\d+)">', row)]
        for row in body.split("<tr>")[2:]
    ]
    assert sum(row[1] for row in sizes) == comparison.before.total
    assert sum(row[2] for row in sizes) == comparison.after.total
    assert [row[1] for row in sizes] == sorted((row[1] for row in sizes), reverse=True)


def test_a_model_without_a_step_has_a_page_without_charts(comparison: Comparison) -> None:
    text = page(comparison)
    assert "Memory over the step" not in text
    assert "Saved tensors" in text
    Parsed(text)


def colours() -> dict[str, tuple[str, str]]:
    style = files("memopt.reporting.html").joinpath("page.css").read_text()
    return {name: (light, dark) for name, light, dark in re.findall(r"--(\w+): light-dark\((#\w+), (#\w+)\)", style)}


def luminance(colour: str) -> float:
    """WCAG 2.2, relative luminance."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("dark", [False, True])
def test_every_colour_has_the_contrast_of_aa(dark: bool) -> None:
    """WCAG 2.2, 1.4.3 and 1.4.11: 4.5 for text, 3 for graphics."""
    found = {name: luminance(pair[dark]) for name, pair in colours().items()}
    for name, value in found.items():
        if name in ("bg", "panel", "line"):
            continue
        for ground in ("bg", "panel"):
            lighter, darker = max(value, found[ground]), min(value, found[ground])
            assert (lighter + 0.05) / (darker + 0.05) >= (4.5 if name in ("text", "quiet", "accent") else 3.0), name


def test_the_command_writes_the_page_and_the_snapshot_beside_its_result(
    comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("memopt.pipeline.report_on", lambda *arguments, **options: comparison)
    html, snapshot = tmp_path / "page.html", tmp_path / "step.pickle"
    html.write_text("old")
    html.chmod(0o640)
    command = ["report", "acme/tiny", "--html", str(html), "--snapshot", str(snapshot), "--json"]
    assert main(command) == 2
    assert "--force" in json.loads(capsys.readouterr().out)["error"]["hint"]
    assert main([*command, "--force"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "pass"
    charts = data_of(Parsed(html.read_text()))["charts"]
    assert all({"weights", "optimizer states", "saved tensors"} <= set(chart["kinds"]) for chart in charts)
    assert html.stat().st_mode & 0o777 == 0o640
    assert set(tmp_path.iterdir()) == {html, snapshot}
    assert [len(trace) > 0 for trace in pickle.loads(snapshot.read_bytes())["device_traces"]] == [True, True]


def test_a_step_that_cannot_be_predicted_leaves_the_rest_of_the_page(
    comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object) -> list[object]:
        raise ModelError("Its backward fails.")

    monkeypatch.setattr("memopt.pipeline.report_on", lambda *arguments, **options: comparison)
    monkeypatch.setattr("memopt.reporting.charts.predictions", fail)
    assert main(["report", "acme/tiny", "--html", str(tmp_path / "page.html")]) == 0
    assert "Memory over the step: unknown. Its backward fails." in (tmp_path / "page.html").read_text()
    assert main(["report", "acme/tiny", "--snapshot", str(tmp_path / "step.pickle")]) == 2
    assert "Its backward fails." in capsys.readouterr().err


def test_one_file_for_both_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = str(tmp_path / "file")
    assert main(["report", "acme/tiny", "--html", both, "--snapshot", both]) == 2
    assert "name the same file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "words"),
    [(".", "is a folder"), ("no/such/page.html", "does not exist"), ("/dev/full", "no plain file")],
)
def test_a_page_that_cannot_be_written_is_one_sentence_before_any_work(
    target: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("memopt.pipeline.report_on", lambda *arguments, **options: pytest.fail("it was traced"))
    assert main(["report", "acme/tiny", "--html", target]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --html")
    assert words in error
    assert len(error.splitlines()) == 1


def test_the_ways_to_train_are_a_table_that_sorts(comparison: Comparison) -> None:
    table = ways_table(HEADLINE)
    assert all(len(row) == len(table.heads) for row in table.rows)
    text = page(comparison, tables=[table])
    for way in HEADLINE.ways():
        assert f'<th scope="row">{way.name}</th><td class="n" data-sort="{way.total}">{gib(way.total)}</td>' in text
    Parsed(text)
