"""Readers of the public file formats; each gives plain arrays in one layout and never unpickles.

Image sets are uint8: x_train, x_test as (example, height, width) or (example, height, width, 3), y_train, y_test
as (example,). Reviews are the CSR arrays data, indices, indptr, shape with y and domain, (example,).
"""

import bz2
import gzip
import math
import re
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt
import scipy  # loads sparse when it is first used: most runs do not need it

from bcfl.data.matlab import read_variables

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
Reader = Callable[[Sequence[Path]], Arrays]

IMAGE_KEYS = ("x_train", "y_train", "x_test", "y_test")
REVIEW_KEYS = ("data", "indices", "indptr", "shape", "y", "domain")
REVIEW_DOMAINS = ("books", "dvd", "electronics", "kitchen")
NUM_TERMS = 5000


def room() -> float:
    """The bytes that raw data may take: half of the memory that is free now, the other half is to work with them."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:  # no Linux
        found = None
    return int(found[1]) * 1024 / 2 if found else math.inf


def refuse_without_room(num_bytes: float, what: str) -> None:
    """Nothing happens if so many bytes have room in memory: a small file may unpack to any size."""
    if num_bytes > room():
        raise ValueError(f"{what} would take {num_bytes / 1e9:.1f} GB, more than this machine has free")


def load_npz(path: Path, keys: Sequence[str], optional: Sequence[str] = ()) -> Arrays:
    """The arrays of an .npz file under `keys`, and those of the `optional` ones that it has; no other is unpacked."""
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            raise ValueError("it is not a whole zip archive of arrays, as np.savez writes them")
        with zipfile.ZipFile(file) as archive:
            there = [name.removesuffix(".npy") for name in archive.namelist()]
            if missing := [key for key in keys if key not in there]:
                raise ValueError(f"no key {', '.join(missing)}, only {', '.join(there) or 'none'}")
            wanted = [*keys, *(key for key in optional if key in there)]
            if twice := [key for key in wanted if there.count(key) > 1]:
                raise ValueError(f"the key {twice[0]} is there more than once")
            members = {key: archive.infolist()[there.index(key)] for key in wanted}
            refuse_without_room(sum(member.file_size for member in members.values()), " and ".join(wanted))
            return {key: _read_npy(archive, key, member) for key, member in members.items()}


def _read_npy(archive: zipfile.ZipFile, key: str, member: zipfile.ZipInfo) -> Array:
    """One array of an archive, whose header, checked first, must tell of exactly the bytes that are there."""
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
        if read is None:
            raise ValueError(f"{key} is an array file of version {version[0]}.{version[1]}, only 1.0 and 2.0 are read")
        shape, _, dtype = read(file)
        if dtype.hasobject:
            raise ValueError(f"{key} holds Python objects, not plain numbers")
        if file.tell() + math.prod(shape) * dtype.itemsize != member.file_size:
            raise ValueError(f"{key} is {dtype} {shape} by its header, but has another size")
    with archive.open(member) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def read_npz(keys: Sequence[str]) -> Reader:
    """A reader of one .npz file that holds the arrays under `keys`."""
    return lambda files: load_npz(files[0], keys)


def read_idx(files: Sequence[Path]) -> Arrays:
    """MNIST's format: a header of type and sizes, then bytes. Files in the order of IMAGE_KEYS."""
    return dict(zip(IMAGE_KEYS, map(_read_idx, files), strict=True))


def _read_idx(path: Path) -> Array:
    with _opened(path) as file:
        start = file.read(4)
        if start[:3] != b"\0\0\x08" or len(start) < 4:
            raise ValueError(f"{path.name} does not start as an IDX file of bytes")
        shape = np.frombuffer(file.read(4 * start[3]), ">u4", count=start[3]).tolist()
        refuse_without_room(math.prod(shape), path.name)
        content = file.read(math.prod(shape) + 1)
    return np.frombuffer(content, np.uint8).reshape(shape)


def _opened(path: Path) -> BinaryIO:
    """The file, unpacked as it is read."""
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path))
    return cast(BinaryIO, bz2.open(path)) if path.suffix == ".bz2" else path.open("rb")


def _content(path: Path) -> bytes:
    """All of a file, unpacked."""
    with _opened(path) as file:
        if math.isinf(most := room()):
            return file.read()
        content = file.read(int(most) + 1)
    refuse_without_room(len(content), path.name)
    return content


def read_cifar_binary(files: Sequence[Path]) -> Arrays:
    """Records of one label and 3 × 32 × 32 bytes; five training files, then the test file."""
    records = [np.frombuffer(_content(path), np.uint8).reshape(-1, 1 + 3 * 32 * 32) for path in files]
    arrays: Arrays = {}
    for split, rows in (("train", np.concatenate(records[:-1])), ("test", records[-1])):
        arrays[f"x_{split}"] = np.ascontiguousarray(rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        arrays[f"y_{split}"] = rows[:, 0]
    return arrays


def read_svhn(files: Sequence[Path]) -> Arrays:
    """Stanford's training and test .mat files: X is (height, width, 3, example)."""
    (x_train, y_train), (x_test, y_test) = (read_variables(path, ("X", "y"), room()) for path in files)
    return _digits(x_train.transpose(3, 0, 1, 2), y_train, x_test.transpose(3, 0, 1, 2), y_test)


def read_mat(*keys: str) -> Reader:
    """A reader of one .mat file of the Digits-Five bundle that holds the arrays under `keys`, as in IMAGE_KEYS."""
    return lambda files: _digits(*read_variables(files[0], keys, room()))


def read_usps_mat(files: Sequence[Path]) -> Arrays:
    """USPS of the Digits-Five bundle: cells [[x_train, y_train], [x_test, y_test]], images in [0, 1]."""
    (x_train, y_train), (x_test, y_test) = read_variables(files[0], ("dataset",), room())[0]
    return _digits(np.rint(x_train * 255).squeeze(1), y_train, np.rint(x_test * 255).squeeze(1), y_test)


def read_usps_libsvm(files: Sequence[Path]) -> Arrays:
    """USPS of the LIBSVM collection: values in [-1, 1], labels 1 … 10 for the digits 0 … 9."""
    arrays: list[Array] = []
    for path in files:
        from sklearn.datasets import load_svmlight_file  # here, because importing it takes a second

        x, y = load_svmlight_file(str(path), n_features=256, zero_based=False)
        refuse_without_room(8 * math.prod(x.shape), path.name)
        if not np.isin(y, np.arange(1, 11)).all():
            raise ValueError(f"{path.name} holds labels that are not 1 … 10")
        arrays += [np.rint((x.toarray() + 1) / 2 * 255).reshape(-1, 16, 16), y - 1]
    return _digits(*arrays)


def _digits(x_train: Array, y_train: Array, x_test: Array, y_test: Array) -> Arrays:
    return {
        "x_train": _digit_images(x_train),
        "y_train": _digit_labels(y_train),
        "x_test": _digit_images(x_test),
        "y_test": _digit_labels(y_test),
    }


def _digit_images(x: Array) -> Array:
    return np.ascontiguousarray(_as_bytes(x[..., 0] if x.shape[-1] == 1 else x, "images"))


def _digit_labels(y: Array) -> Array:
    """Labels from one-hot rows, or from numbers in which 10 stands for the digit 0."""
    if y.ndim == 2 and y.shape[1] == 10:
        if not (np.isin(y, (0, 1)).all() and (y.sum(axis=1) == 1).all()):
            raise ValueError("labels are neither numbers nor rows with a single 1")
        y = y.argmax(axis=1)
    numbers = _as_bytes(y.reshape(-1), "labels")
    return np.where(numbers == 10, 0, numbers).astype(np.uint8)


def _as_bytes(values: Array, what: str) -> Array:
    """The same numbers as bytes; others than 0 … 255 would silently become others."""
    whole = values.dtype == np.uint8 or (
        values.dtype.kind in "buif" and ((values >= 0) & (values <= 255) & (values == np.rint(values))).all()
    )
    if not whole:
        raise ValueError(f"{what} are not made of whole numbers 0 … 255")
    return values.astype(np.uint8)


def read_reviews(files: Sequence[Path]) -> Arrays:
    """Blitzer's reviews as svmlight counts: training and test file of each of REVIEW_DOMAINS.

    The two files of a domain are one pool. Of more than NUM_TERMS terms the most frequent are kept, in their order.
    """
    from sklearn.datasets import load_svmlight_files  # here, because importing it takes a second

    read = load_svmlight_files([str(path) for path in files])  # together: they share one numbering of the terms
    blocks, labels = read[0::2], read[1::2]
    width = max(NUM_TERMS, blocks[0].shape[1])
    refuse_without_room(32 * width, f"counts of {width} terms")
    if not all(np.isin(y, (-1, 0, 1)).all() for y in labels):
        raise ValueError("there are labels that are not -1, 0 or 1")
    for block in blocks:
        block.resize(block.shape[0], width)
    counts = scipy.sparse.vstack(blocks, format="csr")
    frequency = np.asarray(counts.sum(axis=0)).reshape(-1)
    counts = counts[:, np.sort(np.argsort(-frequency, kind="stable")[:NUM_TERMS])]
    return {
        **{key: getattr(counts, key) for key in ("data", "indices", "indptr")},
        "shape": np.array(counts.shape),
        "y": (np.concatenate(labels) > 0).astype(np.uint8),
        "domain": np.repeat(np.arange(len(blocks)) // 2, [len(y) for y in labels]).astype(np.uint8),
    }


def review_counts(arrays: Arrays) -> Any:
    """The word counts as one CSR matrix, (example, term)."""
    num_rows, num_terms = arrays["shape"].tolist()
    parts = (arrays["data"], arrays["indices"], arrays["indptr"])
    return scipy.sparse.csr_matrix(parts, shape=(num_rows, num_terms))


def check_images(arrays: Arrays, shape: tuple[int, ...] | None, num_classes: int = 10) -> None:
    """A ValueError says what is wrong if these are no image arrays (of the given shape)."""
    for split in ("train", "test"):
        x, y = arrays[f"x_{split}"], arrays[f"y_{split}"]
        if x.dtype != np.uint8 or x.ndim not in (3, 4) or (x.ndim == 4 and x.shape[3] != 3) or 0 in x.shape[1:]:
            raise ValueError(f"x_{split} must be uint8 (example, height, width[, 3]), but is {x.dtype} {x.shape}")
        if shape is not None and x.shape[1:] != shape:
            raise ValueError(f"x_{split} must hold images of shape {shape}, but holds {x.shape[1:]}")
        if y.shape != (len(x),) or y.dtype.kind not in "iu":
            raise ValueError(f"y_{split} must be {len(x)} integers, but is {y.dtype} {y.shape}")
        if len(y) == 0 or y.min() < 0 or y.max() >= num_classes:
            raise ValueError(f"y_{split} must hold labels 0 … {num_classes - 1}" + ("" if len(y) else ", but is empty"))


def check_reviews(arrays: Arrays) -> None:
    """A ValueError says what is wrong if these are no review arrays."""
    for key, kinds in {"data": "buif", "indices": "iu", "indptr": "iu", "shape": "iu"}.items():
        if arrays[key].dtype.kind not in kinds:
            raise ValueError(f"{key} must hold {'whole ' * ('f' not in kinds)}numbers, but is {arrays[key].dtype}")
    if not (np.isfinite(arrays["data"]).all() and (arrays["data"] >= 0).all()):
        raise ValueError("data must hold counts from 0")
    counts = review_counts(arrays)
    num_rows = counts.shape[0]
    refuse_without_room(4 * math.prod(counts.shape), f"counts of {num_rows} reviews")
    if counts.shape[1] != NUM_TERMS:
        raise ValueError(f"shape must be (example, {NUM_TERMS}), but is {counts.shape}")
    counts.check_format(full_check=True)
    for key, limit in (("y", 2), ("domain", len(REVIEW_DOMAINS))):
        values = arrays[key]
        if values.shape != (num_rows,) or values.dtype.kind not in "iu" or values.min() < 0 or values.max() >= limit:
            raise ValueError(f"{key} must be {num_rows} integers below {limit}, but is {values.dtype} {values.shape}")
