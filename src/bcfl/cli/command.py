"""How a function becomes a command: options in groups that commands share, examples below the help, and --plugin."""

import inspect
import sys
from collections.abc import Callable
from inspect import Parameter
from typing import Any

import click

from bcfl.cli.options import Plugin


def add(group: click.Group, function: Callable[..., int]) -> None:
    """The group has this function as a command.

    Its docstring is the help, with its examples last. What is annotated with an option or argument is one; a parameter
    that is a dataclass stands for its fields.
    """
    parameters, fields_of = list[Parameter](), dict[str, list[str]]()
    signature = inspect.signature(function).parameters
    for one in signature.values():
        kind: Any = one.annotation
        if isinstance(kind, type):
            fields = inspect.signature(kind).parameters.values()
            fields_of[one.name] = [field.name for field in fields]
            parameters += fields
        else:
            parameters.append(one)

    def call(plugin: str | None, **given: Any) -> int:
        if plugin is not None:
            _bring(plugin)
            given |= {"overrides": (f"method.plugin={plugin}", *given["overrides"])} if "overrides" in given else {}
        for name, names in fields_of.items():
            given[name] = signature[name].annotation(**{field: given.pop(field) for field in names})
        return function(**given)

    parameters.append(Parameter("plugin", Parameter.KEYWORD_ONLY, default=None, annotation=Plugin))
    made = [one.annotation.__metadata__[0](one.name, one.default) for one in parameters]
    group.add_command(
        click.Command(function.__name__.rstrip("_"), callback=call, params=made, **told(function.__doc__))
    )


def _bring(plugin: str) -> None:
    """The methods of that module are known; as it is named here and now, the working directory is a place for it."""
    from bcfl.methods import load_plugin
    from bcfl.runs.problem import look_here

    before = list(sys.path)
    look_here()
    try:
        load_plugin(plugin)
    finally:
        sys.path[:] = before


def told(docstring: str | None) -> dict[str, Any]:
    """The help that a docstring gives, and the examples below it."""
    text, _, examples = inspect.cleandoc(docstring or "").partition("\n\nexamples:\n")
    return {"help": text, "epilog": f"\b\nexamples:\n{examples}" if examples else None}


def complain(message: str, who: str = "bcfl") -> None:
    """One line on standard error, whatever a library had to say."""
    print(f"{who}:", " ".join(message.split()), file=sys.stderr)
