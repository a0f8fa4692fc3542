"""Rotary tables of several axes, whose sections have to sum to the frequencies of a head."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from memopt.walk.models.config import config_nodes, is_integer


def fit_sections(sections: Sequence[int], total: int) -> list[int]:
    """Integers in the proportions of `sections` that sum to `total`."""
    ends = [round(Fraction(sum(sections[: end + 1]) * total, sum(sections))) for end in range(len(sections))]
    return [end - start for start, end in pairwise([0, *ends])]


def fit_rotary(config: PreTrainedConfig, model: nn.Module) -> None:
    """Write into `config` the sections that fit the tables of `model`, which was built from it.

    Where a config gives none, its class has default sections, which fit one head size only.
    """
    built: Any = model.config
    nodes = {id(own): node for own, node in zip(config_nodes(built), config_nodes(config), strict=False)}
    for module in model.modules():
        sections, frequencies = getattr(module, "mrope_section", None), getattr(module, "inv_freq", None)
        if not isinstance(sections, list | tuple) or not sections or not all(map(is_integer, sections)):
            continue
        parameters = getattr(nodes.get(id(getattr(module, "config", None))), "rope_parameters", None)
        if frequencies is not None and sum(sections) != len(frequencies) and isinstance(parameters, dict):
            parameters["mrope_section"] = fit_sections(sections, len(frequencies))
