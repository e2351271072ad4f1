"""Memberships against exact enumeration of all assignments, and hypotheses that differ by hand."""

import itertools
import json
import math

import pytest
import torch
from torch import Tensor

from bcfl.association.distinct import LEAST_WEIGHT, alike, futures, heaviest_of_each, without_near_copies
from bcfl.association.hypotheses import Branches, normalise
from bcfl.association.membership import co_membership, log_odds, memberships, mixed, read, rounded, written
from bcfl.belief.evidence import hypothesis_evidence
from bcfl.randomness import generator


def enumerated(score: Tensor, log_point_weight: Tensor, log_prior: Tensor, allowed: tuple[int, int]) -> Tensor:
    """The same by brute force: every assignment, weighed by its joint evidence."""
    num_clients, num_clusters, _ = score.shape
    found = torch.zeros(num_clients, num_clusters, dtype=torch.float64)
    for row in itertools.product(range(num_clusters), repeat=num_clients):
        if all(allowed[0] <= row.count(k) <= allowed[1] for k in range(num_clusters)):
            own = torch.tensor([row])
            log_weight = hypothesis_evidence(score, log_point_weight, own, torch.arange(num_clusters)[None])
            weight = float((log_weight + log_prior[torch.arange(num_clients), own[0]].sum()).exp())
            found[torch.arange(num_clients), own[0]] += weight
    return found / found.sum(1, keepdim=True)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("num_points", "limits"), [(1, None), (3, None), (1, (1, 3))])
def test_memberships_are_those_of_all_assignments(seed: int, num_points: int, limits: tuple[int, int] | None) -> None:
    draws = generator(seed, "memberships")
    score = 2 * torch.randn(5, 3, num_points, generator=draws, dtype=torch.float64)
    log_alpha = torch.randn(num_points, generator=draws, dtype=torch.float64).log_softmax(0)
    log_prior = torch.randn(5, 3, generator=draws, dtype=torch.float64).log_softmax(1)
    found = memberships(score, log_alpha, log_prior, limits, num_best=3**5)
    assert torch.allclose(found, enumerated(score, log_alpha, log_prior, limits or (0, 5)), rtol=0, atol=1e-9)


def test_with_very_many_points_they_are_taken_side_by_side() -> None:
    draws = generator(0, "points side by side")
    score = torch.randn(3, 2, 100, generator=draws, dtype=torch.float64)
    even = torch.full((100,), -math.log(100), dtype=torch.float64)
    nobody = torch.zeros(2, dtype=torch.float64)
    found = memberships(score, even, nobody)
    weight = score.logsumexp(1).sum(0).softmax(0)  # of point l, whatever cluster each client is in
    expected = torch.einsum("l,jkl->jk", weight, score.softmax(1))
    assert torch.allclose(found, expected, atol=1e-12)


def test_hypotheses_mix_under_the_first_ones_numbers_and_pairs_need_none() -> None:
    membership = torch.tensor([[[0.9, 0.1], [0.2, 0.8]], [[0.0, 1.0], [1.0, 0.0]]], dtype=torch.float64)
    log_weight = torch.tensor([0.75, 0.25], dtype=torch.float64).log()
    together = mixed(membership, torch.tensor([[0, 1], [1, 0]]), log_weight)
    assert torch.allclose(together, torch.tensor([[0.925, 0.075], [0.15, 0.85]], dtype=torch.float64))
    shared = co_membership(membership, log_weight)
    assert shared[0, 1] == pytest.approx(0.75 * (0.9 * 0.2 + 0.1 * 0.8))
    assert shared.diagonal().eq(1).all()


def test_what_is_written_of_memberships_is_read_back_to_the_bit() -> None:
    of_parents = rounded(torch.randn(5, 7, 4, dtype=torch.float64).mul(9).softmax(-1))
    parent = torch.tensor([3, 1, 3, 0])
    for told in (of_parents[parent], of_parents[0]):
        lines = written(told, parent)
        assert len(lines["rows"]) == (3 if told.dim() == 3 else 1)
        assert torch.equal(read(json.loads(json.dumps(lines)), parent), told)
    assert written(rounded(torch.tensor([[[1e-9, 1 - 1e-9]]])), torch.tensor([0]))["rows"] == [[1]]


def branches_of(rows: list[list[int]], parent: list[int], weight: list[float]) -> Branches:
    return Branches(torch.tensor(parent), torch.tensor(rows), torch.tensor(weight, dtype=torch.float64).log())


def test_of_one_grouping_under_two_names_the_heaviest_is_kept_with_the_weight_of_both() -> None:
    told = branches_of([[0, 0, 1], [0, 1, 1], [1, 1, 0]], [0, 0, 1], [0.4, 0.35, 0.25])
    groups = alike(told.assignment)
    assert groups == [[0, 2], [1]]
    kept = heaviest_of_each(told, groups)
    assert kept.assignment.tolist() == [[0, 0, 1], [0, 1, 1]]
    assert kept.log_weight.exp().tolist() == pytest.approx([0.65, 0.35])
    heavier_together = branches_of([[0, 1, 1], [0, 0, 1], [1, 1, 0]], [0, 0, 1], [0.4, 0.35, 0.25])
    kept = heaviest_of_each(heavier_together, alike(heavier_together.assignment))
    assert kept.assignment.tolist() == [[0, 0, 1], [0, 1, 1]]


def test_a_near_copy_is_one_that_the_data_leave_no_doubt_about() -> None:
    membership = torch.tensor([[0.6, 0.4], [1 - 1e-5, 1e-5], [1.0, 0.0]], dtype=torch.float64).expand(4, -1, -1)
    told = branches_of([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]], [0] * 4, [0.25] * 4)
    odds = log_odds(membership, told.assignment)
    assert odds.exp().tolist() == pytest.approx([1, 2 / 3, 1e-5, 0], rel=1e-4)
    kept = without_near_copies(told, odds)
    assert kept.assignment.tolist() == [[0, 0, 0], [1, 0, 0]]
    assert torch.equal(kept.log_weight, normalise(torch.zeros(2, dtype=torch.float64)))
    assert len(without_near_copies(told, torch.full((4,), math.log(LEAST_WEIGHT) - 1)).parent) == 4


def test_stories_of_other_numbers_have_one_future_and_those_of_other_places_have_not() -> None:
    model_of = torch.tensor([[3, 5], [5, 3], [3, 5], [3, 6]])
    assignment = torch.tensor([[0, 1, 0], [0, 0, 1], [1, 1, 0], [0, 1, 0]])
    away = torch.tensor([False, True, False])
    first, renamed, same, other = futures(model_of, assignment, away)
    assert first == renamed == same  # the second client is away, with belief 5
    assert other != first
    assert futures(model_of, assignment, ~away)[2] != futures(model_of, assignment, ~away)[0]
