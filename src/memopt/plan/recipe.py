"""Recipes: what to rewrite and how, as strict YAML. An unknown key or name is an error, with the nearest one.

The shipped recipes are the files of `configs/recipes` (in the wheel: `memopt/_recipes`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from memopt.errors import RecipeError

#: Codes of an activation's derivative, as in `memopt.kernels.derivative_codes.codes`.
CodeScheme = Literal["none", "published", "2bit", "3bit", "4bit", "8bit", "4bit-stochastic", "8bit-stochastic"]
DEFAULT_MEMORY_RECIPE = "exact-unfolded"
DEFAULT_CHECKPOINT_RECIPE = "exact"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class NormRules(_Strict):
    """How norms are rewritten."""

    method: Literal["share", "none"] = "share"
    """``share``: keep the normalised x_hat, one storage for the norm and every linear that reads it."""
    fold: Literal["auto", "never"] = "auto"
    """``auto``: fold the affine into the next linears wherever that is proved."""
    hidden_states: Literal["keep", "change"] = "keep"
    """``change``: fold also where that changes a hidden state that the model or one inside it returns, no logits."""


class RecomputeRules(_Strict):
    """Whether an elementwise output is made again in backward instead of kept."""

    method: Literal["recompute", "none"] = "recompute"


class ActivationRules(RecomputeRules):
    """How activations are rewritten."""

    code: CodeScheme = "none"
    """Keep a code of the derivative instead of the input: approximate, in the bits that the name says."""
    where: Literal["needed", "all"] = "needed"
    """``needed``: only where nothing keeps the output, else making it again costs as little and is exact."""
    relu: Literal["output", "mask"] = "output"
    """What a ReLU keeps. ``mask``: one bit an element where nothing else keeps its output; exact."""


def _one_or_more(value: Any) -> Any:
    return (value,) if isinstance(value, str) and value != "auto" else value


class LinearRules(_Strict):
    """How the gradients of linears' weights are computed."""

    method: Literal["exact", "wta-crs", "systematic", "crs", "uniform"] = "exact"
    """Of all rows of the input, or of a sample of them, drawn as the name says: without bias, with noise."""
    budget: float = Field(default=0.3, gt=0.0, lt=1.0)
    """Part of the rows that is kept."""
    targets: Annotated[Literal["auto"] | tuple[str, ...], BeforeValidator(_one_or_more)] = "auto"
    """Names of linears (shell wildcards) to sample; ``auto``: all. Only where that frees something, in either case."""


class DropoutRules(_Strict):
    """How dropouts are rewritten."""

    method: Literal["none", "seed"] = "none"
    """``seed``: keep the seed of the mask instead of the mask. The same distribution, other random numbers."""


class KeptRules(_Strict):
    """How that is kept which cannot be made again."""

    method: Literal["exact", "int8", "int4"] = "exact"
    """``int8``, ``int4``: a code for each element, a minimum and a step for each 128."""
    where: Literal["block", "mlp"] = "block"
    """Everything in the repeated blocks, or what their MLPs keep."""
    rounding: Literal["stochastic", "nearest"] = "stochastic"


class Recipe(_Strict):
    """A recipe; see docs/recipes.md for every key."""

    name: str
    description: str = ""
    norms: NormRules = NormRules()
    activations: ActivationRules = ActivationRules()
    gated_mlps: RecomputeRules = RecomputeRules()
    linears: LinearRules = LinearRules()
    dropouts: DropoutRules = DropoutRules()
    kept: KeptRules = KeptRules()
    gradient_error: float = Field(default=0.0, ge=0.0)
    """The relative error of the gradient that the recipe declares, of its norm; 0 for exact ones. Sampling adds noise
    to it, which is no error on average and depends on the model and its data."""
    targets: tuple[str, ...] = Field(default=("*",))
    """Module names (shell wildcards) that may be rewritten."""
    ignore: tuple[str, ...] = ()
    """Module names (shell wildcards) that are left alone; wins over ``targets``."""

    @property
    def is_exact(self) -> bool:
        """Whether gradients differ from the stock model's by rounding alone."""
        return not self.approximates and not self.samples

    @property
    def approximates(self) -> bool:
        """Whether something is kept in fewer bits, so that every gradient is off by a little."""
        return self.activations.code != "none" or self.kept.method != "exact"

    @property
    def samples(self) -> bool:
        """Whether gradients of weights are estimated from samples."""
        return self.linears.method != "exact"

    def selects(self, name: str) -> bool:
        """Whether the module `name` may be rewritten."""
        return any_matches(name, self.targets) and not any_matches(name, self.ignore)


def any_matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of `patterns` names the module `name`."""
    return any(matches(name, pattern) for pattern in patterns)


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern of ``targets`` or ``ignore`` names the module `name`."""
    return fnmatchcase(name, pattern) or name.endswith("." + pattern) or name == pattern


def shipped() -> dict[str, Path]:
    """Name -> file of every shipped recipe, sorted by name."""
    inside = Path(__file__).parents[1] / "_recipes"
    folder = inside if inside.is_dir() else Path(__file__).parents[3] / "configs" / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_recipe(source: str | Path | Recipe, overrides: Iterable[str] = ()) -> Recipe:
    """Recipe from a shipped name, a YAML file or a Recipe, with ``key=value`` overrides applied.

    Raises:
        RecipeError: unknown name (with the nearest), unreadable file, unknown key or value.
    """
    data = source.model_dump(mode="json") if isinstance(source, Recipe) else _read(_locate(str(source)))
    for override in overrides:
        _set(data, override)
    try:
        return Recipe.model_validate(_tuples(data))
    except ValidationError as error:
        raise RecipeError(_explain(error, str(getattr(source, "name", source)))) from None


def _locate(source: str) -> Path:
    recipes = shipped()
    if source in recipes:
        return recipes[source]
    path = Path(source)
    if path.suffix in {".yaml", ".yml"} or "/" in source:
        if path.is_file():
            return path
        raise RecipeError(f"Recipe file '{source}' does not exist.")
    raise RecipeError(f"Unknown recipe '{source}'.", _suggest(source, recipes))


def _read(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise RecipeError(f"Recipe '{path}' is not readable YAML: {str(error).splitlines()[0]}.") from None
    if not isinstance(data, dict):
        raise RecipeError(f"Recipe '{path}' must be a mapping of keys to values.")
    data.setdefault("name", path.stem)
    return data


def _set(data: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise RecipeError(f"'--set {override}' is not KEY=VALUE.", "Example: --set norms.fold=never")
    *parents, last = key.split(".")
    node = data
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise RecipeError(f"'--set {override}': '{parent}' holds a value, not a group of keys.")
    try:
        node[last] = yaml.safe_load(value)
    except yaml.YAMLError:
        raise RecipeError(f"'--set {override}': the value is not valid YAML.") from None


def _tuples(value: Any) -> Any:
    """YAML has lists only; the recipe's sequences are tuples."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(value) if isinstance(value, list) else value


def _explain(error: ValidationError, source: str) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = _known_keys(first["loc"][:-1])
        return f"Recipe '{source}': unknown key '{where}'. {_suggest(str(first['loc'][-1]), known)}"
    if first["type"] == "literal_error":
        value = first["input"]
        return f"Recipe '{source}': '{where}' cannot be '{value}'. Expected {first['ctx']['expected']}."
    return f"Recipe '{source}': '{where}': {first['msg']}."


def _known_keys(location: tuple[Any, ...]) -> list[str]:
    model: type[BaseModel] = Recipe
    for part in location:
        annotation = model.model_fields[str(part)].annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            model = annotation
    return list(model.model_fields)


def _suggest(word: str, known: Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"Did you mean '{near[0]}'?" if near else f"Known: {', '.join(known)}."
