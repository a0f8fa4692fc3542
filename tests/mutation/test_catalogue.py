"""The catalogue of planted faults: what it holds, that it tells its outcomes apart, and slices of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memopt.errors import ModelError
from memopt.patches.checks import Level
from memopt.verification.run import Verdict, verify
from tests.mutation import catalogue
from tests.mutation.catalogue import GOOD, Row, rows, run
from tests.mutation.folders import Copy, Workshop, workshop
from tests.mutation.norm_faults import norm_forward
from tests.mutation.planted import FAULTS, Fault
from tests.mutation.site import Site
from tests.zoo.share import share

#: Folders that a run's slice of the rows is planted in, and in how many days all of their rows have run.
_FOLDERS = {("llama", "fp32"), ("bert", "bf16"), ("mixtral", "fp16")}
_IN_FILES, _IN_MODULES = 30, 24
#: Slices of the whole.
_PARTS = 24


@pytest.fixture(scope="module")
def place() -> Iterator[Workshop]:
    with workshop() as made:
        yield made


def some() -> list[Row]:
    here = [row for row in rows() if (row.architecture, row.dtype) in _FOLDERS and row.fault.recipe == "exact"]
    in_files = [row for row in here if row.fault.damage is not None]
    in_modules = [row for row in here if row.fault.plant is not None]
    day, _ = share()
    return in_files[day % _IN_FILES :: _IN_FILES] + in_modules[day % _IN_MODULES :: _IN_MODULES]


@pytest.mark.parametrize("row", some(), ids=str)
def test_verify_notices_a_fault_and_says_where_it_is(row: Row, place: Workshop) -> None:
    result = run(row, place)
    assert result.outcome in GOOD, result


@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, _PARTS + 1))
def test_verify_notices_every_fault(part: int) -> None:
    assert catalogue.main(["--slice", f"{part}/{_PARTS}"]) == 0


def test_there_are_a_hundred_faults_in_every_dtype_and_in_six_architectures_two_with_experts() -> None:
    assert len({(fault.kind, fault.name) for fault in FAULTS}) == len(FAULTS) >= 100
    for dtype in ("fp32", "bf16", "fp16"):
        planted = {row.architecture for row in rows() if row.dtype == dtype and row.fault.plant is not None}
        assert len(planted) >= 6
        assert {"mixtral", "qwen3_moe"} <= planted
    assert {0.1, 0.01, 0.001} <= {row.size for row in rows() if row.dtype == "fp32"}


def planted(plant: Any, level: Level = "gradient") -> Row:
    return Row(Fault("a planted one", "norms", (level,), ("llama",), (None,), plant=plant), None, "llama", "fp32")


def in_weights(damage: Any) -> Row:
    return Row(Fault("a planted one", "files", ("weights",), ("llama",), (None,), damage=damage), None, "llama", "fp32")


def a_norm(change: Any) -> Row:
    return planted(lambda site: norm_forward(site, change))


def doubled(stock: Any, *given: Any) -> tuple[Any, ...]:
    y, x_hat, rstd = stock(*given)
    return y, 2 * x_hat, rstd


def test_a_fault_that_no_check_sees_is_missed(place: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(folder: Path, *, level: Any) -> Verdict:
        verify(folder, level=level)
        return Verdict(())

    monkeypatch.setattr(catalogue, "verify", blind)
    result = run(a_norm(doubled), place)
    assert result.outcome == "MISSED"
    assert "off by" in result.detail


def test_a_fault_that_is_nowhere_is_an_error(place: Workshop) -> None:
    def nowhere(site: Site) -> AbstractContextManager[None]:
        return nullcontext()

    assert run(planted(nowhere, "weights"), place).outcome == "ERROR"
    assert run(in_weights(lambda copy: "nowhere"), place).outcome == "ERROR"


def test_a_check_that_names_another_place_is_not_enough(place: Workshop) -> None:
    def damage(copy: Copy) -> str:
        copy.tensors["lm_head.weight"] *= 2
        copy.write_tensors()
        return "model.norm.weight"

    assert run(in_weights(damage), place).outcome == "elsewhere"


def test_an_error_of_verify_is_no_failed_check(place: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path, *, level: Any) -> Verdict:
        raise ModelError("memopt.json is of another kind.")

    def damage(copy: Copy) -> str:
        (copy.path / "memopt.json").write_text("[]")
        return "memopt.json"

    monkeypatch.setattr(catalogue, "verify", refuse)
    row = in_weights(damage)
    assert run(row, place).outcome == "refused"
    assert run(replace(row, fault=replace(row.fault, may_refuse=True)), place).outcome == "caught"


def test_the_fault_is_in_one_module_and_faults_without_effect_do_not_count_as_missed(
    place: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[str | None] = set()

    def plant(site: Site) -> Any:
        def change(stock: Any, *given: Any) -> Any:
            seen.add(site.module)
            return stock(*given)

        return norm_forward(site, change)

    monkeypatch.setattr(catalogue, "_SITES", (2,))
    assert run(planted(plant), place).outcome == "no effect"
    assert seen == {"model.layers.0.post_attention_layernorm"}
