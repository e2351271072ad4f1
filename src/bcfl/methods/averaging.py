"""One model for all, or one for each: FedAvg, Local, and BP-FedAvg in between."""

from dataclasses import dataclass

import torch

from bcfl.belief.evidence import Temperature, temper_scores
from bcfl.belief.gaussian import Gaussian, Merging, flat
from bcfl.federation import Clients, Hypotheses, Jobs, RoundInfo, one_story
from bcfl.methods.steps import FusionStack, mean_by_examples, single_story

LEAST_LOG_WEIGHT = -1e9  # of a client whose likelihood is zero or no number: it counts only among its like


@dataclass(frozen=True)
class FedAvg:
    """One global model: the mean of the clients' models weighted by their numbers of examples."""

    def init(self, clients: Clients) -> Hypotheses:
        return single_story(flat(clients.draw_model(0, 0)[None]), torch.zeros(len(clients.present), dtype=torch.int64))

    def round(self, state: Hypotheses, clients: Clients) -> tuple[Hypotheses, RoundInfo]:
        present = clients.present.nonzero()[:, 0]
        folds = FusionStack(state.models, state.models, torch.zeros(1, dtype=torch.int64), "product")
        for posterior in clients.fit(flat(state.models.mean), Jobs(torch.zeros_like(present), present)):
            folds.add(0, posterior)
        new = single_story(folds.results(), state.assignment)
        return new, one_story(new)


@dataclass(frozen=True)
class Local:
    """No federation: each client trains alone from the common start."""

    def init(self, clients: Clients) -> Hypotheses:
        num_clients = len(clients.present)
        models = clients.draw_model(0, 0).repeat(num_clients, 1)
        return single_story(flat(models), torch.arange(num_clients))

    def round(self, state: Hypotheses, clients: Clients) -> tuple[Hypotheses, RoundInfo]:
        present = clients.present.nonzero()[:, 0]
        mean = state.models.mean.clone()
        for client, posterior in zip(present.tolist(), clients.fit(state.models, Jobs(present, present)), strict=True):
            if posterior is not None:
                mean[client] = posterior.mean
        new = single_story(flat(mean), state.assignment)
        return new, one_story(new)


@dataclass(frozen=True)
class BPFedAvg:
    """One global Gaussian, moment-matched from the clients' posteriors; each client is tested with its own posterior.

    Per-FedAvg in this system's Bayesian training. Posteriors are weighted by the likelihood of their client's data. A
    client that has never adapted, and so is not associated yet (−1), is tested with the global mean.
    """

    forgetting: float = 0.5
    temperature: Temperature = "per_example"
    scoring_examples: int | None = 320

    def init(self, clients: Clients) -> Hypotheses:
        start = clients.draw_model(0, 0)
        num_clients = len(clients.present)
        return single_story(flat(start[None]), torch.full((num_clients,), -1), personal=start.repeat(num_clients, 1))

    def round(self, state: Hypotheses, clients: Clients) -> tuple[Hypotheses, RoundInfo]:
        assert state.personal is not None
        scores = clients.score(state.models.mean, self.scoring_examples)
        present = clients.present.nonzero()[:, 0]  # who answered
        log_weight = temper_scores(scores, clients.num_examples, self.temperature)[present, 0]
        weights = log_weight.nan_to_num(LEAST_LOG_WEIGHT).clamp(min=LEAST_LOG_WEIGHT).tolist()
        strength = torch.full((len(present),), 1 - self.forgetting)
        jobs = Jobs(torch.zeros_like(present), present, strength=strength, curvature=True)
        merging, arrived, personal = Merging(state.models.mean[0]), [], state.personal.clone()
        answers = clients.fit(state.models, jobs)
        for client, weight, posterior in zip(present.tolist(), weights, answers, strict=True):
            if posterior is not None:
                merging.add(posterior, weight)
                personal[client] = posterior.mean
                arrived.append(client)
        merged = state.models[0]
        if arrived:
            merged = merging.result()
            merged.mean[clients.num_parameters :] = mean_by_examples(
                personal[arrived, clients.num_parameters :], clients.num_examples[arrived]
            )
        assignment = state.assignment.clone()
        assignment[0, arrived] = 0
        personal[assignment[0] < 0] = merged.mean
        new = single_story(Gaussian(merged.mean[None], merged.precision[None]), assignment, personal=personal)
        return new, one_story(new)
