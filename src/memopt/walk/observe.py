"""The walk: from a config, or a live model, to `Sites`.

`walk_config` reads the structure off the real model on the meta device and proves folds on a small twin of the same
config; `walk_model` reads the structure of a model in memory. Both run no weights and change nothing.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedConfig

from memopt.errors import ModelError
from memopt.walk.blocks import find_blocks
from memopt.walk.build import build_meta, build_twin, clone_to_meta
from memopt.walk.config import load_config
from memopt.walk.gated import with_form
from memopt.walk.inputs import Call, runnable_calls
from memopt.walk.labels import Labels
from memopt.walk.precision import default_float64
from memopt.walk.probe import NormProbe, probe_activation, probe_norm
from memopt.walk.proof import prove
from memopt.walk.shadow import ShadowMode
from memopt.walk.sites import NormSite, Sites
from memopt.walk.sum_norm import sum_norm_sites
from memopt.walk.verdict import Verdict, judge

NOT_IN_MEMORY = "a model in memory keeps its weights: folding is done when a checkpoint is written"
NOT_ON_TWIN = "not proved on the small twin"


def walk_config(config: PreTrainedConfig | str | Path, *, trust_remote_code: bool = False) -> Sites:
    """Sites of the model that `config` (or the folder or hub id that holds it) describes, folds proved.

    A norm may be folded when every forward on the real shape allows it and the same fold is proved on the twin.

    Raises:
        ModelError: the config cannot be read, or no model can be built from it.
    """
    if not isinstance(config, PreTrainedConfig):
        config = load_config(config, trust_remote_code=trust_remote_code)
    with _one_thread():
        return _with_proofs(find_sites(build_meta(config)), config)


def walk_model(model: nn.Module, inputs: Mapping[str, Any] | None = None) -> Sites:
    """Sites of a live model (wrapped by PEFT or not), by a structural copy on the meta device.

    No fold is proved, since weights in memory are not changed. Where no forward runs, each norm and activation is
    still probed, and a note says that nothing is known of what reads them.
    """
    try:
        clone = clone_to_meta(model)
    except Exception as error:  # sharded, scripted and otherwise wrapped modules refuse a copy in their own ways
        raise ModelError(
            f"{type(model).__name__} cannot be looked into: copying its structure fails "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}).",
            "Patch the model before other tools shard, script or compile it.",
        ) from error
    for module in clone.modules():
        _drop_hooks(module)
        _batch_experts(module)
    shapes = {name: _to_meta(value) for name, value in inputs.items()} if inputs is not None else None
    with _one_thread():
        sites = find_sites(clone, shapes)
    norms = (replace(n, fold_obstacles=(*n.fold_obstacles, NOT_IN_MEMORY)) for n in sites.norms)
    return replace(sites, norms=tuple(norms))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Thousands of tiny operations: waking threads costs more than they do, much more on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _drop_hooks(module: nn.Module) -> None:
    """Hooks are the user's (or a sharding tool's): they may count calls, read values or gather shards."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks):
        hooks.clear()


def _batch_experts(module: nn.Module) -> None:
    """Let experts run as one batched product: a loop over the experts that were hit asks for values."""
    config: Any = getattr(module, "config", None)
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "batched_mm"


def find_sites(model: nn.Module, inputs: Mapping[str, Any] | None = None) -> Sites:
    """Sites of one model by structure alone: what it is made of, what feeds what, which folds would be legal."""
    observed = _observe(model, inputs, with_labels=True)
    mode, labels = observed.mode, observed.labels
    assert labels is not None
    head = labels.loss_head(mode.parameters)
    verdicts = judge(mode, head.parameter if head else None)
    linears, activations = labels.linear_sites(), labels.activation_sites()
    rejected = {name: record.rejected for name, record in mode.norms.items() if record.rejected}
    norms = tuple(
        _norm_site(name, record.probe, record.width, verdicts.get(name))
        for name, record in mode.norms.items()
        if not record.rejected
    )
    owners = {linear.module for linear in linears}
    if not any(outcome == "ok" for _, outcome in observed.traces):
        # Where no forward ran to its end, whatever holds a matrix stands for the linears that were not seen.
        owners |= _matrix_owners(model)
    functions = {
        module: f"a norm called as a function ({function}) in the forward of this module"
        for module, function in labels.function_norms.items()
        if module not in mode.norms and module not in observed.lookalikes
    }
    skipped = {n: r for n, r in observed.lookalikes.items() if n not in owners} | rejected | functions
    config = getattr(model, "config", None)
    return Sites(
        model_class=type(model).__name__,
        model_type=str(getattr(config, "model_type", "")),
        norms=norms,
        gated_mlps=tuple(with_form(model, site) for site in labels.gated_sites()),
        sum_norms=sum_norm_sites(model, norms),
        activations=activations,
        linears=linears,
        dropouts=labels.dropout_sites(),
        loss_head=head,
        blocks=find_blocks(model, {n.name for n in norms}, owners, mode.visited),
        hidden_size=_hidden_size(config, norms),
        skipped=tuple(skipped.items()),
        notes=tuple(_notes(observed, norms)),
        traces=tuple(observed.traces),
    )


def _matrix_owners(model: nn.Module) -> set[str]:
    return {
        name
        for name, module in model.named_modules()
        if any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
    }


def _to_meta(value: Any) -> Any:
    return tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, value)


@dataclass
class _Observed:
    mode: ShadowMode
    labels: Labels | None
    lookalikes: dict[str, str]
    calls: Sequence[Call]
    traces: list[tuple[str, str]]


def _observe(model: nn.Module, inputs: Mapping[str, Any] | None = None, *, with_labels: bool) -> _Observed:
    """Probe the modules of `model`, then watch every call that runs, in eval and in train mode."""
    norms, lookalikes, activations = _probe_all(model)
    labels = Labels(model, activations) if with_labels else None
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    mode = ShadowMode(model, norms, labels, float64=not on_meta)
    # A second run in a row sees a tensor that the first one left on a module. Numbers only: the twin is cheap.
    repeats = 1 if on_meta else 2

    def run(target: nn.Module, kwargs: dict[str, Any]) -> Any:
        mode.forget()
        return [mode.run(target, kwargs) for _ in range(repeats)][-1]

    with _plain_torch(float64=not on_meta), mode.watch():
        calls = runnable_calls(model, inputs, run=run)
    traces = [*((call.label, "ok") for call in calls), *calls.errors]
    return _Observed(mode, labels, lookalikes, calls, traces)


def _probe_all(model: nn.Module) -> tuple[dict[str, NormProbe], dict[str, str], dict[str, Any]]:
    """(norms, reasons of modules that only look like one, activations), by module name."""
    cache: dict[Any, Any] = {}
    norms: dict[str, NormProbe] = {}
    lookalikes: dict[str, str] = {}
    activations = {}
    for name, module in model.named_modules():
        norm = probe_norm(module, name, cache)
        if isinstance(norm, NormProbe):
            norms[name] = norm
        elif norm is not None:
            lookalikes[name] = norm
        elif (activation := probe_activation(module, cache)) is not None:
            activations[name] = activation
    return norms, lookalikes, activations


@contextlib.contextmanager
def _plain_torch(float64: bool) -> Iterator[None]:
    """No fused encoder fast path, which would hide a layer in one op; doubles by default where wanted."""
    before, is_enabled = torch.backends.mha.get_fastpath_enabled(), torch.is_autocast_enabled

    def is_enabled_anywhere(*device: Any) -> bool:
        # Older models ask this of the device of their inputs, and torch knows no autocast on meta.
        return device != ("meta",) and is_enabled(*device)

    torch.backends.mha.set_fastpath_enabled(False)
    torch.is_autocast_enabled = is_enabled_anywhere  # type: ignore[assignment]
    try:
        with default_float64() if float64 else contextlib.nullcontext():
            yield
    finally:
        torch.is_autocast_enabled = is_enabled
        torch.backends.mha.set_fastpath_enabled(before)


def _norm_site(name: str, probe: NormProbe, width: int, verdict: Verdict | None) -> NormSite:
    def full(attribute: str | None) -> str | None:
        return None if attribute is None else f"{name}.{attribute}" if name else attribute

    site = NormSite(
        name=name,
        kind=probe.kind,
        hidden_size=probe.hidden_size or width,
        eps=probe.eps,
        weight=full(probe.weight),
        bias=full(probe.bias),
        offset=probe.offset,
        cast=probe.cast,
    )
    if verdict is None:
        return replace(site, executed=False, fold_obstacles=("no forward of the walk ran it",))
    return replace(site, consumers=verdict.consumers, reaches=verdict.reaches, fold_obstacles=verdict.obstacles)


def _hidden_size(config: Any, norms: Sequence[NormSite]) -> int:
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = getattr(text_config, "hidden_size", None)
    if isinstance(size, int):
        return size
    widths = Counter(norm.hidden_size for norm in norms)
    return max(widths, key=lambda width: (widths[width], width), default=0)


def _notes(observed: _Observed, norms: Sequence[NormSite]) -> Iterator[str]:
    if not observed.calls:
        last = observed.traces[-1][1] if observed.traces else "no inputs"
        yield f"no forward of the model runs here ({last}): modules were probed one by one, what reads them is unknown"
    idle = [norm.name for norm in norms if not norm.executed]
    if idle and len(idle) < len(norms):
        yield f"no forward of the walk ran {len(idle)} of {len(norms)} norms, for example {idle[0]}"


# -- proofs on the twin -----------------------------------------------------------------------------------------------


def _with_proofs(sites: Sites, config: PreTrainedConfig) -> Sites:
    """`sites` of the real model with every legal fold either proved on the twin or refused."""
    if not any(norm.foldable for norm in sites.norms):
        return sites
    proofs, reasons, note = _twin_proofs(config)

    def settle(norm: NormSite) -> NormSite:
        if not norm.foldable:
            return norm
        proof = proofs.get(_fold_template(norm))
        if proof is not None:
            return replace(norm, proof=proof)
        reason = reasons.get(_template(norm.name), "the twin has no such fold")
        return replace(norm, fold_obstacles=(f"{NOT_ON_TWIN}: {reason}",))

    return replace(sites, norms=tuple(map(settle, sites.norms)), notes=(*sites.notes, *note))


def _twin_proofs(config: PreTrainedConfig) -> tuple[dict[Any, float], dict[str, str], tuple[str, ...]]:
    """(fold template -> error), (norm template -> why not), notes, of a small fp64 model of `config`."""
    twin = build_twin(config)
    observed = _observe(twin, with_labels=False)
    verdicts = judge(observed.mode, None)
    norms = [
        _norm_site(name, record.probe, record.width, verdicts.get(name))
        for name, record in observed.mode.norms.items()
        if not record.rejected
    ]
    if not observed.calls:
        return {}, {}, (f"no fold is proved: the small twin does not run ({observed.traces[-1][1]})",)
    legal = [norm for norm in norms if norm.foldable]
    with _plain_torch(float64=True):
        proof = prove(twin, legal, observed.calls)
    illegal = {_template(n.name): n.fold_obstacles[0] for n in norms if n.fold_obstacles}
    illegal |= {_template(name): reason for name, reason in proof.refused.items()}
    proved = {_fold_template(n): proof.error for n in legal if n.name in proof.proved}
    unseen = {_template(name): "no output of the twin depends on it" for name in proof.unseen}
    return {fold: error for fold, error in proved.items() if fold[0] not in illegal}, unseen | illegal, ()


def _template(name: str) -> str:
    """`name` with its indices left open: the layers of one kind share it."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _fold_template(norm: NormSite) -> tuple[Any, ...]:
    """What makes two folds the same fold in different layers."""
    readers = {(_template(c.parameter), c.axis, c.bias and _template(c.bias)) for c in norm.consumers}
    return _template(norm.name), norm.kind, norm.offset, norm.bias is not None, frozenset(readers)
