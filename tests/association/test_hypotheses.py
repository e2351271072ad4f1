"""k-best against brute force in exact rational arithmetic; weighted hypotheses against sums by hand."""

import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bcfl.association.hypotheses import (
    Branches,
    align,
    branch,
    co_association,
    entropy,
    marginals,
    normalise,
    num_hypotheses,
    prune,
    reweight,
)
from bcfl.association.ranking import k_best_assignments, one_change_assignments
from bcfl.randomness import numpy_generator

PAPER_EXAMPLE = torch.tensor([[5.0, 8.0], [8.0, 2.0], [4.0, 8.0]])  # client × cluster
SHAPES = [(C, K) for C in range(1, 7) for K in range(1, 5)]
MOST = 30

Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


def _some_infinite(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    cost = rng.integers(0, 5, shape).astype(float)
    cost[rng.random(shape) < 0.4] = math.inf
    possible = rng.integers(shape[1], size=shape[0])  # every client has somewhere to go
    cost[np.arange(shape[0]), possible] = 1.0
    return cost


# Here every sum is exact in float64, so the order must be exactly the documented one.
EXACT: dict[str, Draw] = {
    "random": lambda rng, shape: rng.integers(-(2**40), 2**40, shape) / 2**35,
    "tied": lambda rng, shape: rng.integers(0, 3, shape).astype(float),
    "equal": lambda rng, shape: np.full(shape, 1.5),
    "negative": lambda rng, shape: -rng.integers(1, 9, shape).astype(float),
    "infinite": _some_infinite,
    "huge": lambda rng, shape: rng.integers(-9, 10, shape) * 2.0**1000,
    "offset": lambda rng, shape: 2.0**40 + rng.integers(0, 5, shape) / 8,
}
# Here sums round, so entries may change places when their totals agree to rounding.
ROUNDED: dict[str, Draw] = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "tenths": lambda rng, shape: rng.integers(-3, 4, shape) / 10,
    "steep": lambda rng, shape: rng.choice([0.0, 0.1, 1.0, 2.0, 1e16, 1e300], shape),
    "near overflow": lambda rng, shape: rng.normal(size=shape) * 1e306,
}

Listed = list[tuple[Fraction, tuple[int, ...]]]


def every_assignment(cost: np.ndarray, limits: tuple[int, int] | None = None) -> Listed:
    """All assignments of finite cost, in the documented order, written independently of the search."""
    num_clients, num_clusters = cost.shape
    rows = [[None if entry == math.inf else Fraction(entry) for entry in row] for row in cost.tolist()]

    def dearness(client: int, cluster: int) -> tuple[bool, Fraction, int]:
        entry = rows[client][cluster]
        return entry is None, entry or Fraction(0), cluster

    ranked = [sorted(range(num_clusters), key=lambda i, j=j: dearness(j, i)) for j in range(num_clients)]

    def gap(client: int) -> tuple[bool, Fraction, int]:
        best, second = ([rows[client][i] for i in ranked[client]] + [None])[:2]
        return second is None, Fraction(0) if second is None else second - best, client

    client_rank = {client: rank for rank, client in enumerate(sorted(range(num_clients), key=gap))}
    listed = []
    for assignment in itertools.product(range(num_clusters), repeat=num_clients):
        if limits and not all(limits[0] <= assignment.count(i) <= limits[1] for i in range(num_clusters)):
            continue
        entries = [rows[j][i] for j, i in enumerate(assignment)]
        if None not in entries:
            ranks = [ranked[j].index(i) for j, i in enumerate(assignment)]
            departures = sorted((client_rank[j], rank) for j, rank in enumerate(ranks) if rank)
            listed.append((sum(entries), departures, assignment))
    return [(total, assignment) for total, _, assignment in sorted(listed)]


def rows_of(assignments: Tensor) -> list[tuple[int, ...]]:
    return [tuple(row) for row in assignments.tolist()]


def agrees_to_rounding(found: tuple[Tensor, Tensor], listed: Listed, k: int, scale: float) -> None:
    """Right count, no repetition, in order, each total is its assignment's, and none that is cheaper is missing."""
    assignments, totals = rows_of(found[0]), found[1].tolist()
    own = {assignment: total for total, assignment in listed}
    rounding = 1e-15 * scale * max(1, found[0].shape[1])
    assert len(assignments) == len(totals) == len(set(assignments)) == min(k, len(listed))
    assert totals == sorted(totals)
    for assignment, total, (best_total, _) in zip(assignments, totals, listed, strict=False):
        assert abs(Fraction(total) - own[assignment]) <= rounding
        assert abs(own[assignment] - best_total) <= rounding


@pytest.mark.parametrize("kind", EXACT)
def test_k_best_is_brute_force_in_the_documented_order(kind: str) -> None:
    for shape in SHAPES:
        cost = EXACT[kind](numpy_generator(2, kind, *shape), shape)
        expected = every_assignment(cost)[:MOST]
        assignments, totals = k_best_assignments(torch.from_numpy(cost), MOST)
        assert assignments.dtype == torch.int64
        assert rows_of(assignments) == [assignment for _, assignment in expected], cost
        assert totals.tolist() == [float(total) for total, _ in expected], cost
        for k in range(1, MOST):
            fewer, fewer_totals = k_best_assignments(torch.from_numpy(cost), k)
            assert torch.equal(fewer, assignments[:k]), (k, cost)
            assert torch.equal(fewer_totals, totals[:k]), (k, cost)


@pytest.mark.parametrize("kind", ROUNDED)
def test_k_best_is_brute_force_to_rounding(kind: str) -> None:
    for shape in SHAPES:
        cost = ROUNDED[kind](numpy_generator(3, kind, *shape), shape)
        listed, scale = every_assignment(cost), float(np.abs(cost).max())
        for k in (1, 2, 7, MOST):
            agrees_to_rounding(k_best_assignments(torch.from_numpy(cost), k), listed, k, scale)


@pytest.mark.parametrize("kind", ["random", "tied", "negative", "infinite", "huge", "offset", "tenths", "steep"])
def test_k_best_within_cluster_sizes_is_brute_force(kind: str) -> None:
    for num_clients, num_clusters in SHAPES:
        draw = EXACT.get(kind) or ROUNDED[kind]
        cost = draw(numpy_generator(4, kind, num_clients, num_clusters), (num_clients, num_clusters))
        fair = num_clients // num_clusters
        for limits in {(0, num_clients), (1, num_clients), (0, fair + 1), (fair, fair + 1), (fair, fair)}:
            listed = every_assignment(cost, limits)
            if not listed:
                with pytest.raises(ValueError, match="cluster_size"):
                    k_best_assignments(torch.from_numpy(cost), 1, limits)
                continue
            found = k_best_assignments(torch.from_numpy(cost), MOST, limits)
            agrees_to_rounding(found, listed, MOST, float(np.abs(cost[np.isfinite(cost)]).max()))
            if kind in EXACT:
                assert found[1].tolist() == [float(total) for total, _ in listed[:MOST]]
            for k in (1, 2, 11):
                fewer, totals = k_best_assignments(torch.from_numpy(cost), k, limits)
                assert torch.equal(fewer, found[0][:k])
                assert torch.equal(totals, found[1][:k])


def test_large_offsets_of_clients_do_not_disturb_cluster_sizes() -> None:
    # ±2⁴⁹ + eighths: every cost and total is exact, but a sum of two offsets has no room left for eighths.
    rng, offset = numpy_generator(9), np.array([[2.0**49], [-(2.0**49)]] * 3)
    for _ in range(60):
        cost = offset + rng.integers(0, 6, (6, 3)) / 8
        totals = k_best_assignments(torch.from_numpy(cost), MOST, (0, 3))[1]
        assert totals.tolist() == [float(total) for total, _ in every_assignment(cost, (0, 3))[:MOST]]


entries = st.one_of(st.floats(-100, 100), st.integers(-2, 2).map(float), st.floats(-1e6, 1e6, width=32))


@st.composite
def costs(draw: st.DrawFn) -> np.ndarray:
    num_clients, num_clusters = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    row = st.lists(entries, min_size=num_clusters, max_size=num_clusters)
    cost = np.array(draw(st.lists(row, min_size=num_clients, max_size=num_clients)))
    banned = draw(st.lists(st.booleans(), min_size=cost.size, max_size=cost.size))
    cost[np.array(banned).reshape(cost.shape) & (np.arange(num_clusters) > 0)] = math.inf
    return cost


@settings(deadline=None, derandomize=True, max_examples=80)
@given(costs(), st.integers(1, 40), st.booleans())
def test_k_best_is_sorted_complete_and_a_prefix(cost: np.ndarray, k: int, limited: bool) -> None:
    limits = (0, -(-cost.shape[0] // cost.shape[1]) + 1) if limited else None
    listed = every_assignment(cost, limits)
    if not listed:
        return  # only with bans and limits together; the error has its own test
    found = k_best_assignments(torch.from_numpy(cost), k, limits)
    agrees_to_rounding(found, listed, k, float(np.abs(cost[np.isfinite(cost)]).max()))
    longer = k_best_assignments(torch.from_numpy(cost), k + 1, limits)
    assert torch.equal(longer[0][:k], found[0])
    assert torch.equal(longer[1][:k], found[1])


def test_few_of_many_clients_is_the_beginning_of_all() -> None:
    # More clients than k, with ties across the edge of those who take part: the choice by gap must not show.
    cost = torch.from_numpy(numpy_generator(5).integers(0, 3, (200, 3)).astype(np.float32))
    longest, totals = k_best_assignments(cost, 300)
    assert len(set(rows_of(longest))) == 300
    for k in (1, 2, 3, 50, 199, 200, 201):
        assert torch.equal(k_best_assignments(cost, k)[0], longest[:k])
    assert torch.equal(totals, cost.double().gather(1, longest.T).sum(0))


def test_paper_example_costs_eleven() -> None:
    assignments, totals = k_best_assignments(PAPER_EXAMPLE, 2)
    assert assignments[0].tolist() == [0, 1, 0]
    assert totals.tolist() == [11.0, 14.0]
    assert one_change_assignments(PAPER_EXAMPLE, 1)[1].tolist() == [11.0]


def test_one_change_misses_the_fourth_best() -> None:
    cost = torch.tensor([[0.0, 1.0], [0.0, 2.0], [0.0, 4.0]])
    assert k_best_assignments(cost, 5)[1].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assignments, totals = one_change_assignments(cost, 5)
    assert totals.tolist() == [0.0, 1.0, 2.0, 4.0]  # 3 = 1 + 2 needs two changes; and it runs out after C(K − 1)
    assert rows_of(assignments) == [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]


def test_one_change_differs_from_the_fourth_entry_on() -> None:
    rng, first_difference = numpy_generator(6), []
    for _ in range(200):
        cost = torch.from_numpy(rng.integers(0, 2**30, (5, 3)) / 2**20)
        exact, heuristic = k_best_assignments(cost, 11), one_change_assignments(cost, 11)
        assert torch.equal(exact[0][:3], heuristic[0][:3])
        assert bool((heuristic[1] >= exact[1]).all())
        differs = (exact[1] != heuristic[1]).nonzero()[:, 0].tolist()
        first_difference.append(differs[0] + 1 if differs else None)
    assert first_difference.count(4) > 20
    assert min(first for first in first_difference if first is not None) == 4


nan, inf = math.nan, math.inf


@pytest.mark.parametrize("search", [k_best_assignments, one_change_assignments])
@pytest.mark.parametrize(
    ("cost", "k", "message"),
    [
        ([[0.0, 1.0], [nan, 1.0]], 1, r"cost holds NaN for client 1; allowed are finite"),
        ([[0.0, 1.0], [inf, nan]], 1, r"cost holds NaN for client 1"),
        ([[-inf, 1.0]], 1, r"cost holds −∞ for client 0; allowed are finite"),
        ([[0.0, 1.0], [0.0, inf], [inf, inf]], 1, r"cost is \+∞ for every cluster for client 2; allowed are finite"),
        ([[]], 1, r"cost must be a non-empty floating-point \(client, cluster\) matrix, got \(1, 0\)"),
        ([0.0, 1.0], 1, r"cost must be .* matrix, got \(2,\)"),
        ([[0.0]], 0, r"k must be at least 1, got 0"),
        ([[0.0]], -3, r"k must be at least 1, got -3"),
    ],
)
def test_bad_cost_is_refused(search: Callable[..., object], cost: list[list[float]], k: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        search(torch.tensor(cost), k)


def test_integer_cost_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cost must be .*floating-point.*int64"):
        k_best_assignments(torch.tensor([[1, 2]]), 1)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ((2, 1), r"cluster_size must be \(fewest, most\) with 0 ≤ fewest ≤ most, got \(2, 1\)"),
        ((-1, 2), r"cluster_size must be"),
        ((2, 3), r"cluster_size \(2, 3\) with 2 clusters allows 4 to 6 clients, not 3"),
        ((0, 1), r"cluster_size \(0, 1\) with 2 clusters allows 0 to 2 clients, not 3"),
    ],
)
def test_impossible_cluster_size_is_refused(limits: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        k_best_assignments(PAPER_EXAMPLE, 1, limits)


def test_cluster_size_that_infinite_costs_rule_out_is_refused() -> None:
    cost = torch.tensor([[0.0, inf], [0.0, inf], [0.0, 1.0]])
    assert k_best_assignments(cost, 9, (0, 2))[0].tolist() == [[0, 0, 1]]
    with pytest.raises(ValueError, match="cluster_size: no assignment of finite cost"):
        k_best_assignments(torch.tensor([[0.0, inf]] * 3), 1, (0, 2))


def brute_branches(log_weight: Tensor, cost: Tensor) -> list[tuple[float, int, tuple[int, ...]]]:
    """(log-weight, parent, assignment) of every continuation, unnormalised, best first."""
    continued = [
        (float(log_weight[h]) - float(total), h, rank, assignment)
        for h in range(len(cost))
        if log_weight[h] > -inf
        for rank, (total, assignment) in enumerate(every_assignment(cost[h].double().numpy()))
    ]
    continued.sort(key=lambda entry: (-entry[0], entry[1], entry[2]))
    return [(weight, h, assignment) for weight, h, _, assignment in continued]


@pytest.mark.parametrize("k", [1, 2, 5, 40, 1000])
def test_branch_is_the_best_over_all_parents_together(k: int) -> None:
    rng = numpy_generator(7)
    log_weight = torch.tensor([-0.5, -2.0, -inf, -1.0], dtype=torch.float64)
    cost = torch.from_numpy(rng.integers(0, 8, (4, 3, 3)) / 4)
    every = brute_branches(log_weight, cost)
    expected = every[:k]
    found = branch(log_weight, cost, k)
    assert list(zip(found.parent.tolist(), rows_of(found.assignment), strict=True)) == [e[1:] for e in expected]
    by_hand = np.array([weight for weight, _, _ in expected])
    by_hand -= math.log(math.fsum(math.exp(weight) for weight in by_hand))
    np.testing.assert_allclose(found.log_weight.numpy(), by_hand, atol=1e-12)
    assert 2 not in found.parent  # a parent without weight has no continuation
    assert len(found.parent) == min(k, 3 * 3**3)


def test_branch_keeps_its_digits_far_from_zero() -> None:
    # Log-likelihoods of real data are hundreds of thousands: exp would underflow.
    cost = torch.tensor([[[500_000.0, 500_001.0]], [[500_000.5, 500_009.0]]], dtype=torch.float64)
    found = branch(torch.tensor([0.0, 0.0]), cost, 3)
    odds = np.exp([0.0, -0.5, -1.0])
    np.testing.assert_allclose(found.log_weight.exp().numpy(), odds / odds.sum(), rtol=1e-9)
    assert found.parent.tolist() == [0, 1, 0]


def test_branch_respects_cluster_size() -> None:
    found = branch(torch.zeros(1), PAPER_EXAMPLE.double()[None], 99, cluster_size=(1, 2))
    assert len(found.parent) == 2**3 - 2
    assert all(0 < row.sum() < 3 for row in found.assignment)


def test_cluster_size_counts_clients_that_are_not_asked() -> None:
    """Against the list of all assignments of all clients in which those that are not asked are where they are."""
    limits, k = (2, 4), 7
    for seed in range(20):
        rng = numpy_generator(10, seed)
        places = rng.permutation([0, 0, 0, 1, 1, 1, 2, 2])[: rng.integers(5)]  # of those who are not asked
        cost = rng.normal(size=(8 - len(places), 3))
        stuck = np.full((len(places), 3), math.inf)
        stuck[np.arange(len(places)), places] = 0.0
        listed = every_assignment(np.concatenate([cost, stuck]), limits)
        elsewhere = torch.from_numpy(np.bincount(places, minlength=3))[None]
        found = branch(torch.zeros(1), torch.from_numpy(cost)[None], k, limits, elsewhere=elsewhere)
        assert found.assignment.tolist() == [list(row[: len(cost)]) for _, row in listed[:k]]


def test_clusters_have_fewer_while_few_clients_are_known() -> None:
    cost = torch.tensor([[[0.0, 1.0], [0.0, 2.0], [0.0, 3.0]]])
    for elsewhere, expected in [([0, 0], [1, 0, 0]), ([3, 0], [1, 1, 1]), ([0, 3], [0, 0, 0]), ([9, 0], [1, 1, 1])]:
        found = branch(torch.zeros(1), cost, 1, (3, 9), elsewhere=torch.tensor([elsewhere]))
        assert found.assignment.tolist() == [expected]


@pytest.mark.parametrize(
    ("log_weight", "cost", "k", "message"),
    [
        (torch.zeros(2), torch.zeros(3, 1, 1), 1, r"log_weight must be \(hypothesis,\) beside cost .*\(2,\)"),
        (torch.zeros(2), torch.zeros(2, 1), 1, r"beside cost \(hypothesis, client, cluster\)"),
        (torch.zeros(0), torch.zeros(0, 1, 1), 1, r"log_weight must be \(hypothesis,\)"),
        (torch.tensor([nan]), torch.zeros(1, 1, 1), 1, r"log_weight must not hold NaN or \+∞"),
        (torch.tensor([inf]), torch.zeros(1, 1, 1), 1, r"log_weight must not hold NaN or \+∞"),
        (torch.tensor([0.0, nan]), torch.zeros(2, 1, 1), 1, r"log_weight must not hold NaN or \+∞"),
        (torch.tensor([-inf]), torch.zeros(1, 1, 1), 1, r"log_weight .* at least one entry must be finite"),
        (torch.zeros(1), torch.zeros(1, 1, 1), 0, r"k must be at least 1, got 0"),
        (torch.zeros(1), torch.full((1, 1, 1), nan), 1, r"cost holds NaN"),
    ],
)
def test_bad_branch_is_refused(log_weight: Tensor, cost: Tensor, k: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        branch(log_weight, cost, k)


def weighted(*weights: float) -> Branches:
    """Stories told apart by their parent's number."""
    count = len(weights)
    log_weight = torch.tensor(weights, dtype=torch.float64).log()
    return Branches(torch.arange(count), torch.arange(count)[:, None].expand(-1, 2), log_weight)


def test_normalised_weights_sum_to_one() -> None:
    log_weight = normalise(torch.tensor([-1e5, -1e5 - 1, -1e6], dtype=torch.float64))
    assert float(log_weight.exp().sum()) == pytest.approx(1, abs=1e-12)
    assert float(log_weight[0] - log_weight[1]) == pytest.approx(1, abs=1e-9)


def test_reweight_sorts_and_normalises() -> None:
    found = reweight(weighted(0.5, 0.3, 0.2), torch.tensor([1.0, 3.0, 1.0]))
    assert found.parent.tolist() == [1, 0, 2]  # equal weights keep their order
    assert found.assignment[:, 0].tolist() == [1, 0, 2]
    odds = np.exp([3.0, 1.0, 1.0])
    np.testing.assert_allclose(found.log_weight.exp().numpy(), odds / odds.sum(), rtol=1e-12)
    with pytest.raises(ValueError, match=r"log_weight must be \(hypothesis,\)"):
        reweight(weighted(0.5, 0.5), torch.zeros(3))


@pytest.mark.parametrize(
    ("max_hypotheses", "min_weight", "kept"),
    [
        (9, 0.0, [0.5, 0.25, 0.15, 0.1]),
        (2, 0.0, [2 / 3, 1 / 3]),
        (1, 0.0, [1.0]),
        (9, 0.2, [2 / 3, 1 / 3]),
        (9, 0.25, [2 / 3, 1 / 3]),  # at the threshold is not under it
        (1, 0.2, [1.0]),
        (9, 0.9, [1.0]),  # never all
        (3, 0.05, [5 / 9, 2.5 / 9, 1.5 / 9]),
    ],
)
def test_prune_by_hand(max_hypotheses: int, min_weight: float, kept: list[float]) -> None:
    found = prune(weighted(0.5, 0.25, 0.15, 0.1), max_hypotheses, min_weight)
    np.testing.assert_allclose(found.log_weight.exp().numpy(), kept, rtol=1e-12)
    assert found.parent.tolist() == found.assignment[:, 0].tolist() == list(range(len(kept)))


@pytest.mark.parametrize(
    ("max_hypotheses", "min_weight", "message"),
    [
        (0, 0.0, "max_hypotheses must be at least 1, got 0"),
        (1, 1.0, r"min_weight must be in \[0, 1\), got 1.0"),
        (1, -0.1, "min_weight must be"),
        (1, nan, "min_weight must be"),
    ],
)
def test_bad_prune_is_refused(max_hypotheses: int, min_weight: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prune(weighted(1.0), max_hypotheses, min_weight)


# Three clients, two clusters, three hypotheses; the last leaves client 2 out.
STORIES = torch.tensor([[0, 0, 1], [0, 1, 1], [1, 1, -1]])
STORY_WEIGHT = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()


def test_marginals_by_hand() -> None:
    expected = [[0.8, 0.2], [0.5, 0.5], [0.0, 0.8]]
    np.testing.assert_allclose(marginals(STORIES, STORY_WEIGHT, 2).numpy(), expected, atol=1e-15)


def test_co_association_has_all_digits_of_the_weights() -> None:
    log_weight = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64).log()  # none of which float32 can hold
    shared = co_association(torch.tensor([[0, 0, 1], [0, 1, 1], [0, 0, 0]]), log_weight)
    expected = [[1.0, 0.8, 0.7], [0.8, 1.0, 0.9], [0.7, 0.9, 1.0]]
    np.testing.assert_allclose(shared.numpy(), expected, rtol=0, atol=1e-15)


def test_co_association_by_hand() -> None:
    expected = [[1.0, 0.7, 0.0], [0.7, 1.0, 0.3], [0.0, 0.3, 0.8]]
    np.testing.assert_allclose(co_association(STORIES, STORY_WEIGHT).numpy(), expected, atol=1e-15)


def test_entropy_by_hand() -> None:
    probability = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.25, 0.75]])
    expected = [0.0, math.log(2), 0.25 * math.log(4) + 0.75 * math.log(4 / 3)]
    np.testing.assert_allclose(entropy(probability).numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("summary", [lambda a, w: marginals(a, w, 2), co_association])
def test_summaries_refuse_weights_of_other_hypotheses(summary: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(ValueError, match=r"log_weight must be \(hypothesis,\) beside assignment"):
        summary(STORIES, STORY_WEIGHT[:2])


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 20), st.integers(0, 10**6))
def test_all_hypotheses_together_are_independent_clients(
    num_clients: int, num_clusters: int, k: int, seed: int
) -> None:
    # Over all K^C assignments the marginals factorise into each client's own softmax; over any k they sum to one.
    cost = torch.from_numpy(numpy_generator(seed).normal(size=(num_clients, num_clusters)))
    full = branch(torch.zeros(1), cost[None], num_clusters**num_clients)
    probability = marginals(full.assignment, full.log_weight, num_clusters)
    np.testing.assert_allclose(probability.numpy(), (-cost).softmax(1).numpy(), atol=1e-12)
    together = probability @ probability.T
    together.fill_diagonal_(1.0)
    np.testing.assert_allclose(co_association(full.assignment, full.log_weight).numpy(), together.numpy(), atol=1e-12)
    some = branch(torch.zeros(1), cost[None], k)
    assert float(some.log_weight.exp().sum()) == pytest.approx(1)
    np.testing.assert_allclose(marginals(some.assignment, some.log_weight, num_clusters).sum(1).numpy(), 1, atol=1e-12)


def test_align_undoes_a_renumbering() -> None:
    reference = torch.tensor([0, 0, 1, 1, 2, 2, -1])
    renumbered = torch.where(reference >= 0, torch.tensor([2, 0, 1])[reference.clamp(min=0)], reference)
    one_moved = renumbered.clone()
    one_moved[0] = renumbered[2]
    aligned = align(torch.stack([reference, renumbered, one_moved]), 3)
    assert aligned.tolist() == [reference.tolist(), reference.tolist(), [1, 0, 1, 1, 2, 2, -1]]


def test_align_agrees_as_much_as_any_renumbering() -> None:
    rng = numpy_generator(8)
    assignment = torch.from_numpy(rng.integers(-1, 4, (30, 9)))
    aligned, known = align(assignment, 4), assignment >= 0
    assert torch.equal(aligned >= 0, known)
    weight = torch.full((30,), -math.log(30), dtype=torch.float64)
    assert torch.equal(co_association(aligned, weight), co_association(assignment, weight))  # the same groups
    for row, new in zip(assignment, aligned, strict=True):
        both = (row >= 0) & (assignment[0] >= 0)
        agreements = [
            int((torch.tensor(order)[row[both]] == assignment[0][both]).sum())
            for order in itertools.permutations(range(4))
        ]
        assert int((new[both] == assignment[0][both]).sum()) == max(agreements)


@pytest.mark.parametrize(("num_clients", "num_clusters"), SHAPES)
def test_num_hypotheses_is_the_papers_product(num_clients: int, num_clusters: int) -> None:
    C, K = num_clients, num_clusters
    assert num_hypotheses(K, C, overlapping=True) == math.prod(
        sum(math.comb(C, members) for members in range(C + 1)) for _ in range(K)
    )
    assert num_hypotheses(K, C, overlapping=False) == len(list(itertools.product(range(K), repeat=C)))


def test_num_hypotheses_is_an_exact_integer() -> None:
    assert num_hypotheses(10, 100, overlapping=False) == 10**100
    assert num_hypotheses(3, 0, overlapping=False) == 1
    with pytest.raises(ValueError, match="num_clusters must be ≥ 1 and num_clients ≥ 0, got 0 and 2"):
        num_hypotheses(0, 2, overlapping=False)
    with pytest.raises(ValueError, match="num_clients"):
        num_hypotheses(2, -1, overlapping=True)
