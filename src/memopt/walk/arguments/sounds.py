"""Sounds: waves and spectrograms."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from memopt.walk.arguments.request import BATCH, Kwargs, Request
from memopt.walk.arguments.singles import complete


def sound(request: Request) -> Iterator[tuple[str, Kwargs]]:
    if "input_features" in request.names and "input_ids" not in request.required:
        bins = request.whole("num_mel_bins", "n_mels", "input_feat_per_channel", "feature_size", default=80)
        positions = request.whole("max_source_positions", default=0)
        lengths = [2 * positions] if 0 < positions <= 1500 else []
        for length in (*lengths, 128):
            yield f"main:{length} frames", complete(request, {"input_features": request.normal(BATCH, bins, length)})
            yield f"main:{length} rows", complete(request, {"input_features": request.normal(BATCH, length, bins)})
    for name in ("input_values", "audio_values"):
        if name in request.names:
            samples = 4001 if request.variant == "odd" else 4000
            kwargs: Kwargs = {name: request.normal(BATCH, samples)}
            if request.variant == "padded" and "attention_mask" in request.names:
                kwargs["attention_mask"] = torch.ones(BATCH, samples, dtype=torch.long)
                kwargs["attention_mask"][-1, -1500:] = 0
            yield "main:wave", complete(request, kwargs)
            yield "main:wave with channel", complete(request, {name: request.normal(BATCH, 1, samples)})
            length = request.whole("max_length", default=1024)
            bins = request.whole("num_mel_bins", default=128)
            yield "main:spectrogram", complete(request, {name: request.normal(BATCH, length, bins)})
