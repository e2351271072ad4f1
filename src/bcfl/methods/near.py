"""Models near one that all have averaged: FedProx holds the clients near it, Ditto gives each its own beside it."""

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field

from bcfl.belief.gaussian import Gaussian, flat
from bcfl.belief.robust import Robust
from bcfl.federation import Clients, Hypotheses, Jobs, RoundInfo, one_story
from bcfl.methods.bounds import Defence, Proximal
from bcfl.methods.steps import FusionStack, Personal, single_story, unit

OwnShare = Annotated[
    float, Field(gt=0, lt=1, description="the share of a round's local steps that a client spends on what is its own")
]


@dataclass(frozen=True)
class FedProx:
    """One global model; clients minimise Fᵢ(w) + proximal/2 ‖w − w̄‖² from it (Li et al. 2020).

    The mean is weighted by numbers of examples. With proximal 0 it is FedAvg.
    """

    proximal: Proximal = 0.1
    robust: Defence = "none"

    def init(self, clients: Clients) -> Hypotheses:
        return single_story(flat(clients.draw_model(0, 0)[None]), torch.zeros(len(clients.present), dtype=torch.int64))

    def round(self, state: Hypotheses, clients: Clients) -> tuple[Hypotheses, RoundInfo]:
        present = clients.present.nonzero()[:, 0]
        strength = self.proximal * clients.num_examples[present]
        jobs = Jobs(torch.zeros_like(present), present, strength)
        new = single_story(averaged(unit(state.models.mean), jobs, clients, self.robust), state.assignment)
        return new, one_story(new)


@dataclass(frozen=True)
class Ditto:
    """FedAvg, and beside it each client's own model: vᵢ = argmin Fᵢ(v) + proximal/2 ‖v − w̄‖² (Li et al. 2021).

    A client trains both in every round, its own from where it was, drawn to the averaged model as it was sent; the
    local steps of a round are divided between the two, so that it does no more than other methods. Its own is tested.
    """

    proximal: Proximal = 0.1
    own_share: OwnShare = 0.5
    robust: Defence = "none"

    def init(self, clients: Clients) -> Personal:
        start, num_clients = clients.draw_model(0, 0), len(clients.present)
        shared = single_story(flat(start[None]), torch.zeros(num_clients, dtype=torch.int64))
        return Personal(shared, start.repeat(num_clients, 1))

    def round(self, state: Personal, clients: Clients) -> tuple[Personal, RoundInfo]:
        shared, own = state.hypotheses.models.mean, state.personal.clone()
        present = clients.present.nonzero()[:, 0]
        own_steps, shared_steps = divided(clients.local_steps, self.own_share)
        sent = torch.zeros_like(present)
        average = averaged(flat(shared), Jobs(sent, present, num_steps=shared_steps), clients, self.robust)
        strength = self.proximal * clients.num_examples[present]
        jobs = Jobs(sent, present, strength, start=state.personal, num_steps=own_steps)
        for client, posterior in zip(present.tolist(), clients.fit(unit(shared), jobs), strict=True):
            if posterior is not None:
                own[client] = posterior.mean
        new = Personal(single_story(average, state.hypotheses.assignment), own)
        return new, one_story(new)


def averaged(priors: Gaussian, jobs: Jobs, clients: Clients, robust: Robust) -> Gaussian:
    """The mean by examples of what the jobs come to, as one model; the first prior's where none comes back."""
    folds = FusionStack(priors, priors, torch.zeros(1, dtype=torch.int64), "product", clients.num_parameters, robust)
    for posterior in clients.fit(priors, jobs):
        folds.add([0], posterior)
    return flat(folds.results().mean)


def divided(local_steps: int, share: float) -> tuple[int, int]:
    """So many steps for what is a client's own, and so many for what is shared: one of each at least."""
    own = min(max(1, round(share * local_steps)), max(1, local_steps - 1))
    return own, max(1, local_steps - own)
