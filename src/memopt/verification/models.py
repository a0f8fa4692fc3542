"""Loads the models that are compared, and chooses the precision of the reference run."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from torch import Tensor, nn

from memopt.api import from_pretrained, load
from memopt.environment.hub import hub_answers
from memopt.torch_compat import tree_leaves
from memopt.walk.calls.batch import Batch, placed
from memopt.walk.models.build import run_experts
from memopt.walk.models.config import load_config, model_class
from memopt.walk.models.plain import exchanged, plain_functions

#: Share of the free memory that a reference run may take.
_MEMORY_SHARE = 0.6
T = TypeVar("T")


def load_run_free(load: Callable[[], nn.Module], run: Callable[[nn.Module], T]) -> T:
    """`run` on the model that `load` returns, which is freed before this returns, so `run` may not keep it."""
    model = load()
    try:
        with plain_functions(model):
            return run(model)
    finally:
        del model
        gc.collect()  # models are in reference cycles


def load_stock(
    source: str | Path,
    *,
    revision: str | None = None,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """Stock model in its stored dtype (or `dtype`), eval mode, on the CPU; fp64 is the stored weights, widened."""
    config = load_config(source, revision=revision, trust_remote_code=trust_remote_code)
    cls: Any = model_class(config)
    keywords: dict[str, Any] = {"dtype": _loaded_as(dtype), "trust_remote_code": trust_remote_code}
    if revision is not None:
        keywords["revision"] = revision
    if not Path(source).is_dir():
        keywords["local_files_only"] = not hub_answers(str(source), revision)
    with quiet():
        return _in_dtype(from_pretrained(cls, source, config, **keywords).eval(), dtype)


def load_patched(
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    inputs: Batch | None = None,
    overrides: Iterable[str] = (),
) -> nn.Module:
    """Patched model in its stored dtype (or `dtype`), eval mode, on the CPU; the walk runs with `inputs`. For fp64 the
    model is patched in the stored dtype and then widened, so that the comparison is of those modules."""
    keywords: dict[str, Any] = {"dtype": _loaded_as(dtype), "trust_remote_code": trust_remote_code}
    with quiet():
        return _in_dtype(load(folder, inputs=inputs, overrides=overrides, **keywords).eval(), dtype)


def _loaded_as(dtype: torch.dtype | None) -> torch.dtype | str:
    return "auto" if dtype in (None, torch.float64) else dtype


def _in_dtype(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    if dtype != torch.float64:
        return model
    run_experts(model, "eager")
    # `from_pretrained` leaves buffers (rotary frequencies) in fp32.
    return nn.Module.double(model)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside it, transformers shows no progress bars, and memopt does not log each model that a check loads."""
    from transformers.utils import logging as of_transformers

    shown = of_transformers.is_progress_bar_enabled()
    of_transformers.disable_progress_bar()
    try:
        with exchanged([(logging.getLogger("memopt"), "disabled", True)]):
            yield
    finally:
        if shown:
            of_transformers.enable_progress_bar()


@dataclass(frozen=True)
class Reference:
    """Precision of the truth, and the reason if it is not fp64."""

    dtype: torch.dtype
    note: str = ""

    @property
    def name(self) -> str:
        return {torch.float64: "fp64", torch.float32: "fp32"}[self.dtype]


def reference_for(model: nn.Module, *, copies: int) -> Reference | None:
    """The most precise truth of `model` that fits into memory; see :func:`choose_reference`."""
    return choose_reference(sum(p.numel() for p in model.parameters()), stored_dtype(model), copies=copies)


def choose_reference(parameters: int, stored: torch.dtype, *, copies: int) -> Reference | None:
    """The most precise truth that fits into memory; None when even fp32 does not fit or does not help. `parameters`:
    number of elements of all parameters. `stored`: dtype of the checkpoint; the truth must be wider. `copies`: how many
    tensors of each parameter's size the run holds (weights, gradients, results)."""
    free = psutil.virtual_memory().available * _MEMORY_SHARE
    if parameters * 8 * copies <= free:
        return Reference(torch.float64)
    if stored.itemsize < 4 and parameters * 4 * copies <= free:
        return Reference(torch.float32, "the reference is fp32: fp64 does not fit into memory")
    return None


def cast_inputs(inputs: Batch, dtype: torch.dtype) -> dict[str, Any]:
    """`inputs` on the CPU, their floating-point tensors in `dtype`."""
    return placed(inputs, "cpu", dtype)


def floating_outputs(output: Any) -> dict[str, Tensor]:
    """Field (or position) -> floating-point tensor of a model's output, the loss not included."""
    fields = dict(output) if isinstance(output, dict) else {"output": output}
    tensors: dict[str, Tensor] = {}
    for field, value in fields.items():
        leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        for position, leaf in enumerate(leaves):
            if field != "loss":
                # A tensor subclass that computes its values on demand computes them here.
                plain = leaf if type(leaf) is Tensor else leaf.as_subclass(Tensor)
                tensors[field if len(leaves) == 1 else f"{field}[{position}]"] = plain
    return tensors


def stored_dtype(model: nn.Module) -> torch.dtype:
    """The floating dtype that most of the parameters have."""
    sizes: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return max(sizes, key=lambda dtype: sizes[dtype])
