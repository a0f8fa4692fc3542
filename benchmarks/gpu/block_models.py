"""The models of benchmarks/gpu/block.py, and every provider's way to prepare and run one, in its own process."""

from __future__ import annotations

import functools
import gc
import itertools
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import device_of, version

FULL, LORA = "full", "LoRA, all linears"
EAGER, EAGER_AGAIN, MEMOPT, FOLDED = "eager", "eager again", "memopt", "memopt, folded"
LIGER, COMPILE, BUDGET = "liger", "compile", "compile, budget"
PROVIDERS = (EAGER, EAGER_AGAIN, MEMOPT, FOLDED, LIGER, COMPILE, BUDGET)
BUDGETS = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5)
VOCAB = 1024
_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Sizes:
    """How large a case is; a model of `fewer` layers is measured too: the difference is what the blocks keep."""

    hidden: int
    intermediate: int
    heads: int
    batch: int
    length: int
    image: int = 224
    patch: int = 14
    layers: int = 4
    fewer: int = 2

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def unit(self) -> int:
        """Bytes of one hidden state."""
        return self.tokens * self.hidden * _DTYPE.itemsize


@dataclass(frozen=True)
class Case:
    """A stack of blocks, what is trained, and the most units a block that memopt may keep."""

    name: str
    family: str
    trained: str
    target: float
    real: Sizes
    dry: Sizes

    def sizes(self, *, dry_run: bool) -> Sizes:
        return self.dry if dry_run else self.real


_LLAMA = (Sizes(4096, 11008, 32, 2, 2048), Sizes(64, 172, 4, 2, 16, layers=2, fewer=1))
_VIT = (
    Sizes(1280, 5120, 16, 32, 257),
    Sizes(64, 256, 4, 2, 17, image=32, patch=8, layers=2, fewer=1),
)
_BERT = (Sizes(1024, 4096, 16, 16, 512), Sizes(64, 256, 4, 2, 16, layers=2, fewer=1))
CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("Llama, full", "llama", FULL, 11.5, *_LLAMA),
        Case("Llama, LoRA", "llama", LORA, 11.7, *_LLAMA),
        Case("ViT, full", "vit", FULL, 10.1, *_VIT),
        Case("BERT, full", "bert", FULL, 10.1, *_BERT),
    )
}


class NotSupported(Exception):
    """The provider has nothing for this model."""


# --- models --------------------------------------------------------------------------------------------------------


def stock_model(case: Case, sizes: Sizes, layers: int, device: str) -> nn.Module:
    """Random weights in bf16, in train mode, no dropout, SDPA."""
    import transformers

    common: dict[str, Any] = {
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_attention_heads": sizes.heads,
        "num_hidden_layers": layers,
    }
    encoder = {**common, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config: Any
    auto: Any
    if case.family == "llama":
        config = transformers.LlamaConfig(**common, num_key_value_heads=sizes.heads, vocab_size=VOCAB, use_cache=False)
        auto = transformers.AutoModelForCausalLM
    elif case.family == "bert":
        config, auto = transformers.BertConfig(**encoder, vocab_size=VOCAB), transformers.AutoModelForMaskedLM
    else:
        config = transformers.ViTConfig(**encoder, image_size=sizes.image, patch_size=sizes.patch)
        auto = transformers.AutoModelForImageClassification
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = auto.from_config(config, dtype=_DTYPE, attn_implementation="sdpa")
    return model.to(device).train()


def inputs(case: Case, sizes: Sizes, device: str) -> dict[str, Tensor]:
    generator = torch.Generator(device).manual_seed(1)
    if case.family == "vit":
        shape = (sizes.batch, 3, sizes.image, sizes.image)
        pixels = torch.randn(shape, generator=generator, device=device).to(_DTYPE)
        return {"pixel_values": pixels, "labels": torch.arange(sizes.batch, device=device) % 2}
    ids = torch.randint(3, VOCAB, (sizes.batch, sizes.length), generator=generator, device=device)
    return {"input_ids": ids, "labels": ids}


def _adapted(model: nn.Module, case: Case) -> nn.Module:
    if case.trained == FULL:
        return model
    if version("peft") is None:
        raise NotSupported("peft is not installed")
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    adapted: Any = get_peft_model(model, config, autocast_adapter_dtype=False)
    return adapted  # type: ignore[no-any-return]


# --- providers -----------------------------------------------------------------------------------------------------


def _provide(provider: str, case: Case, sizes: Sizes, layers: int, device: str) -> nn.Module:
    """The model as `provider` trains it, not compiled yet."""
    if provider == FOLDED:
        import memopt

        return _adapted(memopt.load(_folded(case, sizes, layers, device)).to(device).train(), case)
    if provider == LIGER and version("liger_kernel") is None:
        raise NotSupported("liger_kernel is not installed")
    model = stock_model(case, sizes, layers, device)
    if provider == LIGER:
        _apply_liger(model)
    model = _adapted(model, case)
    if provider == MEMOPT:
        import memopt

        memopt.patch(model)
    return model


@functools.cache
def _folders() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="memopt-benchmark-")  # gone when the process ends


def _folded(case: Case, sizes: Sizes, layers: int, device: str) -> Path:
    """A checkpoint of the model with its norms folded away, written once as `memopt patch` writes it."""
    from memopt.pipeline import patch_checkpoint

    original = Path(_folders().name, f"{case.family}-{layers}")
    patched = original.with_name(original.name + "-patched")
    if not patched.exists():
        model: Any = stock_model(case, sizes, layers, device)
        model.save_pretrained(original)
        patch_checkpoint(original, patched)
    return patched


def _apply_liger(model: nn.Module) -> None:
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    config: Any = model.config
    apply = MODEL_TYPE_TO_APPLY_LIGER_FN.get(config.model_type)
    if apply is None:
        raise NotSupported(f"not supported by Liger {version('liger_kernel')}")
    # Blocks are compared, so every provider computes the loss as transformers does.
    apply(model=model, cross_entropy=False, fused_linear_cross_entropy=False)


def _compiled(model: nn.Module, provider: str, budget: float, *, partition_only: bool) -> nn.Module:
    if provider not in (COMPILE, BUDGET):
        return model
    import torch._functorch.config as functorch

    torch._dynamo.reset()
    functorch.activation_memory_budget = budget
    backend = "aot_eager_decomp_partition" if partition_only else "inductor"
    compiled: Any = torch.compile(model, dynamic=False, backend=backend)
    return compiled  # type: ignore[no-any-return]


# --- what a worker does --------------------------------------------------------------------------------------------


class Trainer:
    """Holds one provider's model of one case and trains it step by step."""

    def __init__(self, provider: str, *, dry_run: bool) -> None:
        self._provider, self._dry_run, self._device = provider, dry_run, device_of(dry_run)
        self._model: nn.Module | None = None
        self._inputs: dict[str, Tensor] = {}

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """Requests: scan (budgets), prepare, timed, drop."""
        what = request.pop("do")
        try:
            answer: dict[str, Any] = getattr(self, what)(**request)
        except NotSupported as reason:
            answer = {"not_supported": str(reason)}
        return answer

    def scan(self, case: str) -> dict[str, Any]:
        """Bytes that a model of fewer layers keeps, for each memory budget of the compiler; nothing is compiled."""
        sizes = CASES[case].sizes(dry_run=self._dry_run)
        kept = {}
        for budget in BUDGETS:
            self._build(CASES[case], sizes.fewer, budget, partition_only=True)
            kept[str(budget)] = self._kept_bytes()
        self.drop()
        return {"kept_bytes": kept}

    def prepare(self, case: str, budget: float = 1.0) -> dict[str, Any]:
        """Build, warm up, and measure what is kept for backward and the peak of a step."""
        sizes = CASES[case].sizes(dry_run=self._dry_run)
        kept = []
        for layers in (sizes.fewer, sizes.layers):
            self._build(CASES[case], layers, budget, partition_only=self._dry_run)
            for _ in range(2 if self._dry_run else 3):
                loss = self._step()
            kept.append(self._kept_bytes())
        units = (kept[1] - kept[0]) / (sizes.layers - sizes.fewer) / sizes.unit
        answer = {
            "units_per_block": units,
            "kept_bytes": kept[1],
            "kept_bytes_fewer": kept[0],
            "peak_bytes": self._peak_bytes(),
            "loss": float(loss),
        }
        return {**answer, "budget": budget} if self._provider == BUDGET else answer

    def timed(self, steps: int) -> dict[str, Any]:
        """Milliseconds of single steps in a row on the device, and until the host had issued one."""
        self._step()
        if self._device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        self._step()
        host = 1e3 * (time.perf_counter() - start)
        if self._device == "cpu":
            return {"ms": [host], "host_ms": host}
        # No waiting in between: as in training, the host runs ahead of the device where it can.
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        marks[0].record()
        for mark in marks[1:]:
            self._step()
            mark.record()
        torch.cuda.synchronize()
        return {"ms": [a.elapsed_time(b) for a, b in itertools.pairwise(marks)], "host_ms": host}

    def drop(self) -> dict[str, Any]:
        self._model = None
        self._inputs = {}
        self._clean()
        return {}

    def _build(self, case: Case, layers: int, budget: float, *, partition_only: bool) -> None:
        self.drop()
        sizes = case.sizes(dry_run=self._dry_run)
        model = _provide(self._provider, case, sizes, layers, self._device)
        self._model = _compiled(model, self._provider, budget, partition_only=partition_only)
        self._inputs = inputs(case, sizes, self._device)

    def _forward(self) -> Tensor:
        if self._model is None:
            raise RuntimeError("no model is prepared")
        loss: Tensor = self._model(**self._inputs).loss
        return loss

    def _step(self) -> Tensor:
        loss = self._forward()
        loss.backward()
        assert self._model is not None
        self._model.zero_grad(set_to_none=True)
        return loss.detach()

    def _kept_bytes(self) -> int:
        """Bytes allocated after the forward beyond those before it."""
        if self._device == "cpu":
            assert self._model is not None
            return saved_bytes(self._model, self._forward)
        self._step()
        self._clean()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        loss = self._forward()
        torch.cuda.synchronize()
        kept = torch.cuda.memory_allocated() - before
        loss.backward()
        return kept

    def _peak_bytes(self) -> int | None:
        if self._device == "cpu":
            return None
        self._clean()
        torch.cuda.reset_peak_memory_stats()
        self._step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    def _clean(self) -> None:
        if self._model is not None:
            self._model.zero_grad(set_to_none=True)
        gc.collect()
        if self._device == "cuda":
            torch.cuda.empty_cache()


def saved_bytes(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Bytes of the storages that autograd is handed to keep, weights excepted; for devices without an allocator."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage
        return tensor

    pack.memopt_observer = True  # type: ignore[attr-defined]  # it only counts, as a memory report does
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward()
    kept = sum(int(storage.nbytes()) for storage in storages.values())
    loss.backward()
    return kept
