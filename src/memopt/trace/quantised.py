"""Stand-ins for bitsandbytes' 4-bit linears, without values: they hold, allocate and save the same bytes.

In bitsandbytes 0.50 a weight is packed two elements a byte, with a scale for every 64 elements (functional.py,
quantize_4bit); a linear saves the packed weight alone, and its backward restores the whole weight
(autograd/_functions.py, MatMul4Bit). transformers decides which linears are not quantised.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from memopt.errors import ModelError

_BLOCK, _NESTED_BLOCK = 64, 256
_CODES, _NESTED_CODES = 16, 256


@dataclass(frozen=True)
class Quantisation:
    """The settings of a `transformers.BitsAndBytesConfig` that change bytes, with its defaults."""

    nested: bool = False
    """Double quantisation: the scales are themselves quantised to 8 bits."""
    compute_dtype: torch.dtype | None = None
    """Dtype of products; None: the dtype of the rest of the model, or of autocast."""
    skipped: tuple[str, ...] | None = None
    """Modules that are not quantised; None: the modules that transformers leaves out, the head and tied ones."""

    def __str__(self) -> str:
        scales = (
            "scales in 8 bits (double quantisation)"
            if self.nested
            else "scales in fp32, transformers' default (bnb_4bit_use_double_quant saves 0.37 bits an element)"
        )
        return f"bitsandbytes' in all linears but the head, {scales}; nothing else is quantised"


def quantisation_of(config: PreTrainedConfig) -> Quantisation | None:
    """How bitsandbytes holds the checkpoint of `config` in 4 bits; None if it does not."""
    settings = _settings(config)
    if settings.get("quant_method", "bitsandbytes") != "bitsandbytes" or not settings.get("load_in_4bit"):
        return None
    skipped, dtype = settings.get("llm_int8_skip_modules"), settings.get("bnb_4bit_compute_dtype") or "float32"
    return Quantisation(
        bool(settings.get("bnb_4bit_use_double_quant")),
        getattr(torch, str(dtype).removeprefix("torch.")),
        None if skipped is None else tuple(skipped),
    )


def other_method(config: PreTrainedConfig) -> str | None:
    """How the checkpoint of `config` is quantised, where that is not bitsandbytes' 4 bits."""
    settings = _settings(config)
    return str(settings.get("quant_method", "unknown")) if settings and quantisation_of(config) is None else None


def _settings(config: PreTrainedConfig) -> dict[str, Any]:
    settings = getattr(config, "quantization_config", None)
    found: dict[str, Any] = settings if isinstance(settings, dict) else settings.to_dict() if settings else {}
    method = found.get("quant_method")
    return {**found, **({} if method is None else {"quant_method": getattr(method, "value", method)})}


def quantise(model: PreTrainedModel, how: Quantisation, dtype: torch.dtype, *, cuda: bool) -> None:
    """Put a `Linear4bit` in place of every linear of `model` (on the meta device) that transformers would quantise
    by the settings `how`. `dtype`: of products, unless `how` names one. `cuda`: allocate as on a CUDA device, where
    the forward restores the weight as well, outside of any operator. Raises a ModelError if the model has no such
    linear."""
    kept = kept_modules(model, how)
    linears = [
        (name, module)
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or isinstance(module, Conv1D)) and should_convert_module(name, kept)
    ]
    if not linears:
        raise ModelError(f"{type(model).__name__} has no linear that bitsandbytes quantises.", "Use --train lora.")
    for name, linear in linears:
        model.set_submodule(name, Linear4bit(linear, how.compute_dtype or dtype, how.nested, cuda=cuda))


def kept_modules(model: PreTrainedModel, how: Quantisation) -> list[str]:
    """Names, patterns and endings of names of the modules that are not quantised."""
    skipped = None if how.skipped is None else list(how.skipped)
    kept = model._keep_in_fp32_modules
    return list(HfQuantizer.get_modules_to_not_convert(model, skipped, None if kept is None else list(kept)))


class Linear4bit(nn.Linear):
    """A linear with a packed weight and its quantisation state, none of which is trained.

    Args:
        linear: the linear whose weight is packed.
        dtype: dtype of the product, and of the weight that is restored for it.
        nested: the scales are quantised to 8 bits.
        cuda: see `quantise`.
    """

    absmax: Tensor

    def __init__(self, linear: Any, dtype: torch.dtype, nested: bool, *, cuda: bool) -> None:
        rows, columns = linear.weight.shape[::-1] if isinstance(linear, Conv1D) else linear.weight.shape
        super().__init__(columns, rows, linear.bias is not None, device="meta", dtype=dtype)
        blocks = -(-rows * columns // _BLOCK)
        packed = torch.empty(-(-rows * columns // 2), 1, dtype=torch.uint8, device="meta")
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.requires_grad_(False)
        self.compute_dtype, self.nested, self.cuda_kernels = dtype, nested, cuda
        state: dict[str, tuple[int, ...]] = {"codes": (_CODES,), "absmax": (blocks,)}
        if nested:
            state |= {"nested_codes": (_NESTED_CODES,), "nested_absmax": (-(-blocks // _NESTED_BLOCK),), "offset": ()}
        for name, shape in state.items():
            kind = torch.uint8 if nested and name == "absmax" else torch.float32
            self.register_buffer(name, torch.empty(shape, dtype=kind, device="meta"), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        """(..., columns) -> (..., rows), in the dtype of `input`."""
        output: Tensor = _Product.apply(input.to(self.compute_dtype), self)  # type: ignore[no-untyped-call]
        return output.to(input.dtype)

    def restored(self) -> Tensor:
        """The weight in the compute dtype, allocated as bitsandbytes allocates it for a product."""
        scales = torch.empty(self.absmax.shape, dtype=torch.float32) if self.nested else self.absmax
        weight = torch.empty(self.out_features, self.in_features, dtype=self.compute_dtype)
        del scales
        return weight


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: Linear4bit) -> Tensor:
        ctx.linear = linear
        if linear.cuda_kernels:
            return F.linear(x, linear.restored(), linear.bias)
        return F.linear(x, torch.empty((), dtype=x.dtype).expand(linear.out_features, linear.in_features), linear.bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.matmul(gradient, ctx.linear.restored().to(gradient.dtype)), None


def quantisation_state(parameter: Tensor) -> Iterator[Tensor]:
    """The tensors that a parameter of bitsandbytes holds beside its packed elements."""
    state: Any = getattr(parameter, "quant_state", None)
    nested: Any = getattr(state, "state2", None)
    held = [state and (state.absmax, state.code, state.offset), nested and (nested.absmax, nested.code, nested.offset)]
    yield from (each for those in held for each in those or () if isinstance(each, Tensor))
