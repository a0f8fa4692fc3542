"""Bytes that each kernel moves for an element, counted in Triton's interpreter; needs no GPU.

    python -m benchmarks.kernel_bytes            write benchmarks/results/kernel_bytes.json
    python -m benchmarks.kernel_bytes --check    exit 1 where that file is not what the kernels move now

Counted are the tensors with an element for each element of the input; weights, numbers a row and partial sums are not.
A launch that reads an element twice is taken to find it in the cache the second time; another launch is not.
"""

from __future__ import annotations

import os

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

from tools.kernels.launches import VARIANTS, CallShape, Variant

RESULTS = Path(__file__).parents[1] / "results" / "kernel_bytes.json"
#: More than the programs that share the rows where there is no GPU: their partial sums are smaller than the input.
ROWS = 48
#: What models have, one that no vector fits, and one that no tile holds.
SIZES = {torch.bfloat16: (1024, 2048, 4096, 4097, 8192, 16384), torch.float32: (4096, 8192, 16384)}
#: The variants of a norm that move most; those of other kernels differ in a formula.
NORMS = ("rms", "rms, weight", "layer, weight, bias", "layer, weight, bias, residual")

Row = dict[str, Any]


def cases() -> list[tuple[Variant, int, torch.dtype]]:
    """What is counted: norms in every size, others in the one that `benchmarks.kernel_resources` compiles."""
    chosen = []
    for variant in VARIANTS:
        rowwise = variant.kernel.startswith("norm")
        one_size = (16384 if variant.kernel.startswith("loss") else 4096,)
        if variant.name in NORMS if rowwise else variant.heaviest or "silu" in variant.name:
            for dtype, sizes in SIZES.items():
                chosen += [(variant, hidden, dtype) for hidden in (sizes if rowwise else one_size)]
    return chosen


def count(variant: Variant, hidden: int, dtype: torch.dtype) -> Row:
    """Bytes for an element of one call, in the interpreter.

    Returns:
        `floor`: each element read once and written once. `memory`: each once in each launch. `cached`: what a launch
        reads again.
    """
    call, elements = variant.prepare(CallShape(ROWS, hidden, dtype, "cpu")), ROWS * hidden
    counter = _Counter(elements)
    with counter:
        call()
    touched: dict[tuple[str, int], np.ndarray] = {}
    memory = everything = 0
    for launch in counter.launches:
        for key, (counts, size) in launch.items():
            memory += size * int(np.count_nonzero(counts))
            everything += size * int(counts.sum())
            touched[key] = np.maximum(touched.get(key, 0), size * (counts > 0))
    least = sum(int(nbytes.sum()) for nbytes in touched.values())
    return {
        "case": f"{variant}: {hidden} x {str(dtype).removeprefix('torch.')}",
        "floor": least / elements,
        "memory": memory / elements,
        "cached": (everything - memory) / elements,
    }


class _Counter:
    """Notes the addresses that launches load and store, by the tensor that they are in."""

    def __init__(self, elements: int) -> None:
        self._elements = elements
        self.launches: list[dict[tuple[str, int], tuple[np.ndarray, int]]] = []
        """(read or written, place of a tensor) -> how often each of its elements was, and its bytes."""
        self._tensors: list[torch.Tensor] = []

    def __enter__(self) -> None:
        self._before = (
            InterpreterBuilder.create_masked_load,
            InterpreterBuilder.create_masked_store,
            GridExecutor.__call__,
        )
        load, store, launch = self._before

        def counted_load(builder: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
            self._note("read", ptrs, mask)
            return load(builder, ptrs, mask, *rest)

        def counted_store(builder: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self._note("written", ptrs, mask)
            return store(builder, ptrs, value, mask, *rest)

        def counted_launch(executor: Any, *args: Any, **kwargs: Any) -> Any:
            self._tensors = [each for each in args if isinstance(each, torch.Tensor) and each.numel() >= self._elements]
            self.launches.append({})
            return launch(executor, *args, **kwargs)

        self._set(counted_load, counted_store, counted_launch)

    def __exit__(self, *_: object) -> None:
        self._set(*self._before)

    @staticmethod
    def _set(load: Callable[..., Any], store: Callable[..., Any], launch: Callable[..., Any]) -> None:
        InterpreterBuilder.create_masked_load = load
        InterpreterBuilder.create_masked_store = store
        GridExecutor.__call__ = launch

    def _note(self, kind: str, ptrs: Any, mask: Any) -> None:
        addresses = np.asarray(ptrs.data)[np.asarray(mask.data, dtype=bool)].reshape(-1).astype(np.int64)
        for tensor in self._tensors:
            first, size = tensor.data_ptr(), tensor.element_size()
            if len(addresses) and first <= addresses[0] < first + tensor.nbytes:
                empty = np.zeros(tensor.numel(), np.int64), size
                counts, _ = self.launches[-1].setdefault((kind, first), empty)
                counts[(addresses - first) // size] += 1
                return


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernel_bytes", description="Count the bytes of kernels."
    )
    parser.add_argument("--check", action="store_true", help="compare with the recorded file instead of writing it")
    options = parser.parse_args(arguments)
    now = [count(*case) for case in cases()]
    if not options.check:
        lines = ",\n".join(f"    {json.dumps(row)}" for row in now)
        RESULTS.write_text(f'{{\n  "command": "python -m benchmarks.kernel_bytes",\n  "kernels": [\n{lines}\n  ]\n}}\n')
        return 0
    recorded = {row["case"]: row for row in json.loads(RESULTS.read_text())["kernels"]}
    different = [row for row in now if recorded.get(row["case"]) != row]
    for row in different:
        print(f"{row['case']}:\n  recorded {recorded.get(row['case'])}\n  now      {row}")
    print(f"{len(now)} calls, {len(different)} differ from {RESULTS.name}.")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
