"""Recipes: what to rewrite and how, as strict YAML. An unknown key or name is an error that names the nearest one.

Each patch that has rules adds its key (`memopt.patches`). The shipped recipes are the files of `configs/recipes` (in
the wheel: `memopt/_recipes`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from memopt.environment.files import parse_yaml, read_small
from memopt.errors import RecipeError
from memopt.patches.base import Effect, Patterns, Rules, Strict, any_matches, one_or_more
from memopt.patches.registry import patches, watch
from memopt.plan.shipped import EXACT, shipped
from memopt.walk.sites import Sites

R = TypeVar("R", bound=Rules)
DEFAULT_MEMORY_RECIPE = "exact-unfolded"
DEFAULT_CHECKPOINT_RECIPE = "exact"


class Recipe(Strict):
    """A recipe; see docs/recipes.md for every key. Each patch with rules adds a field of its own, `Rules.key`."""

    name: str
    description: str = ""
    gradient_error: float = Field(default=0.0, ge=0.0)
    """The declared relative error of the gradient (of its norm); 0 for an exact recipe. It does not include the noise
    of sampling, which is unbiased and depends on the model and its data."""
    targets: Annotated[tuple[str, ...], one_or_more()] = Field(default=("*",))
    """Module names (shell wildcards) that may be rewritten."""
    ignore: Annotated[tuple[str, ...], one_or_more()] = ()
    """Module names (shell wildcards) that stay unchanged; overrides ``targets``."""

    if TYPE_CHECKING:

        def __init__(self, **values: Any) -> None: ...

    @property
    def effects(self) -> frozenset[Effect]:
        """Effects of the rules on gradients, apart from rounding."""
        return frozenset(rules.effect for rules in self._all_rules().values()) - {"exact"}

    @property
    def accuracy(self) -> str:
        """The accuracy of the gradients, in words."""
        approximate = f"{self.gradient_error:.0%} off" if self.gradient_error else "approximate, undeclared"
        said = {"approximate": approximate, "sampled": "sampled"}
        return "; ".join(said[effect] for effect in sorted(self.effects)) or EXACT

    @property
    def folds(self) -> bool:
        """Whether the recipe changes the weights of a checkpoint."""
        return any(rules.folds for rules in self._all_rules().values())

    @property
    def changes_outputs(self) -> bool:
        """Whether folds may change hidden states that the model returns."""
        return any(rules.changes_outputs for rules in self._all_rules().values())

    @property
    def runs_attention(self) -> str | None:
        """The implementation of attention that the recipe sets; None: the model's own."""
        return next((name for rules in self._all_rules().values() if (name := rules.runs_attention)), None)

    def rules(self, kind: type[R]) -> R:
        """The rules of class `kind`; their defaults if no patch has such rules."""
        return next((rules for rules in self._all_rules().values() if isinstance(rules, kind)), kind())

    def is_off(self, key: str) -> bool:
        """Whether the rules of a key are off, or no patch has them."""
        rules = self._all_rules().get(key)
        return rules is None or rules.is_off

    def patterns(self, sites: Sites) -> Iterator[Patterns]:
        """The settings of the rules that choose modules by their names."""
        return (each for rules in self._all_rules().values() for each in rules.patterns(sites))

    def without_effect(self) -> tuple[str, ...]:
        """A sentence for each field that was given and has no effect, because of another field of its rules."""
        return tuple(sentence for rules in self._all_rules().values() for sentence in rules.without_effect())

    def without(self, *effects: Effect) -> tuple[str, ...]:
        """Settings (KEY=VALUE) that switch off the rules with one of these effects."""
        return tuple(f"{key}.method=none" for key, rules in self._all_rules().items() if rules.effect in effects)

    def unfolded(self) -> Recipe:
        """The recipe without folds, for a model in memory, whose weights must not change."""
        settings = (
            f"{key}.{field}={to}" for key, r in self._all_rules().items() for field, to in r.in_memory().items()
        )
        return load_recipe(self, settings)

    def selects(self, name: str) -> bool:
        """Whether the module `name` may be rewritten."""
        return any_matches(name, self.targets) and not any_matches(name, self.ignore)

    def _all_rules(self) -> dict[str, Rules]:
        return {key: value for key, value in vars(self).items() if isinstance(value, Rules)}


def _rules_of_patches() -> list[tuple[str, type[Rules]]]:
    """(key, rules) of each patch that has rules."""
    return [(patch.rules.key, patch.rules) for patch in patches() if patch.rules is not None]


def _add_rules() -> None:
    """Give `Recipe` a field for each patch that has rules."""
    own = {name: field for name, field in Recipe.model_fields.items() if not isinstance(field.default, Rules)}
    added = {key: FieldInfo(annotation=rules, default=rules()) for key, rules in _rules_of_patches()}
    name, description, *others = own.items()
    Recipe.model_fields.clear()
    Recipe.model_fields.update([name, description, *added.items(), *others])
    Recipe.model_rebuild(force=True)


watch(_add_rules)


def load_recipe(source: str | Path | Recipe, overrides: Iterable[str] = ()) -> Recipe:
    """Recipe from a shipped name, a YAML file or a Recipe, with ``key=value`` overrides applied. Raises a RecipeError
    for an unknown name (with the nearest), an unreadable file, or an unknown key or value."""
    data = (
        source.model_dump(mode="json", exclude_unset=True)
        if isinstance(source, Recipe)
        else _read(_locate(str(source)))
    )
    for override in overrides:
        _set(data, override)
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise RecipeError(_explain(error, str(getattr(source, "name", source)))) from None


def dump_recipe(recipe: Recipe) -> str:
    """`recipe` as a YAML file that :func:`load_recipe` reads; keys at their defaults are left out."""
    text: str = yaml.safe_dump(recipe.model_dump(mode="json", exclude_defaults=True), sort_keys=False, width=120)
    return text


def _locate(source: str) -> Path:
    recipes = shipped()
    if source in recipes:
        return recipes[source]
    path = Path(source)
    if path.suffix in {".yaml", ".yml"} or "/" in source:
        if path.is_file():
            return path
        raise RecipeError(f"Recipe file '{source}' does not exist.")
    near = f"{_suggest(source, recipes)} " if difflib.get_close_matches(source, recipes, n=1, cutoff=0.5) else ""
    raise RecipeError(f"Unknown recipe '{source}'.", f"{near}Known: {', '.join(recipes)}; or a YAML file.")


def _read(path: Path) -> dict[str, Any]:
    try:
        data = parse_yaml(read_small(path).decode("utf-8"))
    except (OSError, ValueError) as error:
        raise RecipeError(f"Recipe '{path}' is not readable YAML: {error}.") from None
    if not isinstance(data, dict):
        raise RecipeError(f"Recipe '{path}' must be a mapping of keys to values.")
    data.setdefault("name", path.stem)
    return data


def _set(data: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise RecipeError(f"'--set {override}' is not KEY=VALUE.", "Example: --set norms.fold=none")
    *parents, last = key.split(".")
    node = data
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise RecipeError(f"'--set {override}': '{parent}' holds a value, not a group of keys.")
    try:
        node[last] = parse_yaml(value)
    except ValueError as error:
        raise RecipeError(f"'--set {override}': the value is not valid YAML: {error}.") from None


def _explain(error: ValidationError, source: str) -> str:
    first, *others = error.errors()
    place = _field(first["loc"])
    where = ".".join(place)
    if first["type"] == "extra_forbidden":
        hint = _suggest(str(first["loc"][-1]), _known_keys(first["loc"][:-1]))
        return f"Recipe '{source}': unknown key '{where}'. {hint}"
    if allowed := _allowed([first, *(each for each in others if _field(each["loc"]) == place)]):
        return f"Recipe '{source}': '{where}' cannot be '{first['input']}'. Expected {allowed}."
    if first["type"] == "value_error":
        return f"Recipe '{source}': '{where}': {first['ctx']['error']}."
    group = f"a group of keys, e.g. {where}.{_known_keys(place)[0]}" if first["type"] == "model_type" else ""
    should = group or first["msg"].removeprefix("Input should be ")
    return f"Recipe '{source}': '{where}' cannot be '{first['input']}'. It should be {should}."


def _field(location: tuple[int | str, ...]) -> tuple[str, ...]:
    """The keys in an error's location: pydantic adds the branch of a union and the place in a list."""
    depth = 2 if str(location[0]) in dict(_rules_of_patches()) else 1
    return tuple(map(str, location[:depth]))


def _allowed(errors: Iterable[ErrorDetails]) -> str:
    """The values that a field may have, by the errors of all branches of its type; empty if they do not tell."""
    words: dict[str, None] = {}
    for error in errors:
        if error["type"] == "literal_error":
            words |= dict.fromkeys(re.findall(r"'[^']*'", error["ctx"]["expected"]))
        elif error["type"] == "tuple_type" or isinstance(error["loc"][-1], int):
            words["a list of module names"] = None
    *most, last = words or ("",)
    return f"{', '.join(most)} or {last}" if most else last


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
