"""Readers of the public file formats; each gives plain arrays in one layout and never unpickles.

Image sets are uint8: x_train, x_test as (example, height, width) or (example, height, width, 3), y_train, y_test
as (example,). Reviews are the CSR arrays data, indices, indptr, shape with y and domain, (example,).
"""

import bz2
import gzip
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy  # loads io and sparse when they are first used: most runs need neither

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
Reader = Callable[[Sequence[Path]], Arrays]

IMAGE_KEYS = ("x_train", "y_train", "x_test", "y_test")
REVIEW_KEYS = ("data", "indices", "indptr", "shape", "y", "domain")
REVIEW_DOMAINS = ("books", "dvd", "electronics", "kitchen")
NUM_TERMS = 5000


def load_npz(path: Path) -> Arrays:
    """All arrays of an .npz file, by key."""
    with path.open("rb") as file:  # np.load leaves bad files open
        if not zipfile.is_zipfile(file):  # np.load would take it for a pickle and advise to trust it
            raise ValueError("it is not a whole zip archive of arrays, as np.savez writes them")
        file.seek(0)
        with np.load(file, allow_pickle=False) as arrays:
            return {key: arrays[key] for key in arrays.files}


def read_npz(keys: Sequence[str]) -> Reader:
    """A reader of one .npz file that holds the arrays under `keys`."""

    def read(files: Sequence[Path]) -> Arrays:
        arrays = load_npz(files[0])
        missing = [key for key in keys if key not in arrays]
        if missing:
            raise ValueError(f"no key {', '.join(missing)}, only {', '.join(arrays) or 'none'}")
        return {key: arrays[key] for key in keys}

    return read


def read_idx(files: Sequence[Path]) -> Arrays:
    """MNIST's format: a header of type and sizes, then bytes. Files in the order of IMAGE_KEYS."""
    return dict(zip(IMAGE_KEYS, map(_read_idx, files), strict=True))


def _read_idx(path: Path) -> Array:
    raw = _uncompressed(path)
    if raw[:3] != b"\0\0\x08":
        raise ValueError(f"{path.name} does not start as an IDX file of bytes")
    shape = np.frombuffer(raw, ">u4", count=raw[3], offset=4).astype(np.int64)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)


def _uncompressed(path: Path) -> bytes:
    unpack = {".gz": gzip.decompress, ".bz2": bz2.decompress}.get(path.suffix, bytes)
    return unpack(path.read_bytes())


def read_cifar_binary(files: Sequence[Path]) -> Arrays:
    """Records of one label and 3 × 32 × 32 bytes; five training files, then the test file."""
    records = [np.frombuffer(_uncompressed(path), np.uint8).reshape(-1, 1 + 3 * 32 * 32) for path in files]
    arrays: Arrays = {}
    for split, rows in (("train", np.concatenate(records[:-1])), ("test", records[-1])):
        arrays[f"x_{split}"] = np.ascontiguousarray(rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        arrays[f"y_{split}"] = rows[:, 0]
    return arrays


def read_svhn(files: Sequence[Path]) -> Arrays:
    """Stanford's training and test .mat files: X is (height, width, 3, example)."""
    train, test = (scipy.io.loadmat(path) for path in files)
    return _digits(train["X"].transpose(3, 0, 1, 2), train["y"], test["X"].transpose(3, 0, 1, 2), test["y"])


def read_mat(*keys: str) -> Reader:
    """A reader of one .mat file of the Digits-Five bundle that holds the arrays under `keys`, as in IMAGE_KEYS."""

    def read(files: Sequence[Path]) -> Arrays:
        content = scipy.io.loadmat(files[0])
        return _digits(*(content[key] for key in keys))

    return read


def read_usps_mat(files: Sequence[Path]) -> Arrays:
    """USPS of the Digits-Five bundle: cells [[x_train, y_train], [x_test, y_test]], images in [0, 1]."""
    (x_train, y_train), (x_test, y_test) = scipy.io.loadmat(files[0])["dataset"]
    return _digits(np.rint(x_train * 255).squeeze(1), y_train, np.rint(x_test * 255).squeeze(1), y_test)


def read_usps_libsvm(files: Sequence[Path]) -> Arrays:
    """USPS of the LIBSVM collection: values in [-1, 1], labels 1 … 10 for the digits 0 … 9."""
    arrays: list[Array] = []
    for path in files:
        from sklearn.datasets import load_svmlight_file  # here, because importing it takes a second

        x, y = load_svmlight_file(str(path), n_features=256, zero_based=False)
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
    return np.ascontiguousarray(x[..., 0] if x.shape[-1] == 1 else x, np.uint8)


def _digit_labels(y: Array) -> Array:
    """Labels from one-hot rows, or from numbers in which 10 stands for the digit 0."""
    numbers = y.argmax(axis=1) if y.ndim == 2 and y.shape[1] == 10 else y.reshape(-1)
    return np.where(numbers == 10, 0, numbers).astype(np.uint8)


def read_reviews(files: Sequence[Path]) -> Arrays:
    """Blitzer's reviews as svmlight counts: training and test file of each of REVIEW_DOMAINS.

    The two files of a domain are one pool. Of more than NUM_TERMS terms the most frequent are kept, in their order.
    """
    from sklearn.datasets import load_svmlight_files  # here, because importing it takes a second

    read = load_svmlight_files([str(path) for path in files])  # together: they share one numbering of the terms
    blocks, labels = read[0::2], read[1::2]
    width = max(NUM_TERMS, blocks[0].shape[1])
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
        if x.dtype != np.uint8 or x.ndim not in (3, 4) or (x.ndim == 4 and x.shape[3] != 3):
            raise ValueError(f"x_{split} must be uint8 (example, height, width[, 3]), but is {x.dtype} {x.shape}")
        if shape is not None and x.shape[1:] != shape:
            raise ValueError(f"x_{split} must hold images of shape {shape}, but holds {x.shape[1:]}")
        if y.shape != (len(x),) or y.dtype.kind not in "iu":
            raise ValueError(f"y_{split} must be {len(x)} integers, but is {y.dtype} {y.shape}")
        if len(y) == 0 or y.min() < 0 or y.max() >= num_classes:
            raise ValueError(f"y_{split} must hold labels 0 … {num_classes - 1}" + ("" if len(y) else ", but is empty"))


def check_reviews(arrays: Arrays) -> None:
    """A ValueError says what is wrong if these are no review arrays."""
    counts = review_counts(arrays)
    num_rows = counts.shape[0]
    if counts.shape[1] != NUM_TERMS:
        raise ValueError(f"shape must be (example, {NUM_TERMS}), but is {counts.shape}")
    counts.check_format(full_check=True)
    for key, limit in (("y", 2), ("domain", len(REVIEW_DOMAINS))):
        values = arrays[key]
        if values.shape != (num_rows,) or values.dtype.kind not in "iu" or values.min() < 0 or values.max() >= limit:
            raise ValueError(f"{key} must be {num_rows} integers below {limit}, but is {values.dtype} {values.shape}")
