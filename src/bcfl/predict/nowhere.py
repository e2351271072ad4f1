"""Whether a client belongs nowhere: its evidence under every cluster is implausibly low beside that of the members.

What is compared is the negative log-likelihood per example of rows that nobody trained on, under the client's best
cluster. A new client of a known kind has it anywhere among the members', each of which shows that of its own test
rows: so it ranks above all M of them with probability 1/(M + 1), and an error rate α can be promised with 1/α − 1
members or more. Fewer rows tell less: a newcomer with n rows is compared with what n rows of each member would show.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bcfl.predict.conformal import least_rows


@dataclass(frozen=True)
class Plausibility:
    """How well a client's examples fit the best of the clusters, beside how the members' fit theirs."""

    p_value: float  # the share of clients of a known kind that would fit no better: small is strange
    num_members: int

    def belongs_nowhere(self, alpha: float = 0.05) -> bool:
        """Whether it fits so badly that at most a share `alpha` of clients of a known kind are said to be strangers.

        Refused where there are too few members for such a promise.
        """
        needed = least_rows(alpha)
        if self.num_members < needed:
            raise ValueError(f"an error rate of alpha = {alpha:g} can be promised with {needed} members or more, and "
                             f"{self.num_members} were tested: the least is 1/{self.num_members + 1}")  # fmt: skip
        return self.p_value <= alpha


def plausibility(nll: float, num_examples: int, members: Tensor) -> Plausibility:
    """How usual a client's NLL per example is among the members', of whom each row is (examples, mean, variance).

    (1 + Σ_j p(n rows of member j show that much or more)) / (M + 1). A member whose mean stands on more than n rows
    varies as much more with n, by the variance of its rows; with as many rows the p-value is its plain rank.
    """
    if not len(members):
        return Plausibility(1.0, 0)
    count, mean, variance = members.double().unbind(1)
    # A NaN or an infinite NLL is as strange as can be.
    there = nll if math.isfinite(nll) else math.inf
    extra = variance * (1 / num_examples - 1 / count).clamp(min=0)
    above = torch.where(extra > 0, _upper_tail(there, mean, extra), (mean >= there).double())
    return Plausibility((1 + float(above.sum())) / (len(members) + 1), len(members))


def _upper_tail(value: float, mean: Tensor, variance: Tensor) -> Tensor:
    """p(X ≥ value) of a variable with these moments: of a gamma where it is above 0, as a mean of losses is skewed."""
    if value == math.inf:
        return torch.zeros_like(mean)
    normal = 0.5 * torch.erfc((value - mean) / (2 * variance.clamp(min=1e-300)).sqrt())
    shape, rate = mean.square() / variance.clamp(min=1e-300), mean / variance.clamp(min=1e-300)
    scaled = (rate * max(value, 0.0)).clamp(min=0)
    gamma = torch.special.gammaincc(shape.clamp(1e-6, 1e6), scaled)
    return torch.where((mean > 0) & (shape < 1e4), gamma, normal)


def strangers(members: Tensor, alpha: float) -> list[int]:
    """The members, as rows of (client, examples, mean, variance), that belong nowhere by what the others show."""
    found = []
    for place, (client, count, mean, _) in enumerate(members.tolist()):
        others = torch.cat([members[:place], members[place + 1 :]])[:, 1:]
        if plausibility(mean, int(count), others).belongs_nowhere(alpha):
            found.append(int(client))
    return found
