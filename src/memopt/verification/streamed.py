"""Level "gradient" for models that are larger than memory: block by block from disk.

A forward and a backward of stock modules in fp64 go through the model with one block in memory at a time, like
activation checkpointing. When backward reaches a block, the block runs on its input and the gradient of its output,
stock and patched, in fp64 and in the stored dtype, and is compared like a whole model.
"""

from __future__ import annotations

import contextlib
import functools
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor, nn

from memopt.api import from_pretrained, load
from memopt.checkpoint.sources.source import open_source
from memopt.environment.generators import seed_all
from memopt.patches.capabilities import Checks
from memopt.patches.checks import Check, worst_of_each
from memopt.patches.registry import having
from memopt.patches.swap import is_swapped, stock_forwards
from memopt.recompute.pure import with_tensors, without_tensors
from memopt.reporting.text import Terminal
from memopt.torch_compat import no_dispatch, tree_leaves
from memopt.verification.gradient import check_parameters, compare_gradients, ratios
from memopt.verification.inputs import Probes
from memopt.verification.models import cast_inputs, choose_reference, quiet
from memopt.verification.modules import LIMITS, Worst, check_alone, check_modules, compare_steps
from memopt.verification.ratios import STOCK_RUNS
from memopt.verification.stochastic import RandomRounding
from memopt.verification.trial import CheckpointTrial, Step, loss_of
from memopt.walk.aten.precision import precise
from memopt.walk.models.build import build_meta, run_experts
from memopt.walk.models.config import load_config, model_class
from memopt.walk.observe import walk_config

_WIDE = torch.float64
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_SOURCE = "fp64 run of stock modules on the same weights, block by block"


def blocks_to_stream(trial: CheckpointTrial) -> tuple[tuple[str, ...], torch.dtype] | None:
    """The blocks of a model that does not fit into memory in fp64, and its stored dtype; None if it fits, or has no
    repeated blocks."""
    sizes: dict[str, int] = {}
    for tensor in open_source(str(trial.source)).tensors.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + prod(tensor.shape)
    stored = _DTYPES.get(max(sizes, key=lambda each: sizes[each], default=""))
    if stored is None:
        return None
    reference = choose_reference(sum(sizes.values()), stored, copies=4)
    if reference is not None and reference.dtype == _WIDE:
        return None
    config = load_config(trial.source, trust_remote_code=trial.trust_remote_code)
    blocks = walk_config(config, trust_remote_code=trial.trust_remote_code).blocks
    return (blocks, stored) if blocks else None


def verify_streamed(trial: CheckpointTrial, blocks: Sequence[str], stored: torch.dtype) -> list[Check]:
    """The checks of `verify_gradient`, with one of `blocks` in memory at a time."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="memopt-") as scratch, quiet():
        shelf = Shelf(blocks, Path(scratch))
        cls: Any = shelf
        model = load(
            trial.source,
            model_class=cls,
            inputs=trial.inputs,
            overrides=trial.exact,
            dtype="auto",
            trust_remote_code=trial.trust_remote_code,
        ).eval()
        with Progress(console=Terminal(sys.stderr), transient=True, disable=not sys.stderr.isatty()) as progress:
            task = progress.add_task("blocks", total=None)
            sweep = _Sweep(model, shelf, stored, trial.folded, lambda: progress.advance(task))
            probes = trial.probes(model)
            progress.update(task, total=progress.tasks[0].completed + 2 * len(blocks))
            sweep.run(probes)
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        note = f"{len(blocks)} blocks from disk, {time.monotonic() - started:.0f} s, at most {rss} MiB of memory"
        return [replace(check, detail="; ".join(filter(None, (check.detail, note)))) for check in sweep.checks()]


@dataclass
class _Sweep:
    """One forward and backward through the model, and the checks of each block."""

    model: nn.Module
    shelf: Shelf
    stored: torch.dtype
    folded: frozenset[str]
    advance: Callable[[], None]
    found: list[Check] = field(default_factory=list)
    """The checks of each block."""

    def __post_init__(self) -> None:
        for name in self.shelf.blocks:
            block = self.model.get_submodule(name)
            block.forward = functools.partial(self._forward, name, block)
        self._inside = {id(m) for name in self.shelf.blocks for m in self.model.get_submodule(name).modules()}
        self._dtype, self._records = self.stored, False
        for module in self.model.modules():
            config: Any = getattr(module, "config", None)
            if getattr(config, "use_cache", False):
                config.use_cache = False  # a block that runs twice would add to the cache twice
        run_experts(self.model, "eager")

    def run(self, probes: Probes) -> None:
        for module in self.model.modules():
            if id(module) not in self._inside:
                for table in (module._parameters, module._buffers):
                    for tensor in table.values():
                        if tensor is not None and tensor.is_floating_point():
                            tensor.data = tensor.data.to(_WIDE)
                            tensor.requires_grad_(False)
        self._dtype, self._records = _WIDE, True
        outside = [m for m in self.model.modules() if is_swapped(m) and id(m) not in self._inside]
        with precise(_WIDE), stock_forwards(outside):
            loss = loss_of(self.model(**cast_inputs({**probes.batches[0], **probes.targets[0]}, _WIDE)))
        loss.backward()
        names = [name for name, m in self.model.named_modules() if is_swapped(m) and id(m) not in self._inside]
        outer = {name: self.model.get_submodule(name) for name in names}
        self.found += check_alone(outer, _WIDE)
        with precise(_WIDE):
            for patch in having(Checks):
                self.found += patch.module_checks(outer, LIMITS[_WIDE])

    def checks(self) -> list[Check]:
        """For each kind of check, the check of the worst block, with `n` summed over all blocks."""
        numbers = Counter[str]()
        for check in self.found:
            numbers[check.id] += check.n
        return [replace(check, n=numbers[check.id]) for check in worst_of_each(self.found)]

    def _forward(self, name: str, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = {"args": args, "kwargs": kwargs}
        if self._records:
            tensors = [leaf for leaf in tree_leaves(call) if isinstance(leaf, Tensor)]
            shape: list[Any] = []
            anchor = torch.zeros((), requires_grad=True)
            leaves = _Streamed.apply(self, name, without_tensors(call), shape, anchor, *tensors)  # type: ignore[no-untyped-call]
            return with_tensors(shape[0], leaves)
        self.advance()
        with self.shelf.loaded(block, self._dtype), torch.no_grad():
            return type(block).forward(block, *args, **kwargs)

    def differentiated(self, name: str, call: Any, tensors: Sequence[Tensor], grads: Sequence[Tensor | None]) -> Any:
        """Gradients of `tensors`, from stock modules in fp64; adds the checks that compare other runs with this one."""
        self.advance()
        block = self.model.get_submodule(name)
        step = functools.partial(self._step, name, block, call, tensors, grads)
        truth, of_inputs = step(_WIDE, 0)
        patched, _ = step(_WIDE, None)
        swapped = [(f"{name}.{each}".rstrip("."), m) for each, m in block.named_modules() if is_swapped(m)]

        def run(count: int) -> Worst:
            return compare_steps(step(_WIDE, count)[0], truth)

        def rounded() -> tuple[list[Step], list[Step]]:
            with RandomRounding(self.stored):
                ours = [step(self.stored, None)[0] for _ in range(2)]
                return ours, [step(self.stored, 0)[0] for _ in range(STOCK_RUNS - 1)]

        compared = functools.partial(
            compare_gradients,
            truth=truth.gradients,
            dtype=self.stored,
            reference=_SOURCE,
            stock_loss=0.0,
            patched_loss=0.0,
        )
        worst = compare_steps(patched, truth)
        self.found += [
            check_modules(worst, run, swapped, truth, _WIDE, _SOURCE, lambda: name),
            check_parameters(patched.gradients, truth.gradients, self.folded),
        ]
        found = ratios(compared, step(self.stored, None)[0], step(self.stored, 0)[0], rounded)
        self.found += [replace(check, detail=name) for check in found]
        with self.shelf.loaded(block, _WIDE):
            self.found += check_alone(dict(swapped), _WIDE)
        return of_inputs

    def _step(
        self, name: str, block: nn.Module, call: Any, tensors: Sequence[Tensor], grads: Sequence[Tensor | None],
        dtype: torch.dtype, patched: int | None,
    ) -> tuple[Step, list[Tensor | None]]:  # fmt: skip
        """One forward and backward of `block` in `dtype`, with the first `patched` modules patched; with None, all."""
        inputs = [
            each.detach().to(dtype).requires_grad_(each.requires_grad) if each.is_floating_point() else each
            for each in tensors
        ]
        with self.shelf.loaded(block, dtype), precise(dtype), torch.enable_grad():
            here = with_tensors(call, inputs)
            seed_all(0)
            swapped = [module for module in block.modules() if is_swapped(module)]
            with stock_forwards(swapped[patched:] if patched is not None else ()):
                output = type(block).forward(block, *here["args"], **here["kwargs"])
            leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            pairs = [
                (y, dy.to(y.dtype)) for y, dy in zip(leaves, grads, strict=True) if dy is not None and y.requires_grad
            ]
            torch.autograd.backward([y for y, _ in pairs], [dy for _, dy in pairs])
            gradients = {f"{name}.{each}": p.grad for each, p in block.named_parameters() if p.grad is not None}
        of_inputs = [each.grad if each.is_floating_point() else None for each in inputs]
        given = {f"{name}, input {i}": grad for i, grad in enumerate(of_inputs) if grad is not None}
        outputs = {f"{name}, output {i}": y.detach() for i, y in enumerate(leaves) if y.is_floating_point()}
        return Step(0.0, outputs, gradients | given, frozenset(outputs)), of_inputs


class _Streamed(torch.autograd.Function):
    """A call of a block that saves only its inputs."""

    @staticmethod
    def forward(
        ctx: Any, sweep: _Sweep, name: str, call: Any, shape: list[Any], anchor: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the tensors of the block's output, and append the output without them to `shape`."""
        sweep.advance()
        block = sweep.model.get_submodule(name)
        here = with_tensors(call, [tensor.detach() for tensor in tensors])
        with sweep.shelf.loaded(block, _WIDE), stock_forwards(block.modules()), torch.no_grad():
            output = type(block).forward(block, *here["args"], **here["kwargs"])
        ctx.sweep, ctx.name, ctx.call = sweep, name, call
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        shape.append(without_tensors(output))
        return tuple(leaf.clone() for leaf in tree_leaves(output) if isinstance(leaf, Tensor))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        of_inputs = ctx.sweep.differentiated(ctx.name, ctx.call, ctx.saved_tensors, grads)
        return None, None, None, None, None, *of_inputs


class Shelf:
    """Loads a model like `from_pretrained`, except for the matrices of `blocks`, which stay on disk. transformers
    converts the weights and their names, and accelerate records the place of each weight. The hooks with which
    accelerate would load weights are removed, because patched modules run their stock forward under hooks."""

    def __init__(self, blocks: Sequence[str], folder: Path) -> None:
        self.blocks, self._folder = tuple(blocks), folder
        self._weights: dict[int, dict[str, Any]] = {}
        """id of a module -> name of a parameter -> accelerate's mapping that loads it."""

    def from_pretrained(self, source: str | Path, **keywords: Any) -> nn.Module:
        """The model, without hooks; weights of blocks with one dimension are in memory, the others on meta."""
        from accelerate.hooks import remove_hook_from_submodules

        config = load_config(source, trust_remote_code=bool(keywords.get("trust_remote_code", False)))
        places = {"device_map": _places(build_meta(config), self.blocks), "offload_folder": str(self._folder)}
        cls: Any = model_class(config)
        model = from_pretrained(cls, source, config, **places, **keywords)
        for name in self.blocks:
            for module in model.get_submodule(name).modules():
                self._note(module)
        remove_hook_from_submodules(model)
        for module in model.modules():
            vars(module).pop("forward", None)  # the stock forward, which accelerate leaves on the instance
        return model

    def _note(self, module: nn.Module) -> None:
        weights = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta and weights is not None:
                self._weights.setdefault(id(module), {})[name] = weights
                if parameter.dim() <= 1:
                    module._parameters[name] = nn.Parameter(weights[name], requires_grad=parameter.requires_grad)

    @contextlib.contextmanager
    def loaded(self, block: nn.Module, dtype: torch.dtype) -> Iterator[None]:
        """Inside, `block` has its weights, and floating-point buffers, in `dtype`."""
        tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
        try:
            for module in block.modules():
                both: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
                for table in both:
                    tables.append((table, dict(table)))
                    for name, tensor in table.items():
                        if tensor is not None and tensor.is_floating_point():
                            table[name] = self._fetch(module, name, tensor, dtype)
            yield
        finally:
            for table, before in tables:
                table.update(before)

    def _fetch(self, module: nn.Module, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        with no_dispatch():  # a mode that widens dtypes would misread the file
            values = self._weights[id(module)][name][name] if tensor.is_meta else tensor.detach()
            values = values.to(dtype)
        return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


def _places(model: nn.Module, blocks: Sequence[str]) -> dict[str, str]:
    """Module or parameter -> "disk" for `blocks`, "cpu" for everything beside them."""
    above = {block[: block.rfind(".")] for block in blocks}
    while more := {name.rpartition(".")[0] for name in above} - above:
        above |= more
    places = dict.fromkeys(blocks, "disk")
    for name in above:
        parent = model.get_submodule(name)
        own = [child for child, _ in parent.named_children()] + [
            each for each, _ in parent.named_parameters(recurse=False)
        ]
        for each in own:
            path = f"{name}.{each}" if name else each
            if path not in above:
                places.setdefault(path, "cpu")
    return places
