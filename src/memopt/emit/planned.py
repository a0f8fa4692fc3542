"""What the files say: a training step as it was planned. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from memopt.errors import UsageError
from memopt.patches.capabilities import EngineSettings
from memopt.patches.registry import having
from memopt.plan.recipe import Recipe
from memopt.prediction.planner.choice import Choice
from memopt.prediction.setup import Optimizer, Sharding
from memopt.trace.training import ALL_LINEAR, Precision, Training


@dataclass(frozen=True)
class Planned:
    """A training step as an engine has to run it."""

    model: str
    """What the engine loads: a hub id or a folder."""
    recipe_file: str
    """Where the recipe will lie."""
    recipe: Recipe
    step: Training
    """Its batch is that of one micro-batch on one device."""
    accumulation: int = 1
    optimizer: Optimizer = "adamw"
    sharding: Sharding | None = None
    """None: the plan is not about devices, and the file's own engine shares as it usually does."""
    devices: int | None = None
    settings: dict[str, str] = field(default_factory=dict)
    """What the patches say of engines' own settings (`Patch.engine_settings`)."""

    patched: bool = False
    """Whether the model is a folder that `memopt patch` writes."""

    @property
    def loading(self) -> str:
        """How a script loads the model."""
        names = {"bf16": "bfloat16", "fp16": "float16"}
        dtype = names.get(self.step.precision, "float32")
        if self.patched:
            return f"memopt.load({self.model!r}, dtype=torch.{dtype})"
        then = f"then memopt.patch(model, {self.recipe_file!r})"
        if self.step.train == "qlora":
            precision, _, mixed = self.step.precision.partition("-")
            dtype = names.get(precision, "float32")
            given = f"load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_compute_dtype=torch.{dtype}"
            if self.sharding in ("fsdp", "zero3"):  # shards have one dtype
                given += f", bnb_4bit_quant_storage=torch.{dtype}"
            dtype += f", quantization_config=BitsAndBytesConfig({given})"
            then = f"prepare_model_for_kbit_training(model, False), {then}" if mixed else then
        return f"from_pretrained({self.model!r}, dtype=torch.{dtype}), {then}"

    @property
    def checkpointed(self) -> str:
        """``none``, ``some`` or ``all`` blocks are checkpointed by the recipe."""
        return self.settings.get("gradient_checkpointing", "none")

    @property
    def attention(self) -> str | None:
        """The implementation that the recipe sets; None: the model's own."""
        return self.settings.get("attn_implementation")

    @property
    def lora(self) -> dict[str, int | str | list[str]] | None:
        """Arguments of `peft.LoraConfig`; None where everything is trained."""
        if self.step.train == "full":
            return None
        names = self.step.lora_targets
        return {"r": self.step.lora_rank, "target_modules": ALL_LINEAR if ALL_LINEAR in names else list(names)}

    def shared(self, engine: str, *ways: Sharding) -> Sharding:
        """How the devices share, which has to be one of `ways`; the first where the plan is not about devices.

        Raises:
            UsageError: it is another one.
        """
        if self.sharding is None:
            return ways[0]
        if self.sharding in ways:
            return self.sharding
        wanted = " or ".join(f"--sharding {way}" for way in ways if way != "none")
        raise self.refusal(engine, f"sharding '{self.sharding}'", f"Plan with {wanted} --devices N.")

    def refusal(self, engine: str, what: str, hint: str) -> UsageError:
        """The error for a plan that an engine's file cannot express."""
        return UsageError(f"--emit {engine}: its configuration cannot express {what}.", hint)


def planned_step(model: str, recipe_file: str, choice: Choice) -> Planned:
    """What `memopt report --budget` chose."""
    plan, setup = choice.plan, choice.setup
    return Planned(
        model,
        recipe_file,
        plan.recipe,
        replace(choice.step, batch=plan.batch),
        plan.accumulation,
        setup.optimizer,
        setup.sharding,
        setup.devices,
        _settings(plan.recipe, choice.blocks),
    )


def patched_step(folder: str, recipe_file: str, recipe: Recipe, blocks: Sequence[str], dtype: str | None) -> Planned:
    """A patched checkpoint, which fixes recipe and dtype, not a batch: one row, without accumulation.

    Args:
        folder: where it will lie.
        blocks: of the model.
        dtype: of its weights, as in config.json. fp16 weights are trained in fp32 under autocast, with a scaled loss.
    """
    precisions: dict[str | None, Precision] = {"bfloat16": "bf16", "float16": "fp16-mixed"}
    step = Training(seq=None, precision=precisions.get(dtype, "fp32"))
    # What folds has folded by then, and memopt.patch takes no recipe that does.
    return Planned(folder, recipe_file, recipe.unfolded(), step, settings=_settings(recipe, blocks), patched=True)


def _settings(recipe: Recipe, blocks: Sequence[str]) -> dict[str, str]:
    found = (patch.engine_settings(recipe, blocks) for patch in having(EngineSettings))
    return {key: value for settings in found for key, value in settings.items()}
