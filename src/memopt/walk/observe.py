"""The walk: from a config, or a live model, to `Sites`.

`walk_config` reads the structure off the real model on the meta device and proves folds on a small twin of the same
config; `walk_model` reads the structure of a model in memory. Both run no weights and change nothing.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from memopt.errors import InputsError, ModelError
from memopt.walk.batch import Batch, check_names, does_not_run, placed
from memopt.walk.blocks import find_blocks
from memopt.walk.build import build_driven_twin, build_meta, build_twin, clone_to_meta
from memopt.walk.config import load_config
from memopt.walk.gated import with_form
from memopt.walk.inputs import Call
from memopt.walk.labels import Labels
from memopt.walk.parts import every_call
from memopt.walk.precision import default_float64
from memopt.walk.probe import NormProbe, probe_activation, probe_norm
from memopt.walk.proof import folded, prove
from memopt.walk.shadow import ShadowMode
from memopt.walk.sites import NormSite, Sites
from memopt.walk.sum_norm import sum_norm_sites
from memopt.walk.verdict import Verdict, judge

NOT_IN_MEMORY = "a model in memory keeps its weights: folding is done when a checkpoint is written"
NOT_ON_TWIN = "not proved on the small twin"


def walk_config(
    config: PreTrainedConfig | str | Path, *, inputs: Batch | None = None, trust_remote_code: bool = False
) -> Sites:
    """Sites of the model that `config` (or the folder or hub id that holds it) describes, folds proved.

    A norm may be folded when every forward on the real shape allows it and the same fold is proved on the twin.
    `inputs`, a batch on the CPU, takes the place of guessed inputs on the real shape; a twin is run with either.

    Raises:
        ModelError: the config cannot be read, or no model can be built from it.
        InputsError: the model does not take `inputs`, or does not run with them.
    """
    if not isinstance(config, PreTrainedConfig):
        config = load_config(config, trust_remote_code=trust_remote_code)
    with _one_thread():
        model = build_meta(config)
        if inputs is None:
            return _with_proofs(find_sites(model), config)
        check_names(model, inputs)
        sites = find_sites(model, placed(inputs, "cpu", model.dtype))
        return _with_proofs(sites if sites.ran else _guessed(model, sites, config, inputs), config, inputs)


def _guessed(model: nn.Module, sites: Sites, config: PreTrainedConfig, inputs: Batch) -> Sites:
    """Sites by guessed inputs, where `inputs` run only on real numbers, which the small twin has."""
    why = sites.traces[0][1]
    try:
        build_driven_twin(config, inputs)
    except (InputsError, ModelError) as error:
        raise does_not_run(model, why) from error
    sites = find_sites(model)
    note = f"the inputs that were given do not run on shapes alone ({why}): they drive the small twin only"
    return replace(sites, notes=(*sites.notes, note))


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
    with _one_thread():
        sites = find_sites(clone, inputs)
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

    def run(target: nn.Module, call: Call) -> Any:
        mode.forget()
        return [mode.run(target, call) for _ in range(repeats)][-1]

    with _plain_torch(float64=not on_meta), mode.watch():
        calls = every_call(model, inputs, run=run)
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
    return replace(
        site,
        consumers=verdict.consumers,
        reaches=verdict.reaches,
        fold_obstacles=verdict.obstacles,
        cautions=verdict.cautions,
    )


def _hidden_size(config: Any, norms: Sequence[NormSite]) -> int:
    try:
        text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    except ValueError:  # a model of several text models has no hidden size of its own
        text_config = None
    size = getattr(text_config, "hidden_size", None)
    if isinstance(size, int):
        return size
    widths = Counter(norm.hidden_size for norm in norms)
    return max(widths, key=lambda width: (widths[width], width), default=0)


def _notes(observed: _Observed, norms: Sequence[NormSite]) -> Iterator[str]:
    if not observed.calls:
        last = observed.traces[-1][1] if observed.traces else "no inputs"
        yield f"no forward of the model runs here ({last}): modules were probed one by one, what reads them is unknown"
    called = dict.fromkeys(call.target for call in observed.calls if call.target)
    if called:
        yield f"called on their own, since no call of the model's forward reached them: {', '.join(called)}"
    idle = [norm.name for norm in norms if not norm.executed]
    if idle and len(idle) < len(norms):
        yield f"no forward of the walk ran {len(idle)} of {len(norms)} norms, for example {idle[0]}"


# -- proofs on the twin -----------------------------------------------------------------------------------------------


#: What makes two folds the same fold in different layers; starts with the norm's template.
_Fold = tuple[Any, ...]


def _with_proofs(sites: Sites, config: PreTrainedConfig, inputs: Batch | None = None) -> Sites:
    """`sites` of the real model with every legal fold either proved on the twin or refused."""
    if not any(norm.foldable_with_cautions for norm in sites.norms):
        return sites
    proofs, reasons, note = _proofs(config, inputs, {_fold_template(n) for n in sites.norms if n.fold_obstacles})

    def settle(norm: NormSite) -> NormSite:
        if not norm.foldable_with_cautions:
            return norm
        fold = _fold_template(norm)
        if fold in proofs:
            error, cautions = proofs[fold]
            return replace(norm, proof=error, cautions=norm.cautions or cautions)
        reason = reasons.get(fold) or reasons.get(fold[:1]) or "the twin has no such fold"
        return replace(norm, fold_obstacles=(f"{NOT_ON_TWIN}: {reason}",))

    return replace(sites, norms=tuple(map(settle, sites.norms)), notes=(*sites.notes, *note))


_Proved = tuple[float, tuple[str, ...]]
"""Error and cautions of a fold."""


def _proofs(
    config: PreTrainedConfig, inputs: Batch | None, known: Collection[_Fold]
) -> tuple[dict[_Fold, _Proved], dict[_Fold, str], tuple[str, ...]]:
    """What is proved, why the rest is not, notes: by guessed inputs and, if given, by `inputs`.

    Each proves the folds that it can see; what one of them refuses is refused. `known` are folds that the real model
    refuses itself.
    """
    found = [_twin_proofs(build_twin(config), known=known)]
    if inputs is not None:
        try:
            found.append(_twin_proofs(*build_driven_twin(config, inputs), known=known))
        except (InputsError, ModelError) as error:
            found.append(_TwinProofs(note=error.message))
    refused = {fold for each in found for fold in each.refused}
    proved = {
        fold: result for each in found for fold, result in each.proved.items() if not _denied(fold, refused, known)
    }
    reasons = {fold: reason for each in found for fold, reason in each.reasons.items()}
    if any(not each.note for each in found):
        return proved, reasons, ()
    return {}, {}, (f"no fold is proved: {found[-1].note}",)


def _denied(fold: _Fold, refused: Collection[_Fold], known: Collection[_Fold]) -> bool:
    """Whether `refused` folds speak against `fold`: itself, or those of its norm that the real model does not refuse.

    The last norm of a stack may be folded where the others feed a residual add; but a refusal on the twin that the real
    model does not share is about all layers.
    """
    return any(other == fold or (other[0] == fold[0] and other not in known) for other in refused)


@dataclass(frozen=True)
class _TwinProofs:
    """What one run of a twin says about folds."""

    proved: Mapping[_Fold, _Proved] = field(default_factory=dict)
    reasons: Mapping[_Fold, str] = field(default_factory=dict)
    """Fold, or template of the norm alone, -> why it is not proved."""
    refused: frozenset[_Fold] = frozenset()
    """Folds that were seen to be wrong."""
    note: str = ""
    """Why the twin did not run, if it did not."""


def _twin_proofs(twin: nn.Module, inputs: Batch | None = None, *, known: Collection[_Fold]) -> _TwinProofs:
    """Prove what is legal on a small fp64 model, driven by guessed inputs or by `inputs`, which fit it.

    Folds with cautions are proved on top of the others, on all outputs but those that the cautions name.
    """
    observed = _observe(twin, inputs, with_labels=False)
    verdicts = judge(observed.mode, None)
    norms = [
        _norm_site(name, record.probe, record.width, verdicts.get(name))
        for name, record in observed.mode.norms.items()
        if not record.rejected
    ]
    if not observed.calls:
        return _TwinProofs(note=f"the small twin does not run ({observed.traces[-1][1]})")
    plain = [norm for norm in norms if norm.foldable]
    cautious = [norm for norm in norms if norm.foldable_with_cautions and norm.cautions]
    changed = {output for norm in cautious for output in norm.changed_outputs}
    with _plain_torch(float64=True):
        proof = prove(twin, plain, observed.calls)
        with folded(twin, [norm for norm in plain if norm.name in proof.proved]):
            second = prove(twin, cautious, observed.calls, ignoring=changed)
    sites = {norm.name: norm for norm in norms}
    wrong = {_fold_template(sites[n]): why for n, why in (proof.refused | second.refused).items()}
    illegal = {_fold_template(n): n.fold_obstacles[0] for n in norms if n.fold_obstacles} | wrong
    unseen = {_fold_template(sites[n]): "no output of the twin depends on it" for n in (*proof.unseen, *second.unseen)}
    proved = {
        _fold_template(sites[name]): (each.error, sites[name].cautions)
        for each in (proof, second)
        for name in each.proved
    }
    reasons = unseen | illegal
    return _TwinProofs(
        proved={fold: result for fold, result in proved.items() if not _denied(fold, illegal, known)},
        reasons={fold[:1]: reason for fold, reason in reasons.items()} | reasons,
        refused=frozenset({_fold_template(n) for n in norms if n.executed and n.fold_obstacles} | set(wrong)),
    )


def _template(name: str) -> str:
    """`name` with its indices left open: the layers of one kind share it."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _fold_template(norm: NormSite) -> _Fold:
    readers = {(_template(c.parameter), c.axis, c.bias and _template(c.bias)) for c in norm.consumers}
    return _template(norm.name), norm.kind, norm.offset, norm.bias is not None, frozenset(readers)
