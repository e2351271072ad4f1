"""`bcfl list`: what there is to choose from."""

import json
from typing import Annotated

import click

import bcfl.cli.options as options
from bcfl.cli.options import argument

KINDS = ("methods", "datasets", "models", "likelihoods", "settings")


def list_(
    *,
    what: Annotated[str | None, argument(None, "default: all of them", click.Choice(KINDS))] = None,
    as_json: options.Json = False,
) -> int:
    """What there is to choose from.

    examples:
      bcfl list                      everything
      bcfl list methods
      bcfl list datasets --json
      bcfl list settings             for files and --set: the default, what is allowed, which methods have it
    """
    from bcfl.console import console_for

    kinds = _kinds()
    if as_json:
        print(json.dumps(kinds if what is None else kinds[what]))
        return 0
    console = console_for()
    for kind, things in kinds.items() if what is None else [(what, kinds[what])]:
        if what is None:
            console.print(f"\n{kind}", style="bold")
        _print(kind, things)
    return 0


def _kinds() -> dict[str, dict[str, str]]:
    from bcfl.data.datasets import DATASETS
    from bcfl.likelihood import FAMILIES
    from bcfl.methods import METHODS
    from bcfl.model.zoo import MODELS
    from bcfl.runs.reference import all_settings

    found = (
        {entry.name: entry.summary for entry in METHODS.values()},
        {name: entry.description for name, entry in DATASETS.items()},
        {name: (factory.__doc__ or "").split("\n")[0] for name, factory in MODELS.items()},
        {name: " ".join((family.__doc__ or "").split("\n\n")[0].split()) for name, family in FAMILIES.items()},
        {name: str(setting) for name, setting in all_settings().items()},
    )
    return dict(zip(KINDS, found, strict=True))


def _print(kind: str, things: dict[str, str]) -> None:
    from rich.table import Table

    from bcfl.console import console_for

    table = Table(show_header=False, box=None)
    for name, description in things.items():
        table.add_row(name, description)
    console = console_for()
    console.print(table)
    if kind == "methods":
        console.print("\nM is the number of hypotheses, as in bcfl-mh-6; bcfl methods take -w for warm-up: bcfl-mh-6-w")
