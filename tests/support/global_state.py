"""Everything of a process that more than one library reads: what a call has to leave as it found it."""

from __future__ import annotations

import gc
import locale
import logging
import os
import random
import signal
import sys
import threading
import warnings
from typing import Any

import huggingface_hub.utils.logging
import numpy as np
import torch
import transformers.utils.logging
from torch import nn
from torch.nn.modules import module as global_hooks

_TORCH = (
    torch.are_deterministic_algorithms_enabled,
    torch.get_default_device,
    torch.get_default_dtype,
    torch.get_deterministic_debug_mode,
    torch.get_float32_matmul_precision,
    torch.get_num_interop_threads,
    torch.get_num_threads,
    torch.is_anomaly_enabled,
    torch.is_autocast_cache_enabled,
    torch.is_deterministic_algorithms_warn_only_enabled,
    torch.is_grad_enabled,
    torch.is_inference_mode_enabled,
)
_SYS = ("argv", "dont_write_bytecode", "excepthook", "meta_path", "path", "path_hooks", "stderr", "stdin", "stdout")
_OWNERS = (torch, torch.Tensor, nn.functional, nn.init, nn.Module, transformers.PreTrainedModel, warnings, os)


def global_state() -> dict[str, Any]:
    """Name -> a value that is equal later where nothing has changed."""
    return {
        "generator of torch": torch.get_rng_state().tolist(),
        "generators of CUDA": [s.tolist() for s in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
        "generator of numpy": repr(np.random.get_state(legacy=False)),
        "generator of random": random.getstate(),
        **{read.__name__: read() for read in _TORCH},
        **{f"sys.{name}": _shallow(getattr(sys, name)) for name in _SYS},
        "autocast": [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")],
        "cudnn": _settings(torch.backends.cudnn),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "garbage collection": (gc.isenabled(), gc.get_threshold()),
        "global module hooks": {n: list(v) for n, v in vars(global_hooks).items() if n.startswith("_global") and v},
        "locale": locale.setlocale(locale.LC_ALL),
        "logging": _logging(),
        "modes": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
        "recursion limit": sys.getrecursionlimit(),
        "signals": [signal.getsignal(number) for number in sorted(signal.valid_signals())],
        "threads": threading.enumerate(),
        "verbosity": (
            transformers.utils.logging.get_verbosity(),
            transformers.utils.logging.is_progress_bar_enabled(),
            huggingface_hub.utils.logging.get_verbosity(),
        ),
        "warning filters": list(warnings.filters),
        **{f"names of {owner.__name__}": dict(vars(owner)) for owner in _OWNERS},
    }


def model_state(model: nn.Module) -> dict[str, Any]:
    """The same of a model: its configs, and of each module the attributes, tensors, modes and hooks."""
    config: Any = getattr(model, "config", None)
    return {
        "config": None if config is None else (config.to_dict(), config._attn_implementation, vars(config).copy()),
        "generation config": repr(getattr(model, "generation_config", None)),
        **{
            f"module {name or 'itself'}": {key: _shallow(value) for key, value in vars(module).items()}
            for name, module in model.named_modules()
        },
        **{
            f"tensor {name}": (id(t), t.data_ptr(), t._version, t.requires_grad, t.grad, t.double().sum().item())
            for name, t in (*model.named_parameters(), *model.named_buffers())
        },
    }


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """A line for each value that is not what it was. Names that only came, by a first import, are no change."""
    return [
        f"{name}: {_difference(value, after.get(name))}"
        for name, value in before.items()
        if _differs(value, after[name])
    ]


def _shallow(value: Any) -> Any:
    return type(value)(value) if type(value) in (list, dict, set) else value


def _settings(module: Any) -> list[tuple[str, Any]]:
    return [(name, getattr(module, name)) for name in ("enabled", "benchmark", "deterministic", "allow_tf32")]


def _logging() -> dict[str, Any]:
    named = {name: log for name, log in logging.root.manager.loggerDict.items() if isinstance(log, logging.Logger)}
    loggers = {"root": logging.root, **named}
    states = {
        name: (log.level, log.disabled, log.propagate, list(log.handlers), list(log.filters))
        for name, log in loggers.items()
    }
    return {**states, "disabled below": logging.root.manager.disable}


def _differs(before: Any, after: Any) -> bool:
    if isinstance(before, dict) and isinstance(after, dict):
        return any(name not in after or _differs(value, after[name]) for name, value in before.items())
    if before is after:
        return False
    return callable(before) or isinstance(before, (torch.Tensor, np.ndarray)) or bool(before != after)


def _difference(before: Any, after: Any) -> str:
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [k for k, value in before.items() if k not in after or _differs(value, after[k])]
        return ", ".join(f"{k}: {before[k]!r} is {after.get(k)!r}"[:300] for k in keys)
    return f"{before!r} is {after!r}"[:300]
