"""Memory: a client's place in one round bears on its place in the next (a hidden Markov model of the association).

The hidden state of a client is its cluster, what is seen of it in a round are the examples that it scores. From one
round to the next a client stays with probability p and moves to each of the other K − 1 clusters with probability
(1 − p)/(K − 1). Each hypothesis runs the forward filter of its clients: predict, then weigh by what is seen.
"""

from typing import Literal

from torch import Tensor

from bcfl.belief.evidence import Temperature, temper_scores

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


def learned_stay(counts: Tensor | None) -> float:
    """The mean of p's Beta posterior, from a uniform prior and the numbers of stays and moves (None: none yet)."""
    stays, moves = (0.0, 0.0) if counts is None else counts.tolist()
    return float((1 + stays) / (2 + stays + moves))
