"""Inputs that run, for every family, and targets that give a loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from memopt.errors import ModelError
from memopt.walk.calls.inputs import Call, proposed, runnable_calls, training_targets
from memopt.walk.calls.twin import build_twin
from memopt.walk.models.build import build_meta
from tests.walk.configs import FAMILIES, MASKED, inputs_of, make_config, tiny_llama, twin, twin_calls

WITH_LABELS = [name for name in FAMILIES if name != "clip_vision"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_runs_plain_and_odd_calls_in_both_modes(family: str) -> None:
    calls = twin_calls(family)
    assert {"plain", "odd"} <= {call.label for call in calls}
    assert not [label for label, error in calls.errors if "other mode" in error]


@pytest.mark.parametrize("family", MASKED)
def test_every_family_with_a_mask_runs_a_padded_call(family: str) -> None:
    padded = next(call for call in twin_calls(family) if call.label == "padded")
    mask = padded.kwargs["attention_mask"]
    assert mask[0].all()
    assert mask[-1, 0] == 1
    assert mask[-1, -1] == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.rotates(3)
def test_every_family_runs_on_meta_in_its_real_shape(family: str) -> None:
    assert "plain" in {call.label for call in runnable_calls(build_meta(make_config(family)), variants=("plain",))}


@pytest.mark.parametrize("family", WITH_LABELS)
def test_every_family_gets_targets_for_a_loss(family: str) -> None:
    model = twin(family)
    inputs = inputs_of(model)
    loss = model(**inputs, **training_targets(model, inputs)).loss
    assert loss.isfinite()


def test_the_same_seed_gives_the_same_inputs() -> None:
    model = twin("bert")
    one, other = inputs_of(model, seed=1), inputs_of(model, seed=1)
    assert torch.equal(one["input_ids"], other["input_ids"])
    assert not torch.equal(one["input_ids"], inputs_of(model, seed=2)["input_ids"])


def test_token_ids_are_ordinary() -> None:
    model = twin("bart")
    special = {model.config.eos_token_id, model.config.bos_token_id, model.config.pad_token_id, 0, 1, 2, 3}
    ids = inputs_of(model)["input_ids"]
    assert not special & set(ids.flatten().tolist())
    assert ids.max() < model.config.vocab_size


def test_inputs_hold_no_labels_and_no_cache() -> None:
    inputs = inputs_of(twin("llama"))
    assert "labels" not in inputs
    assert inputs["use_cache"] is False


def test_an_encoder_decoder_gets_decoder_ids() -> None:
    assert inputs_of(twin("t5"))["decoder_input_ids"].shape == (2, 16)


def test_the_odd_variant_has_an_odd_length() -> None:
    assert inputs_of(twin("llama"), variant="odd")["input_ids"].shape[1] % 2 == 1


def test_images_have_the_side_that_a_module_states_where_the_config_states_none() -> None:
    model: Any = build_meta(transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1]))
    model.resnet.encoder.img_size = (48, 32)
    assert inputs_of(model)["pixel_values"].shape[-2:] == (48, 32)


def test_the_odd_variant_has_a_side_that_no_window_divides() -> None:
    model = twin("swin")
    patches = inputs_of(model, variant="odd")["pixel_values"].shape[-1] // model.config.patch_size
    assert patches % model.config.window_size


def test_inputs_have_the_dtype_and_the_device_of_the_model() -> None:
    in_doubles, on_meta = build_twin(make_config("vit"), dtype=torch.float64), build_meta(make_config("llama"))
    assert next(proposed(in_doubles, ["plain"], 0)).kwargs["pixel_values"].dtype is torch.float64
    assert next(proposed(on_meta, ["plain"], 0)).kwargs["input_ids"].is_meta


def test_inputs_do_not_touch_the_global_generator() -> None:
    model = twin("bert")
    before = torch.random.get_rng_state()
    inputs = inputs_of(model)
    runnable_calls(model)
    training_targets(model, inputs)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_model_without_config_needs_inputs_of_the_user() -> None:
    with pytest.raises(ModelError, match="Linear: it has no transformers config"):
        inputs_of(nn.Linear(2, 2))
    assert "pass inputs" in runnable_calls(nn.Identity()).errors[0][1]


def test_any_module_runs_with_inputs_of_the_user() -> None:
    calls = runnable_calls(nn.Linear(2, 2), {"input": torch.ones(1, 2)})
    assert [call.label for call in calls] == ["inputs"]


def test_inputs_that_do_not_fit_are_reported() -> None:
    calls = runnable_calls(nn.Linear(2, 2), {"input": torch.ones(1, 3)})
    assert list(calls) == []
    assert calls.errors[0][0] == "inputs"
    assert "shapes cannot be multiplied" in calls.errors[0][1]


def test_an_adapted_model_runs_like_its_base() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build_twin(tiny_llama()), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert {"plain", "padded", "odd"} == {call.label for call in runnable_calls(model)}


def test_a_caller_may_run_the_forwards_itself() -> None:
    seen: list[str] = []

    def run(model: nn.Module, call: Call) -> Any:
        seen.append("train" if model.training else "eval")
        return call.run(model)

    runnable_calls(twin("bert"), variants=("plain",), run=run)
    assert seen == ["eval", "train"]


class _Writes(nn.Module):
    """A forward that changes its module, as windowed attention and batch norm do."""

    def __init__(self) -> None:
        super().__init__()
        self.window = 7
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.window = min(self.window, x.shape[0])
        self.mean += x.mean()
        return x + torch.rand(1)


def test_trying_a_call_leaves_the_model_as_it_was() -> None:
    model = _Writes().eval()
    assert [call.label for call in runnable_calls(model, {"x": torch.ones(3, 2)})] == ["inputs"]
    assert (model.window, model.mean.tolist(), model.training) == (7, [0.0, 0.0], False)


class _InsistsOnFloat32(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x.float())
        return y.float().masked_fill(y > 0, torch.finfo(x.dtype).min)


def test_a_model_of_doubles_runs_in_doubles_where_its_code_insists_on_less() -> None:
    assert runnable_calls(_InsistsOnFloat32().double(), {"x": torch.ones(3, 2, dtype=torch.float64)})


class _ReadsSizes(nn.Module):
    """Splits packed images by their sizes, which it moves to its own device first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, device="meta")

    def forward(self, pixel_values: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        lengths = sizes.to(self.linear.weight.device).prod(-1)
        return torch.stack([self.linear(part).mean(0) for part in pixel_values.split(lengths.tolist())])


def test_a_forward_that_reads_sizes_runs_on_meta() -> None:
    given = {"pixel_values": torch.empty(26, 4), "sizes": torch.tensor([[2, 3], [4, 5]])}
    (call,) = runnable_calls(_ReadsSizes(), given)
    assert call.kwargs["pixel_values"].is_meta
    assert call.kwargs["sizes"].tolist() == [[2, 3], [4, 5]]


class _NeedsTypesToTrain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = tiny_llama()
        self.embedding = nn.Embedding(61, 4)

    def forward(self, input_ids: torch.Tensor, token_type_ids: torch.Tensor | None = None) -> torch.Tensor:
        if self.training and token_type_ids is None:
            raise ValueError("token types are needed in training")
        return self.embedding(input_ids)


def test_a_call_that_runs_in_both_modes_is_preferred() -> None:
    calls = runnable_calls(_NeedsTypesToTrain().eval(), variants=("plain",))
    assert "token_type_ids" in calls[0].kwargs
    assert calls.errors == (("plain", "in the other mode: ValueError: token types are needed in training"),)


def test_an_image_in_text_gets_placeholder_tokens() -> None:
    call = next(call for call in twin_calls("qwen2_vl") if call.label == "plain image")
    assert (call.kwargs["input_ids"] == twin("qwen2_vl").config.image_token_id).any()
    assert "pixel_values" in call.kwargs


@pytest.mark.parametrize(
    ("family", "architecture"),
    [
        ("bart", "BartForSequenceClassification"),
        ("bert", "BertForMultipleChoice"),
        ("bert", "BertForQuestionAnswering"),
        ("bert", "BertForTokenClassification"),
        ("bert", "BertForPreTraining"),
        ("llama", "LlamaForSequenceClassification"),
    ],
)
def test_every_head_runs_and_gets_targets(family: str, architecture: str) -> None:
    settings = {"pad_token_id": 3} if family == "llama" else {}
    model = build_twin(make_config(family, architectures=[architecture], **settings), dtype=torch.float32)
    inputs = runnable_calls(model, variants=("plain",))[0].kwargs
    assert model(**inputs, **training_targets(model, inputs)).loss.isfinite()


def test_padding_is_not_a_target() -> None:
    model = twin("bert")
    inputs = inputs_of(model, variant="padded")
    labels = training_targets(model, inputs)["labels"]
    assert torch.equal(labels == -100, inputs["attention_mask"] == 0)


def test_regression_gets_numbers() -> None:
    model = build_twin(make_config("bert", architectures=["BertForSequenceClassification"], num_labels=1))
    assert training_targets(model, inputs_of(model))["labels"].is_floating_point()


def test_a_problem_type_that_the_model_guessed_is_not_kept() -> None:
    model = build_twin(make_config("bert", architectures=["BertForSequenceClassification"], num_labels=3))
    training_targets(model, inputs_of(model))
    assert model.config.problem_type is None


def test_a_model_without_a_loss_gets_no_targets() -> None:
    model = twin("clip_vision")
    assert training_targets(model, inputs_of(model)) == {}
