"""Sizes and values of images."""

from __future__ import annotations

import torch

from memopt.walk.arguments.request import BATCH, Request


def image(request: Request, side: tuple[int, int]) -> torch.Tensor:
    channels = request.whole("num_channels", "in_channels", "in_chans", default=3)
    return request.normal(BATCH, channels, *side)


def side_of(request: Request) -> tuple[int, int]:
    """(height, width) in pixels."""
    size = request.setting("image_size", "img_size", "input_size", default=224)
    if isinstance(size, dict):
        size = (size.get("height", 224), size.get("width", 224))
    if isinstance(size, list | tuple) and len(size) >= 2:
        return int(size[-2]), int(size[-1])
    return (size, size) if isinstance(size, int) else (224, 224)


def odd_side_of(request: Request) -> tuple[int, int]:
    """A slightly smaller image, whose sides in patches no window divides."""
    patch = request.whole("patch_size", default=16)
    window = request.whole("window_size", default=2)
    # A pyramid halves the side at each stage; this keeps its last stage as large as it was, so a window still fits.
    depths = request.setting("depths", default=())
    shrinks = 2 ** max(1, len(depths) - 1) if isinstance(depths, list | tuple) else 2

    def smaller(pixels: int) -> int:
        patches = pixels // patch
        sides = range(max(1, patches - shrinks + 1), patches)
        return patch * next((side for side in sides if side % window), patches)

    height, width = side_of(request)
    return smaller(height), smaller(width)
