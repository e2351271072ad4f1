"""A split that somebody shares as an .npz file: the client of every example, and perhaps the true groups."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from bcfl.data.datasets import Dataset
from bcfl.data.formats import Array, Arrays, load_npz

Ints = npt.NDArray[np.int64]


def read_split(path: Path, dataset: Dataset, clients_per_group: int | None) -> tuple[Ints, Ints, Ints | None]:
    """The client of each training and test example, −1 for none, and each client's true group where it is known."""
    if not path.is_file():
        raise FileNotFoundError(f"partition file {path} does not exist")
    try:
        arrays = load_npz(path, ("train_client", "test_client"), ("clients_per_group", "group"))
    except Exception as error:  # whatever the zip and array readers raise on a foreign file
        raise ValueError(f"partition file {path} is damaged or not an .npz file of a split: {error}") from error
    try:
        train, test = _clients(arrays, "train_client", dataset), _clients(arrays, "test_client", dataset)
        sizes = np.bincount(train + 1, minlength=test.max(initial=-1) + 2)[1:]
        if len(sizes) == 0 or sizes.min() == 0:
            raise ValueError(f"client {int(np.argmin(sizes)) if len(sizes) else 0} has no training examples")
        return train, test, _groups(arrays, len(sizes), clients_per_group)
    except ValueError as error:
        raise ValueError(f"partition file {path}: {error}") from None


def _clients(arrays: Arrays, key: str, dataset: Dataset) -> Ints:
    client_of: Array = arrays[key]
    num_examples = len(dataset.y_train if key == "train_client" else dataset.y_test)
    if client_of.shape != (num_examples,) or client_of.dtype.kind not in "iu":
        raise ValueError(f"{key} must be {num_examples} integers, one per example of {dataset.name!r}, "
                         f"but is {client_of.dtype.name} {client_of.shape}")  # fmt: skip
    found = client_of.astype(np.int64)
    # No client is without examples, so there are fewer clients than examples: other numbers are a mistake.
    wrong = found[(found < -1) | (found >= len(dataset.y_train))]
    if len(wrong):
        raise ValueError(f"{key} holds {wrong[0]}; clients are 0, 1, … or -1 for none")
    return found


def _groups(arrays: Arrays, num_clients: int, clients_per_group: int | None) -> Ints | None:
    """By the number that is given, by that in the file, or as the file says for each client."""  # (client,)
    if clients_per_group is None and "clients_per_group" in arrays:
        stored = arrays["clients_per_group"]
        if stored.size != 1 or stored.dtype.kind not in "iu":
            raise ValueError(f"clients_per_group must be one whole number, got {stored}")
        clients_per_group = int(stored.item())
    if clients_per_group is not None:
        if clients_per_group < 1:
            raise ValueError(f"clients_per_group = {clients_per_group}: must be at least 1")
        return np.arange(num_clients) // clients_per_group
    group = arrays.get("group")
    if group is not None and (group.shape != (num_clients,) or group.dtype.kind not in "iu" or group.min() < 0):
        raise ValueError(f"group must be {num_clients} integers from 0, one per client")
    return None if group is None else group.astype(np.int64)
