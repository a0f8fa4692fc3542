"""From a model name to a local folder: a path, or a hub id through the hub's cache."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from memopt.environment.files import model_folder, user_path

#: Suffixes of files of tensors, as shell wildcards.
TENSORS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.npz")
#: Folders that hold the whole model once more, or a trainer's state.
_COPIES = ("original/", "onnx/", "checkpoint-*/", "global_step*/")
#: Paths of files that hold the model in another form, a trainer's state, or a PEFT adapter, which fits no folded model.
#: These are shell wildcards, whose `*` matches folders too. Other weights (of a language, a voice) belong to the model.
OTHER_WEIGHTS = (
    "pytorch_model*.bin", "pytorch_model*.bin.index.json", "consolidated*", "*/consolidated*",
    "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.ggml", "*.onnx", "*.onnx_data*", "*.ot", "*.tflite", "*.mlmodel",
    "*.mlpackage/*", "*.nemo", "openvino_*", "*/openvino_*",
    "*/model-*-of-*.safetensors", "*/pytorch_model-*-of-*.bin", *(f + name for f in _COPIES for name in TENSORS),
    "optimizer.*", "scheduler.pt", "scheduler.bin", "scaler.pt", "rng_state*.pth", "training_args.bin",
    "adapter_model*.safetensors", "adapter_model*.bin", "*/adapter_model*.safetensors", "*/adapter_model*.bin",
)  # fmt: skip


def locate(model: str, *, revision: str | None = None, allow_pickle: bool = False, weights: bool = True) -> Path:
    """Folder of `model`, downloaded first if it is a hub id.

    Args:
        model: a local folder or a hub id (``name`` or ``organisation/name``).
        revision: branch, tag or commit; hub ids only.
        allow_pickle: also fetch ``pytorch_model*.bin``.
        weights: False fetches the configuration, code and index only.

    Raises:
        ModelError: the model exists neither here nor on the hub, is gated, or cannot be reached.
    """
    folder = model_folder(model, revision)
    if folder is not None:
        return folder.resolve()
    ignored = [*OTHER_WEIGHTS, *(() if weights else TENSORS)]
    root = _download(model, revision, ignored)
    if allow_pickle and weights and not any(root.glob("*.safetensors")):
        root = _download(model, revision, [p for p in ignored if not p.startswith("pytorch_model")])
    return root


def cache_folder() -> Path:
    """Folder of the hub's cache."""
    from huggingface_hub import constants

    return user_path(constants.HF_HUB_CACHE).resolve()


def _download(model: str, revision: str | None, ignored: list[str]) -> Path:
    from huggingface_hub import snapshot_download  # imported here: both take the command line a second

    from memopt.environment.hub import from_hub

    return from_hub(
        model, revision, "files", partial(snapshot_download, model, revision=revision, ignore_patterns=ignored)
    )
