"""Hard clustering without Bayes: IFCA by loss, FeSEM and WeCFL by distance between models."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from bcfl.association.k_means import k_means
from bcfl.belief.gaussian import Gaussian, flat
from bcfl.belief.robust import all_bounded, no_farther, weight_of
from bcfl.federation import Clients, Hypotheses, Jobs, RoundInfo, one_story
from bcfl.methods.bounds import Defence, NumClusters, Proximal, ScoringExamples
from bcfl.methods.steps import FusionStack, draw_starts, single_story, unit
from bcfl.methods.warm_up import cluster_means
from bcfl.randomness import stream_seed


@dataclass(frozen=True)
class IFCA:
    """K models; each client trains the one with the least loss on its data; a model is its clients' mean.

    Every client counts the same; BatchNorm's statistics are averaged by examples.
    """

    num_clusters: NumClusters = 4
    scoring_examples: ScoringExamples = 320
    robust: Defence = "none"

    def init(self, clients: Clients) -> Hypotheses:
        means = draw_starts(clients, self.num_clusters)
        return single_story(flat(means), torch.full((len(clients.present),), -1))

    def round(self, state: Hypotheses, clients: Clients) -> tuple[Hypotheses, RoundInfo]:
        assignment = state.assignment.clone()
        groups = torch.arange(self.num_clusters)
        folds = FusionStack(state.models, state.models, groups, "product", clients.num_parameters, self.robust)
        for choice in clients.fit_best(flat(state.models.mean), 0.0, False, self.scoring_examples):
            assignment[0, choice.client] = choice.belief
            if choice.posterior is not None:
                precision = choice.posterior.precision.clone()  # the number of examples, everywhere
                precision[: clients.num_parameters] = 1
                folds.add([choice.belief], Gaussian(choice.posterior.mean, precision))
        new = single_story(folds.results(), assignment)
        return new, one_story(new)


@dataclass(frozen=True)
class KMeansClustering:
    """After local training, k-means on the clients' models; a cluster's model is its members' mean.

    FeSEM counts every client the same, WeCFL by its number of examples; BatchNorm's statistics are averaged by examples
    in both. All start from one model; the centres are carried from round to round, so clusters keep their numbers.
    """

    num_clusters: NumClusters = 4
    weighted: bool = False
    space: Annotated[Literal["last_layer", "all"], Field(description="what of a model k-means looks at")] = "last_layer"
    proximal: Proximal = 0.0
    robust: Defence = "none"

    def init(self, clients: Clients) -> Hypotheses:
        means = clients.draw_model(0, 0).repeat(self.num_clusters, 1)
        return single_story(flat(means), torch.full((len(clients.present),), -1))

    def round(self, state: Hypotheses, clients: Clients) -> tuple[Hypotheses, RoundInfo]:
        present, assignment = clients.present.nonzero()[:, 0], state.assignment.clone()
        first = bool((assignment < 0).all())
        means = state.models.mean
        model_of_client = state.model_of_client()  # a newcomer starts from the largest cluster's model
        jobs = Jobs(model_of_client[present], present, self.proximal * clients.num_examples[present])
        answers = zip(present.tolist(), clients.fit(unit(means), jobs), strict=True)
        trained = [(client, posterior) for client, posterior in answers if posterior is not None]
        if trained:
            members, posteriors = [client for client, _ in trained], [posterior for _, posterior in trained]
            posteriors = all_bounded(posteriors, means[model_of_client[members]], clients.num_parameters, self.robust)
            vectors = torch.stack([posterior.mean for posterior in posteriors])
            num_examples = weight_of(clients.num_examples, self.robust)[members]
            weight = num_examples if self.weighted else torch.ones_like(num_examples)
            centres = None if first else self._feature(state.models.mean, clients)
            seed = stream_seed(clients.seed, "k-means", clients.round)
            away = assignment[0].index_fill(0, torch.tensor(members), -1)  # who is not here keeps a cluster's model
            held = (away[:, None] == torch.arange(self.num_clusters)).any(0)
            starts = self._feature(means[model_of_client[members]], clients)
            points = no_farther(self._feature(vectors, clients), starts, self.robust)
            labels = k_means(points, weight, self.num_clusters, seed, centres, held)
            assignment[0, members] = labels
            means = cluster_means(vectors, weight, labels, state.models.mean, self.robust)
            statistics = slice(clients.num_parameters, clients.num_evaluated)  # BatchNorm's are averaged by examples
            means[:, statistics] = cluster_means(
                vectors[:, statistics], num_examples, labels, state.models.mean[:, statistics], self.robust
            )
        new = single_story(flat(means), assignment)
        return new, one_story(new)

    def _feature(self, vectors: Tensor, clients: Clients) -> Tensor:
        end = clients.num_parameters
        return vectors[:, end - clients.num_last_layer if self.space == "last_layer" else 0 : end]
