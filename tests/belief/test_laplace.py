"""Laplace's evidence of a client's last layer: its mode, its slopes, and the mixed model that it leads to."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Normal

from bcfl.belief.laplace import Rows, as_quadratic, mode, pulls
from bcfl.belief.mixed import Clusters, fit
from bcfl.belief.spread import Pull, Quadratics
from bcfl.belief.starts import flat_prior, pooled_start


def yes_or_no(x: Tensor, y: Tensor) -> Rows:
    def information(output: Tensor) -> Tensor:
        p = output[..., 0].sigmoid()
        return (p * (1 - p))[..., None, None]

    return Rows(x, lambda output: Bernoulli(logits=output[..., 0]).log_prob(y), information, 1)


def of_classes(x: Tensor, y: Tensor, *, blocks: bool = False) -> Rows:
    def information(output: Tensor) -> Tensor:
        p = output.softmax(-1)
        return torch.diag_embed(p) - p[..., :, None] * p[..., None, :]

    return Rows(x, lambda output: Categorical(logits=output).log_prob(y), information, 3, blocks=blocks)


def with_a_scale(x: Tensor, y: Tensor) -> Rows:
    """Real values, the logarithm of whose noise is an unknown beside the last layer."""

    def information(output: Tensor) -> Tensor:
        return (-2 * output[..., 1]).exp()[..., None, None]

    return Rows(x, lambda output: Normal(output[..., 0], output[..., 1].exp()).log_prob(y), information, 1, 1)


def sites(num_sites: int, num_rows: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    random = np.random.default_rng(seed)
    found = []
    for _ in range(num_sites):
        x = torch.from_numpy(np.column_stack([np.ones(num_rows), random.normal(size=num_rows)]))
        theta = torch.from_numpy(np.array([0.3, 1.0]) + random.normal(size=2) * [1.0, 0.8])
        found.append((x, torch.from_numpy((random.random(num_rows) < (x @ theta).sigmoid().numpy()).astype(float))))
    return found


def three_kinds_of_rows() -> list[Rows]:
    x = torch.from_numpy(np.random.default_rng(3).normal(size=(9, 2)))
    y = torch.tensor([0, 1, 2, 0, 1, 2, 0, 0, 1])
    return [
        yes_or_no(x, (y > 0).double()),
        of_classes(x, y),
        with_a_scale(x, y.double()),
        of_classes(x, y, blocks=True),
    ]


@pytest.mark.parametrize("rows", three_kinds_of_rows())
def test_at_the_mode_no_direction_leads_up(rows: Rows) -> None:
    size = rows.num_coefficients
    mean, variance = torch.full((1, size), 0.1).double(), torch.full((1, size), 0.7).double()
    variance[:, : rows.num_unknowns] = 0  # the same for all clients: the mode has what the prior says
    found = mode(rows, mean, variance, torch.ones(1, 9).double())
    theta = found.theta.clone().requires_grad_()
    height = rows.log_prob(rows.outputs(theta)).sum() - ((theta - mean).square() / variance.clamp(min=1e-3)).sum() / 2
    (slope,) = torch.autograd.grad(height, theta)
    assert torch.equal(found.theta[:, : rows.num_unknowns], mean[:, : rows.num_unknowns])
    assert float(slope[:, rows.num_unknowns :].abs().max()) < 1e-5


@pytest.mark.parametrize("rows", three_kinds_of_rows()[:3])
def test_the_slopes_of_the_evidence_are_what_its_differences_say(rows: Rows) -> None:
    """In the prior's mean and log variance: the score of the quadratic at the mode, and the pull."""
    random, size, free = np.random.default_rng(4), rows.num_coefficients, rows.num_unknowns
    weight = torch.ones(1, 9).double()
    mean = torch.from_numpy(random.normal(size=(1, size))) / 3
    log_variance = torch.from_numpy(random.normal(size=(1, size)))
    keep = torch.ones(1, size).double()
    keep[:, :free] = 0

    def evidence(mean: Tensor, log_variance: Tensor) -> float:
        return float(mode(rows, mean, log_variance.exp() * keep, weight).log_evidence)

    variance = log_variance.exp() * keep
    found = mode(rows, mean, variance, weight)
    pull_mean, pull_spread = (pull[:, 0] for pull in pulls(rows, found, mean, variance, weight))
    z = found.gradient[:, 0]
    information = found.curvature[:, 0] - found.curvature[:, 0] @ found.covariance[:, 0] @ found.curvature[:, 0]
    by_spread = variance * (z.square() - information.diagonal(dim1=-2, dim2=-1)) / 2 + pull_spread
    for place in range(size):
        step = torch.zeros_like(mean)
        step[0, place] = 1e-4
        slope = (evidence(mean + step, log_variance) - evidence(mean - step, log_variance)) / 2e-4
        assert float((z + pull_mean)[0, place]) == pytest.approx(slope, abs=1e-5)
        if place >= free:
            slope = (evidence(mean, log_variance + step) - evidence(mean, log_variance - step)) / 2e-4
            assert float(by_spread[0, place]) == pytest.approx(slope, abs=1e-5)


def expanded(all_rows: list[Rows], at: Clusters) -> Quadratics:
    """Every client's log-likelihood as a quadratic at its mode under the one cluster."""
    mean, variance = at.mean.flatten(1), at.variance.flatten(1)
    parts = []
    for rows in all_rows:
        weight = torch.ones(1, len(rows.features)).double()
        found = mode(rows, mean, variance, weight)
        parts.append((*as_quadratic(rows, found), *pulls(rows, found, mean, variance, weight)))
    curvature, linear, constant, *pull = (torch.stack(part) for part in zip(*parts, strict=True))
    count = torch.tensor([len(rows.features) for rows in all_rows]).double()
    return Quadratics(curvature, linear, constant, count, pull=Pull(*pull, at.mean, at.variance))


def test_the_mixed_model_for_yes_or_no_is_that_of_an_independent_library() -> None:
    gpboost = pytest.importorskip("gpboost")
    data = sites(40, 15, 0)
    all_rows = [yes_or_no(x, y) for x, y in data]
    zero = torch.zeros(1, 1, 2).double()
    start = Clusters(zero, zero, torch.zeros(1).double(), torch.ones(()).double())
    now = pooled_start(expanded(all_rows, start), torch.zeros(1, 2, dtype=torch.bool), spread=True)
    for _ in range(7):
        given = expanded(all_rows, now)
        found = fit(given, now, flat_prior(now.mean[0]), spread=True)
        now = found.clusters
    group = np.repeat(np.arange(40), 15)
    x, y = (torch.cat(part).numpy() for part in zip(*data, strict=True))
    theirs = gpboost.GPModel(
        group_data=group,
        group_rand_coef_data=x[:, 1:],
        ind_effect_group_rand_coef=[1],
        likelihood="bernoulli_logit",
        num_parallel_threads=1,
        matrix_inversion_method="cholesky",
    )
    theirs.fit(y=y, X=x, params={"delta_rel_conv": 1e-10})
    assert found.log_evidence >= -theirs.get_current_neg_log_likelihood() - 1e-4
    assert now.mean[0, 0].numpy() == pytest.approx(theirs.get_coef(format_pandas=False), abs=1e-3)
    assert now.variance[0, 0].numpy() == pytest.approx(theirs.get_cov_pars(format_pandas=False), rel=1e-3)
