"""The walk: finds the `Sites` of a model from its config, or of a live model.

`walk_config` observes the real model on the meta device and proves folds on a small twin of the same config;
`walk_model` observes a meta copy of a model in memory. Both read no weights and change nothing.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from memopt.environment.partitioned import is_parallel_forward
from memopt.errors import InputsError, ModelError
from memopt.torch_compat import module_hooks
from memopt.walk.calls.arguments.request import inner_model
from memopt.walk.calls.batch import Batch, check_names, does_not_run, placed
from memopt.walk.calls.processed import has_processor, processed_batches
from memopt.walk.calls.twin import build_driven_twin
from memopt.walk.flow.linear_inputs import InputUse
from memopt.walk.flow.watch import Observed, observe
from memopt.walk.folds.twin_proofs import with_proofs
from memopt.walk.folds.verdict import norm_sites
from memopt.walk.models.attention import switch_walked
from memopt.walk.models.build import build_meta, clone_to_meta
from memopt.walk.models.config import load_config
from memopt.walk.models.plain import plain_functions
from memopt.walk.probes.brought import with_brought_sites
from memopt.walk.probes.gated import with_form
from memopt.walk.sites import NormSite, Sites

_CTC = "its loss is a CTC loss, which reads the logits of all tokens at once"
#: Part of the parameters; `Sites.unseen` reports modules that no call reached if they hold at least this part.
_LARGE_PART = 0.1
NOT_IN_MEMORY = "a model in memory keeps its weights: folding is done when a checkpoint is written"


def walk_config(
    config: PreTrainedConfig | str | Path,
    *,
    inputs: Batch | None = None,
    attention: str | None = None,
    trust_remote_code: bool = False,
) -> Sites:
    """Sites, with proved folds, of the model that `config` (or the folder or hub id that holds it) describes.

    A norm may be folded if every forward of the real model on meta allows it and the same fold is proved on the twin.
    `inputs`, a batch on the CPU, replaces guessed inputs for the real model, which runs `attention`; twins run with
    both inputs. Raises a ModelError if the config cannot be read, or no model can be built from it, and an InputsError
    if the model does not take `inputs`, or does not run with them."""
    if not isinstance(config, PreTrainedConfig):
        config = load_config(config, trust_remote_code=trust_remote_code)
    model = build_meta(config)
    with _one_thread(), plain_functions(model):
        if inputs is None:
            return with_proofs(find_sites(model, attention=attention), config)
        check_names(model, inputs)
        sites = find_sites(model, placed(inputs, "cpu", model.dtype), attention=attention)
        return with_proofs(sites if sites.ran else _guessed(model, sites, config, inputs), config, inputs)


def walk_folder(
    config: PreTrainedConfig,
    folder: Path,
    *,
    inputs: Batch | None = None,
    attention: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[Sites, Batch | None]:
    """`walk_config`, and its batch: `inputs`, a batch made by the folder's processor, or None for guessed inputs.

    Raises:
        ModelError: no model can be built from the config.
        InputsError: the model does not take `inputs`, or does not run with them.
    """
    sites = walk_config(config, inputs=inputs, attention=attention)
    if sites.ran or inputs is not None or not has_processor(folder):
        return sites, inputs
    for batch in processed_batches(build_meta(config), folder, trust_remote_code=trust_remote_code):
        try:
            return walk_config(config, inputs=batch, attention=attention), batch
        except InputsError:
            continue
    return sites, None


def _guessed(model: nn.Module, sites: Sites, config: PreTrainedConfig, inputs: Batch) -> Sites:
    """Sites found with guessed inputs, if `inputs` run on the small twin, which has values, and not on meta."""
    why = sites.traces[0][1]
    try:
        build_driven_twin(config, inputs)
    except (InputsError, ModelError) as error:
        raise does_not_run(model, why) from error
    sites = find_sites(model)
    note = f"the given inputs do not run on meta tensors ({why}): only the small twin runs with them"
    return replace(sites, notes=(*sites.notes, note))


def walk_model(model: nn.Module, inputs: Mapping[str, Any] | None = None, *, attention: str | None = None) -> Sites:
    """Sites of a live model (wrapped by PEFT or not), by a structural copy on the meta device, which runs `attention`.
    No fold is proved, since weights in memory are not changed. Where no forward runs, norms and activations are still
    probed, and a note says that their consumers are unknown. Raises a ModelError if the structure of the model cannot
    be copied."""
    try:
        clone = clone_to_meta(model)
    except Exception as error:  # a copy of sharded, scripted and otherwise wrapped modules may raise anything
        raise ModelError(
            f"{type(model).__name__} cannot be looked into: copying its structure fails "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}).",
            "Patch the model before other tools shard, script or compile it.",
        ) from error
    for module in clone.modules():
        # Hooks of the user, or of a sharding tool, may count calls, read values or gather shards.
        for hooks in module_hooks(module):
            own = {key: hook for key, hook in hooks.items() if _module_of(hook).startswith(_NEEDED)}
            hooks.clear()
            hooks.update(own)
        # Wrappers of trainers and parallel plans may call the live module's forward; accelerate's moves tensors.
        forward = vars(module).get("forward")
        wraps = "_old_forward" in vars(module) or is_parallel_forward(forward)
        if wraps or (forward is not None and inspect.unwrap(forward) is inspect.unwrap(type(module).forward)):
            del module.__dict__["forward"]
        # Run experts as one batched product: a loop over the chosen experts reads values, which meta tensors lack.
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = "batched_mm"
        # PEFT's wrapper of one parameter enters torch.autocast for its device, and autocast does not support meta.
        if _wraps_a_parameter(module):
            vars(module)["_disable_adapters"] = True
    with _one_thread():
        sites = find_sites(clone, inputs, attention=attention)
    norms = (replace(n, fold_obstacles=(*n.fold_obstacles, NOT_IN_MEMORY)) for n in sites.norms)
    return replace(sites, norms=tuple(norms))


def _module_of(hook: Any) -> str:
    """The module of a function or class; empty for a method of a built-in object, and for a hook that is not shown."""
    return getattr(hook, "__module__", None) or ""


#: Modules whose hooks a forward needs: they compute a normalised or pruned weight, or record hidden states that the
#: forward reads.
_NEEDED = ("torch.nn.utils.", "transformers.utils.")


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Run on one thread: for thousands of tiny operations, waking threads costs more than the operations."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def find_sites(model: nn.Module, inputs: Mapping[str, Any] | None = None, *, attention: str | None = None) -> Sites:
    """Sites of one model, found by structure alone: producers, consumers, and which folds are legal; none is proved.
    `model` is switched to `attention`."""
    switch_walked(model, attention)
    # The model's code may warn of inputs that no user passed.
    with plain_functions(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        observed = observe(model, inputs, with_labels=True)
    mode, labels = observed.mode, observed.mode.labels
    assert labels is not None
    heads = list(labels.loss_heads(mode.parameters))
    norms = norm_sites(mode, next((head.parameter for head in heads if not head.obstacle), None))
    if _calls_ctc_loss(inner_model(model)):
        heads = [replace(head, obstacle=head.obstacle or _CTC) for head in heads]
    linears = tuple(
        replace(x, **observed.inputs.get(x.parameter, InputUse((), ()))._asdict()) for x in labels.linear_sites()
    )
    rejected = {name: record.rejected for name, record in mode.norms.items() if record.rejected}
    owners = {linear.module for linear in linears}
    if not observed.calls:
        # No linear ran, so every module with a matrix counts as one.
        owners |= {
            name
            for name, module in model.named_modules()
            if any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
        }
    functions = {
        module: f"a norm called as a function ({function}) in the forward of this module"
        for module, function in labels.function_norms.items()
        if module not in mode.norms and module not in observed.lookalikes
    }
    skipped = {n: r for n, r in observed.lookalikes.items() if n not in owners} | rejected | functions
    config = getattr(model, "config", None)
    gated, activations = tuple(with_form(model, site) for site in labels.gated_sites()), labels.activation_sites()
    may_read = {site.name for site in activations if site.name and site.reads_recomputed}
    read = {name: of for name, of in labels.norms_read.items() if name in may_read}
    norms = tuple(replace(norm, activations=tuple(a for a in read if norm.name in read[a])) for norm in norms)
    # Modules of other sites are left out of `chained`: other patches rewrite them.
    known = {each.name for each in norms} | {each.name for each in observed.functions}
    known |= {each.name for each in gated if each.form is not None} | {x.name for x in activations if x.is_module}
    unknown = [x.parameter for x in linears if x.parameter not in observed.inputs and not x.computed]
    blocks = find_blocks(model, {n.name for n in norms}, owners, mode.visited)
    sites = Sites(
        model_class=type(model).__name__,
        model_type=str(getattr(config, "model_type", "")),
        norms=norms,
        gated_mlps=gated,
        activations=activations,
        linears=linears,
        dropouts=labels.dropout_sites(),
        softmaxes=labels.softmax_sites(),
        functions=observed.functions,
        chained=tuple(name for name in observed.chained if name not in known),
        loss_heads=tuple(heads),
        blocks=blocks,
        run_once=tuple(_run_once(observed, blocks)),
        without_hooks=tuple(mode.without_hooks),
        overwritten=tuple(sorted(mode.overwritten & ({*mode.norms} | {x.name for x in activations if x.is_module}))),
        hidden_size=_hidden_size(config, norms),
        skipped=tuple(skipped.items()),
        notes=tuple(_notes(observed, norms, unknown)),
        unseen=_unseen(model, observed),
        traces=tuple(observed.traces),
    )
    return with_brought_sites(model, sites)


def _run_once(observed: Observed, blocks: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(block, reason) of the `blocks` that cannot run again in backward: the second run would find other arguments, or
    leave no states in a cache, or checkpointing's hooks are not allowed, or their forward is not called."""
    read = observed.caches.of(blocks)
    for block in blocks:
        if block in observed.mode.without_hooks:
            yield block, "it runs a function transform (torch.func), which allows no saved-tensor hooks around it"
        elif block in read:
            yield block, "its keys and values are read from a cache later, where it would leave none"
        elif block in observed.mode.by_methods and block not in observed.mode.visited:
            yield block, "the model's code calls another method of it, and not its forward"
        elif block in observed.mode.overwritten:
            yield block, "an argument of it is changed in place, which a second run would find changed"


def _calls_ctc_loss(model: nn.Module) -> bool:
    """Whether the forward or loss function of `model` names a CTC loss; no call of the walk has labels to show it."""
    # Without a loss_type, loss_function would warn and return the loss of a language model.
    loss = getattr(model, "loss_function", None) if getattr(model, "loss_type", None) else None
    functions = (inspect.unwrap(each) for each in (type(model).forward, loss) if each)
    return any("ctc_loss" in getattr(getattr(each, "__code__", None), "co_names", ()) for each in functions)


def _hidden_size(config: Any, norms: Sequence[NormSite]) -> int:
    try:
        text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    except ValueError:  # there are several text models
        text_config = None
    size = getattr(text_config, "hidden_size", None)
    if isinstance(size, int):
        return size
    widths = Counter(norm.hidden_size for norm in norms)
    return max(widths, key=lambda width: (widths[width], width), default=0)


def _wraps_a_parameter(module: nn.Module) -> bool:
    """Whether `module` is PEFT's wrapper of one parameter of a module (experts, routers)."""
    return hasattr(module, "parameter_name") and hasattr(module, "_disable_adapters")


def _unseen(model: nn.Module, observed: Observed) -> str:
    """One sentence on the modules that no call reached, if they hold at least `_LARGE_PART` of the parameters."""
    wrappers = [module for module in model.modules() if _wraps_a_parameter(module)]  # their adapters are switched off
    adapters = (its for each in wrappers for name, its in each.named_children() if name != "base_layer")
    off = {id(module) for its in adapters for module in its.modules()}
    own = {n: dict(each.named_parameters(recurse=False)) for n, each in model.named_modules() if id(each) not in off}
    visited, read = observed.mode.visited, observed.mode.parameters.read
    reached = read.union(id(each) for name in visited for each in own.get(name, {}).values())  # by another, if tied

    @functools.cache
    def copies(top: str) -> list[tuple[str, nn.Parameter]]:
        """The parameters around the module `top`, if they are copies of its own; none if there are others."""
        around = list(model.get_submodule(top.rpartition(".")[0]).named_parameters())
        parts = list(model.get_submodule(top).named_parameters())
        times, more = divmod(len(around), len(parts))
        found = (sum(n.endswith(f".{of}") and p.shape == part.shape for n, p in around) for of, part in parts)
        return around if not more and all(count == times for count in found) else []

    def is_left(name: str, of: str, parameter: nn.Parameter) -> bool:
        if id(parameter) in reached or parameter.requires_grad:
            return id(parameter) not in reached
        top = name  # the outermost module around it that was not reached
        while (parent := top.rpartition(".")[0]) and parent not in visited:
            top = parent
        # A trained copy runs in its place (PEFT's modules_to_save).
        end = f"{name[len(top) :]}.{of}"
        return not any(n.endswith(end) and p.requires_grad and id(p) in read for n, p in copies(top))

    left = {name: sum(p.numel() for of, p in its.items() if is_left(name, of, p)) for name, its in own.items()}
    left_out = [name for name, size in left.items() if size]
    share = sum(left[name] for name in left_out) / max(1, sum(each.numel() for each in model.parameters()))
    if share < _LARGE_PART or not observed.calls:  # if no call ran at all, `_notes` reports it
        return ""
    errors = [outcome for _, outcome in observed.traces if outcome != "ok"]
    why = errors[-1] if errors else "the inputs that were tried do not lead there"
    return (
        f"no call of the walk reached {len(left_out)} modules with {share:.0%} of the parameters, for example "
        f"'{left_out[0]}' ({why})"
    )


def _notes(observed: Observed, norms: Sequence[NormSite], unknown: Sequence[str]) -> Iterator[str]:
    if not observed.calls:
        last = observed.traces[-1][1] if observed.traces else "no inputs"
        yield f"no forward of the model runs here ({last}): modules were probed one by one, what reads them is unknown"
    called = dict.fromkeys(call.target for call in observed.calls if call.target)
    if called:
        yield f"called on their own, since no call of the model's forward reached them: {', '.join(called)}"
    idle = [norm.name for norm in norms if not norm.executed]
    if idle and len(idle) < len(norms):
        yield f"no forward of the walk ran {len(idle)} of {len(norms)} norms, for example {idle[0]}"
    if unknown and observed.calls:
        yield f"what else saves the inputs of {len(unknown)} linears is not known (no training forward with gradients \
reached them), for example {unknown[0]}"


def find_blocks(
    model: nn.Module, norms: Collection[str], linears: Collection[str], visited: Iterable[str]
) -> tuple[str, ...]:
    """Names of the blocks in the order in which they first ran; blocks that never ran come last.

    Blocks are the children of a list in which each child holds a norm and a linear (in a model without norms: two
    linears). Of nested lists with children of one type, the innermost counts. A list with children of several types
    counts if no list of one type is above or inside it; of nested mixed lists, the outermost counts. A child that is a
    mere container is never called: its parts with a linear inside take its place.

    Args:
        norms: names of norm modules.
        linears: names of modules that run a contraction with a parameter.
        visited: names of modules in the order in which they first ran.
    """
    lists = list(_lists(model, norms, linears))
    uniform = [(name, children) for name, children, one_type in lists if one_type]
    uniform = [(name, children) for name, children in uniform if not any(_inside(other, name) for other, _ in uniform)]
    mixed = [
        (name, children)
        for name, children, one_type in lists
        if not one_type and not any(_inside(other, name) or _inside(name, other) for other, _ in uniform)
    ]
    mixed = [(name, children) for name, children in mixed if not any(_inside(name, other) for other, _ in mixed)]
    blocks = _called(model, [child for _, children in uniform + mixed for child in children], linears)
    order = {name: position for position, name in enumerate(visited)}
    return tuple(sorted(dict.fromkeys(blocks), key=lambda name: order.get(name, len(order))))


def _called(model: nn.Module, names: Iterable[str], linears: Collection[str]) -> Iterator[str]:
    """`names`; for a module without a forward, its parts with a linear inside."""
    for name in names:
        module = model.get_submodule(name)
        if type(module).forward is not nn.Module.forward:
            yield name
            continue
        parts = [f"{name}.{child}" for child, _ in module.named_children()]
        yield from _called(model, [part for part in parts if _count(linears, part)], linears)


def _lists(model: nn.Module, norms: Collection[str], linears: Collection[str]) -> Iterator[tuple[str, list[str], bool]]:
    """(name, names of children, whether these have one type) of every list whose children all look like blocks."""
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        children = [f"{name}.{child}" if name else child for child, _ in module.named_children()]
        few_norms, few_linears = (1, 1) if norms else (0, 2)
        if children and all(_count(norms, c) >= few_norms and _count(linears, c) >= few_linears for c in children):
            yield name, children, len({type(child) for child in module.children()}) == 1


def _count(names: Collection[str], ancestor: str) -> int:
    return sum(_inside(name, ancestor) for name in names)


def _inside(name: str, ancestor: str) -> bool:
    return name.startswith(ancestor + ".")
