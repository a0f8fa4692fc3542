"""Launch configurations of Triton kernels: tile sizes and warps by hidden size and dtype, looked up in a table.

``python -m tools.kernels.tune`` writes the table (launch.json). ``MEMOPT_LAUNCH_TABLE=path`` in the environment names
another table, which this command has written on the GPU at hand: its entries replace the entries of launch.json, kernel
by kernel. The first launch reads the tables. Nothing here imports Triton.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import torch

from memopt.errors import LaunchTableError

VARIABLE = "MEMOPT_LAUNCH_TABLE"
#: Triton's limit for the elements of a tile.
LARGEST_TILE = 2**20
MOST_WARPS = 32


@dataclass(frozen=True)
class LaunchConfig:
    """A tile of `rows` x `block` elements (both powers of two) worked on by `num_warps` warps."""

    rows: int
    block: int
    """Columns of a tile. A loop covers longer rows."""
    num_warps: int
    """Number of warps; in the table, of 32 threads each."""


@dataclass(frozen=True)
class TableEntry:
    """The configuration for rows of at most `up_to` elements; None: for all rows longer than the entries before."""

    up_to: int | None
    config: LaunchConfig


#: Kernel -> bits of an element ("16", "32") -> entries by rising `up_to`, the last of them None.
Table = Mapping[str, Mapping[str, tuple[TableEntry, ...]]]


_caches: list[functools._lru_cache_wrapper[Any]] = []
R = TypeVar("R")


def planned(function: Callable[..., R]) -> Callable[..., R]:
    """`function` with a cache. Its results depend only on arguments and the table; a new table clears the cache."""
    cached = functools.lru_cache(maxsize=4096)(function)
    _caches.append(cached)
    return cached


def _forget_plans() -> None:
    for cache in _caches:
        cache.cache_clear()


@planned
def launch_config(kernel: str, hidden: int, dtype: torch.dtype) -> LaunchConfig:
    """The configuration of `kernel` for rows of `hidden` elements of `dtype` (0 < hidden).

    Raises:
        LaunchTableError: the table that MEMOPT_LAUNCH_TABLE names cannot be read or is not valid.
    """
    entries = _table()[kernel][str(dtype.itemsize * 8)]
    config = next(entry.config for entry in entries if entry.up_to is None or hidden <= entry.up_to)
    # Equally many threads for warps of 32 and of 64, so that each thread reads an equally wide vector.
    return dataclasses.replace(config, num_warps=max(1, config.num_warps * 32 // _threads_of_a_warp))


def read_table(path: Path) -> Table:
    """The table in a file that ``python -m tools.kernels.tune`` wrote; a LaunchTableError if it is not valid."""
    try:
        text = path.read_text()
    except OSError as error:
        raise LaunchTableError(
            f"The launch table {path} cannot be read: {error.strerror or error}.",
            f"Correct or unset {VARIABLE}; in a clone of memopt, python -m tools.kernels.tune makes a table.",
        ) from error
    except UnicodeDecodeError as error:
        raise _does_not_fit(str(path), "it is not text") from error
    return parse_table(text, str(path))


def parse_table(text: str, source: str) -> Table:
    """The table in `text`; `source` names it in errors."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise _does_not_fit(source, f"it is not JSON ({error})") from error
    launches = content.get("launches") if isinstance(content, dict) else None
    if not isinstance(launches, dict):
        raise _does_not_fit(source, 'it has no object "launches"')
    return {kernel: _parse_kernel(kernel, by_bits, source) for kernel, by_bits in launches.items()}


@contextlib.contextmanager
def override(kernel: str, config: LaunchConfig) -> Iterator[None]:
    """Inside the `with`, `kernel` is launched with `config` for every size and dtype. For the tuner and the tests."""
    global _table
    table = {**_table(), kernel: dict.fromkeys(("16", "32"), (TableEntry(None, config),))}
    before, _table = _table, lambda: table
    _forget_plans()
    try:
        yield
    finally:
        _table = before
        _forget_plans()


@contextlib.contextmanager
def warps_of(threads: int) -> Iterator[None]:
    """Inside the `with`, configurations are for a GPU whose warps have 32 or 64 threads."""
    global _threads_of_a_warp
    before, _threads_of_a_warp = _threads_of_a_warp, threads
    _forget_plans()
    try:
        yield
    finally:
        _threads_of_a_warp = before
        _forget_plans()


#: ROCm's data-centre GPUs have wavefronts of 64.
_threads_of_a_warp = 64 if torch.version.hip else 32


def _read_tables() -> Table:
    """launch.json, with the kernels of the user's table in place of its own."""
    shipped = resources.files("memopt.kernels.base").joinpath("launch.json").read_text()
    table = parse_table(shipped, "launch.json")
    path = os.environ.get(VARIABLE)
    if not path:
        return table
    own = read_table(Path(path))
    unknown = sorted(own.keys() - table.keys())
    if unknown:
        raise _does_not_fit(path, f"memopt has no kernel {unknown[0]!r}")
    return {**table, **own}


_table: Callable[[], Table] = functools.cache(_read_tables)


def _parse_kernel(kernel: str, by_bits: Any, source: str) -> dict[str, tuple[TableEntry, ...]]:
    if not isinstance(by_bits, dict) or by_bits.keys() != {"16", "32"}:
        raise _does_not_fit(source, f'{kernel} needs the keys "16" and "32" and no other')
    return {bits: _parse_entries(f"{kernel}, {bits} bits", rows, source) for bits, rows in by_bits.items()}


def _parse_entries(where: str, rows: Any, source: str) -> tuple[TableEntry, ...]:
    if not isinstance(rows, list) or not rows:
        raise _does_not_fit(source, f"{where}: not a list of entries")
    entries = tuple(_parse_entry(where, row, source) for row in rows)
    limits = [entry.up_to for entry in entries]
    if limits[-1] is not None:
        raise _does_not_fit(source, f"{where}: the last entry must be for every size (null)")
    finite = [limit for limit in limits if limit is not None]
    if len(finite) != len(limits) - 1 or finite != sorted(set(finite)):
        raise _does_not_fit(source, f"{where}: the sizes must rise from entry to entry")
    return entries


def _parse_entry(where: str, row: Any, source: str) -> TableEntry:
    if not isinstance(row, list) or len(row) != 4:
        raise _does_not_fit(source, f"{where}: {row!r} is not [up to, rows, block, warps]")
    up_to, rows, block, num_warps = row
    if not (up_to is None or _is_positive(up_to)):
        raise _does_not_fit(source, f"{where}: {up_to!r} is neither a size nor null")
    limits = (("rows", rows, LARGEST_TILE), ("block", block, LARGEST_TILE), ("warps", num_warps, MOST_WARPS))
    for name, value, most in limits:
        if not (_is_positive(value) and value & (value - 1) == 0 and value <= most):
            raise _does_not_fit(source, f"{where}: {name} = {value!r} is not a power of two up to {most}")
    if rows * block > LARGEST_TILE:
        raise _does_not_fit(source, f"{where}: a tile of {rows} x {block} has more than {LARGEST_TILE} elements")
    return TableEntry(up_to, LaunchConfig(rows, block, num_warps))


def _is_positive(value: Any) -> bool:
    return type(value) is int and value > 0


def _does_not_fit(source: str, what: str) -> LaunchTableError:
    return LaunchTableError(
        f"The launch table {source} does not fit: {what}.",
        "Make a new one in a clone of memopt: python -m tools.kernels.tune",
    )
