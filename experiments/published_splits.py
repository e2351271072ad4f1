"""Draw the splits of the published scripts again, from labels alone, and write the one of table 2.

python experiments/published_splits.py [FOLDER]   FOLDER as data.path; by default data are looked for as in every run

Nothing is written unless the drawing gives the two known splits, of Fashion-MNIST and CIFAR-10 in four groups, to the
last example. Of label(0,40,0.1) the published code then leaves out clients with few test examples and lets copies of
others stand for them: here they are left out, and nobody is copied. How few is what it asks of groups; that it asks the
same of clients is assumed.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bcfl.data.datasets import Dataset, load
from bcfl.data.manifest import client_of
from bcfl.files import replacing

Ints = NDArray[np.int64]
SPLITS = Path(__file__).resolve().parent / "splits"
WITHOUT_GROUPS = SPLITS / "fashion_mnist-without_groups.npz"
SEED = 1  # that of the published scripts, set once, when they are imported
SHARE = 0.01  # shares of a class are whole percents
LEAST = 0.3  # of an equal share of the test examples; a client with less is left out


def draw(labels_of: tuple[Ints, Ints], stages: list[tuple[int, float]]) -> list[tuple[Ints, Ints]]:
    """The training and test examples of each client: every stage cuts each part of the one before by a draw of its own.

    A stage is (parts, α). What a part gets of a class are the next ones in the data's order: nothing is shuffled.
    """
    random = np.random.RandomState(SEED)  # the stream of numpy.random.seed
    parts = [(np.arange(len(labels_of[0])), np.arange(len(labels_of[1])))]
    for num_parts, alpha in stages:
        parts = [smaller for part in parts for smaller in _cut(part, labels_of, num_parts, alpha, random)]
    return parts


def _cut(
    part: tuple[Ints, Ints], labels_of: tuple[Ints, Ints], num_parts: int, alpha: float, random: np.random.RandomState
) -> list[tuple[Ints, Ints]]:
    classes = np.unique(labels_of[0][part[0]])
    shares = random.dirichlet(np.repeat(alpha, num_parts), len(classes))  # (class, part)
    shares = np.floor(shares / SHARE) * SHARE
    cuts = []
    for rows, labels in zip(part, labels_of, strict=True):
        pieces: list[list[Ints]] = [[] for _ in range(num_parts)]
        for label, share in zip(classes, shares, strict=True):
            own = rows[labels[rows] == label]
            ends = np.cumsum(np.round(share * len(own)).astype(int))
            for piece, taken in zip(pieces, np.split(own, ends)[:-1], strict=True):
                piece.append(taken)
        cuts.append([np.concatenate(piece) for piece in pieces])
    return list(zip(*cuts, strict=True))


def large_enough(clients: list[tuple[Ints, Ints]], num_test: int) -> list[tuple[Ints, Ints]]:
    return [both for both in clients if len(both[1]) >= LEAST * num_test / len(clients)]


def _labels(name: str, folder: str | None) -> tuple[Ints, Ints]:
    data = load(name, path=folder)
    assert isinstance(data, Dataset)
    return data.y_train.numpy(), data.y_test.numpy()


def _arrays(clients: list[tuple[Ints, Ints]], labels: tuple[Ints, Ints]) -> dict[str, NDArray[np.int8]]:
    kinds = zip(("train_client", "test_client"), zip(*clients, strict=True), labels, strict=True)
    held = {name: ([torch.from_numpy(one) for one in rows], len(own)) for name, rows, own in kinds}
    return {name: client_of(*own).astype(np.int8) for name, own in held.items()}


def main(folder: str | None = None) -> None:
    for name in ("cifar10", "fashion_mnist"):  # of the last of which there is more to draw
        labels = _labels(name, folder)
        drawn, known = _arrays(draw(labels, [(4, 0.1), (10, 10.0)]), labels), np.load(SPLITS / f"{name}.npz")
        if any(not np.array_equal(drawn[key], known[key]) for key in drawn):
            sys.exit(f"the drawing does not give the published split of {name}: nothing is written")
    clients = large_enough(draw(labels, [(40, 0.1)]), len(labels[1]))
    arrays = _arrays(clients, labels)
    with replacing(WITHOUT_GROUPS) as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)
    left_out = [int((held < 0).sum()) for held in arrays.values()]
    print(f"both known splits are drawn; {len(clients)} clients of label(0,40,0.1), left out {left_out} examples")


if __name__ == "__main__":
    main(*sys.argv[1:2])
