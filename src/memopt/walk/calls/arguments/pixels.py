"""Sizes and values of images."""

from __future__ import annotations

import torch

from memopt.walk.calls.arguments.request import Request

_SIDES = ("image_size", "img_size", "max_img_size", "input_size")
_MERGES = ("scale_factor", "downsample_factor", "pixel_shuffle_factor")
#: Patches a side of an image whose size is passed as an argument.
_FEW_PATCHES = 8


def image(request: Request, side: tuple[int, int]) -> torch.Tensor:
    return request.normal(request.batch, request.channels, *side)


def side_of(request: Request) -> tuple[int, int]:
    """(height, width) in pixels."""
    size = request.setting(*_SIDES, default=224)
    if isinstance(size, dict):
        size = (size.get("height", 224), size.get("width", 224))
    height, width = (224, 224)
    if isinstance(size, list | tuple) and len(size) >= 2:
        height, width = int(size[-2]), int(size[-1])
    elif isinstance(size, int):
        height, width = size, size
    if "prompt_pixel_values" in request.names:
        # The prompt is put above the image.
        height //= 2
    # Windows of a fixed number a side, and features that are merged before the text model, need whole patches.
    merged = request.whole(*_MERGES, default=1) if "input_ids" in request.names else 1
    group = request.whole("num_windows_side", "num_windows", default=merged)
    if group > 1:
        step = group * request.patch_side
        height, width = height // step * step or height, width // step * step or width
    return height, width


def small_side(request: Request) -> tuple[int, int]:
    """(height, width) of an image for models that take any size."""
    patch = request.patch_side
    height, width = side_of(request)
    return min(height, _FEW_PATCHES * patch), min(width, _FEW_PATCHES * patch)


def states_side(request: Request) -> bool:
    """Whether the config has a size of images."""
    return request.setting(*_SIDES) is not None


def odd_side_of(request: Request) -> tuple[int, int]:
    """A slightly smaller image, whose sides in patches no window divides."""
    patch = request.patch_side
    window = request.whole("window_size", default=2) or 2
    # A pyramid halves the side at each stage; its last stage keeps its size, so that a window still fits.
    depths = request.setting("depths", default=())
    shrinks = 2 ** max(1, len(depths) - 1) if isinstance(depths, list | tuple) else 2

    def smaller(pixels: int) -> int:
        patches = pixels // patch
        sides = range(max(1, patches - shrinks + 1), patches)
        return patch * next((side for side in sides if side % window), patches)

    height, width = side_of(request)
    return smaller(height), smaller(width)
