"""Where raw data is found: at a path the user gives, or else in the cache, a system package or the Hugging Face hub."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.progress import track

from bcfl.console import console_for
from bcfl.data import formats
from bcfl.data.formats import Arrays, Reader
from bcfl.files import replacing

OTHER_PATH = "say where it lies with data.path=PATH (in Python path=, for `bcfl resume` and `evaluate` --data-path)"
DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")


@dataclass(frozen=True)
class RawFormat:
    """Files that together are a data set in a public format; each may be packed as .gz or .bz2 where it reads so."""

    files: tuple[str, ...]
    read: Reader


@dataclass(frozen=True)
class Hub:
    """A data set on the Hugging Face hub with the splits train and test."""

    repository: str
    config: str | None = None
    image: str = "image"
    label: str = "label"


@dataclass(frozen=True)
class Source:
    """Everything that is known about where one raw data set can come from."""

    formats: tuple[RawFormat, ...] = ()
    folders: tuple[str, ...] = ()  # under the place searched, besides the place itself
    image_shape: tuple[int, ...] | None = None  # None: any size
    hub: Hub | None = None
    package: Path | None = None
    package_name: str = ""
    sha256: str | None = None  # over the bytes of the arrays, where all copies are the same
    batches: tuple[str, ...] = ()  # sha256 of equal parts of the training data, in the original order


_IDX = RawFormat(
    ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
    formats.read_idx,
)
_REVIEW_FILES = tuple(f"{domain}_{split}.svmlight" for domain in formats.REVIEW_DOMAINS for split in ("train", "test"))

# Checksums are where all copies are the same. Those of USPS are rounded to bytes in different ways; MNIST-M is a random
# blend that was made and cut more than once; of SVHN, Synthetic Digits and the reviews there are copies with more or
# fewer examples or terms, and nothing here to tell a rightful one by.
SOURCES = {
    "fashion_mnist": Source(
        formats=(_IDX,),
        folders=("fashion-mnist", "FashionMNIST/raw"),
        image_shape=(28, 28),
        hub=Hub("zalando-datasets/fashion_mnist"),
        package=DEBIAN_FASHION_MNIST,
        package_name="dataset-fashion-mnist",
        sha256="ca3ab2a37f845e1b8ae23cab1b51749a3011ba3bf1d9016176d75cbaabac376f",
    ),
    "cifar10": Source(
        formats=(
            RawFormat((*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"), formats.read_cifar_binary),
        ),
        folders=("cifar-10-batches-bin",),
        image_shape=(32, 32, 3),
        hub=Hub("uoft-cs/cifar10", image="img"),
        sha256="80387ddb9a0edf3fc4a964ee3770296169bb26a651050df20035579673099660",
        batches=(
            "8350d89ba6404c270d263d84bf037e74b0158eecac79f27405efcf23445a6997",
            "28d2d506ff2e052a3c902ac74931514d4c22d54b3f23622088bee441ab096cf0",
            "e56532de152c7a77fc2a722499682f2699ce5177bbfac2ed2e415096184fa1d9",
            "bb996a8ffff861dd5cca88c397fdfb884f0c482c5588bd32cea3dc7b648709bb",
            "efb6334c7c1f88ac69032959408d9eeccb983002e83119b66de7309d3d2c7915",
        ),
    ),
    "amazon_review": Source(formats=(RawFormat(_REVIEW_FILES, formats.read_reviews),)),
    "mnist": Source(
        formats=(
            _IDX,
            RawFormat(("mnist_data.mat",), formats.read_mat("train_28", "label_train", "test_28", "label_test")),
        ),
        folders=("MNIST/raw",),
        hub=Hub("ylecun/mnist"),
        sha256="06b0d1f124c4e5fa796686ade41a9b778edacc8622f2195a352ef479ad44fc16",
    ),
    "mnistm": Source(
        formats=(
            RawFormat(("mnistm_with_label.mat",), formats.read_mat("train", "label_train", "test", "label_test")),
        ),
        hub=Hub("Mike0307/MNIST-M"),
    ),
    "usps": Source(
        formats=(
            RawFormat(("usps", "usps.t"), formats.read_usps_libsvm),
            RawFormat(("usps_28x28.mat",), formats.read_usps_mat),
        ),
        hub=Hub("flwrlabs/usps"),
    ),
    "svhn": Source(
        formats=(
            RawFormat(("train_32x32.mat", "test_32x32.mat"), formats.read_svhn),
            RawFormat(("svhn_train_32x32.mat", "svhn_test_32x32.mat"), formats.read_svhn),
        ),
        hub=Hub("ufldl-stanford/svhn", config="cropped_digits"),
    ),
    "svhn_small": Source(),
    "synthetic_digits": Source(
        formats=(
            RawFormat(("synth_train_32x32.mat", "synth_test_32x32.mat"), formats.read_svhn),
            RawFormat(("syn_number.mat",), formats.read_mat("train_data", "train_label", "test_data", "test_label")),
        ),
    ),
}


def find(name: str, path: str | Path | None = None) -> Arrays:
    """The raw arrays of `name` from the user's own `path`; without one, from the first place that has them.

    What lies at `path` is taken as it is; what lies in the cache or comes from elsewhere must match the checksum.
    """
    if path is not None:
        return _read_own(name, Path(path).expanduser())
    for place in (cache_folder(), SOURCES[name].package):
        if place is not None and (arrays := _read_folder(name, place)) is not None:
            _verify(name, arrays, str(place))
            return arrays
    arrays = _fetch(name)
    _verify(name, arrays, "the Hugging Face hub")
    _store(name, arrays)
    return arrays


def _read_own(name: str, path: Path) -> Arrays:
    """The arrays that a user's own file or folder holds; if it does not, nothing else takes their place."""
    if path.is_file():
        return _read(name, _npz(name), [path])
    if not path.is_dir():
        raise FileNotFoundError(f"path {path}: no such file or directory; {OTHER_PATH}")
    if (arrays := _read_folder(name, path)) is not None:
        return arrays
    raise FileNotFoundError(
        f"data set {name!r} not found in {path}: put {_wanted(name)} there or into {path / name}; {OTHER_PATH}; "
        f"without a path it is looked for in the cache and beyond"
    )


def cache_folder() -> Path:
    """BCFL_CACHE, or bcfl in the user's cache directory."""
    if own := os.environ.get("BCFL_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "bcfl"


def _npz(name: str) -> RawFormat:
    keys = formats.REVIEW_KEYS if name == "amazon_review" else formats.IMAGE_KEYS
    return RawFormat((f"{name}.npz",), formats.read_npz(keys))


def _read_folder(name: str, folder: Path) -> Arrays | None:
    for place in (folder / name, *(folder / sub for sub in SOURCES[name].folders), folder):
        for raw in (_npz(name), *SOURCES[name].formats):
            found = [file for file in map(_present, (place / file for file in raw.files)) if file is not None]
            if len(found) == len(raw.files):
                return _read(name, raw, found)
    return None


def _present(file: Path) -> Path | None:
    candidates = (file.with_name(file.name + suffix) for suffix in ("", ".gz", ".bz2"))
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _read(name: str, raw: RawFormat, files: Sequence[Path]) -> Arrays:
    try:
        arrays = raw.read(files)
        _check(name, arrays)
        arrays = _in_original_order(name, arrays)
    except Exception as error:  # whatever the zip, array and text readers raise on a damaged or foreign file
        where = files[0] if len(files) == 1 else f"{files[0].parent} ({', '.join(file.name for file in files)})"
        raise ValueError(f"data set {name!r}: {where} is damaged or of another format: {one_line(error)}") from error
    return arrays


def _check(name: str, arrays: Arrays) -> None:
    if name == "amazon_review":
        formats.check_reviews(arrays)
    else:
        formats.check_images(arrays, SOURCES[name].image_shape)


def _verify(name: str, arrays: Arrays, where: str) -> None:
    expected = SOURCES[name].sha256
    if expected is None:
        return
    found = _sha256(*(arrays[key] for key in formats.IMAGE_KEYS))
    if found != expected:
        raise ValueError(
            f"data set {name!r} from {where} is not the published one (sha256 {found[:12]}… instead of "
            f"{expected[:12]}…): remove it; if it is another data set, put it into a folder called after that; or give "
            f"data.path=DIR (in Python path=) to use your own copy as it is"
        )


def _sha256(*arrays: npt.NDArray[Any]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array, np.uint8).tobytes())
    return digest.hexdigest()


def _in_original_order(name: str, arrays: Arrays) -> Arrays:
    """The batches of the training data as they were published: splits name examples by their place.

    The hub's copy of CIFAR-10 begins with the fourth of its five batches, as the archive does that it was made from.
    Anything but another order of the same batches is left as it is.
    """
    batches = SOURCES[name].batches
    if not batches or len(arrays["y_train"]) % len(batches):
        return arrays
    parts = np.split(np.arange(len(arrays["y_train"])), len(batches))
    found = [_sha256(arrays["x_train"][part[0] : part[-1] + 1], arrays["y_train"][part]) for part in parts]
    if tuple(found) == batches or sorted(found) != sorted(batches):
        return arrays
    order = np.concatenate([parts[found.index(batch)] for batch in batches])
    return arrays | {key: arrays[key][order] for key in ("x_train", "y_train")}


def _fetch(name: str) -> Arrays:
    """The arrays from the Hugging Face hub; any failure there means that the data set is absent."""
    hub = SOURCES[name].hub
    if hub is None:
        raise _missing(name, "it cannot be downloaded automatically")
    try:
        import datasets
    except ImportError as error:
        raise _missing(name, f"or pip install 'bcfl[data]' to download {hub.repository}") from error
    arrays: Arrays = {}
    progress = console_for(stderr=True)
    try:
        for split in ("train", "test"):
            rows = datasets.load_dataset(hub.repository, hub.config, split=split)
            pairs = [
                (np.asarray(row[hub.image], np.uint8), row[hub.label])
                for row in track(rows, f"unpacking {name} {split}", len(rows), console=progress, transient=True)
            ]
            arrays[f"x_{split}"] = np.stack([pixels[..., :3] if pixels.ndim == 3 else pixels for pixels, _ in pairs])
            arrays[f"y_{split}"] = np.array([label for _, label in pairs], np.uint8)
        _check(name, arrays)
        arrays = _in_original_order(name, arrays)
    except Exception as error:  # network, hub, pyarrow and Pillow each have errors of their own
        raise _missing(name, f"downloading {hub.repository} failed: {one_line(error)}") from error
    return arrays


def _store(name: str, arrays: Arrays) -> None:
    """The cache holds the arrays, whole or not at all."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / f"{name}.npz", shared=True) as file:
        np.savez(file, allow_pickle=False, **arrays)


def _missing(name: str, advice: str) -> FileNotFoundError:
    source = SOURCES[name]
    places = [str(place) for place in (cache_folder(), source.package) if place is not None]
    package = f", install the system package {source.package_name}" if source.package else ""
    return FileNotFoundError(
        f"data set {name!r} not found in {', '.join(places)}: put {_wanted(name)} into {cache_folder() / name}, or "
        f"give data.path=DIR (in Python path=), a directory with that{package}; {advice}"
    )


def _wanted(name: str) -> str:
    """The files that are the data set, in any of its formats."""
    return " or ".join([f"{name}.npz", *(" + ".join(raw.files) for raw in SOURCES[name].formats)])


def one_line(error: Exception) -> str:
    """What a library had to say, whatever its layout."""
    return " ".join(f"{type(error).__name__}: {error}".split())
