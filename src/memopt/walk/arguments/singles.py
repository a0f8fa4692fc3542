"""Arguments that a forward may require beside its main one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from memopt.walk.arguments.pixels import image, side_of
from memopt.walk.arguments.request import BATCH, Kwargs, Request


def box(request: Request) -> torch.Tensor:
    return torch.tensor([1, 2, 30, 40]).expand(BATCH, request.length, 4).clone()


def _positions(request: Request) -> torch.Tensor:
    return torch.arange(request.length).expand(BATCH, -1).clone()


def features(request: Request) -> torch.Tensor:
    return request.normal(BATCH, request.length, request.whole("hidden_size", "d_model", default=64))


#: Builders of arguments that a forward may require beside its main one.
_ARGUMENTS: dict[str, Callable[[Request], torch.Tensor]] = {
    "input_ids": lambda request: request.ids(),
    "decoder_input_ids": lambda request: request.ids(),
    "attention_mask": lambda request: request.mask(),
    "token_type_ids": lambda request: torch.zeros(BATCH, request.length, dtype=torch.long),
    "position_ids": _positions,
    "bbox": box,
    "pixel_values": lambda request: image(request, side_of(request)),
    "inputs_embeds": features,
    "hidden_states": features,
    "encoder_hidden_states": features,
}


def complete(request: Request, given: Kwargs) -> Kwargs:
    """`given`, and what else the forward must have, or must be told for this variant."""
    kwargs = dict(given)
    names = request.names
    encodes_text = "input_ids" in kwargs
    if request.variant == "padded" and encodes_text and "attention_mask" in names:
        ids = kwargs["input_ids"]
        kwargs.setdefault("attention_mask", like_rows(request.mask(ids.shape[-1]), ids))
    if "decoder_input_ids" in names and (request.config.is_encoder_decoder or "decoder_input_ids" in request.required):
        kwargs.setdefault("decoder_input_ids", request.ids())
        if request.variant == "padded" and "decoder_attention_mask" in names:
            kwargs.setdefault("decoder_attention_mask", request.mask())
    for name in request.required:
        if name not in kwargs and name in _ARGUMENTS:
            kwargs[name] = _ARGUMENTS[name](request)
    if "use_cache" in names:
        kwargs["use_cache"] = False
    return kwargs


def like_rows(mask: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return mask.reshape(BATCH, *[1] * (ids.dim() - 2), -1).expand_as(ids).contiguous()
