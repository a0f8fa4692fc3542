"""Builders of single arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memopt.walk.calls.arguments.documented import described
from memopt.walk.calls.arguments.images import image, side_of
from memopt.walk.calls.arguments.request import Kwargs, Request


def box(request: Request) -> torch.Tensor:
    return torch.tensor([1, 2, 30, 40]).expand(request.batch, request.length, 4).clone()


def features(request: Request) -> torch.Tensor:
    return request.normal(request.batch, request.length, request.hidden)


def context(request: Request) -> torch.Tensor:
    """Hidden vectors of another model, to attend to, in the width that a decoder takes."""
    names = ("encoder_hidden_size", "cross_hidden_size", "cross_attention_hidden_size", "cross_attention_dim")
    return request.normal(request.batch, request.length, request.whole(*names, default=request.hidden))


#: Name of an argument -> its builder; for arguments besides the main input that a forward requires.
ARGUMENTS: dict[str, Callable[[Request], torch.Tensor]] = {
    "input_ids": lambda request: request.ids(),
    "decoder_input_ids": lambda request: request.ids(request.decoder_length),
    "attention_mask": lambda request: request.mask(),
    "token_type_ids": lambda request: torch.zeros(request.batch, request.length, dtype=torch.long),
    "bbox": box,
    "pixel_values": lambda request: image(request, side_of(request)),
    "inputs_embeds": features,
    "hidden_states": features,
    "encoder_hidden_states": context,
    "image": lambda request: image(request, side_of(request)),
    "prompt_pixel_values": lambda request: image(request, side_of(request)),
    "prompt_masks": lambda request: image(request, side_of(request)),
    "qformer_input_ids": lambda request: request.ids(),
    "task_inputs": lambda request: request.ids(request.whole("task_seq_len", default=request.length)),
}


def value_of(request: Request, name: str) -> Any:
    """A value for argument `name`: from its builder, else as the docstring describes it, else from its name's form."""
    if name in ARGUMENTS:
        return ARGUMENTS[name](request)
    if (description := described(request).get(name)) is not None:
        return description.value(request, name)
    return _by_convention(request, name)


def _by_convention(request: Request, name: str) -> Any:
    annotation = str(request.names[name].annotation)
    if name.endswith("mask"):
        return request.ones(name, request.batch, request.length)
    if name.endswith(("lengths", "lens")):
        return torch.full((request.batch,), request.length)
    if name.endswith(("embeds", "states", "features")):
        return features(request)
    if name.endswith(("ids", "codes", "labels")):
        return torch.zeros(request.batch, request.length, dtype=torch.long)
    if name.startswith(("num_", "n_")) and "Tensor" not in annotation:
        return 1
    if name in ("time_step", "timestep"):
        return torch.full((request.batch,), 0.5)
    if any(kind in annotation for kind in ("LongTensor", "IntTensor")):
        return torch.ones(request.batch, request.length, dtype=torch.long)
    if width := request.whole(f"max_{name}_dim", f"{name}_dim", default=0):
        return request.normal(request.batch, width)
    return None


def complete(request: Request, given: Kwargs) -> Kwargs:
    """`given`, with the other required arguments and the arguments of the variant (masks) added."""
    kwargs = dict(given)
    names = request.names
    encodes_text = "input_ids" in kwargs
    if request.variant == "padded" and encodes_text and "attention_mask" in names:
        ids = kwargs["input_ids"]
        kwargs.setdefault("attention_mask", like_rows(request.mask(ids.shape[-1]), ids))
    if "decoder_input_ids" in names and (request.config.is_encoder_decoder or "decoder_input_ids" in request.required):
        kwargs.setdefault("decoder_input_ids", request.ids(request.decoder_length))
        if request.variant == "padded" and "decoder_attention_mask" in names:
            kwargs.setdefault("decoder_attention_mask", request.mask(kwargs["decoder_input_ids"].shape[-1]))
    for name in request.required:
        if name not in kwargs and (value := value_of(request, name)) is not None:
            kwargs[name] = value
    if encodes_text and "image_attention_mask" in names and getattr(kwargs.get("pixel_values"), "ndim", 0) == 5:
        # Every token attends to every image.
        seen = *kwargs["input_ids"].shape, kwargs["pixel_values"].shape[1]
        kwargs.setdefault("image_attention_mask", torch.ones(seen, dtype=torch.long))
    if "use_cache" in names:
        kwargs["use_cache"] = False
    return kwargs


def like_rows(mask: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """`mask` in the shape of `ids`: its last row for the last row of `ids`, its first row for all others."""
    rows = [mask[:1].expand(ids.shape[0] - 1, -1), mask[-1:]]
    return torch.cat(rows).reshape(ids.shape[0], *[1] * (ids.dim() - 2), -1).expand_as(ids).contiguous()
