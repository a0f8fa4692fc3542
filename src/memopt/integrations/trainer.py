"""`memopt.TrainerCallback`: one line in `transformers.Trainer`, and in every trainer of TRL."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import transformers
from torch import nn

from memopt.api import summary
from memopt.errors import ModelError
from memopt.integrations.once import Patching, logger, run_of
from memopt.integrations.release import release_gradients
from memopt.patches.apply import is_patched
from memopt.patches.record import warn_once
from memopt.plan.recipe import DEFAULT_MEMORY_RECIPE, Recipe

M = TypeVar("M", bound=nn.Module)
#: Liger's kernels for modules that memopt patches; the others replace a function, or the forward of the whole model.
_LAYERS_OF_LIGER = ("rms_norm", "layer_norm", "swiglu", "geglu", "relu_squared")


class TrainerCallback(transformers.TrainerCallback):
    """Patches the model of a Trainer after it is built and before anything wraps it.

        Trainer(model, args, ..., callbacks=[memopt.TrainerCallback()])
        SFTTrainer(model, args=args, ..., callbacks=[memopt.TrainerCallback("exact-levels")])

    Losses and gradients are the same as after a call of `memopt.patch(model, recipe)`. A model that is already patched
    is not changed. The logger ``memopt`` reports what was patched and, when training begins, which parts the trainer
    has taken over: it may compute the loss itself, or checkpoint the blocks.

    - ``gradient_checkpointing=True`` runs around memopt; ``checkpointing`` in the recipe takes precedence.
    - ``use_liger_kernel=True``: Liger's kernels of norms and MLPs would replace memopt's, so they are switched off
      unless ``liger_kernel_config`` names them.
    - ``model_init``: the model that `train` builds is patched before its first step. If FSDP, ZeRO-3 or
      Liger changes it before that, wrap the function: ``model_init=callback.model_init(function)``.
    - A recipe that samples linears remembers gradients if the data set is a `memopt.sampling.IndexedDataset`.
    """

    def __init__(
        self,
        recipe: str | Path | Recipe = DEFAULT_MEMORY_RECIPE,
        *,
        inputs: Mapping[str, Any] | str | Path | None = None,
        budget: str | int | None = None,
        batch: int | None = None,
        seq: int | None = None,
        max_tokens: int | None = None,
        release_gradients: bool = False,
    ) -> None:
        """
        Args:
            recipe: as in `memopt.patch`, like `inputs` and `budget`. An unknown or folding recipe and an unknown card
                raise errors here; the other errors of `memopt.patch` are raised when the Trainer is made.
            batch: rows of a step, for `budget`; default: ``per_device_train_batch_size``.
            seq: tokens in a row, for `budget`; default: TRL's ``max_length``, or the default of `memopt.patch`.
            max_tokens: as in `memopt.sampling.GradientMemoryCallback`.
            release_gradients: step each parameter in backward and free its gradient (`memopt.release_gradients`).
                Settings that need all gradients at once then raise an error when training begins: ``max_grad_norm``
                (1.0 by default), accumulation, fp16, several processes.
        """
        self._releases = release_gradients
        self._patching = Patching(recipe, inputs, budget, batch, seq)
        self._gradients = _gradient_memory(max_tokens)

    def model_init(self, function: Callable[..., M]) -> Callable[..., M]:
        """`function`, a Trainer's ``model_init``, with its model patched."""

        @functools.wraps(function)
        def build(*trial: Any) -> M:
            model = function(*trial)
            self._patching.patch_once(model)
            return model

        return build

    def on_init_end(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        if args.use_liger_kernel:
            _keep_liger_out(args)
        if model is not None:
            self._patch(model, args, state)
            self._gradients.on_init_end(args, state, control, model=model, **kwargs)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any
    ) -> None:
        assert model is not None
        if self._releases:
            _check_released(args)
            self._release = release_gradients(kwargs["optimizer"])
        if not is_patched(model):  # it was built by `model_init`
            _check_untouched(model, args)
            self._patch(model, args, state)
        if state.is_local_process_zero:
            warn_once(model, summary(model).remarks)
        self._gradients.on_train_begin(args, state, control, model=model, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._gradients.on_step_end(args, state, control, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._releases:
            self._release.remove()
        self._gradients.on_train_end(args, state, control, **kwargs)

    def _patch(self, model: nn.Module, args: Any, state: Any) -> None:
        self._patching.patch_once(
            model,
            batch=args.per_device_train_batch_size,
            seq=getattr(args, "max_length", None),
            run=functools.partial(run_of, args),
            say=state.is_local_process_zero,
        )


def _gradient_memory(max_tokens: int | None) -> transformers.TrainerCallback:
    try:
        from memopt.sampling import GradientMemoryCallback
    except ModuleNotFoundError:  # any patch may be missing from the package
        return transformers.TrainerCallback()
    return GradientMemoryCallback(max_tokens, required=False)


def _check_untouched(model: nn.Module, args: Any) -> None:
    """Raise a ModelError if FSDP or ZeRO-3 has sharded the model, or Liger has patched it."""
    sharded = any(hasattr(p, "device_mesh") or hasattr(p, "ds_id") for p in model.parameters())
    if sharded or getattr(args, "fsdp", None) or args.use_liger_kernel:
        done = "patched it with Liger's kernels" if args.use_liger_kernel else "sharded it"
        raise ModelError(
            f"The Trainer has built its model by `model_init`, and {done} before memopt could see it.",
            "Give it the function of the callback: model_init=callback.model_init(function).",
        )


def _check_released(args: Any) -> None:
    """Raise a ModelError if a training argument needs all gradients at once."""
    asked = {
        f"max_grad_norm={args.max_grad_norm} (use max_grad_norm=0)": args.max_grad_norm,
        "gradient_accumulation_steps (use larger batches)": args.gradient_accumulation_steps > 1,
        "fp16, whose loss scaling looks at all gradients (use bf16)": args.fp16,
        "several processes": args.world_size > 1 or args.n_gpu > 1,
        "deepspeed": args.deepspeed,
    }
    why = [name for name, value in asked.items() if value]
    if why:
        raise ModelError(f"release_gradients=True does not go together with {' and '.join(why)}.")


def _keep_liger_out(args: Any) -> None:
    """Switch off Liger's kernels for norms and MLPs, except those that the user names: `train` would put them in place
    of memopt's."""
    given = dict(args.liger_kernel_config or {})
    off = [name for name in _LAYERS_OF_LIGER if name not in given]
    args.liger_kernel_config = {**dict.fromkeys(off, False), **given}
    logger.warning(
        "use_liger_kernel=True: norms and MLPs are memopt's, so %s are off; what else liger_kernel_config switches on "
        "is left to Liger: by default the rotary embedding and the loss. liger_kernel_config={'%s': True} "
        "would give it these modules as well",
        ", ".join(off) or "none of Liger's kernels",
        (off or _LAYERS_OF_LIGER)[0],
    )
