"""What travels between server and clients, and how it is checked before it is used."""

import io
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, RecordDict
from torch import Tensor

DESCRIBE, SCORE, FIT, EVALUATE = "query.describe", "query.score", "train.fit", "evaluate"
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


def arrays_of(content: RecordDict, name: str) -> Mapping[str, Array]:
    return content.array_records.get(name) or {}


def settings_of(content: RecordDict, name: str) -> Mapping[str, Any]:
    record = content.config_records.get(name)
    if record is None:
        raise ValueError(f"{name} is missing")
    return record


def whole_number(settings: Mapping[str, Any], key: str, least: int, most: int) -> int:
    value = settings.get(key)
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{key} must be a whole number from {least} to {most}, got {str(value)[:40]}")
    return value


def share_of(settings: Mapping[str, Any], key: str) -> float:
    value = settings.get(key)
    if type(value) is not float or not 0 <= value < 1:
        raise ValueError(f"{key} must be a number in [0, 1), got {str(value)[:40]}")
    return value


def list_of(settings: Mapping[str, Any], key: str, kind: type, length: int | None = None) -> list[Any]:
    values = settings.get(key)
    if not isinstance(values, list) or any(type(v) is not kind for v in values) or length not in (None, len(values)):
        raise ValueError(f"{key} must be a list of {kind.__name__}" + ("" if length is None else f", {length} long"))
    return values


def one_line(text: object) -> str:
    return " ".join(str(text).split())[:200]
