"""Token ids, alone or with what some text models want beside them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from memopt.walk.arguments.pixels import image, side_of
from memopt.walk.arguments.request import BATCH, PADDING, Kwargs, Request
from memopt.walk.arguments.singles import box, complete


def text(request: Request) -> Iterator[tuple[str, Kwargs]]:
    if "input_ids" not in request.names:
        return
    if request.main != "input_ids" and "input_ids" not in request.required:
        return
    ids = {"input_ids": request.ids()}
    if "pixel_values" in request.names and not _takes_text_alone(request):
        ids["pixel_values"] = image(request, side_of(request))
    yield "main:", complete(request, ids)
    # Some models want token types, or a mask, as soon as they train.
    typed = {
        name: torch.zeros_like(ids["input_ids"])
        for name in ("token_type_ids", "mm_token_type_ids")
        if name in request.names
    }
    if typed:
        yield "main:token types", complete(request, {**ids, **typed})
    if "attention_mask" in request.names and request.variant != "padded":
        yield "main:mask", complete(request, {**ids, **typed, "attention_mask": request.mask()})
    if isinstance(end := request.setting("eos_token_id"), int):
        # Some heads read the position of the end of the sequence.
        ended = ids["input_ids"].clone()
        ended[:, -PADDING - 1] = end
        yield "main:end of sequence", complete(request, {**ids, "input_ids": ended})
    choices = ids["input_ids"].unsqueeze(1).expand(BATCH, 2, -1).contiguous()
    yield "main:choices", complete(request, {**ids, "input_ids": choices})
    if "bbox" in request.names:
        yield "main:boxes", complete(request, {**ids, "bbox": box(request)})
    if "pixel_values" in request.names:
        yield "main:text and image", complete(request, {**ids, "pixel_values": image(request, side_of(request))})


def _takes_text_alone(request: Request) -> bool:
    """Models with a placeholder token mix images into the text; others (two towers) need both."""
    return request.setting("image_token_id", "image_token_index") is not None
