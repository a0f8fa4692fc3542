"""The longest sequences: found by halving, and quoted in the docs as they were found."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import longest

ROOT = Path(__file__).parents[2]
ROWS = json.loads((ROOT / "benchmarks" / "results" / "longest.json").read_text())["rows"]
TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.rotates(4)
def test_the_longest_sequence_fits_and_the_next_does_not() -> None:
    found = longest.longest(longest.Case("tiny", "Llama", TINY, "full", "0.65GiB", 8192), most=1 << 16)
    assert 0 < found.tokens < 1 << 16
    assert found.tokens % longest.STEP == 0
    assert found.needs <= 0.65 * longest.GIB
    of_a_token = 2 * 2 * TINY["num_hidden_layers"] * TINY["hidden_size"]  # input and attention's output of each block
    assert 1 <= found.host / (of_a_token * found.tokens) < 1.2
    larger = longest.longest(longest.Case("tiny", "Llama", TINY, "full", "0.75GiB", 8192), most=1 << 16)
    assert larger.tokens > found.tokens


def test_each_case_is_as_long_as_is_wanted() -> None:
    assert [row["name"] for row in ROWS] == [case.name for case in longest.CASES]
    assert all(row["tokens"] >= row["wanted"] for row in ROWS)


def test_the_docs_quote_what_was_found() -> None:
    page = (ROOT / "docs" / "training.md").read_text()
    for row in ROWS:
        recipe = row["settings"] or "long-context"
        host = round(row["host"] / longest.GIB)
        assert f"| {row['name']} | {row['card']} | `{recipe}` | {row['tokens']:,} | {host} GiB |" in page
    quoted = [*re.findall(r"QLoRA with ([\d,]+) tokens on an H100", (ROOT / "CHANGELOG.md").read_text())]
    quoted += re.findall(r"room for ([\d,]+) tokens on an H100", (ROOT / "README.md").read_text())
    assert quoted == [f"{ROWS[0]['tokens']:,}"] * 2


def test_a_name_that_no_row_has_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        longest.main(["--only", "nothing"])
    assert "there are: Llama-3.1-8B QLoRA" in capsys.readouterr().err
