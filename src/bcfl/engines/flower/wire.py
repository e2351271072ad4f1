"""What travels between server and clients, and how it is checked before it is used."""

import io
import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, RecordDict
from torch import Tensor

from bcfl.belief.gaussian import Gaussian

DESCRIBE, SCORE, FIT, EVALUATE = "query.describe", "query.score", "train.fit", "evaluate"
MOST_LETTERS = 40  # of a client's name
FLOAT, DOUBLE, INT = np.dtype("<f4"), np.dtype("<f8"), np.dtype("<i8")


def to_array(tensor: Tensor) -> Array:
    return Array(np.ascontiguousarray(tensor.detach().numpy()))


def read_array(array: Array | None, shape: tuple[int, ...], dtype: np.dtype[Any], name: str) -> Tensor:
    """The tensor of that shape and type; refuses anything else before any memory is taken for it."""
    if array is None:
        raise ValueError(f"{name} is missing")
    wanted = f"{name} must be {dtype.name} of shape {shape}"
    size = math.prod(shape) * dtype.itemsize
    if array.stype != "numpy.ndarray" or array.dtype != dtype.name or tuple(array.shape) != shape:
        raise ValueError(f"{wanted}, got {str(array.dtype)[:20]} of shape {str(tuple(array.shape))[:60]}")
    file = io.BytesIO(array.data[:256])
    try:
        version = np.lib.format.read_magic(file)
        found = np.lib.format.read_array_header_1_0(file) if version == (1, 0) else None
    except Exception:  # numpy's reader of headers raises whatever a text of the sender's choice leads to
        found = None
    if found is None or found[0] != shape or (found[1] and len(shape) > 1) or found[2] != dtype:
        raise ValueError(f"{wanted}, but its bytes say otherwise")
    if len(array.data) != file.tell() + size:
        raise ValueError(f"{wanted}, {size} bytes, but it has {len(array.data) - file.tell()}")
    values = np.frombuffer(array.data, dtype, offset=file.tell()).reshape(shape)
    return torch.from_numpy(values.copy())


def finite(values: Tensor, name: str) -> Tensor:
    if not torch.isfinite(values).all():
        raise ValueError(f"{name} holds values that are not finite")
    return values


class BeliefArrays:
    """The beliefs as they travel, each made once however many messages share it."""

    def __init__(self, models: Gaussian, num_parameters: int):
        self._models, self._num_parameters = models, num_parameters
        self._made: dict[int, tuple[float, dict[str, Array]]] = {}

    def level(self, belief: int) -> float:
        """The precision of all parameters where it is one number; −1 where it is not and travels as an array."""
        return self._get(belief)[0]

    def of(self, belief: int) -> dict[str, Array]:
        return self._get(belief)[1]

    def _get(self, belief: int) -> tuple[float, dict[str, Array]]:
        if belief not in self._made:
            precision = self._models.precision[belief, : self._num_parameters]
            low, high = precision.aminmax()
            arrays = {f"mean.{belief}": to_array(self._models.mean[belief])}
            if low != high:
                arrays[f"precision.{belief}"] = to_array(precision)
            self._made[belief] = (float(low) if low == high else -1.0, arrays)
        return self._made[belief]


def only(content: Mapping[str, Any], allowed: Collection[str]) -> None:
    """Nothing happens if all that came is among what was asked for: the rest would be read and kept for nothing."""
    for name in content:
        if name not in allowed:
            raise ValueError(f"{one_line(name)[:40]!r} was not asked for")


def arrays_of(content: RecordDict, name: str, allowed: Collection[str] | None = None) -> Mapping[str, Array]:
    """The arrays of that record, none if it is missing; refuses others than those allowed."""
    record: Mapping[str, Array] = content.array_records.get(name) or {}
    if allowed is not None:
        only(record, allowed)
    return record


def settings_of(content: RecordDict, name: str) -> Mapping[str, Any]:
    record = content.config_records.get(name)
    if record is None:
        raise ValueError(f"{name} is missing")
    return record


def whole_number(settings: Mapping[str, Any], key: str, least: int, most: int) -> int:
    value = settings.get(key)
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{key} must be a whole number from {least} to {most}, got {one_line(value)[:40]}")
    return value


def number_of(settings: Mapping[str, Any], key: str, least: float, below: float) -> float:
    value = settings.get(key)
    if type(value) is not float or not least <= value < below:
        raise ValueError(f"{key} must be a number in [{least:g}, {below:g}), got {one_line(value)[:40]}")
    return value


def list_of(settings: Mapping[str, Any], key: str, kind: type, length: int | None = None) -> list[Any]:
    values = settings.get(key)
    if not isinstance(values, list) or any(type(v) is not kind for v in values) or length not in (None, len(values)):
        raise ValueError(f"{key} must be a list of {kind.__name__}" + ("" if length is None else f", {length} long"))
    return values


def name_in(settings: Mapping[str, Any]) -> str:
    """What a client calls itself, in one short line that shows as it is; nothing if it does not say."""
    value = settings.get("name", "")
    if not isinstance(value, str):
        raise ValueError(f"name must be a text, got {one_line(value)[:40]}")
    return one_line("".join(c if c.isprintable() else " " for c in value[:1000]))[:MOST_LETTERS]


def one_line(text: object) -> str:
    return " ".join(str(text).split())[:200]
