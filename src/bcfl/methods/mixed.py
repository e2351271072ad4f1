"""The default: clusters whose members differ, as many as held-out examples ask for, with nothing to tune."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from pydantic import Field

from bcfl.association.membership import rounded
from bcfl.federation import Clients, RoundInfo, one_story
from bcfl.methods.bounds import ScoringExamples
from bcfl.methods.candidates import ALONE, ONE, ONE_SPREAD, Candidate
from bcfl.methods.mixedstate import MixedState, Plan, one_story_of
from bcfl.methods.networks import NetworkPlan, begin_network, network_round
from bcfl.methods.regression import by_climbing, by_sums


@dataclass(frozen=True)
class Mixed:
    """Clusters of clients that differ within them: a mixture of mixed models in the last layer.

    zⱼ ~ Cat(π), θⱼ | zⱼ=k ~ N(μₖ, diag vₖ): K, and how large vₖ is, if not 0, by held-out log-likelihood. A linear
    model is all last layer and is not trained by gradients at all. Of a network the layers before are trained for
    every number of clusters side by side, until it is chosen.
    """

    max_clusters: Annotated[int, Field(ge=1, le=64, description="most clusters that are tried")] = 4
    search: Annotated[
        bool, Field(description="whether clusters and spread are chosen by held-out examples, or taken as they are set")
    ] = True
    num_clusters: Annotated[int, Field(ge=1, le=1_000_000, description="K, where search is off")] = 1
    spread: Annotated[
        Literal["none", "last_layer"],
        Field(description="whether a cluster's members differ in the last layer, where search is off"),
    ] = "last_layer"
    search_rounds: Annotated[
        int, Field(ge=1, le=100_000, description="after so many rounds of a network its clusters are chosen")
    ] = 6
    held_out: Annotated[
        float, Field(gt=0, lt=1, description="the share of examples by which a network's clusters are chosen")
    ] = 0.2
    scoring_examples: ScoringExamples = 320

    @property
    def plan(self) -> Plan:
        """For a linear model."""
        if not self.search:
            given = Candidate(self.num_clusters, self.spread != "none")
            return Plan(list(dict.fromkeys([given, ONE, ALONE])), search=False)
        more = [Candidate(k, True) for k in range(2, self.max_clusters + 1)]
        return Plan([ONE, ONE_SPREAD, *more, ALONE], search=True)

    @property
    def network_plan(self) -> NetworkPlan:
        """For anything else: the spread is a matter of the last layer, once the number of clusters is known."""
        numbers = range(1, self.max_clusters + 1) if self.search else [self.num_clusters]
        candidates = [Candidate(k, False) for k in numbers] + ([ALONE] if self.search else [])
        held_out = self.held_out if self.search else 0.0
        return NetworkPlan(
            candidates, self.search, self.spread != "none", self.search_rounds, held_out, self.scoring_examples
        )

    def init(self, clients: Clients) -> MixedState:
        start = clients.draw_model(0, 0)
        nobody = torch.full((len(clients.present),), -1)
        state = MixedState(one_story_of(start[None], torch.zeros_like(start)[None], nobody))
        return state if _is_linear(clients) else begin_network(self.network_plan, state, clients)

    def round(self, state: MixedState, clients: Clients) -> tuple[MixedState, RoundInfo]:
        if not _is_linear(clients):
            new = network_round(self.network_plan, state, clients)
        elif clients.head is not None and clients.head.exact:
            new = by_sums(self.plan, state, clients)
        else:
            new = by_climbing(self.plan, state, clients)
        membership = new.membership
        if membership is None or membership.shape[1] != new.hypotheses.num_clusters:
            return new, one_story(new.hypotheses)
        return new, replace(one_story(new.hypotheses), probability=rounded(membership)[None])


def _is_linear(clients: Clients) -> bool:
    return clients.head is not None and clients.head.is_all
