"""An adapter of the stock model becomes one of its folded form, and back: the same function, or a refusal by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import memopt
from memopt.checkpoint.adapters.verb import AdapterResult, convert_adapter
from memopt.errors import MemoptError, ModelError, NegativeVerdict
from memopt.pipeline import patch_checkpoint
from tests.checkpoint.test_names import edit, randomise
from tests.factories import tiny_inputs, tiny_model
from tests.patches.test_experts import base as mixtral
from tests.zoo.build import saved_twin

#: Weights of the folded model and of the adapter are rounded to fp32, everything else is fp64: about 16 products lie on
#: a path through the two or three blocks, each off by half of fp32's epsilon of its largest element.
_ROUNDINGS = 16 * torch.finfo(torch.float32).eps
#: A norm of the Llama and its channel whose scale is zero.
ZERO = ("model.layers.1.post_attention_layernorm.weight", 5)

Config = Callable[[], peft.PeftConfig]
_LLAMA = ["q_proj", "v_proj", "gate_proj", "down_proj"]
_GPT2 = ["c_attn", "c_fc", "c_proj"]


def llama(**settings: Any) -> Config:
    return lambda: LoraConfig(**{"r": 4, "target_modules": _LLAMA, **settings})


def gpt2(**settings: Any) -> Config:
    return lambda: LoraConfig(**{"r": 4, "target_modules": _GPT2, "fan_in_fan_out": True, **settings})


def other(kind: str, **settings: Any) -> Config:
    return lambda: getattr(peft, kind)(**{"target_modules": _LLAMA, **settings})


#: name -> (family, config, how many tensors change: A of readers, magnitudes, what was trained as a whole, biases of B)
EXACT: dict[str, tuple[str, Config, int]] = {
    "lora": ("llama", llama(), 6),
    "other ranks and scales": ("llama", llama(use_rslora=True, rank_pattern={"q_proj": 2}), 6),
    "dora": ("llama", llama(use_dora=True, lora_alpha=16, alpha_pattern={"q_proj": 3}), 12),
    "every bias": ("llama", llama(bias="all"), 6),
    "a trained head": ("llama", llama(modules_to_save=["lm_head"]), 6),
    "a reader that is trained as a whole": ("llama", llama(target_modules=["q_proj"], modules_to_save=["up_proj"]), 4),
    "an embedding": ("llama", llama(target_modules=["embed_tokens", "q_proj"]), 2),
    "adalora": ("llama", other("AdaLoraConfig", init_r=6, total_step=100, tinit=10, tfinal=10), 6),
    "loha": ("llama", other("LoHaConfig", r=4), 6),
    "ia3": ("llama", other("IA3Config", feedforward_modules=["down_proj"]), 0),
    "vera behind no norm": ("llama", other("VeraConfig", r=4, target_modules=["down_proj"]), 0),
    "a norm with a bias": ("gpt2", gpt2(), 18),
    "a norm and a B with biases": ("gpt2", gpt2(lora_bias=True), 12),
    "trained biases": ("gpt2", gpt2(bias="lora_only"), 24),
    "a whole layer with its bias": ("gpt2", gpt2(target_modules=["c_attn"], modules_to_save=["mlp.c_fc"]), 12),
}
REFUSED: dict[str, tuple[str, Config, str]] = {
    "vera": ("llama", other("VeraConfig", r=4, target_modules=["q_proj"]), "q_proj reads the folded .*input_layernorm"),
    "lokr": ("llama", other("LoKrConfig", r=4), "no form"),
    "oft": ("llama", other("OFTConfig", oft_block_size=4), "no form"),
    "a norm": ("llama", other("LNTuningConfig", target_modules=["input_layernorm"]), "changed by a fold"),
    "a norm as a whole": ("llama", llama(modules_to_save=["input_layernorm"]), "trains a norm that is folded"),
    "a bias of a norm": ("gpt2", gpt2(bias="all"), "ln_1.bias: it trains a norm that is folded"),
    "dora with a bias": ("gpt2", gpt2(use_dora=True), "whose bias has no place"),
    "a parameter": (
        "llama",
        llama(target_modules=["v_proj"], target_parameters=["q_proj.weight"]),
        r"its target_parameters \(q_proj.weight\) adapt parameters",
    ),
    "experts": ("mixtral", llama(target_modules=[], target_parameters=["experts.down_proj"]), "experts.down_proj"),
    "an unknown kind": ("llama", other("FourierFTConfig", n_frequency=10), "kind FOURIERFT"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`llama`, `gpt2` and `mixtral`, and `*-folded`, their folded forms."""
    root = tmp_path_factory.mktemp("adapters")
    for family in ("llama", "gpt2", "mixtral"):
        model = mixtral() if family == "mixtral" else tiny_model(family)
        if family == "llama":
            with torch.no_grad():
                model.get_parameter(ZERO[0])[ZERO[1]] = 0.0
        model.save_pretrained(root / family)
        patch_checkpoint(root / family, root / f"{family}-folded")
    return root


def base_model(folder: Path) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    if model.config.model_type == "mixtral":
        model.set_experts_implementation("eager")  # PyTorch's grouped product has no fp64
    return model


def trained(folder: Path, config: Config, out: Path) -> torch.Tensor:
    """Write an adapter of the model in `folder`, none of whose values is the initial one; its logits."""
    model = get_peft_model(base_model(folder).float(), config(), autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.save_pretrained(out)
    return logits(folder, out)


def logits(folder: Path, adapter: Path) -> torch.Tensor:
    model = PeftModel.from_pretrained(base_model(folder), adapter).eval()
    with torch.no_grad():
        found: torch.Tensor = model(**tiny_inputs("llama", 2, 16)).logits
    return found


def assert_same(ours: torch.Tensor, stock: torch.Tensor) -> None:
    assert (ours - stock).abs().max() <= _ROUNDINGS * stock.abs().max()


@pytest.fixture
def convert(folders: Path, tmp_path: Path) -> Callable[..., AdapterResult]:
    """Convert `adapter` of a family into a new folder."""

    def run(adapter: Path, family: str = "llama", out: str = "converted", **options: Any) -> AdapterResult:
        return convert_adapter(adapter, folders / f"{family}-folded", tmp_path / out, **options)

    return run


@pytest.mark.parametrize("case", EXACT)
@pytest.mark.rotates(3)
def test_it_computes_the_same_on_the_folded_model_and_back(
    folders: Path, tmp_path: Path, convert: Callable[..., AdapterResult], case: str
) -> None:
    family, config, changed = EXACT[case]
    expected = trained(folders / family, config, tmp_path / "stock")
    there = convert(tmp_path / "stock", family)
    assert len(there.changed) == changed
    assert_same(logits(folders / f"{family}-folded", there.out), expected)
    back = convert(there.out, family, "back", back=True)
    assert_same(logits(folders / family, back.out), expected)


def test_it_finds_the_modules_of_a_model_whose_files_have_other_names(tmp_path: Path) -> None:
    assert saved_twin("qwen2_vl", tmp_path / "model")
    edit(tmp_path / "model", randomise)
    patch_checkpoint(tmp_path / "model", tmp_path / "folded")
    tokens = torch.arange(16).reshape(2, 8)

    def read(folder: str) -> nn.Module:
        model: nn.Module = AutoModelForImageTextToText.from_pretrained(tmp_path / folder, dtype=torch.float64)
        return model

    def logits(folder: str, adapter: str) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = PeftModel.from_pretrained(read(folder), tmp_path / adapter).eval()(tokens).logits
        return found

    config = LoraConfig(
        r=4, target_modules=r".*language_model.*(q_proj|gate_proj|down_proj)", modules_to_save=["v_proj"]
    )
    model = get_peft_model(read("model").float(), config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path / "stock")
    there = convert_adapter(tmp_path / "stock", tmp_path / "folded", tmp_path / "there")
    assert there.changed
    assert_same(logits("folded", "there"), logits("model", "stock"))
    assert not torch.allclose(logits("folded", "stock"), logits("model", "stock"), rtol=1e-3)
    convert_adapter(tmp_path / "there", tmp_path / "folded", tmp_path / "back", back=True)
    assert_same(logits("model", "back"), logits("model", "stock"))


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_exact_form_is_refused_by_name(
    folders: Path, tmp_path: Path, convert: Callable[..., AdapterResult], case: str
) -> None:
    family, config, why = REFUSED[case]
    trained(folders / family, config, tmp_path / "stock")
    with pytest.raises(NegativeVerdict, match=why):
        convert(tmp_path / "stock", family)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stock"]


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"init_lora_weights": "pissa"}, "pissa.* changes the weights of the base model"),
        ({"use_qalora": True}, "use_qalora of its config computes more"),
    ],
)
def test_a_variant_of_lora_is_refused_by_the_name_of_its_setting(
    folders: Path, tmp_path: Path, convert: Callable[..., AdapterResult], values: dict[str, Any], why: str
) -> None:
    trained(folders / "llama", llama(), tmp_path / "stock")
    _edit_config(tmp_path / "stock", **values)
    with pytest.raises(NegativeVerdict, match=why):
        convert(tmp_path / "stock")


def test_an_adapter_that_was_trained_on_the_patched_model_serves_the_stock_one(
    folders: Path, tmp_path: Path, convert: Callable[..., AdapterResult]
) -> None:
    model = get_peft_model(memopt.load(folders / "llama-folded"), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        model(**tiny_inputs("llama", 2, 16)).loss.backward()
        optimizer.step()
    model.save_pretrained(tmp_path / "trained")
    result = convert(tmp_path / "trained", back=True)
    assert result.base == str(folders / "llama")
    expected = logits(folders / "llama-folded", tmp_path / "trained")
    again = PeftModel.from_pretrained(memopt.load(folders / "llama-folded"), tmp_path / "trained").eval()
    assert torch.equal(again(**tiny_inputs("llama", 2, 16)).logits, model.eval()(**tiny_inputs("llama", 2, 16)).logits)
    assert_same(logits(folders / "llama", result.out), expected)
    assert not torch.allclose(logits(folders / "llama", tmp_path / "trained"), expected, rtol=1e-3)


def test_every_element_is_rounded_once(folders: Path, tmp_path: Path, convert: Callable[..., AdapterResult]) -> None:
    trained(folders / "llama", llama(), tmp_path / "stock")
    path = tmp_path / "stock" / "adapter_model.safetensors"
    half = {name: tensor.bfloat16() for name, tensor in load_file(path).items()}
    save_file(half, path, {"format": "pt"})
    found = load_file(convert(tmp_path / "stock").out / path.name)
    gamma = load_file(folders / "llama" / "model.safetensors")["model.layers.0.input_layernorm.weight"]
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert torch.equal(found[key], (half[key].double() * gamma.double()).bfloat16())
    rest = key.replace("lora_A", "lora_B")
    assert torch.equal(found[rest], half[rest])


def test_what_the_stock_norm_multiplies_by_zero_cannot_come_back(
    folders: Path, tmp_path: Path, convert: Callable[..., AdapterResult]
) -> None:
    trained(folders / "llama-folded", llama(), tmp_path / "trained")
    with pytest.raises(NegativeVerdict, match=r"layers\.1\.mlp\.gate_proj\.lora_A\.weight: the norm's scale is zero"):
        convert(tmp_path / "trained", back=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trained"]


def _edit_config(folder: Path, **values: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _other_norms(folders: Path, adapter: Path) -> dict[str, Any]:
    tiny_model("llama", seed=1).save_pretrained(adapter.parent / "other")
    _edit_config(adapter, base_model_name_or_path=str(adapter.parent / "other"))
    return {}


def _other_width(folders: Path, adapter: Path) -> dict[str, Any]:
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    key = next(name for name in tensors if "q_proj.lora_A" in name)
    save_file({**tensors, key: tensors[key][:, :32].contiguous()}, path)
    return {}


def _other_modules(folders: Path, adapter: Path) -> dict[str, Any]:
    path = adapter / "adapter_model.safetensors"
    save_file({name.replace("q_proj", "query"): tensor for name, tensor in load_file(path).items()}, path)
    return {}


def _folded_base(folders: Path, adapter: Path) -> dict[str, Any]:
    _edit_config(adapter, base_model_name_or_path=str(folders / "llama-folded"))
    return {}


def _wrong_way(folders: Path, adapter: Path) -> dict[str, Any]:
    return {"back": True}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_other_norms, "its base model .*other' has other norms"),
        (_other_width, r"q_proj.lora_A.weight and its pair are for a weight \(64, 32\), the model's is \(64, 64\)"),
        (_other_modules, "the model has no module for .*query.lora_A"),
        (_folded_base, "it was trained on the folded model .*memopt unpatch --adapter"),
        (_wrong_way, "it was trained on the stock model .*memopt patch --adapter"),
    ],
)
def test_an_adapter_of_another_model_is_refused(
    folders: Path,
    tmp_path: Path,
    convert: Callable[..., AdapterResult],
    change: Callable[[Path, Path], dict[str, Any]],
    why: str,
) -> None:
    trained(folders / "llama", llama(), tmp_path / "stock")
    options = change(folders, tmp_path / "stock")
    with pytest.raises(ModelError, match=why):
        convert(tmp_path / "stock", **options)
    assert not (tmp_path / "converted").exists()


def test_a_converted_adapter_says_what_it_fits_and_is_not_converted_twice(
    folders: Path, tmp_path: Path, convert: Callable[..., AdapterResult]
) -> None:
    trained(folders / "llama", llama(), tmp_path / "stock")
    (tmp_path / "stock" / "README.md").write_text("# Mine\n")
    result = convert(tmp_path / "stock")
    assert (result.out / "README.md").read_text() == "# Mine\n"
    record = json.loads((result.out / "memopt.json").read_text())
    assert (record["kind"], record["fits"]["form"], record["fits"]["base_model"]) == ("adapter", "folded", "llama")
    with pytest.raises(ModelError, match="fits the folded form of llama"):
        convert(result.out, out="twice")
    record["fits"]["affines"] = "0"
    (result.out / "memopt.json").write_text(json.dumps(record))
    with pytest.raises(ModelError, match="fits the folded form of llama, with other weights or folds"):
        convert(result.out, out="back", back=True)


def test_a_base_model_that_is_not_here_is_a_note(
    folders: Path, tmp_path: Path, convert: Callable[..., AdapterResult]
) -> None:
    trained(folders / "llama", llama(), tmp_path / "stock")
    _edit_config(tmp_path / "stock", base_model_name_or_path="org/somewhere")
    (text,) = convert(tmp_path / "stock").notes
    assert "'org/somewhere' is not here" in text


def test_the_model_itself_tells_how_it_is_folded(folders: Path, tmp_path: Path) -> None:
    """Without the patched folder: the recipe says which folds there will be."""
    trained(folders / "llama", llama(), tmp_path / "stock")
    result = convert_adapter(tmp_path / "stock", folders / "llama", tmp_path / "converted")
    with_folder = convert_adapter(tmp_path / "stock", folders / "llama-folded", tmp_path / "other")
    name = "adapter_model.safetensors"
    assert (result.out / name).read_bytes() == (with_folder.out / name).read_bytes()
    assert result.fits == with_folder.fits
    with pytest.raises(NegativeVerdict, match="fits the stock and the patched"):
        convert_adapter(tmp_path / "stock", folders / "llama", tmp_path / "none", recipe="exact-unfolded")


@pytest.mark.parametrize("broken", ["no weights", "a pickle", "no config", "not JSON"])
def test_a_broken_folder_is_one_sentence(folders: Path, tmp_path: Path, broken: str) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    if broken != "no config":
        (folder / "adapter_config.json").write_text("{" if broken == "not JSON" else '{"peft_type": "LORA"}')
    if broken == "a pickle":
        (folder / "adapter_model.bin").write_bytes(b"\x80")
    if broken == "not JSON":
        shutil.copyfile(folders / "llama" / "model.safetensors", folder / "adapter_model.safetensors")
    with pytest.raises(MemoptError, match=r"adapter_model\.safetensors|adapter_config\.json"):
        convert_adapter(folder, folders / "llama-folded", tmp_path / "out")
