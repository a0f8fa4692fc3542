"""The settings of papers: model and batch at the paper's size, and what the paper says of memory, with its source.

Each also has a small model of the same structure for the CPU, which learns something of Python's language reference:
whether a row has many spaces, in text or as an image; its next bytes; its first bytes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig

from benchmarks import convergence
from benchmarks.finetune_task import Batch, CannotRun
from benchmarks.measure import version
from benchmarks.published import EAGER, Point
from benchmarks.training import Score, Setting
from benchmarks.ways import CHECKPOINTING
from memopt.trace.training import Training

Size = Literal["cpu", "gpu", "paper"]
Kind = Literal["next", "classes", "image", "first"]


@dataclass(frozen=True)
class Paper:
    """The setting of a paper."""

    source: str
    config: Callable[[Size], PreTrainedConfig]
    kind: Kind
    training: Training
    """At the paper's size."""
    points: tuple[Point, ...]
    batch: int = 8
    seq: int | None = 64
    """At the CPU's size."""
    attention: str = "sdpa"
    labels: int | None = None
    """Tokens of the target, of an encoder with a decoder."""

    @property
    def quantised(self) -> bool:
        """Whether the weights of linears are in 4 bits."""
        return self.training.train == "qlora"

    def check(self) -> None:
        """Raises CannotRun where a package is missing."""
        if self.training.has_adapters and version("peft") is None:
            raise CannotRun("peft is not installed; get it with: python -m pip install peft")
        if self.quantised and version("bitsandbytes") is None:
            raise CannotRun("bitsandbytes is not installed; run it in the environment of: make setup-train")

    def setting(self, size: Size, steps: int) -> Setting:
        """The training at the size of the CPU, in fp32 unless it is about precision, or at the paper's, on a GPU."""
        small, device = size == "cpu", "cpu" if size == "cpu" else "cuda"
        batch, config = self.batch if small else self.training.batch, self.config(size)
        bytes_a_row = _bytes_a_row(config, self.kind, (self.seq if small else self.training.seq))
        learnt, held = convergence.texts(bytes_a_row, device)
        inputs = partial(_inputs, self.kind, config, labels=self.labels or 8, median=_spaces(learnt).median())
        score = partial(_score, [inputs(rows) for rows in held[: 8 * batch].split(batch)])
        autocast = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}.get(self.training.precision)
        return Setting(
            partial(self._model, config, small, device),
            lambda seed: [inputs(rows) for rows in convergence.drawn(learnt, batch, steps, seed)],
            score,
            3e-3 if small else 1e-4,
            device,
            autocast=None if small else autocast,
            in_fp64=small and not self.quantised,
        )

    def _model(self, config: PreTrainedConfig, small: bool, device: str, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        auto: Any = getattr(transformers, _AUTO[self.kind])
        masters = "mixed" in self.training.precision and not self.quantised
        dtype = torch.float32 if small or masters else torch.bfloat16
        with torch.device(device):
            model: Any = auto.from_config(config, dtype=dtype, attn_implementation=self.attention)
        if self.quantised:
            model = _in_4_bits(model, auto)
        return _adapted(model, self.training, 4 if small else self.training.lora_rank).train()


_AUTO: dict[Kind, str] = {
    "next": "AutoModelForCausalLM",
    "classes": "AutoModelForSequenceClassification",
    "image": "AutoModelForImageClassification",
    "first": "AutoModelForSeq2SeqLM",
}


# --- models and data -----------------------------------------------------------------------------------------------


def _adapted(model: Any, training: Training, rank: int) -> nn.Module:
    if not training.has_adapters:
        return model  # type: ignore[no-any-return]
    from peft import LoraConfig, get_peft_model

    names = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    targets: Any = "all-linear"
    if training.lora_targets != ("all-linear",):
        targets = sorted(name for name in names if name.startswith(training.lora_targets))
    return get_peft_model(model, LoraConfig(r=rank, target_modules=targets))


def _in_4_bits(model: Any, auto: Any) -> nn.Module:
    """The model with bitsandbytes' nf4 linears."""
    from peft import prepare_model_for_kbit_training
    from transformers import BitsAndBytesConfig

    transformers.utils.logging.disable_progress_bar()
    prepare: Any = prepare_model_for_kbit_training
    with tempfile.TemporaryDirectory(prefix="memopt-benchmark-") as folder:
        model.save_pretrained(folder)
        nf4 = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=model.dtype,
        )  # fmt: skip
        loaded = auto.from_pretrained(folder, dtype=model.dtype, quantization_config=nf4)
    return prepare(loaded, use_gradient_checkpointing=False)  # type: ignore[no-any-return]


def _bytes_a_row(config: Any, kind: Kind, seq: int | None) -> int:
    return int(seq) if kind != "image" and seq else 3 * int(config.image_size) ** 2


def _spaces(rows: Tensor) -> Tensor:
    return (rows == ord(" ")).sum(-1)


def _inputs(kind: Kind, config: Any, rows: Tensor, *, labels: int, median: Tensor) -> Batch:
    """A batch of bytes [batch, bytes] as the model reads it."""
    many = (_spaces(rows) > median).long()
    if kind == "image":
        return {"pixel_values": (rows / 64 - 1).view(len(rows), 3, config.image_size, -1), "labels": many}
    target = {"next": rows, "classes": many, "first": rows[:, :labels].contiguous()}[kind]
    return {"input_ids": rows, "attention_mask": torch.ones_like(rows), "labels": target}


def _score(batches: list[Batch], model: nn.Module) -> Score:
    losses, right = [], []
    for batch in batches:
        output = model(**batch)
        losses.append(float(output.loss))
        if batch["labels"].dim() == 1:
            right.append(float((output.logits.argmax(-1) == batch["labels"]).float().mean()))
    mean = sum(losses) / len(losses)
    return Score(mean, sum(right) / len(right) if right else None)


# --- papers --------------------------------------------------------------------------------------------------------

_SMALL: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256}
_NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _vit(size: Size) -> PreTrainedConfig:
    small = {**_SMALL, "image_size": 32, "patch_size": 8, "num_labels": 2} if size == "cpu" else {"num_labels": 100}
    return transformers.ViTConfig(**small, architectures=["ViTForImageClassification"])


def deit(size: Size, hidden: int = 384, heads: int = 6) -> PreTrainedConfig:
    """DeiT-S, or another of Mesa's."""
    whole = {"hidden_size": hidden, "num_attention_heads": heads, "intermediate_size": 4 * hidden, "num_labels": 1000}
    small = {**_SMALL, "image_size": 32, "patch_size": 8, "num_labels": 2}
    return transformers.DeiTConfig(**(small if size == "cpu" else whole), architectures=["DeiTForImageClassification"])


def _llama(size: Size) -> PreTrainedConfig:
    small: dict[str, Any] = {**_SMALL, "intermediate_size": 192, "vocab_size": 256, "max_position_embeddings": 256}
    whole: dict[str, Any] = {"vocab_size": 32000, "max_position_embeddings": 16384}  # the rest is LLaMA-7B's
    given = small if size == "cpu" else whole
    return transformers.LlamaConfig(**given, use_cache=False, architectures=["LlamaForCausalLM"])


def _encoder(kind: str, model: str, whole: dict[str, Any], size: Size) -> PreTrainedConfig:
    small = {**_SMALL, **_NO_DROPOUT, "vocab_size": 256, "max_position_embeddings": 130}
    config: Any = getattr(transformers, kind)
    return config(**(small if size == "cpu" else whole), architectures=[model])  # type: ignore[no-any-return]


_roberta = partial(
    _encoder, "RobertaConfig", "RobertaForSequenceClassification",
    {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1},
)  # fmt: skip
_bert = partial(_encoder, "BertConfig", "BertForSequenceClassification", {})


def t5(size: Size) -> PreTrainedConfig:
    """T5-base."""
    whole = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
    small = {
        "d_model": 64,
        "d_ff": 256,
        "num_layers": 2,
        "num_heads": 4,
        "d_kv": 16,
        "vocab_size": 256,
        "dropout_rate": 0.0,
    }
    return transformers.T5Config(
        **(small if size == "cpu" else whole), decoder_start_token_id=0, use_cache=False,
        architectures=["T5ForConditionalGeneration"],
    )  # fmt: skip


_BP, _WTA = "LowMemoryBP, arXiv 2406.16282", "WTA-CRS, arXiv 2305.15265, Table 2"
_FIGURE = " (its README's figure: 3827 to 2717 MiB, checkpointing 1252, Mesa 2853; the batch is not stated)"
_GB = 10**9
_LORA_32 = {"train": "lora", "lora_rank": 32, "lora_targets": ("q", "k", "v")}
_AUTOCAST = {"precision": "fp16-mixed"}
PAPERS: dict[str, Paper] = {
    "vit-lora": Paper(
        _BP + _FIGURE, _vit, "image",
        Training(64, None, "fp16-mixed", "lora", 4, ("q", "v"), adapter_fp32=True),
        (
            Point(), Point("lowmemory-bp", -0.27), Point("exact-unfolded"), Point("exact-levels"),
            Point("mesa", -0.255), Point("int8"), Point(CHECKPOINTING, -0.673),
        ),
    ),
    "llama-qlora": Paper(
        _BP, _llama, "next",
        Training(4, 640, "bf16-mixed", "qlora", 64),
        (
            Point(), Point("lowmemory-bp", -0.29), Point("exact-unfolded"), Point("exact-levels"),
            Point("int8"), Point(CHECKPOINTING),
        ),
    ),
    "roberta-lora": Paper(
        _BP, _roberta, "classes",
        Training(32, 256, "fp16-mixed", "lora", 64, ("query", "value"), adapter_fp32=True),
        (Point(), Point("lowmemory-bp", -0.21), Point("exact-unfolded"), Point("exact-levels"), Point("int8")),
    ),
    "bert-wta-crs": Paper(
        _WTA + " (no figure of its memory is at hand)", _bert, "classes",
        Training(128, 128, "fp32"),
        (Point(), Point("wta-crs"), Point("sampled"), Point("exact-unfolded"), Point("int8")),
        attention=EAGER,
    ),
    "t5-wta-crs": Paper(
        _WTA + "; with LoRA too it is 2.7 times less than full tuning, 6.4 times the batch for T5-3B", t5, "first",
        Training(100, 128, "fp32"),
        (
            Point(nbytes=17.66 * _GB), Point("wta-crs", 8.44 / 17.66 - 1), Point("sampled"), Point("exact-unfolded"),
            Point("wta-crs", 6.50 / 17.66 - 1, "LoRA, ", training=_LORA_32),
        ),
        attention=EAGER, labels=8,
    ),
    "mesa": Paper(
        "Mesa, arXiv 2111.11124, README: DeiT-S, 8459 to 3840 MiB", deit, "image",
        Training(128, None, "fp16-mixed"),
        (Point(nbytes=8459 * 2**20), Point("int8", 3840 / 8459 - 1), Point("mesa"), Point("exact-unfolded")),
        attention=EAGER,
    ),
    "checkpointing": Paper(
        "Chen et al., arXiv 1604.06174: O(sqrt(n)) for n layers with checkpoints of sqrt(n) layers each, which "
        "transformers, with one of each block, does not make; the paper with -67 % is that of vit-lora", _vit, "image",
        Training(64, None, "bf16"),
        (
            Point(), Point(CHECKPOINTING), Point("exact-unfolded"), Point("exact-levels"),
            Point("stock", 3.0, "48 layers, ", of="activations", config={"num_hidden_layers": 48}),
            Point(CHECKPOINTING, 1.0, "48 layers, ", of="activations", against=1, config={"num_hidden_layers": 48}),
        ),
    ),
    "mixed-precision": Paper(
        "Micikevicius et al., arXiv 1710.03740: about half the memory, by 16-bit activations", _bert, "classes",
        Training(32, 256, "fp32"),
        (
            Point(of="activations"),
            Point("stock", -0.5, "autocast, ", of="activations", training=_AUTOCAST),
            Point("exact-unfolded", None, "", of="activations"),
            Point("exact-unfolded", -0.5, "autocast, ", of="activations", against=2, training=_AUTOCAST),
        ),
    ),
    "flash-attention": Paper(
        "Dao et al., arXiv 2205.14135: memory linear in the length, where eager attention is quadratic", _llama, "next",
        Training(1, 2048, "bf16", "lora"),
        (
            Point("stock", None, "2048, eager, ", of="activations", attention=EAGER),
            Point("stock", None, "4096, eager, ", of="activations", attention=EAGER, training={"seq": 4096}),
            Point("stock", None, "2048, ", of="activations"),
            Point("stock", 1.0, "4096, ", of="activations", against=2, training={"seq": 4096}),
            Point("exact-unfolded", None, "2048, ", of="activations", against=2),
            Point("exact-unfolded", 1.0, "4096, ", of="activations", against=4, training={"seq": 4096}),
        ),
    ),
}  # fmt: skip
