"""What memopt keeps of the model families that are fine-tuned most, beside the least that an exact method keeps.

    python -m benchmarks.families                     every family -> docs/families.json and docs/coverage.md
    python -m benchmarks.families Qwen3 BERT          these families only, to the terminal
    python -m benchmarks.families --only Qwen3 BERT   these rows of docs/families.json again
    python -m benchmarks.families --check             trace the layers of three families again, and hold every row to
                                                      the limit; exit 1 where a number differs or is above it

Real widths, bf16, full tuning, no dropout, fake tensors with the kernels of a CUDA device; nothing runs on a device.
Bytes of a layer are those of a model less those of one with fewer layers; where kinds of layers alternate, the mean of
one group. Peaks are of whole models: activations, without weights, their gradients and the optimizer.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from benchmarks.coverage import versions
from benchmarks.floor import Floor, floor_of
from benchmarks.step import chunk_loss
from memopt.errors import ModelError
from memopt.plan.recipe import DEFAULT_MEMORY_RECIPE, load_recipe
from memopt.trace.account import Account, account
from memopt.trace import emulate
from memopt.trace.estimate import quiet, traced
from memopt.trace.events import Trace
from memopt.trace.kernels import STAND_INS
from memopt.trace.trace import trace
from memopt.trace.tracer import Tracer
from memopt.trace.training import Step, Training
from memopt.walk.deep import find_deep_sites
from memopt.walk.models.build import build_meta
from memopt.walk.models.config import config_nodes
from memopt.walk.models.plain import _wrapper as kernel_wrapper
from memopt.walk.models.plain import homes, is_kernel
from memopt.walk.models.shrink.depth import with_depth

FAMILIES_FILE = Path(__file__).resolve().parents[2] / "docs" / "families.json"
#: Most bytes of a layer, of those of the floor.
LIMIT = 1.15
#: A row whose bytes a layer differ by more from those of another run was not made by this code.
SAME = 0.005
QUICK = ("Llama 3", "Qwen3-MoE", "BERT")
MIB = 1 << 20


@dataclass(frozen=True)
class Family:
    """A family: the config of one of its models, and how large its steps are."""

    name: str
    model: str
    """The checkpoint whose widths these are."""
    publisher: str
    """Its account on the hub, or the one whose derivatives count."""
    model_type: str
    architecture: str
    fields: dict[str, Any] = field(default_factory=dict)
    """What differs from the default config."""
    depths: tuple[int, int] = (2, 3)
    """Layers of the two models whose difference is a layer, or a group of layers."""
    sizes: tuple[tuple[int, int | None], tuple[int, int | None]] = ((1, 4096), (1, 32768))
    """(rows, tokens) of about 4k and 32k tokens; None: what an image or a sound has."""
    note: str = ""

    def config(self, depth: int | None = None) -> PreTrainedConfig:
        """The config, without dropout; of `depth` layers."""
        fields = dict(self.fields)
        if depth is not None and "layer_types" in fields:
            fields |= {"layer_types": fields["layer_types"][:depth], "num_hidden_layers": depth}
        config = AutoConfig.for_model(self.model_type, **fields)
        config.architectures = [self.architecture]
        for node in config_nodes(config):
            node.use_cache = False
            for name, value in list(vars(node).items()):
                if isinstance(value, float) and ("drop" in name or name == "mask_time_prob"):
                    setattr(node, name, 0.0)
        return config if depth is None else with_depth(config, depth)


@dataclass(frozen=True)
class Row:
    """One family. Bytes; a layer is the mean of a group of layers."""

    name: str
    model: str
    publisher: str
    size: str
    unit: int
    stock: float
    memopt: float
    floor: float
    beyond: list[tuple[str, float]]
    """What memopt keeps in a group of layers beyond the floor: (what, bytes a layer), the largest first."""
    peaks: list[dict[str, int]]
    """For each size: variant -> bytes."""
    notes: list[str]
    seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """Of what memopt keeps, to the floor."""
        return self.memopt / self.floor


def main(argv: Sequence[str] | None = None) -> int:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.families",
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="by default all")
    parser.add_argument("--only", nargs="+", default=[], metavar="FAMILY", help="measure these rows of the file again")
    parser.add_argument("--check", action="store_true", help="hold the file's rows to the limit, trace three again")
    parser.add_argument("--no-peaks", action="store_true", help="bytes of a layer alone")
    parser.add_argument("--render", action="store_true", help="write the page from the files, trace nothing")
    arguments = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    if arguments.check:
        return _check()
    chosen = arguments.families or arguments.only
    unknown = set(chosen) - {family.name for family in FAMILIES}
    if unknown:
        parser.error(f"no family {', '.join(sorted(unknown))}; there are {', '.join(f.name for f in FAMILIES)}")
    rows = []
    for family in FAMILIES:
        if not arguments.render and (family.name in chosen or not chosen):
            try:
                rows.append(_measured(family, not arguments.no_peaks))
                if not arguments.families:
                    _write(rows)  # an interrupted run keeps its rows
            except Exception as error:
                print(f"{family.name} FAILED {type(error).__name__}: {error}", flush=True)
    if not arguments.families:
        _write(rows)
    return 1 if any(row is not None and row["ratio"] > LIMIT for row in rows) else 0


def _measured(family: Family, peaks: bool) -> dict[str, Any]:
    begun = time.perf_counter()
    row = dataclasses.replace(measure(family, peaks=peaks), seconds=0.0)
    row = dataclasses.replace(row, seconds=round(time.perf_counter() - begun, 1))
    units = " ".join(f"{name} {getattr(row, name) / row.unit:.2f}" for name in ("stock", "memopt", "floor"))
    print(f"{row.name}: {units}, ratio {row.ratio:.3f} ({row.seconds:.0f} s)", flush=True)
    for what, nbytes in row.beyond:
        print(f"    {nbytes / row.unit:+.3f} {what}", flush=True)
    for size in row.peaks:
        print("    " + ", ".join(f"{name} {nbytes / MIB:.0f}" for name, nbytes in size.items()), flush=True)
    return {**asdict(row), "ratio": row.ratio}


def measure(family: Family, *, peaks: bool = True) -> Row:
    """Trace the layers of `family` and, with `peaks`, its whole steps."""
    with assumed(build_meta(family.config(family.depths[0]))):
        with windows_in_kernels(), quiet():
            return _measure(family, peaks)


def _measure(family: Family, peaks: bool) -> Row:
    (_, less), (_, more) = (_layers(family, depth) for depth in family.depths)
    count = family.depths[1] - family.depths[0]
    stock, memopt, floor = ((b - a) / count for a, b in zip(_bytes(less), _bytes(more), strict=True))
    rows, tokens = family.sizes[0]
    size = f"{rows} x {tokens}" if tokens else f"{rows} rows"
    a_row = more[0].unit // (rows * (tokens or 1))
    found = [_peaks(family, *size, a_row * size[0] * (size[1] or 1)) for size in family.sizes] if peaks else []
    return Row(
        family.name, family.model, family.publisher, size, more[0].unit, stock, memopt, floor,
        _beyond(less, more, count), found, [*([family.note] if family.note else []), *_kernels(more[1])],
    )  # fmt: skip


_Layers = tuple[Floor, Account, Account]


@contextlib.contextmanager
def windows_in_kernels() -> Iterator[None]:
    """Inside, attention over a window runs in FlashAttention, which takes the window and needs no mask."""
    stock: Callable[..., Any] = emulate._mask
    emulate._mask = lambda *, local_size=None, **more: stock(local_size=None, **more)
    try:
        yield
    finally:
        emulate._mask = stock


@contextlib.contextmanager
def assumed(model: nn.Module) -> Iterator[None]:
    """Inside, the code of `model` finds the packages of the kernels of which memopt knows what they keep."""
    before = []
    for home in homes(model):
        for wrapper in filter(None, map(kernel_wrapper, vars(home).values())):
            cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True))
            stand_in = STAND_INS.get(cells["func_name"].cell_contents)
            for name, value in (("implementation", stand_in), ("is_new_implementation", True)) if stand_in else ():
                before.append((cells[name], cells[name].cell_contents))
                cells[name].cell_contents = value
    is_kernel.cache_clear()
    try:
        yield
    finally:
        for cell, value in reversed(before):
            cell.cell_contents = value
        is_kernel.cache_clear()


def _layers(family: Family, depth: int) -> tuple[Any, _Layers]:
    config = family.config(depth)
    sites = find_deep_sites(build_meta(config))
    rows, tokens = family.sizes[0]
    step = Step(config, Training(batch=rows, seq=tokens), sites, load_recipe(DEFAULT_MEMORY_RECIPE))
    accounts = []
    for each in (step.stock, step):
        with traced(each) as model:
            model.arguments.pop("labels", None)  # blocks alone
            accounts.append(account(model.model, model.run, blocks=sites.blocks, sites=sites, notes=model.notes))
    return sites, (floor_of(step), accounts[0], accounts[1])


def _bytes(layers: _Layers) -> tuple[int, int, int]:
    floor, stock, memopt = layers
    return stock.total, memopt.total, floor.nbytes


def _beyond(less: _Layers, more: _Layers, count: int) -> list[tuple[str, float]]:
    """Differences between what memopt and the floor keep, by shape and dtype, of at least a hundredth of the floor."""
    sums: dict[tuple[int, str], float] = {}
    names: dict[tuple[int, str], str] = {}
    for sign, (floor, _, memopt) in ((1, more), (-1, less)):
        for storage in memopt.storages:
            key = storage.nbytes, storage.dtype
            sums[key] = sums.get(key, 0.0) + sign * storage.nbytes / count
            names[key] = f"{storage.cause} {list(storage.shape)} {storage.dtype} ({storage.module.rpartition('.')[2]})"
        for node in floor.kept:
            key = node.nbytes, node.dtype
            sums[key] = sums.get(key, 0.0) - sign * node.nbytes / count
            names.setdefault(key, f"{node.operation} {list(node.shape)} {node.dtype} ({node.module.rpartition('.')[2]})")
    least = 0.01 * (more[0].nbytes - less[0].nbytes) / count
    found = [(names[key], nbytes) for key, nbytes in sums.items() if abs(nbytes) > least]
    return sorted(found, key=lambda each: -abs(each[1]))


def _kernels(of: Account) -> list[str]:
    return [note for note in of.notes if note.startswith(("Assumes", "Attention", "Of "))]


# --- peaks -----------------------------------------------------------------------------------------------------------


class _ChunkedTracer(Tracer):
    """Of a model whose loss is computed in chunks of rows."""

    def _trace(self, training: Training, groups: int | None = None) -> Trace:
        return trace(dataclasses.replace(self.of, training=training), groups=groups, prepare=_chunk_loss)


def _chunk_loss(model: PreTrainedModel) -> None:
    chunk_loss(model)


def _peaks(family: Family, rows: int, tokens: int | None, unit: int) -> dict[str, int]:
    """Variant -> bytes; ``inputs``: of the blocks' inputs, but one."""
    config = family.config()
    sites = find_deep_sites(build_meta(config))
    patched = load_recipe(DEFAULT_MEMORY_RECIPE)
    found = {}
    has_loss = sites.loss_head is not None and family.architecture.endswith("CausalLM")
    for name, recipe, checkpointing in (
        ("stock", None, "none"),
        ("memopt", patched, "none"),
        ("free", None, "full"),
        ("memopt + ck", patched, "full"),
    ):
        kind = _ChunkedTracer if name == "free" and has_loss else Tracer
        training = Training(batch=rows, seq=tokens, checkpointing=checkpointing)  # type: ignore[arg-type]
        with contextlib.suppress(ModelError):  # a class without activation checkpointing
            found[name] = _activations(kind(Step(config, training, sites, recipe)).at(training))
    if "free" in found:
        found["inputs"] = (len(sites.blocks) - 1) * unit
    return found


def _activations(found: Trace) -> int:
    """The most bytes that live at one time, without weights and their gradients."""
    left_out = set(found.gradients)
    live = most = 0
    for event in found.events:
        if event.storage not in left_out and event.storage.part != "gradients":
            live += event.change
            most = max(most, live)
    return most


# --- files -----------------------------------------------------------------------------------------------------------


def _write(rows: Sequence[dict[str, Any]]) -> None:
    before = json.loads(FAMILIES_FILE.read_text())["rows"] if FAMILIES_FILE.exists() else []
    found = {row["name"]: row for row in (*before, *rows)}
    document = {
        "command": "python -m benchmarks.families",
        "device": "cpu",
        "versions": versions(),
        "rows": [found[family.name] for family in FAMILIES if family.name in found],
    }
    FAMILIES_FILE.write_text(json.dumps(document, indent=1) + "\n")


def _check() -> int:
    rows = {row["name"]: row for row in json.loads(FAMILIES_FILE.read_text())["rows"]}
    wrong = [f"{name}: {row['ratio']:.3f} of the floor" for name, row in rows.items() if row["ratio"] > LIMIT]
    for family in FAMILIES:
        if family.name in QUICK:
            now = measure(family, peaks=False)
            for name in ("stock", "memopt", "floor"):
                was, found = rows[family.name][name], getattr(now, name)
                if abs(found - was) > SAME * was:
                    wrong.append(f"{family.name}: {name} was {was / now.unit:.3f} units, is {found / now.unit:.3f}")
    for line in wrong:
        print(f"SHORT {line}", file=sys.stderr)
    print(f"{'SHORT' if wrong else 'ok   '} {len(rows)} families, {len(QUICK)} traced again")
    return 1 if wrong else 0


# --- the families ----------------------------------------------------------------------------------------------------


def _llama(hidden: int, mlp: int, layers: int, heads: int, kv: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv, "vocab_size": vocab, "max_position_embeddings": 40960, **more,
    }  # fmt: skip


_SHORT = ((8, 512), (64, 512))
_LM, _LONG = "ForCausalLM", {"max_position_embeddings": 40960}
_NEMOTRON = {"M": "linear_attention", "-": "mlp", "*": "full_attention"}
#: In the order of the derivatives of their publishers; within one, as people name them.
FAMILIES = (
    Family("Qwen3", "Qwen3-8B", "Qwen", "qwen3", f"Qwen3{_LM}", _llama(4096, 12288, 36, 32, 8, 151936, head_dim=128)),
    Family("Qwen2", "Qwen2.5-7B", "Qwen", "qwen2", f"Qwen2{_LM}", _llama(3584, 18944, 28, 28, 4, 152064)),
    Family("Qwen3.5", "Qwen3.5-9B", "Qwen", "qwen3_5_text", f"Qwen3_5{_LM}", _LONG, (4, 8)),
    Family("Qwen3.5-MoE", "Qwen3.5-35B-A3B", "Qwen", "qwen3_5_moe_text", f"Qwen3_5Moe{_LM}", _LONG, (4, 8)),
    Family(
        "Qwen3-MoE", "Qwen3-30B-A3B", "Qwen", "qwen3_moe", f"Qwen3Moe{_LM}",
        _llama(2048, 6144, 48, 32, 4, 151936, head_dim=128, moe_intermediate_size=768, num_experts=128,
               num_experts_per_tok=8),
    ),
    Family("Qwen3-Next", "Qwen3-Next-80B-A3B", "Qwen", "qwen3_next", f"Qwen3Next{_LM}", _LONG, (4, 8)),
    Family("Qwen2.5-VL", "Qwen2.5-VL-7B, language blocks", "Qwen", "qwen2_5_vl_text", "Qwen2_5_VLTextModel",
           _llama(3584, 18944, 28, 28, 4, 152064)),
    Family("Qwen3-VL", "Qwen3-VL-8B, language blocks", "Qwen", "qwen3_vl_text", "Qwen3VLTextModel",
           _llama(4096, 12288, 36, 32, 8, 151936, head_dim=128)),
    Family("BERT", "bert-base", "google", "bert", "BertForMaskedLM", sizes=_SHORT),
    Family("Gemma 3", "gemma-3-4b", "google", "gemma3_text", f"Gemma3{_LM}",
           _llama(2560, 10240, 34, 8, 4, 262208, head_dim=256, sliding_window=1024), (6, 12)),
    Family("Gemma 2", "gemma-2-2b", "google", "gemma2", f"Gemma2{_LM}", _LONG, (2, 4)),
    Family("Gemma 3n", "gemma-3n-E4B", "google", "gemma3n_text", f"Gemma3n{_LM}", {"num_kv_shared_layers": 0, **_LONG},
           (5, 10), note="No layer takes the keys and values of another."),
    Family("Gemma 4", "default config", "google", "gemma4_text", f"Gemma4{_LM}", _LONG, (6, 12)),
    Family("ViT", "vit-base-patch16-224", "google", "vit", "ViTForImageClassification", sizes=((21, None), (166, None))),
    Family("T5", "flan-t5-base, one block of each stack", "google", "t5", "T5ForConditionalGeneration",
           {"d_model": 768, "d_kv": 64, "d_ff": 2048, "num_layers": 12, "num_decoder_layers": 12, "num_heads": 12,
            "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, sizes=_SHORT),
    Family("SigLIP", "siglip-base-patch16-224, one block of each tower", "google", "siglip", "SiglipModel",
           sizes=((16, None), (126, None))),
    Family("Llama 3", "Llama-3.1-8B", "meta", "llama", f"Llama{_LM}", _llama(4096, 14336, 32, 32, 8, 128256)),
    Family("SmolLM3", "SmolLM3-3B", "huggingface", "smollm3", f"SmolLM3{_LM}",
           _llama(2048, 11008, 36, 16, 4, 128256), (4, 8)),
    Family("DistilBERT", "distilbert-base", "huggingface", "distilbert", "DistilBertForMaskedLM", sizes=_SHORT),
    Family("Whisper", "whisper-small, one block of each stack", "openai", "whisper", "WhisperForConditionalGeneration",
           {"d_model": 768, "encoder_layers": 12, "decoder_layers": 12, "encoder_attention_heads": 12,
            "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072}, sizes=((2, 448), (17, 448))),
    Family("gpt-oss", "gpt-oss-20b", "openai", "gpt_oss", f"GptOss{_LM}",
           {"num_hidden_layers": 24, "num_local_experts": 32, **_LONG}, (2, 4)),
    Family("CLIP", "clip-vit-base-patch32, one block of each tower", "openai", "clip", "CLIPModel",
           sizes=((32, None), (256, None))),
    Family("GPT-2", "gpt2", "openai", "gpt2", "GPT2LMHeadModel", sizes=((4, 1024), (32, 1024))),
    Family("Phi-3", "Phi-3-mini", "microsoft", "phi3", f"Phi3{_LM}", _llama(3072, 8192, 32, 32, 32, 32064)),
    Family("Phi-4", "phi-4", "microsoft", "phi3", f"Phi3{_LM}", _llama(5120, 17920, 40, 40, 10, 100352)),
    Family("DeBERTa-v3", "deberta-v3-base", "microsoft", "deberta-v2", "DebertaV2ForMaskedLM",
           {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
            "relative_attention": True, "position_buckets": 256, "norm_rel_ebd": "layer_norm", "share_att_key": True,
            "pos_att_type": ["p2c", "c2p"], "max_relative_positions": -1, "position_biased_input": False}, sizes=_SHORT),
    Family("MPNet", "mpnet-base", "microsoft", "mpnet", "MPNetForMaskedLM", sizes=_SHORT),
    Family("MiniLM", "MiniLM-L6-H384", "microsoft", "bert", "BertForMaskedLM",
           {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
           sizes=_SHORT),
    Family("RoBERTa", "xlm-roberta-base", "facebook", "xlm-roberta", "XLMRobertaForMaskedLM",
           {"vocab_size": 250002, "max_position_embeddings": 514}, sizes=_SHORT),
    Family("wav2vec 2.0", "wav2vec2-base", "facebook", "wav2vec2", "Wav2Vec2ForCTC", sizes=((8, None), (64, None))),
    Family("BART", "bart-base, one block of each stack", "facebook", "bart", "BartForConditionalGeneration",
           {"d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 12,
            "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "vocab_size": 50265},
           sizes=_SHORT),
    Family("DINOv2", "dinov2-base", "facebook", "dinov2", "Dinov2ForImageClassification", sizes=((16, None), (128, None))),
    Family("DINOv3", "default config", "facebook", "dinov3_vit", "DINOv3ViTModel", sizes=((16, None), (128, None))),
    Family("Mistral", "Mistral-7B-v0.3", "mistralai", "mistral", f"Mistral{_LM}", _llama(4096, 14336, 32, 32, 8, 32768, sliding_window=None)),
    Family("Ministral", "Ministral-8B-2410", "mistralai", "ministral", f"Ministral{_LM}",
           _llama(4096, 12288, 36, 32, 8, 131072, head_dim=128), (4, 8)),
    Family("Mixtral", "Mixtral-8x7B", "mistralai", "mixtral", f"Mixtral{_LM}",
           _llama(4096, 14336, 32, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2)),
    Family("DeepSeek-V3", "DeepSeek-V3", "deepseek-ai", "deepseek_v3", f"DeepseekV3{_LM}", _LONG, (4, 5)),
    Family("GLM-4", "GLM-4-9B-0414", "other", "glm4", f"Glm4{_LM}", _LONG),
    Family("GLM-4.5", "GLM-4.5-Air", "other", "glm4_moe", f"Glm4Moe{_LM}", {"head_dim": 128, **_LONG}, (2, 3)),
    Family("Granite 4 hybrid", "granite-4.0-h-micro", "other", "granitemoehybrid", f"GraniteMoeHybrid{_LM}",
           _llama(2048, 2048, 40, 32, 8, 100352, num_local_experts=0, shared_intermediate_size=8192, mamba_n_heads=64,
                  mamba_d_state=128, position_embedding_type="nope",
                  layer_types=["attention" if at % 10 == 5 else "mamba" for at in range(40)]), (10, 20)),
    Family("Nemotron-H", "Nemotron-H-8B", "other", "nemotron_h", f"NemotronH{_LM}",
           {"num_hidden_layers": 52, "layer_types": [_NEMOTRON[kind] for kind in f"M-M-M-M{4 * '*-M-M-M-M-M'}-"], **_LONG},
           (8, 19)),
    Family("ModernBERT", "ModernBERT-base", "other", "modernbert", "ModernBertForMaskedLM", {}, (4, 7), _SHORT),
    Family("OLMo 2", "OLMo-2-7B", "other", "olmo2", f"Olmo2{_LM}", _llama(4096, 11008, 32, 32, 32, 100352)),
    Family("OLMo 3", "Olmo-3-7B", "other", "olmo3", f"Olmo3{_LM}",
           _llama(4096, 11008, 32, 32, 32, 100278, sliding_window=4096), (4, 8)),
    Family("LFM2", "LFM2-1.2B", "other", "lfm2", f"Lfm2{_LM}",
           _llama(2048, 12288, 16, 32, 8, 65536, full_attn_idxs=[2, 5, 8, 10, 12, 14]), (3, 6)),
    Family("Falcon-H1", "default config", "other", "falcon_h1", f"FalconH1{_LM}", _LONG),
    Family("Mamba 2", "mamba2-2.7b", "other", "mamba2", f"Mamba2{_LM}",
           {"hidden_size": 2560, "num_heads": 80, "n_groups": 1, "vocab_size": 50288}),
    Family("Bamba", "Bamba-9B", "other", "bamba", f"Bamba{_LM}",
           _llama(4096, 14336, 32, 32, 8, 128256, mamba_d_state=128, attn_layer_indices=[9, 18, 27]), (9, 18)),
    Family("Jamba", "Jamba-v0.1", "other", "jamba", f"Jamba{_LM}", _LONG, (8, 16)),
    Family("Kimi-Linear", "Kimi-Linear-48B-A3B", "other", "kimi_linear", f"KimiLinear{_LM}", _LONG, (5, 9)),
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
