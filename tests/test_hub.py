"""Hugging Face datasets as clients: dict rows, images, texts, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bcfl

datasets = pytest.importorskip("datasets")
Image = pytest.importorskip("PIL.Image")


def rows(count: int = 24) -> Any:
    rng = np.random.default_rng(0)
    label = rng.integers(0, 2, count)
    images = [Image.fromarray(np.full((4, 4), 200 * one, np.uint8)) for one in label]
    columns = {
        "image": images,
        "text": ["good day" if one else "bad" for one in label],
        "label": label.tolist(),
        "kind": ["yes" if one else "no" for one in label],
        "writer": ["ann", "bob", "cyd"] * (count // 3),
    }
    return datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())


def test_rows_of_images_become_clients_by_their_writers() -> None:
    clients = bcfl.from_datasets(rows(), x="image", y="label", by="writer")
    assert list(clients) == ["ann", "bob", "cyd"]
    one = clients["bob"]
    assert one["x"].shape == (6, 1, 4, 4)
    assert one["x_test"].shape == (2, 1, 4, 4)
    assert torch.equal(one["x"][:, 0, 0, 0] > 0, one["y"] == 1)
    assert float(one["x"].max()) == pytest.approx(200 / 255)

    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 2))

    result = bcfl.train(model, clients, method="fedavg", rounds=5, progress=False)
    assert result.by_site()["cyd"]["accuracy"] == 1.0


def test_texts_are_read_by_a_function_and_classes_may_be_texts() -> None:
    def lengths(texts: list[str]) -> Any:
        return [[len(text)] for text in texts]

    clients = bcfl.from_datasets(rows(), x="text", y="kind", by="writer", read=lengths, test=0.5)
    one = clients["ann"]
    assert torch.equal(one["x"][:, 0] == 8, one["y"] == 1)
    assert len(one["y"]) == len(one["y_test"]) == 4


def test_a_split_of_the_dataset_is_kept() -> None:
    parts = datasets.DatasetDict({"train": rows(24), "test": rows(12)})
    clients = bcfl.from_datasets(parts, x="image", y="label", by="writer")
    assert [(len(one["y"]), len(one["y_test"])) for one in clients.values()] == [(8, 4)] * 3
    named = bcfl.from_datasets({"here": parts, "there": rows()}, x="image", y="label")
    assert [(len(one["y"]), len(one["y_test"])) for one in named.values()] == [(24, 12), (18, 6)]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"x": "picture"}, "has no column 'picture'; its columns: image, text"),
        ({"x": "text"}, "client 'ann': column 'text' holds texts: read= must make numbers of them"),
        ({"by": None}, "by must name the column of clients"),
        ({"read": lambda values: [[1.0]]}, "client 'ann': read made 1 rows of the 8 of column 'image'"),
    ],
)
def test_what_cannot_be_read_is_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        bcfl.from_datasets(rows(), **{"x": "image", "y": "label", "by": "writer", **options})


def test_images_of_several_sizes_and_rows_without_a_label_are_refused() -> None:
    uneven = rows(3).to_dict()
    sizes = [Image.fromarray(np.zeros((4 + place, 4), np.uint8)) for place in range(3)]
    made = datasets.Dataset.from_dict({**uneven, "image": sizes, "writer": ["ann"] * 3}).cast_column(
        "image", datasets.Image()
    )
    with pytest.raises(ValueError, match="the rows of column 'image' differ in shape"):
        bcfl.from_datasets(made, x="image", y="label", by="writer")
    unlabelled = rows(3).remove_columns("label").add_column("label", [0, None, 1])
    with pytest.raises(ValueError, match="client 'bob': column 'label' has no value"):
        bcfl.from_datasets(unlabelled, x="image", y="label", by="writer")
