"""Sites of a deep model, found by walking a few of its alike blocks; for reports, which need no proofs of folds."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from torch import nn

from memopt.walk.models.alike import Run, places, take_out
from memopt.walk.observe import find_sites
from memopt.walk.sites import Sites


class _UnlikeError(Exception):
    """Blocks that look alike have different sites, or a site names a block more than one group away."""


def find_deep_sites(model: nn.Module, *, attention: str | None = None) -> Sites:
    """The sites that `find_sites` would find in `model`, from a walk over a few blocks if all others are alike."""
    lists: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in lists):
            lists[name] = module
    all_of = {name: dict(module._modules) for name, module in lists.items()}
    runs = take_out(model, [f"{name}.{child}" for name, children in all_of.items() for child in children])
    try:
        if runs:
            sites = find_sites(model, attention=attention)
            if sites.ran and not (sites.notes or sites.unseen):  # notes count modules, so they need the whole walk
                for run in runs:
                    sites = _Deepening(run).all_of(sites)
                return sites
    except _UnlikeError:
        pass
    finally:
        for name, children in all_of.items():
            lists[name]._modules.clear()
            lists[name]._modules.update(children)
    return find_sites(model, attention=attention)


class _Deepening:
    """Adds the sites of the blocks of `run` that were left out; a place is an index among the blocks that were walked.
    Raises an _UnlikeError if the sites of the two interior groups differ, or a site names a block far away."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._walked = run.names[: run.start] + run.names[run.start + run.left_out :]
        self._place = places(self._walked)
        parent = run.names[0].rpartition(".")[0]
        self._name = re.compile(rf"(?<![\w.]){re.escape(parent)}\.\w+(?!\w)")

    def all_of(self, sites: Sites) -> Sites:
        found = {field.name: getattr(sites, field.name) for field in dataclasses.fields(sites)}
        lists: dict[str, Any] = {
            name: tuple(self._list(value)) for name, value in found.items() if isinstance(value, tuple)
        }
        return dataclasses.replace(sites, **lists)

    def _list(self, items: tuple[Any, ...]) -> Iterator[Any]:
        run, of = self._run, [self._place(_key(item)) for item in items]
        inside = [place for place in of if place >= 0]
        if any(one > other for one, other in pairwise(inside)):
            raise _UnlikeError
        by_place = {place: [item for item, its in zip(items, of, strict=True) if its == place] for place in inside}
        for place in range(run.start - run.group, run.start):
            mine, other = by_place.get(place, []), by_place.get(place - run.group, [])
            if [self._moved(each, place, -run.group) for each in mine] != other:
                raise _UnlikeError
        left_out = [
            self._moved(each, run.like(place), place - run.like(place), run.names)
            for place in range(run.start, run.start + run.left_out)
            for each in by_place.get(run.like(place), [])
        ]
        for item, place in zip(items, of, strict=True):
            if place >= run.start:
                yield from left_out
                left_out = []
            yield self._moved(item, place, run.left_out * (place >= run.start), run.names)
        if left_out:
            raise _UnlikeError  # a list that the last block is not in

    def _moved(self, item: Any, place: int, by: int, names: tuple[str, ...] | None = None) -> Any:
        """`item`, a site in the block at `place` (-1: in none), with every block that it names moved on by `by`."""
        to, run = names or self._walked, self._run

        def other(match: re.Match[str]) -> str:
            named = self._place(match[0])
            if place < 0 and 0 <= named < run.group:
                return match[0]
            if place < 0 and named >= run.start:
                return to[named + run.left_out]
            if named < 0 or place < 0 or abs(named - place) > run.group or not 0 <= named + by < len(to):
                raise _UnlikeError
            return to[named + by]

        return _mapped(item, lambda text: self._name.sub(other, text))


def _key(site: Any) -> str:
    """The name of a site: its first field."""
    while not isinstance(site, str):
        site = site[0] if isinstance(site, tuple) else getattr(site, dataclasses.fields(site)[0].name)
    return site


def _mapped(value: Any, text: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return text(value)
    if isinstance(value, tuple):
        return tuple(_mapped(each, text) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _mapped(getattr(value, field.name), text) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value
