"""`plugins: [memopt.axolotl.Plugin]`, by axolotl's own manager of plugins and its schema."""

from __future__ import annotations

import pytest

import memopt
from memopt.errors import RecipeError
from tests.factories import tiny_model

pytest.importorskip("axolotl.integrations.base", reason="axolotl is not installed")


def test_the_plugin_patches_the_loaded_model_by_the_recipe_of_the_yaml() -> None:
    from axolotl.integrations.base import PluginManager
    from axolotl.integrations.config import merge_input_args
    from axolotl.utils.dict import DictDefault

    plugins = PluginManager.get_instance()
    plugins.register("memopt.axolotl.Plugin")
    schema, _ = merge_input_args()
    assert {"memopt_recipe", "memopt_budget", "micro_batch_size"} <= schema.model_fields.keys()
    model = tiny_model("llama")
    plugins.post_model_load(DictDefault({"memopt_recipe": "exact-levels"}), model)
    assert memopt.summary(model).recipe == "exact-levels"
    plugins.post_model_load(DictDefault({}), model)
    assert memopt.summary(model).recipe == "exact-levels"
    plugins.post_model_load(DictDefault({}), other := tiny_model("llama"))
    assert memopt.summary(other).recipe == "exact-unfolded"
    with pytest.raises(RecipeError, match="nonsense"):
        plugins.post_model_load(DictDefault({"memopt_recipe": "nonsense"}), tiny_model("llama"))
