"""memopt.load and what becomes of a patched checkpoint afterwards."""

from __future__ import annotations

import functools
import json
import types
import warnings
from pathlib import Path

import accelerate
import pytest
import torch
import transformers
from safetensors import safe_open

import memopt
from memopt.errors import ModelError, NegativeVerdict
from memopt.patches.apply import is_patched
from memopt.patches.base import Entry
from memopt.patches.record import record_of
from memopt.patches.swap import is_swapped
from memopt.pipeline import patch_checkpoint
from memopt.plan.plan import Plan, coverage_totals
from memopt.plan.recipe import load_recipe
from memopt.verification.run import verify
from memopt.walk.sites import Sites
from tests.factories import NAMES, tiny_inputs, tiny_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """name, dtype -> (original folder, folder patched with `exact`), made once."""
    root, made = tmp_path_factory.mktemp("checkpoints"), {}

    def make(name: str, dtype: torch.dtype = torch.float32) -> tuple[Path, Path]:
        if (name, dtype) not in made:
            original = root / f"{name}-{str(dtype)[6:]}"
            tiny_model(name, dtype).save_pretrained(original)
            patched = Path(f"{original}-patched")
            patch_checkpoint(original, patched)
            made[name, dtype] = (original, patched)
        return made[name, dtype]

    return make


def tensor_names(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


def load_stock(folder: Path, name: str) -> torch.nn.Module:
    return getattr(transformers, type(tiny_model(name)).__name__).from_pretrained(folder, dtype="auto").train()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.rotates(3)
def test_stock_classes_load_the_patched_files_and_compute_the_same_function(checkpoint, name):
    original, patched = checkpoint(name)
    inputs = tiny_inputs(name, 2, 16)
    with torch.no_grad():
        expected = load_stock(original, name).double()(**_double(inputs)).logits
        got = load_stock(patched, name).double()(**_double(inputs)).logits
    # One rounding of the folded weights to fp32, through a few layers.
    assert (got - expected).norm() <= 100 * torch.finfo(torch.float32).eps * expected.norm()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.rotates(3)
def test_load_gives_the_loss_of_the_original(checkpoint, name):
    original, patched = checkpoint(name)
    model = memopt.load(patched).train()
    assert is_patched(model)
    inputs = tiny_inputs(name, 2, 16)
    expected = load_stock(original, name)(**inputs).loss.item()
    assert model(**inputs).loss.item() == pytest.approx(expected, rel=100 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.rotates(3)
def test_saving_a_loaded_model_keeps_every_tensor_name(checkpoint, name, tmp_path):
    original, patched = checkpoint(name)
    memopt.load(patched).save_pretrained(tmp_path)
    assert tensor_names(tmp_path) == tensor_names(patched) == tensor_names(original)
    with torch.no_grad():
        inputs = tiny_inputs(name, 2, 16)
        assert torch.equal(load_stock(tmp_path, name)(**inputs).logits, load_stock(patched, name)(**inputs).logits)


def test_a_trained_model_that_was_saved_loads_patched_again(checkpoint, tmp_path):
    model = memopt.load(checkpoint("llama")[1]).train()
    inputs = tiny_inputs("llama", 2, 16)
    model(**inputs).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.save_pretrained(tmp_path)
    again = memopt.load(tmp_path).train()
    assert is_patched(again)
    assert "model.layers.0.input_layernorm.weight" in dict(again.named_buffers())
    assert "model.norm.weight" in dict(again.named_parameters())
    assert again(**inputs).loss.item() == pytest.approx(model(**inputs).loss.item(), rel=1e-6)


def test_folded_norms_are_buffers_and_the_others_stay_parameters(checkpoint):
    model = memopt.load(checkpoint("llama")[1])
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    assert "model.layers.0.input_layernorm.weight" in buffers
    assert "model.layers.0.input_layernorm.weight" not in parameters
    assert "model.norm.weight" in parameters


def test_a_folded_norm_that_was_trained_away_from_the_identity_is_shared_with_its_affine(checkpoint, tmp_path):
    stock = load_stock(checkpoint("llama")[1], "llama")
    with torch.no_grad():
        stock.model.layers[0].input_layernorm.weight.mul_(1.5)
    stock.save_pretrained(tmp_path)
    (tmp_path / "memopt.json").write_bytes((checkpoint("llama")[1] / "memopt.json").read_bytes())
    model = memopt.load(tmp_path).train()
    assert "model.layers.0.input_layernorm.weight" in dict(model.named_parameters())
    inputs = tiny_inputs("llama", 2, 16)
    assert model(**inputs).loss.item() == pytest.approx(stock.train()(**inputs).loss.item(), rel=1e-6)


def test_another_head_class_loads_the_same_folds(checkpoint):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = memopt.load(
            checkpoint("llama")[1], model_class=transformers.AutoModelForSequenceClassification, num_labels=2
        )
    assert is_patched(model)
    assert "model.layers.0.input_layernorm.weight" in dict(model.named_buffers())
    base = memopt.load(checkpoint("llama")[1], model_class=transformers.AutoModel)
    assert "layers.0.input_layernorm.weight" in dict(base.named_buffers())


def test_a_loaded_model_trains_the_folded_parametrisation(checkpoint):
    model = memopt.load(checkpoint("llama")[1]).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = tiny_inputs("llama", 2, 16)
    losses = []
    for _ in range(5):
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    weight = model.model.layers[0].input_layernorm.weight
    assert torch.equal(weight, torch.ones_like(weight))


def test_unpatching_a_loaded_model_gives_plain_parameters_back(checkpoint):
    model = memopt.unpatch(memopt.load(checkpoint("llama")[1]))
    stock = load_stock(checkpoint("llama")[1], "llama")
    assert set(dict(model.named_parameters())) == set(dict(stock.named_parameters()))


@pytest.mark.skipif("internlm3" not in transformers.CONFIG_MAPPING, reason="transformers has no InternLM3")
def test_a_class_of_another_model_type_is_loaded_with_the_defaults_of_its_config(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 1}
    config = transformers.CONFIG_MAPPING["internlm3"](vocab_size=99, **sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({name: v for name, v in json.loads(file.read_text()).items() if name != "rms_norm_eps"}))
    patch_checkpoint(tmp_path / "model", tmp_path / "out")
    model = memopt.load(tmp_path / "out", use_cache=False, dtype=torch.bfloat16)
    assert type(model) is transformers.LlamaForCausalLM
    assert type(model.config) is type(config)
    assert (model.config.use_cache, model.dtype) == (False, torch.bfloat16)
    assert model.model.norm.variance_epsilon == config.rms_norm_eps != transformers.LlamaConfig().rms_norm_eps
    assert verify(tmp_path / "out", level=("weights", "forward")).status == "pass"


def test_loading_in_another_dtype(checkpoint):
    model = memopt.load(checkpoint("llama")[1], dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert is_patched(model)


def test_patching_a_patched_folder_says_so(checkpoint, tmp_path):
    with pytest.raises(NegativeVerdict, match="already patched"):
        patch_checkpoint(checkpoint("llama")[1], tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("folder", ["missing", "plain"])
def test_loading_something_else_is_an_error(checkpoint, tmp_path, folder):
    path = tmp_path / "missing" if folder == "missing" else checkpoint("llama")[0]
    with pytest.raises(ModelError, match="memopt patch"):
        memopt.load(path)


def _double(inputs):
    return {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}


def test_a_part_that_another_model_shares_is_named_and_can_be_patched_with_the_second():
    policy = tiny_model("llama")
    value = torch.nn.Sequential()
    value.add_module("trunk", policy.model)
    memopt.patch(policy)
    shared = [name for name, module in value.named_modules() if is_swapped(module)]
    with pytest.raises(NegativeVerdict, match=rf"'{shared[0]}' in this model is already patched, with another"):
        memopt.patch(value, inputs={"input": tiny_inputs("llama")["input_ids"]})
    memopt.unpatch(value)
    memopt.patch(value, inputs={"input": tiny_inputs("llama")["input_ids"]})
    assert is_patched(value)
    assert is_patched(policy)


def test_patching_says_in_one_line_what_it_did_and_can_be_silenced(caplog):
    with caplog.at_level("INFO", logger="memopt"):
        model = memopt.patch(tiny_model("llama"))
        memopt.unpatch(model)
    (record,) = caplog.records
    assert "5 of 5 norms, 2 of 2 gated MLPs" in record.getMessage()
    caplog.clear()
    with caplog.at_level("WARNING", logger="memopt"):
        memopt.patch(model)
    assert not caplog.records


def test_patching_a_checkpointed_model_warns_that_little_is_left_to_save(caplog):
    model = tiny_model("llama")
    model.gradient_checkpointing_enable()
    memopt.patch(model)
    assert ["activation checkpointing of 2 modules" in record.getMessage() for record in caplog.records] == [True]


def test_patching_a_model_whose_loss_another_forward_computes_says_whose(caplog):
    """... as in `memopt.patch(trainer.model)` of a trainer of TRL, whose forward calls the one that it found."""
    model = tiny_model("llama")
    own = model.forward

    @functools.wraps(type(model).forward)
    def fused(self, *args, fused_lm_head=False, **kwargs):
        return self.model(*args, **kwargs).last_hidden_state if fused_lm_head else own(*args, **kwargs)

    model.forward = types.MethodType(fused, model)
    memopt.patch(model)
    assert memopt.summary(model).plan.counts() == memopt.plan_for(tiny_model("llama")).counts()
    assert [f"now one of {__name__}" in record.getMessage() for record in caplog.records] == [True]


def test_a_module_that_later_gets_another_forward_does_not_count_as_patched():
    """... as Liger's does, which its Trainer option puts on the instances."""
    model = memopt.patch(tiny_model("llama"))
    before = memopt.summary(model).modules
    norm = model.model.norm
    norm.forward = types.MethodType(_other_norm, norm)
    assert memopt.summary(model).modules == before - 1
    assert f"1 modules were patched, and later got a forward of {__name__}" in str(memopt.summary(model))
    assert "model.norm" in memopt.summary(model).remarks[0]
    for module in model.modules():
        if is_swapped(module):
            module.forward = types.MethodType(_other_norm, module)
    assert not is_patched(model)
    with pytest.raises(NegativeVerdict, match="already patched"):
        memopt.patch(model)
    memopt.unpatch(model)
    assert not any(map(is_swapped, model.modules()))


def test_a_hook_of_accelerate_around_a_forward_leaves_it_patched():
    model = memopt.patch(tiny_model("llama"))
    before = memopt.summary(model)
    accelerate.hooks.add_hook_to_module(model.model.norm, accelerate.hooks.ModelHook())
    assert "forward" in vars(model.model.norm)
    assert str(memopt.summary(model)) == str(before)


def _other_norm(self, x):
    return x * self.weight


def test_sites_that_were_refused_count_as_left_with_the_reason():
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)  # then no proof succeeds
    norms = "5 norms: 4 shared, 1 left"
    assert "5 norms: 5 shared" in coverage_totals(memopt.plan_for(model))
    with pytest.warns(UserWarning, match=r"did not change model\.norm"):
        memopt.patch(model)
    text = str(memopt.summary(model))
    assert norms in text
    assert "unchanged: model.norm" in text
    record = record_of(model)
    assert norms in coverage_totals(record.plan)
    (entry,) = (entry for entry in record.plan.refusals if entry.site == "model.norm")
    assert [entry.reason] == [reason for name, reason in record.refused if name == "model.norm"]


@pytest.mark.parametrize("module", ["head", "head.around.inner", "head.other"])
def test_a_refused_module_stands_for_the_site_in_it_or_around_it(module):
    entries = tuple(
        Entry(kind, site, "done", "why") for kind in ("linear", "loss") for site in ("head.around", "body.weight")
    )
    left = Plan(load_recipe("exact"), Sites("M", "m"), entries).left("linear", module, "no")
    expected = [] if module == "head.other" else [Entry("linear", "head.around", "keep", "no")]
    assert list(left.refusals) == expected
    assert [entry.kind for entry in left.rewrites].count("loss") == 2


def test_what_is_no_module_is_refused_with_the_module_inside_it() -> None:
    class Wrapper:
        def __init__(self) -> None:
            self.name, self.body = "a", tiny_model("bert")

    with pytest.raises(ModelError, match=r"an nn\.Module, and Wrapper is none") as caught:
        memopt.patch(Wrapper())  # type: ignore[type-var]
    assert caught.value.hint == "Patch the module inside it: memopt.patch(model.body)."
    with pytest.raises(ModelError, match="and dict is none"):
        memopt.patch({})  # type: ignore[type-var]
    for function in (memopt.unpatch, memopt.summary):
        with pytest.raises(ModelError, match="and str is none"):
            function("a model")


def test_warnings_of_the_models_code_in_the_walk_are_not_shown() -> None:
    class Warns(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = tiny_model("bert")

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            warnings.warn("deprecated", stacklevel=1)
            return self.body(input_ids=input_ids).logits

    model = Warns()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memopt.patch(model, inputs={"input_ids": torch.ones(1, 8, dtype=torch.long)})
    with pytest.warns(UserWarning, match="deprecated"):
        model(torch.ones(1, 8, dtype=torch.long))


def test_a_compiled_model_is_no_model_whose_forward_was_replaced() -> None:
    model = torch.compile(tiny_model("llama"), backend="eager")
    assert not memopt.summary(memopt.patch(model)).remarks
