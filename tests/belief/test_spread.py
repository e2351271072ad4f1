"""Clusters whose members differ: against brute force, an independent library, and data in which kinds exist."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from bcfl.belief.mixed import Clusters, Fit, fit, joint
from bcfl.belief.spread import Quadratics, members
from bcfl.belief.starts import best_fit, flat_prior, pooled_start

NONE_SHARED = torch.zeros(1, 2, dtype=torch.bool)
Sites = list[tuple[Tensor, Tensor]]


def quadratics(sites: Sites) -> Quadratics:
    return Quadratics(
        torch.stack([x.T @ x for x, _ in sites])[:, None, None],
        torch.stack([x.T @ y for x, y in sites])[:, None, None],
        torch.stack([-y @ y / 2 for _, y in sites])[:, None],
        torch.tensor([len(y) for _, y in sites]).double(),
        noisy=True,
    )


def lines(means: Tensor, spread: Tensor, num_rows: int, noise: float, seed: int) -> Sites:
    """Sites whose intercepts and slopes lie about the means, one site for each row of them."""
    random = np.random.default_rng(seed)
    sites = []
    for mean in means:
        theta = mean + torch.from_numpy(random.normal(size=2)) * spread
        x = torch.stack([torch.ones(num_rows).double(), torch.from_numpy(random.normal(size=num_rows))], 1)
        sites.append((x, x @ theta + noise * torch.from_numpy(random.normal(size=num_rows))))
    return sites


def one_cluster(given: Quadratics, *, spread: bool = True) -> Fit:
    start = pooled_start(given, NONE_SHARED, spread=spread)
    return fit(given, start, flat_prior(start.mean[0]), spread=spread)


@pytest.fixture
def sleepers() -> Sites:
    return lines(torch.tensor([[1.0, 2.0]]).double().expand(18, 2), torch.tensor([0.8, 0.3]).double(), 10, 0.7, 0)


def test_one_cluster_is_the_mixed_model_of_statistics(sleepers: Sites) -> None:
    api = pytest.importorskip("statsmodels.regression.mixed_linear_model")
    group = np.repeat(np.arange(len(sleepers)), [len(y) for _, y in sleepers])
    x, y = (torch.cat(part).numpy() for part in zip(*sleepers, strict=True))
    apart = api.MixedLMParams.from_components(fe_params=np.ones(2), cov_re=np.eye(2))
    theirs = api.MixedLM(y, x, group, exog_re=x).fit(reml=False, free=apart)
    ours = one_cluster(quadratics(sleepers))
    assert ours.clusters.mean[0, 0].numpy() == pytest.approx(theirs.fe_params, rel=1e-3)
    assert ours.clusters.variance[0, 0].numpy() == pytest.approx(np.diag(theirs.cov_re), rel=1e-3)
    assert float(ours.clusters.noise) == pytest.approx(theirs.scale, rel=1e-3)
    assert ours.log_evidence == pytest.approx(theirs.llf, abs=1e-3)
    own = np.stack([theirs.fe_params + effect for effect in theirs.random_effects.values()])
    assert ours.members.mean[:, 0, 0].numpy() == pytest.approx(own, abs=1e-3)


def test_the_evidence_is_the_marginal_density_of_the_data(sleepers: Sites) -> None:
    mean, variance, noise = torch.tensor([0.5, 1.0]).double(), torch.tensor([0.4, 0.0]).double(), 0.6
    found = members(quadratics(sleepers).at_noise(noise), mean[None, None], variance[None, None])
    for j, (x, y) in enumerate(sleepers):
        covariance = noise * torch.eye(len(y)).double() + x * variance @ x.T
        assert float(found.log_evidence[j, 0]) == pytest.approx(
            float(MultivariateNormal(x @ mean, covariance).log_prob(y)), abs=1e-9
        )


def test_its_slopes_are_what_its_differences_say(sleepers: Sites) -> None:
    given = quadratics(sleepers).at_noise(0.6)
    mean = torch.tensor([[[0.5, 1.0]]]).double().requires_grad_()
    log_variance = torch.tensor([[[-1.0, -2.0]]]).double().requires_grad_()
    found = members(given, mean, log_variance.exp())
    by_mean, by_variance = torch.autograd.grad(found.log_evidence.sum(), (mean, log_variance))
    assert torch.allclose(found.score.sum(0), by_mean)
    own = (found.score.square() - found.information.diagonal(dim1=-2, dim2=-1)).sum(0) / 2
    assert torch.allclose(own * log_variance.exp(), by_variance)


def test_memberships_are_those_of_exact_enumeration(sleepers: Sites) -> None:
    """Over all ways to place four clients in three clusters, of which one has no spread."""
    sites = sleepers[:4]
    mean = torch.tensor([[[0.5, 1.0]], [[1.5, 2.0]], [[1.0, 2.2]]]).double()
    variance = torch.tensor([[[0.4, 0.1]], [[0.2, 0.3]], [[0.0, 0.0]]]).double()
    share, noise = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor(0.5).double()
    clusters = Clusters(mean, variance, share.log(), noise)
    stated = joint(quadratics(sites), clusters)[0].softmax(1)

    def density(j: int, k: int) -> Tensor:
        x, y = sites[j]
        covariance = noise * torch.eye(len(y)).double() + x * variance[k, 0] @ x.T
        log_density: Tensor = MultivariateNormal(x @ mean[k, 0], covariance).log_prob(y)
        return log_density

    log_p = torch.stack([torch.stack([density(j, k) for k in range(3)]) for j in range(4)])
    exact = torch.zeros(4, 3).double()
    for story in itertools.product(range(3), repeat=4):
        weight = sum(float(log_p[j, k] + share[k].log()) for j, k in enumerate(story))
        for j, k in enumerate(story):
            exact[j, k] += np.exp(weight - float(log_p.max(1).values.sum()))
    assert torch.allclose(stated, exact / exact.sum(1, keepdim=True), atol=1e-9)


def test_no_step_lowers_the_evidence_and_more_clusters_never_explain_less(sleepers: Sites) -> None:
    given = quadratics(sleepers)
    start = pooled_start(given, NONE_SHARED, spread=True)
    climbed = [
        fit(given, start, flat_prior(start.mean[0]), spread=True, max_steps=n).log_evidence for n in (0, 1, 2, 5, 50)
    ]
    assert climbed == sorted(climbed)
    assert one_cluster(given).log_evidence >= one_cluster(given, spread=False).log_evidence


def held_out(found: Fit, sites: Sites) -> Tensor:
    """The mean log-likelihood of each site's new rows under its own predictive mixture."""
    values = []
    for j, (x, y) in enumerate(sites):
        mean = x @ found.members.mean[j, :, 0].T
        variance = found.clusters.noise + torch.einsum("np,kpq,nq->nk", x, found.members.covariance[j, :, 0], x)
        log_p = torch.distributions.Normal(mean, variance.sqrt()).log_prob(y[:, None])
        values.append((found.membership[j].log() + log_p).logsumexp(1).mean())
    return torch.stack(values)


def test_kinds_whose_members_differ_need_clusters_and_a_spread() -> None:
    """Planted: 200 sites of 8 rows, three kinds; three clusters with a spread beat one with a spread, and hard ones."""
    kinds = torch.tensor([[0.0, 1.5], [1.5, -1.0], [-1.5, 0.3]]).double()
    all_rows = lines(kinds[torch.arange(200) % 3], torch.tensor(0.4).double(), 16, 0.6, 0)
    train, test = ([(x[part], y[part]) for x, y in all_rows] for part in (slice(8), slice(8, None)))
    given, random = quadratics(train), torch.Generator().manual_seed(0)
    one = one_cluster(given)
    three = best_fit(given, one, 3, spread=True, starts=4, generator=random)
    models = best_fit(given, one, 3, spread=False, starts=4, generator=random)
    for other in (one, models):
        gain = held_out(three, test) - held_out(other, test)
        assert float(gain.mean()) > 2 * float(gain.std()) / len(gain) ** 0.5
