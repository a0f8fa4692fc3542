"""Sounds: waves and spectrograms, alone and beside text."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from memopt.walk.calls.arguments.documented import described
from memopt.walk.calls.arguments.request import PLACEHOLDERS, Forms, Kwargs, Request

#: Names of spectrograms, likeliest first, and of the masks that come with them.
_SPECTROGRAMS = ("input_features", "audio_mel", "audio_input_features")
_MASKS = ("input_features_mask", "feature_attention_mask", "audio_mel_mask", "audio_attention_mask")
_WAVES = ("input_values", "audio_values")
_BINS = (
    "num_mel_bins", "n_mels", "n_mel_bins", "mel_bins", "input_feat_per_channel", "feature_size", "input_feat_size",
    "input_dim", "mel_dim",
)  # fmt: skip
#: Divisible by the strides and frames of most models that read waves.
_SAMPLES, _ROWS = 3840, 128
#: Samples and rows of a sound in a training step: ten seconds, at 16,000 samples and 100 rows a second.
_STEP_SAMPLES, _STEP_ROWS = 42 * _SAMPLES, 8 * _ROWS


def sound(request: Request) -> Forms:
    """A spectrogram, or a wave."""
    if "input_ids" not in request.required:
        yield from _spectrograms(request)
    for name in _WAVES:
        if name in request.names:
            yield from _waves(request, name)


def sound_beside_text(request: Request) -> Forms:
    """Two towers: text for one, a sound for the other."""
    if "input_ids" in request.names and request.setting(*PLACEHOLDERS["audio"]) is None:
        for detail, kwargs in _spectrograms(request):
            yield f"text and {detail}", {"input_ids": request.ids(), **kwargs}


def sounds_of_one_length(request: Request) -> Forms:
    """Unpadded sounds, so that each row has the same number of features."""
    request = replace(request, variant="plain")
    # A feature method often requires the mask that is optional in the forward.
    yield from sorted(_spectrograms(request), key=lambda form: not any(name.endswith("mask") for name in form[1]))
    samples = samples_of(request)[0]
    masks = {n: request.ones(n, request.batch, samples) for n in ("padding_mask",) if n in request.names}
    for name in _WAVES:
        if name in request.names:
            yield "wave", {name: request.normal(request.batch, samples), **masks}
            yield "wave with channel", {name: request.normal(request.batch, 1, samples), **masks}
    if (coded := described(request).get("audio_input_ids")) is not None:
        yield "codes", {"audio_input_ids": coded.value(request, "audio_input_ids")}


def samples_of(request: Request) -> list[int]:
    """Lengths of a wave, the likeliest first."""
    # Models that cut the wave into frames have the samples of a frame in their config, as a field or a property.
    frame = getattr(request.config, "samples_per_token", None) or getattr(request.config, "hop_length", None)
    frame = frame if isinstance(frame, int) and frame > 0 else 1
    odd = frame if request.variant == "odd" else 0
    lengths = (_STEP_SAMPLES, _SAMPLES) if request.size else (_SAMPLES,)
    return [frame * math.ceil(length / frame) + odd for length in lengths]


def _spectrograms(request: Request) -> Forms:
    """(detail, arguments) of one spectrogram for each row, in every layout, with its mask or its lengths."""
    name = request.first(*_SPECTROGRAMS)
    if not name:
        return
    # `attention_mask` masks the text where there is text, else the sound.
    mask = request.first(*_MASKS, *(() if "input_ids" in request.names else ("attention_mask",)))
    lengths, widths = _lengths(request), _widths(request)
    plain, masked = [], []
    for length in lengths:
        for width in widths:
            for layout, shape in (("frames", (width, length)), ("rows", (length, width))):
                form: Kwargs = {name: request.normal(request.batch, *shape)}
                if mask not in request.required:
                    plain.append((f"{length} {layout}", form))
                if mask:
                    ones = request.ones(mask, request.batch, length)
                    if request.variant == "padded":
                        ones[-1, -length // 4 :] = 0
                    masked.append((f"{length} {layout} and mask", {**form, mask: ones}))
    yield from plain
    yield from masked
    length, bins = lengths[-1], widths[0]
    if "feature_lens" in request.names:
        packed = request.normal(bins, request.batch * length)
        yield f"{length} packed", {name: packed, "feature_lens": torch.full((request.batch,), length)}
    yield f"{length} rows as an image", {name: request.normal(request.batch, 1, length, bins)}


def _widths(request: Request) -> list[int]:
    """Widths of a spectrogram: from the config, then from the model's first layer."""
    bins, first = request.whole(*_BINS, default=80), request.first_width
    return list(dict.fromkeys((bins, first if first > 1 else bins)))


def _lengths(request: Request) -> list[int]:
    positions = request.whole("max_source_positions", default=0)
    chunk = 2 * request.whole("n_window", default=1)
    stated = [2 * positions] if 0 < positions <= 1500 else []
    lengths = (_STEP_ROWS, _ROWS) if request.size else (_ROWS,)
    return list(dict.fromkeys((*stated, *(chunk * math.ceil(length / chunk) for length in lengths))))


def _waves(request: Request, name: str) -> Forms:
    for samples in samples_of(request):
        kwargs: Kwargs = {name: request.normal(request.batch, samples)}
        if request.variant == "padded" and "attention_mask" in request.names:
            kwargs["attention_mask"] = torch.ones(request.batch, samples, dtype=torch.long)
            kwargs["attention_mask"][-1, -1500:] = 0
        yield "wave", kwargs
        yield "wave with channel", {name: request.normal(request.batch, 1, samples)}
    length, bins = request.whole("max_length", default=1024), request.whole("num_mel_bins", default=128)
    yield "spectrogram", {name: request.normal(request.batch, length, bins)}
