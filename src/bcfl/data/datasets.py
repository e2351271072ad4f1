"""Data sets by name, as tensors ready for training."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from bcfl.data.formats import REVIEW_DOMAINS, Array, Arrays, review_counts
from bcfl.data.heart import heart
from bcfl.data.preparation import RARE
from bcfl.data.sources import find
from bcfl.data.tables import TEST_SHARE, Table, table
from bcfl.randomness import numpy_generator

# Mean and standard deviation of each channel over the training images, pixels in [0, 1].
FASHION_MNIST_PIXELS = ((0.2860,), (0.3530,))
CIFAR10_PIXELS = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
DIGIT_PIXELS = ((0.5,) * 3, (0.5,) * 3)  # to [-1, 1]
DIGIT_SIZE = 28
DIGITS_FIVE = ("mnist", "mnistm", "usps", "svhn", "synthetic_digits")
DIGIT_DOMAINS = (*DIGITS_FIVE, "svhn_small", "optdigits")
SITES = "sites"  # how a table is cut into clients


@dataclass(frozen=True)
class Dataset:
    """A labelled data set, split for training and testing, with the domain of every example where it has several."""

    name: str
    x_train: Tensor  # float32 (example, ...); images (example, channel, height, width) in channels_last memory
    y_train: Tensor  # int64 (example,)
    x_test: Tensor
    y_test: Tensor
    domain_train: Tensor | None  # int64 (example,) -> domain
    domain_test: Tensor | None
    domain_names: tuple[str, ...]
    num_classes: int


@dataclass(frozen=True)
class DatasetEntry:
    """How a data set is called for."""

    description: str
    build: Callable[..., Dataset | Table]
    model: str  # that it is trained with, unless another is asked for
    has_sites: bool = False  # it is a table, and its sites are the clients

    @property
    def options(self) -> dict[str, Any]:
        """The options that `load` takes for it, with their defaults."""
        return dict(self.build.__kwdefaults__ or {})


def full_name(name: str, domains: Sequence[str] | None = None) -> str:
    """What a data set is called with these domains: other digits are never called Digits-Five."""
    return name if domains is None or tuple(domains) == DIGITS_FIVE else f"{name}[{','.join(domains)}]"


def load(name: str, path: str | Path | None = None, **options: Any) -> Dataset | Table:
    """The data set `name`, from `path` if given, else from the cache, a system package or the Hugging Face hub.

    Those are searched in that order; of `digits_five` every domain that is not bundled must lie in `path`, if given.
    """
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown data set {name!r}; there are {', '.join(DATASETS)}{hint}")
    entry = DATASETS[name]
    for option in sorted(options.keys() - entry.options.keys()):
        allowed = ", ".join(entry.options) or "none"
        raise ValueError(f"data set {name!r} has no option {option!r}; its options: {allowed}")
    return entry.build(path, **options)


def _digits(path: str | Path | None, *, rotations: Sequence[int] = (0, 90, 180, 270)) -> Dataset:
    """Each rotation is a domain of all images; an image is for training in all or for testing in all."""
    if path is not None:
        raise ValueError(f"data set 'digits' is bundled: data.path (in Python path=) must not be given, got {path}")
    if len(rotations) == 0 or any(angle % 90 for angle in rotations):
        raise ValueError(f"rotations = {rotations}: must be multiples of 90 degrees, at least one")
    if len({angle % 360 for angle in rotations}) < len(rotations):
        raise ValueError(f"rotations = {rotations}: each may be given once")
    base = _optdigits()
    domains = torch.arange(len(rotations))
    return Dataset(
        name="digits",
        x_train=_turned(base["x_train"], rotations),
        y_train=_labels(base["y_train"]).repeat(len(rotations)),
        x_test=_turned(base["x_test"], rotations),
        y_test=_labels(base["y_test"]).repeat(len(rotations)),
        domain_train=domains.repeat_interleave(len(base["y_train"])),
        domain_test=domains.repeat_interleave(len(base["y_test"])),
        domain_names=tuple(f"rotation {angle}" for angle in rotations),
        num_classes=10,
    )


def _turned(images: Array, rotations: Sequence[int]) -> Tensor:
    """All images turned by each angle, one rotation after another, values in [0, 1]."""
    turned = np.concatenate([np.rot90(images, angle // 90, axes=(1, 2)) for angle in rotations])
    return _pixels(turned, 16, ((0.0,), (1.0,)))


def _fashion_mnist(path: str | Path | None) -> Dataset:
    return _images("fashion_mnist", path, FASHION_MNIST_PIXELS)


def _cifar10(path: str | Path | None) -> Dataset:
    return _images("cifar10", path, CIFAR10_PIXELS)


def _images(name: str, path: str | Path | None, pixels: tuple[Sequence[float], Sequence[float]]) -> Dataset:
    raw = find(name, path)
    return Dataset(
        name=name,
        x_train=_pixels(raw["x_train"], 255, pixels),
        y_train=_labels(raw["y_train"]),
        x_test=_pixels(raw["x_test"], 255, pixels),
        y_test=_labels(raw["y_test"]),
        domain_train=None,
        domain_test=None,
        domain_names=(),
        num_classes=10,
    )


def _amazon_review(path: str | Path | None, *, seed: int = 0) -> Dataset:
    """Every domain is cut by chance, `seed` says how: the reviews have no published split."""
    raw = find("amazon_review", path)
    counts = review_counts(raw).astype(np.float32)
    domain, label = _labels(raw["domain"]), _labels(raw["y"])
    train, test = _cut(raw["domain"], seed, "amazon_review")
    return Dataset(
        name="amazon_review",
        x_train=torch.from_numpy(counts[train].toarray()),
        y_train=label[train],
        x_test=torch.from_numpy(counts[test].toarray()),
        y_test=label[test],
        domain_train=domain[train],
        domain_test=domain[test],
        domain_names=REVIEW_DOMAINS,
        num_classes=2,
    )


def _digits_five(path: str | Path | None, *, domains: Sequence[str] = DIGITS_FIVE) -> Dataset:
    """The digits of each domain as colour images of one size."""
    unknown = [domain for domain in domains if domain not in DIGIT_DOMAINS]
    if unknown or len(domains) == 0 or len(set(domains)) < len(domains):
        raise ValueError(f"domains = {list(domains)}: must be one or more of {', '.join(DIGIT_DOMAINS)}, each once")
    if path is not None and Path(path).is_file() and len(domains) > 1:
        raise ValueError(
            f"path {path}: is one file, but {len(domains)} domains are wanted; give their directory as data.path=DIR "
            f"(in Python path=)"
        )
    try:
        raw = [_optdigits() if domain == "optdigits" else find(domain, path) for domain in domains]
    except FileNotFoundError as error:
        advice = "or leave this domain out: list the others in data.domains (in Python domains=)"
        raise FileNotFoundError(f"digits_five: {error}; {advice}") from error
    domain = torch.arange(len(raw))
    return Dataset(
        name=full_name("digits_five", domains),
        x_train=_resized([one["x_train"] for one in raw], domains),
        y_train=torch.cat([_labels(one["y_train"]) for one in raw]),
        x_test=_resized([one["x_test"] for one in raw], domains),
        y_test=torch.cat([_labels(one["y_test"]) for one in raw]),
        domain_train=domain.repeat_interleave(torch.tensor([len(one["y_train"]) for one in raw])),
        domain_test=domain.repeat_interleave(torch.tensor([len(one["y_test"]) for one in raw])),
        domain_names=tuple(domains),
        num_classes=10,
    )


def _table(
    path: str | Path | None,
    *,
    site: str | None = None,
    target: str | Sequence[str] | None = None,
    test: Any = TEST_SHARE,
    likelihood: str | None = None,
    categories: Sequence[str] = (),
    drop: Sequence[str] = (),
    person: str | None = None,
    weight: str | None = None,
    offset: str | None = None,
    exposure: str | None = None,
    rare: int = RARE,
    seed: int = 0,
) -> Table:
    """A file of the user's own."""
    for key, value in {"path": path, "site": site, "target": target}.items():
        if value is None:
            raise ValueError(
                f"data set 'table' needs data.{key}: the file, its column of sites, and the one to predict"
            )
    how = {"likelihood": likelihood, "categories": categories, "drop": drop, "person": person, "rare": rare}
    columns = {"weight": weight, "offset": offset, "exposure": exposure}
    return table(path, str(site), target or "", test=test, seed=seed, **columns, **how)  # type: ignore[arg-type]


DATASETS = {
    "digits": DatasetEntry("scikit-learn's 8×8 digits, turned; each rotation is a domain (bundled)", _digits, "mlp"),
    "fashion_mnist": DatasetEntry(
        "Fashion-MNIST, 28×28 grey images of clothes, 10 classes", _fashion_mnist, "fashion_cnn"
    ),
    "cifar10": DatasetEntry("CIFAR-10, 32×32 colour images, 10 classes", _cifar10, "cifar_cnn"),
    "amazon_review": DatasetEntry(
        "Amazon reviews as counts of 5000 words, 4 domains, 2 classes", _amazon_review, "amazon_mlp"
    ),
    "digits_five": DatasetEntry(
        "digits of five origins as 28×28 colour images; each origin is a domain", _digits_five, "digits_five_cnn"
    ),
    "heart": DatasetEntry("UCI Heart Disease, patients of four hospitals (bundled)", heart, "linear", has_sites=True),
    "table": DatasetEntry("a .csv or .parquet file of your own (data.path)", _table, "table", has_sites=True),
}


def _optdigits() -> Arrays:
    """scikit-learn's digits, 0 … 16, cut once and for all so that every use of them has the same test images."""
    from sklearn.datasets import load_digits  # here, because importing it takes a second

    bundled = load_digits()
    images, labels = bundled.images.astype(np.uint8), bundled.target.astype(np.uint8)
    train, test = _cut(labels, 0, "optdigits")
    return {"x_train": images[train], "y_train": labels[train], "x_test": images[test], "y_test": labels[test]}


def _cut(kinds: Array, seed: int, name: str) -> tuple[Array, Array]:
    """Ascending indices for training and testing, with TEST_SHARE of every kind for testing."""
    test = np.zeros(len(kinds), bool)
    for kind in np.unique(kinds):
        members = numpy_generator(seed, "test split", name, int(kind)).permutation(np.flatnonzero(kinds == kind))
        test[members[: round(TEST_SHARE * len(members))]] = True
    return np.flatnonzero(~test), np.flatnonzero(test)


def _pixels(images: Array, full: int, pixels: tuple[Sequence[float], Sequence[float]]) -> Tensor:
    """(value / full − mean) / deviation per channel, (example, channel, height, width); `full` is white."""
    mean, deviation = (torch.tensor(values) for values in pixels)
    shape = (*images.shape[:3], len(mean))
    x = torch.from_numpy(np.require(images, requirements=("C", "W"))).reshape(len(images), -1)
    row = x.shape[1] // len(mean)  # whole rows at once are much faster than a channel axis of length 3
    scaled = x.to(torch.float32).mul_((1 / (full * deviation)).repeat(row)).sub_((mean / deviation).repeat(row))
    return scaled.reshape(shape).permute(0, 3, 1, 2)  # channels last in memory: no copy is made


def _resized(parts: Sequence[Array], domains: Sequence[str]) -> Tensor:
    """All parts as one tensor of DIGIT_SIZE² RGB images in [-1, 1], (example, channel, height, width)."""
    x = torch.empty(sum(map(len, parts)), DIGIT_SIZE, DIGIT_SIZE, 3)
    start = 0
    for images, domain in zip(parts, domains, strict=True):
        for chunk in np.array_split(images, len(images) // 4096 + 1):  # so that memory peaks at the result's size
            colour = chunk if chunk.ndim == 4 else np.repeat(chunk[..., None], 3, axis=-1)
            small = _pixels(colour, 16 if domain == "optdigits" else 255, DIGIT_PIXELS)
            if small.shape[-2:] != (DIGIT_SIZE, DIGIT_SIZE):
                small = interpolate(small, (DIGIT_SIZE, DIGIT_SIZE), mode="bilinear", antialias=True)
            x[start : start + len(chunk)] = small.permute(0, 2, 3, 1)
            start += len(chunk)
    return x.permute(0, 3, 1, 2)


def _labels(labels: Array) -> Tensor:
    return torch.from_numpy(labels.astype(np.int64))
