"""What a forward saves is predicted storage by storage, and a step's peak, for every model type that runs.

A few types run in `make test`, others each day (`tests.zoo.share`), all of them in `make test-all`; the same by hand is
`python -m benchmarks.prediction --zoo`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import tests.zoo.predicted
from tests.zoo.predicted import compare
from tests.zoo.share import share, types_of_share
from tests.zoo.test_zoo import RECORDED, TYPES, is_quick

_RUNS = [name for name in TYPES if RECORDED.get(name, {}).get("status", "ok") in ("ok", "not compared")]
#: Of the quick types of the day the first, the tenth and so on; and one whose layers read the padding mask.
SAMPLE = [*filter(is_quick, types_of_share(_RUNS, share()[0], is_quick)[::9]), "lfm2"]


@pytest.mark.parametrize(
    "model_type", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.slow) for name in _RUNS]
)
def test_saved_bytes_and_peaks_are_predicted(model_type: str) -> None:
    rows = list(compare(model_type))
    if rows[-1].left_out:
        pytest.skip(rows[-1].left_out)
    assert [row.patched for row in rows] == [False, True]
    for row in rows:
        assert row.equal, row


def test_a_peak_that_is_off_is_noticed() -> None:
    row = next(compare("bert"))
    assert row.equal
    assert not replace(row, predicted_peak=round(1.02 * row.peak)).equal


def test_a_storage_that_is_not_predicted_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = tests.zoo.predicted.trace_account

    def forgetful(*args: Any, **kwargs: Any) -> Any:
        found = stock(*args, **kwargs)
        return replace(found, storages=found.storages[:-1], unseen=found.storages[-1].nbytes)

    monkeypatch.setattr(tests.zoo.predicted, "trace_account", forgetful)
    row = next(compare("bert"))
    assert row.predicted == row.saved
    assert not row.equal
    assert "real alone: 1 x" in row.differences[0]
