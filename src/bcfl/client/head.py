"""What a client does with its own last layer: all in float64, on the features that a body gives its examples.

Nothing of the examples leaves the client but sums over all of them, or over a fold of them: of features' products
(normal noise), of the log-likelihood's slopes and curvature at the client's own mode, or of held-out log-likelihoods.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from bcfl.belief.heads import Asked, HeadLayout, Heads, num_blocks
from bcfl.belief.laplace import Mode, Rows, as_quadratic, mode, pulls
from bcfl.belief.spread import Quadratics, members
from bcfl.client.client import LocalClient
from bcfl.client.examples import Examples
from bcfl.client.trainer import Network
from bcfl.likelihood import Likelihood, likelihood_of
from bcfl.likelihood.measures import Evaluation, measured
from bcfl.likelihood.real import LEAST_SCALE, Normal, units_in
from bcfl.model.flat import FlatModel
from bcfl.randomness import generator

NODES = 20  # of Gauss and Hermite's rule, where a last layer has one output
DRAWS = 64  # of the outputs, where it has several
FAR, FAR_SHARE = 50.0, 0.01  # nats at the mean by which a body is out of question: so many, and more for many examples
NO_SHARE = -35.0  # log share below which a prior has no part in a prediction

Answer = dict[str, Tensor]


def head_layout(model: FlatModel) -> HeadLayout | None:
    """Where the model's last layer is; None if that is no torch.nn.Linear."""
    layer, likelihood = model.last_layer, likelihood_of(model.module)
    if not isinstance(layer, nn.Linear):
        return None
    family = likelihood.family
    exact = isinstance(family, Normal) and family.scale == "learned" and family.values == 1 and not likelihood.extras
    return HeadLayout(
        layer.out_features,
        layer.in_features,
        layer.bias is not None,
        likelihood.num_unknowns,
        model.num_parameters,
        exact,
        LEAST_SCALE,
    )


@dataclass(frozen=True)
class Seen:
    """Examples as a body's last layer sees them."""

    features: Tensor  # (example, feature) float64
    y: Tensor
    likelihood: Likelihood
    layout: HeadLayout

    @property
    def rows(self) -> Rows:
        layout = self.layout
        return Rows(
            self.features,
            partial(_log_prob, self.likelihood, self.y),
            partial(_information, self.likelihood, self.y),
            layout.num_outputs,
            layout.num_unknowns,
            num_blocks(layout) > 1,
        )

    @property
    def target(self) -> Tensor:
        """y in the network's units, where the likelihood is normal."""
        center, spread = units_in(cast(Normal, self.likelihood.family))
        return (self.y.double() - center) / spread


def _log_prob(likelihood: Likelihood, y: Tensor, output: Tensor) -> Tensor:
    return likelihood.log_prob(output, y).double()


def _information(likelihood: Likelihood, y: Tensor, output: Tensor) -> Tensor:
    found = likelihood.information(output, y).double()
    return found.expand(*output.shape[:-1], *found.shape[-2:])


def seen(model: FlatModel, layout: HeadLayout, vector: Tensor, examples: Examples) -> Seen:
    """The examples as the body of that model gives them to its last layer."""
    caught: list[tuple[Tensor, Tensor]] = []
    watch = model.last_layer.register_forward_hook(lambda _, given, out: caught.append((given[0], out)))
    model.load(vector)
    model.module.eval()
    features, targets = [], []
    try:
        with torch.no_grad():
            for x, y in examples.chunks(torch.arange(len(examples))):
                output = model.module(x)
                phi, scores = caught.pop()
                if phi.dim() != 2 or not torch.equal(output[:, : scores.shape[1]].nan_to_num(), scores.nan_to_num()):
                    raise ValueError("a spread needs a model whose last layer gives its outputs")
                features.append(phi.double())
                targets.append(y)
    finally:
        watch.remove()
    phi = torch.cat(features)
    if layout.bias:
        phi = torch.cat([phi, torch.ones(len(phi), 1, dtype=torch.float64)], 1)
    return Seen(phi, torch.cat(targets), likelihood_of(model.module), layout)


def fold_of(client: LocalClient, heads: Heads) -> Tensor:
    """The fold of each of the client's examples; who is where is the same in every round and engine."""  # (example,)
    if heads.held_out:
        aside = client.scored(heads.held_out).index
        return torch.where(torch.isin(client.train.index, aside), 0, heads.num_folds)
    holder = client.index if client.holder is None else client.holder
    order = torch.randperm(len(client.train), generator=generator(client.seed, "fold", holder))
    return order % heads.num_folds


def answer(asked: Asked, heads: Heads, client: LocalClient, model: FlatModel, layout: HeadLayout) -> Answer:
    """What the client tells the server of its last layer."""
    fold = fold_of(client, heads)
    if asked == "sums":
        return _sums(seen(model, layout, heads.models[0], client.train), fold, heads.num_folds)
    if asked == "expansion":
        return _expansion(heads, fold, client, model, layout)
    return _held_out(heads, fold, client, model, layout)


def _sums(own: Seen, fold: Tensor, num_folds: int) -> Answer:
    member = torch.nn.functional.one_hot(fold, num_folds).double()
    phi, y = own.features, own.target
    return {
        "curvature": torch.einsum("nf,nd,ne->fde", member, phi, phi),
        "linear": torch.einsum("nf,nd,n->fd", member, phi, y),
        "constant": -(member.T @ y.square()) / 2,
        "num_examples": member.sum(0),
    }


def _by_body(heads: Heads) -> Iterator[tuple[int, Tensor]]:
    """Each body with the priors that stand on it."""
    for body in heads.body_of.unique().tolist():
        yield body, (heads.body_of == body).nonzero()[:, 0]


def _kept(heads: Heads, places: Tensor, fold: Tensor) -> Tensor:
    """1 for the examples that count under each prior, 0 for those that it keeps aside."""  # (prior, example)
    return (heads.fold[places, None] != fold).double()


def _expansion(heads: Heads, fold: Tensor, client: LocalClient, model: FlatModel, layout: HeadLayout) -> Answer:
    found: dict[str, list[Tensor]] = {}
    order = []
    for body, places in _by_body(heads):
        rows = seen(model, layout, heads.models[body], client.train).rows
        weight = _kept(heads, places, fold)
        mean, variance = heads.mean[places], heads.variance[places]
        at = mode(rows, mean, variance, weight)
        curvature, linear, constant = as_quadratic(rows, at)
        pull_mean, pull_spread = pulls(rows, at, mean, variance, weight)
        parts = (curvature, linear, constant, pull_mean, pull_spread, weight.sum(1))
        names = ("curvature", "linear", "constant", "pull_mean", "pull_spread", "num_examples")
        for name, part in zip(names, parts, strict=True):
            found.setdefault(name, []).append(part)
        order.append(places)
    back = torch.cat(order).argsort()
    return {name: torch.cat(parts)[back] for name, parts in found.items()}


@dataclass(frozen=True)
class OwnPosterior:
    """A client's own last layers: under each prior its posterior, and how likely it is to be the one."""

    theta: Tensor  # (prior, coefficient)
    covariance: Tensor  # (prior, block, p, p)
    log_share: Tensor  # (prior,), normalised within each mixture
    noise: Tensor  # (prior,)


def posterior(heads: Heads, places: Tensor, own: Seen, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Means, covariances and log evidences of the client's last layer under some of the priors."""
    mean, variance = heads.mean[places], heads.variance[places]
    if not own.layout.exact:
        return _by_mode(own.rows, mean, variance, weight)
    phi, y, noise = own.features, own.target, heads.noise[places]
    given = Quadratics(
        torch.einsum("qn,nd,ne->qde", weight, phi, phi)[None, :, None] / noise[:, None, None, None],
        torch.einsum("qn,nd,n->qd", weight, phi, y)[None, :, None] / noise[:, None, None],
        -(weight @ y.square())[None] / (2 * noise) - weight.sum(1) / 2 * (2 * torch.pi * noise).log(),
        weight.sum(1)[:1],
    )
    found = members(given, mean[:, None], variance[:, None])
    return found.mean[0, :, 0], found.covariance[0], found.log_evidence[0]


def _by_mode(rows: Rows, mean: Tensor, variance: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same by Laplace's approximation; where all members are the same, the prior's mean is the mode."""
    differ = (variance > 0).any(1)
    log_evidence = (rows.log_prob(rows.outputs(mean)) * weight).sum(1)
    theta, covariance = mean.clone(), _no_covariance(rows, mean)
    if differ.any():
        at: Mode = mode(rows, mean[differ], variance[differ], weight[differ])
        theta[differ], covariance[differ], log_evidence[differ] = at.theta, at.covariance, at.log_evidence
    return theta, covariance, log_evidence


def own_posterior(heads: Heads, client: LocalClient, model: FlatModel, layout: HeadLayout) -> OwnPosterior:
    """The client's last layers by all of its training examples but the folds that are kept aside.

    On bodies that explain them far worse than the best, the prior's mean stands for the posterior: it has no share.
    """
    fold = fold_of(client, heads)
    views = {body: seen(model, layout, heads.models[body], client.train) for body, _ in _by_body(heads)}
    at_mean = {body: _at_mean(heads, places, views[body], fold) for body, places in _by_body(heads)}
    best = max(float(values.max()) for values in at_mean.values())
    theta, covariance = list[Tensor](), list[Tensor]()
    evidence, order = list[Tensor](), list[Tensor]()
    for body, places in _by_body(heads):
        own, weight = views[body], _kept(heads, places, fold)
        if len(views) > 1 and float(at_mean[body].max()) < best - FAR * (1 + FAR_SHARE * len(client.train)):
            parts = heads.mean[places], _no_covariance(own.rows, heads.mean[places]), at_mean[body]
        else:
            parts = posterior(heads, places, own, weight)
        for kept, part in zip((theta, covariance, evidence, order), (*parts, places), strict=True):
            kept.append(part)
    back = torch.cat(order).argsort()
    log_joint = heads.log_share + torch.cat(evidence)[back]
    return OwnPosterior(
        torch.cat(theta)[back], torch.cat(covariance)[back], normalised(log_joint, heads.group), heads.noise
    )


def _at_mean(heads: Heads, places: Tensor, own: Seen, fold: Tensor) -> Tensor:
    """The log-likelihood of what is not kept aside, at the means of the priors."""  # (prior,)
    weight, mean = _kept(heads, places, fold), heads.mean[places]
    if not own.layout.exact:
        return (own.rows.log_prob(own.rows.outputs(mean)) * weight).sum(1)
    noise = heads.noise[places, None]
    square = (own.target - mean @ own.features.T).square() / noise
    return -(weight * (square + (2 * torch.pi * noise).log())).sum(1) / 2


def _no_covariance(rows: Rows, mean: Tensor) -> Tensor:
    blocks = rows.blocked(mean)
    return blocks.new_zeros(*blocks.shape, blocks.shape[-1])


def normalised(log_joint: Tensor, group: Tensor) -> Tensor:
    """Log shares that sum to one within each group."""
    found = torch.empty_like(log_joint)
    for one in group.unique().tolist():
        found[group == one] = log_joint[group == one].log_softmax(0)
    return found


def output_moments(own: OwnPosterior, places: Tensor, at: Seen) -> tuple[Tensor, Tensor]:
    """Means and covariances of the outputs of examples under some priors."""  # (prior, example, output (, output))
    rows, C, U = at.rows, at.layout.num_outputs, 0 if at.layout.exact else at.layout.num_unknowns
    theta, phi = own.theta[places], at.features
    mean = torch.einsum("nd,qcd->qnc", phi, theta[:, U:].view(len(places), C, -1))
    covariance = own.covariance[places]
    if rows.blocks:
        return mean, torch.diag_embed(torch.einsum("nd,qcde,ne->qnc", phi, covariance, phi))
    inner = covariance[:, 0, U:, U:].reshape(len(places), C, phi.shape[1], C, phi.shape[1])
    return mean, torch.einsum("nd,qcdbe,ne->qncb", phi, inner, phi)


def output_points(mean: Tensor, covariance: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Outputs that stand for N(mean, covariance), and their log weights: the integral over a client's own posterior.

    One output: Gauss and Hermite's rule; several: antithetic draws that all examples and priors share.
    """  # (point, prior, example, output), (point,)
    C = mean.shape[-1]
    if C == 1:
        nodes, weights = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(NODES))
        scale = covariance[..., 0].clamp(min=0).sqrt()
        return mean + nodes[:, None, None, None] * scale, (weights / weights.sum()).log()
    ridge = 1e-12 + 1e-9 * covariance.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    factor = torch.linalg.cholesky(covariance + ridge * torch.eye(C, dtype=torch.float64))
    half = torch.randn(DRAWS // 2, 1, 1, C, generator=random, dtype=torch.float64)
    noise = torch.cat([half, -half])
    points = mean + (factor @ noise[..., None])[..., 0]
    return points, torch.full((DRAWS,), 1 / DRAWS, dtype=torch.float64).log()


def log_predictive(own: OwnPosterior, places: Tensor, at: Seen, random: torch.Generator) -> Tensor:
    """log ∫ p(y | x, θ) q(θ) dθ of each example under some priors."""  # (prior, example)
    mean, covariance = output_moments(own, places, at)
    if at.layout.exact:
        variance = own.noise[places, None] + covariance[..., 0, 0]
        square = (at.target - mean[..., 0]).square() / variance
        return -(square + (2 * torch.pi * variance).log()) / 2 - math.log(
            units_in(cast(Normal, at.likelihood.family))[1]
        )
    points, log_weight = output_points(mean, covariance, random)
    full = with_unknowns(own, places, at.layout, points)
    return (at.likelihood.log_prob(full, at.y).double() + log_weight[:, None, None]).logsumexp(0)


def _with_share(heads: Heads, own: OwnPosterior) -> Iterator[tuple[int, Tensor]]:
    """The bodies with those priors that have a part in what is predicted."""
    for body, places in _by_body(heads):
        there = places[own.log_share[places] > NO_SHARE]
        if len(there):
            yield body, there


def with_unknowns(own: OwnPosterior, places: Tensor, layout: HeadLayout, points: Tensor) -> Tensor:
    """Outputs with the likelihood's unknowns behind them, as a model gives them."""
    by_noise, by_theta = layout.log_scale(own.noise[places])[:, None], own.theta[places, : layout.num_unknowns]
    unknown = by_noise if layout.exact else by_theta
    return torch.cat([points, unknown[:, None].expand(*points.shape[:-1], -1)], -1)


def tested(
    heads: Heads, client: LocalClient, model: FlatModel, layout: HeadLayout, num_classes: int
) -> Evaluation | None:
    """How a client's own last layers, mixed by its membership, predict its test data; None if it has none."""
    if not len(client.test):
        return None
    own, random = own_posterior(heads, client, model, layout), generator(client.seed, "head", client.index)
    said, log_weights = [], []
    for body, places in _with_share(heads, own):
        at = seen(model, layout, heads.models[body], client.test)
        points, log_weight = output_points(*output_moments(own, places, at), random)
        said.append(with_unknowns(own, places, layout, points).flatten(0, 1).float())
        log_weights.append((log_weight[:, None] + own.log_share[places]).flatten())
    y = client.test.y[client.test.index]
    return measured(likelihood_of(model.module), torch.cat(said), torch.cat(log_weights), y, num_classes)


def evaluations_by_heads(
    heads: Heads, layout: HeadLayout, num_classes: int, clients: Sequence[LocalClient], network: Network
) -> list[Evaluation | None]:
    """How each client's own last layers predict its test data."""
    return [tested(heads, client, network.template, layout, num_classes) for client in clients]


def _held_out(heads: Heads, fold: Tensor, client: LocalClient, model: FlatModel, layout: HeadLayout) -> Answer:
    """For each candidate the sum of the log-likelihoods of examples, each predicted while it was kept aside."""
    own = own_posterior(heads, client, model, layout)
    log_p = torch.zeros(len(heads), len(client.train), dtype=torch.float64)
    random = generator(client.seed, "head", client.index)
    for body, places in _with_share(heads, own):
        at = seen(model, layout, heads.models[body], client.train)
        log_p[places] = log_predictive(own, places, at, random)
    total = torch.zeros(heads.num_candidates, dtype=torch.float64)
    for candidate in range(heads.num_candidates):
        for part in range(heads.num_folds):
            mixed = ((heads.candidate == candidate) & (heads.fold == part)).nonzero()[:, 0]
            if len(mixed):
                total[candidate] += (own.log_share[mixed, None] + log_p[mixed]).logsumexp(0)[fold == part].sum()
    return {"log_likelihood": total, "num_examples": (fold < heads.num_folds).sum()[None].double()}


def answers(
    asked: Asked, heads: Heads, layout: HeadLayout, clients: Sequence[LocalClient], network: Network
) -> list[Answer]:
    """What clients tell of their last layers."""
    return [answer(asked, heads, client, network.template, layout) for client in clients]


def is_sound(told: Answer) -> bool:
    """Whether a client's answer can be used: nothing in it is infinite or no number."""
    return all(bool(part.isfinite().all()) for part in told.values())


def examples_seen(asked: Asked, heads: Heads, num_examples: int) -> int:
    """How many (example, model) pairs an answer takes: a pass for each body, and as much again for each prior."""
    return num_examples * (1 if asked == "sums" else len(heads))
