"""FedRep: one body for all, and each client's own last layer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bcfl.belief.gaussian import Gaussian, flat
from bcfl.federation import Clients, Hypotheses, Jobs, RoundInfo, Serving, one_story
from bcfl.methods.bounds import Defence
from bcfl.methods.near import OwnShare, averaged, divided
from bcfl.methods.steps import single_story

FROZEN = 1e15  # a precision beyond which no gradient moves a number


@dataclass(frozen=True)
class Heads:
    """A state in which all share a body, and each client has a last layer of its own on it."""

    hypotheses: Hypotheses  # of one model: the body, and the mean of the last layers
    heads: Tensor  # (client, number)
    first: int  # where the last layer begins in a vector

    @property
    def personal(self) -> Tensor:
        """Each client's model."""  # (client, vector)
        vectors = self.hypotheses.models.mean.repeat(len(self.heads), 1)
        vectors[:, self.first : self.first + self.heads.shape[1]] = self.heads
        return vectors

    def serving(self) -> Serving:
        return flat(self.personal), [{client: 1.0} for client in range(len(self.heads))]


@dataclass(frozen=True)
class FedRep:
    """The body is averaged by examples; the last layer is each client's own and never leaves it (Collins et al. 2021).

    In every round a client first trains its last layer on the body that it was sent, then the body under its new last
    layer; the local steps of a round are divided between the two. Where a model is all last layer, it is Local.
    """

    own_share: OwnShare = 0.5
    robust: Defence = "none"

    def init(self, clients: Clients) -> Heads:
        start, num_clients = clients.draw_model(0, 0), len(clients.present)
        shared = single_story(flat(start[None]), torch.zeros(num_clients, dtype=torch.int64))
        first = clients.num_parameters - clients.num_last_layer
        return Heads(shared, start[first : clients.num_parameters].repeat(num_clients, 1), first)

    def round(self, state: Heads, clients: Clients) -> tuple[Heads, RoundInfo]:
        present, head = clients.present.nonzero()[:, 0], slice(state.first, clients.num_parameters)
        own_steps, shared_steps = divided(clients.local_steps, self.own_share)
        jobs = Jobs(torch.arange(len(present)), present, num_steps=own_steps)
        models, heads = state.personal[present], state.heads.clone()
        answers = clients.fit(_only(models, head, clients.num_parameters), jobs)
        for client, posterior in zip(present.tolist(), answers, strict=True):
            if posterior is not None:
                heads[client] = posterior.mean[head]
        body = state.hypotheses.models.mean.clone()
        if len(present):
            jobs = Jobs(torch.arange(len(present)), present, num_steps=shared_steps)
            models = torch.cat([models[:, : head.start], heads[present], models[:, head.stop :]], 1)
            body = averaged(_all_but(models, head), jobs, clients, self.robust).mean
        body[0, head] = heads.mean(0)
        new = Heads(single_story(flat(body), state.hypotheses.assignment), heads, state.first)
        return new, one_story(new.hypotheses)


def _only(means: Tensor, head: slice, num_parameters: int) -> Gaussian:
    """Beliefs under which nothing but the head can be learned."""
    precision = torch.zeros_like(means)
    precision[:, :num_parameters] = FROZEN
    precision[:, head] = 0
    return Gaussian(means, precision)


def _all_but(means: Tensor, head: slice) -> Gaussian:
    """Beliefs under which the head stays as it is."""
    precision = torch.zeros_like(means)
    precision[:, head] = FROZEN
    return Gaussian(means, precision)
