"""Data sets that number their samples, and the memory of the samples' gradients. Import them from `memopt.sampling`."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from memopt.errors import InputsError, ModelError
from memopt.patches.sampled_linear.gradient_memory import GradientMemory
from memopt.patches.sampled_linear.visits import INDEX, visits_of


class IndexedDataset(Dataset[dict[str, Any]]):
    """A data set whose samples have their number under the key "memopt_index".

    Works with data loaders of any number of workers, with samplers, `torch.utils.data.Subset`, accelerate and DDP, and
    with collators that make a tensor of every number in a sample, as the collators of transformers do.
    """

    def __init__(self, dataset: Any) -> None:
        """
        Args:
            dataset: map-style (with `len` and `[]`), e.g. a Hugging Face data set; its samples are mappings.

        Raises:
            InputsError: the data set is iterable only, or is an IndexedDataset already.
        """
        if isinstance(dataset, IndexedDataset):
            raise InputsError("The data set is already an IndexedDataset.")
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise InputsError(
                f"{type(dataset).__name__} has no `len` and no `[]`, and samples of a stream have no number by "
                "which their gradients could be remembered.",
                "Use a map-style data set, or train on the stream itself: rows are then drawn by their own norms.",
            )
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> dict[str, Any]:
        number = self._number(index)
        return _numbered(self._dataset[number], number)

    def __getitems__(self, indices: Sequence[Any]) -> list[dict[str, Any]]:
        """The samples of a batch; data loaders call it. It fetches them in one call if the data set can."""
        numbers = [self._number(index) for index in indices]
        several = getattr(self._dataset, "__getitems__", None)
        samples = several(numbers) if callable(several) else [self._dataset[number] for number in numbers]
        return [_numbered(sample, number) for sample, number in zip(samples, numbers, strict=True)]

    def _number(self, index: Any) -> int:
        number, count = operator.index(index), len(self)
        if not -count <= number < count:
            raise IndexError(f"sample {number} of a data set of {count}")
        return number % count


def remember_gradients(model: nn.Module, samples: IndexedDataset | int, max_tokens: int) -> GradientMemory:
    """Let the sampled linears of `model` remember the norm of each token's gradient from one epoch to the next.

    Pass the batch's "memopt_index" to the model with the rest (``model(**batch)``). The norms of a step are written at
    the start of the next step. :class:`GradientMemory` says how much memory it takes; its `forget` frees it. Under DDP,
    call this function in each process: each remembers the samples that it saw itself, and gradients are unbiased
    whatever it remembers. A new memory replaces an older one.

    Args:
        model: patched with a recipe that samples linears, or a wrapper around such a model.
        samples: the training data set, or its number of samples.
        max_tokens: number of tokens of a sample that are remembered; later tokens count as average ones.

    Raises:
        InputsError: `samples` is no IndexedDataset and no number, or is 0.
        ModelError: no linear of `model` is sampled, or several models in it are patched on their own.
    """
    if not isinstance(samples, IndexedDataset | int):
        raise InputsError(
            f"{type(samples).__name__} does not number its samples.", "Wrap it: memopt.sampling.IndexedDataset(dataset)"
        )
    known = visits_of(model)
    if len(known) > 1:
        raise ModelError("Several models inside this one are patched; call remember_gradients on each of them.")
    if not known:
        raise ModelError(
            "No linear of the model is sampled, so there are no gradients to remember.",
            "Patch it with a recipe that samples linears; memopt.plan_for(model, recipe).refusals says why none is.",
        )
    count = samples if isinstance(samples, int) else len(samples)
    memory = GradientMemory(count, max_tokens, len(known[0].padding))
    if known[0].memory is not None:
        known[0].memory.forget()
    known[0].memory = memory
    return memory


def _numbered(sample: Any, number: int) -> dict[str, Any]:
    if not isinstance(sample, Mapping):
        raise InputsError(
            f"A sample of the data set is a {type(sample).__name__}, not a mapping of names to values, so memopt "
            "cannot add its number."
        )
    if INDEX in sample:
        raise InputsError(f"A sample of the data set has a '{INDEX}' of its own.")
    return {**sample, INDEX: number}
