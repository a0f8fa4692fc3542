"""Folders of PEFT adapters, which hold no model."""

from __future__ import annotations

from pathlib import Path

from memopt.environment.files import parse_json, read_small
from memopt.errors import ModelError

ADAPTER_CONFIG = "adapter_config.json"


def refuse_adapter(folder: Path) -> None:
    """Raise if `folder` holds an adapter: transformers would load the adapter's base model.

    Raises:
        ModelError: `folder` holds a PEFT adapter; the message names the base model.
    """
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        return
    try:
        base = parse_json(read_small(path))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        base = None
    if not isinstance(base, str) or not base:
        raise ModelError(f"'{folder}' holds a PEFT adapter, not a model.", "Give the base model that it belongs to.")
    raise ModelError(f"'{folder}' holds a PEFT adapter of '{base}', not a model.", f"Give the base model: {base}")
