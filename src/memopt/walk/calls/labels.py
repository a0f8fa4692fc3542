"""Labels for a forward, proposed by its signature and the shape of its logits."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

#: The label value that torch's and transformers' losses skip.
IGNORED = -100


def target_candidates(names: Collection[str], logits: Any, inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Arguments with which a forward with parameters `names` may return a loss, the likeliest first."""
    generator = torch.Generator().manual_seed(0)
    if "labels" in names:
        for labels in _labels(logits, inputs, generator):
            yield {"labels": labels}
    rows = next((value.shape[0] for value in inputs.values() if isinstance(value, torch.Tensor)), 0)
    device = next((value.device for value in inputs.values() if isinstance(value, torch.Tensor)), None)
    ones = torch.ones(rows, dtype=torch.long, device=device)
    if {"start_positions", "end_positions"} <= set(names):
        yield {"start_positions": ones, "end_positions": 2 * ones}
    if {"labels", "next_sentence_label"} <= set(names) and isinstance(ids := inputs.get("input_ids"), torch.Tensor):
        yield {"labels": ids.clone(), "next_sentence_label": ones}
    if "return_loss" in names:
        yield {"return_loss": True}


def _labels(logits: Any, inputs: Mapping[str, Any], generator: torch.Generator) -> Iterator[torch.Tensor]:
    if not isinstance(logits, torch.Tensor) or logits.dim() < 2:
        return

    def classes(shape: Sequence[int], count: int) -> torch.Tensor:
        # Of many classes the first few are often padding or blank.
        first = 4 if count > 8 else 0
        return torch.randint(first, max(1, count), tuple(shape), generator=generator).to(logits.device)

    batch, count = logits.shape[0], logits.shape[-1]
    if logits.dim() == 2:
        yield torch.randn(batch, generator=generator).to(logits) if count == 1 else classes((batch,), count)
    elif logits.dim() == 3:
        # A label for each position of the logits, else for each id, else a short transcript.
        yield _unpadded(classes(logits.shape[:2], count), inputs)
        if isinstance(ids := inputs.get("input_ids"), torch.Tensor):
            yield classes(ids.shape, count)
        yield classes((batch, max(1, logits.shape[1] // 4)), count)
    elif isinstance(pixels := inputs.get("pixel_values"), torch.Tensor):
        yield classes((batch, *pixels.shape[-2:]), logits.shape[1])


def _unpadded(labels: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Labels with padding ignored, as a collator returns them."""
    name = "decoder_attention_mask" if "decoder_input_ids" in inputs else "attention_mask"
    mask = inputs.get(name)
    if isinstance(mask, torch.Tensor) and mask.shape == labels.shape:
        return labels.masked_fill(mask == 0, IGNORED)
    return labels
