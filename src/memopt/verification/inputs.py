"""Inputs for a verification: the user's batch, else text if the checkpoint has a tokenizer, else synthetic inputs.

Outlier channels and trained norms show on text of the kind that the model was trained on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memopt.checkpoint.patched import is_patched, patched_folder
from memopt.errors import InputsError
from memopt.verification.models import cast_inputs, stored_dtype
from memopt.walk.calls.batch import PASS_INPUTS, Batch, check_names, does_not_run, rows_of, tokens_of
from memopt.walk.calls.inputs import runnable_calls, training_targets
from memopt.walk.calls.preserve import preserved
from memopt.walk.calls.processed import processed_batches
from memopt.walk.models.config import one_line

BATCH, TOKENS = 2, 128

_TEXTS = (
    "Rivers shape the land slowly. In spring the melting snow fills every stream, and the water carries sand and "
    "stones from the mountains to the plain. Where the slope ends the current loses its strength, so the load sinks "
    "and builds a fan of gravel that grows a little every year. People have always lived beside such places: the "
    "ground is fertile, the water is near, and boats can leave for the sea. But floods return, too, and the oldest "
    "towns stand on low hills for a good reason. Today engineers measure the flow every hour, publish the level on "
    "the internet, and open gates long before the first street is wet. The capital of France lies on such a river.",
    "def moving_average(values, window):\n    total = sum(values[:window])\n    yield total / window\n    for old, new "
    "in zip(values, values[window:]):\n        total += new - old\n        yield total / window\n\nThe function above "
    "keeps one running total instead of adding the whole window again, so its cost does not depend on the window. "
    "Rounding errors do accumulate, however: after 1,000,000 steps in single precision the result may be off in the "
    "fourth digit. Two remedies are known. The first recomputes the total from time to time; the second, due to "
    "Kahan, carries a correction term along. Which one is better? In 2019 a survey of 48 libraries found that most "
    "of them use neither.",
    "Dear Dr. Okafor, thank you for your letter of 3 March. We have read it with great interest. The committee will "
    "meet on Thursday at 10:30 in room B-214 and decide about the second phase of the study, in which 312 patients "
    "take part. As you know, the first phase ended earlier than planned, because the sensors failed at temperatures "
    "below -12 degrees. New sensors have arrived from Lisbon, Oslo and Seoul; they were tested for six weeks and lost "
    "less than 0.4 % of the readings. If nobody objects, we would like to start in May. Please tell us whether that "
    "suits you, and who in your group should receive the contract. With kind regards, Ines Moreau.",
    "Q: Why does bread rise? A: Yeast eats sugar and gives off carbon dioxide. The gas cannot leave the dough, since "
    "kneading has turned the proteins of the flour into an elastic net called gluten, and so the dough swells. In a "
    "warm kitchen this takes an hour; in the refrigerator it takes a night, but the flavour is better. Q: And why "
    "does it stop? A: The oven kills the yeast at about 60 degrees. Until then the gas expands once more, which "
    "bakers call oven spring. Afterwards the starch sets, the crust turns brown, and the loaf keeps its shape. Q: Can "
    "I use less salt? A: A little. Salt slows the yeast down, tightens the net, and without it bread tastes flat.",
)


_TOKENIZER_FILES = ("tokenizer.json", "vocab.*", "*.model", "tokenizer.model*", "spiece.*")


class NoInputs(InputsError):
    """The model runs with none of the inputs that memopt can make, and the user gave none."""


@dataclass(frozen=True)
class Probes:
    """The inputs of all models of a verification."""

    batches: tuple[dict[str, Any], ...]
    """Keyword arguments of the forward, without labels unless the user gave them."""
    targets: tuple[dict[str, Any], ...]
    """Labels to add to each batch; empty if the batch has some or the model has no loss."""
    source: str
    """A description in words."""
    guessed: bool = True
    """Whether the inputs come from the config and the forward's signature, not from a user's or a processor's batch."""

    @property
    def rows(self) -> int:
        """Rows of the first batch."""
        return rows_of(self.batches[0])

    @property
    def tokens_per_row(self) -> int | None:
        """Tokens in each row of the first batch; None if the model reads no tokens."""
        return tokens_of(self.batches[0])


def probe_inputs(
    model: nn.Module, folder: Path, inputs: Batch | None = None, *, trust_remote_code: bool = False
) -> Probes:
    """Two batches for `model`, or `inputs` alone; models of one config get the same batches. Raises an InputsError if
    it does not run with `inputs`, and NoInputs if it runs with none of the inputs that memopt can make."""
    if inputs is not None:
        check_names(model, inputs)
        probes = _driven(model, inputs, "the batch that was given")
        if isinstance(probes, str):
            raise does_not_run(model, probes)
        return probes
    found = [runnable_calls(model, variants=("plain",), seed=seed) for seed in (0, 1)]
    if not all(found):
        errors = [error for calls in found for _, error in calls.errors]
        return _processed(model, folder, errors, trust_remote_code)
    batches = [calls[0].kwargs for calls in found]
    # Labels are found with the small inputs, because the search runs several forwards.
    targets = [training_targets(model, batch) for batch in batches]
    source = "synthetic"
    # Only the main call: the ids of other calls contain placeholders.
    if "input_ids" in batches[0] and found[0][0].label == "plain":
        vocabulary = max((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=0)
        rows = _token_rows(folder, _limit(model), vocabulary)
        if rows is not None:
            texts = rows.split(BATCH)
            targets = [_text_labels(*triple) for triple in zip(batches, targets, texts, strict=True)]
            batches = [{**batch, **_with_tokens(batch, ids)} for batch, ids in zip(batches, texts, strict=True)]
            source = f"text, {len(rows)} x {rows.shape[1]} tokens"
    return Probes(tuple(batches), tuple(targets), source)


def _processed(model: nn.Module, folder: Path, errors: list[str], trust_remote_code: bool) -> Probes:
    for batch in processed_batches(model, folder, trust_remote_code=trust_remote_code):
        probes = _driven(model, batch, "made by the model's processor")
        if isinstance(probes, Probes):
            return probes
    manifest = patched_folder(folder).manifest if is_patched(folder) else None
    record = manifest.inputs if manifest is not None else None
    if record is not None and record.file is not None:
        raise NoInputs(
            f"{type(model).__name__} runs with none of the inputs that memopt makes; this checkpoint was patched with "
            f"--inputs {record.file}.",
            f"Pass --inputs {record.file}.",
        )
    why = f" ({errors[0]})" if errors else ""
    raise NoInputs(f"{type(model).__name__} runs with none of the inputs that memopt makes{why}.", PASS_INPUTS)


def _driven(model: nn.Module, batch: Batch, source: str) -> Probes | str:
    """`batch` as probes, with labels if it gives no loss; or the error that the forward raises."""
    cast = cast_inputs(batch, stored_dtype(model))
    try:
        with preserved(model), torch.no_grad():
            output = model(**cast)
    except Exception as error:  # Any failure means that these inputs do not fit.
        return f"{type(error).__name__}: {one_line(error)}"
    has_loss = isinstance(output, dict) and output.get("loss") is not None
    targets = {} if has_loss else training_targets(model, cast)
    return Probes((dict(batch),), (targets,), source, guessed=False)


def _text_labels(batch: dict[str, Any], targets: dict[str, Any], rows: torch.Tensor) -> dict[str, Any]:
    """`targets` with the text as labels if every token has a label, else unchanged."""
    labels = targets.get("labels")
    if isinstance(labels, torch.Tensor) and labels.shape == batch["input_ids"].shape:
        return {**targets, "labels": rows}
    return targets


def _limit(model: nn.Module) -> int:
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return min(TOKENS, positions) if isinstance(positions, int) and positions > 0 else TOKENS


def _token_rows(folder: Path, length: int, vocabulary: int) -> torch.Tensor | None:
    """(len(_TEXTS), length) token ids, cut to one length to avoid padding; None without a tokenizer that fits."""
    from transformers import AutoTokenizer

    # Without its files some tokenizer classes load with an empty vocabulary.
    if not any(path.is_file() for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError, AttributeError, TypeError):
        return None
    encoded = [tokenizer(text, truncation=True, max_length=length)["input_ids"] for text in _TEXTS]
    shortest = min(map(len, encoded))
    if shortest < 8 or max(map(max, encoded)) >= vocabulary:
        return None
    return torch.tensor([ids[:shortest] for ids in encoded])


def _with_tokens(batch: dict[str, Any], rows: torch.Tensor) -> dict[str, Any]:
    """`batch` with the token ids `rows`, and every other per-token argument in their length."""
    length = batch["input_ids"].shape[1]
    changed: dict[str, Any] = {}
    for name, value in batch.items():
        if name == "input_ids" or name == "decoder_input_ids":
            changed[name] = rows
        elif isinstance(value, torch.Tensor) and value.shape[:2] == (rows.shape[0], length):
            # Masks and type ids: every token has the value of the first one.
            changed[name] = value[:, :1].expand(rows.shape[0], rows.shape[1], *value.shape[2:]).contiguous()
    return changed
