"""What the method `bcfl` remembers between two rounds, and what it is told to choose among."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bcfl.belief.gaussian import Gaussian
from bcfl.belief.heads import Heads
from bcfl.federation import Hypotheses
from bcfl.methods.candidates import Candidate, Choice, Sums, choose

MORE_HEARD = 1.5  # times as many clients as at the last choice: it is made anew


@dataclass(frozen=True)
class MixedState:
    """What the server remembers: the clusters, where the clients are, and why it was chosen so."""

    hypotheses: Hypotheses
    heads: Heads | None = None  # priors of the clients' own last layers
    membership: Tensor | None = None  # (client, cluster); NaN for a client never heard of
    error: Tensor | None = None  # (cluster, coefficient): the standard errors of the means
    sums: Sums | None = None
    choice: Choice | None = None
    heard: Tensor | None = None  # (client,) bool: who had a part in the choice
    bodies: Hypotheses | None = None  # of a network: the clusters of every candidate that is still tried
    rounds: int = 0  # that the bodies have been trained together

    def serving(self) -> None:
        """Clients are served by their own last layers or, without, by their clusters' models."""
        return


@dataclass(frozen=True)
class Plan:
    """What is chosen among, simplest first; without a search the first is taken, the others are for comparison."""

    candidates: Sequence[Candidate]
    search: bool

    def choose(self, held_out: Tensor) -> Choice:
        allowed = torch.tensor([self.search or place == 0 for place in range(len(self.candidates))])
        return choose(self.candidates, held_out, allowed)

    def is_time(self, state: MixedState, heard: Tensor) -> bool:
        """Whether to choose anew: at first, and whenever many clients more have been heard."""
        return state.heard is None or int(heard.sum()) >= MORE_HEARD * int(state.heard.sum())


def one_story_of(models: Tensor, precision: Tensor, assignment: Tensor) -> Hypotheses:
    return Hypotheses(
        models=Gaussian(models, precision),
        model_of=torch.arange(len(models))[None],
        log_weight=torch.zeros(1, dtype=torch.float64),
        assignment=assignment.view(1, -1),
        parent_of=torch.arange(len(models)),
        family=torch.zeros(1, dtype=torch.int64),
    )
