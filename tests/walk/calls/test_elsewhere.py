"""Inputs of models without a transformers config: kinds by names and layers, widths by layers that refuse others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt.walk.calls.inputs import runnable_calls
from memopt.walk.models.build import clone_to_meta
from tests.factories import tiny_model
from tests.zoo.relu_gpt import ReluGPT


class _Diffuses(nn.Module):
    """Patches of an image in a row, text, a pooled text, times, and places whose number has to fit."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Linear(1, 8)
        self.pooled, self.patches, self.text, self.axes = (nn.Linear(width, 8) for width in (12, 16, 20, 2))
        self.config = {"axes_dims_rope": (4, 4), "guidance_embeds": False}

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        pooled_projections: Tensor | None = None,
        timestep: Tensor | None = None,
        img_ids: Tensor | None = None,
        txt_ids: Tensor | None = None,
        guidance: Tensor | None = None,
        return_dict: bool = True,
    ) -> Tensor:
        assert encoder_hidden_states is not None
        assert pooled_projections is not None
        assert timestep is not None
        assert img_ids is not None
        assert txt_ids is not None
        assert guidance is None
        joined = torch.cat([self.text(encoder_hidden_states), self.patches(hidden_states)], 1)
        at = self.time(timestep[:, None].to(hidden_states.dtype)) + self.pooled(pooled_projections)
        return joined + at[:, None] + self.axes(torch.cat([txt_ids, img_ids]))


class _Image(nn.Module):
    """Of one size alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 4, 4)
        self.img_size = (40, 40)

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[-2:] == self.img_size
        y: Tensor = self.first(x)
        return y


class _Patchified(nn.Module):
    """Cuts an image into patches of 2 x 2, whose channels lie side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.norm = nn.Linear(4 * 6, 8), nn.LayerNorm(8)

    def forward(self, latents: Tensor) -> Tensor:
        rows, channels, height, width = latents.shape
        cut = latents.reshape(rows, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
        y: Tensor = self.norm(self.project(cut.reshape(rows, -1, 4 * channels)))
        return y


class _Normed(nn.Module):
    """A norm meets the text first."""

    def __init__(self, norm: type[nn.LayerNorm | nn.RMSNorm], has_weight: bool) -> None:
        super().__init__()
        self.norm, self.head = norm(24, elementwise_affine=has_weight), nn.Linear(24, 8)
        self.image = nn.Linear(6, 8)

    def forward(self, sample: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        y: Tensor = self.image(sample).sum(1) + self.head(self.norm(encoder_hidden_states)).sum(1)
        return y


class _OverChannels(nn.Module):
    """A norm over the channels of an image, with a weight that broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma, self.beta = (nn.Parameter(torch.randn(1, 6, 1, 1)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True) + 1e-5).sqrt() * self.gamma + self.beta


class _TwoTowers(nn.Module):
    """Features of images, of texts, or of both, as CLIP outside transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.see, self.read = nn.Conv2d(3, 8, 4), nn.Embedding(30, 8)
        self.context_length = 12
        self.places = nn.Parameter(torch.randn(12, 8))

    def forward(self, image: Tensor | None = None, text: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        seen = None if image is None else self.see(image).mean((2, 3))
        return seen, None if text is None else (self.read(text) + self.places).mean(1)


class _Wraps(nn.Module):
    """A model of transformers, whose mapping it takes, as sentence-transformers does; and its config."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_model("bert")

    @property
    def config(self) -> Any:
        return self.inner.config

    def forward(self, input: dict[str, Tensor]) -> Tensor:
        y: Tensor = self.inner(**{name: input.get(name) for name in ("input_ids", "attention_mask")})[0]
        return y


def _given(model: nn.Module) -> dict[str, Any]:
    calls = runnable_calls(clone_to_meta(model), variants=("plain",))
    assert [call.label for call in calls] == ["plain"], calls.errors
    return calls[0].kwargs


def test_names_say_what_is_given_and_layers_how_wide_it_is() -> None:
    given = _given(_Diffuses())
    widths = {name: value.shape[-1] for name, value in given.items() if value.dim() > 1}
    assert widths == {
        "hidden_states": 16, "encoder_hidden_states": 20, "pooled_projections": 12, "img_ids": 2, "txt_ids": 2,
    }  # fmt: skip
    assert given["timestep"].shape == (2,)
    assert len(given["img_ids"]) == given["hidden_states"].shape[1]


@pytest.mark.parametrize(
    ("model", "name", "shape"), [(_Image, "x", (2, 3, 40, 40)), (_Patchified, "latents", (2, 6, 64, 64))]
)
def test_an_image_has_the_stated_side_and_the_channels_of_its_reader(
    model: type[nn.Module], name: str, shape: tuple[int, ...]
) -> None:
    assert _given(model())[name].shape == shape


class _InPlaces(nn.Module):
    """Patches of 4 x 4 pixels, each with a place of its own: an image has the side that gives as many, and no other."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.project, self.places = nn.Linear(4 * 4 * 3, 8), nn.Parameter(torch.randn(1, (side // 4) ** 2, 8))

    def forward(self, img: Tensor) -> Tensor:
        rows, channels, height, width = img.shape
        cut = img.reshape(rows, channels, height // 4, 4, width // 4, 4).permute(0, 2, 4, 3, 5, 1)
        y: Tensor = self.project(cut.reshape(rows, -1, 4 * 4 * channels)) + self.places
        return y


@pytest.mark.parametrize("side", [28, 32, 64, 96, 128, 224, 256, 384, 512])
def test_an_image_has_a_usual_side_where_none_is_stated(side: int) -> None:
    assert _given(_InPlaces(side))["img"].shape == (2, 3, side, side)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("has_weight", [True, False])
def test_a_norm_tells_a_width_too(norm: type[nn.LayerNorm | nn.RMSNorm], has_weight: bool) -> None:
    given = _given(_Normed(norm, has_weight))
    assert (given["sample"].shape[-1], given["encoder_hidden_states"].shape[-1]) == (6, 24)


def test_a_norm_over_channels_tells_their_number() -> None:
    model = nn.Sequential(_OverChannels(), nn.Conv2d(6, 8, 3))
    assert _given(model)["input"].shape == (2, 6, 64, 64)


def test_a_text_beside_an_image_is_token_ids() -> None:
    given = _given(_TwoTowers())
    assert given["image"].shape == (2, 3, 64, 64)
    assert (given["text"].dtype, given["text"].shape) == (torch.long, (2, 12))


def test_a_wrapper_gets_what_the_model_inside_takes() -> None:
    given = _given(_Wraps())
    assert set(given["input"]) >= {"input_ids", "attention_mask"}


def test_a_gpt_with_bare_loss_and_logits_gets_ids_and_targets() -> None:
    calls = runnable_calls(clone_to_meta(ReluGPT()))
    assert {tuple(call.kwargs) for call in calls} == {("idx",), ("idx", "targets")}


def test_hooks_that_fit_widths_are_removed() -> None:
    model = clone_to_meta(_Diffuses())
    runnable_calls(model)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_what_cannot_be_guessed_says_so() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 2)

        def forward(self, table: dict[str, Tensor], knob: str) -> Tensor:
            y: Tensor = self.head(table["x"]) if knob == "x" else self.head(table["y"])
            return y

    calls = runnable_calls(Reads())
    assert not calls
    assert "guessed inputs" in calls.errors[0][1]
