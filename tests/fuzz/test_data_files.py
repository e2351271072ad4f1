"""Mutated data files: each is refused in one line, or read as another reading of the same bytes gives it.

`make fuzz` reads many more of them: BCFL_FUZZ is how many in all.
"""

import bz2
import gzip
import io
import json
import math
import os
import random
import re
import signal
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
from numpy.typing import NDArray
from sklearn.datasets import dump_svmlight_file

from bcfl.cli.predicting import _read_examples
from bcfl.data import formats, sources
from bcfl.data.arrays import checked
from bcfl.data.datasets import Dataset, load
from bcfl.data.formats import IMAGE_KEYS, REVIEW_DOMAINS
from bcfl.data.partition import partition

pytestmark = pytest.mark.fuzz
COUNT = int(os.environ.get("BCFL_FUZZ", "600"))
SECONDS = 20  # longer than this is a hang
Array = NDArray[Any]
IDX = sources.SOURCES["mnist"].formats[0].files
random_images = np.random.default_rng(0)


def images(*shape: int) -> dict[str, Array]:
    draw = random_images.integers
    return {
        "x_train": draw(256, size=(10, *shape), dtype=np.uint8),
        "y_train": (np.arange(10) % 10).astype(np.uint8),
        "x_test": draw(256, size=(4, *shape), dtype=np.uint8),
        "y_test": np.arange(4, dtype=np.uint8),
    }


def npz(path: Path, arrays: dict[str, Any], packed: bool = True) -> Path:
    (np.savez_compressed if packed else np.savez)(path, **arrays)
    return path


# ---- readings that share no code with ours --------------------------------------------------------------------------


def read_zip(path: Path, keys: tuple[str, ...]) -> dict[str, Array]:
    """The arrays by numpy's own reader."""
    with np.load(path, allow_pickle=False) as archive:
        return {key: archive[key] for key in keys if key in archive}


def read_idx(path: Path) -> Array:
    raw = (gzip.decompress if path.suffix == ".gz" else bytes)(path.read_bytes())
    shape = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(raw[3])]
    return np.array(list(raw[4 + 4 * raw[3] :]), np.uint8).reshape(shape)


def read_svmlight(path: Path, first: int) -> tuple[list[dict[int, float]], list[float]]:
    text = (bz2.decompress if path.suffix == ".bz2" else bytes)(path.read_bytes())
    rows, labels = [], []
    for line in re.split(rb"\n", text):
        words = line.split(b"#")[0].split()
        if words:
            labels.append(float(words[0]))
            pairs = [word.split(b":") for word in words[1:] if not word.startswith(b"qid:")]
            rows.append({int(index) - first: float(value) for index, value in pairs})
    return rows, labels


# ---- formats: files, how they are read, and how they are read otherwise ---------------------------------------------


def own(name: str) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        found = load(name, folder, **({"domains": ("usps",)} if name == "digits_five" else {}))
        assert all(bool(x.isfinite().all()) for x in (found.x_train, found.x_test))
        return sources.find("usps" if name == "digits_five" else name, folder)

    return read


def as_digits(arrays: dict[str, Array]) -> dict[str, Array]:
    return {key: np.where(value == 10, 0, value) if key[0] == "y" else value for key, value in arrays.items()}


def write_idx(folder: Path) -> None:
    for key, name in zip(IMAGE_KEYS, IDX, strict=True):
        array = images(28, 28)[key]
        header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
        packed = key.endswith("test")
        content = header + array.tobytes()
        (folder / (name + ".gz" * packed)).write_bytes(gzip.compress(content) if packed else content)


def idx_again(folder: Path) -> Any:
    return {key: read_idx(next(folder.glob(f"{name}*"))) for key, name in zip(IMAGE_KEYS, IDX, strict=True)}


def write_cifar(folder: Path) -> None:
    arrays = images(32, 32, 3)
    for i, name in enumerate((*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")):
        x = arrays["x_train"][2 * i : 2 * i + 2] if i < 5 else arrays["x_test"]
        rows = [bytes([j]) + image.transpose(2, 0, 1).tobytes() for j, image in enumerate(x)]
        (folder / name).write_bytes(b"".join(rows))


def cifar_again(folder: Path) -> Any:
    parts: dict[str, list[Any]] = {key: [] for key in IMAGE_KEYS}
    for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
        raw, split = (folder / name).read_bytes(), "test" if name.startswith("test") else "train"
        assert len(raw) % 3073 == 0
        for start in range(0, len(raw), 3073):
            parts[f"y_{split}"].append(raw[start])
            planes = np.array(list(raw[start + 1 : start + 3073])).reshape(3, 32, 32)
            parts[f"x_{split}"].append(np.stack(list(planes), axis=-1))
    return {key: np.array(value) for key, value in parts.items()}


def write_svhn(folder: Path) -> None:
    arrays = images(32, 32, 3)
    for split in ("train", "test"):
        content = {"X": arrays[f"x_{split}"].transpose(1, 2, 3, 0), "y": arrays[f"y_{split}"][:, None]}
        scipy.io.savemat(folder / f"{split}_32x32.mat", content, do_compression=split == "test")


def svhn_again(folder: Path) -> Any:
    found = {}
    for split in ("train", "test"):
        content = scipy.io.loadmat(folder / f"{split}_32x32.mat")
        found |= {f"x_{split}": np.moveaxis(content["X"], 3, 0), f"y_{split}": content["y"].ravel()}
    return as_digits(found)


def write_bundle(folder: Path) -> None:
    cells, arrays = np.empty((2, 2), object), images(28, 28)
    for row, split in enumerate(("train", "test")):
        cells[row, 0], cells[row, 1] = arrays[f"x_{split}"][:, None] / 255, arrays[f"y_{split}"][:, None]
    scipy.io.savemat(folder / "usps_28x28.mat", {"dataset": cells})


def bundle_again(folder: Path) -> Any:
    cells = scipy.io.loadmat(folder / "usps_28x28.mat")["dataset"]
    found = {}
    for row, split in enumerate(("train", "test")):
        found[f"x_{split}"] = np.round(np.asarray(cells[row, 0][:, 0], np.float64) * 255)
        found[f"y_{split}"] = np.asarray(cells[row, 1]).ravel()
    return as_digits(found)


def write_usps(folder: Path) -> None:
    arrays = images(16, 16)
    for split, name in (("train", "usps"), ("test", "usps.t.bz2")):
        x = np.round(arrays[f"x_{split}"].reshape(-1, 256) / 255 * 2 - 1, 3)
        text = io.BytesIO()
        dump_svmlight_file(x, arrays[f"y_{split}"] + 1, text, zero_based=False)
        content = text.getvalue()
        (folder / name).write_bytes(bz2.compress(content) if name.endswith("bz2") else content)


def usps_again(folder: Path) -> Any:
    found = {}
    for split, name in (("train", "usps"), ("test", "usps.t.bz2")):
        rows, labels = read_svmlight(folder / name, 1)
        x = np.zeros((len(rows), 256))
        for i, row in enumerate(rows):
            for index, value in row.items():
                x[i, index] = value
        found |= {f"x_{split}": np.round((x + 1) / 2 * 255).reshape(-1, 16, 16), f"y_{split}": np.array(labels) - 1}
    return found


def write_reviews(folder: Path) -> None:
    for number, domain in enumerate(REVIEW_DOMAINS):
        for split in ("train", "test"):
            counts = np.random.default_rng(number).poisson(0.2, size=(4, 30))
            dump_svmlight_file(counts, np.arange(4) % 2 * 2 - 1, str(folder / f"{domain}_{split}.svmlight"))


def reviews_again(folder: Path) -> Any:
    """Labels and domains, and the sorted counts of every review, whatever the terms are called."""
    labels, domain, counts = [], [], []
    for number, name in enumerate(REVIEW_DOMAINS):
        for split in ("train", "test"):
            rows, found = read_svmlight(folder / f"{name}_{split}.svmlight", 0)
            counts += [sorted(value for value in row.values() if value) for row in rows]
            labels += [int(label > 0) for label in found]
            domain += [number] * len(found)
    return {"y": labels, "domain": domain, "counts": counts}


def our_reviews(folder: Path) -> Any:
    found = own("amazon_review")(folder)
    table = formats.review_counts(found).tocsr()
    counts = [sorted(table.getrow(i).data[table.getrow(i).data != 0].tolist()) for i in range(table.shape[0])]
    return {"y": found["y"], "domain": found["domain"], "counts": counts}


def write_review_npz(folder: Path) -> None:
    rng = np.random.default_rng(0)
    indptr = np.arange(0, 25, 3)
    arrays = {"data": rng.integers(1, 5, 24), "indices": np.sort(rng.integers(0, 5000, (8, 3)), axis=1).ravel()}
    labels = {"y": np.arange(8) % 2, "domain": np.arange(8) // 2}
    npz(folder / "amazon_review.npz", {**arrays, "indptr": indptr, "shape": np.array([8, 5000]), **labels}, False)


def review_npz_again(folder: Path) -> Any:
    return read_zip(folder / "amazon_review.npz", formats.REVIEW_KEYS)


def write_examples(folder: Path) -> None:
    npz(folder / "mine.npz", {"x": random_images.random((6, 2)), "y": np.arange(6) % 2, "unused": np.zeros(3)}, False)


def our_examples(folder: Path) -> Any:
    x, y = checked(*_read_examples(folder / "mine.npz", None), f"--data {folder}")
    return {"x": x.numpy(), "y": y.numpy()}


def examples_again(folder: Path) -> Any:
    found = read_zip(folder / "mine.npz", ("x", "y"))
    return found | {"x": found["x"].astype(np.float32)}


def pool() -> Dataset:
    from torch import arange, zeros

    return Dataset("pool", zeros(12, 1), arange(12) % 3, zeros(6, 1), arange(6) % 3, None, None, (), 3)


def write_split(folder: Path) -> None:
    split = {"train_client": np.arange(12) % 3, "test_client": np.arange(6) % 3 - (np.arange(6) == 4)}
    npz(folder / "split.npz", {**split, "group": np.array([0, 1, 1])}, False)


def our_split(folder: Path) -> Any:
    data = partition(pool(), "file", 0, path=folder / "split.npz")
    held = {"train_client": data.train_of, "test_client": data.test_of}
    found: dict[str, Any] = {}
    for key, size in (("train_client", 12), ("test_client", 6)):
        found[key] = np.full(size, -1)
        for client, rows in enumerate(held[key]):
            found[key][rows.numpy()] = client
    return found | ({} if data.group is None else {"group": data.group.numpy()})


def split_again(folder: Path) -> Any:
    return read_zip(folder / "split.npz", ("train_client", "test_client", "group"))


FORMATS: dict[str, tuple[Callable[[Path], None], Callable[[Path], Any], Callable[[Path], Any]]] = {
    "npz of images": (
        lambda folder: npz(folder / "mnistm.npz", images(28, 28, 3)) and None,
        lambda folder: sources.find("mnistm", folder),
        lambda folder: read_zip(folder / "mnistm.npz", IMAGE_KEYS),
    ),
    "npz of reviews": (write_review_npz, own("amazon_review"), review_npz_again),
    "npz of a newcomer": (write_examples, our_examples, examples_again),
    "npz of a split": (write_split, our_split, split_again),
    "idx": (write_idx, lambda folder: sources.find("mnist", folder), idx_again),
    "cifar": (write_cifar, own("cifar10"), cifar_again),
    "mat of svhn": (write_svhn, lambda folder: sources.find("svhn", folder), svhn_again),
    "mat of usps": (write_bundle, lambda folder: sources.find("usps", folder), bundle_again),
    "svmlight of usps": (write_usps, own("digits_five"), usps_again),
    "svmlight of reviews": (write_reviews, our_reviews, reviews_again),
}


# ---- mutations ------------------------------------------------------------------------------------------------------


def mutated(content: bytes, draw: random.Random) -> bytes:
    """The content with one to four changes: bits, bytes, numbers, cuts, repeats; of an archive perhaps inside it."""
    if content[:2] == b"PK" and draw.random() < 0.6:
        return _archive_mutated(content, draw)
    for unpack, pack in ((gzip.decompress, gzip.compress), (bz2.decompress, bz2.compress)):
        if content[:2] in (b"\x1f\x8b", b"BZ") and draw.random() < 0.6:
            try:
                return pack(mutated(unpack(content), draw))
            except (OSError, EOFError):
                continue
    changed = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        # Half of the time near the beginning, where headers are.
        at = draw.randrange(min(len(changed), 200) if draw.random() < 0.5 else len(changed)) if changed else 0
        kind = draw.randrange(7)
        if kind == 0 and changed:
            changed[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            changed[at : at + 1] = bytes([draw.randrange(256)])
        elif kind == 2:
            changed[at : at + draw.randint(1, 8)] = b""
        elif kind == 3:
            changed[at:at] = changed[at : at + draw.randint(1, 16)]
        elif kind == 4:
            changed[at : at + 4] = draw.choice([b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff", b"\0\0\0\x01"])
        elif kind == 5:
            changed[at:at] = draw.choice([b"9", b"-", b"nan", b"1e9", b" ", b"\n", b":", b"inf", b"0.5", b"#"])
        else:
            del changed[draw.randrange(len(changed) + 1) :]
    return bytes(changed)


def _archive_mutated(content: bytes, draw: random.Random) -> bytes:
    """The archive with one member changed and its checksums right, so that only what it says can be wrong."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
    except Exception:  # it was damaged already
        return content[: len(content) // 2]
    name = draw.choice(sorted(members))
    kind = draw.randrange(4)
    if kind == 0:
        members[name] = mutated(members[name], draw)
    elif kind == 1:
        array = np.load(io.BytesIO(members[name]))
        changed = draw.choice([
            lambda: array.astype(draw.choice(["<f8", "<i8", "<u1", "<f2", "?", "<c16", "U3", "M8[s]"])),
            lambda: array[: draw.randrange(len(array) + 1)],
            lambda: array[..., None],
            lambda: array - draw.choice([1, 200, 0.5, math.inf]),
            lambda: np.asfortranarray(array).byteswap().view(array.dtype.newbyteorder()),
        ])  # fmt: skip
        buffer = io.BytesIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            np.save(buffer, changed())
        members[name] = buffer.getvalue()
    elif kind == 2:
        del members[name]
    else:
        members[draw.choice([name[:-4], name + ".npy", "../" + name, "é.npy"])] = members.pop(name)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", draw.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as archive:
        for member, text in members.items():
            archive.writestr(member, text)
    return buffer.getvalue()


# ---- the test -------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def on_this_machine_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No other data sets, little room, and an alarm for whatever hangs."""
    monkeypatch.setenv("BCFL_CACHE", str(tmp_path / "cache"))
    for name, source in sources.SOURCES.items():
        monkeypatch.setitem(sources.SOURCES, name, replace(source, package=None, hub=None))
    monkeypatch.setattr(formats, "room", lambda: 1e8)

    def hangs(*_: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def equal(found: Any, other: Any) -> bool:
    if isinstance(found, dict):
        return found.keys() == other.keys() and all(equal(value, other[key]) for key, value in found.items())
    if isinstance(found, list) and found and isinstance(found[0], list):
        return found == other
    a, b = np.asarray(found), np.asarray(other)
    return a.shape == b.shape and bool((a == b).all())


@pytest.mark.parametrize("name", FORMATS)
def test_a_mutated_file_is_refused_in_one_line_or_read_as_another_reader_does(name: str, tmp_path: Path) -> None:
    write, ours, again = FORMATS[name]
    (tmp_path / "files").mkdir()
    folder, draw, counts = tmp_path / "files", random.Random(name), Counter[str]()
    write(folder)
    sound = {path: path.read_bytes() for path in sorted(folder.iterdir())}
    assert equal(ours(folder), again(folder))
    for number in range(COUNT // len(FORMATS)):
        path = draw.choice(list(sound))
        path.write_bytes(mutated(sound[path], draw))
        signal.alarm(SECONDS)
        complaint = None
        try:
            found = ours(folder)
        except (ValueError, FileNotFoundError) as error:
            complaint = str(error)
        if complaint is not None:
            assert "\n" not in complaint, complaint
            assert path.name in complaint or str(folder) in complaint, complaint
            counts["refused"] += 1
        else:
            assert equal(found, again(folder)), f"mutation {number} of {path.name} is read as something else"
            counts["read as by another reader"] += 1
        signal.alarm(0)
        path.write_bytes(sound[path])
    print(json.dumps({"format": name, **counts}))
