"""Data cut into clients: by domain, by label or by a shared file.

Every example goes to exactly one client, or to none and is then counted. A split is a function of the
data's labels or domains, the specification and the seed alone.
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bcfl.data.datasets import Dataset
from bcfl.data.split_file import Ints, read_split
from bcfl.data.tables import Form
from bcfl.likelihood import CATEGORICAL, Likelihood
from bcfl.randomness import numpy_generator

Floats = npt.NDArray[np.float64]

SPECIFICATIONS = {
    "feature(G,n)": "G domains, n clients each, equal random parts",
    "label(G,n,alpha)": "G groups that differ in their labels, by Dirichlet(alpha), n similar clients in each",
    "label(0,n,alpha)": "n clients that differ in their labels, by Dirichlet(alpha), no groups",
    "file": "the client of every example is read from an .npz file",
}
MAX_DRAWS = 1000  # a split that no draw of so many satisfies is refused, not waited for
CLIENT_ALPHA = 10.0  # clients of one group are nearly alike
MIN_GROUP_SHARE = 0.3  # of an equal share of the test set
LEAST = (10, 1)  # training and test examples of a client, unless somebody says otherwise
# Errors name the setting for the command line first, then the argument for Python.
SMALLEST = "data.min_examples and data.min_test_examples (in Python least=)"


@dataclass(frozen=True)
class Drift:
    """A change of who holds what in mid-run; only simulations know of one beforehand."""

    round: int  # the first round of the new order
    source: Tensor  # (client,) -> the client whose data it holds from then on


@dataclass(frozen=True)
class FederatedData:
    """All clients' data: shared pools of examples and, per client, the indices that it holds."""

    x_train: Tensor  # (example, ...)
    y_train: Tensor  # (example,)
    x_test: Tensor  # (test example, ...)
    y_test: Tensor  # (test example,)
    train_of: tuple[Tensor, ...]  # client -> int64 indices into x_train, ascending
    test_of: tuple[Tensor, ...]  # client -> int64 indices into x_test, ascending, perhaps none
    group: Tensor | None  # (client,) true group, where known
    num_classes: int
    num_unused: int  # training and test examples that no client holds
    description: str
    drift: Drift | None = None
    names: tuple[str, ...] | None = None  # (client,) where clients have names
    form: Form | None = None  # how rows of a table become examples, where the clients are a table's sites
    likelihood: Likelihood = CATEGORICAL  # what y is

    @property
    def num_clients(self) -> int:
        return len(self.train_of)

    def group_in(self, round_index: int) -> Tensor | None:
        """The true group of every client in that round, where known."""  # (client,)
        if self.group is None or self.drift is None or round_index < self.drift.round:
            return self.group
        return self.group[self.drift.source]

    @property
    def train_of_at_the_end(self) -> tuple[Tensor, ...]:
        """The training examples that every client holds once all changes are done."""  # [client] -> rows of x_train
        return self._at_the_end(self.train_of)

    @property
    def test_of_at_the_end(self) -> tuple[Tensor, ...]:
        """The test examples that every client holds once all changes are done."""  # [client] -> rows of x_test
        return self._at_the_end(self.test_of)

    def _at_the_end(self, held: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return held if self.drift is None else tuple(held[source] for source in self.drift.source.tolist())

    @property
    def num_examples(self) -> Tensor:
        """The number of training examples of every client, (client,)."""
        return torch.tensor([len(held) for held in self.train_of])

    @cached_property
    def content_hash(self) -> str:
        """Of all examples and labels, bit by bit: for data that have no name by which to know them."""
        digest = hashlib.sha256()
        for pool in (self.x_train, self.y_train, self.x_test, self.y_test):
            digest.update(f"{pool.dtype} {tuple(pool.shape)}".encode())
            for part in pool.split(4096):  # a copy of all of them might not fit
                digest.update(part.contiguous().numpy().tobytes())
        return digest.hexdigest()


def partition(
    dataset: Dataset,
    spec: str,
    seed: int,
    *,
    share_floor: float = 0.0,
    least: tuple[int, int] = LEAST,
    path: str | Path | None = None,
    clients_per_group: int | None = None,
) -> FederatedData:
    """Every example of `dataset` belongs to one client, as `spec` says (see SPECIFICATIONS).

    `share_floor` (label only) rounds each share of a class down to a multiple of itself, first the group's
    share of the class, then the client's share of the group's part: 0.01 is what the paper's code does. What
    is lost that way is counted in `num_unused`.
    A draw that leaves a client below the `least` training or test examples is drawn again, MAX_DRAWS times; a file is
    taken as it is.
    `path` and `clients_per_group` (true group = client // clients_per_group) belong to `file`.
    """
    cut = parse_specification(spec, share_floor, least)
    if cut.kind == "file":
        if path is None:
            raise ValueError(
                "partition 'file' needs data.partition_file=FILE (in Python path=), an .npz file with train_client and "
                "test_client"
            )
        clients_of = read_split(Path(path), dataset, clients_per_group)
        return _federated(dataset, *clients_of, f"{dataset.name} file {Path(path).name}")
    if path is not None or clients_per_group is not None:
        raise ValueError(
            f"data.partition_file (in Python path=) and clients_per_group belong to partition 'file', not to {spec!r}"
        )
    if cut.kind == "feature":
        kinds, num_kinds = _domains(dataset, cut), cut.num_groups
    else:
        kinds, num_kinds = (dataset.y_train.numpy(), dataset.y_test.numpy()), dataset.num_classes
    totals = np.bincount(kinds[0], minlength=num_kinds), np.bincount(kinds[1], minlength=num_kinds)
    counts = _equal_counts(cut, totals) if cut.kind == "feature" else _drawn_counts(cut, totals, seed)
    train_client = _deal(kinds[0], counts[0], seed, "train")
    test_client = _deal(kinds[1], counts[1], seed, "test")
    group = np.arange(cut.num_clients) // cut.clients if cut.num_groups else None
    floor = f" share_floor {share_floor:g}" if share_floor else ""
    return _federated(dataset, train_client, test_client, group, f"{dataset.name} {spec} seed {seed}{floor}")


@dataclass(frozen=True)
class Cut:
    """A specification, read and checked."""

    text: str
    kind: str
    num_groups: int = 0
    clients: int = 0  # per group, or all where there are no groups
    alpha: float = 0.0
    share_floor: float = 0.0
    least: tuple[int, int] = (1, 0)  # training and test examples of a client

    @property
    def num_clients(self) -> int:
        return max(self.num_groups, 1) * self.clients


def parse_specification(spec: str, share_floor: float, least: tuple[int, int]) -> Cut:
    found = re.fullmatch(r"(\w+)(?:\(([^()]+)\))?", spec.replace(" ", ""))
    kind, inside = found.groups() if found else ("", None)
    numbers: dict[str, tuple[Callable[[str], Any], ...]] = {
        "file": (),
        "feature": (int, int),
        "label": (int, int, float),
    }
    try:
        texts = inside.split(",") if inside else []
        cut = Cut(spec, kind, *(read(text) for read, text in zip(numbers[kind], texts, strict=True)))
        valid = kind == "file" or (cut.clients >= 1 and cut.num_groups >= (kind == "feature"))
        valid = valid and (kind != "label" or 0 < cut.alpha < np.inf)
    except (KeyError, ValueError):
        valid = False
    if not valid:
        raise ValueError(
            f"partition {spec!r} is not one of {', '.join(SPECIFICATIONS)} "
            f"(whole numbers G and n of at least 1, alpha above 0)"
        )
    if not 0 <= share_floor < 1:
        raise ValueError(f"share_floor = {share_floor}: must be at least 0 and below 1")
    if share_floor and kind != "label":
        raise ValueError(f"share_floor = {share_floor}: only label(...) has shares to floor, not {spec!r}")
    if kind == "file" and least != LEAST:
        raise ValueError(f"partition 'file' is taken as it is, so it goes without {SMALLEST}")
    if least[0] < 1 or least[1] < 0:
        raise ValueError(f"least = {least}: must be at least 1 and 0")
    return replace(cut, share_floor=share_floor, least=least)


def _domains(dataset: Dataset, cut: Cut) -> tuple[Ints, Ints]:
    if dataset.domain_train is None or dataset.domain_test is None:
        raise ValueError(f"partition {cut.text!r}: data set {dataset.name!r} has no domains; use label(G,n,alpha)")
    if cut.num_groups != len(dataset.domain_names):
        raise ValueError(
            f"partition {cut.text!r}: G must be {len(dataset.domain_names)}, the number of domains of "
            f"{dataset.name!r} ({', '.join(dataset.domain_names)})"
        )
    return dataset.domain_train.numpy(), dataset.domain_test.numpy()


def _equal_counts(cut: Cut, totals: tuple[Ints, Ints]) -> tuple[Ints, Ints]:
    """How many training and test examples of each domain each client gets, (client, domain) twice."""
    if cut.num_clients <= totals[0].sum():  # more may not even fit into memory
        shares = np.kron(np.eye(cut.num_groups), np.full((cut.clients, 1), 1 / cut.clients))
        counts = _counts(shares, totals[0]), _counts(shares, totals[1])
        if not _too_small(counts, cut.least):
            return counts
    raise ValueError(
        f"partition {cut.text!r}: equal parts leave a client with fewer than {cut.least[0]} training or "
        f"{cut.least[1]} test examples; use fewer clients or smaller {SMALLEST}"
    )


def _drawn_counts(cut: Cut, totals: tuple[Ints, Ints], seed: int) -> tuple[Ints, Ints]:
    """How many training and test examples of each class each client gets, (client, class) twice.

    Both are cut by the same shares, so a client is tested on its own distribution.
    """
    blame = "there is too little data to give"
    if all(cut.num_clients * few <= total.sum() for few, total in zip(cut.least, totals, strict=True)):
        blame = f"none of {MAX_DRAWS} draws gave"
        for draw in range(MAX_DRAWS):
            shares = _drawn_shares(cut, totals[1], numpy_generator(seed, "partition", "shares", draw))
            if shares is None:
                continue
            counts = _counts(shares, totals[0]), _counts(shares, totals[1])
            if not _too_small(counts, cut.least):
                return counts
    groups = f" and each group {MIN_GROUP_SHARE:.0%} of an equal share of the test set" if cut.num_groups else ""
    raise ValueError(
        f"partition {cut.text!r}: {blame} each of {cut.num_clients} clients {cut.least[0]} training and "
        f"{cut.least[1]} test examples (of {totals[0].sum()} and {totals[1].sum()}){groups}; use fewer groups or "
        f"clients, a larger alpha or smaller {SMALLEST}"
    )


def _drawn_shares(cut: Cut, num_test: Ints, rng: np.random.Generator) -> Floats | None:
    """Every client's share of every class, or None where a group is too small, (client, class)."""
    num_classes = len(num_test)
    if not cut.num_groups:
        return _shares(rng, cut.alpha, cut.clients, num_classes, cut.share_floor)
    of_group = _shares(rng, cut.alpha, cut.num_groups, num_classes, cut.share_floor)  # (group, class)
    if (of_group @ num_test).min() < MIN_GROUP_SHARE * num_test.sum() / cut.num_groups:
        return None
    return np.concatenate(
        [_shares(rng, CLIENT_ALPHA, cut.clients, num_classes, cut.share_floor) * of for of in of_group]
    )


def _shares(rng: np.random.Generator, alpha: float, parts: int, classes: int, floor: float) -> Floats:
    """Dirichlet(alpha) shares of the parts in each class, rounded down to multiples of `floor`, (part, class)."""
    shares = rng.dirichlet(np.full(parts, alpha), size=classes).T
    return np.floor(shares / floor) * floor if floor else shares


def _counts(shares: Floats, totals: Ints) -> Ints:
    """Whole numbers within one of share × total whose sum is complete where the shares' sum is, (client, kind)."""
    ends = np.rint(np.cumsum(shares, axis=0) * totals).astype(np.int64)
    return np.diff(ends, axis=0, prepend=0)


def _too_small(counts: tuple[Ints, Ints], least: tuple[int, int]) -> bool:
    return any(count.sum(axis=1).min() < few for count, few in zip(counts, least, strict=True))


def _deal(kind_of: Ints, counts: Ints, seed: int, pool: str) -> Ints:
    """The client of every example, -1 for none: `counts[client, kind]` random examples of each kind, (example,)."""
    client_of = np.full(len(kind_of), -1)
    for kind in range(counts.shape[1]):
        shuffled = numpy_generator(seed, "partition", pool, kind).permutation(np.flatnonzero(kind_of == kind))
        dealt = np.repeat(np.arange(len(counts)), counts[:, kind])
        client_of[shuffled[: len(dealt)]] = dealt
    return client_of


def _federated(
    dataset: Dataset, train_client: Ints, test_client: Ints, group: Ints | None, description: str
) -> FederatedData:
    num_clients = int(max(train_client.max(initial=-1), test_client.max(initial=-1))) + 1
    return FederatedData(
        *(dataset.x_train, dataset.y_train, dataset.x_test, dataset.y_test),
        train_of=_held(train_client, num_clients),
        test_of=_held(test_client, num_clients),
        group=None if group is None else torch.from_numpy(group),
        num_classes=dataset.num_classes,
        num_unused=int((train_client < 0).sum() + (test_client < 0).sum()),
        description=description,
    )


def _held(client_of: Ints, num_clients: int) -> tuple[Tensor, ...]:
    order = np.argsort(client_of, kind="stable")  # the examples of no client (-1) first, ascending in each client
    sizes = np.bincount(client_of + 1, minlength=num_clients + 1)
    return torch.split(torch.from_numpy(order), sizes.tolist())[1:]
