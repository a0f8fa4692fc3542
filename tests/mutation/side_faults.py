"""Faults in everything else that a loader reads: config, tokenizer and other files, memopt.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from memopt.checkpoint.sources.source import MANIFEST
from tests.mutation.folders import SIDE_FILES, WEIGHTS, Copy
from tests.mutation.planted import in_folder

# --- config.json ----------------------------------------------------------------------------------------------------


def _other(value: Any) -> Any:
    """Another value of the same kind."""
    if value is None:
        return 4
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 if value else 0.1
    if isinstance(value, str):
        return {"silu": "gelu", "gelu": "relu", "gelu_new": "gelu", "gelu_pytorch_tanh": "silu"}.get(value, f"{value}x")
    if isinstance(value, list):
        return value[::-1] if value != value[::-1] else value[1:]
    return {**value, "planted": 1}


def _changed(*names: str) -> Callable[[Copy], str]:
    """The first of these fields that the config has, or a table in it has, gets another value."""

    def damage(copy: Copy) -> str:
        tables = [copy.config, *(value for value in copy.config.values() if isinstance(value, dict))]
        table, name = next((table, name) for name in names for table in tables if name in table)
        table[name] = _other(table[name])
        copy.write_config()
        return name

    return damage


_DECODERS = ("llama", "mixtral", "gemma2", "qwen3_moe", "phi3")
_FIELDS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("theta of the rotary embedding", ("rope_theta",), _DECODERS),
    ("eps of the norms", ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), ()),
    ("the activation", ("hidden_act", "hidden_activation", "activation_function", "dense_act_fn"), ()),
    ("a dropout", ("attention_dropout", "attn_pdrop", "hidden_dropout_prob", "dropout_rate"), ()),
    ("the number of heads", ("num_attention_heads", "n_head", "num_heads"), ()),
    ("the number of key heads", ("num_key_value_heads",), _DECODERS),
    ("the size of a head", ("head_dim", "d_kv"), ("gemma2", "qwen3_moe", "t5")),
    ("the scaling of attention", ("query_pre_attn_scalar", "scale_attn_weights"), ("gemma2", "gpt2")),
    ("the softcap", ("final_logit_softcapping", "attn_logit_softcapping"), ("gemma2",)),
    ("whether head and embedding are one", ("tie_word_embeddings",), ("llama", "gpt2", "t5", "mixtral")),
    ("the number of layers", ("num_hidden_layers", "n_layer", "num_layers"), ()),
    ("the hidden size", ("hidden_size", "n_embd", "d_model"), ()),
    ("the size of the vocabulary", ("vocab_size",), ("llama", "bert", "t5", "gpt2")),
    ("the number of positions", ("max_position_embeddings", "n_positions"), ("llama", "gpt2", "bert")),
    ("how many experts a token has", ("num_experts_per_tok",), ("mixtral", "qwen3_moe")),
    ("whether routing weights are normalised", ("norm_topk_prob", "router_jitter_noise"), ("qwen3_moe", "mixtral")),
    ("the window of attention", ("sliding_window",), ("gemma2", "phi3")),
    ("the kinds of layers", ("layer_types",), ("gemma2",)),
    ("a special token", ("eos_token_id", "pad_token_id"), ("llama", "bert", "gpt2", "t5")),
    ("the labels", ("id2label",), ("bert", "vit")),
    ("the class of the model", ("architectures",), ("llama", "bert", "vit")),
    ("the type of the model", ("model_type",), ("llama", "bert", "vit")),
    ("the dtype", ("dtype", "torch_dtype"), ("llama", "gpt2")),
    ("the size of a patch of the image", ("patch_size",), ("vit",)),
)
for _name, _keys, _architectures in _FIELDS:
    in_folder("config", f"{_name} is another", *_architectures)(_changed(*_keys))


@in_folder("config", "a field that the source has not", "llama", "bert")
def _(copy: Copy) -> str:
    copy.config["auto_map"] = {"AutoModel": "modeling_own.Model"}
    copy.write_config()
    return "auto_map"


@in_folder("config", "a field is missing", "llama", "bert", "gpt2")
def _(copy: Copy) -> str:
    name = next(name for name in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon") if name in copy.config)
    del copy.config[name]
    copy.write_config()
    return name


@in_folder("config", "the memopt key is missing", "llama", "bert")
def _(copy: Copy) -> str:
    del copy.config["memopt"]
    copy.write_config()
    return "memopt"


@in_folder("config", "the memopt key names another recipe", "llama", "bert")
def _(copy: Copy) -> str:
    copy.config["memopt"]["recipe"] = "int8"
    copy.write_config()
    return "memopt"


@in_folder("config", "eps differs in its last digit", "llama", "bert", "gpt2")
def _(copy: Copy) -> str:
    name = next(name for name in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon") if name in copy.config)
    copy.config[name] *= 1 + 2**-50
    copy.write_config()
    return name


@in_folder("config", "it is no JSON", "llama")
def _(copy: Copy) -> str:
    (copy.path / "config.json").write_text("{")
    copy.forge("config.json")
    return "config.json"


@in_folder("config", "one key stands twice", "llama", "bert")
def _(copy: Copy) -> str:
    path = copy.path / "config.json"
    path.write_text(path.read_text().replace("{", '{\n  "model_type": "gpt2",', 1))
    copy.forge("config.json")
    return "config.json"


# --- other files ----------------------------------------------------------------------------------------------------

for _file, _text in SIDE_FILES.items():

    @in_folder("side files", f"{_file} is changed", "llama", sides=True)
    def _(copy: Copy, _file: str = _file, _text: str = _text) -> str:
        (copy.path / _file).write_text(_text.replace("1", "2") + " ")
        copy.forge(_file)
        return _file

    @in_folder("side files", f"{_file} is missing", "llama", sides=True)
    def _(copy: Copy, _file: str = _file) -> str:
        (copy.path / _file).unlink()
        copy.manifest["files"].pop(_file, None)
        copy.write_manifest()
        return _file


@in_folder("side files", "a file is changed, digest as it was", "llama", sides=True)
def _(copy: Copy) -> str:
    (copy.path / "tokenizer.json").write_text("{}")
    return "tokenizer.json"


for _added in ("added_tokens.json", "modeling_other.py", "pytorch_model.bin", "extra/config.json"):

    @in_folder("side files", f"{_added} is added", "llama", sides=True)
    def _(copy: Copy, _added: str = _added) -> str:
        (copy.path / _added).parent.mkdir(exist_ok=True)
        (copy.path / _added).write_text("{}")
        copy.forge(_added)
        return _added


@in_folder("side files", "adapter_config.json is added", "llama", sides=True, may_refuse=True)
def _(copy: Copy) -> tuple[str, str]:
    (copy.path / "adapter_config.json").write_text("{}")
    copy.forge("adapter_config.json")
    return "adapter_config.json", "holds a PEFT adapter"


@in_folder("side files", "a file is added that memopt.json does not know", "llama", "bert", sides=True)
def _(copy: Copy) -> str:
    (copy.path / "added_tokens.json").write_text("{}")
    return "added_tokens.json"


@in_folder("side files", "a file is a link to another", "llama", sides=True)
def _(copy: Copy) -> str:
    (copy.path / "tokenizer.json").unlink()
    (copy.path / "tokenizer.json").symlink_to(copy.path / "special_tokens_map.json")
    copy.forge("tokenizer.json")
    return "tokenizer.json"


# --- memopt.json ----------------------------------------------------------------------------------------------------

_Manifest = dict[str, Any]


def _edited(name: str, edit: Callable[[_Manifest], Any], *places: str, on: tuple[str, ...] = ("llama",)) -> None:
    """Enter a fault that edits memopt.json."""

    def damage(copy: Copy) -> tuple[str, ...]:
        edit(copy.manifest)
        copy.write_manifest()
        return *places, MANIFEST

    in_folder("manifest", name, *on)(damage)


def _first(data: _Manifest) -> _Manifest:
    """The first fold."""
    fold: _Manifest = data["folds"][0]["fold"]
    return fold


for _key in (
    "schema_version", "memopt_version", "source", "recipe", "entries", "folds", "files", "notes", "changed_outputs"
):  # fmt: skip
    _edited(f"{_key} is missing", lambda data, _key=_key: data.pop(_key), _key)
_edited("the list of files is empty", lambda data: data["files"].clear(), "files", WEIGHTS)
_edited("the weights are not in the list of files", lambda data: data["files"].pop(WEIGHTS), WEIGHTS)
_edited("the config is not in the list of files", lambda data: data["files"].pop("config.json"), "config.json")
_edited("a file in the list is not there", lambda data: data["files"].update(gone=data["files"][WEIGHTS]), "gone")
_edited("the list names a file outside", lambda data: data["files"].update({"../x": data["files"][WEIGHTS]}), "../x")
_edited("an older schema", lambda data: data.update(schema_version=0), "schema")
_edited("the schema is a word", lambda data: data.update(schema_version="1"), "schema")
_edited("an unknown key", lambda data: data.update(planted=1), "planted")
_edited("a fold is dropped", lambda data: data["folds"].pop(), "norm", on=("llama", "gpt2", "gemma2", "mixtral"))
_edited("all folds are dropped", lambda data: data["folds"].clear(), "norm", "ln_", on=("llama", "gpt2"))
_edited("a fold stands twice", lambda data: data["folds"].append(data["folds"][0]), "norm", on=("llama", "gemma2"))
_edited("a fold has one reader less", lambda data: _first(data)["consumers"].pop(), "norm", on=("llama", "mixtral"))
_edited("a fold names another module", lambda data: _first(data).update(norm="model.norm"), "model.norm")
_edited("a fold has another offset", lambda data: _first(data).update(offset=1), "input_layernorm")
for _output in ("logits", "hidden_states"):
    _edited(
        f"a changed output is {_output}",
        lambda data, _output=_output: data.update(changed_outputs=[_output]),
        _output,
        on=("llama", "bert"),
    )
_edited("another recipe", lambda data: data["recipe"].update(name="int8"), "recipe", on=("llama", "bert"))
_edited("a recipe that folds nothing", lambda data: data["recipe"]["norms"].update(fold="none"), "recipe")
_edited("no entries", lambda data: data["entries"].clear(), "entries", on=("llama", "bert"))
_edited("an entry has another action", lambda data: data["entries"][0].update(action="keep"), "entries", "norm")
_edited("an entry of no module", lambda data: data["entries"][0].update(name="nowhere"), "nowhere")

# Here verify may say that it cannot tell.

_AT_LEAST_SKIPPED = ("fail", "skip")


@in_folder("manifest", "the source's digest is another", "llama", statuses=_AT_LEAST_SKIPPED)
def _(copy: Copy) -> tuple[str, str]:
    copy.manifest["source"]["files"][WEIGHTS]["sha256"] = "0" * 64
    copy.write_manifest()
    return WEIGHTS, MANIFEST


@in_folder("manifest", "the source has no files", "llama", statuses=_AT_LEAST_SKIPPED)
def _(copy: Copy) -> tuple[str, str]:
    copy.manifest["source"]["files"] = {}
    copy.write_manifest()
    return "source", MANIFEST


@in_folder("manifest", "the source is the patched folder itself", "llama", statuses=_AT_LEAST_SKIPPED)
def _(copy: Copy) -> tuple[str, str]:
    copy.manifest["source"]["path"] = str(copy.path)
    copy.write_manifest()
    return "source", MANIFEST


# Here there is nothing to verify: an error that says so.


@in_folder("manifest", "a newer schema", "llama", may_refuse=True)
def _(copy: Copy) -> str:
    copy.manifest["schema_version"] += 1
    copy.write_manifest()
    return MANIFEST


for _name, _content in (("no JSON", "{"), ("a list", "[]"), ("empty", ""), ("a number", "7")):

    @in_folder("manifest", f"it is {_name}", "llama", may_refuse=True)
    def _(copy: Copy, _content: str = _content) -> str:
        (copy.path / MANIFEST).write_text(_content)
        return MANIFEST


@in_folder("manifest", "one key stands twice", "llama", may_refuse=True)
def _(copy: Copy) -> str:
    text = json.dumps(copy.manifest)
    (copy.path / MANIFEST).write_text(text.replace("{", '{"folds": [], ', 1))
    return MANIFEST
