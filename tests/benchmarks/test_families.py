"""The table of families: its rows say what was traced, and what is above the limit is named with its cause."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.mamba2 import modeling_mamba2

from benchmarks.families import FAMILIES_FILE, LIMIT, Row, _changed, assumed, measure
from benchmarks.families_page import families_section
from benchmarks.family_list import CAUSES, FAMILIES, PUBLISHERS
from memopt.walk.models.build import build_meta
from memopt.walk.models.plain import kernels_of
from memopt.walk.observe import find_sites

NAMES = [family.name for family in FAMILIES]
DOCUMENT: dict[str, Any] = json.loads(FAMILIES_FILE.read_text())


def test_every_family_has_a_row_in_order() -> None:
    assert len(NAMES) == len(set(NAMES)) >= 40
    assert [row["name"] for row in DOCUMENT["rows"]] == NAMES


def test_families_are_ordered_by_the_derivatives_of_their_publishers() -> None:
    counts = [PUBLISHERS.get(family.publisher, 0) for family in FAMILIES]
    assert counts == sorted(counts, reverse=True)


def test_a_row_above_the_limit_names_its_cause_in_bold() -> None:
    text = "\n".join(families_section(DOCUMENT))
    above = [row["name"] for row in DOCUMENT["rows"] if row["ratio"] > LIMIT]
    assert set(above) <= set(CAUSES) <= set(NAMES)
    for name in above:
        (cells,) = (line for line in text.splitlines() if line.startswith(f"| {name} |") and "**" in line)
        assert CAUSES[name] in text
        assert cells.endswith("** |")
    assert "not examined" not in text


def test_no_floor_is_above_what_memopt_keeps() -> None:
    assert all(row["floor"] <= row["memopt"] <= row["stock"] for row in DOCUMENT["rows"])


def test_offloading_takes_the_inputs_of_all_blocks_but_one() -> None:
    peaks = {"stock": 9 << 30, "free": 5 << 30, "inputs": 2 << 30}
    row = {**DOCUMENT["rows"][0], "peaks": [peaks, peaks]}
    text = "\n".join(families_section({**DOCUMENT, "rows": [row]}))
    assert "| 9.00 | not traced | 5.00 | 3.00 | not traced | 9.00 |" in text


@pytest.mark.parametrize("name", ["BERT"])
def test_a_layer_that_is_traced_again_is_that_of_its_row(name: str) -> None:
    (recorded,) = (row for row in DOCUMENT["rows"] if row["name"] == name)
    found = measure(FAMILIES[NAMES.index(name)], peaks=False)
    assert _changed(recorded, found) == []
    assert _changed({**recorded, "memopt": 1.01 * recorded["memopt"]}, found)
    assert Row(**{key: value for key, value in recorded.items() if key != "ratio"}).ratio == recorded["ratio"]
    assert asdict(found)["floor"] == recorded["floor"]


def test_kernels_are_found_inside_and_only_there() -> None:
    model = build_meta(FAMILIES[NAMES.index("Mamba 2")].config(2))
    with assumed(model):
        found = kernels_of(model)
    assert {"causal_conv1d_fn", "mamba_split_conv1d_scan_combined"} <= set(found)
    assert kernels_of(model) == {}


def test_a_mamba_mixer_keeps_its_input_the_scans_result_and_the_roots_of_its_norm() -> None:
    rows, tokens, heads, width, groups, state = 2, 128, 4, 16, 1, 8
    channels = heads * width + 2 * groups * state
    x = torch.randn(rows, tokens, heads * width + channels + heads, dtype=torch.bfloat16, requires_grad=True)
    vector, wide = nn.Parameter(torch.ones(heads)), nn.Parameter(torch.ones(heads * width, dtype=torch.bfloat16))
    weight = nn.Parameter(torch.ones(32, heads * width, dtype=torch.bfloat16))
    saved: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(0 if isinstance(tensor, nn.Parameter) else tensor.nbytes)
        return tensor

    model = build_meta(FAMILIES[NAMES.index("Mamba 2")].config(2))
    with assumed(model), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = modeling_mamba2.mamba2_split_conv1d_scan_combined(
            x, nn.Parameter(torch.ones(channels, 4)), None, vector, vector, D=vector, rmsnorm_weight=wide,
            outproj_weight=weight, headdim=width, ngroups=groups, chunk_size=64,
        )  # fmt: skip
    assert output.shape == (rows, tokens, 32)
    assert sum(saved) == x.nbytes + 2 * rows * tokens * heads * width + 4 * rows * tokens * groups


_KERNELS = ("Qwen3.5", "Granite 4 hybrid", "LFM2", "Mamba 2", "Jamba")
_SLOW_KERNELS = ("Qwen3-Next", "Falcon-H1", "Bamba", "Kimi-Linear")


@pytest.mark.parametrize("name", [*_KERNELS, *(pytest.param(name, marks=pytest.mark.slow) for name in _SLOW_KERNELS)])
@pytest.mark.rotates(4)
def test_the_sites_are_the_same_with_and_without_the_packages_of_kernels(name: str) -> None:
    family = FAMILIES[NAMES.index(name)]
    config = family.config(family.depths[0])
    without = find_sites(build_meta(config))
    with assumed(build_meta(config)):
        model = build_meta(config)
        assert kernels_of(model)
        assert find_sites(model) == without
