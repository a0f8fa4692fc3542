"""The published JSON Schema. That printed documents fit it, `tests/conftest.py` asks of every test."""

from __future__ import annotations

import json
import math

import pytest
from pydantic import ValidationError

from memopt.cli import common
from tools import json_schema


def test_the_published_schema_is_that_of_the_code() -> None:
    assert json_schema.FILE.read_text() == json_schema.schema(), "run: python tools/json_schema.py > the file"


@pytest.mark.parametrize(
    "change", [{"schema_version": 2}, {"recipes": [{"name": 1}]}, {"status": "good"}, {"undocumented": 1}]
)
def test_a_document_that_does_not_fit_is_refused(change: dict[str, object]) -> None:
    document = common.document("recipes", "pass", recipes=[{"name": "exact", "description": ""}])
    json_schema.validate(json.dumps(document))
    with pytest.raises(ValidationError):
        json_schema.validate(json.dumps(document | change))


def test_a_number_that_json_lacks_is_null() -> None:
    check = {"id": "x", "level": "forward", "subject": "", "status": "fail", "value": math.nan, "threshold": math.inf}
    text = common.as_json(common.document("verify", "fail", model="m", checks=[check]))
    found = json.loads(text, parse_constant=pytest.fail)
    assert found["checks"][0]["value"] is found["checks"][0]["threshold"] is None
