"""`memopt recipes`: list the shipped recipes, or print one."""

from __future__ import annotations

from typing import Annotated

import typer

from memopt.cli import common


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="A recipe to print: a name of the list, or a YAML file.",
            autocompletion=common.recipe_names,
        ),
    ] = None,
    json_output: common.JsonOption = False,
) -> int:
    """List the shipped recipes, or print one."""
    import yaml

    from memopt.plan.recipe import load_recipe
    from memopt.plan.shipped import shipped

    if name is not None:
        recipe = load_recipe(name).model_dump(mode="json")
        if json_output:
            common.print_json(common.document("recipes", "pass", recipe=recipe))
        else:
            print(yaml.safe_dump(recipe, sort_keys=False, width=100).rstrip())
        return common.EXIT_OK
    listed = [load_recipe(each) for each in shipped()]
    if json_output:
        summaries = [{"name": each.name, "description": each.description} for each in listed]
        common.print_json(common.document("recipes", "pass", recipes=summaries))
        return common.EXIT_OK
    from rich.table import Column, Table

    table = Table(Column("recipe", no_wrap=True), "what it does", box=None, padding=(0, 2, 0, 0))
    for each in listed:
        table.add_row(each.name, each.description)
    common.print_rich(table)
    common.note("Print one with `memopt recipes NAME`; change a key with `memopt patch --set KEY=VALUE`.")
    return common.EXIT_OK
