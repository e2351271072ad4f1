"""Racing keeps what full scoring keeps, at the stated rate, and saves work."""

import itertools
import math
from typing import Any

import pytest
import torch
from federation_fixtures import by_story
from torch import Tensor

from bcfl.association.hypotheses import Families, branch
from bcfl.extensions.racing import TOLERANCE, Seen, Stakes, _subset_sums, contenders, moments, pooled, race

NUM_CLIENTS, NUM_CLUSTERS, NUM_EXAMPLES = 20, 4, 320
ONE = torch.arange(NUM_CLUSTERS)[None]  # a single hypothesis
NEAR_COPIES = torch.tensor([[0, 1, 2, 3], [4, 5, 2, 3], [0, 6, 7, 3]])  # three that share beliefs, as in BCFL-MH


def population(
    seed: int, separation: float, heavy: bool = False, belief_of: Tensor = ONE, likeness: float = 0.1
) -> Tensor:
    """Log-likelihoods of every example under every belief; clients of group g like cluster g best, noise is shared."""
    random = torch.Generator().manual_seed(seed)
    noise = torch.randn(NUM_CLIENTS, NUM_CLUSTERS, NUM_EXAMPLES, generator=random, dtype=torch.float64)
    if heavy:  # losses of neural networks have long tails, longer for the beliefs of strangers: gaps are skewed
        noise = -(noise.abs() ** 2) * torch.linspace(0.5, 1.5, NUM_CLUSTERS, dtype=torch.float64)[:, None]
    hardness = torch.randn(NUM_CLIENTS, 1, NUM_EXAMPLES, generator=random, dtype=torch.float64)
    liking = torch.nn.functional.one_hot(torch.arange(NUM_CLIENTS) % NUM_CLUSTERS, NUM_CLUSTERS).double()
    liking *= separation * torch.linspace(0.2, 2, NUM_CLIENTS)[:, None]  # some clients are clearer than others
    clusters = liking[:, :, None] + noise + 2 * hardness  # (client, cluster, example)
    values = torch.empty(NUM_CLIENTS, int(belief_of.max()) + 1, NUM_EXAMPLES, dtype=torch.float64)
    for beliefs in belief_of:  # beliefs about one cluster differ by little, as by one client more or less
        values[:, beliefs] = clusters + likeness * torch.randn(clusters.shape, generator=random, dtype=torch.float64)
    return values  # (client, belief, example)


def raced(values: Tensor, k: int, error: float, belief_of: Tensor, log_weight: Tensor) -> tuple[Tensor, float]:
    """The costs that racing arrives at, and the share of the (example, belief) pairs that it scored."""
    scored = 0

    def look(wanted: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
        nonlocal scored
        scored += int(wanted.sum()) * (last - first)
        told = [moments(own[:, first:last]) for own in values]
        return torch.stack([mean for mean, _ in told]), torch.stack([covariance for _, covariance in told])

    size = torch.full((NUM_CLIENTS,), float(NUM_EXAMPLES), dtype=torch.float64)
    present = torch.ones(NUM_CLIENTS, dtype=torch.bool)
    wanted, mean = race(look, present, size, torch.ones_like(size), Stakes(belief_of, log_weight, k, error))
    return -torch.where(wanted, mean, -torch.inf), scored / values.numel()


def kept(cost: Tensor, k: int, belief_of: Tensor, log_weight: Tensor) -> dict[tuple[int, ...], float]:
    families = Families(torch.arange(len(belief_of)), 1.0)
    return by_story(branch(log_weight, cost[:, belief_of].transpose(0, 1), k, families=families))


@pytest.mark.parametrize("belief_of", [ONE, NEAR_COPIES], ids=["one parent", "three parents"])
@pytest.mark.parametrize("k", [1, 3, 6])
@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("separation", [0.3, 1.0, 3.0])
def test_racing_keeps_the_hypotheses_of_full_scoring_at_the_stated_rate(
    k: int, heavy: bool, separation: float, belief_of: Tensor
) -> None:
    error, trials, wrong = 0.1, 40, 0
    log_weight = torch.tensor([0.0, -0.5, -1.5][: len(belief_of)], dtype=torch.float64)
    for seed in range(trials):
        values = population(seed, separation, heavy, belief_of)
        full = kept(-values.mean(2), k, belief_of, log_weight)
        fast = kept(raced(values, k, error, belief_of, log_weight)[0], k, belief_of, log_weight)
        same = full.keys() == fast.keys()
        near = TOLERANCE if len(belief_of) > 1 else 1e-9  # of a single hypothesis there is nothing to be weighed
        assert not same or fast == pytest.approx(full, rel=0, abs=near)
        wrong += not same
    assert wrong <= error * trials


@pytest.mark.parametrize("k", [1, 2, 3])
def test_near_copies_that_all_go_on_need_few_scorings_and_others_all(k: int) -> None:
    """What tells them apart is their weights alone, and with fewer places than parents these decide who is kept."""
    error, trials, wrong = 0.1, 40, 0
    log_weight = torch.zeros(3, dtype=torch.float64)
    for seed in range(trials):
        values = population(seed, 10.0, belief_of=NEAR_COPIES, likeness=2e-3)
        full = kept(-values.mean(2), k, NEAR_COPIES, log_weight)
        cost, share = raced(values, k, error, NEAR_COPIES, log_weight)
        assert (share < 0.2) == (k == 3)
        fast = kept(cost, k, NEAR_COPIES, log_weight)
        wrong += full.keys() != fast.keys() or fast != pytest.approx(full, rel=0, abs=TOLERANCE)
    assert wrong <= error * trials


@pytest.mark.parametrize("seen", [64, 128])
def test_weights_are_off_by_no_more_than_a_race_says(seen: int) -> None:
    error, trials, wrong, largest = 0.1, 100, 0, 0.0
    size, everything = torch.full((NUM_CLIENTS,), 1.0 * NUM_EXAMPLES).double(), torch.ones(NUM_CLIENTS, 8).bool()
    for seed in range(trials):
        values = population(seed, 10.0, belief_of=NEAR_COPIES, likeness=0.05)
        mean, covariance = map(torch.stack, zip(*(moments(own[:, :seen]) for own in values), strict=True))
        looked = torch.full_like(size, seen)
        told = Seen(mean, covariance, looked, size, torch.ones_like(size))
        left, unsure = contenders(told, everything, Stakes(NEAR_COPIES, torch.zeros(3), 3, error), error)
        assert (left[:, NEAR_COPIES].sum(2) == 1).all()
        off = torch.stack([
            ((mean - values.mean(2))[:, beliefs] * left[:, beliefs]).sum() for beliefs in NEAR_COPIES
        ])  # fmt: skip
        found = float((off - off[0]).abs().max())
        wrong, largest = wrong + (found > unsure), max(largest, found / unsure)
    assert wrong <= error * trials
    assert largest > 0.2  # a bound that is much too wide would never stop a race


@pytest.mark.parametrize(("k", "most"), [(1, 0.12), (6, 0.4)])  # six hypotheses need the runners-up as well
def test_separated_groups_need_few_scorings(k: int, most: float) -> None:
    _, share = raced(population(0, 10.0), k, 0.01, ONE, torch.zeros(1))
    assert share <= most


def test_nothing_is_dropped_that_cannot_be_told_apart_and_nothing_is_lost_by_trying() -> None:
    values = population(0, 0.0)
    cost, share = raced(values, 1, 0.01, ONE, torch.zeros(1))
    assert 0.9 < share <= 1
    left = cost.isfinite()
    assert left.any(1).all()
    assert torch.allclose(cost[left], -values.mean(2)[left], rtol=0, atol=1e-12)  # over all examples


@pytest.mark.parametrize("belief_of", [ONE, NEAR_COPIES], ids=["one parent", "three parents"])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_where_nothing_is_left_to_chance_what_is_dropped_is_in_none_of_the_k_best(k: int, belief_of: Tensor) -> None:
    """Against all assignments of four clients; every hypothesis' own best must survive too."""
    num_beliefs, dropped = int(belief_of.max()) + 1, 0
    size = torch.full((4,), 100.0, dtype=torch.float64)
    for seed in range(20):
        random = torch.Generator().manual_seed(seed)
        mean = -3 * torch.rand(4, num_beliefs, generator=random, dtype=torch.float64)
        log_weight = -2 * torch.rand(len(belief_of), generator=random, dtype=torch.float64)
        nothing, everything = torch.zeros(4, num_beliefs, num_beliefs).double(), torch.ones(4, num_beliefs).bool()
        told, stakes = Seen(mean, nothing, size, size, torch.ones(4)), Stakes(belief_of, log_weight, k, 0.1)
        left, _ = contenders(told, everything, stakes, stakes.error)
        ranked = sorted(
            (float(-log_weight[h] - mean[torch.arange(4), belief_of[h, list(clusters)]].sum()), h, clusters)
            for h in range(len(belief_of))
            for clusters in itertools.product(range(NUM_CLUSTERS), repeat=4)
        )
        own_best = {story[1]: story for story in reversed(ranked)}
        for _, h, clusters in [*ranked[:k], *own_best.values()]:
            assert left[torch.arange(4), belief_of[h, list(clusters)]].all()
        dropped += int((~left).sum())
    assert dropped > 20 * num_beliefs


def test_the_looks_share_the_error_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that all of them together go wrong no more often than was asked for."""
    spent: list[float] = []

    def watched(*arguments: Any) -> tuple[Tensor, float]:
        spent.append(arguments[-1])
        return contenders(*arguments)

    monkeypatch.setattr("bcfl.extensions.racing.contenders", watched)
    raced(population(0, 0.0), 1, 0.06, ONE, torch.zeros(1))
    assert spent == pytest.approx([0.02] * 3)  # after 32, 64 and 128 of 320 examples


def test_two_parts_together_have_the_moments_of_the_whole() -> None:
    values = population(1, 1.0)[:2]
    parts = [[moments(own[:, part]) for own in values] for part in (slice(0, 32), slice(32, 96))]
    (mean, covariance), (new_mean, new_covariance) = (
        (torch.stack([m for m, _ in part]), torch.stack([c for _, c in part])) for part in parts
    )
    whole = [moments(own[:, :96]) for own in values]
    nothing = torch.zeros_like(mean), torch.zeros_like(covariance)
    first = pooled(0, *nothing, torch.tensor([32.0, 32.0]), mean, covariance)
    for found, expected in zip(first, (mean, covariance), strict=True):
        assert torch.allclose(found, expected, atol=1e-12)
    both = pooled(32, *first, torch.tensor([64.0, 64.0]), new_mean, new_covariance)
    assert torch.allclose(both[0], torch.stack([m for m, _ in whole]), atol=1e-12)
    assert torch.allclose(both[1], torch.stack([c for _, c in whole]), atol=1e-12)


def test_moments_of_a_single_example() -> None:
    mean, covariance = moments(torch.tensor([[-1.0], [-2.0]]))
    assert mean.tolist() == [-1, -2]
    assert covariance.tolist() == [[0, 0], [0, 0]]


def test_settled_clients_look_no_further_and_small_ones_are_done_sooner() -> None:
    asked: list[tuple[list[bool], int, int]] = []
    means = torch.tensor([[-1.0, -1.0], [0.0, -9.0], [-1.0, -1.0]], dtype=torch.float64)

    def look(wanted: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
        asked.append((wanted.all(1).tolist(), first, last))
        return means, torch.eye(2).double().expand(3, 2, 2)

    sizes = torch.tensor([33, 300, 200], dtype=torch.float64)
    present, belief_of = torch.ones(3).bool(), torch.tensor([[0, 1]])
    wanted, mean = race(look, present, sizes, torch.ones(3), Stakes(belief_of, torch.zeros(1), 1, 0.05))
    none_but_the_last = [False, False, True]
    assert asked == [
        ([True, True, True], 0, 32),
        ([True, False, True], 32, 64),  # a single example more of the first
        (none_but_the_last, 64, 128),
        (none_but_the_last, 128, 300),
    ]
    assert wanted.tolist() == [[True, True], [True, False], [True, True]]
    assert mean.tolist() == means.tolist()


def test_a_client_with_one_example_keeps_nobody_from_stopping() -> None:
    values = population(0, 10.0, belief_of=NEAR_COPIES, likeness=2e-3)

    def look(wanted: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
        asked.append(last)
        told = [moments(own[:, first : min(last, int(size))]) for own, size in zip(values, sizes, strict=True)]
        return torch.stack([mean for mean, _ in told]), torch.stack([covariance for _, covariance in told])

    asked: list[int] = []
    sizes = torch.full((NUM_CLIENTS,), 1.0 * NUM_EXAMPLES, dtype=torch.float64)
    sizes[3] = 1
    everybody = torch.ones(NUM_CLIENTS).bool()
    race(look, everybody, sizes, torch.ones_like(sizes), Stakes(NEAR_COPIES, torch.zeros(3), 3, 0.05))
    assert asked[-1] < NUM_EXAMPLES


@pytest.mark.parametrize("sizes", [[1, 1, 1], [63, 40, 20]])
def test_where_all_clients_are_small_there_is_one_look_at_everything(sizes: list[int]) -> None:
    asked: list[tuple[int, int]] = []
    means = torch.tensor([[0.0, -9.0], [-3.0, -2.0], [-1.0, -1.0]], dtype=torch.float64)

    def look(wanted: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
        asked.append((first, last))
        return means, torch.zeros(3, 2, 2, dtype=torch.float64)

    num_scored = torch.tensor(sizes, dtype=torch.float64)
    present, belief_of = torch.ones(3).bool(), torch.tensor([[0, 1]])
    wanted, mean = race(look, present, num_scored, torch.ones(3), Stakes(belief_of, torch.zeros(1), 2, 0.05))
    assert asked == [(0, max(sizes))]
    assert wanted.all()
    assert mean.tolist() == means.tolist()


def test_a_client_that_does_not_answer_a_look_is_left_aside() -> None:
    present = torch.ones(3).bool()

    def look(wanted: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
        present[1] = False
        mean = torch.tensor([[0.0, -9.0], [math.nan, math.nan], [0.0, -9.0]], dtype=torch.float64)
        return mean, torch.where(mean.isnan()[:, :, None], math.nan, torch.eye(2).double())

    sizes = torch.full((3,), 320.0, dtype=torch.float64)
    wanted, _ = race(look, present, sizes, torch.ones(3), Stakes(torch.tensor([[0, 1]]), torch.zeros(1), 1, 0.05))
    assert wanted.sum(1).tolist() == [1, 2, 1]


def test_subset_sums_by_hand() -> None:
    values = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    assert _subset_sums(values, 5) == [0, 1, 2, 3, 4]
    assert _subset_sums(values, 9) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert _subset_sums(torch.tensor([math.inf]), 3) == [0]
