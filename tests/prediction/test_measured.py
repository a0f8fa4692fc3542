"""Predicted peaks are those of real steps: of live storages, and of what PyTorch's allocator reports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
import transformers
from torch import nn

import benchmarks.prediction
import memopt.prediction.peak
from benchmarks.prediction import LIMIT, PAIRS, Pair, measure
from memopt.errors import ModelError
from memopt.integrations.release import release_gradients
from memopt.plan.recipe import load_recipe
from memopt.prediction import measure as measure_module
from memopt.prediction.measure import RealStep, compare
from memopt.prediction.peak import predict
from memopt.prediction.setup import Optimizer, Setup
from memopt.trace.events import Event, Trace
from memopt.trace.trace import Step, parameters_of, subject, trace, with_idle
from memopt.trace.training import Checkpointing, Precision, Request, Training
from tests.factories import tiny_inputs, tiny_model
from tests.trace.builders import named_config, sites_of
from tests.trace.test_images import llava

FAST = [
    Pair("llama", "full", "none"),
    Pair("llama", "lora", "levels"),
    Pair("bert", "full", "exact"),
    Pair("vit", "full", "int8"),
    Pair("llama", "lora", "none", "bf16-autocast"),
    Pair("bert", "lora", "exact", "bf16-autocast"),
    Pair("llama", "full", "checkpointing", setup=Setup("sgd")),
]


def step_of(name: str, recipe: str | None, checkpointing: Checkpointing, frozen: tuple[str, ...] = ()) -> Step:
    config = named_config(name)
    training = Training(2, 64, precision="fp32", checkpointing=checkpointing, cuda_kernels=False, frozen=frozen)
    return Step(config, training, sites_of(config), load_recipe(recipe) if recipe else None)


@pytest.mark.parametrize("pair", FAST, ids=str)
@pytest.mark.rotates(3)
def test_the_predicted_peak_is_that_of_a_real_step(pair: Pair) -> None:
    row = measure(replace(pair, depth=1))
    assert abs(row.error) <= LIMIT
    assert abs(row.beside_allocator) <= LIMIT


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("recipe", [None, "exact-unfolded"])
@pytest.mark.parametrize("name", ["llama", "gpt2", pytest.param("t5", marks=pytest.mark.slow)])
@pytest.mark.rotates(3)
def test_released_gradients_leave_what_they_leave_in_a_real_step(
    name: str, recipe: str | None, checkpointing: Checkpointing
) -> None:
    """GPT-2's head is its embedding, whose gradient is complete at the end of backward alone."""
    of = step_of(name, recipe, checkpointing)
    real = RealStep(of, Setup())
    release_gradients(real.optimizer)
    real.run()
    found = predict(of, Setup(release_gradients=True)).peak.nbytes
    assert found == pytest.approx(real.live_peak(), abs=256)  # scalars that die when Python says
    assert found <= predict(of).peak.nbytes


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("recipe", [None, "exact-unfolded"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.rotates(3)
def test_gradients_that_accumulate_take_what_they_take_in_a_real_step(
    name: str, recipe: str | None, checkpointing: Checkpointing
) -> None:
    """A later micro-batch adds each gradient to the one that lives already, and frees it."""
    of = step_of(name, recipe, checkpointing)
    real = RealStep(of, setup := Setup(accumulation=3))
    real.run()
    found = predict(of, setup).peak.nbytes
    assert found == pytest.approx(real.live_peak(), abs=256)
    assert found > predict(of).peak.nbytes


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("recipe", [None, "exact-unfolded"])
@pytest.mark.parametrize(
    ("name", "frozen"), [("llama", ("embed_tokens", "layers.0")), ("t5", ("encoder",)), ("bert", ("LayerNorm", "pos*"))]
)
@pytest.mark.rotates(3)
def test_what_is_frozen_takes_what_it_takes_in_a_real_step(
    name: str, frozen: tuple[str, ...], recipe: str | None, checkpointing: Checkpointing
) -> None:
    of = step_of(name, recipe, checkpointing, frozen)
    real = RealStep(of, Setup())
    real.run()
    found = predict(of).peak.nbytes
    assert found == pytest.approx(real.live_peak(), abs=256)
    assert found < predict(of.trained(frozen=())).peak.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("saved", [("embed_tokens", "lm_head"), ("up_proj",)])
def test_modules_to_save_are_trained_as_peft_trains_them(saved: tuple[str, ...], dtype: torch.dtype) -> None:
    model, precision = tiny_model("llama", dtype), "fp32" if dtype == torch.float32 else "bf16"
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=list(saved))
    live = [each for each in peft.get_peft_model(model, lora).parameters() if each.requires_grad]
    asked = Request(
        "MODEL", train="lora", lora_rank=4, lora_targets="q_proj", modules_to_save=saved, precision=precision
    )
    config = model.config
    config.architectures = ["LlamaForCausalLM"]
    training = replace(asked.training, batch=2, seq=16, cuda_kernels=False)
    of = Step(config, training, sites_of(config), load_recipe("exact-unfolded"))
    traced = trace(of).parameters
    assert sorted((each.shape, str(each.dtype)) for each in traced if each.trained) == sorted(
        (tuple(each.shape), str(each.dtype)) for each in live
    )
    real = RealStep(of, Setup())
    real.run()
    assert predict(of).peak.nbytes == pytest.approx(real.live_peak(), abs=256)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-autocast"])
@pytest.mark.parametrize("recipe", [None, "exact-unfolded", "exact-levels"])
@pytest.mark.parametrize(("name", "dropout"), [("llama", 0.1), ("bert", 0.0)])
@pytest.mark.rotates(3)
def test_the_adapters_of_dora_take_what_they_take_in_a_real_step(
    name: str, dropout: float, recipe: str | None, precision: Precision
) -> None:
    """Each forward normalises every adapted weight; both copies of it live for a moment."""
    config = named_config(name)
    asked = Request("MODEL", train="lora", use_dora=True, lora_dropout=dropout, precision=precision)
    training = replace(asked.training, batch=2, seq=64, cuda_kernels=False)
    of = Step(config, training, sites_of(config), load_recipe(recipe) if recipe else None)
    real = RealStep(of, Setup())
    real.run()
    found = predict(of).peak.nbytes
    assert found == pytest.approx(real.live_peak(), abs=256)
    assert found > predict(of.trained(use_dora=False)).peak.nbytes


def test_dora_on_4_bit_weights_is_an_error() -> None:
    config = named_config("llama")
    training = Training(2, 64, train="qlora", use_dora=True)
    with pytest.raises(ModelError, match="DoRA on 4-bit weights is not traced"):
        predict(Step(config, training, sites_of(config)))


@pytest.mark.parametrize(
    ("name", "saved", "why"), [("llama", "layers", "No modules were targeted"), ("vit", "layers", ".*ModuleList")]
)
def test_modules_that_peft_cannot_train_in_full_are_named_in_an_error(name: str, saved: str, why: str) -> None:
    config = named_config(name)
    training = Training(2, 64, train="lora", modules_to_save=(saved,))
    with pytest.raises(ModelError, match=f"PEFT cannot train these modules in full: {why}") as raised:
        predict(Step(config, training, sites_of(config)))
    assert raised.value.hint == "Name others with --modules-to-save."


def test_a_module_to_save_that_is_none_is_an_error() -> None:
    config = named_config("llama")
    training = Training(2, 64, train="lora", modules_to_save=("lm_haed",))
    with pytest.raises(
        ModelError, match=r"No module is named 'lm_haed' \(--modules-to-save\). Outermost: model, lm_head"
    ):
        predict(Step(config, training, sites_of(config)))


@pytest.mark.parametrize(
    ("frozen", "why"),
    [
        (("embed_token",), "no module or parameter of LlamaForCausalLM. Its parts are named embed_tokens."),
        (("*norm*", "visual"), "'visual' (--freeze) is no module or parameter of LlamaForCausalLM."),
        (("model", "lm_head"), "nothing is left to train"),
        (("*",), "nothing is left to train"),
    ],
)
def test_a_name_that_freezes_nothing_or_everything_is_an_error(frozen: tuple[str, ...], why: str) -> None:
    config = named_config("llama")
    with pytest.raises(ModelError) as raised:
        predict(Step(config, Training(2, 64, frozen=frozen), sites_of(config)))
    assert why in str(raised.value)


@pytest.mark.parametrize("targets", [12, 120])
def test_the_step_of_a_ctc_loss_is_predicted(targets: int) -> None:
    """PyTorch's operator has no rule for fake tensors."""
    config = transformers.Wav2Vec2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, conv_dim=(32, 32),
        conv_kernel=(10, 3), conv_stride=(5, 2), num_feat_extract_layers=2, num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4, vocab_size=20, mask_time_prob=0.0, hidden_dropout=0.0, layerdrop=0.0,
    )  # fmt: skip
    config.architectures = ["Wav2Vec2ForCTC"]
    batch = {"input_values": torch.randn(2, 2000), "labels": torch.randint(1, 20, (2, targets))}
    training = Training(2, 128, precision="fp32", cuda_kernels=False)
    of = Step(config, training, sites_of(config), load_recipe("exact-unfolded"), inputs=batch)
    real = RealStep(of, Setup())
    real.run()
    found = predict(of)
    assert not any("Loss: none" in each for each in found.assumptions)
    assert found.peak.nbytes == pytest.approx(real.live_peak(), rel=0.005)
    guessed = predict(replace(of, inputs=None))
    assert not any("Loss: none" in each for each in guessed.assumptions)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_the_masks_of_a_padded_batch_are_predicted(name: str) -> None:
    """Without padding transformers makes none."""
    config, batch = named_config(name), tiny_inputs(name, 2, 64)
    batch["attention_mask"][1, 48:] = 0
    of = Step(config, Training(2, 64, precision="fp32", cuda_kernels=False), sites_of(config), inputs=batch)
    found, real = predict(of), RealStep(of, Setup())
    real.run()
    assert found.peak.nbytes == pytest.approx(real.live_peak(), rel=LIMIT)
    assert any("padding as in the batch" in each for each in found.assumptions)


@pytest.mark.parametrize("kind", ["Parakeet", "Lasr"])
def test_a_ctc_loss_that_reads_lengths_from_a_mask_is_predicted(kind: str) -> None:
    encoder = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = getattr(transformers, f"{kind}CTCConfig")(vocab_size=64, pad_token_id=0, encoder_config=encoder)
    config.architectures = [f"{kind}ForCTC"]
    of = Step(config, Training(2, precision="fp32", dropout=False, cuda_kernels=False), sites_of(config))
    found, real = predict(of), RealStep(of, Setup())
    real.run()
    assert not any("Loss: none" in each for each in found.assumptions)
    assert found.peak.nbytes == pytest.approx(real.live_peak(), rel=0.005)


@pytest.mark.parametrize(("kind", "has_loss"), [("BertForQuestionAnswering", True), ("BertModel", False)])
def test_a_loss_is_missing_only_if_the_forward_returns_none(kind: str, has_loss: bool) -> None:
    config = named_config("bert")
    config.architectures, config.num_labels = [kind], 2
    notes = predict(Step(config, Training(2, 16), sites_of(config))).assumptions
    assert any("Loss: none" in each for each in notes) != has_loss


@pytest.mark.parametrize("images", [0, 1])
def test_a_weight_without_a_gradient_has_no_optimizer_state(images: int) -> None:
    """Of LLaVA's tower, a step of text runs no block, and one with an image does not use the last."""
    config = llava()
    config.architectures = ["LlavaForConditionalGeneration"]
    config.vision_config.num_hidden_layers = 7
    of = Step(config, Training(1, 24, images=images, precision="fp32", cuda_kernels=False), sites_of(config))
    found, real = predict(of, Setup("adamw-foreach")), RealStep(of, Setup("adamw-foreach"))
    real.run()
    assert found.peak.nbytes == pytest.approx(real.live_peak(), rel=LIMIT)
    idle = {each.name for each in found.trace.parameters if each.is_idle}
    assert idle == {name for name, each in real.model.named_parameters() if each not in real.optimizer.state}
    assert any(text.startswith("No gradient in this step: ") for text in found.assumptions)
    if not images:  # the tower's last output but one is asked for by its place, so no block can be left out
        assert sum(each.is_idle for each in trace(of, subject(of, 4)).parameters) == len(idle)


def test_a_weight_that_only_chooses_indices_has_no_optimizer_state_and_an_idle_expert_has() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.indexer = nn.Linear(4, 4)
            self.experts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.experts[0](x) + self.indexer(x).argmax()

    blocks = nn.Sequential(Block(), Block())
    model = nn.ModuleDict({"blocks": blocks})
    blocks(torch.randn(2, 4)).sum().backward()
    found = with_idle(parameters_of(model), model, ["blocks.0", "blocks.1"])
    idle = {f"blocks.{block}.indexer.{name}" for block in (0, 1) for name in ("weight", "bias")}
    assert {each.name for each in found if each.is_idle} == idle


def test_a_weight_that_the_constructor_freezes_is_trained_since_a_load_makes_a_new_one(tmp_path: Path) -> None:
    stock = tiny_model("whisper")
    assert not stock.model.encoder.embed_positions.weight.requires_grad
    stock.save_pretrained(tmp_path)
    loaded, config = type(stock).from_pretrained(tmp_path), named_config("whisper")
    trained = {each.name for each in trace(Step(config, Training(1, 8), sites_of(config))).parameters if each.trained}
    assert trained == {name for name, each in loaded.named_parameters() if each.requires_grad}


def test_a_gradient_with_several_terms_is_kept_until_all_are_there() -> None:
    """ALBERT's layers share their parameters."""
    config = transformers.AlbertConfig(
        vocab_size=256, embedding_size=16, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=128, max_position_embeddings=64,
    )  # fmt: skip
    config.architectures = ["AlbertForMaskedLM"]
    of = Step(config, Training(2, 16, precision="fp32", cuda_kernels=False), sites_of(config))
    found = predict(of, Setup(release_gradients=True))
    freed = {each.storage: at for at, each in enumerate(found.events) if not each.allocated}
    gradients = found.trace.gradients
    terms = [each for each in freed if each.part == "gradients" and each not in gradients]
    assert terms
    for term in terms:
        assert all(freed[each] > freed[term] for each in gradients if each.shape == term.shape)


def test_an_optimizer_needs_room_for_each_released_gradient() -> None:
    config = named_config("llama")
    of = Step(config, Training(2, 64, precision="fp32", cuda_kernels=False), sites_of(config))
    peaks = {}
    optimizers: tuple[Optimizer, ...] = ("adamw-fused", "adafactor")
    for name in optimizers:
        found = predict(of, Setup(name, release_gradients=True))
        peaks[name] = found.peak.nbytes - sum(each.nbytes for each in found.resident)
        steps = [each for each in found.events if each.storage.part == "optimizer transients"]
        assert bool(steps) == (name == "adafactor")
        assert {each.moment for each in steps} <= {"optimizer step"}
        held = max(each.nbytes for each in found.trace.gradients)
        assert found.peak.parts["gradients"] <= 2 * held
        assert sum(event.change for event in found.events) == 0
    assert peaks["adafactor"] >= peaks["adamw-fused"]


def test_a_gradient_that_is_forgotten_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(traced: Trace, setup: Setup) -> object:
        gone = set(traced.gradients[:1])
        kept: tuple[Event, ...] = tuple(event for event in traced.events if event.storage not in gone)
        return combine(replace(traced, events=kept, gradients=traced.gradients[1:]), setup)

    combine = memopt.prediction.peak.combine
    monkeypatch.setattr(memopt.prediction.peak, "combine", forgetful)
    monkeypatch.setattr(benchmarks.prediction, "SEQ", 4)  # the weights outweigh what is saved
    row = measure(Pair("llama", "full", "none", setup=Setup("adafactor"), depth=1))
    assert row.predicted < row.live


def test_the_benchmark_has_thirty_pairs_or_more_of_eight_models() -> None:
    assert len(PAIRS) >= 30
    assert len({pair.model for pair in PAIRS}) == 8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--zoo", "--types", "bert", "bort"], "no model type bort"),
        (["--types", "bert"], "--types is about --zoo"),
        (["--zoo", "--json", "zoo.json"], "leave out --only and --json"),
    ],
)
def test_options_that_would_have_no_effect_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmarks.prediction, "zoo", lambda types, check: 0)
    monkeypatch.setattr(benchmarks.prediction, "PAIRS", [])
    with pytest.raises(SystemExit, match="2"):
        benchmarks.prediction.main(arguments)
    assert words in capsys.readouterr().err


def test_a_check_of_no_pair_passes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmarks.prediction.main(["--check", "--only", "lamb, full"]) == 2
    assert "'lamb, full'" in capsys.readouterr().err


def test_a_step_that_the_memory_has_no_room_for_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    config = named_config("llama")
    about = Step(config, Training(1, 8), sites_of(config), load_recipe("exact-unfolded"))
    monkeypatch.setattr(measure_module.psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 10))
    with pytest.raises(ModelError, match=r"takes \d+\.\d GiB, and 0\.0 GiB of memory are available"):
        compare(about)
