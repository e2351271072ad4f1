"""Clients whose data are opened when they are asked, and let go after: memory depends on who takes part, not on all.

    clients = bcfl.lazy([bcfl.rows("all.parquet", 64 * c, 64 * (c + 1), target="y") for c in range(1000)])

A client may be anything that `bcfl.train` takes, found by a function: generated, read from a file, a torch Dataset.
What a client holds must be the same whenever it is opened.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bcfl.data.arrays import from_arrays, gathered
from bcfl.data.partition import FederatedData
from bcfl.likelihood import CATEGORICAL, Likelihood

SAMPLED = 32  # clients that are opened beforehand, to see what their data are like


@dataclass(frozen=True)
class LazyClients:
    """So many clients, of whom only the numbers of examples are known until they are opened."""

    opener: Callable[[int], Any]
    num_examples: Tensor  # (client,)
    group: Tensor | None = None  # (client,) true group, where known
    description: str = "clients opened when asked"
    said: Likelihood | None = None  # what y is; None: as the first clients' y say
    drift: None = None
    names: None = None
    form: None = None

    @property
    def num_clients(self) -> int:
        return len(self.num_examples)

    def group_in(self, round_index: int) -> Tensor | None:
        """The true group of every client, where known: it never changes."""
        return self.group

    def open(self, clients: Sequence[int]) -> FederatedData:
        """The data of these clients, in their order, as a federation of their own; a change of size is refused."""
        return self._read(clients, self.likelihood)

    def _read(self, clients: Sequence[int], likelihood: Likelihood | None) -> FederatedData:
        held = from_arrays([_open(self.opener, client) for client in clients], likelihood=likelihood)
        for client, rows in zip(clients, held.train_of, strict=True):
            if len(rows) != int(self.num_examples[client]):
                raise ValueError(f"client {client}: holds {len(rows)} examples, but was to hold "
                                 f"{int(self.num_examples[client])}")  # fmt: skip
        return held

    @cached_property
    def sample(self) -> FederatedData:
        """The data of the first clients: what all are like."""
        return self._read(range(min(SAMPLED, self.num_clients)), self.said)

    @property
    def likelihood(self) -> Likelihood:
        """What y is."""
        return self.sample.likelihood

    def record(self) -> dict[str, Any]:
        """What a run writes down of them, ready for JSON."""
        digest = hashlib.sha256(self.num_examples.numpy().astype("<i8").tobytes()).hexdigest()
        return {
            "format": 1,
            "dataset": self.description,
            "opened": "when asked",
            "num_clients": self.num_clients,
            "group": None if self.group is None else self.group.tolist(),
            "num_train_sha256": digest,
            "sample": self.sample.content_hash,
            **({} if self.likelihood == CATEGORICAL else {"likelihood": self.likelihood.spec}),
        }

    def verify(self, kept: Mapping[str, Any]) -> None:
        """Nothing happens if a run has written the same down of its clients."""
        now = self.record()
        for key in ("opened", "num_clients", "num_train_sha256", "sample"):
            if kept.get(key) != now[key]:
                raise ValueError(f"the clients differ from those in the manifest: {key} is {now[key]}, "
                                 f"not {kept.get(key)}")  # fmt: skip


Held = FederatedData | LazyClients


def given_clients(clients: Any) -> Any:
    """A user's clients, opened when asked or as a list or mapping; what is neither is refused."""
    return clients if isinstance(clients, LazyClients) else gathered(clients)


def lazy(
    opener: Callable[[int], Any] | Iterable[Callable[[], Any]],
    num_examples: Sequence[int] | Tensor | None = None,
    *,
    num_clients: int | None = None,
    group: Sequence[int] | Tensor | None = None,
    description: str = "clients opened when asked",
) -> LazyClients:
    """Clients that are opened when they are asked: by a function of their number, or each by a function of its own.

    `num_examples` are each client's training examples; without them every client is opened once, to count, and
    `num_clients` must say how many there are where one function opens them all.
    """
    if not callable(opener):
        one_by_one = list(opener)
        odd = next((place for place, one in enumerate(one_by_one) if not callable(one)), None)
        if odd is not None:
            raise ValueError(f"client {odd}: must be a function that returns its data, "
                             f"got {type(one_by_one[odd]).__name__}")  # fmt: skip
        opener, num_clients = partial(_call, one_by_one), len(one_by_one)
    if num_examples is not None:
        sizes = torch.as_tensor(num_examples, dtype=torch.int64)
    elif num_clients is None:
        raise ValueError("lazy needs num_examples, or num_clients, of clients that one function opens")
    else:
        sizes = torch.tensor([len(from_arrays([_open(opener, c)]).y_train) for c in range(num_clients)])
    if sizes.dim() != 1 or not len(sizes) or int(sizes.min()) < 1:
        raise ValueError("num_examples must be a number of at least 1 for every client, and at least one client")
    groups = None if group is None else torch.as_tensor(group, dtype=torch.int64)
    if groups is not None and groups.shape != sizes.shape:
        raise ValueError(f"group must say the group of each of {len(sizes)} clients, got {len(groups)}")
    return LazyClients(opener, sizes, groups, description)


def _call(clients: Sequence[Callable[[], Any]], client: int) -> Any:
    return clients[client]()


def _open(opener: Callable[[int], Any], client: int) -> Any:
    try:
        return opener(client)
    except Exception as error:  # whatever a user's function raises
        raise ValueError(f"client {client} cannot be opened: {type(error).__name__}: {error}") from error


def rows(source: Any, first: int, last: int, *, target: str | Path = "y", columns: Sequence[str] | None = None) -> Any:
    """A function that reads rows first:last of a file or a data set when it is called, as (x, y), and no more of it.

    `source` is a .npy file of inputs (then `target` is the .npy file of labels), a .parquet file, or a Hugging Face
    dataset; of the latter two `target` is a column, and `columns` are the inputs', by default all others.
    """
    if not isinstance(source, str | Path):
        return partial(_rows_of_dataset, source, first, last, str(target), columns)
    kind = Path(source).suffix
    if kind not in (".npy", ".parquet"):
        raise ValueError(f"rows are read from .npy or .parquet files or from a data set, not from {source}")
    if kind == ".npy":
        return partial(_rows_of_arrays, source, first, last, target)
    return partial(_rows_of_parquet, source, first, last, str(target), columns)


def _rows_of_arrays(x: str | Path, first: int, last: int, y: str | Path) -> tuple[Any, Any]:
    inputs, labels = (np.load(file, mmap_mode="r", allow_pickle=False)[first:last] for file in (x, y))
    return np.array(inputs), np.array(labels)


def _rows_of_parquet(
    path: str | Path, first: int, last: int, target: str, columns: Sequence[str] | None
) -> tuple[Any, Any]:
    from pyarrow.parquet import ParquetFile  # of extra `tables`

    with ParquetFile(path) as file:
        names = [name for name in columns or file.schema_arrow.names if name != target]
        begins = np.cumsum([0, *(file.metadata.row_group(i).num_rows for i in range(file.num_row_groups))])
        wanted = [i for i in range(file.num_row_groups) if begins[i] < last and begins[i + 1] > first]
        if not wanted:
            raise ValueError(f"{path} has {begins[-1]} rows, not {first} to {last}")
        table = file.read_row_groups(wanted, columns=[*names, target])
        table = table.slice(first - int(begins[wanted[0]]), last - first)
    return np.stack([table[name].to_numpy() for name in names], 1), table[target].to_numpy()


def _rows_of_dataset(
    dataset: Any, first: int, last: int, target: str, columns: Sequence[str] | None
) -> tuple[Any, Any]:
    part = dataset[first:last]
    names = [name for name in columns or part if name != target]
    inputs = [np.asarray(part[name], dtype=np.float32) for name in names]
    return (inputs[0] if len(inputs) == 1 else np.stack(inputs, 1)), np.asarray(part[target])
