"""Nothing breaks where PyTorch lacks some of the private names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from memopt import torch_compat
from tests.support.processes import run_code


def test_this_pytorch_has_every_name() -> None:
    assert torch_compat.missing() == ()


_FIELDS = {name for name in torch_compat.names() if re.search(r"_functions\.\w+\._saved_", name)}
_OTHERS = [name for name in torch_compat.names() if name not in _FIELDS]


def _named(*patterns: str) -> str:
    return ",".join(name for name in _OTHERS if any(re.search(pattern, name) for pattern in patterns))


#: What is hidden together; no stand-in of one group switches off what tests another of the same group.
GROUPS = {
    "hook stack": _named("_top_saved"),
    "disabled hooks": _named("_error_message"),
    "raw fields": _named("unpack_hook", "_raw_saved"),
    "numbers and hooks": _named("sequence_nr", "_input_metadata", "_graph_task", "_hooks$", "_global_hook"),
    "storages": _named("Storage", "_storage_"),
    "trees": _named(
        "_pytree", "OpOverload$", "fake_tensor", "_utils", "functorch.is_", "_DropoutNd", "_autocast", "_backward_cls"
    ),
    "transforms": _named("peek_", "_current_level", "_tracing_state", "get_proxy"),
    "fields": ",".join(sorted(_FIELDS)),
    "dispatch": _named("TorchDispatchMode"),
    "everything": ",".join(torch_compat.names()),
}


def _examined(groups: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    ran = run_code("import sys; from tests.torch_compat.hidden_names import main; main(sys.argv[1:])", *groups)
    assert ran.code == 0, ran.err
    for line in ran.out.splitlines():
        if line.startswith("{"):
            found = json.loads(line)
            yield found["hidden"], found


@pytest.fixture(scope="module")
def examined() -> dict[str, dict[str, Any]]:
    return dict(_examined(["nothing", *GROUPS.values()]))


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.rotates(3)
def test_without_a_group_of_names_models_are_patched_and_right(examined: dict[str, dict[str, Any]], group: str) -> None:
    _is_right(examined[GROUPS[group]], examined["nothing"])


@pytest.mark.slow
def test_without_any_one_name_models_are_patched_and_right() -> None:
    found = dict(_examined(["nothing", *_OTHERS]))
    for name in _OTHERS:
        _is_right(found[name], found["nothing"])


def _is_right(found: dict[str, Any], whole: dict[str, Any]) -> None:
    assert "failed" not in found, found.get("failed")
    assert found["missing"] == sorted(found["hidden"].split(","))
    assert len(found["warnings"]) == 1, "said once for two models"
    assert found["error"] <= 2 * whole["error"]
    assert (found["refused"] is not None) == any(
        name.endswith(("TorchDispatchMode", "mm.default._schema")) for name in found["missing"]
    )


def test_with_every_name_nothing_is_said(examined: dict[str, dict[str, Any]]) -> None:
    assert examined["nothing"]["missing"] == examined["nothing"]["warnings"] == []


@pytest.mark.parametrize("group", ["hook stack", "disabled hooks", "raw fields", "transforms"])
def test_without_a_name_its_saving_is_off(examined: dict[str, dict[str, Any]], group: str) -> None:
    stock, patched = examined[GROUPS[group]]["kept"]
    assert stock >= patched > examined["nothing"]["kept"][1]


def test_a_rule_that_cannot_read_its_nodes_is_not_registered(examined: dict[str, dict[str, Any]]) -> None:
    assert "MulBackward0" in examined["nothing"]["rules"]
    assert examined[GROUPS["fields"]]["rules"] == []
