"""Proves folds of a real model on a small twin, and gives the reasons for folds that are not proved."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from memopt.errors import InputsError, ModelError
from memopt.walk.calls.batch import Batch
from memopt.walk.calls.twin import build_driven_twin, build_twin
from memopt.walk.flow.watch import observe, plain_torch
from memopt.walk.folds.proof import folded, prove
from memopt.walk.folds.verdict import norm_sites
from memopt.walk.sites import NormSite, Sites

NOT_ON_TWIN = "not proved on the small twin"

#: Key of a fold, equal for one fold in different layers; its first element is the norm's template.
_Fold = tuple[Any, ...]


def with_proofs(sites: Sites, config: PreTrainedConfig, inputs: Batch | None = None) -> Sites:
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
    """(proved folds, reasons for the others, notes), from guessed inputs and, if given, from `inputs`. A fold is proved
    if one of the runs proves it and none refuses it. `known` are folds that the real model refuses."""
    try:
        found = [_twin_proofs(build_twin(config), known=known)]
    except ModelError as error:  # the model is too large to be made small: its norms are shared, not folded
        found = [_TwinProofs(note=error.message)]
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
    """Whether `refused` contains `fold`, or another fold of its norm that the real model does not refuse (`known`). The
    last norm of a stack may be folded although the real model refuses the others, which feed a residual add. A refusal
    that only the twin shows holds for all layers."""
    return any(other == fold or (other[0] == fold[0] and other not in known) for other in refused)


@dataclass(frozen=True)
class _TwinProofs:
    """Results of the proofs on one twin."""

    proved: Mapping[_Fold, _Proved] = field(default_factory=dict)
    reasons: Mapping[_Fold, str] = field(default_factory=dict)
    """Fold, or template of the norm alone, -> why it is not proved."""
    refused: frozenset[_Fold] = frozenset()
    """Folds that are illegal on the twin by structure, or that changed an output."""
    note: str = ""
    """Why the twin did not run."""


def _twin_proofs(twin: nn.Module, inputs: Batch | None = None, *, known: Collection[_Fold]) -> _TwinProofs:
    """Prove the legal folds on a small fp64 model, run with guessed inputs or with `inputs`, which fit it. Folds with
    cautions are proved with the other proved folds applied, on all outputs but the ones that they change."""
    observed = observe(twin, inputs, with_labels=False, with_branches=True)
    if not observed.calls:
        return _TwinProofs(note=f"the small twin does not run ({observed.traces[-1][1]})")
    norms = norm_sites(observed.mode, None)
    if observed.unseen:
        all_folds = {_fold_template(norm): observed.unseen for norm in norms}
        return _TwinProofs(reasons=all_folds, refused=frozenset(all_folds))
    plain = [norm for norm in norms if norm.foldable]
    cautious = [norm for norm in norms if norm.foldable_with_cautions and norm.cautions]
    changed = {output for norm in cautious for output in norm.changed_outputs}
    with plain_torch(float64=True):
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
    """`name` with * for its indices: equal in all layers of one kind."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _fold_template(norm: NormSite) -> _Fold:
    readers = {(_template(c.parameter), c.axis, c.bias and _template(c.bias)) for c in norm.consumers}
    return _template(norm.name), norm.kind, norm.offset, norm.bias is not None, frozenset(readers)
