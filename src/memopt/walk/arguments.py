"""What the arguments of a model's forward look like: token ids, masks, images, sounds, time series, features.

Everything is derived from the names in the forward's signature, `main_input_name` and numbers in the config. For one
more kind of input, add a builder to `_ARGUMENTS` (one argument) or to `_FAMILIES` (arguments that come together, or
have several possible shapes). Trying what is proposed here is `memopt.walk.inputs`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from memopt.errors import ModelError
from memopt.walk.config import config_nodes

BATCH = 2
LENGTH, ODD_LENGTH = 16, 13
PADDING = 5
MAX_VOCABULARY = 3000

Kwargs = dict[str, Any]


def candidates(model: nn.Module, variant: str, seed: int) -> Iterator[tuple[str, Kwargs]]:
    """(``modality:detail``, kwargs) of every way to call the model worth trying, the likeliest first.

    The modality is ``main`` for what `main_input_name` asks for; tensors are on CPU, floating ones in fp32.
    """
    request = _Request.of(model, variant, seed)
    for family in _FAMILIES:
        yield from family(request)


def inner_model(model: nn.Module) -> nn.Module:
    """The model inside wrappers (PEFT, DDP, torch.compile), whose forward says what it takes."""
    while True:
        if callable(getter := getattr(model, "get_base_model", None)):
            wrapped = getter()
        else:
            wrapped = getattr(model, "_orig_mod", None)
            if wrapped is None and not _named(model):
                wrapped = getattr(model, "module", None)
        if not isinstance(wrapped, nn.Module) or wrapped is model:
            return model
        model = wrapped


def forward_parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Named parameters of the forward of the model inside wrappers."""
    return _named(inner_model(model))


def has_config(model: nn.Module) -> bool:
    return isinstance(getattr(inner_model(model), "config", None), PreTrainedConfig)


def _named(model: nn.Module) -> dict[str, inspect.Parameter]:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {n: p for n, p in inspect.signature(model.forward).parameters.items() if p.kind not in kinds}


@dataclass(frozen=True)
class _Request:
    """A model to make inputs for, and how they should vary."""

    model: nn.Module
    config: PreTrainedConfig
    names: Mapping[str, inspect.Parameter]
    main: str
    variant: str
    generator: torch.Generator

    @classmethod
    def of(cls, model: nn.Module, variant: str, seed: int) -> _Request:
        inner = inner_model(model)
        config = getattr(inner, "config", None)
        if not isinstance(config, PreTrainedConfig):
            raise ModelError(
                f"No inputs can be made for {type(inner).__name__}: it has no transformers config.",
                "Pass a batch of your own.",
            )
        main = getattr(inner, "main_input_name", "input_ids")
        main = main if isinstance(main, str) else next(iter(main), "input_ids")
        return cls(inner, config, _named(inner), main, variant, torch.Generator().manual_seed(seed))

    @property
    def required(self) -> list[str]:
        return [name for name, parameter in self.names.items() if parameter.default is inspect.Parameter.empty]

    @property
    def length(self) -> int:
        return ODD_LENGTH if self.variant == "odd" else LENGTH

    def setting(self, *names: str, default: Any = None) -> Any:
        """First value of one of `names` in the config or, failing that, a nested one, also under standard names."""
        for node in config_nodes(self.config):
            for name in names:
                value = vars(node).get(type(node).attribute_map.get(name, name))
                if value is not None:
                    return value
        return default

    def whole(self, *names: str, default: int) -> int:
        value = self.setting(*names, default=default)
        if isinstance(value, list | tuple) and value:
            value = value[0]
        return value if isinstance(value, int) else default

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def ids(self, length: int | None = None) -> torch.Tensor:
        pool = torch.tensor(_ordinary_ids(self.config))
        return pool[torch.randint(0, len(pool), (BATCH, length or self.length), generator=self.generator)]

    def mask(self, length: int | None = None) -> torch.Tensor:
        mask = torch.ones(BATCH, length or self.length, dtype=torch.long)
        if self.variant == "padded":
            mask[-1, -PADDING:] = 0
        return mask


def _ordinary_ids(config: PreTrainedConfig) -> list[int]:
    """Token ids that every vocabulary of the model has and that mean nothing special to it."""
    special: set[int] = {0, 1, 2, 3}
    sizes = [MAX_VOCABULARY]
    for node in config_nodes(config):
        for name, value in vars(node).items():
            if name.endswith("vocab_size") and not name.startswith("type_") and isinstance(value, int) and value > 0:
                sizes.append(value)
            elif "token" in name or name.endswith(("_id", "_ids")):
                special.update(v for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, int))
    return [token for token in range(min(sizes)) if token not in special] or list(range(min(sizes)))


# --- single arguments -------------------------------------------------------------------------------------------


def _box(request: _Request) -> torch.Tensor:
    return torch.tensor([1, 2, 30, 40]).expand(BATCH, request.length, 4).clone()


def _positions(request: _Request) -> torch.Tensor:
    return torch.arange(request.length).expand(BATCH, -1).clone()


def _features(request: _Request) -> torch.Tensor:
    return request.normal(BATCH, request.length, request.whole("hidden_size", "d_model", default=64))


#: Builders of arguments that a forward may require beside its main one.
_ARGUMENTS: dict[str, Callable[[_Request], torch.Tensor]] = {
    "input_ids": lambda request: request.ids(),
    "decoder_input_ids": lambda request: request.ids(),
    "attention_mask": lambda request: request.mask(),
    "token_type_ids": lambda request: torch.zeros(BATCH, request.length, dtype=torch.long),
    "position_ids": _positions,
    "bbox": _box,
    "pixel_values": lambda request: _image(request, _side(request)),
    "inputs_embeds": _features,
    "hidden_states": _features,
    "encoder_hidden_states": _features,
}


def _complete(request: _Request, given: Kwargs) -> Kwargs:
    """`given`, and what else the forward must have, or must be told for this variant."""
    kwargs = dict(given)
    names = request.names
    encodes_text = "input_ids" in kwargs
    if request.variant == "padded" and encodes_text and "attention_mask" in names:
        ids = kwargs["input_ids"]
        kwargs.setdefault("attention_mask", _like_rows(request.mask(ids.shape[-1]), ids))
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


def _like_rows(mask: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return mask.reshape(BATCH, *[1] * (ids.dim() - 2), -1).expand_as(ids).contiguous()


# --- families: arguments that come together -------------------------------------------------------------------------


def _text(request: _Request) -> Iterator[tuple[str, Kwargs]]:
    if "input_ids" not in request.names:
        return
    if request.main != "input_ids" and "input_ids" not in request.required:
        return
    ids = {"input_ids": request.ids()}
    if "pixel_values" in request.names and not _takes_text_alone(request):
        ids["pixel_values"] = _image(request, _side(request))
    yield "main:", _complete(request, ids)
    # Some models want token types, or a mask, as soon as they train.
    typed = {
        name: torch.zeros_like(ids["input_ids"])
        for name in ("token_type_ids", "mm_token_type_ids")
        if name in request.names
    }
    if typed:
        yield "main:token types", _complete(request, {**ids, **typed})
    if "attention_mask" in request.names and request.variant != "padded":
        yield "main:mask", _complete(request, {**ids, **typed, "attention_mask": request.mask()})
    if isinstance(end := request.setting("eos_token_id"), int):
        # Some heads read the position of the end of the sequence.
        ended = ids["input_ids"].clone()
        ended[:, -PADDING - 1] = end
        yield "main:end of sequence", _complete(request, {**ids, "input_ids": ended})
    choices = ids["input_ids"].unsqueeze(1).expand(BATCH, 2, -1).contiguous()
    yield "main:choices", _complete(request, {**ids, "input_ids": choices})
    if "bbox" in request.names:
        yield "main:boxes", _complete(request, {**ids, "bbox": _box(request)})
    if "pixel_values" in request.names:
        yield "main:text and image", _complete(request, {**ids, "pixel_values": _image(request, _side(request))})


def _takes_text_alone(request: _Request) -> bool:
    """Models with a placeholder token mix images into the text; others (two towers) need both."""
    return request.setting("image_token_id", "image_token_index") is not None


def _image_alone(request: _Request) -> Iterator[tuple[str, Kwargs]]:
    if "pixel_values" not in request.names or "input_ids" in request.names:
        return
    side = _odd_side(request) if request.variant == "odd" else _side(request)
    extra: Kwargs = {}
    if request.variant == "odd" and "interpolate_pos_encoding" in request.names:
        extra["interpolate_pos_encoding"] = True
    yield "main:", _complete(request, {"pixel_values": _image(request, side), **extra})
    frames = request.whole("num_frames", "frames_per_clip", default=0)
    if frames:
        channels = request.whole("num_channels", "in_channels", "in_chans", default=3)
        yield "main:video", _complete(request, {"pixel_values": request.normal(1, frames, channels, *side)})


def _image_in_text(request: _Request) -> Iterator[tuple[str, Kwargs]]:
    """An image beside text that has a placeholder token for each of its features."""
    token = request.setting("image_token_id", "image_token_index")
    if not {"input_ids", "pixel_values"} <= set(request.names) or not isinstance(token, int):
        return
    for features, pixels in _images_in_text(request):
        ids = request.ids()
        ids = torch.cat([ids[:, :4], torch.full((BATCH, features), token), ids[:, 4:]], 1)
        is_image = (ids == token).long()
        types = {name: is_image for name in ("token_type_ids", "mm_token_type_ids") if name in request.names}
        yield f"image:{features} features", _complete(request, {"input_ids": ids, **pixels, **types})


def _images_in_text(request: _Request) -> Iterator[tuple[int, Kwargs]]:
    """(features an image, arguments that carry the images)."""
    if "image_grid_thw" in request.names:
        patch, merge = request.whole("patch_size", default=14), request.whole("spatial_merge_size", default=2)
        channels = request.whole("num_channels", "in_channels", "in_chans", default=3)
        values = channels * request.whole("temporal_patch_size", default=2) * patch * patch
        side = 2 * merge
        grid = torch.tensor([[1, side, side]] * BATCH)
        yield 4, {"pixel_values": request.normal(BATCH * side * side, values), "image_grid_thw": grid}
        return
    pixels = _image(request, _side(request))
    for features in _feature_counts(request):
        yield features, {"pixel_values": pixels}


def _feature_counts(request: _Request) -> list[int]:
    patch = request.whole("patch_size", default=16)
    height, width = _side(request)
    patches = (height // patch) * (width // patch)
    stated = request.setting("mm_tokens_per_image", "image_seq_length", "image_token_num")
    counts = [stated, patches, patches + 1, patches // 4]
    return list(dict.fromkeys(count for count in counts if isinstance(count, int) and count > 0))


def _sound(request: _Request) -> Iterator[tuple[str, Kwargs]]:
    if "input_features" in request.names and "input_ids" not in request.required:
        bins = request.whole("num_mel_bins", "n_mels", "input_feat_per_channel", "feature_size", default=80)
        positions = request.whole("max_source_positions", default=0)
        lengths = [2 * positions] if 0 < positions <= 1500 else []
        for length in (*lengths, 128):
            yield f"main:{length} frames", _complete(request, {"input_features": request.normal(BATCH, bins, length)})
            yield f"main:{length} rows", _complete(request, {"input_features": request.normal(BATCH, length, bins)})
    for name in ("input_values", "audio_values"):
        if name in request.names:
            samples = 4001 if request.variant == "odd" else 4000
            kwargs: Kwargs = {name: request.normal(BATCH, samples)}
            if request.variant == "padded" and "attention_mask" in request.names:
                kwargs["attention_mask"] = torch.ones(BATCH, samples, dtype=torch.long)
                kwargs["attention_mask"][-1, -1500:] = 0
            yield "main:wave", _complete(request, kwargs)
            yield "main:wave with channel", _complete(request, {name: request.normal(BATCH, 1, samples)})
            length = request.whole("max_length", default=1024)
            bins = request.whole("num_mel_bins", default=128)
            yield "main:spectrogram", _complete(request, {name: request.normal(BATCH, length, bins)})


def _anything(request: _Request) -> Iterator[tuple[str, Kwargs]]:
    """Last resort: the main input, or the first required one, as a sequence of hidden vectors."""
    name = request.main if request.main in request.names else next(iter(request.required), None)
    if name is None or name in ("input_ids", "pixel_values", "input_features", "input_values", "audio_values"):
        return
    yield "main:features", _complete(request, {name: _features(request)})


_FAMILIES: tuple[Callable[[_Request], Iterator[tuple[str, Kwargs]]], ...] = (
    _text,
    _image_alone,
    _image_in_text,
    _sound,
    _anything,
)


# --- images -----------------------------------------------------------------------------------------------------


def _image(request: _Request, side: tuple[int, int]) -> torch.Tensor:
    channels = request.whole("num_channels", "in_channels", "in_chans", default=3)
    return request.normal(BATCH, channels, *side)


def _side(request: _Request) -> tuple[int, int]:
    """(height, width) in pixels."""
    size = request.setting("image_size", "img_size", "input_size", default=224)
    if isinstance(size, dict):
        size = (size.get("height", 224), size.get("width", 224))
    if isinstance(size, list | tuple) and len(size) >= 2:
        return int(size[-2]), int(size[-1])
    return (size, size) if isinstance(size, int) else (224, 224)


def _odd_side(request: _Request) -> tuple[int, int]:
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

    height, width = _side(request)
    return smaller(height), smaller(width)
