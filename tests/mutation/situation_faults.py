"""Faults that show in one way to run a step alone, and those in what lives over a step; each in one module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from memopt.kernels.dropout.function import SeededDropoutFunction
from memopt.torch_compat import tree_leaves
from tests.mutation.acting import gradients_changed
from tests.mutation.models import DTYPES
from tests.mutation.planted import in_modules
from tests.mutation.site import Site

Where = Callable[[nn.Module], bool]
When = Callable[..., bool]

# --- places ---------------------------------------------------------------------------------------------------------


def _norm(module: nn.Module) -> bool:
    return any(each.numel() for each in _vectors(module)) and not list(module.children()) and not _matrices(module)


def _activation(module: nn.Module) -> bool:
    return not list(module.parameters()) and not list(module.buffers())


def _block(module: nn.Module) -> bool:
    return isinstance(getattr(module, "self_attn", None) or getattr(module, "attention", None), nn.Module)


def _gated(module: nn.Module) -> bool:
    return hasattr(module, "gate_proj") and hasattr(module, "up_proj") and not _block(module)


def _experts(module: nn.Module) -> bool:
    return any(each.dim() == 3 for each in module.parameters(recurse=False))


def _head(module: nn.Module) -> bool:
    return bool(_matrices(module)) and not list(module.children())


def _vectors(module: nn.Module) -> list[Tensor]:
    return [each for each in (*module.parameters(), *module.buffers()) if each.dim() == 1]


def _matrices(module: nn.Module) -> list[Tensor]:
    return [each for each in module.parameters() if each.dim() > 1]


# --- how a fault acts -----------------------------------------------------------------------------------------------


@contextmanager
def _around(site: Site, where: Where, change: Callable[[nn.Module, Tensor, Any], Any], when: When) -> Iterator[None]:
    """What a patched module at such a place returns is change(module, output, forward's arguments) when(it is so)."""

    def around(forward: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        acts = where(module) and site.here() and when(module, *args, **kwargs)
        output = forward(*args, **kwargs)
        if not acts:
            return output
        site.acted += 1
        first = output[0] if isinstance(output, tuple) else output
        changed = change(module, first, args)
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    site.around = around
    try:
        yield
    finally:
        site.around = None


def _larger(module: nn.Module, output: Tensor, args: Any) -> Tensor:
    return output * 1.1


def _steeper(module: nn.Module, output: Tensor, args: Any) -> Tensor:
    return output * 1.1 - output.detach() * 0.1 if output.requires_grad else output


def _grad(when: When) -> When:
    return lambda module, *args, **kwargs: torch.is_grad_enabled() and when(module, *args, **kwargs)


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


def _trained(module: nn.Module) -> list[bool]:
    return [each.requires_grad for each in module.parameters()]


_WHEN: dict[str, When] = {
    "in train mode": _grad(lambda module, *args, **kwargs: module.training),
    "with frozen weights": _grad(lambda module, *args, **kwargs: not all(_trained(module))),
    "beside adapters": _grad(
        lambda module, *args, **kwargs: any("lora_" in name for name, _ in module.named_parameters())
    ),
    "under autocast": _grad(lambda module, *args, **kwargs: torch.is_autocast_enabled("cpu")),
    "where gradients are there": _grad(
        lambda module, *args, **kwargs: any(each.grad is not None for each in module.parameters())
    ),
    "with a batch above 2": _grad(lambda module, x, *args, **kwargs: x.dim() > 2 and 2 < len(x) < 30),
    "above 100 tokens": _grad(lambda module, x, *args, **kwargs: x.dim() > 2 and x.shape[1] > 100),
    "at odd lengths": _grad(lambda module, x, *args, **kwargs: x.dim() > 2 and x.shape[1] % 2 == 1),
    "above 300 rows": _grad(lambda module, x, *args, **kwargs: _rows(x) > 300),
    "in bf16 tensors that are computed in parts": _grad(
        lambda module, x, *args, **kwargs: x.dtype == torch.bfloat16 and x.numel() >= 2**18
    ),
    "where a row is masked": _grad(lambda module, *args, **kwargs: kwargs.get("attention_mask") is not None),
    "without gradients": lambda module, *args, **kwargs: not torch.is_grad_enabled(),
}
_MODELS = ("llama", "phi3", "gemma2", "mixtral")
#: Condition -> the places that are tried, and where.
_PLACES: dict[str, tuple[tuple[str, Where, tuple[str, ...]], ...]] = {
    "in train mode": (("a norm", _norm, ("bert", "vit", "llama")), ("an activation", _activation, ("bert", "vit"))),
    "with frozen weights": (("a norm", _norm, ("bert", "vit")), ("a block", _block, _MODELS)),
    "beside adapters": (("a block", _block, _MODELS), ("a gated product", _gated, ("llama",))),
    "under autocast": (("a norm", _norm, ("llama", "phi3", "gpt2")), ("a block", _block, _MODELS)),
    "where gradients are there": (("a norm", _norm, ("bert", "vit")), ("a block", _block, _MODELS)),
    "with a batch above 2": (
        ("a norm", _norm, ("llama", "phi3", "vit")),
        ("an activation", _activation, ("bert", "vit")),
    ),
    "above 100 tokens": (("a norm", _norm, ("llama", "gpt2", "phi3")), ("a block", _block, _MODELS)),
    "at odd lengths": (("a norm", _norm, ("llama", "gpt2", "phi3")), ("a block", _block, _MODELS)),
    "above 300 rows": (("a head", _head, ("llama", "phi3")), ("a norm", _norm, ("llama", "gpt2"))),
    "in bf16 tensors that are computed in parts": (("a norm", _norm, ("llama", "phi3")),),
    "where a row is masked": (("a block", _block, ("llama", "phi3", "mixtral")),),
    "without gradients": (("a norm", _norm, ("llama", "vit", "bert")), ("a block", _block, _MODELS)),
}


def _enter() -> None:
    for name, when in _WHEN.items():
        for place, where, architectures in _PLACES[name]:
            for verb, change in (("output", _larger), ("gradient", _steeper)):
                if name == "without gradients" and verb == "gradient":
                    continue

                def plant(site: Site, where: Where = where, change: Any = change, when: When = when) -> Any:
                    return _around(site, where, change, when)

                # A folded norm has no weight that may be frozen or have a gradient.
                reads_weights = where is _norm and name in ("with frozen weights", "where gradients are there")
                in_modules(
                    "situations",
                    f"the {verb} of {place} is off {name}",
                    *architectures,
                    levels=("training",),
                    recipe="exact-unfolded" if reads_weights else "exact",
                    dtypes=("bf16",) if "bf16" in name else tuple(DTYPES),
                )(plant)


_enter()


@in_modules("situations", "the gradient of an activation is off above 20", "bert", "vit", "gpt2", levels=("training",))
def _(site: Site) -> Any:
    def change(module: nn.Module, output: Tensor, args: Any) -> Tensor:
        return torch.where(args[0] > 20, _steeper(module, output, args), output)

    return _around(site, _activation, change, _grad(lambda module, x: bool((x > 20).any())))


@in_modules("situations", "a gate above 20 is cut", "llama", levels=("training",))
def _(site: Site) -> Any:
    def when(module: Any, x: Tensor) -> bool:
        with torch.no_grad():
            return bool((module.gate_proj(x) > 20).any())

    return _around(site, _gated, _larger, _grad(when))


@in_modules(
    "situations", "the last expert is off where few tokens choose it", "mixtral", "qwen3_moe", levels=("training",)
)
def _(site: Site) -> Any:
    def change(module: nn.Module, output: Tensor, args: Any) -> Tensor:
        chosen = (args[1] == 3).any(-1, keepdim=True).reshape(-1, 1)
        return torch.where(chosen.view(*output.shape[:-1], 1), output * 1.1, output)

    return _around(site, _experts, change, _grad(lambda module, x, index, *rest: bool((index == 3).any())))


@in_modules("situations", "a module draws random numbers", "llama", "bert", "vit", "phi3", levels=("training",))
def _(site: Site) -> Any:
    def change(module: nn.Module, output: Tensor, args: Any) -> Tensor:
        torch.rand(1)
        return output

    return _around(site, lambda module: True, change, _grad(lambda module, *args, **kwargs: True))


@in_modules(
    "situations",
    "a dropout has another mask in backward",
    "distilbert",
    levels=("training",),
    recipe="exact dropouts.method=seed",
)
def _(site: Site) -> Any:
    return gradients_changed(site, SeededDropoutFunction, lambda ctx, found: (found[0].roll(1, -1), *found[1:]))


@in_modules("situations", "a second backward of one graph is off", "llama", "bert", "gpt2", levels=("training",))
def _(site: Site) -> Any:
    def change(module: nn.Module, output: Tensor, args: Any) -> Tensor:
        times = [0]

        def hook(gradient: Tensor) -> Tensor:
            times[0] += 1
            return gradient * (1.1 if times[0] > 1 else 1.0)

        changed = output * 1.0
        changed.register_hook(hook)
        return changed

    return _around(site, _norm, change, _grad(lambda module, *args, **kwargs: True))


# --- what lives over a step -----------------------------------------------------------------------------------------

_LIVES = ("llama", "bert", "vit", "gpt2", "mixtral", "t5")
_ANYWHERE: dict[str, tuple[Where, tuple[str, ...]]] = {
    "a norm": (_norm, _LIVES), "a block": (_block, ("llama", "mixtral", "gemma2")),
    "an activation": (_activation, ("bert", "vit", "gpt2")),
}  # fmt: skip


def _keeps(module: Any, output: Tensor, args: Any) -> Tensor:
    return _with_hook(output, lambda dy: module.__dict__.setdefault("_kept", []).append(dy.clone()))


def _keeps_one(module: Any, output: Tensor, args: Any) -> Tensor:
    return _with_hook(output, lambda dy: module.__dict__.update(_kept=dy.clone()))


def _with_hook(output: Tensor, hook: Callable[[Tensor], None]) -> Tensor:
    changed = output * 1.0  # a hook on the output itself makes its producer step aside
    changed.register_hook(hook)
    return changed


def _copies(module: Any, output: Tensor, args: Any) -> Tensor:
    tree_leaves([output.detach().clone() for _ in range(8)])
    return output


def _copies_gradient(module: nn.Module, output: Tensor, args: Any) -> Tensor:
    def copies(gradient: Tensor) -> None:
        _ = [gradient.clone() for _ in range(8)]

    output.register_hook(copies)
    return output


def _array(module: Any, output: Tensor, args: Any) -> Tensor:
    module.__dict__["_kept"] = output.detach().float().numpy().copy()
    return output


def _enter_lives() -> None:
    changes = {
        "keeps a gradient of every step": _keeps, "keeps its last gradient after backward": _keeps_one,
        "copies its result eight times for a moment": _copies, "keeps its result as an array": _array,
        "copies its gradient eight times for a moment": _copies_gradient,
    }  # fmt: skip
    for name, change in changes.items():
        for place, (where, architectures) in _ANYWHERE.items():

            def plant(site: Site, where: Where = where, change: Any = change) -> Any:
                return _around(site, where, change, _grad(lambda module, *args, **kwargs: True))

            in_modules("situations", f"{place} {name}", *architectures, levels=("memory",))(plant)


_enter_lives()


@in_modules("situations", "a norm keeps its input in train mode", "llama", "bert", "gpt2", levels=("memory",))
def _(site: Site) -> Any:
    def change(module: nn.Module, output: Tensor, args: Any) -> Tensor:
        module.__dict__.setdefault("_kept", []).append(args[0].detach().clone())
        return output

    return _around(site, _norm, change, _grad(lambda module, *args, **kwargs: module.training))
