"""Recipes: what to rewrite and how, as strict YAML. An unknown key or name is an error, with the nearest one.

The shipped recipes are the files of `configs/recipes` (in the wheel: `memopt/_recipes`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from memopt.errors import RecipeError

#: Codes of an activation's derivative, as in `memopt.kernels.codes`.
CodeScheme = Literal["none", "published", "2bit", "3bit", "4bit", "8bit", "4bit-stochastic", "8bit-stochastic"]
DEFAULT_MEMORY_RECIPE = "exact-unfolded"


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
    kept: KeptRules = KeptRules()
    gradient_error: float = Field(default=0.0, ge=0.0)
    """The relative error of the gradient that the recipe declares, of its norm; 0 for exact ones."""
    targets: tuple[str, ...] = Field(default=("*",))
    """Module names (shell wildcards) that may be rewritten."""
    ignore: tuple[str, ...] = ()
    """Module names (shell wildcards) that are left alone; wins over ``targets``."""

    @property
    def is_exact(self) -> bool:
        """Whether gradients differ from the stock model's by rounding alone."""
        return self.activations.code == "none" and self.kept.method == "exact"

    def selects(self, name: str) -> bool:
        """Whether the module `name` may be rewritten."""

        def any_matches(patterns: Iterable[str]) -> bool:
            return any(matches(name, pattern) for pattern in patterns)

        return any_matches(self.targets) and not any_matches(self.ignore)


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern of ``targets`` or ``ignore`` names the module `name`."""
    return fnmatchcase(name, pattern) or name.endswith("." + pattern) or name == pattern


def shipped() -> dict[str, Path]:
    """Name -> file of every shipped recipe, sorted by name."""
    inside = Path(__file__).parent / "_recipes"
    folder = inside if inside.is_dir() else Path(__file__).parents[2] / "configs" / "recipes"
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
