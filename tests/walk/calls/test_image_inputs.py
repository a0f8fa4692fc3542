"""Images and videos in the forms that forwards ask for by the names of their arguments, alone and inside text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from memopt.walk.calls.arguments import candidates
from memopt.walk.calls.arguments.request import BATCH, LENGTH
from memopt.walk.calls.inputs import runnable_calls
from tests.walk.configs import make_config, shrink

PATCHES = {"patch_size": 4, "num_channels": 3}
TOKEN = 50


def model(forward: Callable[..., Any], main: str = "pixel_values", **settings: Any) -> nn.Module:
    """A module with this forward, which need not run, and these settings in its config."""
    made = type("Toy", (nn.Module,), {"forward": forward, "main_input_name": main})()
    made.config = PreTrainedConfig(**{"vocab_size": 64, **settings})
    made.weight = nn.Parameter(torch.ones(1))
    return made


def form(module: nn.Module, name: str, variant: str = "plain") -> dict[str, Any]:
    """The arguments proposed under `name`."""
    return dict(candidates(module, variant, 0))[name]


def shapes(kwargs: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in kwargs.items() if isinstance(value, Tensor)}


def by_grid(self: Any, hidden_states: Tensor, grid_thw: Tensor) -> Any: ...


@pytest.mark.parametrize("variant", ["plain", "odd"])
def test_patches_are_as_many_as_their_grid_says(variant: str) -> None:
    _, kwargs = next(candidates(model(by_grid, **PATCHES, temporal_patch_size=2), variant, 0))
    assert kwargs["hidden_states"].shape == (kwargs["grid_thw"].prod(-1).sum(), 3 * 2 * 4 * 4)
    assert (kwargs["grid_thw"][0, 1] != kwargs["grid_thw"][0, 2]) == (variant == "odd")


def test_patches_are_also_proposed_as_squares_and_as_blocks() -> None:
    module = model(by_grid, **PATCHES, spatial_merge_size=2)
    assert form(module, "main:square patches")["hidden_states"].shape == (32, 3, 4, 4)
    assert form(module, "main:square patches of one batch")["hidden_states"].shape == (1, 32, 3, 4, 4)
    assert form(module, "main:patches of each image")["hidden_states"].shape == (2, 16, 48)
    assert form(module, "main:blocks of patches, channels last")["hidden_states"].shape == (32, 8, 8, 3)


def test_merged_sizes_come_with_a_grid() -> None:
    def forward(self: Any, pixel_values: Tensor, grid_thw: Tensor, merge_sizes: Tensor) -> Any: ...

    _, kwargs = next(candidates(model(forward, **PATCHES, merge_size=3), "plain", 0))
    assert kwargs["merge_sizes"].tolist() == [3, 3]
    assert kwargs["grid_thw"].tolist() == [[1, 6, 6]] * BATCH


def test_padded_patches_have_a_shape_and_a_mask() -> None:
    def forward(self: Any, pixel_values: Tensor, pixel_attention_mask: Tensor, spatial_shapes: Tensor) -> Any: ...

    kwargs = form(model(forward, **PATCHES), "main:padded patches", "padded")
    assert kwargs["pixel_values"].shape == (BATCH, 16, 48)
    assert torch.equal(kwargs["pixel_attention_mask"].sum(-1), kwargs["spatial_shapes"].prod(-1))
    assert kwargs["spatial_shapes"][0].prod() == 16 > kwargs["spatial_shapes"][1].prod()


def test_placed_patches_have_a_column_and_a_row_each() -> None:
    def forward(self: Any, pixel_values: Tensor, pixel_position_ids: Tensor) -> Any: ...

    kwargs = form(model(forward, **PATCHES, pooling_kernel_size=3), "main:placed patches")
    assert kwargs["pixel_position_ids"].shape == (BATCH, 36, 2)
    assert len({tuple(place) for place in kwargs["pixel_position_ids"][0].tolist()}) == 36


def test_a_strip_is_as_long_as_its_sizes_say() -> None:
    def forward(self: Any, pixel_values: Tensor, target_sizes: Tensor) -> Any: ...

    kwargs = form(model(forward, **PATCHES), "main:patches in a strip")
    assert kwargs["pixel_values"].shape == (1, 3, 4, 4 * kwargs["target_sizes"].prod(-1).sum())


def test_flattened_patches_begin_with_their_row_and_column() -> None:
    def forward(self: Any, flattened_patches: Tensor | None = None, attention_mask: Tensor | None = None) -> Any: ...

    module = model(forward, "flattened_patches", **PATCHES)
    kwargs = form(module, "main:row and column first")
    assert kwargs["flattened_patches"].shape == (BATCH, 16, 2 + 48)
    assert kwargs["flattened_patches"][0, 5, :2].tolist() == [2, 2]
    assert form(module, "main:row and column first", "padded")["attention_mask"][-1, -1] == 0


def plain_images(self: Any, pixel_values: Tensor) -> Any: ...


def test_a_pair_of_images_and_flat_patches_follow_the_plain_image() -> None:
    names = [name for name, _ in candidates(model(plain_images, **PATCHES, image_size=16), "plain", 0)]
    assert names[:3] == ["main:", "main:several", "main:patches"]
    module = model(plain_images, **PATCHES, image_size=16)
    assert form(module, "main:several")["pixel_values"].shape == (BATCH, 2, 3, 16, 16)
    assert form(module, "main:patches")["pixel_values"].shape == (BATCH, 16, 48)


def test_several_images_are_small_where_no_size_is_stated() -> None:
    assert form(model(plain_images), "main:several")["pixel_values"].shape[-1] == 112


def test_several_images_may_come_with_a_mask_of_those_that_are_there() -> None:
    def forward(self: Any, pixel_values: Tensor, pixel_attention_mask: Tensor) -> Any: ...

    kwargs = form(model(forward, image_size=16), "main:several, all of them there")
    assert kwargs["pixel_attention_mask"].shape == kwargs["pixel_values"].shape[:2]


def test_windows_of_a_fixed_number_have_whole_patches() -> None:
    module = model(plain_images, image_size=518, patch_size=14, num_windows=4)
    assert form(module, "main:")["pixel_values"].shape[-1] == 504


def test_a_padded_image_is_masked_in_part() -> None:
    def forward(self: Any, pixel_values: Tensor, pixel_mask: Tensor | None = None) -> Any: ...

    module = model(forward, image_size=16)
    assert "pixel_mask" not in form(module, "main:")
    mask = form(module, "main:", "padded")["pixel_mask"]
    assert (mask[0].min(), mask[-1].min(), mask[-1].max()) == (1, 0, 1)


def test_a_prompt_and_an_image_fill_the_model_together() -> None:
    def forward(self: Any, pixel_values: Tensor, prompt_pixel_values: Tensor, prompt_masks: Tensor) -> Any: ...

    kwargs = form(model(forward, image_size=[32, 16]), "main:")
    assert set(shapes(kwargs).values()) == {(BATCH, 3, 16, 16)}


def test_tiles_come_with_their_aspect_ratio() -> None:
    def forward(self: Any, pixel_values: Tensor, aspect_ratio_ids: Tensor, aspect_ratio_mask: Tensor) -> Any: ...

    kwargs = form(model(forward, image_size=16, max_num_tiles=4), "main:tiles by aspect ratio")
    assert shapes(kwargs) == {
        "pixel_values": (BATCH, 1, 4, 3, 16, 16),
        "aspect_ratio_ids": (BATCH, 1),
        "aspect_ratio_mask": (BATCH, 1, 4),
    }


def test_tiles_are_as_many_as_the_resolution_has_and_one_more() -> None:
    def forward(self: Any, pixel_values: Tensor, image_sizes: Tensor) -> Any: ...

    pinpoints = [[32, 32], [16, 32]]
    kwargs = form(model(forward, image_size=16, image_grid_pinpoints=pinpoints), "main:tiles by size")
    assert kwargs["pixel_values"].shape == (BATCH, 3, 3, 16, 16)
    assert kwargs["image_sizes"].tolist() == [[16, 32]] * BATCH


def test_images_of_any_size_are_small() -> None:
    def forward(self: Any, pixel_values: Tensor, image_sizes: Tensor | None = None) -> Any: ...

    kwargs = form(model(forward, image_size=1024, patch_size=16), "main:of a size")
    assert kwargs["image_sizes"].tolist() == [[128, 128]] * BATCH
    assert kwargs["pixel_values"].shape == (BATCH, 3, 128, 128)


def test_another_tower_gets_images_of_its_own_size() -> None:
    def forward(self: Any, pixel_values: Tensor, fine_pixel_values: Tensor | None = None) -> Any: ...

    module = model(forward, image_size=16, fine_vision_config=PreTrainedConfig(image_size=64))
    assert form(module, "main:")["fine_pixel_values"].shape == (BATCH, 3, 64, 64)


def test_videos_have_frames() -> None:
    def forward(self: Any, pixel_values_videos: Tensor) -> Any: ...

    kwargs = form(model(forward, "pixel_values_videos", image_size=16, frames_per_clip=3), "main:video frames")
    assert kwargs["pixel_values_videos"].shape == (BATCH, 3, 3, 16, 16)


# --- beside and inside text -------------------------------------------------------------------------------------


def test_two_towers_get_an_image_and_text_whichever_is_the_main_input() -> None:
    def forward(self: Any, pixel_values: Tensor, input_ids: Tensor | None = None) -> Any: ...

    assert {"pixel_values", "input_ids"} <= form(model(forward, image_size=16), "main:").keys()


def test_text_says_which_token_sees_which_of_several_images() -> None:
    def forward(
        self: Any, input_ids: Tensor, pixel_values: Tensor | None = None, image_attention_mask: Tensor | None = None
    ) -> Any: ...

    kwargs = form(model(forward, "input_ids", image_size=16), "main:several")
    assert kwargs["image_attention_mask"].shape == (BATCH, LENGTH, 2)


def test_text_may_come_with_regions_that_another_model_found() -> None:
    def forward(self: Any, input_ids: Tensor, visual_feats: Tensor | None = None, visual_pos: Any = None) -> Any: ...

    kwargs = form(model(forward, "input_ids", visual_feat_dim=20), "main:")
    assert kwargs["visual_feats"].shape[-1] == 20
    assert kwargs["visual_pos"].shape == (*kwargs["visual_feats"].shape[:2], 4)


def test_text_marks_the_positions_of_image_embeddings() -> None:
    def forward(
        self: Any, pixel_values: Tensor, input_ids: Any = None, image_embeds_position_mask: Any = None
    ) -> Any: ...

    kwargs = form(model(forward, latent_query_num=5, image_size=16), "main:")
    assert kwargs["image_embeds_position_mask"].sum(-1).tolist() == [5] * BATCH


class _Mixed(nn.Module):
    """Text with placeholders for what its own method makes of images: five features of each, from five dimensions."""

    main_input_name = "input_ids"

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.config = PreTrainedConfig(vocab_size=64, image_size=16, image_token_id=TOKEN, **settings)
        self.embedding = nn.Embedding(64, 4)

    def get_image_features(self, pixel_values: Tensor, fine: Tensor | None = None) -> Tensor:
        batch, _, _, _, _ = pixel_values.shape
        return pixel_values.mean((1, 2, 3, 4)).view(batch, 1, 1).expand(batch, 5, 4)

    def forward(self, input_ids: Tensor, pixel_values: Tensor | None = None, image_sizes: Any = None) -> Tensor:
        embedded = self.embedding(input_ids)
        if pixel_values is not None:
            features = self.get_image_features(pixel_values).flatten(0, 1)
            embedded = embedded.clone()
            embedded[input_ids == TOKEN] = features
        return embedded


def test_placeholders_are_as_many_as_the_features_that_the_model_makes() -> None:
    call = next(call for call in runnable_calls(_Mixed(), variants=("plain",)) if call.label == "plain image")
    assert (call.kwargs["input_ids"] == TOKEN).sum(-1).tolist() == [5] * BATCH
    assert call.kwargs["pixel_values"].dim() == 5


def test_only_the_form_that_features_were_made_of_is_proposed() -> None:
    names = [name for name, _ in candidates(_Mixed(), "plain", 0) if name.startswith("image")]
    assert names == ["image:several"]


def test_a_wrapper_of_a_model_with_the_method_gets_more_forms() -> None:
    class Wrapper(nn.Module):
        main_input_name = "input_ids"

        def __init__(self) -> None:
            super().__init__()
            self.inner = _Mixed()
            self.config = self.inner.config

        def forward(self, input_ids: Tensor, pixel_values: Tensor | None = None) -> Any: ...

    names = [name for name, _ in candidates(Wrapper(), "plain", 0) if name.startswith("image")]
    assert names == ["image:several", "image:", "image:patches"]


def test_images_are_opened_and_closed_by_their_own_tokens() -> None:
    kwargs = form(_Mixed(vision_start_token_id=51, vision_end_token_id=52), "image:several")
    text = kwargs["input_ids"][0].tolist()
    first = text.index(TOKEN)
    assert (text[first - 1], text[first + 5]) == (51, 52)


def test_without_a_method_the_number_of_features_is_guessed_from_the_patches() -> None:
    def forward(self: Any, input_ids: Tensor, pixel_values: Tensor | None = None) -> Any: ...

    module = model(forward, "input_ids", image_token_index=TOKEN, image_size=16, **PATCHES)
    counts = {
        int((kwargs["input_ids"] == TOKEN).sum(-1)[0])
        for name, kwargs in candidates(module, "plain", 0)
        if name.startswith("image")
    }
    assert counts == {16, 17, 4, 1}


def test_a_video_in_text_is_tried_once() -> None:
    class Videos(_Mixed):
        def get_video_features(self, pixel_values_videos: Tensor) -> tuple[Tensor, ...]:
            return tuple(video.mean((1, 2, 3))[:, None] for video in pixel_values_videos)

        def forward(self, input_ids: Tensor, pixel_values_videos: Tensor | None = None) -> Any: ...  # type: ignore[override]

    module = Videos(video_token_id=49)
    assert (form(module, "video:frames")["input_ids"] == 49).sum(-1).tolist() == [4] * BATCH
    assert not [name for name, _ in candidates(module, "odd", 0) if name.startswith("video")]


def test_a_placeholder_that_the_config_leaves_open_gets_an_id_in_the_twin() -> None:
    small = shrink(make_config("llama", image_token_id=None))
    assert 0 < small.image_token_id < small.vocab_size


def test_a_smaller_head_still_has_quarters() -> None:
    vision = {"hidden_size": 1152, "num_attention_heads": 16, "num_hidden_layers": 2, "intermediate_size": 4304}
    small = shrink(make_config("clip_vision", **vision))
    assert small.hidden_size // small.num_attention_heads % 4 == 0
