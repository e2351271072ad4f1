"""Beliefs without a client's own part, against closed forms on conjugate clients."""

import pytest
import torch

from bcfl.association.conceptual import ConjugateClient
from bcfl.belief.cavity import Sites, cavities, combined, no_sites
from bcfl.belief.gaussian import Gaussian
from bcfl.randomness import generator

PRIOR = Gaussian(torch.tensor([0.3, -1.0], dtype=torch.float64), torch.tensor([0.7, 2.0], dtype=torch.float64))


def clients(count: int) -> list[ConjugateClient]:
    draws = generator(0, "cavity")
    return [
        ConjugateClient(*torch.rand(2, 2, generator=draws, dtype=torch.float64).unbind(), log_constant=0.0)
        for _ in range(count)
    ]


def spoken(own: list[ConjugateClient], membership: torch.Tensor, rounds: int) -> tuple[Gaussian, Sites]:
    """Two clusters and their sites after so many rounds in which everybody trains from its cavity."""
    models = Gaussian(PRIOR.mean.repeat(2, 1), PRIOR.precision.repeat(2, 1))
    sites = no_sites(models, len(own), 2)
    for _ in range(rounds):
        others = cavities(models, sites)
        sites = sites.copy()
        for j, client in enumerate(own):
            for k in range(2):
                prior = others[2 * j + k]
                sites.say(j, k, prior, client.posterior(prior))
                sites.power[j] = membership[j]
        models = combined(models, sites, torch.ones(len(own), dtype=torch.float64), 2)
    return models, sites


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_belief_counts_every_clients_data_once_to_the_power_of_its_membership(rounds: int) -> None:
    own = clients(4)
    membership = torch.tensor([[1.0, 0.0], [0.3, 0.7], [0.0, 1.0], [0.9, 0.1]], dtype=torch.float64)
    models, sites = spoken(own, membership, rounds)
    for k in range(2):
        precision = PRIOR.precision + sum(r * c.information for r, c in zip(membership[:, k], own, strict=True))
        shift = sum(r * c.information * (c.estimate - PRIOR.mean) for r, c in zip(membership[:, k], own, strict=True))
        assert torch.allclose(models.precision[k], precision, atol=1e-12)
        assert torch.allclose(models.mean[k], PRIOR.mean + shift / precision, atol=1e-12)
    assert sites.heard.all()


def test_a_cavity_is_the_posterior_of_all_others() -> None:
    own = clients(3)
    membership = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    models, sites = spoken(own, membership, 2)
    without = cavities(models, sites)
    for j in range(3):
        belief = PRIOR
        for i, client in enumerate(own):
            belief = belief if i == j else client.posterior(belief)
        assert torch.allclose(without.mean[2 * j], belief.mean, atol=1e-12)
        assert torch.allclose(without.precision[2 * j], belief.precision, atol=1e-12)
        assert torch.allclose(without.mean[2 * j + 1], PRIOR.mean, atol=1e-12)  # nobody belongs to the second


def test_statistics_are_averaged_by_examples_and_flat_as_a_prior() -> None:
    models = Gaussian(torch.zeros(1, 4, dtype=torch.float64), torch.ones(1, 4, dtype=torch.float64))
    sites = no_sites(models, 2, 2).copy()
    prior = Gaussian(torch.zeros(4, dtype=torch.float64), torch.tensor([1.0, 1.0, 0, 0], dtype=torch.float64))
    for j, told in enumerate((1.0, 5.0)):
        posterior = Gaussian(torch.tensor([0, 0, told, 9.0], dtype=torch.float64), prior.precision + 1)
        sites.say(j, 0, prior, posterior)
        sites.power[j] = 1.0
    new = combined(models, sites, torch.tensor([30.0, 10.0], dtype=torch.float64), num_evaluated=3)
    assert new.mean[0].tolist() == [0, 0, 2, 0]  # (30 · 1 + 10 · 5) / 40, and momentum at rest
    assert cavities(new, sites).precision[:, 2:].eq(0).all()
