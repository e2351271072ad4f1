"""The record by which a split is shared and checked."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bcfl.data.partition import FederatedData
from bcfl.data.split_file import Ints
from bcfl.files import replacing
from bcfl.likelihood import CATEGORICAL

FORMAT = 1
# What a split is, coarse before fine, so that the first difference found says most.
COMPARED = (
    *("num_clients", "num_train", "num_test", "train_labels", "test_labels", "group", "num_unused"),
    "sha256",
)


def manifest(
    data: FederatedData, dataset_name: str, spec: str, seed: int, *, share_floor: float = 0.0, content: bool = False
) -> dict[str, Any]:
    """What identifies the split of `data`, ready for JSON: its origin, every client's sizes and labels, its hash.

    With `content` also that of all examples: of a named data set it would say which machine prepared it, to the last
    bit, but clients that somebody made have nothing else that tells them from others.
    """
    record = {
        "format": FORMAT,
        "dataset": dataset_name,
        "partition": spec,
        "seed": seed,
        "share_floor": share_floor,
        "num_clients": data.num_clients,
        "num_train": [len(held) for held in data.train_of],
        "num_test": [len(held) for held in data.test_of],
        **_labels(data),
        "group": None if data.group is None else data.group.tolist(),
        "num_unused": data.num_unused,
        "sha256": _split_hash(data),
    }
    if data.names is not None:
        record["names"] = list(data.names)
    if data.likelihood != CATEGORICAL:
        record["likelihood"] = data.likelihood.spec
    if content:
        record["content"] = data.content_hash
    if data.drift is not None:
        later = data.group_in(data.drift.round)
        record["drift"] = {
            "round": data.drift.round,
            "source": data.drift.source.tolist(),
            "group": None if later is None else later.tolist(),
        }
    return record


def groups_in(record: Mapping[str, Any], round_index: int) -> Tensor | None:
    """The true groups in that round, as a manifest tells them; None where they are not known."""  # (client,)
    if "group" not in record:
        raise ValueError("manifest: key 'group' is missing")
    drift, group = record.get("drift"), record["group"]
    if drift is not None and round_index >= drift["round"]:
        group = drift["group"]
    return None if group is None else torch.tensor(group)


def names_in(record: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The clients' names, as a manifest tells them; None where they have none."""
    return tuple(record["names"]) if record.get("names") is not None else None


def verify_manifest(data: FederatedData, expected: Mapping[str, Any]) -> None:
    """Nothing happens if `data` is split as the manifest says; otherwise a ValueError names what differs."""
    if not isinstance(expected, Mapping):
        raise ValueError("manifest: must hold a JSON object")
    if expected.get("format") != FORMAT:
        raise ValueError(f"manifest: format must be {FORMAT}, not {expected.get('format')!r}")
    for key in COMPARED:
        if key not in expected and key not in ("train_labels", "test_labels"):
            raise ValueError(f"manifest: key {key!r} is missing")
    actual = manifest(data, "", "", 0)
    if "names" in expected and expected["names"] != actual.get("names"):
        raise ValueError("the split differs from its manifest: the clients have other names, or stand in another order")
    for key in COMPARED:
        if actual.get(key) != expected.get(key):
            raise ValueError(
                f"the split differs from its manifest: {_difference(key, actual.get(key), expected.get(key))}"
            )
    if "content" in expected and data.content_hash != expected["content"]:
        raise ValueError("the split differs from its manifest: the labels agree, but the examples are others; whoever "
                         "draws clients at random must draw them from a seed")  # fmt: skip
    if actual.get("drift") != expected.get("drift"):
        raise ValueError("the split differs from its manifest: other clients change their data, or in another round")


def _difference(key: str, actual: Any, expected: Any) -> str:
    if key == "sha256":
        return "the sizes and labels agree, but the examples are others (sha256)"
    if isinstance(actual, list) and isinstance(expected, list) and len(actual) == len(expected):
        client = next(index for index, pair in enumerate(zip(actual, expected, strict=True)) if pair[0] != pair[1])
        return f"{key} of client {client} is {actual[client]}, not {expected[client]}"
    return f"{key} is {str(actual)[:60]}, not {str(expected)[:60]}"


def _labels(data: FederatedData) -> dict[str, Any]:
    """How many examples of each class every client has, where y is a class."""  # (client, class) each
    if not data.num_classes:
        return {}
    return {
        "train_labels": _label_counts(data.train_of, data.y_train, data.num_classes),
        "test_labels": _label_counts(data.test_of, data.y_test, data.num_classes),
    }


def _label_counts(held: Sequence[Tensor], labels: Tensor, num_classes: int) -> list[list[int]]:
    holder = client_of(held, len(labels))
    kept = holder >= 0
    flat = np.bincount(holder[kept] * num_classes + labels.numpy()[kept], minlength=len(held) * num_classes)
    return [[int(count) for count in row] for row in flat.reshape(len(held), num_classes)]


def _split_hash(data: FederatedData) -> str:
    """Of every client's indices, as little-endian 64-bit numbers behind their count."""
    digest = hashlib.sha256()
    for held in (*data.train_of, *data.test_of):
        digest.update(len(held).to_bytes(8, "little"))
        digest.update(held.numpy().astype("<i8").tobytes())
    return digest.hexdigest()


def client_of(held: Sequence[Tensor], num_examples: int) -> Ints:
    """The client that holds each example, −1 where none does."""  # (example,)
    holder = np.full(num_examples, -1)
    sizes = [len(one) for one in held]
    holder[torch.cat(tuple(held)).numpy()] = np.repeat(np.arange(len(held)), sizes)
    return holder


def save_partition(path: str | Path, data: FederatedData) -> None:
    """The file at `path` holds the split of `data`, to be loaded with partition 'file'."""
    arrays = {
        "train_client": client_of(data.train_of, len(data.y_train)),
        "test_client": client_of(data.test_of, len(data.y_test)),
    }
    if data.group is not None:
        arrays["group"] = data.group.numpy()
    with replacing(Path(path), shared=True) as file:
        np.savez_compressed(file, allow_pickle=False, **{key: value.astype(np.int32) for key, value in arrays.items()})
