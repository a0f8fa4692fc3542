"""How often the launchers of the Triton kernels are called, by operator: a folder of `memopt.kernels`."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections import Counter
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest

import memopt.kernels


def count_launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """A counter of OPERATOR.LAUNCHER (norm.forward), which every launcher increases until `monkeypatch` is undone."""
    counts: Counter[str] = Counter()
    for found in pkgutil.walk_packages(memopt.kernels.__path__, "memopt.kernels."):
        if found.name.endswith("_triton"):
            module = importlib.import_module(found.name)
            operator = found.name.split(".")[-2]
            for name, launch in list(vars(module).items()):
                # A module may offer a launcher that another one defines; launch_config defines none.
                own = isinstance(launch, FunctionType) and launch.__module__.endswith("_triton")
                if own and name.startswith("launch_"):
                    label = f"{operator}.{name.removeprefix('launch_')}"
                    monkeypatch.setattr(module, name, _counted(launch, counts, label))
    return counts


def operators(counts: Counter[str]) -> set[str]:
    """The operators whose launchers were called."""
    return {label.partition(".")[0] for label in counts}


def _counted(launch: Callable[..., Any], counts: Counter[str], label: str) -> Callable[..., Any]:
    @functools.wraps(launch)
    def launch_and_count(*args: Any, **kwargs: Any) -> Any:
        counts[label] += 1
        return launch(*args, **kwargs)

    return launch_and_count
