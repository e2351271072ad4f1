"""Memory: a client's place in one round bears on its place in the next (a hidden Markov model of the association).

The hidden state of a client is its cluster, what is seen of it in a round are the examples that it scores. From one
round to the next a client stays with probability p and moves to each of the other K − 1 clusters with probability
(1 − p)/(K − 1). Each hypothesis runs the forward filter of its clients: predict, then weigh by what is seen.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bcfl.association.hypotheses import Branches
from bcfl.belief.evidence import Temperature, client_evidence, temper_scores
from bcfl.federation import Clients, Hypotheses

Stay = float | Literal["learn"]
# Stays and moves fade by a tenth a round: where clients settle over the first rounds and rest from then on, a count of
# everything would remember the unrest for as long as it had lasted, many times over.
FADING = 0.9


def predict(membership: Tensor, stay: float) -> Tensor:
    """Where clients will be in the next round: p·m + (1 − p)/(K − 1)·(1 − m), over the last axis, the cluster."""
    if not 0 < stay < 1:
        raise ValueError(f"stay must be above 0 and below 1, got {stay}")
    others = membership.shape[-1] - 1
    return stay * membership + (1 - stay) / others * (1 - membership) if others else membership


def evidence_power(num_examples: Tensor, max_examples: int | None, temperature: Temperature) -> Tensor:
    """To which power the likelihood of the examples that a client has looked at enters its tempered score.

    A score of m examples is scaled up to all N of the client and divided by its temperature: (N/m)/T. A transition to
    the same power weighs against these examples as Bayes' rule says, whatever the temperature.
    """
    seen = num_examples if max_examples is None else num_examples.clamp(max=max_examples)
    return temper_scores(num_examples / seen, num_examples, temperature)  # (client,)


def expected_stays(before: Tensor, stay: float, after: Tensor) -> Tensor:
    """The probability that a client has stayed where it was, given what was seen of it since.

    `before` and `after` are memberships, their last axis the cluster: of a cluster's predicted share the part p·m was
    there already.
    """
    return (after * stay * before / predict(before, stay)).sum(-1)


def learned_stay(counts: Tensor) -> float:
    """The mean of p's Beta posterior, from a uniform prior and the numbers of stays and moves."""
    stays, moves = counts.tolist()
    return float((1 + stays) / (2 + stays + moves))


@dataclass(frozen=True)
class Remembering:
    """Hypotheses, and for each of them where its clients are by its forward filter."""

    hypotheses: Hypotheses
    membership: Tensor  # (hypothesis, client, cluster): probability
    stays: Tensor | None = None  # (2,): expected stays and moves so far, where the staying probability is learned

    def serving(self) -> None:
        """Clients are served by the models of their clusters."""
        return


@dataclass(frozen=True)
class Places:
    """What a round has told of where clients are, for the state after it."""

    membership: Tensor  # (hypothesis, client, cluster)
    stays: Tensor | None

    def of(self, new: Hypotheses) -> Remembering:
        """The state in which they are remembered; hypotheses merged into one were all of one parent, and so alike."""
        return Remembering(new, self.membership[: len(new.log_weight)], self.stays)


@dataclass(frozen=True)
class Memory:
    """The rules of a forward filter."""

    stay: Stay  # the probability that a client stays in its cluster from one round to the next, or "learn"
    scoring_examples: int | None
    temperature: Temperature

    def start(self, hypotheses: Hypotheses) -> Remembering:
        """A state in which clients may be anywhere, and nobody has stayed or moved."""
        shape = (*hypotheses.assignment.shape, hypotheses.num_clusters)
        anywhere = torch.full(shape, 1 / hypotheses.num_clusters, dtype=torch.float64)
        return Remembering(hypotheses, anywhere, torch.zeros(2, dtype=torch.float64) if self.stay == "learn" else None)

    def log_prior(self, state: Remembering, clients: Clients) -> Tensor:
        """How likely the present clients are in each cluster by what is remembered, on the scale of their scores."""
        log_prior = predict(state.membership, self._probability(state)).log()
        return (self._power(clients)[:, None] * log_prior)[:, clients.present]  # (hypothesis, client, cluster)

    def remember(
        self, state: Remembering, clients: Clients, scores: Tensor, log_point_weight: Tensor, kept: Branches
    ) -> Places:
        """Where the clients are in the next state, and how often they have stayed so far.

        `scores` are tempered, (present client, belief, point). Here the temperature is taken out again, before points
        are put together: a filter by Bayes' rule has none.
        """
        before, stay, present = state.membership, self._probability(state), clients.present
        after = predict(before, stay)
        evidence = client_evidence(scores / self._power(clients)[present, None, None], log_point_weight)
        seen = evidence[:, state.hypotheses.model_of].transpose(0, 1)
        after[:, present] = (seen + after[:, present].log()).softmax(-1)
        counts = state.stays
        if counts is not None:
            stays = expected_stays(before, stay, after)[kept.parent]  # (hypothesis, client)
            known = kept.log_weight.exp()[:, None] * (present & (state.hypotheses.assignment[kept.parent] >= 0))
            counts = FADING * counts + torch.stack([(known * stays).sum(), (known * (1 - stays)).sum()])
        return Places(after[kept.parent], counts)

    def _probability(self, state: Remembering) -> float:
        """How likely a client stays where it is."""
        return learned_stay(state.stays) if state.stays is not None else float(self.stay)

    def _power(self, clients: Clients) -> Tensor:
        return evidence_power(clients.num_examples, self.scoring_examples, self.temperature)  # (client,)
