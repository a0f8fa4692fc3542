"""Runs of stock modules, which a fault in patched modules does not change, are made once for a folder."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from memopt.verification import models
from memopt.verification.trial import CheckpointTrial
from tests.mutation.site import everywhere


class StockRuns:
    """What ran on stock models of folders that do not change."""

    def __init__(self) -> None:
        self._results: dict[Any, Any] = {}

    @contextmanager
    def remembered(self) -> Iterator[None]:
        """Inside, verify runs each function of its own on a stock model of one folder and dtype once."""
        load_run_free = models.load_run_free

        def once(load: Callable[[], Any], run: Callable[[Any], Any]) -> Any:
            key = _key(load, run)
            if key is None:
                return load_run_free(load, run)
            if key not in self._results:
                self._results[key] = load_run_free(load, run)
            return self._results[key]

        # Its name is that of the function which it stands for.
        functools.update_wrapper(once, load_run_free)
        with everywhere(load_run_free, once):
            yield


def _key(load: Any, run: Any) -> Any:
    """None where `load` is not known to load a stock model."""
    options: dict[str, Any] = {}
    arguments: tuple[Any, ...] = ()
    while isinstance(load, functools.partial):
        arguments, options = (*load.args, *arguments), load.keywords | options
        load = load.func
    if getattr(load, "__func__", None) is CheckpointTrial.stock:
        arguments = (load.__self__.source, *arguments)
    elif load is not models.load_stock:
        return None
    counts = tuple(each for each in getattr(run, "args", ()) if isinstance(each, int))
    function = getattr(run, "func", run)
    return function.__module__, function.__qualname__, counts, repr(arguments), repr(sorted(options.items()))
