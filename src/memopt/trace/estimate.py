"""Build a model for a traced training step from its config alone: on fake tensors, without weights or a GPU.

The model's own code runs on tensors with shapes and no data, so it saves the same bytes as a real run. If a CUDA device
would choose another kernel than the CPU, `memopt.trace.emulate` makes that choice.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from memopt.errors import ModelError, first_of
from memopt.kernels.base.device import pieces_computed
from memopt.patches.apply import apply
from memopt.plan.plan import make_plan
from memopt.plan.recipe import Recipe
from memopt.torch_compat import FakeTensor
from memopt.trace.adapters import add_adapters, add_live_adapters
from memopt.trace.arguments import Example, dtypes_of, example_of, step_arguments
from memopt.trace.emulate import CudaChoices, has_padding, unpadded_masks
from memopt.trace.fake import FakeReads, Fakes, FiniteValues, conversions_skipped, make_fake
from memopt.trace.kernels import STAND_INS, attention_traced, notes_of
from memopt.trace.quantised import Quantisation, quantisation_of, quantise
from memopt.trace.training import Step, Training
from memopt.walk.calls.arguments.images import holds_images
from memopt.walk.calls.batch import PASS_INPUTS, Batch
from memopt.walk.calls.inputs import MASKS
from memopt.walk.models.attention import FLASH, switch, without_packages
from memopt.walk.models.build import build_meta, run_experts
from memopt.walk.models.config import config_nodes, one_line
from memopt.walk.models.plain import exchanged, plain_functions
from memopt.walk.sites import NormSite, Sites


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, libraries give no warnings, and PyTorch logs no tracebacks of operations that fail on fake tensors."""
    logger = logging.getLogger(FakeTensor.__module__)
    with exchanged([(logger, "disabled", True)]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@dataclass(frozen=True)
class Built:
    """A model on the meta device, patched and with adapters as its step says."""

    model: PreTrainedModel
    """The model without PEFT's wrapper; module names in `trained` have PEFT's prefix."""
    trained: nn.Module
    """The model with adapters, if the step trains adapters."""
    notes: list[str]
    """Of a `TracedModel` complete once the forward has run."""


@dataclass(frozen=True)
class TracedModel(Built):
    """The same on fake tensors, ready for a step."""

    run: Callable[[], Any]
    """One forward, which returns the model's output."""
    choices: Callable[[], contextlib.AbstractContextManager[Any]]
    """Returns a context for backward in which the kernels of the device run."""
    arguments: dict[str, Any]
    """Keyword arguments of the forward."""


#: The most rows or tokens of a step: a trace takes about 50 bytes for each, since ids, masks and labels have values.
_MOST_TOKENS = 1 << 26
_NO_LOSS = "Loss: none, since no labels were found that give one; its outputs count as they are."


@contextlib.contextmanager
def traced(of: Step, built: Built | None = None) -> Iterator[TracedModel]:
    """The model of `of` on fake tensors; inside, forward and backward can run. The tensors of `built`, by default the
    model that is built here, are replaced by fake ones. Raises a ModelError if the model cannot be built, peft is
    missing for LoRA, or the code inside the context fails."""
    config, training, inputs = of.config, of.training, of.inputs
    if inputs is None and training.batch * (training.seq or 1) > _MOST_TOKENS:
        raise _too_large(training)
    if built is None:
        with without_packages():
            built = build_trained(of)
    model, trained, notes = built.model, built.trained, built.notes
    too_long = _too_long(model, training.seq)
    if too_long is not None and has_table_of_positions(model):  # fake tensors never look up a position
        raise too_long
    weights, autocast = dtypes_of(training)
    fake = Fakes()
    make_fake(trained, fake)

    def choices() -> contextlib.AbstractContextManager[Any]:
        return CudaChoices() if training.cuda_kernels else pieces_computed()

    def run() -> Any:
        with choices(), torch.autocast("cpu", autocast or weights, enabled=autocast is not None):
            output = trained(**arguments)
        if not isinstance(getattr(output, "loss", None), Tensor) and _NO_LOSS not in notes:
            notes.append(_NO_LOSS)
        return output

    source: Example | Batch | None = inputs
    try:
        if source is None:
            source = example_of(config, of.sites, training)
        by_shapes = isinstance(source, Example) and not source.is_read
        reads = contextlib.nullcontext() if by_shapes else FakeReads()
        notes.extend(notes_of(model))
        stand_ins = plain_functions(model, STAND_INS)
        with fake, FiniteValues(), unpadded_masks(), attention_traced(), reads, stand_ins, conversions_skipped():
            arguments = step_arguments(model, training, source)
            if inputs is None:
                notes.extend(_sizes(config, arguments, training.image_side))
            yield TracedModel(model, trained, notes, run, choices, arguments)
    except ModelError as error:
        raise ModelError(error.message, error.hint or (PASS_INPUTS if inputs is None else None)) from error
    except Exception as error:
        if too_long is not None:
            raise too_long from error
        if "can't allocate memory" in str(error):
            raise _too_large(training) from error
        hint = "Use another --precision." if "expected scalar type" in str(error) else PASS_INPUTS
        if training.image_side is not None:
            hint = "Leave out --image-side: the model may take images of one size only."
        elif isinstance(source, Example) and holds_images(source.inputs):
            hint = f"Give images of another size: --image-side. {PASS_INPUTS}"
        elif training.seq is not None and training.seq == max_positions(config):
            hint = f"Its code may take fewer tokens than its config has positions: give a smaller --seq. {PASS_INPUTS}"
        if training.train == "qlora" and "uint8" in str(error):
            hint = (
                "Its code multiplies with a weight that would be in 4 bits: name it in llm_int8_skip_modules of "
                "quantization_config in config.json, or use --train lora."
            )
        raise ModelError(
            f"{type(model).__name__} cannot be traced without its weights: {type(error).__name__}: {one_line(error)}.",
            None if inputs is not None else hint,
        ) from error


def _sizes(config: PreTrainedConfig, arguments: Mapping[str, Any], image_side: int | None) -> list[str]:
    """A note with the shapes of images, sounds and other floating inputs, or that parts for them do not run. Raises a
    ModelError if there are none, though the step gives the side of its images."""
    sizes = [
        f"{name} {' x '.join(map(str, value.shape))}"
        for name, value in arguments.items()
        if isinstance(value, Tensor) and value.is_floating_point() and name != "labels" and not name.endswith("mask")
    ]
    if image_side is not None and not holds_images(arguments):
        raise ModelError("The step has no image, so --image-side has no effect.", "Add --images 1, or leave it out.")
    if sizes:
        return [f"Inputs: {', '.join(sizes)}; others with --inputs batch.pt."]
    idle = [each for each in ("vision", "audio", "speech") if getattr(config, f"{each}_config", None) is not None]
    how = "--images 1, or a batch: --inputs batch.pt" if "vision" in idle else "give a batch: --inputs batch.pt"
    why = f"memory for them is not counted; for a step with them, {how}"
    return [f"Inputs: text alone. The model's {' and '.join(idle)} part does not run: {why}."] if idle else []


def _without_layerdrop(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of `config` with which every block runs in every step: the largest step is one that drops none."""
    config = copy.deepcopy(config)
    for each in (config, *(part for part in vars(config).values() if isinstance(part, PreTrainedConfig))):
        for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
            if getattr(each, name, None):
                setattr(each, name, 0.0)
    return config


def build_trained(
    of: Step,
    shrink: Callable[[PreTrainedModel], None] = lambda model: None,
    quantised: Callable[..., None] = quantise,
) -> Built:
    """The model of `of` on the meta device, patched and with adapters. `shrink` is called with the model, patched and
    without adapters; `quantised` replaces linears by 4-bit linears, with the arguments of
    `memopt.trace.quantised.quantise`. Raises a ModelError if the model cannot be built, or peft is missing for LoRA."""
    config, training = _without_layerdrop(of.config), of.training
    weights, autocast = dtypes_of(training)
    model = build_meta(config, dtype=weights)
    _widen_as_loaded(model, weights)
    for parameter in model.parameters():  # `from_pretrained` trains what it reads, frozen by the constructor or not
        parameter.requires_grad_(parameter.is_floating_point())
    if training.frozen:
        _freeze(model, training.frozen)
    run_experts(model, "grouped_mm")
    notes = []
    if training.train == "qlora":
        how = quantisation_of(config) or Quantisation()
        notes.append(f"4-bit weights: {how}.")
        quantised(model, how, autocast or weights, cuda=training.cuda_kernels)
    if training.attention is not None:
        _switch(model, training.attention)
    patched = [] if of.recipe is None else _patch(model, of.sites, of.recipe, of.folded)
    if model.config._attn_implementation in FLASH and (autocast or weights) == torch.float32:
        raise ModelError("FlashAttention takes 16-bit tensors, and the precision is fp32.", "Use --precision bf16.")
    shrink(model)
    trained: nn.Module = model
    if of.adapters is not None:
        trained = add_live_adapters(model, of.sites, of.adapters, fp32=training.adapter_fp32)
    elif training.has_adapters:
        trained = add_adapters(model, of.sites, training)
    trained.train(training.dropout)
    if training.checkpointing == "full":
        _checkpoint(model)
    return Built(model, trained, [*_attention_notes(model, of.inputs or {}), *notes, *training.notes(), *patched])


def _freeze(model: PreTrainedModel, names: Sequence[str]) -> None:
    """Freeze what `names` stand for (`Training.frozen`). Raises a ModelError if one stands for nothing, or nothing is
    left to train."""
    parameters = list(model.named_parameters(remove_duplicate=False))
    for name in names:
        found = [each for parameter, each in parameters if f"{parameter}.".startswith(f"{name}.")]
        found = found or [each for parameter, each in parameters if fnmatchcase(f".{parameter}.", f"*.{name}.*")]
        if not found:
            parts = dict.fromkeys(part for parameter, _ in parameters for part in parameter.split("."))
            near = get_close_matches(name, parts, 3) or [each for each in parts if not each.isdigit()]
            message = f"'{name}' (--freeze) is no module or parameter of {type(model).__name__}."
            raise ModelError(message, f"Its parts are named {first_of(near, 8)}.")
        for each in found:
            each.requires_grad_(False)
    if not any(each.requires_grad for _, each in parameters):
        raise ModelError("All weights are frozen (--freeze): nothing is left to train.", "Freeze less.")


#: Config fields with the number of token positions; sounds and images have other fields. The limit of a decoder beside
#: an encoder of tokens is left out, since the decoder is never given more tokens than it has positions.
_POSITIONS = (
    "max_position_embeddings", "max_target_positions", "max_encoder_position_embeddings", "max_text_positions",
)  # fmt: skip


def max_positions(config: PreTrainedConfig) -> int | None:
    """Number of token positions of a model, without those that its table keeps for padding (RoBERTa: 512 of 514); None
    if its config has no such field."""
    limit = _stated_positions(config)
    if limit is None or not any(getattr(node, "pad_token_id", None) for node in config_nodes(config)):
        return limit
    return limit - _padding_positions(build_meta(config), limit)


def _stated_positions(config: PreTrainedConfig) -> int | None:
    limits = (getattr(node, name, None) for node in config_nodes(config) for name in _POSITIONS)
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)


def _padding_positions(model: PreTrainedModel, limit: int) -> int:
    """Positions among `limit` that no token gets: in a table whose row for padding is not its first, tokens have the
    rows behind that row (fairseq)."""
    rows = (each.padding_idx for each in _tables(model) if each.num_embeddings == limit)
    return max((row + 1 for row in rows if row), default=0)


def _too_long(model: PreTrainedModel, seq: int | None) -> ModelError | None:
    """The error for rows of `seq` tokens, if these are more than the positions in the config of `model`."""
    limit = _stated_positions(model.config)
    if seq is None or limit is None:
        return None
    padding, name = _padding_positions(model, limit), type(model).__name__
    if seq <= limit - padding:
        return None
    message = f"--seq {seq} is more than the {limit - padding} positions in the config of {name}."
    without = f" The config has {limit}, but {padding} of them are for padding." if padding else ""
    return ModelError(message, f"Use a smaller --seq.{without}")


def _too_large(training: Training) -> ModelError:
    size = f"Batch {training.batch}" + (f" x {training.seq} tokens" if training.seq else "")
    option = "--seq" if (training.seq or 0) > training.batch else "--batch"
    return ModelError(f"{size} is too large to trace here.", f"Use a smaller {option}.")


def has_table_of_positions(model: PreTrainedModel) -> bool:
    """Whether an embedding or a buffer of the model has one entry for each position, so that longer rows fail."""
    limit = _stated_positions(model.config)
    if limit is None:
        return False
    sizes = {each.num_embeddings for each in _tables(model)}.union(*(each.shape for each in model.buffers()))
    return not sizes.isdisjoint(range(limit, limit + 3))  # some tables begin with rows for padding


def _tables(model: PreTrainedModel) -> list[nn.Embedding]:
    """The embeddings of `model` but that of its words."""
    try:
        words = model.get_input_embeddings()
    except NotImplementedError:  # of several towers, say CLIP's
        words = None
    return [each for each in model.modules() if isinstance(each, nn.Embedding) and each is not words]


def _widen_as_loaded(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give fp32 to the tensors that `from_pretrained` keeps in fp32, whatever 16-bit dtype the model is loaded in."""
    parts = set(model._keep_in_fp32_modules_strict or ()) if dtype in (torch.float16, torch.bfloat16) else set()
    if dtype == torch.float16:
        parts |= set(model._keep_in_fp32_modules or ())
    for name, tensor in model.state_dict(keep_vars=True).items():
        # Match patterns like transformers: anywhere in the name, with * for any characters.
        if tensor.is_floating_point() and any(re.search(part.replace("*", ".*"), name) for part in parts):
            tensor.data = tensor.data.float()


def _switch(model: PreTrainedModel, implementation: str) -> None:
    """Raises a ModelError if `model` cannot run this attention."""
    try:
        switch(model, implementation)
    except (ImportError, ValueError) as error:
        reason = f"Attention of {type(model).__name__} cannot be {implementation}: {one_line(error)}."
        raise ModelError(reason) from error


def _attention_notes(model: PreTrainedModel, inputs: Batch) -> list[str]:
    def kernel(implementation: str | None) -> str:
        if implementation == "sdpa":
            return "the kernel that scaled_dot_product_attention chooses on a CUDA device"
        return f"{implementation}, as the options, the recipe or the model's class have it"

    own = model.config._attn_implementation
    inside = [(name, each) for name, each in model.named_modules() if isinstance(each, PreTrainedModel)]
    others = {each.config._attn_implementation: name for name, each in reversed(inside)}  # the outermost of each
    said = "; ".join([kernel(own), *(f"in {others[each]} {kernel(each)}" for each in others if each != own)])
    padding = "padding as in the batch" if any(has_padding(inputs.get(name)) for name in MASKS) else "no padding"
    return [f"Attention: {said}; {padding} and no key/value cache (use_cache=False, as in Trainer)."]


def _patch(model: PreTrainedModel, sites: Sites, recipe: Recipe, folded: Collection[str]) -> list[str]:
    for norm in sites.norms:
        if norm.name in folded:
            _hold_identity(model.get_submodule(norm.name), norm)
    applied = apply(model, make_plan(sites, recipe), folded=folded)
    return [f"{name or 'The model'} is unchanged: {reason}." for name, reason in applied.refused]


def _hold_identity(module: nn.Module, norm: NormSite) -> None:
    """Give a norm the identity affine of a folded checkpoint, in real tensors, so that a patch can read the values."""
    for parameter, value in ((norm.weight, 1.0 - norm.offset), (norm.bias, 0.0)):
        if parameter is not None:
            name = parameter.rpartition(".")[2]
            stock: nn.Parameter = getattr(module, name)
            tensor = torch.full(stock.shape, value, dtype=stock.dtype)
            module.register_parameter(name, nn.Parameter(tensor, requires_grad=stock.requires_grad))


def _checkpoint(model: PreTrainedModel) -> None:
    # transformers 5.0 has only the old name of the method.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise ModelError(f"{one_line(error)}.", "Use --checkpointing none.") from error
