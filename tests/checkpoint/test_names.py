"""Files that are not the config's model are refused by name before anything is built; what is one model passes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import BertConfig, MixtralConfig

from memopt.checkpoint import names as subject
from memopt.checkpoint.fits import affines_read
from memopt.checkpoint.names import Names, compare_names
from memopt.checkpoint.original import named
from memopt.checkpoint.sources.source import open_source
from memopt.errors import ModelError
from memopt.pipeline import patch_checkpoint, unpatch_checkpoint
from memopt.verification.run import verify
from memopt.walk.models.build import build_meta
from memopt.walk.models.config import load_config
from tests.factories import NAMES, tiny_config, tiny_model
from tests.zoo.build import saved_twin
from tests.zoo.test_zoo import TYPES

FILE = "model.safetensors"
NORM, K_PROJ = "model.norm.weight", "model.layers.0.self_attn.k_proj.weight"
Tensors = dict[str, Tensor]


def compared(folder: Path) -> Names:
    return compare_names(open_source(str(folder)), load_config(folder))


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        patch_checkpoint(folder, dry_run=True)
    return str(caught.value)


def edit(folder: Path, change: Callable[[Tensors], object]) -> Path:
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    return folder


def configure(folder: Path, **settings: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def drop(*parts: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if any(part in name for part in parts)]:
            del tensors[name]

    return change


def add(name: str, *shape: int) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


def swap(one: str, other: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({one: tensors.pop(other)})


WRONG: dict[str, tuple[Callable[[Tensors], None], str]] = {
    "fewer layers": (drop("layers.1."), "model.layers.1.input_layernorm.weight is missing"),
    "more layers": (add("model.layers.2.mlp.up_proj.weight", 172, 64), "layers.2.mlp.up_proj.weight is not in the"),
    "a missing norm": (drop(NORM), f"{NORM} is missing"),
    "a missing k_proj": (drop(K_PROJ), f"{K_PROJ} is missing"),
    "a missing embedding": (drop("embed_tokens"), "model.embed_tokens.weight is missing"),
    "a missing head": (drop("lm_head"), "lm_head.weight is missing"),
    "a stray bias in a layer": (add("model.layers.0.self_attn.k_proj.bias", 32), "k_proj.bias is not in the model"),
    "sinks": (add("model.layers.0.self_attn.sinks", 4), "self_attn.sinks is not in the model"),
    "a stray bias of another name": (add("model.layers.0.self_attn.q_bias", 64), "q_bias is not in the model"),
    "a stray bias in the head": (add("lm_head.bias", 67), "lm_head.bias is not in the model"),
    "another name": (swap("model.layers.0.norm1.weight", "model.layers.0.input_layernorm.weight"), "is missing"),
    "another width": (add(K_PROJ, 16, 64), f"{K_PROJ} is 16 x 64 in the files and 32 x 64 in the model"),
    "a matrix for a vector": (add(NORM, 64, 1), f"{NORM} is 64 x 1 in the files and 64 in the model"),
    "no tensors": (lambda tensors: tensors.clear(), "and 18 more"),
}


@pytest.mark.parametrize(("change", "words"), WRONG.values(), ids=WRONG.keys())
def test_files_of_another_model_are_refused_with_the_names(
    llama: Path, change: Callable[[Tensors], None], words: str
) -> None:
    message = refusal(edit(llama, change))
    assert "LlamaForCausalLM" in message
    assert words in message


@pytest.mark.parametrize("settings", [{"num_hidden_layers": 3}, {"hidden_size": 32}, {"intermediate_size": 100}])
def test_a_config_of_another_model_is_refused(llama: Path, settings: dict[str, object]) -> None:
    assert "are not those of LlamaForCausalLM" in refusal(configure(llama, **settings))


def test_weights_of_bert_under_the_config_of_llama_are_refused_with_three_names(llama: Path) -> None:
    tiny_model("bert").save_pretrained(llama.parent / "bert")
    (llama / FILE).write_bytes((llama.parent / "bert" / FILE).read_bytes())
    message = refusal(llama)
    assert message.count("is missing") == 3
    assert "more" in message


def test_a_layer_that_a_mixture_of_experts_lacks_is_refused(tmp_path: Path) -> None:
    folder = edit(mixtral(tmp_path), drop("layers.0.block_sparse_moe.experts.3.w2", "layers.0.mlp.experts.3.w2"))
    assert "experts.down_proj is 3 x" in refusal(folder)


# --- what is no difference


def mixtral(folder: Path) -> Path:
    sizes = {"vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = MixtralConfig(**sizes, num_local_experts=4, num_attention_heads=4, num_key_value_heads=2)
    transformers.MixtralForCausalLM(config).save_pretrained(folder / "mixtral")
    return folder / "mixtral"


@pytest.mark.parametrize("name", NAMES)
def test_what_save_pretrained_writes_has_no_difference(tmp_path: Path, name: str) -> None:
    model = tiny_model(name)
    model.save_pretrained(tmp_path)
    assert compared(tmp_path) == Names(type(model).__name__)


#: Types that are compared in every run; the others are slow.
QUICK = ("bart", "clip", "deberta-v2", "gpt_neox", "mamba", "qwen2_moe", "segformer", "swin", "wav2vec2")


@pytest.mark.parametrize(
    "model_type", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TYPES]
)
@pytest.mark.rotates(3)
def test_no_model_type_of_transformers_is_refused(tmp_path: Path, model_type: str) -> None:
    if not saved_twin(model_type, tmp_path):
        pytest.skip("this type cannot be built, saved and read")
    cls = subject.model_class(load_config(tmp_path))
    try:
        found = compared(tmp_path)
    except ModelError:
        with pytest.raises(Exception):  # noqa: B017, PT011 - as varied as the reasons for which a class does not load
            cls.from_pretrained(tmp_path)
        pytest.skip("transformers itself does not load what it saved")
    if found != Names(found.model):
        options = {"output_loading_info": True, "ignore_mismatched_sizes": True, "dtype": torch.float32}
        info = cls.from_pretrained(tmp_path, **options)[1]  # type: ignore[arg-type, index]
        assert set(info["missing_keys"]) == {*found.missing, *found.random}
        assert {name for name, *_ in info["mismatched_keys"]} == {name for name, *_ in found.reshaped}
        pytest.skip(f"transformers itself does not load what it saved: {found.wrong}")


@pytest.mark.parametrize("name", [pytest.param("smollm2", marks=pytest.mark.slow), "minilm"])
def test_pretrained_models_have_no_difference(name: str, request: pytest.FixtureRequest) -> None:
    found = compared(request.getfixturevalue(name))
    assert (found.wrong, found.random, found.unread) == ((), (), ())


def test_experts_of_a_file_each_are_the_fused_ones(tmp_path: Path) -> None:
    folder = mixtral(tmp_path)
    assert any("experts.3.w2" in name for name in load_file(folder / FILE))
    assert compared(folder) == Names("MixtralForCausalLM")


def test_tied_weights_may_be_in_the_files_or_not(tmp_path: Path) -> None:
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / FILE)
    assert compared(tmp_path) == Names("LlamaForCausalLM")
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert compared(tmp_path) == Names("LlamaForCausalLM")


def test_names_of_old_checkpoints_are_known(tmp_path: Path) -> None:
    tiny_model("bert").save_pretrained(tmp_path)

    def age(tensors: Tensors) -> None:
        for name in [name for name in tensors if "LayerNorm" in name]:
            tensors[name.replace("weight", "gamma").replace("bias", "beta")] = tensors.pop(name)
        tensors["bert.embeddings.position_ids"] = torch.arange(4)[None]

    assert compared(edit(tmp_path, age)) == Names("BertForSequenceClassification")


def bert(folder: Path, cls: str, **options: object) -> Path:
    config: BertConfig = tiny_config("bert")  # type: ignore[assignment]
    getattr(transformers, cls)(config, **options).save_pretrained(folder)
    return folder


def test_a_head_that_nobody_named_may_be_absent_and_is_noted(tmp_path: Path) -> None:
    found = compared(configure(bert(tmp_path, "BertModel"), architectures=None))
    assert found.model == "BertForMaskedLM"
    assert not found.wrong
    assert "cls.predictions.bias" in found.random
    assert "at random" in " ".join(found.notes)


def test_half_of_a_head_is_refused(tmp_path: Path) -> None:
    folder = configure(bert(tmp_path, "BertForMaskedLM"), architectures=None)
    assert "cls.predictions.transform.dense.bias is missing" in refusal(edit(folder, drop("transform.dense.bias")))


def test_heads_and_optional_parts_of_other_classes_are_not_read(tmp_path: Path) -> None:
    folder = configure(bert(tmp_path, "BertForPreTraining"), architectures=["BertForMaskedLM"])
    found = compared(folder)
    assert not found.wrong
    pooler = {f"bert.pooler.dense.{leaf}" for leaf in ("weight", "bias")}
    assert set(found.unread) == pooler | {"cls.seq_relationship.weight", "cls.seq_relationship.bias"}
    assert not compared(configure(folder, architectures=["BertModel"])).wrong


def test_a_part_that_the_class_can_do_without_may_be_absent(tmp_path: Path) -> None:
    found = compared(bert(tmp_path, "BertModel", add_pooling_layer=False))
    assert not found.wrong
    assert set(found.random) == {"pooler.dense.weight", "pooler.dense.bias"}
    assert "encoder.layer.0" in refusal(edit(tmp_path, drop("encoder.layer.0.output.dense.weight")))


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("transformer.h.0.attn.masked_bias", torch.tensor(-1e9)),
        ("transformer.h.0.attn.c_attn.k_scale", torch.ones(1)),
        ("transformer.h.1.attn.mask", torch.ones(1, 1, 4, 4, dtype=torch.uint8)),
    ],
)
def test_tensors_that_a_complete_model_does_not_read_are_noted_and_copied(
    tmp_path: Path, name: str, extra: Tensor
) -> None:
    folder, patched, stock = tmp_path / "gpt2", tmp_path / "patched", tmp_path / "stock"
    tiny_model("gpt2").save_pretrained(folder)
    edit(folder, lambda tensors: tensors.update({name: extra}))
    result = patch_checkpoint(folder, patched)
    assert f"GPT2LMHeadModel does not read {name}, which" in " ".join(result.notes)
    assert verify(patched, level=["weights", "forward"]).status == "pass"
    unpatch_checkpoint(patched, out=stock)
    before, after = load_file(folder / FILE), load_file(stock / FILE)
    assert torch.equal(load_file(patched / FILE)[name], extra)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_unread_tensors_beside_a_missing_weight_show_another_model(llama: Path) -> None:
    name = "model.layers.0.self_attn.k_scale"
    edit(llama, add(name, 67, 64))
    assert compared(llama).unread == (name,)
    assert f"{name} is not in the model" in refusal(edit(llama, drop(NORM)))


# --- quantised weights


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "fp8", "mxfp4", "compressed-tensors"])
def test_a_quantised_checkpoint_is_refused_by_its_method(llama: Path, method: str) -> None:
    message = refusal(configure(llama, quantization_config={"quant_method": method}))
    assert "quantised" in message
    assert method in message


def test_a_quantised_part_is_refused(llama: Path) -> None:
    assert "awq" in refusal(configure(llama, text_config={"quantization_config": {"quant_method": "awq"}}))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.int32])
def test_a_weight_in_codes_is_refused_by_name(llama: Path, dtype: torch.dtype) -> None:
    message = refusal(edit(llama, lambda tensors: tensors.update({K_PROJ: tensors[K_PROJ].to(dtype)})))
    assert K_PROJ in message


# --- before anything is built


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_hidden_layers": 100_000}, "num_hidden_layers"),
        ({"num_hidden_layers": 10_000}, "modules and parameters"),
        ({"hidden_size": 10**9, "num_attention_heads": 1}, "a parameter of 67 x 1000000000"),
        ({"vocab_size": 10**14}, "a parameter of 100000000000000 x 64"),
    ],
)
def test_a_config_with_too_large_sizes_is_refused_without_building_it(
    llama: Path, settings: dict[str, object], words: str
) -> None:
    assert words in refusal(configure(llama, **settings))


def test_the_loader_of_transformers_reports_what_is_read_of_it(llama: Path) -> None:
    """The names are found in private territory: here it shows first when it changes."""
    edit(llama, drop(NORM))
    edit(llama, add("model.stray", 3))
    edit(llama, add(K_PROJ, 2, 2))
    found = compared(llama)
    assert (found.missing, found.unexpected) == ((NORM,), ("model.stray",))
    assert found.reshaped == ((K_PROJ, (2, 2), (32, 64)),)


def test_a_config_that_builds_no_model_is_named_and_not_the_tensors(llama: Path) -> None:
    assert "LlamaForCausalLM cannot be built from its config: KeyError: 'sillu'" in refusal(
        configure(llama, hidden_act="sillu")
    )


def randomise(tensors: Tensors) -> None:
    """Give norms weights of both signs; those of a new model are ones."""
    generator = torch.Generator().manual_seed(0)
    for tensor in tensors.values():
        if tensor.dim() == 1:
            tensor.add_(torch.randn(tensor.shape, generator=generator))


#: type -> (a parameter of its model, its name in files, norms that are folded)
RENAMED = {
    "gemma3": (
        "model.language_model.layers.0.mlp.up_proj.weight",
        "language_model.model.layers.0.mlp.up_proj.weight",
        25,
    ),
    "qwen2_5_vl": ("model.language_model.norm.weight", "model.norm.weight", 9),
    "dinov2": (
        "dinov2.encoder.layer.0.attention.k_proj.weight",
        "dinov2.encoder.layer.0.attention.attention.key.weight",
        4,
    ),
}


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=pytest.mark.slow if name == "gemma3" else ()) for name in RENAMED]
)
def test_norms_are_folded_where_files_have_names_of_older_releases(model_type: str, tmp_path: Path):
    parameter, key, folds = RENAMED[model_type]
    assert saved_twin(model_type, tmp_path / "model")
    edit(tmp_path / "model", randomise)
    source = open_source(str(tmp_path / "model"))
    assert source.renamed == {}
    assert named(source, False).renamed[parameter] == key
    result = patch_checkpoint(tmp_path / "model", tmp_path / "patched")
    assert len(result.plan.folds()) == folds
    assert not [note for note in result.notes if "shared instead" in note]
    verdict = verify(tmp_path / "patched", level=["weights", "forward"])
    assert verdict.status == "pass", verdict


def test_a_parameter_that_a_load_makes_of_several_tensors_has_no_name_in_the_files(tmp_path: Path):
    assert saved_twin("mixtral", tmp_path)
    found = named(open_source(str(tmp_path)), False).renamed
    assert set(found) == {f"model.layers.{i}.mlp.gate.weight" for i in range(2)}, "experts are merged"


def test_of_two_tensors_for_one_parameter_and_of_another_shape_neither_is_named(llama: Path):
    edit(llama, lambda tensors: tensors.update({NORM.removeprefix("model."): tensors[NORM].clone()}))
    assert named(open_source(str(llama)), False).renamed == {}
    edit(llama, lambda tensors: (tensors.pop(NORM), tensors.update({"norm.weight": torch.ones(3)})))
    assert named(open_source(str(llama)), False).renamed == {}
    edit(llama, lambda tensors: tensors.update({"norm.weight": torch.ones(tiny_config("llama").hidden_size)}))
    assert named(open_source(str(llama)), False).renamed == {NORM: "norm.weight"}


def test_a_copy_that_was_saved_with_the_names_of_the_model_is_unpatched(tmp_path: Path):
    assert saved_twin("qwen2_vl", tmp_path / "model")
    edit(tmp_path / "model", randomise)
    patch_checkpoint(tmp_path / "model", tmp_path / "patched")
    (tmp_path / "patched" / "memopt.json").unlink()
    today = {key: name for name, key in named(open_source(str(tmp_path / "model")), False).renamed.items()}
    tensors = {today.get(key, key): tensor for key, tensor in load_file(tmp_path / "patched" / FILE).items()}
    save_file(tensors, tmp_path / "patched" / FILE, metadata={"format": "pt"})
    result = unpatch_checkpoint(tmp_path / "patched", out=tmp_path / "stock", against=tmp_path / "model")
    assert result.unfolded.norms
    assert not result.unfolded.kept
    stock = load_file(tmp_path / "model" / FILE)
    back = load_file(tmp_path / "stock" / FILE)
    assert back.keys() == {today.get(key, key) for key in stock}
    assert all(torch.equal(back[today.get(key, key)], tensor) for key, tensor in stock.items())


def test_norms_of_a_model_on_meta_have_the_values_of_files_with_other_names(tmp_path: Path):
    assert saved_twin("qwen2_vl", tmp_path)
    edit(tmp_path, randomise)
    model = build_meta(load_config(tmp_path))
    norm = "model.language_model.norm"
    with affines_read(model, tmp_path, {norm: norm}) as known:
        assert known == [norm]
        assert torch.equal(model.get_parameter(f"{norm}.weight"), load_file(tmp_path / FILE)[NORM])
    assert model.get_parameter(f"{norm}.weight").is_meta
