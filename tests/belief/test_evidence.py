"""Evidence by points against the exact evidence of linear-Gaussian clients, and against sums by hand."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from bcfl.association.conceptual import ConjugateClient, joint_log_evidence, log_likelihood_at_mean
from bcfl.association.hypotheses import branch
from bcfl.belief.evidence import (
    PointKind,
    client_evidence,
    coarsen,
    evidence_points,
    hypothesis_evidence,
    sum_error,
    temper_scores,
)
from bcfl.belief.gaussian import Gaussian
from bcfl.randomness import generator


def federation(seed: int, num_clients: int, num_beliefs: int, num_parameters: int, gain: float = 1.0):
    """Clients whose data carries `gain` times the information of the beliefs, and the beliefs."""
    draws = generator(seed, "federation")

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draws, dtype=torch.float64)

    precision = torch.full((num_beliefs, num_parameters), 2.0, dtype=torch.float64)
    beliefs = Gaussian(normal(num_beliefs, num_parameters), precision)
    information = gain * 2.0 * (0.5 + torch.rand(num_clients, num_parameters, generator=draws, dtype=torch.float64))
    clients = [
        ConjugateClient(normal(num_parameters), row, float(-10 * torch.rand(1, generator=draws))) for row in information
    ]
    return clients, beliefs


def likelihoods(clients: Sequence[ConjugateClient], points: Tensor) -> Tensor:
    """What the clients answer for points (point, belief, parameter)."""
    return torch.stack([client.log_likelihood(points).T for client in clients])  # (client, belief, point)


def exact_evidence(clients: Sequence[ConjugateClient], beliefs: Gaussian, assignment: Tensor) -> float:
    """The joint evidence of one hypothesis whose cluster i holds belief i."""
    return sum(
        joint_log_evidence([c for c, own in zip(clients, assignment.tolist(), strict=True) if own == i], belief)
        for i, belief in enumerate(beliefs)
    )


ASSIGNMENT = torch.tensor([[0, 0, 1], [0, 0, 0], [1, 0, 1]])  # hypothesis × client; the second leaves cluster 1 empty
BELIEF_OF = torch.tensor([[0, 1]]).expand(3, -1)


def approximate(seed: int, num_points: int, kind: PointKind, gain: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """(approximation, exact) log-evidence of the three hypotheses of one random federation."""
    clients, beliefs = federation(seed, 3, 2, 2, gain)
    points, log_point_weight = evidence_points(beliefs, num_points, kind, generator(seed, "points"))
    found = hypothesis_evidence(likelihoods(clients, points), log_point_weight, ASSIGNMENT, BELIEF_OF)
    return found.numpy(), np.array([exact_evidence(clients, beliefs, row) for row in ASSIGNMENT])


def test_one_point_is_the_mean() -> None:
    clients, beliefs = federation(0, 3, 2, 4)
    for kind in ("random", "sigma"):
        points, log_point_weight = evidence_points(beliefs, 1, kind, generator(0))
        assert torch.equal(points, beliefs.mean[None])
        assert log_point_weight.tolist() == [0.0]
        found = hypothesis_evidence(likelihoods(clients, points), log_point_weight, ASSIGNMENT, BELIEF_OF)
        for row, log_evidence in zip(ASSIGNMENT, found, strict=True):
            by_hand = sum(
                log_likelihood_at_mean([c for c, own in zip(clients, row, strict=True) if own == i], belief)
                for i, belief in enumerate(beliefs)
            )
            assert float(log_evidence) == pytest.approx(by_hand, abs=1e-12)


def test_at_the_mean_the_evidence_is_minus_the_cost_of_the_assignment() -> None:
    clients, beliefs = federation(1, 4, 2, 3)
    score = likelihoods(clients, beliefs.mean[None])  # (client, belief, point)
    found = branch(torch.zeros(1), -score[None, :, :, 0], 16)
    belief_of = torch.tensor([[0, 1]]).expand(16, -1)
    log_evidence = hypothesis_evidence(score, torch.zeros(1, dtype=torch.float64), found.assignment, belief_of)
    torch.testing.assert_close(log_evidence.log_softmax(0), found.log_weight, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["random", "sigma"])
def test_points_are_equally_weighted(kind: PointKind) -> None:
    _, beliefs = federation(2, 1, 2, 3)
    points, log_point_weight = evidence_points(beliefs, 6, kind, generator(2))
    assert points.shape == (6, 2, 3)
    np.testing.assert_allclose(log_point_weight.exp().numpy(), np.full(6, 1 / 6), rtol=1e-15)


@pytest.mark.parametrize("num_points", [10_000, 1_000_000])
def test_random_points_converge_to_the_exact_evidence(num_points: int) -> None:
    # Not only does the error vanish: it is as large as chance makes it. With L the likelihood of a cluster's clients,
    # a mean of N draws has relative variance (E[L²] / E[L]² − 1) / N, and E[L²] is the evidence of the data seen twice.
    scaled = []
    for seed in range(10_000 * 40 // num_points + 4):
        clients, beliefs = federation(seed, 3, 2, 2, gain=0.25)
        found, exact = approximate(seed, num_points, "random", gain=0.25)
        for row, error in zip(ASSIGNMENT, found - exact, strict=True):
            variance = 0.0
            for i, belief in enumerate(beliefs):
                members = [client for client, own in zip(clients, row.tolist(), strict=True) if own == i]
                twice = joint_log_evidence(members * 2, belief) - 2 * joint_log_evidence(members, belief)
                variance += math.expm1(twice) / num_points
            assert variance < 0.05**2  # small enough for the logarithm to be straight
            scaled.append(error / math.sqrt(variance))
    assert np.abs(scaled).max() < 4
    assert 0.6 < np.sqrt(np.mean(np.square(scaled))) < 1.4


@pytest.mark.parametrize("gain", [0.02, 0.1, 0.2])
def test_sigma_points_are_nearer_to_exact_than_the_mean(gain: float) -> None:
    # In the regime where a round's data says less than the belief; 2 parameters need 4 points.
    for seed in range(30):
        at_mean, exact = approximate(seed, 1, "sigma", gain)
        by_sigma, _ = approximate(seed, 4, "sigma", gain)
        assert np.square(by_sigma - exact).sum() < 0.25 * np.square(at_mean - exact).sum(), seed


def test_sigma_points_err_by_a_higher_power_of_the_information() -> None:
    # The mean misses the belief's variance (error ~ gain), the points match it (error ~ gain²).
    def error(num_points: int, gain: float) -> float:
        return float(
            np.mean([np.abs(np.subtract(*approximate(seed, num_points, "sigma", gain))) for seed in range(10)])
        )

    assert error(1, 0.02) / error(1, 0.01) == pytest.approx(2, rel=0.1)
    assert error(4, 0.02) / error(4, 0.01) == pytest.approx(4, rel=0.2)


def test_hypothesis_evidence_by_hand() -> None:
    likelihood = torch.rand(4, 3, 5, generator=generator(3), dtype=torch.float64)  # (client, belief, point)
    weight = torch.rand(5, generator=generator(4), dtype=torch.float64).softmax(0)
    assignment = torch.tensor([[0, 1, 0, 1], [1, 1, 1, 1], [0, -1, 1, -1]])
    belief_of = torch.tensor([[0, 1], [2, 0], [2, 2]])
    found = hypothesis_evidence(likelihood.log(), weight.log(), assignment, belief_of)
    for h in range(3):
        by_hand = 1.0
        for cluster in range(2):
            members = [j for j in range(4) if assignment[h, j] == cluster]
            by_hand *= sum(
                float(weight[point]) * math.prod(float(likelihood[j, belief_of[h, cluster], point]) for j in members)
                for point in range(5)
            )
        assert float(found[h]) == pytest.approx(math.log(by_hand), abs=1e-12)


def test_evidence_does_not_underflow() -> None:
    score = torch.full((3, 1, 2), -1e6)
    found = hypothesis_evidence(score, torch.tensor([0.5, 0.5]).log(), torch.zeros(1, 3, dtype=torch.long),
                                torch.zeros(1, 1, dtype=torch.long))  # fmt: skip
    assert found.tolist() == [pytest.approx(-3e6, abs=1e-6)]


def test_clients_of_one_cluster_share_one_unknown_model() -> None:
    # Two clients that like different points: each alone is well explained, both together are not.
    score = torch.tensor([[[0.0, -50.0]], [[-50.0, 0.0]]], dtype=torch.float64)
    log_point_weight = torch.tensor([0.5, 0.5], dtype=torch.float64).log()
    together = hypothesis_evidence(score, log_point_weight, torch.tensor([[0, 0]]), torch.tensor([[0]]))
    alone = client_evidence(score, log_point_weight)  # (client, belief)
    assert float(alone.sum()) == pytest.approx(2 * math.log(0.5))
    assert float(together) == pytest.approx(-50.0)


def test_tempering_by_hand() -> None:
    score = torch.tensor([[-10.0, -20.0], [-60.0, -30.0]])  # (client, belief)
    num_examples = torch.tensor([10, 30])
    assert temper_scores(score, num_examples, "per_example").tolist() == [[-1.0, -2.0], [-2.0, -1.0]]
    assert temper_scores(score, num_examples, "none").tolist() == score.tolist()
    assert temper_scores(score, num_examples, 5).tolist() == [[-2.0, -4.0], [-12.0, -6.0]]
    per_point = temper_scores(score[:, :, None], num_examples, "per_example")  # (client, belief, point)
    assert per_point[:, :, 0].tolist() == [[-1.0, -2.0], [-2.0, -1.0]]


def test_temperature_flattens_the_weights() -> None:
    score = torch.tensor([[-10.0, -20.0], [-60.0, -30.0]], dtype=torch.float64)
    num_examples = torch.tensor([10, 30])
    best = {
        temperature: float(branch(torch.zeros(1), -temper_scores(score, num_examples, temperature)[None], 4)
                           .log_weight.exp()[0])
        for temperature in ("none", 10.0, "per_example")
    }  # fmt: skip
    assert best["none"] == pytest.approx(1, abs=1e-4)  # collapses to one hypothesis at once
    assert best[10.0] == pytest.approx(1 / (1 + math.exp(-1)) / (1 + math.exp(-3)))
    assert best["per_example"] == pytest.approx(1 / (1 + math.exp(-1)) ** 2)


@pytest.mark.parametrize("temperature", [0, -1.0, math.nan, math.inf, "per_client"])
def test_bad_temperature_is_refused(temperature: object) -> None:
    with pytest.raises(ValueError, match="temperature must be 'per_example', 'none' or a number > 0, got"):
        temper_scores(torch.zeros(1, 1), torch.ones(1), temperature)  # type: ignore[arg-type]


def test_unknown_kind_of_points_is_refused() -> None:
    belief = Gaussian(torch.zeros(2), torch.ones(2))
    with pytest.raises(ValueError, match="unknown kind of evidence points 'grid', allowed: random, sigma"):
        evidence_points(belief, 4, "grid", generator(0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_samples must be at least 1, got 0"):
        evidence_points(belief, 0, "random", generator(0))
    with pytest.raises(ValueError, match="num_points must be an even number ≥ 2, got 5"):
        evidence_points(belief, 5, "sigma", generator(0))


@pytest.mark.parametrize(
    ("log_likelihood", "log_point_weight", "assignment", "belief_of"),
    [
        ((3, 2, 4), (5,), (1, 3), (1, 2)),
        ((3, 2, 4), (4,), (1, 2), (1, 2)),
        ((3, 2, 4), (4,), (2, 3), (1, 2)),
        ((3, 2), (4,), (1, 3), (1, 2)),
    ],
)
def test_mismatched_evidence_is_refused(
    log_likelihood: tuple[int, ...],
    log_point_weight: tuple[int, ...],
    assignment: tuple[int, ...],
    belief_of: tuple[int, ...],
) -> None:
    with pytest.raises(ValueError, match=r"log_likelihood, .* and belief_of must be \(client, belief, point\)"):
        hypothesis_evidence(
            torch.zeros(log_likelihood),
            torch.zeros(log_point_weight),
            torch.zeros(assignment, dtype=torch.long),
            torch.zeros(belief_of, dtype=torch.long),
        )


# --- many examples, many clients --------------------------------------------------------------------------------------


def test_examples_count_as_at_most_the_effective_number() -> None:
    total = torch.tensor([[-10.0, -20.0], [-100.0, -200.0]], dtype=torch.float64)  # of 10 and of 100 examples
    counted = coarsen(total, torch.tensor([10.0, 100.0], dtype=torch.float64), 25.0)
    assert counted.tolist() == [[-10.0, -20.0], [-25.0, -50.0]]


def test_the_error_of_a_sum_is_its_deviation_over_repetitions() -> None:
    """Parts with means of their own and unequal spread: only the spread within a part is noise."""
    part, random = torch.tensor([0] * 6 + [1] * 14), np.random.default_rng(0)
    mean, spread = np.where(part == 0, 50.0, -3.0), np.where(part == 0, 2.0, 0.5)
    draws = torch.from_numpy(random.normal(mean, spread, size=(4000, 20)))
    squares = [sum_error(row, part) ** 2 for row in draws[:800]]
    assert np.mean(squares) == pytest.approx(float(draws.sum(1).var()), rel=0.06)
    assert sum_error(torch.tensor([3.0]), torch.tensor([0])) == 0
