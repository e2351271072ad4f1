"""Distances, k-means and warm-up, against scikit-learn on the raw vectors and by hand."""

import numpy as np
import pytest
import torch
from federation_fixtures import pulled_clients
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score, pairwise_distances

from bcfl.association import k_means as module
from bcfl.association.k_means import gram, k_means, squared_distances
from bcfl.methods.warm_up import warm_up
from bcfl.randomness import generator


def rows(num_rows: int = 9, num_parameters: int = 50, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, num_parameters, generator=generator(seed, "rows"))


@pytest.mark.parametrize("block", [7, 1 << 20])
def test_gram_is_of_centred_rows_whatever_the_blocks(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    centred = rows().double() - rows().double().mean(0)
    assert torch.allclose(gram(rows()), centred @ centred.T)


def test_squared_distances_keep_their_digits_far_from_the_origin() -> None:
    points = (rows() * 1e-2 + 100).float()
    expected = pairwise_distances(points.double().numpy(), metric="sqeuclidean")
    assert np.allclose(squared_distances(points).numpy(), expected, rtol=1e-9, atol=1e-12)
    assert squared_distances(points.repeat(2, 1)).min() >= 0


@pytest.mark.parametrize("seed", range(5))
def test_k_means_is_scikit_learns_on_the_raw_vectors(seed: int) -> None:
    weight = torch.rand(12, generator=generator(seed, "weight"), dtype=torch.float64) + 0.1
    points = rows(12, 40, seed) + rows(3, 40, seed + 100).repeat(4, 1)  # three groups, not quite apart
    own = k_means(points, weight, 3, seed).numpy()
    raw = points.double().numpy()

    def inertia(labels: np.ndarray) -> float:
        total = 0.0
        for label in set(labels.tolist()):
            chosen, mass = raw[labels == label], weight.numpy()[labels == label]
            centre = np.average(chosen, axis=0, weights=mass)
            total += float((mass * ((chosen - centre) ** 2).sum(1)).sum())
        return total

    oracle = KMeans(3, n_init=50, random_state=0).fit(raw, sample_weight=weight.numpy())
    assert inertia(own) == pytest.approx(oracle.inertia_)
    assert adjusted_rand_score(own, oracle.labels_) == 1


@pytest.mark.parametrize("seed", range(5))
def test_k_means_from_given_centres_is_scikit_learns(seed: int) -> None:
    points, weight = rows(12, 40, seed), torch.rand(12, generator=generator(seed, "weight"), dtype=torch.float64) + 0.1
    centres = points[:3] + 0.1
    own = k_means(points, weight, 3, 0, centres)
    oracle = KMeans(3, init=centres.double().numpy(), n_init=1).fit(
        points.double().numpy(), sample_weight=weight.numpy()
    )
    assert own.tolist() == oracle.labels_.tolist()  # with the same numbers, too


def test_k_means_finds_separate_groups() -> None:
    truth = [0, 1, 2] * 6
    points = torch.eye(3)[truth].repeat(1, 20) * 5 + 0.1 * rows(18, 60)
    assert adjusted_rand_score(truth, k_means(points, torch.ones(18).double(), 3, 0)) == 1


def test_a_weight_counts_as_so_many_equal_points() -> None:
    points = torch.tensor([[0.0], [1.0], [1.9], [3.0]])
    heavy = k_means(points, torch.tensor([1.0, 50.0, 1.0, 1.0]).double(), 2, 0)
    repeated = k_means(points[[0, *[1] * 50, 2, 3]], torch.ones(53).double(), 2, 0)[[0, 1, 51, 52]]
    assert adjusted_rand_score(heavy, repeated) == 1
    assert adjusted_rand_score(heavy, k_means(points, torch.ones(4).double(), 2, 0)) < 1


def test_warm_up_is_a_mean_by_examples_of_each_cluster() -> None:
    targets = torch.tensor([[0.0, 1.0], [0.0, 2.0], [9.0, 0.0], [9.0, 3.0]], dtype=torch.float64)
    clients = pulled_clients(targets, [10.0, 30.0, 10.0, 20.0], torch.zeros(1, 2, 2, dtype=torch.float64))
    models = warm_up(clients, 2, 2)
    assert torch.allclose(models[models[:, 0].argsort()], torch.tensor([[0, 70 / 40], [9, 2]], dtype=torch.float64))


def test_warm_up_leaves_clusters_for_which_there_are_no_clients_at_the_start() -> None:
    targets = torch.tensor([[0.0, 1.0], [9.0, 0.0]], dtype=torch.float64)
    starts = torch.full((1, 3, 2), 5.0, dtype=torch.float64)
    models = warm_up(pulled_clients(targets, [1.0, 1.0], starts), 3, 2)
    assert models.tolist() == [[0, 1], [9, 0], [5, 5]]


def test_warm_up_without_an_answer_is_a_start_without_warm_up() -> None:
    starts = torch.arange(4.0, dtype=torch.float64).view(1, 2, 2)
    silent = pulled_clients(torch.zeros(2, 2).double(), [1.0, 1.0], starts, silent=frozenset({0, 1}))
    assert torch.equal(warm_up(silent, 2, 2), starts[0])
