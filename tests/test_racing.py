"""Racing keeps what full scoring keeps, at the stated rate, and saves work."""

import pytest
import torch

from bcfl.association import branch
from bcfl.racing import FIRST_LOOK, _kth_subset_sum, contenders, moments

NUM_CLIENTS, NUM_CLUSTERS, NUM_EXAMPLES = 20, 4, 320


def population(seed: int, separation: float, heavy: bool = False) -> torch.Tensor:
    """Log-likelihoods of every example under every belief; clients of group g like belief g best, noise is shared."""
    random = torch.Generator().manual_seed(seed)
    shape = (NUM_CLIENTS, NUM_CLUSTERS, NUM_EXAMPLES)
    noise = torch.randn(shape, generator=random, dtype=torch.float64)
    if heavy:  # losses of neural networks have long right tails
        noise = -(noise.abs() ** 2)
    hardness = torch.randn(NUM_CLIENTS, 1, NUM_EXAMPLES, generator=random, dtype=torch.float64)
    liking = torch.nn.functional.one_hot(torch.arange(NUM_CLIENTS) % NUM_CLUSTERS, NUM_CLUSTERS).double()
    liking *= separation * torch.linspace(0.2, 2, NUM_CLIENTS)[:, None]  # some clients are clearer than others
    return liking[:, :, None] + noise + 2 * hardness  # (client, belief, example)


def raced(values: torch.Tensor, k: int, error: float) -> tuple[torch.Tensor, float]:
    """The costs that racing arrives at, and the share of the scorings that it needed."""
    looks = [moments(own[:, :FIRST_LOOK]) for own in values]
    size = torch.full((NUM_CLIENTS,), float(NUM_EXAMPLES), dtype=torch.float64)
    wanted = contenders(
        torch.stack([mean for mean, _ in looks]),
        torch.stack([covariance for _, covariance in looks]),
        torch.full_like(size, FIRST_LOOK),
        size,
        torch.ones_like(size),
        torch.arange(NUM_CLUSTERS)[None],
        k,
        error,
    )
    cost = torch.where(wanted, -values.mean(2), torch.inf)
    rest = NUM_EXAMPLES - FIRST_LOOK
    return cost, (FIRST_LOOK * wanted.numel() + rest * int(wanted.sum())) / (NUM_EXAMPLES * wanted.numel())


@pytest.mark.parametrize("k", [1, 3, 6])
@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("separation", [0.3, 1.0, 3.0])
def test_racing_keeps_the_hypotheses_of_full_scoring_at_the_stated_rate(k: int, heavy: bool, separation: float) -> None:
    error, trials, wrong = 0.05, 100, 0
    for seed in range(trials):
        values = population(seed, separation, heavy)
        full = branch(torch.zeros(1), -values.mean(2)[None], k)
        cost, _ = raced(values, k, error)
        kept = branch(torch.zeros(1), cost[None], k)
        wrong += not torch.equal(full.assignment, kept.assignment)
    assert wrong <= error * trials


@pytest.mark.parametrize(("k", "most"), [(1, 1 / 3), (6, 0.6)])  # six hypotheses need the runners-up as well
def test_separated_groups_need_few_scorings(k: int, most: float) -> None:
    _, share = raced(population(0, 10.0), k, 0.01)
    assert share <= most


def test_nothing_is_dropped_that_cannot_be_told_apart() -> None:
    cost, share = raced(population(0, 0.0), 1, 0.01)
    assert share > 0.9
    assert cost.isfinite().any(1).all()


def test_a_first_look_at_everything_leaves_only_the_best() -> None:
    values = population(3, 0.5)
    looks = [moments(own) for own in values]
    size = torch.full((NUM_CLIENTS,), float(NUM_EXAMPLES), dtype=torch.float64)
    wanted = contenders(
        torch.stack([mean for mean, _ in looks]),
        torch.stack([covariance for _, covariance in looks]),
        size,
        size,
        torch.ones_like(size),
        torch.arange(NUM_CLUSTERS)[None],
        1,
        0.01,
    )
    assert torch.equal(wanted, torch.nn.functional.one_hot(values.mean(2).argmax(1), NUM_CLUSTERS).bool())


def test_subset_sums_by_hand() -> None:
    values = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    assert [_kth_subset_sum(values, k) for k in range(1, 9)] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert _kth_subset_sum(values, 9) == float("inf")
