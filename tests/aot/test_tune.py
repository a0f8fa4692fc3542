"""The tuner proposes what fits, chooses by the binaries, and writes a table that can be read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from memopt.kernels.base.launch import LARGEST_TILE, LaunchConfig, parse_table, read_table
from tools.kernels import tune
from tools.kernels.launches import VARIANTS
from tools.kernels.tune import TuningCase, candidates, cases, choose, main, render

CASES = list(cases())
CASE = TuningCase("activation_forward", "16", None, 4096)


def test_the_slots_are_those_of_the_kernels_in_both_element_sizes() -> None:
    assert {case.kernel for case in CASES} == {variant.kernel for variant in VARIANTS}
    assert {case.bits for case in CASES} == {"16", "32"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kernel}-{case.bits}-{case.up_to}")
def test_every_candidate_has_full_vectors_and_tiles_that_the_row_fits(case: TuningCase) -> None:
    for config in candidates(case):
        assert config.rows * config.block * case.dtype.itemsize % (config.num_warps * 32 * 16) == 0
        assert config.rows * config.block <= LARGEST_TILE
        assert case.up_to in (None, config.block)


def test_there_are_candidates_for_long_rows_of_every_kernel() -> None:
    assert all(candidates(case) for case in CASES if case.up_to is None)


def test_every_kernel_has_a_variant_that_the_tuner_looks_at() -> None:
    assert {variant.kernel for variant in VARIANTS if variant.heaviest} == {case.kernel for case in CASES}


def test_the_choice_is_the_candidate_with_the_fewest_warps_that_fill_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    few, enough, many = (LaunchConfig(1, 1024, warps) for warps in (2, 4, 8))
    warps = {few: 32, enough: 48, many: 48}
    monkeypatch.setattr(tune, "candidates", lambda case: list(warps))
    monkeypatch.setattr(tune, "_warps_of", lambda case, config: warps[config])
    monkeypatch.setattr(tune, "_spills", lambda case, config: False)
    assert choose(CASE) == enough


def test_where_none_fills_the_gpu_the_fullest_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    warps = {LaunchConfig(1, 1024, 2): 16, LaunchConfig(1, 1024, 4): 24, LaunchConfig(1, 1024, 8): 24}
    monkeypatch.setattr(tune, "candidates", lambda case: list(warps))
    monkeypatch.setattr(tune, "_warps_of", lambda case, config: warps[config])
    monkeypatch.setattr(tune, "_spills", lambda case, config: False)
    assert choose(CASE) == LaunchConfig(1, 1024, 4)


def test_a_candidate_that_spills_in_any_variant_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    spilling, good = LaunchConfig(1, 2048, 2), LaunchConfig(1, 1024, 4)
    monkeypatch.setattr(tune, "candidates", lambda case: [spilling, good])
    monkeypatch.setattr(tune, "_warps_of", lambda case, config: 48)
    monkeypatch.setattr(tune, "_spills", lambda case, config: config == spilling)
    assert choose(CASE) == good


def test_the_shipped_entry_of_an_elementwise_kernel_is_what_its_binaries_say() -> None:
    shipped = read_table(tune.SHIPPED)
    assert shipped["activation_forward"]["16"][-1].config == choose(CASE)


def test_a_table_that_was_made_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    text = render(
        {"made": {"how": "test"}, "launches": {"norm_affine": {bits: [[None, 1, 64, 2]] for bits in ("16", "32")}}}
    )
    assert parse_table(text, "text")["norm_affine"]["16"][0].config == LaunchConfig(1, 64, 2)


def test_check_says_no_where_the_table_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune, "make", lambda measured: {"made": {}, "launches": {}})
    assert main(["--check"]) == 1
    assert "launch.json" in capsys.readouterr().out


def test_out_writes_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = {"made": {"how": "test"}, "launches": {"norm_affine": {bits: [[None, 1, 64, 2]] for bits in ("16", "32")}}}
    monkeypatch.setattr(tune, "make", lambda measured: table)
    assert main(["--out", str(tmp_path / "table.json")]) == 0
    assert read_table(tmp_path / "table.json").keys() == {"norm_affine"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_measuring_without_a_gpu_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--measure", "--out", "table.json"])
    assert stop.value.code == 2
    assert "needs a GPU" in capsys.readouterr().err
