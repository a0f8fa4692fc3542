"""The shapes of images and videos: whole, in several frames or tiles, or cut into patches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from transformers import PreTrainedConfig

from memopt.walk.calls.arguments.patches import flat_patches, packed
from memopt.walk.calls.arguments.pixels import image, odd_side_of, side_of, small_side, states_side
from memopt.walk.calls.arguments.request import Kwargs, Request

_IMAGES = ("pixel_values", "image_pixel_values", "pixel_values_images", "flattened_patches", "image")
_VIDEOS = ("pixel_values_videos",)
#: Share of the width that a padded image is masked in.
_MASKED = 4


def image_forms(request: Request, *, odd_size: bool = False) -> Iterator[tuple[str, Kwargs]]:
    """(detail, kwargs) of the ways to give a forward images, the likeliest first; nothing where it takes none.

    With `odd_size`, whole images of the odd variant have sides that no window divides.
    """
    values = next((name for name in _IMAGES if name in request.names), None)
    if values is None and "hidden_states" in request.names and "grid_thw" in request.names:
        values = "hidden_states"
    if values is None:
        return
    yield from packed(request, values, video=False)
    if values in ("hidden_states", "flattened_patches"):
        return
    side = odd_side_of(request) if odd_size and request.variant == "odd" else side_of(request)
    if "aspect_ratio_ids" in request.names:
        yield "tiles by aspect ratio", _tiles(request, values, side)
        return
    extra: Kwargs = _other_towers(request, values)
    if odd_size and request.variant == "odd" and "interpolate_pos_encoding" in request.names:
        extra["interpolate_pos_encoding"] = True
    if request.variant == "padded" and "pixel_mask" in request.names:
        extra["pixel_mask"] = torch.ones(request.batch, *side, dtype=torch.long)
        extra["pixel_mask"][-1, :, -side[1] // _MASKED :] = 0
    if "image_sizes" in request.names:
        if resolutions := request.setting("image_grid_pinpoints"):
            yield "tiles by size", _tiles_by_size(request, values, side, resolutions)
        small = small_side(request)
        yield (
            "of a size",
            {values: image(request, small), **extra, "image_sizes": torch.tensor([small] * request.batch)},
        )
    yield "", {values: image(request, side), **extra}
    several = _several(request, side, request.whole(*_FRAMES, default=2))
    yield "several", {values: several, **extra}
    if "pixel_attention_mask" in request.names:
        # Tiles, or a robot's cameras, come with a mask of those that are present.
        there = request.ones("pixel_attention_mask", *several.shape[:2])
        yield "several, all of them there", {values: several, "pixel_attention_mask": there}
    yield "patches", {values: flat_patches(request, side)}


def video_forms(request: Request) -> Iterator[tuple[str, Kwargs]]:
    """(detail, kwargs) of the ways to give a forward videos."""
    values = next((name for name in _VIDEOS if name in request.names), None)
    if values is None:
        return
    yield from packed(request, values, video=True)
    yield "frames", {values: _several(request, side_of(request), request.whole(*_FRAMES, default=4))}


_FRAMES = ("num_frames", "frames_per_clip")


def _other_towers(request: Request, values: str) -> Kwargs:
    """The images again for towers with a config of their own: ``x_pixel_values`` for the ``x_vision_config``."""
    found: Kwargs = {}
    for name in request.names:
        config = getattr(request.config, name.replace("pixel_values", "vision_config"), None)
        if name != values and name.endswith("pixel_values") and isinstance(config, PreTrainedConfig):
            found[name] = image(request, side_of(replace(request, config=config)))
    return found


def _several(request: Request, side: tuple[int, int], count: int) -> torch.Tensor:
    """Frames, a pair, or tiles of each image; in a walk one row if they are many."""
    if not states_side(request):
        side = side[0] // 2, side[1] // 2
    rows = request.batch if count <= 4 or request.size else 1
    return request.normal(rows, count, request.channels, *side)


def _tiles(request: Request, values: str, side: tuple[int, int]) -> Kwargs:
    """One image of the largest number of tiles."""
    tiles = request.whole("max_num_tiles", default=4)
    return {
        values: request.normal(request.batch, 1, tiles, request.channels, *side),
        "aspect_ratio_ids": torch.ones(request.batch, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(request.batch, 1, tiles, dtype=torch.long),
    }


def _tiles_by_size(request: Request, values: str, side: tuple[int, int], resolutions: list[tuple[int, int]]) -> Kwargs:
    """Images of the smallest resolution that is cut into tiles, and the whole image as one tile more."""
    height, width = min(resolutions, key=lambda size: size[0] * size[1])
    count = 1 + (height // side[0]) * (width // side[1])
    return {
        values: request.normal(request.batch, count, request.channels, *side),
        "image_sizes": torch.tensor([[height, width]] * request.batch),
    }
