"""The shapes of images and videos: whole, in several frames or tiles, or as patches in one long sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedConfig

from memopt.walk.calls.arguments.request import Forms, Kwargs, Request

_IMAGES = ("pixel_values", "image_pixel_values", "pixel_values_images", "flattened_patches", "image")
_VIDEOS = "pixel_values_videos"
_FRAMES = ("num_frames", "frames_per_clip")
#: Of a padded image, the last 1 / `_MASKED` of the width is masked.
_MASKED = 4

_SIDES = ("image_size", "img_size", "max_img_size", "input_size")
FACTORS = ("scale_factor", "downsample_factor", "pixel_shuffle_factor")
_MERGES = ("spatial_merge_size", "merge_size", "merge_kernel_size")
#: Patches a side of an image whose size is passed as an argument.
_FEW_PATCHES = 8
#: Features a side of an image of any size in a training step.
_STEP_FEATURES = 16

#: Endings of the name of a grid argument; they name its columns: time, height and width, or height and width.
_GRIDS = ("grid_thw", "grid_hws", "grid_hw")


def holds_images(names: Iterable[str]) -> bool:
    """Whether arguments of these names hold images or videos."""
    return any("pixel" in name or name in _IMAGES or name.removesuffix("_videos").endswith(_GRIDS) for name in names)


def image_alone(request: Request) -> Forms:
    """Images, or videos, without text."""
    if "input_ids" in request.names and not request.main.startswith("pixel_values"):
        return
    alone = "alone " if "input_ids" in request.names else ""
    for detail, pixels in image_forms(request, odd_size=True):
        yield f"{alone}{detail}".rstrip(), pixels
    for detail, pixels in video_forms(request):
        yield f"{alone}video {detail}", pixels


def image_forms(request: Request, *, odd_size: bool = False) -> Forms:
    """(detail, kwargs) of the ways to give a forward images; nothing where it takes none. With `odd_size`, whole images
    of the odd variant have sides that no window divides."""
    values = request.first(*_IMAGES)
    if not values and {"hidden_states", "grid_thw"} <= set(request.names):
        values = "hidden_states"
    if not values:
        return
    yield from _packed(request, values, video=False)
    if values in ("hidden_states", "flattened_patches"):
        return
    is_odd = odd_size and request.variant == "odd"
    side = _odd_side(request) if is_odd else side_of(request)
    if "aspect_ratio_ids" in request.names:
        yield "tiles by aspect ratio", _tiles(request, values, side)
        return
    extra: Kwargs = _other_towers(request, values)
    if is_odd and "interpolate_pos_encoding" in request.names:
        extra["interpolate_pos_encoding"] = True
    if request.variant == "padded" and "pixel_mask" in request.names:
        extra["pixel_mask"] = torch.ones(request.batch, *side, dtype=torch.long)
        extra["pixel_mask"][-1, :, -side[1] // _MASKED :] = 0
    if "image_sizes" in request.names:
        if resolutions := request.setting("image_grid_pinpoints"):
            yield "tiles by size", _tiles_by_size(request, values, side, resolutions)
        height, width = side_of(request)
        if request.step.side is None:
            few = 2 * _STEP_FEATURES if request.step.images else _FEW_PATCHES
            height, width = (min(pixels, few * request.patch_side) for pixels in (height, width))
        sizes = torch.tensor([[height, width]] * request.batch)
        yield "of a size", {values: image(request, (height, width)), **extra, "image_sizes": sizes}
    yield "", {values: image(request, side), **extra}
    count = request.step.images or request.whole(*_FRAMES, default=2)
    several = _several(request, side, count)
    yield "several", {values: several, **extra}
    if "pixel_attention_mask" in request.names:
        # Tiles, or a robot's cameras, come with a mask of the tiles or cameras that are present.
        there = request.ones("pixel_attention_mask", *several.shape[:2])
        yield "several, all of them there", {values: several, "pixel_attention_mask": there}
    yield "patches", {values: _patches(request, (side[0] // request.patch_side) * (side[1] // request.patch_side))}


def video_forms(request: Request) -> Forms:
    """(detail, kwargs) of the ways to give a forward videos."""
    if _VIDEOS in request.names:
        yield from _packed(request, _VIDEOS, video=True)
        yield "frames", {_VIDEOS: _several(request, side_of(request), request.whole(*_FRAMES, default=4))}


# --- whole images ---------------------------------------------------------------------------------------------------


def image(request: Request, side: tuple[int, int]) -> torch.Tensor:
    """An image of `side` (height, width) a row."""
    return request.normal(request.batch, request.channels, *side)


def side_of(request: Request) -> tuple[int, int]:
    """(height, width) in pixels."""
    size = request.step.side or _stated_side(request) or 224
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
    # A fixed number of windows a side, or features merged before the text model, divide the sides in patches.
    merged = request.whole(*FACTORS, default=1) if "input_ids" in request.names else 1
    group = request.whole("num_windows_side", "num_windows", default=merged)
    if group > 1:
        step = group * request.patch_side
        height, width = height // step * step or height, width // step * step or width
    return height, width


def _stated_side(request: Request) -> Any:
    """The side in the config, else in a module: a tower of timm takes one size, which its config leaves out."""
    held = (vars(module).get("img_size") for module in request.model.modules())
    return request.setting(*_SIDES) or next(filter(None, held), None)


def _odd_side(request: Request) -> tuple[int, int]:
    """(height, width) of a slightly smaller image; the window divides neither side, counted in patches."""
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


def _other_towers(request: Request, values: str) -> Kwargs:
    """The images again for towers with a config of their own: ``x_pixel_values`` for the ``x_vision_config``."""
    found: Kwargs = {}
    for name in request.names:
        config = getattr(request.config, name.replace("pixel_values", "vision_config"), None)
        if name != values and name.endswith("pixel_values") and isinstance(config, PreTrainedConfig):
            found[name] = image(request, side_of(replace(request, config=config)))
    return found


def _several(request: Request, side: tuple[int, int], count: int) -> torch.Tensor:
    """`count` images a row: frames, a pair, or tiles; in a walk, one row only if `count` is above 4."""
    if _stated_side(request) is None and request.step.side is None:
        side = side[0] // 2, side[1] // 2
    rows = request.batch if count <= 4 or request.size else 1
    return request.normal(rows, count, request.channels, *side)


def _tiles(request: Request, values: str, side: tuple[int, int]) -> Kwargs:
    """One image a row, with the largest number of tiles."""
    tiles = request.whole("max_num_tiles", default=4)
    return {
        values: request.normal(request.batch, 1, tiles, request.channels, *side),
        "aspect_ratio_ids": torch.ones(request.batch, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(request.batch, 1, tiles, dtype=torch.long),
    }


def _tiles_by_size(request: Request, values: str, side: tuple[int, int], resolutions: list[tuple[int, int]]) -> Kwargs:
    """Images of the smallest resolution, cut into tiles, with the whole image as one more tile."""
    height, width = min(resolutions, key=lambda size: size[0] * size[1])
    count = 1 + (height // side[0]) * (width // side[1])
    return {
        values: request.normal(request.batch, count, request.channels, *side),
        "image_sizes": torch.tensor([[height, width]] * request.batch),
    }


# --- patches in one sequence, with an argument for their positions --------------------------------------------------


def merge_of(request: Request) -> int:
    """Patches a side that are merged into one feature."""
    return request.whole(*_MERGES, default=2)


def _packed(request: Request, values: str, video: bool) -> Forms:
    """(detail, kwargs) for patches of images or videos in `values`; nothing if no argument has the patches' positions.
    An image has the patches of 2 x 2 merged tokens, in the odd variant of 2 x 3; in a step of 16 x 16, or of the step's
    side."""
    merged = request.whole(*_MERGES, "pooling_kernel_size", default=2)
    sizes = [(2 * merged, (3 if request.variant == "odd" else 2) * merged)]
    if request.step.side is not None:
        sizes = [(max(1, round(request.step.side / (request.patch_side * merged))) * merged,) * 2]
    elif request.size:
        sizes.insert(0, (_STEP_FEATURES * merged, _STEP_FEATURES * merged))
    for rows, columns in sizes:
        yield from _by_grid(request, values, video, rows, columns)
        yield from _by_shape(request, values, rows, columns)
        yield from _by_position(request, values, video, rows, columns)
        yield from _by_size(request, values, video, rows, columns)
        if values == "flattened_patches":
            yield "row and column first", _flattened(request, rows, columns)


def _by_grid(request: Request, values: str, video: bool, rows: int, columns: int) -> Forms:
    """All patches of a batch in one list, and a row of counts (time, height, width) for each image."""

    def companion(*ends: str) -> str:
        return next((name for name in request.names if name.endswith(ends) and ("video" in name) is video), "")

    grid, merges = companion(*_GRIDS, *(f"{end}_videos" for end in _GRIDS)), companion("merge_sizes")
    if not grid:
        return
    frames = [1] if grid.endswith("thw") else []
    places: Kwargs = {grid: torch.tensor([[*frames, rows, columns]] * request.batch)}
    merge, channels, side = merge_of(request), request.channels, request.patch_side
    if merges:
        places[merges] = torch.full((request.batch,), merge)
    count, flat = request.batch * rows * columns, channels * side * side
    long = request.whole("temporal_patch_size", "patch_temporal", default=1) * flat
    shapes: dict[str, tuple[int, ...]] = {
        f"patches of {long}": (count, long),
        f"patches of {flat}": (count, flat),
        "patches of each image": (request.batch, rows * columns, long),
        "square patches": (count, channels, side, side),
        "square patches of one batch": (1, count, channels, side, side),
        "blocks of patches, channels last": (count, merge * side, merge * side, channels),
    }
    for detail, shape in shapes.items():
        yield detail, {values: request.normal(*shape), **places}


def _by_shape(request: Request, values: str, rows: int, columns: int) -> Forms:
    """Patches of each image, padded to the longest, its height and width in patches, and a mask of the padding."""
    if not {"spatial_shapes", "pixel_attention_mask"} <= set(request.names):
        return
    shapes = torch.tensor([[rows, columns]] * request.batch)
    mask = torch.ones(request.batch, rows * columns, dtype=torch.long)
    if request.variant == "padded":
        shapes[-1, 0] -= request.whole("downsample_factor", default=1)
        mask[-1, int(shapes[-1].prod()) :] = 0
    pixels = _patches(request, rows * columns)
    yield "padded patches", {values: pixels, "spatial_shapes": shapes, "pixel_attention_mask": mask}


def _by_position(request: Request, values: str, video: bool, rows: int, columns: int) -> Forms:
    """Patches of each image, and the (column, row) of each."""
    if name := request.first("video_position_ids" if video else "image_position_ids", "pixel_position_ids"):
        pixels, positions = _patches(request, rows * columns), _places(request, rows, columns).flip(-1)
        if video:
            pixels, positions = pixels[:, None], positions[:, None]
        yield "placed patches", {values: pixels, name: positions}


def _by_size(request: Request, values: str, video: bool, rows: int, columns: int) -> Forms:
    """All patches of a batch side by side in one flat picture, and each image's height and width in patches."""
    name = "target_sizes_videos" if video else "target_sizes"
    if name in request.names:
        # Windows and mergers halve the sides twice.
        sizes = torch.tensor([[2 * rows, 2 * columns]] * request.batch)
        width = int(sizes.prod(-1).sum()) * request.patch_side
        yield (
            "patches in a strip",
            {values: request.normal(1, request.channels, request.patch_side, width), name: sizes},
        )


def _flattened(request: Request, rows: int, columns: int) -> Kwargs:
    """Patches that begin with their row and column, counted from 1, as numbers."""
    pixels = _patches(request, rows * columns, "patch_embed_hidden_size")
    kwargs = {"flattened_patches": torch.cat([(_places(request, rows, columns) + 1).to(pixels), pixels], -1)}
    if request.variant == "padded" and "input_ids" not in request.names:
        kwargs["attention_mask"] = torch.ones(request.batch, rows * columns, dtype=torch.long)
        kwargs["attention_mask"][-1, -columns:] = 0
    return kwargs


def _patches(request: Request, count: int, *width: str) -> torch.Tensor:
    """`count` patches of each image; their width is the first setting of `width`, or channels * side**2."""
    return request.normal(request.batch, count, request.whole(*width, default=request.channels * request.patch_side**2))


def _places(request: Request, rows: int, columns: int) -> torch.Tensor:
    """(row, column) of every patch of each image."""
    return torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).expand(request.batch, -1, -1).clone()
