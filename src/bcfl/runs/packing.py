"""States as tensors and a description of what is made of them, so that a checkpoint holds any method's state.

A state is a frozen dataclass of tensors, plain values, None, and lists, tuples, mappings and dataclasses of these. A
description names classes without their modules: they are found among those that the method's annotations tell of, so
that nothing is imported because a file says so.
"""

import dataclasses
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bcfl.belief.gaussian import Gaussian
from bcfl.federation import Hypotheses, Method, State

PLAIN = (bool, int, float, str, types.NoneType)
ROOT = "state"  # what the names of a state's tensors begin with: a checkpoint holds others too


@dataclass(frozen=True)
class Packed:
    """A state taken apart."""

    tensors: Mapping[str, Tensor]
    form: Any | None  # what is made of them, as JSON; None in a checkpoint of before there were descriptions


def pack(state: State) -> Packed:
    """The state taken apart; a TypeError if it holds something that cannot be stored."""
    tensors: dict[str, Tensor] = {}
    form = _taken_apart(state, ROOT, tensors, set())
    return Packed(tensors, form)


def _taken_apart(value: Any, name: str, tensors: dict[str, Tensor], stored: set[int]) -> Any:
    if isinstance(value, Tensor):
        tensor = value.detach().contiguous()
        place = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if place in stored else tensor  # safetensors refuses what shares memory
        stored.add(place)
        return {"tensor": name}
    if isinstance(value, PLAIN):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        held = {key: _taken_apart(part, f"{name}.{key}", tensors, stored) for key, part in parts.items()}
        return {"class": type(value).__name__, "fields": held}
    if isinstance(value, list | tuple):
        listed = [_taken_apart(part, f"{name}.{index}", tensors, stored) for index, part in enumerate(value)]
        return listed if isinstance(value, list) else {"tuple": listed}
    if isinstance(value, Mapping):
        pairs = enumerate(value.items())
        return {"mapping": [[key, _taken_apart(part, f"{name}.{i}", tensors, stored)] for i, (key, part) in pairs]}
    raise TypeError(f"a method's {name} cannot be stored: it is a {type(value).__name__}, neither a tensor nor a plain "
                    "value, nor a list, tuple, mapping or dataclass of these")  # fmt: skip


def unpack(packed: Packed, classes: Iterable[type]) -> Any:
    """The state that `pack` took apart, made of these classes."""
    known = {kind.__name__: kind for kind in classes}
    if packed.form is None:
        return _of_old(packed.tensors, known)
    return _put_together(packed.form, packed.tensors, known)


def _put_together(form: Any, tensors: Mapping[str, Tensor], known: Mapping[str, type]) -> Any:
    if isinstance(form, list):
        return [_put_together(part, tensors, known) for part in form]
    if not isinstance(form, dict):
        return form
    if "tensor" in form:
        return tensors[form["tensor"]]
    if "tuple" in form:
        return tuple(_put_together(part, tensors, known) for part in form["tuple"])
    if "mapping" in form:
        return {key: _put_together(part, tensors, known) for key, part in form["mapping"]}
    if form["class"] not in known:
        raise ValueError(f"the checkpoint holds a {form['class']}, and the method knows only "
                         f"{', '.join(known)}: it was made by another version of it")  # fmt: skip
    try:
        return known[form["class"]](
            **{key: _put_together(part, tensors, known) for key, part in form["fields"].items()}
        )
    except TypeError as error:
        raise ValueError(f"the checkpoint's {form['class']} was made by another version: {error}") from None


def _of_old(tensors: Mapping[str, Tensor], known: Mapping[str, type]) -> Any:
    """The state of a checkpoint in which all methods' states had the same fields, some of them left empty."""
    rest = {name: tensor for name, tensor in tensors.items() if not name.startswith("models.")}
    usual = {field.name for field in dataclasses.fields(Hypotheses)} & rest.keys()
    models = Gaussian(tensors["models.mean"], tensors["models.precision"])
    hypotheses = Hypotheses(models, **{name: rest.pop(name) for name in usual})
    if not rest:
        return hypotheses
    for kind in known.values():
        if {"hypotheses", *rest} <= {field.name for field in dataclasses.fields(kind)}:
            return kind(hypotheses=hypotheses, **rest)
    raise ValueError(f"the checkpoint holds {', '.join(rest)}, of which the method knows nothing")


def classes_of(method: Method) -> list[type]:
    """The dataclasses that a method's states may be made of, by the annotations of what it returns."""
    found: dict[type, None] = {Hypotheses: None, Gaussian: None}
    for function in (type(method).init, type(method).round):
        try:
            told = typing.get_type_hints(function).get("return")
            found |= dict.fromkeys(_dataclasses_in(told, set()))
        except NameError as error:
            raise ValueError(f"method {type(method).__name__}: the annotations of {function.__name__} must tell the "
                             f"class of its state: {error}") from None  # fmt: skip
    return list(found)


def _dataclasses_in(annotation: Any, seen: set[Any]) -> Iterator[type]:
    for part in typing.get_args(annotation):
        yield from _dataclasses_in(part, seen)
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation) and annotation not in seen:
        seen.add(annotation)
        yield annotation
        for told in typing.get_type_hints(annotation).values():
            yield from _dataclasses_in(told, seen)
