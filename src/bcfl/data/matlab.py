"""MATLAB's files of level 5 (versions 5 to 7.2), as far as plain numbers and cells of them go.

In Python alone: SciPy's reader, in C, dies of damaged files (a segmentation fault), and theirs may be strangers'.
A file is a header of 128 bytes and then elements: their kind, their size, their bytes. A variable is an element of
elements: flags, dimensions, name, values, in this order; it may be packed.
"""

import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

HEADER = 128
MATRIX, PACKED = 14, 15  # kinds of elements
HEAD = (6, 5, 1)  # the kinds of what every variable begins with
NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
CELL, NUMERIC = 1, range(6, 16)  # classes of variables
COMPLEX = 0x800
LONGEST_HEAD = 4096  # bytes of a packed variable in which its name is found


def read_variables(path: Path, keys: Sequence[str], most: float) -> list[npt.NDArray[Any]]:
    """The variables under `keys`, in their order; nothing is unpacked into more than so many bytes."""
    raw = path.read_bytes()
    order = {b"IM": "<", b"MI": ">"}.get(raw[HEADER - 2 : HEADER])
    if order is None or struct.unpack(f"{order}H", raw[HEADER - 4 : HEADER - 2]) != (0x0100,):
        raise ValueError(f"{path.name} is no MATLAB file of level 5")
    found: dict[str, bytes] = {}
    for kind, body in _elements(raw[HEADER:], order):
        if kind == PACKED:
            name = _name(zlib.decompressobj().decompress(body, LONGEST_HEAD)[8:], order)
            content = _unpacked(body, order, most) if name in keys else b""
        elif kind == MATRIX:
            name, content = _name(body, order), body
        else:
            raise ValueError(f"{path.name} holds an element of kind {kind}, which is no variable")
        if name in found:
            raise ValueError(f"{path.name} holds {name} more than once")
        found[name] = content
    if missing := [key for key in keys if key not in found]:
        raise ValueError(f"{path.name} has no key {', '.join(missing)}, only {', '.join(found) or 'none'}")
    return [_array(found[key], order) for key in keys]


def _elements(raw: bytes, order: str) -> Iterator[tuple[int, bytes]]:
    """All elements, one behind the other: their kind and their bytes."""
    at = 0
    while at < len(raw):
        yield _element(raw, order, at)[:2]
        at = _element(raw, order, at)[2]


def _element(raw: bytes, order: str, at: int) -> tuple[int, bytes, int]:
    """The kind of the element that begins there, its bytes, and where the next one begins."""
    if len(raw) < at + 8:
        raise ValueError("an element is cut off")
    kind, size = struct.unpack_from(f"{order}II", raw, at)
    if kind >> 16:  # up to four bytes stand in the place of their number
        kind, size, start, end = kind & 0xFFFF, kind >> 16, at + 4, at + 8
    else:
        start = at + 8
        end = start + size + (0 if kind == PACKED else -size % 8)
    if size > min(end, len(raw)) - start:
        raise ValueError("an element is longer than what holds it")
    return kind, raw[start : start + size], end


def _unpacked(body: bytes, order: str, most: float) -> bytes:
    """The variable that is packed in an element."""
    unpack = zlib.decompressobj()
    head = unpack.decompress(body, 8)
    kind, size = struct.unpack(f"{order}II", head)
    if kind != MATRIX or size > most:
        raise ValueError(f"a packed variable would take {size / 1e9:.1f} GB, more than this machine has free"
                         if kind == MATRIX else "what is packed is no variable")  # fmt: skip
    content = unpack.decompress(unpack.unconsumed_tail, size + 1)
    if len(content) != size or not unpack.eof:
        raise ValueError("a packed variable has another size than it says")
    return content


def _name(body: bytes, order: str) -> str:
    head = list(islice(_elements(body, order), len(HEAD)))
    if tuple(kind for kind, _ in head) != HEAD or len(head[0][1]) != 8:
        raise ValueError("a variable does not begin with its flags, dimensions and name")
    return head[2][1].decode("ascii")


def _array(body: bytes, order: str) -> npt.NDArray[Any]:
    """A variable as an array of numbers, or of arrays where it is made of cells."""
    _name(body, order)  # of a cell, which has none, it is only checked
    (_, flags), (_, dimensions), _, *parts = _elements(body, order)
    (word,) = struct.unpack_from(f"{order}I", flags)
    shape = np.frombuffer(dimensions, f"{order}i4").tolist()
    if min(shape, default=-1) < 0:
        raise ValueError(f"a variable has the dimensions {shape}")
    if word & 0xFF == CELL:
        cells = np.empty(math.prod(shape), object)
        if len(parts) != len(cells) or any(kind != MATRIX for kind, _ in parts):
            raise ValueError(f"{len(cells)} cells are told of, but {len(parts)} are there")
        for number, (_, part) in enumerate(parts):
            cells[number] = _array(part, order)
        return cells.reshape(shape, order="F")
    if word & 0xFF not in NUMERIC or word & COMPLEX or len(parts) != 1 or parts[0][0] not in NUMBERS:
        raise ValueError("a variable is not made of real numbers")
    kind, values = parts[0]
    return np.frombuffer(values, order + NUMBERS[kind]).reshape(shape, order="F")
