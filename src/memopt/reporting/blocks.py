"""The storages that autograd holds after a forward, and the block in which each was saved."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memopt.reporting.storages import storages
from memopt.saved_tensors import CHECKPOINT, Save, SavedTensorObserver
from memopt.torch_compat import storage_id


@dataclass(frozen=True)
class Saved:
    """A storage that autograd holds, with its saves in order."""

    storage: torch.UntypedStorage
    saves: tuple[Save, ...]


class Blocks:
    """Follows the repeated blocks of a model while it runs under `observer`."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.observer = SavedTensorObserver(model, entered=self._enter)
        self.unit = 0
        """Bytes of the first block's input in the compute dtype."""
        self._names = frozenset(names)
        self._calls: list[int] = []
        self._called: dict[int, str] = {}

    @property
    def entered(self) -> int:
        """How many calls of blocks have begun."""
        return len(self._calls)

    def entered_before(self, save: Save) -> int:
        """How many calls of blocks had begun when it was saved."""
        return bisect_right(self._calls, save.modules_entered)

    def of(self, save: Save) -> str:
        """The innermost block that was running, or whose checkpoint was; empty outside the blocks.

        Older transformers checkpoints a block from outside: then it is the module that is entered next.
        """
        running = next((name for name in reversed(save.modules) if name in self._names), "")
        if running or save.operation != CHECKPOINT:
            return running
        return self._called.get(save.modules_entered + 1, "")

    def saved(self) -> list[Saved]:
        """The storages that autograd still holds, in order of their first save."""
        held: dict[int, tuple[torch.UntypedStorage, list[Save]]] = {}
        for tensor, save in self.observer.saves():
            for storage in storages([tensor]):
                held.setdefault(storage_id(storage), (storage, []))[1].append(save)
        return [Saved(storage, tuple(saves)) for storage, saves in held.values()]

    def _enter(self, name: str, args: tuple[Any, ...]) -> None:
        if name in self._names:
            self._calls.append(self.observer.modules.entered)
            self._called[self.observer.modules.entered] = name
            self.unit = self.unit or _hidden_bytes(args)


def _hidden_bytes(args: tuple[Any, ...]) -> int:
    hidden = next((arg for arg in args if isinstance(arg, Tensor) and arg.is_floating_point()), None)
    if hidden is None:
        return 0
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    return hidden.numel() * dtype.itemsize
