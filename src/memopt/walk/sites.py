"""The results of the walk: plain data about a model, with no module and no tensor in it.

A *site* is a place of the model that a rewrite may change (a norm, a gated MLP, an activation, a
linear, a dropout, the loss head). Sites are found by observing the data flow (`memopt.walk.flow.shadow`)
and by probing what a module computes (`memopt.walk.probes.probe`), never by a class or architecture name.
Everything here is frozen and serialisable, so that a plan can be printed, stored and tested without
torch. Module and parameter names are the dotted names of `named_modules` and `named_parameters`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, TypeVar

T = TypeVar("T")

#: ``rms`` and ``layer`` have a formula, which memopt's norm operator computes. Of the other kinds only the scale and
#: shift are known: ``gated`` normalises one tensor and gates it with another, ``channels`` scales dimension 1,
#: ``heads`` has a scale for every channel of every head, ``other`` computes anything else from one tensor.
NormKind = Literal["rms", "layer", "gated", "channels", "heads", "other"]
#: Where a norm rounds to the compute dtype: ``"before"`` the scale (weight * x_hat.to(dtype)) or
#: ``"after"`` it ((weight * x_hat).to(dtype)). The two differ by one rounding in 16-bit dtypes.
CastOrder = Literal["before", "after"]
#: A gated MLP has two linears for gate and up, or one linear whose output's halves are (gate, up) or (up, gate).
GatedForm = Literal["separate", "gate_up", "up_gate"]

#: Why a batch norm has no `NormSite`.
BATCH_STATISTICS = "it normalises over the batch, and keeps statistics of it"


def parent(name: str) -> str:
    """Name of the module around the module or parameter `name`."""
    return name.rpartition(".")[0]


def ancestors(name: str) -> list[str]:
    """Names of the modules around the module or parameter `name`, the outermost first, without the model itself."""
    return list(accumulate(name.split(".")[:-1], "{}.{}".format))


def is_inside(name: str, module: str) -> bool:
    """Whether `name` is `module`, or a module or parameter inside it; the model itself has the empty name."""
    return not module or f"{name}.".startswith(f"{module}.")


@dataclass(frozen=True)
class Consumer:
    """One contraction of a norm's output with a parameter, i.e. one linear that reads the norm."""

    parameter: str
    """Name of the weight, e.g. ``model.layers.0.self_attn.q_proj.weight``."""
    module: str
    """Name of the innermost module whose forward ran the contraction."""
    axis: int
    """Axis of the weight that is contracted with the norm's channels."""
    channels: tuple[int, ...] | None = None
    """Norm channel read by each coordinate along ``axis``, -1 where it reads something else; None when the channels
    are 0, 1, 2, ... in order."""
    bias: str | None = None
    """Name of the bias added to this product; None when it has none."""
    scale: float = 1.0
    """Constant by which the norm's output is multiplied before the contraction."""
    accepts_bias: bool = True
    """Whether a norm bias may be folded through (no padding, mask or dropout in between)."""
    needs_bias: bool = True
    """False where the product has no bias and a norm bias may be dropped from it: no output depends on it (keys)."""
    same_storage: bool = True
    """Whether the contraction reads the norm's output itself (a view of it), not a copy."""


@dataclass(frozen=True)
class Reach:
    """Something other than a linear that a norm's output reaches."""

    what: str
    """The kind of obstacle in words: ``"residual add"``, ``"attention"``, ``"model output"``, ..."""
    operation: str
    module: str
    auxiliary: bool = False
    """True for a secondary output: an output of an inner model, or a hidden state next to logits."""

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        return f"{self.what} ({self.operation}{where})"


@dataclass(frozen=True)
class NormSite:
    """A module that computes y = (offset + weight) * normalise(x) + bias over its last dimension."""

    name: str
    kind: NormKind
    hidden_size: int
    eps: float | None
    """None for the machine epsilon of the dtype of the statistics (fp32 for 16-bit inputs); 0 without a formula."""
    weight: str | None
    """Parameter name of the scale; None for a norm without one."""
    bias: str | None = None
    offset: Literal[0, 1] = 0
    """1 for the (1 + weight) family."""
    cast: CastOrder = "after"
    consumers: tuple[Consumer, ...] = ()
    reaches: tuple[Reach, ...] = ()
    """Operations other than linears that the output reaches; a fold needs all of them to be `auxiliary`."""
    fold_obstacles: tuple[str, ...] = ()
    """Why the affine cannot be folded into the consumers, in plain words; empty when it can."""
    cautions: tuple[str, ...] = ()
    """Hidden states that a fold would change without changing the function of the model, in plain words."""
    executed: bool = True
    """False when no forward of the walk ran this module."""
    input_changes: bool = False
    """Whether a forward of the walk changed the module's input in place after the module ran."""
    output_changes: bool = False
    """Whether a forward of the walk changed the module's output in place."""
    intermediates: bool = True
    """Whether the stock module saves more than its inputs for backward; not measured for kinds with a formula."""
    by_rows: bool = False
    """Whether each row of the inputs alone gives its row of the output; not measured for kinds with a formula."""
    activations: tuple[str, ...] = ()
    """Activations that read the output and can save its input in its place, by their names in `ActivationSite`."""
    proof: float | None = None
    """Largest relative difference of any output after the fold, in fp64 on the twin; None if not proved."""

    @property
    def has_formula(self) -> bool:
        """Whether memopt's norm operator computes this norm; the forward of other norms is recomputed in backward."""
        return self.kind in ("rms", "layer")

    @property
    def foldable(self) -> bool:
        """Whether a fold changes nothing but parameters."""
        return self.foldable_with_cautions and not self.cautions

    @property
    def foldable_with_cautions(self) -> bool:
        """Whether a fold keeps the function of the model; it may change hidden states (`cautions`)."""
        return not self.fold_obstacles and self.weight is not None

    @property
    def changed_outputs(self) -> tuple[str, ...]:
        """Fields of the model's own output that a fold changes; outputs of inner models are not counted."""
        fields = (r.operation for r in self.reaches if r.what == "model output" and r.auxiliary and not r.module)
        return tuple(dict.fromkeys(fields))


@dataclass(frozen=True)
class ActivationSite:
    """An elementwise nonlinearity, run by a module of its own or by a function inside another one."""

    name: str
    """Name of the module, or of the module whose forward called the function."""
    kind: str
    """``gelu_erf``, ``gelu_tanh``, ``quick_gelu``, ``silu``, ``relu``, ``relu2``, ... or ``other``."""
    is_module: bool
    operations: int = 1
    """Number of aten operations, views and casts not counted; with more than one, autograd saves intermediates."""
    replays: bool = True
    """False for a module that is random, depends on train mode or writes into its input: it cannot be recomputed."""
    in_place: bool = False
    """Whether the module writes into its input, and could be recomputed if it did not."""
    parameters: bool = False
    """Whether the module has parameters: scalars, or one number for each channel."""
    linear: str | None = None
    """Child, a linear, whose output the activation reads; None where the activation reads the module's input."""
    source: str | None = None
    """Weight of the linear whose output it reads; None when it reads something else."""
    next_linear: str | None = None
    """Weight of the linear that reads its output directly; None when something else does."""
    copied: bool = False
    """Whether `next_linear` reads a copy of the output: padded, or in another layout."""
    gated_mlp: str | None = None
    """Name of the gated MLP that it belongs to."""

    @property
    def saves_its_output(self) -> bool:
        """Whether autograd saves its output, not its input."""
        from memopt.torch_compat.activations import saves_its_output  # sites are read where torch is not imported

        return self.operations == 1 and saves_its_output(self.kind)

    @property
    def reads_recomputed(self) -> bool:
        """Whether it can keep nothing of an input that is recomputed: it saves its input, or a patch makes it do so."""
        is_patched_relu = self.kind == "relu" and self.is_module and self.replays
        return self.in_place or is_patched_relu or not self.saves_its_output

    @property
    def gains_alone(self) -> bool:
        """Whether a rewrite makes the module save less whatever reads its output. A single operation saves its input
        only, and the output is saved by its readers: a rewrite gains if the next linear reads a copy of the output."""
        return self.operations > 1 or self.parameters or (self.copied and not self.saves_its_output)


@dataclass(frozen=True)
class GatedMLPSite:
    """down(act(gate(x)) * up(x)); gate and up may be halves of one fused weight."""

    name: str
    """Name of the innermost module that contains gate, up, activation and down."""
    activation: str
    """Kind of the activation, as in :class:`ActivationSite`."""
    gate: str
    up: str
    down: str | None
    """`gate`, `up`, `down`: parameter names; gate == up when they are fused in one weight."""
    form: GatedForm | None = None
    """None unless the module's forward is down(between(act(gate(x)) * up(x))) and nothing else."""
    act: str | None = None
    """Child module that computes the activation; None when a function does."""
    between: str | None = None
    """Child module (a dropout) between the product and down."""

    @property
    def children(self) -> tuple[str, str, str] | None:
        """Names of the module's children with gate, up and down; None when one of these is its own parameter."""
        prefix = f"{self.name}." if self.name else ""
        parameters = (self.gate, self.up, self.down)
        if not all(p is not None and p.startswith(prefix) and "." in p.removeprefix(prefix) for p in parameters):
            return None
        gate, up, down = (p.removeprefix(prefix).partition(".")[0] for p in parameters if p is not None)
        return gate, up, down


@dataclass(frozen=True)
class LinearSite:
    """A contraction of an activation with a parameter (nn.Linear, Conv1D, expert weights, ...)."""

    parameter: str
    module: str
    shape: tuple[int, ...]
    width: int = 0
    """Channels of its input; 0 where it did not run."""
    computed: bool = False
    """Whether each forward computes the weight from `parameter` (a weight norm, quantisation-aware training), or hides
    the product (float8 training)."""
    bias: str | None = None
    fed_by: str | None = None
    """Producer of the input: a norm or activation module, a gated MLP, a weight, or None."""
    input_shared_with: tuple[str, ...] = ()
    """Weights of other linears that read the same storage."""
    saved_by: tuple[str, ...] = ()
    """Operations other than linears that save the input when the stock model trains, as ``"relu in mlp.act"``."""
    given_to: tuple[str, ...] = ()
    """Modules around the linear that take its input as argument, outermost first; their callers hold it meanwhile."""
    output_module: str = ""
    """Module that computes the linear's output, adapters included, from its input alone; empty where there is none."""
    output_saved_by: tuple[str, ...] = ()
    """Operations, linears included, that save the output of `output_module` when the stock model trains."""


@dataclass(frozen=True)
class DropoutSite:
    name: str
    probability: float
    is_module: bool = True


@dataclass(frozen=True)
class LossHead:
    """The linear that computes the logits."""

    parameter: str
    vocab_size: int
    module: str = ""
    """The module whose forward contracts the weight; "" for the model itself."""
    tied_to: str | None = None
    """Name of the embedding that shares this weight."""
    operations: tuple[str, ...] = ()
    """Operations that the forward applies to each logit, in words: "scale 0.25", "cap 30"."""
    obstacle: str = ""
    """Why the loss is not computed in tiles of logits: it needs all of them at once, or they are small."""


#: (name of a Python module, name of a function in it)
FunctionName = tuple[str, str]


@dataclass(frozen=True)
class FunctionSite:
    """A module whose forward calls pure functions that save large intermediates (`memopt.walk.flow.functions`)."""

    name: str
    functions: tuple[FunctionName, ...]


@dataclass(frozen=True)
class Sites:
    """All sites of one model."""

    model_class: str
    model_type: str
    norms: tuple[NormSite, ...] = ()
    gated_mlps: tuple[GatedMLPSite, ...] = ()
    activations: tuple[ActivationSite, ...] = ()
    linears: tuple[LinearSite, ...] = ()
    dropouts: tuple[DropoutSite, ...] = ()
    softmaxes: tuple[str, ...] = ()
    """Names of the modules whose forward ran a softmax of more than two dimensions; fused attention has none."""
    functions: tuple[FunctionSite, ...] = ()
    chained: tuple[str, ...] = ()
    """Names of the modules whose own code saves more bytes for chains of elementwise operations than the chains' first
    tensors have; norms, activations and other sites of patches are left out."""
    loss_heads: tuple[LossHead, ...] = ()
    blocks: tuple[str, ...] = ()
    """Names of the repeated blocks, in order of execution."""
    run_once: tuple[tuple[str, str], ...] = ()
    """(block, reason) of blocks whose forward may not run again in backward."""
    without_hooks: tuple[str, ...] = ()
    """Names of the modules whose forward runs code that allows no saved-tensor hooks (`torch.func.grad`)."""
    overwritten: tuple[str, ...] = ()
    """Names of the norms and activations of which a training forward changed an argument in place afterwards."""
    hidden_size: int = 0
    skipped: tuple[tuple[str, str], ...] = ()
    """(module, reason) of modules that look like a norm but are not one that can be rewritten."""
    notes: tuple[str, ...] = ()
    """Notes for the user: forwards that failed, modules that never ran, ..."""
    unseen: str = ""
    """The large part of the model that no call reached, and why; only its norms are rewritten. Empty: no such part."""
    traces: tuple[tuple[str, str], ...] = ()
    """(label, "ok" or the error) of every forward that was tried."""
    brought: tuple[Any, ...] = ()
    """Sites of kinds that patches define (`memopt.walk.probes.brought`), in the order of the model's modules."""

    def of(self, kind: type[T]) -> tuple[T, ...]:
        """The sites of a kind that a patch defines."""
        return tuple(site for site in self.brought if isinstance(site, kind))

    def surrounds_blocks(self, name: str) -> bool:
        """Whether the module `name` is the model itself or contains blocks."""
        return not name or any(block.startswith(f"{name}.") for block in self.blocks)

    @property
    def loss_head(self) -> LossHead | None:
        """The main loss head, of the heads without an obstacle; None if there is none."""
        return next((head for head in self.loss_heads if not head.obstacle), None)

    @property
    def batch_norms(self) -> tuple[str, ...]:
        """Names of the modules that normalise over the batch."""
        return tuple(name for name, reason in self.skipped if reason == BATCH_STATISTICS)

    @property
    def ran(self) -> bool:
        """Whether any forward ran to its end; if none did, modules were only probed one by one."""
        return any(outcome == "ok" for _, outcome in self.traces)
