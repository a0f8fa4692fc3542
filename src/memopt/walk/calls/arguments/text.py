"""Token ids, alone or with other arguments of text models."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from memopt.walk.calls.arguments.forms import image_forms, video_forms
from memopt.walk.calls.arguments.request import PADDING, Kwargs, Request
from memopt.walk.calls.arguments.singles import box, complete

#: Settings for the placeholder token of an image's, or a video's, features in text.
IMAGE_TOKENS = ("image_token_id", "image_token_index", "image_pad_token_id", "media_placeholder_token_id")
VIDEO_TOKENS = ("video_token_id", "video_token_index", "video_pad_token_id")
#: Regions of an image, in models that take another model's features of these.
_REGIONS = 6
#: Forms of images that are tried with text.
_FORMS = 4


def text(request: Request) -> Iterator[tuple[str, Kwargs]]:
    if "input_ids" not in request.names:
        return
    beside = [] if _takes_text_alone(request) else [*image_forms(request), *video_forms(request)][:_FORMS]
    if request.main != "input_ids" and "input_ids" not in request.required and not beside:
        return
    ids = {"input_ids": request.ids(), **_region_features(request)}
    if "image_embeds_position_mask" in request.names:
        # An image's features replace as many tokens at any positions.
        taken = request.whole("latent_query_num", default=1)
        ids["input_ids"] = request.ids(taken + request.length)
        ids["image_embeds_position_mask"] = torch.zeros_like(ids["input_ids"])
        ids["image_embeds_position_mask"][:, :taken] = 1
    words = ids
    for detail, pixels in beside or [("", {})]:
        yield f"main:{detail}", complete(request, {**words, **pixels})
    ids = {**words, **(beside[0][1] if beside else {})}
    # Some models require token types, or a mask, in train mode.
    typed = {
        name: torch.zeros_like(ids["input_ids"])
        for name in ("token_type_ids", "mm_token_type_ids")
        if name in request.names
    }
    if typed:
        yield "main:token types", complete(request, {**ids, **typed})
    if "attention_mask" in request.names and request.variant != "padded":
        mask = request.mask(ids["input_ids"].shape[-1])
        yield "main:mask", complete(request, {**ids, **typed, "attention_mask": mask})
    if isinstance(end := request.setting("eos_token_id"), int):
        # Some heads read the position of the end of the sequence.
        ended = ids["input_ids"].clone()
        ended[:, -min(PADDING + 1, ended.shape[1])] = end
        yield "main:end of sequence", complete(request, {**ids, "input_ids": ended})
    choices = ids["input_ids"].unsqueeze(1).expand(request.batch, 2, -1).contiguous()
    yield "main:choices", complete(request, {**ids, "input_ids": choices})
    if "bbox" in request.names:
        yield "main:boxes", complete(request, {**ids, "bbox": box(request)})


def _takes_text_alone(request: Request) -> bool:
    """Models with a placeholder token take text without images; others (two towers) need both."""
    return request.setting(*IMAGE_TOKENS, *VIDEO_TOKENS) is not None


def _region_features(request: Request) -> Kwargs:
    """Features and positions of the regions of an image, from another model."""
    found: Kwargs = {}
    for name in ("visual_feats", "visual_embeds"):
        if name in request.names:
            width = request.whole("visual_feat_dim", "visual_embedding_dim", default=2048)
            found[name] = request.normal(request.batch, _REGIONS, width)
    if "visual_pos" in request.names:
        found["visual_pos"] = request.normal(
            request.batch, _REGIONS, request.whole("visual_pos_dim", default=4)
        ).sigmoid()
    return found
