"""Predictions with their uncertainty: mixtures of beliefs that predict, and clients that a run has never seen."""

from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from bcfl.association.hypotheses import entropy, renumbering
from bcfl.belief.evidence import Temperature, temper_scores
from bcfl.belief.gaussian import Gaussian
from bcfl.client.check import check_model
from bcfl.client.examples import Examples, pool
from bcfl.client.score import (
    last_layer_scores,
    log_likelihoods,
    log_probabilities,
    outputs,
    take_statistics,
    total_log_likelihood,
)
from bcfl.data.arrays import checked
from bcfl.federation import Hypotheses, Mixture, RoundInfo, Serving, State
from bcfl.files import write_atomically
from bcfl.likelihood import CATEGORICAL
from bcfl.likelihood.measures import evaluate, floored, log_mixture
from bcfl.model.flat import FlatModel, ModelFactory, build
from bcfl.predict.metrics import summarise
from bcfl.predict.mixtures import (
    BELIEF_KINDS,
    COVERAGES,
    BeliefKind,
    ClusterPrior,
    accuracy_at_coverage,
    belief_shares,
    client_joint,
    cluster_log_prior,
    expected_softmax,
    newcomer_posterior,
    points_of,
    varied,
)
from bcfl.predict.nowhere import Plausibility
from bcfl.randomness import generator

SHOWN = 8  # models whose shares are printed
# Added to the precision of what predictions are drawn from: about a weight that no gradient ever reached the data say
# nothing, and a network does not survive a draw from nothing.
PRIOR_PRECISION = 1000.0
NEGLIGIBLE = 1e-6  # a belief with less share than this in a mixture is not worth a pass through the network


@dataclass(frozen=True)
class Spread:
    """How a prediction takes the uncertainty of each belief into account."""

    beliefs: BeliefKind = "mean"
    num_samples: int = 16  # models (or, for last_layer, class scores) that stand for a belief
    prior_precision: float = PRIOR_PRECISION  # added to every uncertain parameter's; ∞ is the point prediction
    seed: int = 0

    def __post_init__(self) -> None:
        if self.beliefs not in BELIEF_KINDS:
            raise ValueError(f"beliefs must be one of {', '.join(BELIEF_KINDS)}, got {self.beliefs!r}")
        whole = isinstance(self.num_samples, Integral) and self.num_samples >= 1
        if not whole or (self.beliefs == "sigma" and self.num_samples % 2):
            raise ValueError(f"num_samples must be a whole number ≥ 1, and even for sigma points, "
                             f"got {self.num_samples!r}")  # fmt: skip
        if not isinstance(self.prior_precision, Real) or not self.prior_precision >= 0:
            raise ValueError(f"prior_precision must be a number ≥ 0, got {self.prior_precision!r}")


@dataclass(frozen=True)
class Predictor:
    """A mixture of beliefs: what predicts for a client that may belong to several clusters."""

    factory: ModelFactory
    beliefs: Gaussian  # (component, vector)
    share: Tensor  # (component,) float64, sums to one

    def __repr__(self) -> str:
        shares = ", ".join(f"{float(one):.3f}" for one in self.share[:SHOWN]) + ", …" * (len(self.share) > SHOWN)
        return f"Predictor of {len(self.share)} models, with shares {shares}"

    def predict_proba(self, x: Any, **spread: Any) -> Tensor:
        """The predictive distribution p(class | x); options are those of `Spread`."""  # (example, class)
        probability = self.log_probability(examples_of(self.factory, x, None), Spread(**spread)).exp()
        lost = (probability.sum(1) - 1).abs() > 0.01  # of scores that are NaN, all probabilities are next to 0
        if lost.any():
            raise ValueError(f"data: the model's scores of example {int(lost.nonzero()[0])} are not finite")
        return probability

    def predict(self, x: Any) -> Tensor:
        """The mean of y by the mixture of the models, or its likeliest class."""  # (example, ...)
        examples, model = examples_of(self.factory, x, None), _model(self.factory)
        said = outputs(model, self.beliefs.mean, examples, torch.arange(len(examples)))
        mean = torch.tensordot(self.share, model.likelihood.mean(said).double(), 1)
        answer: Tensor = mean.argmax(-1) if model.likelihood.family.kind == "classes" else mean
        return answer

    def with_statistics_of(self, examples: Examples) -> "Predictor":
        """The same mixture, but with BatchNorm statistics of these examples in each of its models."""
        model, means = _model(self.factory), self.beliefs.mean.clone()
        for mean in means:
            model.load(mean)
            take_statistics(model.module, examples)
            mean[: len(model.vector)] = model.vector
        return replace(self, beliefs=Gaussian(means, self.beliefs.precision))

    def log_probability(self, examples: Examples, spread: Spread) -> Tensor:
        """log Σ_b share_b E p(class | x, ω ~ belief b) for each of the examples."""  # (example, class)
        model, rows = _model(self.factory), torch.arange(len(examples))
        frozen, parts = model.frozen, []
        for i, belief in enumerate(self.beliefs):
            random = generator(spread.seed, "predictive", i)
            count = model.num_last_layer if spread.beliefs == "last_layer" else model.num_parameters
            uncertain = varied(belief, model.num_parameters, count, spread.prior_precision, frozen)
            if spread.beliefs == "last_layer":
                scores = last_layer_scores(model, uncertain, examples, rows)
                parts.append(floored(expected_softmax(*scores, spread.num_samples, random)))
            else:
                points = points_of(uncertain, spread.beliefs, spread.num_samples, random)
                equal = torch.full((len(points),), 1 / len(points), dtype=torch.float64).log()
                parts.append(log_mixture(log_probabilities(model, points, examples, rows), equal))
        return log_mixture(torch.stack(parts), self.share.log())


@dataclass(frozen=True)
class Newcomer:
    """Where a client that a run has never seen belongs, and what predicts for it."""

    joint: Tensor  # (hypothesis, cluster): their probability, the clusters numbered as in the best hypothesis
    resembles: Tensor  # (client,): how likely it shares a cluster with each of the run's clients
    num_examples: int
    nll: float  # per example, under `module`: far above the run's own, it may belong to no cluster at all
    predictor: Predictor
    component: int  # of the predictor: the likeliest model of the most likely cluster
    fit: Plausibility | None = None  # beside the run's own clients, where these were tested
    broad: Gaussian | None = None  # what all clusters together say

    def __repr__(self) -> str:
        """Where it belongs, in a line."""
        sure = f"cluster {self.cluster} with probability {float(self.probability[self.cluster]):.3f}"
        return f"newcomer in {sure}, of {len(self.probability)}; by {self.num_examples} examples, nll {self.nll:.3f}"

    @property
    def probability(self) -> Tensor:
        """How likely it belongs to each cluster, whichever hypothesis is true."""  # (cluster,)
        return self.joint.sum(0)

    @property
    def hypothesis(self) -> Tensor:
        """How likely each hypothesis is now that the newcomer has spoken too."""  # (hypothesis,)
        return self.joint.sum(1)

    @property
    def cluster(self) -> int:
        """The most likely cluster."""
        return int(self.probability.argmax())

    @property
    def entropy(self) -> float:
        """How unsure the association is, in nats."""
        return float(entropy(self.probability))

    def belongs_nowhere(self, alpha: float = 0.05) -> bool:
        """Whether its examples fit the best cluster so badly that clients of a known kind rarely would.

        At most a share `alpha` of these are said to be strangers; too few tested clients for that are refused.
        """
        if self.fit is None:
            raise ValueError("whether a newcomer belongs nowhere is told by the run's clients, and none was tested")
        return self.fit.belongs_nowhere(alpha)

    @cached_property
    def start(self) -> nn.Module:
        """What a newcomer that belongs nowhere may begin its own training from: the mean of all clusters' beliefs."""
        return self.module if self.broad is None else module_of(self.predictor.factory, self.broad.mean)

    @cached_property
    def module(self) -> nn.Module:
        """The most likely cluster's model (the likeliest, where hypotheses have several), in evaluation mode."""
        return module_of(self.predictor.factory, self.predictor.beliefs.mean[self.component])

    def predict_proba(self, x: Any, **spread: Any) -> Tensor:
        """The predictive distribution over all clusters it may belong to."""  # (example, class)
        return self.predictor.predict_proba(x, **spread)

    def save(self, path: str | Path) -> None:
        """The state_dict of `module` as a safetensors file: plain torch can load it."""
        # Copies, as safetensors refuses tied tensors.
        tensors = {name: tensor.contiguous().clone() for name, tensor in self.module.state_dict().items()}
        write_atomically(Path(path), save(tensors, {"cluster": str(self.cluster)}))


def associate(
    state: Hypotheses,
    factory: ModelFactory,
    x: Any,
    y: Any,
    temperature: Temperature,
    prior: ClusterPrior,
    membership: Tensor | None = None,
) -> Newcomer:
    """The newcomer with examples (x, y), placed by scoring alone: nothing is trained and nothing of the run changes.

    `membership`, of each hypothesis or all, is where the run's own clients are; without it, where they were placed.
    """
    if y is None:
        raise ValueError("data: y must hold the labels of x: by them it is told where a client belongs")
    examples = examples_of(factory, x, y)
    model, rows = _model(factory), torch.arange(len(examples))
    total = total_log_likelihood(log_likelihoods(model, state.models.mean, examples, rows), len(examples))
    score = temper_scores(total[None], torch.tensor([float(len(examples))]), temperature)[0]  # (belief,)
    log_prior = cluster_log_prior(state.assignment, state.model_of, prior)
    joint = newcomer_posterior(score, state.model_of, state.log_weight, log_prior)
    if membership is None:
        own_number = joint.gather(1, state.assignment.clamp(min=0))  # (hypothesis, client): of that client's cluster
        resembles = torch.where(state.assignment >= 0, own_number, 0.0).sum(0)
    else:
        of_all = membership.expand(len(joint), -1, -1) if membership.dim() == 2 else membership[: len(joint)]
        resembles = torch.einsum("hk,hjk->j", joint, of_all)
    names = renumbering(state.assignment, state.num_clusters)
    renumbered = torch.zeros_like(joint).scatter(1, names, joint)
    mixture = _mixture(belief_shares(joint, state.model_of, len(state.models)))
    likeliest = torch.where(names == renumbered.sum(0).argmax(), joint, 0.0)  # what speaks for the most likely cluster
    best = int(belief_shares(likeliest, state.model_of, len(state.models)).argmax())
    nll, predictor = -float(total[best]) / len(examples), predictor_of(factory, state.models, mixture)
    return Newcomer(renumbered, resembles, len(examples), nll, predictor, list(mixture).index(best))


def mixtures(state: State, info: RoundInfo | None) -> Serving:
    """What serves each client: what its state says, or its mixture of beliefs over the last round's hypotheses."""
    serving, told = state.serving(), state.hypotheses
    if serving is not None:
        return serving
    return told.models, [client_mixture(told, info, client) for client in range(told.assignment.shape[1])]


def client_mixture(state: Hypotheses, info: RoundInfo | None, client: int) -> Mixture:
    """The share of each belief in what serves a client: by the hypotheses, before they were merged, if they were."""
    stories = state if info is None else info
    # Merged: the one belief of each cluster serves all stories. A state may also hold trials that no story is yet.
    model_of = state.model_of.expand(len(stories.log_weight), -1) if len(state.model_of) == 1 else state.model_of
    model_of = model_of[: len(stories.log_weight)]
    if info is not None and info.probability is not None:
        joint = stories.log_weight.double().exp()[:, None] * info.probability.expand(len(model_of), -1, -1)[:, client]
    else:
        joint = client_joint(stories.assignment, model_of, stories.log_weight, client)
    return _mixture(belief_shares(joint, model_of, len(state.models)))


def _mixture(shares: Tensor) -> Mixture:
    kept = (shares > NEGLIGIBLE).nonzero()[:, 0]
    return dict(zip(kept.tolist(), (shares[kept] / shares[kept].sum()).tolist(), strict=True))


def predictor_of(factory: ModelFactory, models: Gaussian, mixture: Mixture) -> Predictor:
    return Predictor(factory, models[list(mixture)], torch.tensor(list(mixture.values()), dtype=torch.float64))


def _model(factory: ModelFactory) -> FlatModel:
    """A place for a run's vectors: with what it begins does not matter."""
    return FlatModel(build(factory, 0, "result"))


def module_of(factory: ModelFactory, vector: Tensor) -> nn.Module:
    """A module as the factory makes it, but with these parameters and statistics, in evaluation mode."""
    model, module = _model(factory), build(factory, 0, "result")
    model.load(vector)
    values = {**dict(model.module.named_parameters()), **dict(model.module.named_buffers())}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        tensor.data = values[name].detach().clone(memory_format=torch.contiguous_format)
    return module.eval()


def examples_of(factory: ModelFactory, x: Any, y: Any) -> Examples:
    """Arrays or tensors as examples that fit the run's model; without labels (None) they count as class 0."""
    count = len(x) if hasattr(x, "__len__") else 0
    likelihood = _model(factory).likelihood
    given = (torch.zeros(count, dtype=torch.int64), CATEGORICAL) if y is None else (y, likelihood)
    values, labels = checked(x, given[0], "data", given[1])
    if not len(labels):
        raise ValueError("data: at least one example is needed")
    pooled, images = pool(values)
    examples = Examples(pooled, labels, torch.arange(len(labels)), images)
    num_classes, _ = check_model(_model(factory), examples, 1, predicts_only=True, has_targets=y is not None)
    if likelihood.is_plain and int(labels.max()) >= num_classes:
        raise ValueError(f"data: y holds the label {int(labels.max())}, the run's model tells {num_classes} classes "
                         f"apart, 0 to {num_classes - 1}")  # fmt: skip
    return examples


def quality(log_probability: Tensor, y: Tensor) -> dict[str, Any]:
    """How good predictions are as probabilities: accuracy, NLL, Brier score, ECE, and accuracy where it may abstain."""
    summary = summarise([evaluate(log_probability, y, log_probability.shape[1])])
    confidence, predicted = log_probability.double().exp().max(1)
    return {key: summary[key] for key in ("accuracy", "nll", "brier", "ece")} | {
        "coverage": list(COVERAGES),
        "accuracy_at_coverage": accuracy_at_coverage(confidence, predicted == y),
        "num_examples": len(y),
    }
