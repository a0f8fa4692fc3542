"""Images and videos as patches in one long sequence, with an argument for their positions."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from memopt.walk.calls.arguments.request import Kwargs, Request

#: Columns of a grid that the argument's name ends with: time, height and width, or height and width.
_GRIDS = ("grid_thw", "grid_hws", "grid_hw")
_MERGES = ("spatial_merge_size", "merge_size", "merge_kernel_size")


def packed(request: Request, values: str, video: bool) -> Iterator[tuple[str, Kwargs]]:
    """(detail, kwargs) for images, or videos, in argument `values`; nothing for a forward without such positions.

    An image has the patches of 2 x 2 merged tokens, in the odd variant of 2 x 3; in a step of 16 x 16, if that runs.
    """
    for rows, columns in _sides(request):
        yield from _by_grid(request, values, video, rows, columns)
        yield from _by_shape(request, values, rows, columns)
        yield from _by_position(request, values, video, rows, columns)
        yield from _by_size(request, values, video, rows, columns)
        if values == "flattened_patches":
            yield "row and column first", _flattened(request, rows, columns)


def merge_of(request: Request) -> int:
    """Patches a side that are merged into one feature."""
    return request.whole(*_MERGES, default=2)


def flat_patches(request: Request, side: tuple[int, int]) -> torch.Tensor:
    """The patches of whole images, in order."""
    channels, patch = request.channels, request.patch_side
    return request.normal(request.batch, (side[0] // patch) * (side[1] // patch), channels * patch * patch)


def _sides(request: Request) -> list[tuple[int, int]]:
    """Rows and columns of patches, the likeliest first."""
    merged = request.whole(*_MERGES, "pooling_kernel_size", default=2)
    small = (2 * merged, (3 if request.variant == "odd" else 2) * merged)
    return [(16 * merged, 16 * merged), small] if request.size else [small]


def _companion(request: Request, video: bool, *ends: str) -> str | None:
    """Argument with one of these endings for images, or for videos."""
    found = [name for name in request.names if name.endswith(ends)]
    return next((name for name in found if ("video" in name) is video), None)


def _by_grid(request: Request, values: str, video: bool, rows: int, columns: int) -> Iterator[tuple[str, Kwargs]]:
    """All patches of a batch in one list, and a row of counts (time, height, width) for each image."""
    grid = _companion(request, video, *_GRIDS, *(f"{end}_videos" for end in _GRIDS))
    if grid is None:
        return
    channels, side = request.channels, request.patch_side
    temporal = request.whole("temporal_patch_size", "patch_temporal", default=1)
    frames = [1] if grid.endswith("thw") else []
    places: Kwargs = {grid: torch.tensor([[*frames, rows, columns]] * request.batch)}
    merges = _companion(request, video, "merge_sizes")
    if merges is not None:
        places[merges] = torch.full((request.batch,), merge_of(request))
    count = request.batch * rows * columns
    flat = channels * side * side
    for width in dict.fromkeys((temporal * flat, flat)):
        yield f"patches of {width}", {values: request.normal(count, width), **places}
    yield (
        "patches of each image",
        {values: request.normal(request.batch, count // request.batch, temporal * flat), **places},
    )
    yield "square patches", {values: request.normal(count, channels, side, side), **places}
    yield "square patches of one batch", {values: request.normal(1, count, channels, side, side), **places}
    merge = merge_of(request)
    blocks = request.normal(count, merge * side, merge * side, channels)
    yield "blocks of patches, channels last", {values: blocks, **places}


def _by_shape(request: Request, values: str, rows: int, columns: int) -> Iterator[tuple[str, Kwargs]]:
    """Patches of each image, padded to the longest, its height and width in patches, and a mask of the padding."""
    if not {"spatial_shapes", "pixel_attention_mask"} <= set(request.names):
        return
    channels, side = request.channels, request.patch_side
    shapes = torch.tensor([[rows, columns]] * request.batch)
    mask = torch.ones(request.batch, rows * columns, dtype=torch.long)
    if request.variant == "padded":
        shapes[-1, 0] -= request.whole("downsample_factor", default=1)
        mask[-1, int(shapes[-1].prod()) :] = 0
    pixels = request.normal(request.batch, rows * columns, channels * side * side)
    yield "padded patches", {values: pixels, "spatial_shapes": shapes, "pixel_attention_mask": mask}


def _by_position(request: Request, values: str, video: bool, rows: int, columns: int) -> Iterator[tuple[str, Kwargs]]:
    """Patches of each image, and the (column, row) of each."""
    name = "video_position_ids" if video else "image_position_ids"
    name = next((each for each in (name, "pixel_position_ids") if each in request.names), "")
    if not name:
        return
    channels, side = request.channels, request.patch_side
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    positions = torch.stack([column, row], -1).reshape(1, -1, 2).repeat(request.batch, 1, 1)
    pixels = request.normal(request.batch, rows * columns, channels * side * side)
    if video:
        pixels, positions = pixels[:, None], positions[:, None]
    yield "placed patches", {values: pixels, name: positions}


def _by_size(request: Request, values: str, video: bool, rows: int, columns: int) -> Iterator[tuple[str, Kwargs]]:
    """All patches of a batch side by side in one flat picture, and each image's height and width in patches."""
    name = "target_sizes_videos" if video else "target_sizes"
    if name not in request.names:
        return
    channels, side = request.channels, request.patch_side
    # Windows and mergers halve the sides twice.
    sizes = torch.tensor([[2 * rows, 2 * columns]] * request.batch)
    pixels = request.normal(1, channels, side, int(sizes.prod(-1).sum()) * side)
    yield "patches in a strip", {values: pixels, name: sizes}


def _flattened(request: Request, rows: int, columns: int) -> Kwargs:
    """Patches that begin with their row and column, counted from 1, as numbers."""
    channels, side = request.channels, request.patch_side
    width = request.whole("patch_embed_hidden_size", default=channels * side * side)
    row, column = torch.meshgrid(torch.arange(1, rows + 1), torch.arange(1, columns + 1), indexing="ij")
    places = torch.stack([row, column], -1).reshape(1, -1, 2).repeat(request.batch, 1, 1)
    pixels = request.normal(request.batch, rows * columns, width)
    kwargs = {"flattened_patches": torch.cat([places.to(pixels), pixels], -1)}
    if request.variant == "padded" and "input_ids" not in request.names:
        kwargs["attention_mask"] = torch.ones(request.batch, rows * columns, dtype=torch.long)
        kwargs["attention_mask"][-1, -columns:] = 0
    return kwargs
