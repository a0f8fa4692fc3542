"""Counting which rules for inputs serve which model types."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks import walk_inputs
from benchmarks.walk_inputs import InputsRow
from memopt.walk.calls import arguments


def test_the_rule_that_makes_a_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "RULES", arguments.RULES)
    row = walk_inputs._examine("bert")
    assert row.forms == ["text: "]
    assert "input_ids" in row.arguments


def test_rules_are_listed_with_the_types_that_they_serve_also_those_that_serve_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [
        InputsRow("a", forms=["text: ", "text: mask"], arguments=["input_ids"]),
        InputsRow("b", forms=["text: mask"], arguments=["input_ids", "bbox"]),
        InputsRow("c", "not run", "it takes long"),
    ]
    monkeypatch.setattr(walk_inputs, "examined", lambda *_: map(dataclasses.asdict, rows))
    lines = [line.split() for line in walk_inputs.served(["a", "b", "c"])]
    assert lines[0][:3] == ["2", "of", "3"]
    for counted in (["2", "text"], ["1", "as", "they", "are"], ["2", "mask"], ["0", "codes"], ["1", "bbox"]):
        assert counted in lines
