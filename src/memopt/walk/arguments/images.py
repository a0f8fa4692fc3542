"""Images: alone, as videos, and inside text that has placeholder tokens for them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from memopt.walk.arguments.pixels import image, odd_side_of, side_of
from memopt.walk.arguments.request import BATCH, Kwargs, Request
from memopt.walk.arguments.singles import complete


def image_alone(request: Request) -> Iterator[tuple[str, Kwargs]]:
    if "pixel_values" not in request.names or "input_ids" in request.names:
        return
    side = odd_side_of(request) if request.variant == "odd" else side_of(request)
    extra: Kwargs = {}
    if request.variant == "odd" and "interpolate_pos_encoding" in request.names:
        extra["interpolate_pos_encoding"] = True
    yield "main:", complete(request, {"pixel_values": image(request, side), **extra})
    frames = request.whole("num_frames", "frames_per_clip", default=0)
    if frames:
        channels = request.whole("num_channels", "in_channels", "in_chans", default=3)
        yield "main:video", complete(request, {"pixel_values": request.normal(1, frames, channels, *side)})


def image_in_text(request: Request) -> Iterator[tuple[str, Kwargs]]:
    """An image beside text that has a placeholder token for each of its features."""
    token = request.setting("image_token_id", "image_token_index")
    if not {"input_ids", "pixel_values"} <= set(request.names) or not isinstance(token, int):
        return
    for features, pixels in _images_in_text(request):
        ids = request.ids()
        ids = torch.cat([ids[:, :4], torch.full((BATCH, features), token), ids[:, 4:]], 1)
        is_image = (ids == token).long()
        types = {name: is_image for name in ("token_type_ids", "mm_token_type_ids") if name in request.names}
        yield f"image:{features} features", complete(request, {"input_ids": ids, **pixels, **types})


def _images_in_text(request: Request) -> Iterator[tuple[int, Kwargs]]:
    """(features an image, arguments that carry the images)."""
    if "image_grid_thw" in request.names:
        patch, merge = request.whole("patch_size", default=14), request.whole("spatial_merge_size", default=2)
        channels = request.whole("num_channels", "in_channels", "in_chans", default=3)
        values = channels * request.whole("temporal_patch_size", default=2) * patch * patch
        side = 2 * merge
        grid = torch.tensor([[1, side, side]] * BATCH)
        yield 4, {"pixel_values": request.normal(BATCH * side * side, values), "image_grid_thw": grid}
        return
    pixels = image(request, side_of(request))
    for features in _feature_counts(request):
        yield features, {"pixel_values": pixels}


def _feature_counts(request: Request) -> list[int]:
    patch = request.whole("patch_size", default=16)
    height, width = side_of(request)
    patches = (height // patch) * (width // patch)
    stated = request.setting("mm_tokens_per_image", "image_seq_length", "image_token_num")
    counts = [stated, patches, patches + 1, patches // 4]
    return list(dict.fromkeys(count for count in counts if isinstance(count, int) and count > 0))
