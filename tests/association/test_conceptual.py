"""The oracle against first principles, and the practical recursion against the oracle."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch
from torch import Tensor

from bcfl.association.conceptual import (
    MAX_HYPOTHESES,
    ConjugateClient,
    Story,
    conceptual_bcfl,
    joint_log_evidence,
    log_likelihood_at_mean,
)
from bcfl.association.hypotheses import Branches, branch, prune, reweight
from bcfl.belief.gaussian import Gaussian, fuse, merge, stack
from bcfl.randomness import generator

Rounds = list[list[ConjugateClient]]


def world(seed: int, num_rounds: int, num_clients: int, num_clusters: int) -> tuple[list[Gaussian], Rounds]:
    """Priors and rounds of data with true groups, close enough that the posterior is spread over many stories."""
    draws, num_parameters = generator(seed, "world"), 3

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draws, dtype=torch.float64)

    truth = normal(num_clusters, num_parameters)
    priors = [Gaussian(row, normal(num_parameters).exp()) for row in truth + 0.7 * normal(num_clusters, num_parameters)]
    columns = torch.linalg.qr(normal(6, num_parameters)).Q
    rounds = []
    for _ in range(num_rounds):
        clients = []
        for j in range(num_clients):
            x = columns * (0.5 + torch.rand(num_parameters, generator=draws, dtype=torch.float64))
            clients.append(ConjugateClient.from_data(x, x @ truth[j % num_clusters] + normal(6), 1.0))
        rounds.append(clients)
    return priors, rounds


# --- one client ------------------------------------------------------------------------------------------------------


def data(seed: int = 0) -> tuple[Tensor, Tensor]:
    draws = generator(seed, "data")
    x = torch.linalg.qr(torch.randn(7, 2, generator=draws, dtype=torch.float64)).Q * torch.tensor([1.5, 0.6])
    return x, torch.randn(7, generator=draws, dtype=torch.float64)


def test_likelihood_is_that_of_the_linear_model() -> None:
    x, y = data()
    client = ConjugateClient.from_data(x, y, noise_precision=2.0)
    for omega in torch.randn(5, 2, generator=generator(1), dtype=torch.float64):
        expected = scipy.stats.norm.logpdf(y.numpy(), (x @ omega).numpy(), math.sqrt(0.5)).sum()
        assert float(client.log_likelihood(omega)) == pytest.approx(expected, abs=1e-10)


def test_posterior_is_bayes_rule_for_the_full_linear_model() -> None:
    x, y = data()
    prior = Gaussian(torch.tensor([0.3, -1.0], dtype=torch.float64), torch.tensor([0.5, 3.0], dtype=torch.float64))
    precision = torch.diag(prior.precision) + 2.0 * x.T @ x
    mean = torch.linalg.solve(precision, prior.precision * prior.mean + 2.0 * x.T @ y)
    posterior = ConjugateClient.from_data(x, y, 2.0).posterior(prior)
    torch.testing.assert_close(posterior.mean, mean, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(torch.diag(posterior.precision), precision, rtol=1e-10, atol=1e-10)


def test_evidence_is_the_marginal_likelihood() -> None:
    # y ~ N(X μ₀, I/τ + X Λ₀⁻¹ Xᵀ) once ω is integrated out.
    x, y = data()
    prior = Gaussian(torch.tensor([0.3, -1.0], dtype=torch.float64), torch.tensor([0.5, 3.0], dtype=torch.float64))
    covariance = torch.eye(7, dtype=torch.float64) / 2.0 + x @ torch.diag(prior.variance) @ x.T
    expected = scipy.stats.multivariate_normal((x @ prior.mean).numpy(), covariance.numpy()).logpdf(y.numpy())
    assert float(ConjugateClient.from_data(x, y, 2.0).log_evidence(prior)) == pytest.approx(expected, abs=1e-9)


def test_joint_evidence_is_the_integral_of_the_product() -> None:
    prior = Gaussian(torch.tensor([0.5], dtype=torch.float64), torch.tensor([2.0], dtype=torch.float64))
    clients = [
        ConjugateClient(torch.tensor([m], dtype=torch.float64), torch.tensor([p], dtype=torch.float64), c)
        for m, p, c in [(1.0, 1.0, -0.5), (-1.0, 3.0, 0.2), (0.0, 0.5, -1.0)]
    ]

    def integrand(omega: float) -> float:
        at = torch.tensor([omega], dtype=torch.float64)
        likelihood = math.exp(sum(float(client.log_likelihood(at)) for client in clients))
        return likelihood * float(scipy.stats.norm.pdf(omega, 0.5, math.sqrt(0.5)))

    integral = scipy.integrate.quad(integrand, -10, 10, epsabs=1e-13)[0]
    for order in itertools.permutations(clients):  # the chain rule may be walked in any order
        assert joint_log_evidence(order, prior) == pytest.approx(math.log(integral), abs=1e-9)
    assert joint_log_evidence([], prior) == 0.0


def test_a_column_of_zeros_says_nothing() -> None:
    x, y = data()
    x = torch.stack([x[:, 0], torch.zeros(7, dtype=torch.float64)], 1)
    prior = Gaussian(torch.tensor([0.3, -1.0], dtype=torch.float64), torch.tensor([0.5, 3.0], dtype=torch.float64))
    client = ConjugateClient.from_data(x, y, 2.0)
    posterior = client.posterior(prior)
    assert (float(posterior.mean[1]), float(posterior.precision[1])) == (-1.0, 3.0)
    alone = ConjugateClient.from_data(x[:, :1], y, 2.0)
    assert float(client.log_evidence(prior)) == pytest.approx(float(alone.log_evidence(prior[:1])), abs=1e-12)


def test_columns_that_are_not_orthogonal_are_refused() -> None:
    with pytest.raises(ValueError, match="x must have orthogonal columns"):
        ConjugateClient.from_data(torch.ones(3, 2), torch.ones(3), 1.0)


# --- the oracle ------------------------------------------------------------------------------------------------------


def test_the_oracle_is_bayes_rule_over_whole_histories() -> None:
    # Told without recursion: a story's weight is the evidence, cluster by cluster, of all it ever put there.
    priors, rounds = world(0, num_rounds=2, num_clients=3, num_clusters=2)
    every = [client for clients in rounds for client in clients]
    log_weight, beliefs = {}, {}
    for flat_story in itertools.product(range(2), repeat=6):
        members = [[client for client, own in zip(every, flat_story, strict=True) if own == i] for i in range(2)]
        story = (flat_story[:3], flat_story[3:])
        log_weight[story] = sum(joint_log_evidence(m, prior) for m, prior in zip(members, priors, strict=True))
        beliefs[story] = [fuse([c.posterior(p) for c in m], p, "exact") for m, p in zip(members, priors, strict=True)]
    total = float(torch.tensor(list(log_weight.values()), dtype=torch.float64).logsumexp(0))
    stories = conceptual_bcfl(priors, rounds)
    assert len(stories) == 2**6
    assert [s.log_weight for s in stories] == sorted((s.log_weight for s in stories), reverse=True)
    for story in stories:
        assert story.log_weight == pytest.approx(log_weight[story.assignments] - total, abs=1e-9)
        for found, expected in zip(story.beliefs, beliefs[story.assignments], strict=True):
            assert_close(found, expected)


def test_the_oracle_without_data_is_the_prior() -> None:
    priors, _ = world(0, 0, 1, 2)
    (story,) = conceptual_bcfl(priors, [])
    assert (story.assignments, story.log_weight, story.beliefs) == ((), 0.0, tuple(priors))


def test_the_oracle_refuses_above_its_limit_naming_the_number() -> None:
    priors, rounds = world(0, num_rounds=3, num_clients=4, num_clusters=3)
    with pytest.raises(ValueError, match=f"needs {3**12} hypotheses, more than the limit of {MAX_HYPOTHESES}"):
        conceptual_bcfl(priors, rounds)
    priors, rounds = world(0, num_rounds=2, num_clients=2, num_clusters=2)
    with pytest.raises(ValueError, match="needs 16 hypotheses, more than the limit of 15: use fewer clients"):
        conceptual_bcfl(priors, rounds, max_hypotheses=15)
    assert len(conceptual_bcfl(priors, rounds, max_hypotheses=16)) == 16


# --- the practical recursion against it ------------------------------------------------------------------------------


def assert_close(left: Gaussian, right: Gaussian, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(left.mean, right.mean, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(left.precision, right.precision, rtol=tolerance, atol=tolerance)


def recursion(
    priors: Sequence[Gaussian], rounds: Rounds, max_hypotheses: int, *, exact_evidence: bool
) -> dict[tuple[tuple[int, ...], ...], Story]:
    """BCFL-MH with the package's own parts: score at the means → branch (→ reweight) → prune → fit → fuse."""
    stories = [Story((), 0.0, tuple(priors))]
    for clients in rounds:
        log_weight = torch.tensor([story.log_weight for story in stories], dtype=torch.float64)
        means = [stack(story.beliefs).mean for story in stories]
        cost = -torch.stack([torch.stack([c.log_likelihood(m) for c in clients]) for m in means])
        # Exact evidence is not a sum over clients, so every continuation is weighed before any is dropped.
        every = len(stories) * len(priors) ** len(clients)
        branches = branch(log_weight, cost, every if exact_evidence else max_hypotheses)
        if exact_evidence:
            branches = reweight(branches, joint_log_weight(branches, stories, clients))
        kept = prune(branches, max_hypotheses)
        stories = [
            continued(stories[parent], tuple(assignment), weight, clients)
            for parent, assignment, weight in zip(
                kept.parent.tolist(), kept.assignment.tolist(), kept.log_weight.tolist(), strict=True
            )
        ]
    assert len({story.assignments for story in stories}) == len(stories)
    return {story.assignments: story for story in stories}


def joint_log_weight(branches: Branches, stories: list[Story], clients: list[ConjugateClient]) -> Tensor:
    weights = []
    for parent, assignment in zip(branches.parent.tolist(), branches.assignment.tolist(), strict=True):
        weight = stories[parent].log_weight
        for i, belief in enumerate(stories[parent].beliefs):
            weight += joint_log_evidence([c for c, own in zip(clients, assignment, strict=True) if own == i], belief)
        weights.append(weight)
    return torch.tensor(weights, dtype=torch.float64)


def continued(parent: Story, assignment: tuple[int, ...], log_weight: float, clients: list[ConjugateClient]) -> Story:
    beliefs = tuple(
        fuse([c.posterior(belief) for c, own in zip(clients, assignment, strict=True) if own == i], belief, "exact")
        for i, belief in enumerate(parent.beliefs)
    )
    return Story((*parent.assignments, assignment), log_weight, beliefs)


def total_variation(found: dict[tuple[tuple[int, ...], ...], Story], oracle: list[Story]) -> float:
    """½ Σ |p − q| over all stories of the oracle; a story that was dropped has weight 0."""
    weight = {assignments: math.exp(story.log_weight) for assignments, story in found.items()}
    difference = [abs(math.exp(story.log_weight) - weight.get(story.assignments, 0.0)) for story in oracle]
    return 0.5 * math.fsum(difference)


EVIDENCES = {True: joint_log_evidence, False: log_likelihood_at_mean}


@pytest.mark.parametrize("exact_evidence", [True, False])
@pytest.mark.parametrize(("num_clients", "num_clusters"), [(2, 2), (3, 2), (2, 3)])
def test_keeping_every_hypothesis_reproduces_the_oracle(
    num_clients: int, num_clusters: int, exact_evidence: bool
) -> None:
    # With the likelihood at the mean the costs add up over clients, and branch alone must give the weights.
    priors, rounds = world(1, 3, num_clients, num_clusters)
    oracle = conceptual_bcfl(priors, rounds, EVIDENCES[exact_evidence])
    found = recursion(priors, rounds, len(oracle), exact_evidence=exact_evidence)
    assert len(found) == len(oracle) == num_clusters ** (3 * num_clients)
    for story in oracle:
        assert found[story.assignments].log_weight == pytest.approx(story.log_weight, abs=1e-9)
        assert_close(stack(found[story.assignments].beliefs), stack(story.beliefs))
    assert total_variation(found, oracle) < 1e-9


@pytest.mark.parametrize("exact_evidence", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_distance_to_the_oracle_falls_as_more_is_kept(seed: int, exact_evidence: bool) -> None:
    priors, rounds = world(seed, 3, 3, 2)
    oracle = conceptual_bcfl(priors, rounds, EVIDENCES[exact_evidence])
    distance = [
        total_variation(recursion(priors, rounds, kept, exact_evidence=exact_evidence), oracle)
        for kept in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    ]
    assert all(more < fewer for fewer, more in itertools.pairwise(distance)), distance
    assert distance[0] > 0.1  # the single best story is not the whole of it
    assert distance[-1] < 1e-9


def test_consensus_has_the_moments_of_the_kept_mixture() -> None:
    # BCFL-C: the M best of one past hypothesis, updated, then merged into one belief per cluster.
    priors, rounds = world(2, 1, 3, 2)
    kept = recursion(priors, rounds, 4, exact_evidence=False).values()
    weight = np.exp([story.log_weight for story in kept])
    assert weight.sum() == pytest.approx(1)
    beliefs = stack([stack(story.beliefs) for story in kept])  # (hypothesis, cluster, parameter)
    merged = merge(beliefs, torch.tensor([story.log_weight for story in kept], dtype=torch.float64))
    mean = np.einsum("h,hip->ip", weight, beliefs.mean.numpy())
    second = np.einsum("h,hip->ip", weight, beliefs.variance.numpy() + beliefs.mean.numpy() ** 2)
    np.testing.assert_allclose(merged.mean.numpy(), mean, rtol=1e-9)
    np.testing.assert_allclose(merged.variance.numpy(), second - mean**2, rtol=1e-9)
    assert bool((merged.variance > beliefs.variance.min(0).values).all())  # the spread of the means is in it
