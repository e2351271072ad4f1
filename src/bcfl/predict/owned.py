"""A client with a last layer of its own: the clusters' priors, updated by whatever examples it has."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bcfl.belief.heads import HeadLayout, Heads
from bcfl.client.examples import Examples
from bcfl.client.head import OwnPosterior, Seen, output_moments, output_points, posterior, seen, with_unknowns
from bcfl.client.head import head_layout as layout_of
from bcfl.likelihood import Likelihood
from bcfl.likelihood.measures import log_mixture
from bcfl.model.flat import FlatModel, ModelFactory, build
from bcfl.predict.predictors import examples_of
from bcfl.randomness import generator


@dataclass(frozen=True)
class OwnModel:
    """What predicts for a client by its own last layers, mixed by how likely it is in each cluster."""

    factory: ModelFactory
    heads: Heads
    own: OwnPosterior
    num_examples: int

    @property
    def probability(self) -> Tensor:
        """How likely the client is in each cluster."""  # (cluster,)
        return self.own.log_share.exp()

    def log_prob(self, x: Any, y: Any) -> Tensor:
        """log p(y | x) of new examples, over clusters and over what is not known of its last layer."""  # (example,)
        examples = examples_of(self.factory, x, y)
        said, log_weight = self._said(examples)
        target = examples.y[examples.index]
        return log_mixture(self._likelihood.of_models(said, target).double(), log_weight)

    def predict_proba(self, x: Any) -> Tensor:
        """p(class | x) of new examples, where the likelihood is of classes."""  # (example, class)
        said, log_weight = self._said(examples_of(self.factory, x, None))
        return log_mixture(said.double().log_softmax(2), log_weight).exp()

    def predict(self, x: Any) -> Tensor:
        """The mean of y: of a mixture the mean of means."""  # (example, ...)
        said, log_weight = self._said(examples_of(self.factory, x, None))
        means = self._likelihood.mean(said).double()
        return (log_weight.exp().view(-1, *[1] * (means.dim() - 1)) * means).sum(0)

    @property
    def _likelihood(self) -> Likelihood:
        return FlatModel(build(self.factory, 0, "result")).likelihood

    def _said(self, examples: Examples) -> tuple[Tensor, Tensor]:
        """Outputs that stand for all that the client's last layers may be, and their log weights."""
        model, layout = _model(self.factory)
        said, log_weights, random = [], [], generator(0, "own head")
        for place, body in enumerate(self.heads.body_of.tolist()):
            at, only = seen(model, layout, self.heads.models[body], examples), torch.tensor([place])
            points, log_weight = output_points(*output_moments(self.own, only, at), random)
            said.append(with_unknowns(self.own, only, layout, points).flatten(0, 1).float())
            log_weights.append(log_weight + self.own.log_share[place])
        return torch.cat(said), torch.cat(log_weights)


def own_model(factory: ModelFactory, heads: Heads, x: Any = None, y: Any = None) -> OwnModel:
    """What predicts for a client that holds (x, y); with none, what the clusters' priors say before any data."""
    model, layout = _model(factory)
    if x is None or not len(x):
        size = layout.num_coefficients
        covariance = torch.diag_embed(heads.variance)[:, None]
        if heads.mean.shape[1] != size:
            raise ValueError(f"the model has {size} coefficients in its last layer, the run {heads.mean.shape[1]}")
        own = OwnPosterior(heads.mean, covariance, heads.log_share.log_softmax(0), heads.noise)
        return OwnModel(factory, heads, own, 0)
    examples = examples_of(factory, x, y)
    theta, covariances, evidence = [], [], []
    for place, body in enumerate(heads.body_of.tolist()):
        at: Seen = seen(model, layout, heads.models[body], examples)
        weight = torch.ones(1, len(examples), dtype=torch.float64)
        mean, covariance, log_evidence = posterior(heads, torch.tensor([place]), at, weight)
        theta.append(mean)
        covariances.append(covariance)
        evidence.append(log_evidence)
    log_share = (heads.log_share + torch.cat(evidence)).log_softmax(0)
    own = OwnPosterior(torch.cat(theta), torch.cat(covariances), log_share, heads.noise)
    return OwnModel(factory, heads, own, len(examples))


def _model(factory: ModelFactory) -> tuple[FlatModel, HeadLayout]:
    model = FlatModel(build(factory, 0, "result"))
    layout = layout_of(model)
    if layout is None:
        raise ValueError("a last layer of one's own needs a model that ends in a torch.nn.Linear")
    return model, layout
