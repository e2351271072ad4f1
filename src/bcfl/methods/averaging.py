"""One model for all, or one for each: FedAvg, Local, and BP-FedAvg in between."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from bcfl.belief.evidence import temper_scores
from bcfl.belief.gaussian import Gaussian, Merging, flat
from bcfl.belief.robust import SUREST, all_bounded, middle_of, weight_of
from bcfl.federation import Clients, Hypotheses, Jobs, RoundInfo, one_story
from bcfl.methods.bounds import Defence, Forgetting, ScoringExamples, Tempering
from bcfl.methods.steps import FusionStack, Personal, mean_by_examples, single_story

LEAST_LOG_WEIGHT = -1e9  # of a client whose likelihood is zero or no number: it counts only among its like


@dataclass(frozen=True)
class FedAvg:
    """One global model: the mean of the clients' models weighted by their numbers of examples."""

    robust: Defence = "none"

    def init(self, clients: Clients) -> Hypotheses:
        return single_story(flat(clients.draw_model(0, 0)[None]), torch.zeros(len(clients.present), dtype=torch.int64))

    def round(self, state: Hypotheses, clients: Clients) -> tuple[Hypotheses, RoundInfo]:
        present = clients.present.nonzero()[:, 0]
        group = torch.zeros(1, dtype=torch.int64)
        folds = FusionStack(state.models, state.models, group, "product", clients.num_parameters, self.robust)
        for posterior in clients.fit(flat(state.models.mean), Jobs(torch.zeros_like(present), present)):
            folds.add([0], posterior)
        new = single_story(folds.results(), state.assignment)
        return new, one_story(new)


@dataclass(frozen=True)
class Local:
    """No federation: each client trains alone from the common start."""

    apart: ClassVar[bool] = True  # nothing is in common: unknowns of the likelihood neither

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

    forgetting: Forgetting = 0.5
    temperature: Tempering = "per_example"
    scoring_examples: ScoringExamples = 320
    robust: Defence = "none"

    def init(self, clients: Clients) -> Personal:
        start = clients.draw_model(0, 0)
        num_clients = len(clients.present)
        shared = single_story(flat(start[None]), torch.full((num_clients,), -1))
        return Personal(shared, start.repeat(num_clients, 1))

    def round(self, state: Personal, clients: Clients) -> tuple[Personal, RoundInfo]:
        shared, personal = state.hypotheses, state.personal.clone()
        merging, arrived, posteriors = Merging(shared.models.mean[0]), list[int](), list[Gaussian]()
        for client, log_weight, posterior in self._adapted(shared, clients):
            personal[client] = posterior.mean
            arrived.append(client)
            if self.robust in ("median", "trimmed"):
                posteriors.append(posterior)
            else:
                merging.add(posterior, log_weight)
        merged = shared.models[0]
        if posteriors:
            merged = middle_of(posteriors, self.robust)
        elif arrived:
            merged, statistics = merging.result(), slice(clients.num_parameters, None)
            num_examples = weight_of(clients.num_examples, self.robust)[arrived]
            merged.mean[statistics] = mean_by_examples(personal[arrived, statistics], num_examples)
        assignment = shared.assignment.clone()
        assignment[0, arrived] = 0
        personal[assignment[0] < 0] = merged.mean
        new = Personal(single_story(Gaussian(merged.mean[None], merged.precision[None]), assignment), personal)
        return new, one_story(new)

    def _adapted(self, state: Hypotheses, clients: Clients) -> Iterator[tuple[int, float, Gaussian]]:
        """Who has adapted, its log-weight and its posterior, as they arrive or, where `robust`, once all are known."""
        scores = clients.score(state.models.mean, self.scoring_examples)
        present = clients.present.nonzero()[:, 0]  # who answered
        log_weight = temper_scores(scores, clients.num_examples, self.temperature)[present, 0]
        log_weight = log_weight.nan_to_num(LEAST_LOG_WEIGHT).clamp(min=LEAST_LOG_WEIGHT)
        if self.robust == "clip":
            log_weight = log_weight.clamp(max=float(log_weight.median()) + math.log(SUREST))
        strength = torch.full((len(present),), 1 - self.forgetting)
        answers = clients.fit(state.models, Jobs(torch.zeros_like(present), present, strength, curvature=True))
        told = zip(present.tolist(), log_weight.tolist(), answers, strict=True)
        arriving = ((client, weight, posterior) for client, weight, posterior in told if posterior is not None)
        if self.robust == "none":
            yield from arriving
        elif arrived := list(arriving):
            who, weights, posteriors = zip(*arrived, strict=True)
            starts = state.models.mean.expand(len(who), -1)
            bounded = all_bounded(posteriors, starts, clients.num_parameters, self.robust)
            yield from zip(who, weights, bounded, strict=True)
