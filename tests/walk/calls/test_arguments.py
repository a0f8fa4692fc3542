"""What forwards that take no plain token ids are given: sounds, series, codes, hidden vectors, what docstrings tell."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from memopt.walk.calls import arguments
from memopt.walk.calls.arguments.request import Request
from memopt.walk.calls.inputs import Variant, runnable_calls
from tests.walk.configs import twin


class _Model(nn.Module):
    main_input_name = "input_ids"

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.config = PreTrainedConfig(**{"hidden_size": 8, "vocab_size": 50, **settings})


def _given(model: _Model, label: str = "plain", variant: Variant = "plain") -> dict[str, Any]:
    calls = runnable_calls(model.eval(), variants=(variant,))
    assert label in {call.label for call in calls}, calls.errors
    return next(call.kwargs for call in calls if call.label == label)


def _check(condition: bool) -> Tensor:
    if not condition:
        raise ValueError("these inputs do not fit")
    return torch.zeros(1)


class _Steps(_Model):
    main_input_name = "states"

    def forward(self, states: Tensor | None = None, actions: Tensor | None = None, steps: Any = None) -> Tensor:
        """Decide.

        Args:
            states (`torch.Tensor` of shape `(batch_size, episode_length, state_dim)`):
                What is.
            actions (`torch.Tensor` of shape `[batch_size, episode_length, act_dim * len(config.joints)]`):
                What was done.
            steps (`torch.LongTensor` of shape `(batch_size, config.n_steps + 1)`, *optional*):
                When.
        """
        assert states is not None
        assert actions is not None
        return _check(states.shape[-1] == 17 and actions.shape[-1] == 6)


def test_arguments_are_made_as_the_docstring_describes_them() -> None:
    given = _given(_Steps(state_dim=17, act_dim=3, joints=[1, 2], n_steps=4))
    assert given["actions"].shape == (2, 16, 6)
    assert "steps" not in given


class _NeedsSteps(_Steps):
    def forward(self, states: Any = None, actions: Any = None, steps: Any = None) -> Tensor:
        return _check(steps is not None and steps.shape == (2, 5) and not steps.is_floating_point())

    forward.__doc__ = _Steps.forward.__doc__


def test_what_the_docstring_calls_optional_is_tried_too() -> None:
    assert set(_given(_NeedsSteps(state_dim=17, act_dim=3, joints=[1], n_steps=4))) == {"states", "actions", "steps"}


class _OnePrompt(_Model):
    def forward(self, input_ids: Tensor, marks: torch.LongTensor) -> Tensor:
        """Mark.

        Args:
            marks (`torch.LongTensor` of shape `(num_marks,)`):
                Positions in the prompt.
        """
        return marks[0][:1] + 0


def test_what_is_described_for_one_row_is_given_for_a_batch() -> None:
    assert _given(_OnePrompt())["marks"].shape == (2, 2)


class _Heard(_Model):
    main_input_name = "input_features"

    def forward(self, input_features: Tensor, input_features_mask: Tensor) -> Tensor:
        return _check(input_features.shape[1:] == (20, input_features_mask.shape[1]))


def test_a_spectrogram_comes_with_a_mask_of_its_frames() -> None:
    assert _given(_Heard(num_mel_bins=20))["input_features_mask"].all()


def test_a_padded_spectrogram_masks_the_end_of_one_row() -> None:
    mask = _given(_Heard(num_mel_bins=20), "padded", "padded")["input_features_mask"]
    assert mask[0].all()
    assert mask[-1, 0] == 1
    assert mask[-1, -1] == 0


class _Packed(_Model):
    main_input_name = "input_features"

    def forward(self, input_features: Tensor, feature_lens: Tensor | None = None) -> Tensor:
        assert feature_lens is not None
        return _check(input_features.shape == (20, int(feature_lens.sum())) and not input_features.shape[1] % 100)


def test_spectrograms_in_one_row_come_with_lengths_in_whole_windows() -> None:
    assert _given(_Packed(num_mel_bins=20, n_window=50))["feature_lens"].tolist() == [200, 200]


class _Frames(_Model):
    main_input_name = "hidden_states"

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(11, 4)

    def forward(self, hidden_states: Tensor, num_patches: int, mask: torch.BoolTensor) -> Tensor:
        _check(num_patches == 1 and mask.dtype == torch.bool)
        output: Tensor = self.linear(hidden_states)
        return output


def test_hidden_vectors_are_as_wide_as_the_first_layer_takes_them() -> None:
    assert _given(_Frames())["hidden_states"].shape == (2, 16, 11)


class _Wave(_Model):
    main_input_name = "input_values"

    def forward(self, input_values: Tensor) -> Tensor:
        return _check(input_values.shape[-1] % self.config.hop_length == 0)


def test_a_wave_has_whole_frames() -> None:
    assert _given(_Wave(hop_length=700))["input_values"].shape == (2, 4200)


class _TwoTowers(_Model):
    def forward(self, input_ids: Tensor | None = None, input_features: Tensor | None = None) -> Tensor:
        return _check(input_ids is not None and input_features is not None and input_features.shape[1] == 20)


def test_two_towers_get_text_and_sound() -> None:
    assert set(_given(_TwoTowers(num_mel_bins=20))) == {"input_ids", "input_features"}


class _Listens(_Model):
    def get_audio_features(self, input_features: Tensor, input_features_mask: Tensor) -> Tensor:
        _check(input_features.shape[1] == 20 and input_features_mask.shape[-1] == input_features.shape[-1])
        return torch.zeros(2, input_features.shape[-1] // 32, 8)

    def forward(
        self, input_ids: Tensor, input_features: Tensor | None = None, input_features_mask: Tensor | None = None
    ) -> Tensor:
        if input_features is not None:
            features = self.get_audio_features(input_features, input_features_mask)  # type: ignore[arg-type]
            _check(int((input_ids == self.config.audio_token_id).sum()) == features.shape[0] * features.shape[1])
        return torch.zeros(1)


def test_a_sound_in_text_gets_a_placeholder_token_for_each_feature() -> None:
    given = _given(_Listens(num_mel_bins=20, audio_token_id=49), "plain audio")
    assert (given["input_ids"] == 49).sum(-1).tolist() == [4, 4]


class _Series(_Model):
    main_input_name = "past_values"

    def forward(self, past_values: Tensor, past_time_features: Tensor, future_values: Tensor | None = None) -> Tensor:
        assert future_values is not None
        return _check(past_values.shape == (2, 27) and past_time_features.shape == (2, 27, 3))


def test_a_series_has_its_context_and_its_largest_lag() -> None:
    given = _given(_Series(context_length=20, lags_sequence=[1, 7], prediction_length=5, num_time_features=3))
    assert given["future_values"].shape == (2, 5)


class _Codes(_Model):
    def forward(self, input_ids: Tensor) -> Tensor:
        return _check(tuple(input_ids.shape) in self.config.shapes)


def test_ids_of_several_codebooks_come_in_columns_rows_batches_and_frames() -> None:
    for shape in ((2, 16, 3), (2, 3, 16), (6, 16), (2, 3)):
        assert _given(_Codes(num_codebooks=3, shapes=[shape]))["input_ids"].shape == shape


class _Embedded(_Model):
    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
    ) -> Tensor:
        return _check((input_ids is None) == self.config.embedded and (inputs_embeds is None) != self.config.embedded)


def test_a_model_that_refuses_ids_gets_hidden_vectors() -> None:
    assert _given(_Embedded(embedded=True))["inputs_embeds"].shape == (2, 16, 8)


class _Attends(_Embedded):
    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
    ) -> Tensor:
        assert encoder_hidden_states is not None
        return _check(encoder_hidden_states.shape[-1] == 24)


def test_a_decoder_attends_to_vectors_of_the_width_that_its_config_says() -> None:
    assert _given(_Attends(encoder_hidden_size=24))["encoder_hidden_states"].shape == (2, 16, 24)


class _Patched(_Model):
    def forward(self, input_ids: Tensor, patch_ids: Tensor | None = None, num_patches: int | None = None) -> Tensor:
        return _check(patch_ids is not None and patch_ids.shape == input_ids.shape and num_patches == 1)


def test_what_the_names_of_arguments_tell_is_tried_last() -> None:
    assert set(_given(_Patched())) == {"input_ids", "patch_ids", "num_patches"}


class _Eyes(_Model):
    def get_image_features(self, pixel_values: Tensor) -> Tensor:
        return torch.zeros(pixel_values.shape[0], 4, 8)


class _Robot(_Model):
    main_input_name = "state"

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.eyes = _Eyes()

    def forward(
        self,
        state: Tensor,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        pixel_attention_mask: torch.BoolTensor | None = None,
    ) -> Tensor:
        assert pixel_values is not None
        assert pixel_attention_mask is not None
        return _check(state.shape[-1] == 5 and pixel_attention_mask.shape == pixel_values.shape[:2])


def test_a_robot_gets_its_state_and_a_mask_of_its_cameras() -> None:
    given = _given(_Robot(max_state_dim=5, image_token_id=49, image_size=16), "plain image")
    assert given["pixel_attention_mask"].tolist() == [[True, True], [True, True]]


def test_a_config_that_a_rule_stumbles_over_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def stumbles(request: Request) -> Iterator[tuple[str, dict[str, Any]]]:
        yield "first", {}
        raise ZeroDivisionError

    monkeypatch.setattr(arguments, "RULES", (("main", stumbles), ("main", arguments.text)))
    names = [name for name, _ in arguments.candidates(twin("bert"), "plain", 0)]
    assert names[:2] == ["main:first", "main:"]
