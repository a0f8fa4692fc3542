"""Gradient release: an optimizer steps each parameter as soon as its gradient is complete, and frees the gradient.

Full tuning then holds the gradients of a few parameters at a time. For Llama-3.1-8B in bf16, all gradients take 15 GiB,
and the gradient of the largest parameter takes 1 GiB. The steps are those of the optimizer's own class, with its state
and settings. PyTorch's tutorial on optimizer steps in backward and LOMO (arXiv 2306.09782) describe the method.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from memopt.errors import ModelError

_USUAL = "Step all parameters after backward, as usual."


class GradientRelease:
    """Steps each parameter of an optimizer in backward, until :meth:`remove` is called."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._stepped: set[Tensor] = set()
        self._steps = False
        self._groups = {p: at for at, group in enumerate(optimizer.param_groups) for p in group["params"]}
        trained = (p for p in self._groups if p.requires_grad)
        self._handles = [p.register_post_accumulate_grad_hook(self._release) for p in trained]
        self._handles.append(optimizer.register_step_post_hook(self._end_step))

    def remove(self) -> None:
        """Let the optimizer step all parameters after backward again. Its state stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _release(self, parameter: Tensor) -> None:
        if parameter in self._stepped:
            raise RuntimeError(
                "A parameter got a second gradient before optimizer.step(): gradients that are released cannot be "
                "accumulated over several backwards. Use larger batches, or release.remove()."
            )
        self._steps = True
        try:
            _step_alone(self.optimizer, parameter, self._groups[parameter])
        finally:
            self._steps = False
        parameter.grad = None
        self._stepped.add(parameter)

    def _end_step(self, *given: Any) -> None:
        if not self._steps:
            self._stepped.clear()


def release_gradients(optimizer: Optimizer) -> GradientRelease:
    """Step each parameter of `optimizer` in backward, when its gradient is complete, and free the gradient.

    The training loop does not change: keep ``loss.backward()``, ``optimizer.step()`` (it finds no gradients) and the
    scheduler. Losses and weights are the same as with steps after backward. No gradient is left after backward, so
    clipping has no effect. Hooks on the optimizer's step run once for each parameter.

    Args:
        optimizer: of a class that steps each parameter by its own gradient and state (AdamW, SGD, Adafactor). This
            is tested on two small parameters.

    Raises:
        ModelError: the class's step of one parameter depends on others, several processes train, or there are
            gradients already.
    """
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        raise ModelError(
            "Gradients cannot be released while several processes train: they are reduced after backward.", _USUAL
        )
    if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
        raise ModelError("There are gradients already.", "Call optimizer.zero_grad() before.")
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        try:
            alone, together = _tried(optimizer, group, apart=True), _tried(optimizer, group, apart=False)
        except Exception as error:
            raise ModelError(f"It could not be tried whether {name} steps parameters apart: {error}.") from error
        if not all(map(torch.equal, alone, together)):
            raise ModelError(
                f"What {name} does to a parameter depends on others, or on random numbers, so it cannot step in "
                "backward.",
                _USUAL,
            )
    return GradientRelease(optimizer)


def _step_alone(optimizer: Optimizer, parameter: Tensor, group: int) -> None:
    """Step `parameter`, which has a gradient, with the settings of its group; no other parameter is stepped."""
    groups = optimizer.param_groups
    optimizer.param_groups = [{**groups[group], "params": [parameter]}]
    try:
        type(optimizer).step(optimizer)
    finally:
        optimizer.param_groups = groups


def _tried(optimizer: Optimizer, group: dict[str, Any], *, apart: bool) -> Sequence[Tensor]:
    """Two small parameters after three steps with the settings of `group`; `apart`: step one after the other."""
    like = next((p for p in group["params"] if p.requires_grad), None)
    if like is None:
        return []
    values = (torch.linspace(-1, 1, 128).view(8, 16), torch.linspace(2, 3, 64).view(8, 8))
    pair = [torch.nn.Parameter(value.to(like)) for value in values]
    settings = {name: value for name, value in group.items() if name not in ("params", "initial_lr")}
    trial = type(optimizer)([{**settings, "params": pair}], **_required(type(optimizer), settings))
    for number in range(3):
        for place, parameter in enumerate(pair):
            gradient = (parameter.detach().float() * (number + 1)).sin() * 10.0**place
            parameter.grad = gradient.to(parameter.dtype)
        if apart:
            for parameter in reversed(pair):
                _step_alone(trial, parameter, 0)
        else:
            trial.step()
    return [parameter.detach() for parameter in pair]


def _required(cls: type[Optimizer], settings: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `cls` without a default, with their values from the settings of a group."""
    parameters = list(inspect.signature(cls).parameters.values())[1:]
    return {
        each.name: settings[each.name] for each in parameters if each.default is each.empty and each.name in settings
    }
