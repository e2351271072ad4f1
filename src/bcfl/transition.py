"""Memory: a client's place in one round bears on its place in the next (a hidden Markov model of the association).

The hidden state of a client is its cluster, what is seen of it in a round are the examples that it scores. A client
stays with probability p and moves to each of the other K − 1 clusters with probability (1 − p)/(K − 1). Hypotheses are
stories, so filtering forward is to add the logarithm of the transition to a story's log-weight, client by client.
"""

from typing import Literal

import torch
from torch import Tensor

from bcfl.evidence import Temperature, temper_scores

Stay = float | Literal["learn"]
# Stays and moves fade by a tenth a round: where clients settle over the first rounds and rest from then on, a count of
# everything would remember the unrest for as long as it had lasted, many times over.
FADING = 0.9


def log_transition(past: Tensor, stay: float, num_clusters: int) -> Tensor:
    """log p(cluster now | cluster before) of every client under every hypothesis.

    `past` is (hypothesis, client) -> cluster; a client without a past (−1) may be anywhere with equal probability, and
    with one cluster there is nowhere else to go.
    """
    if not 0 < stay < 1:
        raise ValueError(f"stay must be above 0 and below 1, got {stay}")
    if num_clusters == 1:
        return torch.zeros(*past.shape, 1, dtype=torch.float64)
    probability = torch.full((*past.shape, num_clusters), (1 - stay) / (num_clusters - 1), dtype=torch.float64)
    probability[past < 0] = 1 / num_clusters
    at_home = (past >= 0)[..., None] & (past[..., None] == torch.arange(num_clusters))
    return probability.masked_fill(at_home, stay).log()  # (hypothesis, client, cluster)


def evidence_power(num_examples: Tensor, max_examples: int | None, temperature: Temperature) -> Tensor:
    """To which power the likelihood of the examples that a client has looked at enters its tempered score.

    A score of m examples is scaled up to all N of the client and divided by its temperature: (N/m)/T. A transition to
    the same power weighs against these examples as Bayes' rule says, whatever the temperature.
    """
    seen = num_examples if max_examples is None else num_examples.clamp(max=max_examples)
    return temper_scores(num_examples / seen, num_examples, temperature)  # (client,)


def expected_stays(log_posterior: Tensor, past: Tensor, weight: Tensor) -> Tensor:
    """The expected numbers of clients that stay and that move, over hypotheses of that weight.

    `log_posterior` is (hypothesis, client, cluster): log p(seen, cluster | past), not normalised. A client without a
    past does neither.
    """
    probability = log_posterior.softmax(-1)
    stays = probability.gather(-1, past.clamp(min=0)[..., None])[..., 0]  # (hypothesis, client)
    known = weight[:, None] * (past >= 0)
    return torch.stack([(known * stays).sum(), (known * (1 - stays)).sum()])


def learned_stay(counts: Tensor | None) -> float:
    """The mean of p's Beta posterior, from a uniform prior and the numbers of stays and moves (None: none yet)."""
    stays, moves = (0.0, 0.0) if counts is None else counts.tolist()
    return float((1 + stays) / (2 + stays + moves))
