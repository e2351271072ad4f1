"""The filter of a client's association against sums over all of its possible pasts."""

import itertools

import pytest
import torch
from torch import Tensor

from bcfl.extensions.staying import evidence_power, expected_stays, learned_stay, predict
from bcfl.randomness import generator

STAY = 0.8


def matrix(stay: float, num_clusters: int) -> Tensor:
    """The transition written out, (before, now)."""
    full = torch.full((num_clusters, num_clusters), (1 - stay) / (num_clusters - 1), dtype=torch.float64)
    return full.fill_diagonal_(stay)


def memberships(*shape: int) -> Tensor:
    return torch.rand(shape, generator=generator(0, "memberships"), dtype=torch.float64).softmax(-1)


@pytest.mark.parametrize("num_clusters", [2, 3, 5])
def test_prediction_is_the_product_with_the_transition_matrix(num_clusters: int) -> None:
    before = memberships(2, 4, num_clusters)
    assert torch.allclose(predict(before, STAY), before @ matrix(STAY, num_clusters))
    anywhere = torch.full((num_clusters,), 1 / num_clusters, dtype=torch.float64)
    assert torch.allclose(predict(anywhere, STAY), anywhere)


def test_with_one_cluster_there_is_nowhere_to_go() -> None:
    assert predict(torch.ones(3, 1), STAY).tolist() == [[1.0]] * 3


@pytest.mark.parametrize("stay", [0.0, 1.0, -0.1, 2.0])
def test_a_staying_probability_without_a_choice_is_refused(stay: float) -> None:
    with pytest.raises(ValueError, match="stay must be above 0 and below 1"):
        predict(memberships(3), stay)


def test_the_filter_is_the_sum_over_all_pasts() -> None:
    """p(z_t | seen) and the expected number of stays, by enumerating every path z_1 … z_t."""
    num_clusters, num_rounds = 3, 4
    log_likelihood = torch.randn(num_rounds, num_clusters, generator=generator(1, "seen"), dtype=torch.float64)
    membership = torch.full((num_clusters,), 1 / num_clusters, dtype=torch.float64)
    stays = torch.zeros(())
    for seen in log_likelihood:
        after = (predict(membership, STAY).log() + seen).softmax(-1)
        membership, stays = after, expected_stays(membership, STAY, after)
    transition = matrix(STAY, num_clusters)
    total, stayed = torch.zeros(num_clusters, dtype=torch.float64), 0.0
    for path in itertools.product(range(num_clusters), repeat=num_rounds):
        weight = log_likelihood[range(num_rounds), list(path)].sum().exp() / num_clusters
        for before, now in itertools.pairwise(path):
            weight = weight * transition[before, now]
        total[path[-1]] += weight
        stayed += float(weight) * (path[-1] == path[-2])
    assert torch.allclose(membership, total / total.sum())
    assert float(stays) == pytest.approx(stayed / float(total.sum()))


@pytest.mark.parametrize("temperature", ["per_example", "none", 7.0])
def test_the_power_is_that_of_the_examples_seen(temperature: float | str) -> None:
    sizes = torch.tensor([100.0, 10.0], dtype=torch.float64)
    divisor = {"per_example": sizes, "none": torch.ones(2)}.get(temperature, torch.full((2,), 7.0))  # type: ignore[call-overload]
    assert torch.allclose(evidence_power(sizes, 20, temperature), torch.tensor([5.0, 1.0]).double() / divisor)  # type: ignore[arg-type]
    assert torch.allclose(evidence_power(sizes, None, temperature), 1 / divisor.double())  # type: ignore[arg-type]


def test_learning_starts_from_a_uniform_prior_and_comes_to_the_share_of_stays() -> None:
    assert learned_stay(torch.zeros(2)) == 0.5
    assert learned_stay(torch.tensor([7.0, 1.0])) == pytest.approx(8 / 10)
    assert learned_stay(torch.tensor([9e6, 1e6])) == pytest.approx(0.9, abs=1e-5)


def test_a_well_calibrated_client_at_rest_leaves_no_oftener_than_the_odds_say() -> None:
    """P(leave) ≤ (1 − p)/p: what a likelihood ratio can do by chance, however little is seen in a round."""
    draws, probability = generator(0, "coin"), torch.tensor([0.55, 0.45], dtype=torch.float64)  # of heads by cluster
    for stay in (0.7, 0.9):
        heads = torch.rand(20_000, 8, generator=draws, dtype=torch.float64) < probability[0]
        count = heads.sum(1, keepdim=True).double()
        seen = count * probability.log() + (8 - count) * (1 - probability).log()  # (try, cluster)
        home = torch.tensor([1.0, 0.0], dtype=torch.float64)
        left = (predict(home, stay).log() + seen).argmax(1) == 1
        without_memory = seen.argmax(1) == 1
        assert float(left.double().mean()) <= (1 - stay) / stay
        assert float(without_memory.double().mean()) > 0.2
