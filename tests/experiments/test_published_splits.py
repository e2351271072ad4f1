"""The splits of the published scripts; how many examples a client holds hangs on the sizes of classes alone."""

import numpy as np
import pytest
from published_splits import SPLITS, WITHOUT_GROUPS, draw, large_enough


def labels(num_train: int, num_test: int = 10000) -> tuple[np.ndarray, np.ndarray]:
    """Ten classes of equal size, as Fashion-MNIST and CIFAR-10 have them, in an order of our own."""
    random = np.random.default_rng(7)
    return random.permutation(np.arange(num_train) % 10), random.permutation(np.arange(num_test) % 10)


def sizes(clients: list[tuple[np.ndarray, np.ndarray]]) -> list[list[int]]:
    return [[len(rows) for rows in both] for both in clients]


def sizes_in(path) -> list[list[int]]:
    split = np.load(path)
    both = (np.bincount(split[key][split[key] >= 0]) for key in ("train_client", "test_client"))
    return np.stack(list(both), axis=1).tolist()


@pytest.mark.parametrize(("name", "num_train"), [("fashion_mnist", 60000), ("cifar10", 50000)])
def test_the_known_splits_are_drawn(name: str, num_train: int) -> None:
    assert sizes(draw(labels(num_train), [(4, 0.1), (10, 10.0)])) == sizes_in(SPLITS / f"{name}.npz")


def test_the_split_without_groups_leaves_out_ten_small_clients() -> None:
    clients = draw(labels(60000), [(40, 0.1)])
    kept = large_enough(clients, 10000)
    assert (len(clients), len(kept)) == (40, 30)
    assert sizes(kept) == [both for both in sizes(clients) if both[1] >= 75]
    assert sizes(kept) == sizes_in(WITHOUT_GROUPS)


def test_every_example_has_one_client_at_most_and_classes_are_cut_in_their_order() -> None:
    own = labels(60000)
    clients = draw(own, [(4, 0.1), (10, 10.0)])
    for kind in (0, 1):
        held = np.concatenate([both[kind] for both in clients])
        assert len(np.unique(held)) == len(held)
    first = np.concatenate([both[0][own[0][both[0]] == 1] for both in clients[:10]])
    assert (np.diff(first) > 0).all()
