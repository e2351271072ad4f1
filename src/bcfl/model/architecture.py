"""What a network is made of, in words that are the same wherever it is built: to tell it from another of its size."""

import inspect
import types
from collections.abc import Iterator

from torch import nn


def architecture(module: nn.Module) -> tuple[str, ...]:
    """Every layer in its order: its name, its class and its settings, such as `0.conv: Conv2d(1, 16, kernel_size=5)`.

    Nothing in it depends on the process or on drawn numbers. Of torch's layers the settings are what torch shows; of
    others also their plain attributes and what their forward calls, as an activation may be chosen there.
    """
    return tuple(
        f"{name}: {type(layer).__name__}({', '.join(_settings(layer))})"
        for name, layer in module.named_modules(remove_duplicate=False)
    )


def _settings(layer: nn.Module) -> Iterator[str]:
    if shown := layer.extra_repr():
        yield " ".join(shown.split())
    known_to_torch = type(layer).__module__.partition(".")[0] == "torch"
    for name, value in sorted(vars(layer).items()):
        if name.startswith("_") or name == "training":
            continue
        if isinstance(value, types.FunctionType | types.BuiltinFunctionType):
            yield f"{name}={value.__name__}"
        elif not known_to_torch and _is_plain(value):
            yield f"{name}={value}"
    forward = inspect.unwrap(type(layer).forward)
    if not known_to_torch and isinstance(forward, types.FunctionType):
        yield f"forward: {' '.join(sorted(set(_names(forward.__code__))))}"


def _is_plain(value: object) -> bool:
    """Whether it is a setting as a rule: a number, a word (no path of some machine), or several of these."""
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return type(value) in (bool, int, float) or (isinstance(value, str) and value.replace("-", "_").isidentifier())


def _names(code: types.CodeType) -> Iterator[str]:
    """The names that a function uses, in functions within it too: Python versions differ in where these stand."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
