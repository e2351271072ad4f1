"""What a run gives back: the clusters' models, who belongs where with what probability, and how it went."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bcfl.association import align, co_association, entropy, marginals
from bcfl.experiment.config import Config
from bcfl.federation import Hypotheses, RoundInfo
from bcfl.models import FlatModel, ModelFactory, build


@dataclass(frozen=True)
class Result:
    """A finished run."""

    config: Config
    state: Hypotheses
    info: RoundInfo | None  # the last round's hypotheses, before any merging
    history: list[dict[str, Any]]  # one record a round, round 0 first
    factory: ModelFactory
    group: Tensor | None  # (client,) true groups, where known
    path: Path | None  # the run folder, if there is one

    @property
    def assignment(self) -> Tensor:
        """The cluster of each client in the best hypothesis."""  # (client,)
        return self.state.assignment[0]

    @property
    def probability(self) -> Tensor:
        """How likely each client belongs to each cluster, over the last round's hypotheses; rows sum to one."""
        assignment, log_weight = self._stories()
        num_clusters = max(self.state.num_clusters, int(assignment.max()) + 1)
        probability = marginals(align(assignment, num_clusters), log_weight, num_clusters)
        # A client that never took part may be anywhere.
        return torch.where((assignment[0] < 0)[:, None], 1 / num_clusters, probability)  # (client, cluster)

    @property
    def co_association(self) -> Tensor:
        """How likely any two clients share a cluster."""  # (client, client)
        return co_association(*self._stories())

    @property
    def entropy(self) -> Tensor:
        """How unsure each client's association is, in nats."""  # (client,)
        return entropy(self.probability)

    @property
    def models(self) -> list[nn.Module]:
        """The clusters' models in the best hypothesis, ready to use."""
        beliefs = [belief for belief in self.state.model_of[0].tolist() if belief >= 0]
        return [self._module(self.state.models.mean[belief]) for belief in beliefs]

    def predictor(self, client: int) -> nn.Module:
        """The model that serves a client, in evaluation mode."""
        vectors, model_of_client = self.state.predictors()
        return self._module(vectors[int(model_of_client[client])])

    @property
    def accuracy(self) -> float | None:
        """Over all clients' own test examples at the end; None without test data."""
        return self.history[-1].get("accuracy")

    def summary(self) -> dict[str, Any]:
        """The numbers that people compare, ready for JSON."""
        last = self.history[-1]
        totals: dict[str, int] = {}
        for record in self.history:
            for key, value in record["work"].items():
                totals[key] = totals.get(key, 0) + value
        return {
            "method": self.config.method["name"],
            "seed": self.config.experiment.seed,
            "rounds": last["round"],
            **{key: last.get(key) for key in ("accuracy", "macro_f1", "nll", "ece", "ari")},
            "assignment": self.assignment.tolist(),
            "work": totals,
        }

    def _stories(self) -> tuple[Tensor, Tensor]:
        if self.info is not None:
            return self.info.assignment, self.info.log_weight
        return self.state.assignment, self.state.log_weight

    def _module(self, vector: Tensor) -> nn.Module:
        model = FlatModel(build(self.factory, 0, "result"))
        model.load(vector)
        return model.module.eval().requires_grad_(False)
