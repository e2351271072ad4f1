"""Conceptual BCFL (Algorithm 1) on conjugate clients: every hypothesis of every round, with exact evidence.

This is the oracle that the practical methods are measured against. It is written in the plainest way, shares no
code with them beyond the Gaussian itself, and is only for a handful of clients, clusters and rounds.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bcfl.association.hypotheses import num_hypotheses
from bcfl.belief.gaussian import Gaussian

MAX_HYPOTHESES = 100_000


@dataclass(frozen=True)
class ConjugateClient:
    """Data of a linear-Gaussian model y = Xω + noise whose columns X are orthogonal, by what is enough to know.

    The likelihood is then a diagonal Gaussian in ω: p(D|ω) = exp(log_constant) · Π exp(−½ λ (ω − ω̂)²).
    """

    estimate: Tensor  # (parameter,) least squares ω̂
    information: Tensor  # (parameter,) λ = noise precision · Σ x²
    log_constant: float

    @staticmethod
    def from_data(x: Tensor, y: Tensor, noise_precision: float) -> "ConjugateClient":
        """The client that holds design x (example, parameter) with orthogonal columns and targets y (example,)."""
        gram = x.T @ x
        if not torch.allclose(gram, torch.diag(gram.diagonal()), atol=1e-9 * float(gram.diagonal().max())):
            raise ValueError("x must have orthogonal columns, otherwise the posterior is not a diagonal Gaussian")
        # A column of zeros says nothing about its parameter: information 0, whatever the estimate.
        estimate = torch.where(gram.diagonal() > 0, (x.T @ y) / gram.diagonal(), 0.0)
        residual = noise_precision * float((y - x @ estimate).square().sum())
        log_constant = 0.5 * (len(y) * math.log(noise_precision / (2 * math.pi)) - residual)
        return ConjugateClient(estimate, noise_precision * gram.diagonal(), log_constant)

    def log_likelihood(self, parameters: Tensor) -> Tensor:
        """log p(D|ω)."""
        return self.log_constant - 0.5 * (self.information * (parameters - self.estimate).square()).sum(-1)

    def posterior(self, prior: Gaussian) -> Gaussian:
        """p(ω|D) from `prior`, in closed form."""
        precision = prior.precision + self.information
        return Gaussian((prior.precision * prior.mean + self.information * self.estimate) / precision, precision)

    def log_evidence(self, prior: Gaussian) -> Tensor:
        """log ∫ p(D|ω) prior(ω) dω, in closed form; the prior must be proper."""
        ratio = prior.precision / (prior.precision + self.information)
        shrunk = ratio * self.information * (self.estimate - prior.mean).square()
        return self.log_constant + 0.5 * (ratio.log() - shrunk).sum(-1)


@dataclass(frozen=True)
class Story:
    """One hypothesis θ₁:ₜ: every round's assignment, its log-weight, and the beliefs that follow from it."""

    assignments: tuple[tuple[int, ...], ...]  # [round][client] -> cluster
    log_weight: float
    beliefs: tuple[Gaussian, ...]  # [cluster]


Evidence = Callable[[Sequence[ConjugateClient], Gaussian], float]


def joint_log_evidence(clients: Iterable[ConjugateClient], prior: Gaussian) -> float:
    """log ∫ Π_j p(Dʲ|ω) prior(ω) dω, by the chain rule: each client under the posterior of those before it."""
    total = 0.0
    for client in clients:
        total += float(client.log_evidence(prior))
        prior = client.posterior(prior)
    return total


def log_likelihood_at_mean(clients: Iterable[ConjugateClient], prior: Gaussian) -> float:
    """log Π_j p(Dʲ|E[ω]): the paper's approximation of the joint evidence (section 3.1, weights)."""
    return sum(float(client.log_likelihood(prior.mean)) for client in clients)


def conceptual_bcfl(
    priors: Sequence[Gaussian],
    rounds: Sequence[Sequence[ConjugateClient]],
    evidence: Evidence = joint_log_evidence,
    max_hypotheses: int = MAX_HYPOTHESES,
) -> list[Story]:
    """The exact posterior mixture (section 3.2) with one cluster per client and round, best story first.

    `rounds` holds, for each round, the clients' new data. Refuses when it would need more than `max_hypotheses`.
    With `evidence=log_likelihood_at_mean` only the weights are approximated, as the paper does.
    """
    num_clusters = len(priors)
    total = math.prod(num_hypotheses(num_clusters, len(clients), overlapping=False) for clients in rounds)
    if total > max_hypotheses:
        raise ValueError(f"the conceptual solution needs {total} hypotheses, more than the limit of {max_hypotheses}: "
                         "use fewer clients, clusters or rounds")  # fmt: skip
    stories = [Story((), 0.0, tuple(priors))]
    for clients in rounds:
        stories = [
            _continue(story, assignment, clients, evidence)
            for story in stories
            for assignment in itertools.product(range(num_clusters), repeat=len(clients))
        ]
    log_total = float(torch.tensor([s.log_weight for s in stories], dtype=torch.float64).logsumexp(0))
    normalised = [Story(s.assignments, s.log_weight - log_total, s.beliefs) for s in stories]
    return sorted(normalised, key=lambda story: (-story.log_weight, story.assignments))


def _continue(
    story: Story, assignment: tuple[int, ...], clients: Sequence[ConjugateClient], evidence: Evidence
) -> Story:
    """The story with one more round in which the clients belong where `assignment` says."""
    log_weight, beliefs = story.log_weight, []
    for cluster, belief in enumerate(story.beliefs):
        members = [client for client, own in zip(clients, assignment, strict=True) if own == cluster]
        log_weight += evidence(members, belief)
        for client in members:  # each posterior is the next one's prior: exact fusion, done one at a time
            belief = client.posterior(belief)
        beliefs.append(belief)
    return Story((*story.assignments, assignment), log_weight, tuple(beliefs))


def partitions(num_clients: int) -> Iterator[tuple[int, ...]]:
    """Every way to group the clients, each once: clusters are numbered in order of appearance."""
    if num_clients == 0:
        yield ()
    for head in partitions(num_clients - 1) if num_clients else ():
        for cluster in range(max(head, default=-1) + 2):
            yield (*head, cluster)


def partition_posterior(
    train: Sequence[ConjugateClient],
    held: Sequence[ConjugateClient],
    prior: Gaussian,
    concentration: float,
    evidence: Evidence = joint_log_evidence,
    max_partitions: int = MAX_HYPOTHESES,
) -> dict[tuple[int, ...], float]:
    """The exact log-posterior over groupings: a Chinese-restaurant prior, and what clients hold out as the data.

    A cluster's belief is the posterior of its members' `train` data from `prior`; its members' `held` data are its
    evidence. Refuses when there are more than `max_partitions` groupings.
    """
    groupings = list(itertools.islice(partitions(len(train)), max_partitions + 1))
    if len(groupings) > max_partitions:
        raise ValueError(f"{len(train)} clients can be grouped in more than {max_partitions} ways: use fewer clients")
    log_weight = {}
    for grouping in groupings:
        total = 0.0
        for j, own in enumerate(grouping):  # client j sits down among those before it
            total += math.log((grouping[:j].count(own) or concentration) / (concentration + j))
        for cluster in set(grouping):
            belief, members = prior, [j for j, own in enumerate(grouping) if own == cluster]
            for j in members:
                belief = train[j].posterior(belief)
            total += evidence([held[j] for j in members], belief)
        log_weight[grouping] = total
    log_total = float(torch.tensor(list(log_weight.values()), dtype=torch.float64).logsumexp(0))
    return {grouping: weight - log_total for grouping, weight in log_weight.items()}
