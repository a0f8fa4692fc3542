"""What patches offer for single blocks, and the settings by which a recipe says it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import memopt
from memopt.errors import RecipeError
from memopt.patches.capabilities import Levels
from memopt.patches.checkpointing.offload import OffloadedInputs
from memopt.patches.checkpointing.patch import CheckpointingRules
from memopt.patches.registry import having
from memopt.patches.swap import swap_state
from memopt.plan.plan import Plan, make_plan
from memopt.plan.recipe import dump_recipe, load_recipe
from memopt.torch_compat import FakeTensorMode
from memopt.trace.timeline import record
from memopt.walk.sites import LinearSite, LossHead, Sites
from tests.factories import tiny_model

BLOCKS = ("layers.0", "layers.1", "layers.2")


def linear(name: str, width: int = 64) -> LinearSite:
    saved = (f"mul in {name.rpartition('.')[0]}.act",)
    return LinearSite(f"{name}.weight", name, (width, 64), 64, output_module=name, output_saved_by=saved)


@pytest.fixture
def plan() -> Plan:
    linears = [linear(f"{block}.{name}") for block in BLOCKS for name in ("up", "gate", "value")]
    sites = Sites("Model", "model", linears=tuple(linears), blocks=BLOCKS, hidden_size=64)
    return make_plan(sites, load_recipe("exact-unfolded"))


def offered(plan: Plan) -> dict[str, Mapping[str, tuple[str, ...]]]:
    return {words: names for patch in having(Levels) for words, names in patch.levels(plan).items()}


def test_a_block_recomputes_one_output_two_or_all(plan: Plan) -> None:
    block = {words: names["layers.1"] for words, names in offered(plan).items() if "checkpointed" not in words}
    assert block == {
        "up recomputed": ("layers.1.up",),
        "up and gate recomputed": ("layers.1.up", "layers.1.gate"),
        "all linears recomputed": ("layers.1.up", "layers.1.gate", "layers.1.value"),
    }


def test_each_block_can_be_checkpointed_with_its_input_offloaded_or_not(plan: Plan) -> None:
    words = [words for words in offered(plan) if "checkpointed" in words]
    assert words == [
        "checkpointed but for attention",
        "checkpointed",
        "checkpointed but for attention, both offloaded",
        "checkpointed with offloaded input",
    ]
    assert all(set(offered(plan)[each]) == set(BLOCKS) for each in words)


def test_a_recipe_says_which_blocks_have_which_level(plan: Plan) -> None:
    chosen = {
        "checkpointed": ["layers.1"],
        "checkpointed with offloaded input": ["layers.0"],
        "checkpointed but for attention, both offloaded": ["layers.2"],
    }
    patch = next(patch for patch in having(Levels) if "checkpointed" in patch.levels(plan))
    recipe = load_recipe("exact-unfolded", patch.at_levels(chosen))
    entries = make_plan(plan.sites, recipe).entries
    rows = {entry.site: entry.action for entry in entries if entry.kind == "checkpointing"}
    assert rows == {
        "layers.0": "recompute block, offload input",
        "layers.1": "recompute block",
        "layers.2": "recompute block, keep attention, offload both",
    }
    assert load_recipe(recipe).model_dump() == recipe.model_dump()


@pytest.mark.parametrize(
    ("blocks", "keep"), [(BLOCKS, "attention"), (["layers.0"], "attention"), (["layers.0", "layers.2"], ("layers.0",))]
)
def test_a_recipe_says_which_blocks_keep_their_attention(plan: Plan, blocks: list[str], keep: object) -> None:
    level, other = "checkpointed but for attention", "checkpointed"
    kept = list(keep) if isinstance(keep, tuple) else list(blocks)
    patch = next(patch for patch in having(Levels) if level in patch.levels(plan))
    recipe = load_recipe(
        "exact-unfolded", patch.at_levels({level: kept, other: [each for each in blocks if each not in kept]})
    )
    rows = {
        entry.site: entry.action for entry in make_plan(plan.sites, recipe).entries if entry.kind == "checkpointing"
    }
    assert [name for name, action in rows.items() if action == "recompute block, keep attention"] == kept
    assert [name for name, action in rows.items() if action != "keep"] == list(blocks)
    assert recipe.rules(CheckpointingRules).keep == keep


def test_tensors_of_a_block_and_of_the_one_before_come_back_together() -> None:
    """Two blocks' tensors are on the device at most: the one that runs and the next."""
    inputs = OffloadedInputs()
    with FakeTensorMode():
        places = [inputs.of_a_block() for _ in range(3)]
        waiting = [[place.wait(torch.ones(10)) for _ in range(2)] for place in places]
        waiting[2][0].take()
    assert [[each._fetched is not None for each in block] for block in waiting] == [
        [False, False],
        [True, True],
        [False, True],  # the first was taken
    ]


@pytest.mark.parametrize("patch", having(Levels), ids=lambda patch: type(patch).__name__)
def test_no_level_is_the_recipe_alone(patch: Levels, plan: Plan) -> None:
    recipe = load_recipe("exact-unfolded", patch.at_levels({}))
    assert recipe == load_recipe("exact-unfolded")


def test_a_pattern_of_blocks_to_offload_that_matches_nothing_is_noted(plan: Plan) -> None:
    settings = ("checkpointing.method=full", "checkpointing.offload=[layers.9]")
    notes = make_plan(plan.sites, load_recipe("exact-unfolded", settings)).notes
    assert any("checkpointing.offload 'layers.9' matches no block" in note for note in notes)


def test_offload_takes_names_or_one_of_its_words() -> None:
    with pytest.raises(RecipeError):
        load_recipe("exact-unfolded", ("checkpointing.offload=3",))
    one = load_recipe("exact-unfolded", ("checkpointing.offload=layers.0",))
    assert one == load_recipe("exact-unfolded", ("checkpointing.offload=[layers.0]",))


def test_a_faster_loss_is_offered_where_it_is_chunked(plan: Plan) -> None:
    head = LossHead("head.weight", 100, "head")
    sites = Sites("Model", "model", linears=(linear("head", 100),), loss_heads=(head,), hidden_size=64)
    faster = {w: s for patch in having(Levels) for w, s in patch.faster(make_plan(sites, plan.recipe)).items()}
    assert list(faster.values()) == [("loss.method=lean",)]
    stock = make_plan(sites, load_recipe("exact-unfolded", ("loss.method=none",)))
    assert not any(patch.faster(stock) for patch in having(Levels))


def test_a_recipe_written_as_yaml_reads_the_same(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    recipe = load_recipe("exact-levels", ("linears.recompute=[a,b]", "checkpointing.blocks=[layers.0]"))
    file.write_text(dump_recipe(recipe))
    assert load_recipe(file) == recipe


def test_only_the_named_blocks_offload_their_inputs() -> None:
    model = memopt.patch(
        tiny_model("gpt2"),
        load_recipe("exact-unfolded", ("checkpointing.method=full", "checkpointing.offload=[transformer.h.1]")),
    )
    states: list[Any] = [swap_state(model.get_submodule(f"transformer.h.{place}")) for place in range(3)]
    assert [state.inputs is not None for state in states] == [False, True, False]


def test_a_trace_does_not_count_what_waits_in_cpu_memory() -> None:
    inputs = OffloadedInputs()

    def forward(x: torch.Tensor) -> torch.Tensor:
        with inputs.of_a_block().hooks():
            return (x + 1).exp().sum()  # exp saves its output; its node is the first to save

    with FakeTensorMode():
        x = torch.ones(1000, requires_grad=True)
        found = record(torch.nn.Identity(), lambda: forward(x))
    waiting = [life for life in found.events[: found.forward_ends] if not 0 <= life.died < found.forward_ends]
    assert {life.nbytes for life in waiting} == {4}  # the sum
    assert 4000 in {life.nbytes for life in found.events[found.forward_ends :]}  # its copy on the device
