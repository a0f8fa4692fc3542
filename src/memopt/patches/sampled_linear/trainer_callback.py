"""The memory of gradients for `transformers.Trainer`. Import it from `memopt.sampling`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sized
from typing import Any

import torch
from torch import nn
from torch.utils.data import Subset
from transformers import TrainerCallback

from memopt.errors import InputsError
from memopt.patches.sampled_linear.dataset import IndexedDataset, remember_gradients
from memopt.patches.sampled_linear.gradient_memory import GradientMemory
from memopt.patches.sampled_linear.visits import INDEX, declare_index, visits_of

logger = logging.getLogger(__name__)

#: Number of samples that are read to find the longest length.
_LOOKED_AT = 1000


class GradientMemoryCallback(TrainerCallback):
    """Lets a patched model's sampled linears remember gradients from one epoch to the next.

        Trainer(model, args, train_dataset=IndexedDataset(data), callbacks=[GradientMemoryCallback()])

    Each process of a distributed run remembers the samples that it saw itself. The end of training frees the memory.
    Its start raises InputsError if the data set is no IndexedDataset, and ModelError if no linear is sampled.
    """

    def __init__(self, max_tokens: int | None = None, *, required: bool = True) -> None:
        """
        Args:
            max_tokens: number of tokens of a sample that are remembered; None: the longest of about 1,000 samples.
            required: whether it is an error if no linear is sampled or the data set is no IndexedDataset.
        """
        self.max_tokens, self.required = max_tokens, required
        self.memory: GradientMemory | None = None
        """The memory during training, else None."""
        self._checked = False

    def on_init_end(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        """Called before the Trainer reads the names of the model's inputs for its data loader."""
        if model is not None:
            declare_index(model)

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: nn.Module | None = None,
        train_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        assert model is not None
        if not (self.required or visits_of(model)):
            return
        try:
            dataset = _indexed(getattr(train_dataloader, "dataset", None))
        except InputsError as error:
            if self.required:
                raise
            logger.info("rows are drawn by their own norms, with more noise than from a memory of gradients: %s", error)
            return
        self.memory = remember_gradients(model, dataset, self.max_tokens or _longest(dataset))
        self._checked = False
        logger.info("%s", self.memory)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.memory is None or not self.memory.is_kept or self._checked:
            return
        self._checked = True
        self.memory.flush()
        if reason := _why_empty(self.memory):
            warnings.warn(f"No gradients are remembered: {reason}.", stacklevel=2)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.memory is not None:
            self.memory.forget()
        self.memory = None


def _indexed(dataset: Any) -> IndexedDataset:
    """The IndexedDataset that `dataset` is, or is a subset of; an InputsError if there is none."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    if isinstance(dataset, IndexedDataset):
        return dataset
    name = type(dataset).__name__
    if not (hasattr(dataset, "__getitem__") and isinstance(dataset, Sized)):
        raise InputsError(
            f"The training data is a stream ({name}), whose samples have no number by which their gradients could be "
            "remembered."
        )
    raise InputsError(
        f"The training data ({name}) does not number its samples.",
        "Give the Trainer train_dataset=memopt.sampling.IndexedDataset(dataset).",
    )


def _longest(dataset: IndexedDataset) -> int:
    """The largest number of tokens in the samples that are read; an InputsError if none of them has tokens."""
    step = -(-len(dataset) // _LOOKED_AT) or 1
    with torch.random.fork_rng(devices=[]):
        longest = max((_tokens(dataset[i]) for i in range(0, len(dataset), step)), default=0)
    if not longest:
        raise InputsError(
            "The samples do not show how many tokens they have.", "Give GradientMemoryCallback(max_tokens=...)."
        )
    return longest


def _tokens(sample: dict[str, Any]) -> int:
    mask, *others = (sample.get(key) for key in ("attention_mask", "input_ids", "decoder_input_ids", "labels"))
    if mask is not None:
        others[0] = torch.as_tensor(mask).flatten().nonzero()
    rows = (each for each in others if isinstance(each, Sized) and not isinstance(each, str))
    return max((len(each) for each in rows if getattr(each, "ndim", 1) > 0), default=0)


def _why_empty(memory: GradientMemory) -> str | None:
    if memory.written:
        return None
    if memory.indexed:
        return (
            "batches came with an index, but no sampled linear got a gradient for tokens of theirs (under activation "
            "checkpointing nothing is sampled)"
        )
    if memory.calls:
        return (
            f"batches came without '{INDEX}', so something on the way from the data set to the model, such as the "
            "data collator, leaves it out"
        )
    return "the patched model was not run where gradients are recorded, or a compiler runs it"
