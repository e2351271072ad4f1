"""FedAvg, Local and BP-FedAvg by hand, on clients whose local solutions are closed forms."""

from dataclasses import replace

import pytest
import torch
from federation_fixtures import pulled_clients, run, simulator

from bcfl.gaussian import Gaussian, merge
from bcfl.methods.averaging import BPFedAvg, FedAvg, Local

TARGETS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [4.0, 4.0]], dtype=torch.float64)
SIZES = [10.0, 20.0, 10.0]
STARTS = torch.zeros(1, 1, 2, dtype=torch.float64)


def test_fedavg_is_the_mean_by_examples() -> None:
    clients = pulled_clients(TARGETS, SIZES, STARTS)
    state, _ = FedAvg().round(FedAvg().init(clients), clients)
    assert state.models.mean[0].tolist() == pytest.approx([(10 + 40) / 40, (20 + 40) / 40])
    assert state.assignment.tolist() == [[0, 0, 0]]


def test_fedavg_counts_only_those_who_answered() -> None:
    clients = pulled_clients(TARGETS, SIZES, STARTS, absent=frozenset({0}), silent=frozenset({2}))
    state, _ = FedAvg().round(FedAvg().init(clients), clients)
    assert torch.equal(state.models.mean[0], TARGETS[1])
    assert clients.fitted == [(0, 1), (0, 2)]


def test_local_clients_know_nothing_of_each_other() -> None:
    clients = pulled_clients(TARGETS, SIZES, STARTS, absent=frozenset({1}))
    state, _ = Local().round(Local().init(clients), clients)
    assert torch.equal(state.models.mean, torch.stack([TARGETS[0], torch.zeros(2).double(), TARGETS[2]]))
    models, own = state.predictors()
    assert torch.equal(models[own], state.models.mean)


def test_local_is_the_same_with_and_without_others() -> None:
    with simulator() as engine:
        together = run(Local(), engine, 3)
        alone = run(Local(), simulator(), 3)
    assert torch.equal(together.models.mean, alone.models.mean)


def test_bp_fedavg_matches_the_moments_of_the_weighted_posteriors() -> None:
    clients = pulled_clients(TARGETS, SIZES, STARTS)
    method = BPFedAvg(forgetting=0.5)
    prior = Gaussian(torch.tensor([[0.5, 0.5]], dtype=torch.float64), torch.tensor([[8.0, 4.0]], dtype=torch.float64))
    state, _ = method.round(replace(method.init(clients), models=prior), clients)
    half = Gaussian(prior.mean[0], prior.precision[0] / 2)
    posteriors = [client.posterior(half) for client in clients.clients]
    # By the mean log-likelihood of each client's data at the prior's mean: −½‖mean − target‖².
    log_weight = -0.5 * (prior.mean - TARGETS).square().sum(1)
    both = Gaussian(torch.stack([p.mean for p in posteriors]), torch.stack([p.precision for p in posteriors]))
    expected = merge(both, log_weight)
    assert torch.allclose(state.models.mean[0], expected.mean)
    assert torch.allclose(state.models.precision[0], expected.precision)
    weight = log_weight.softmax(0)
    by_hand = sum(w * p.mean for w, p in zip(weight, posteriors, strict=True))
    assert torch.allclose(state.models.mean[0], by_hand)
    models, own = state.predictors()  # tested after adaptation
    assert torch.allclose(models[own], both.mean)


def test_bp_fedavg_keeps_its_belief_when_only_clients_without_weight_answer() -> None:
    far = torch.tensor([[0.0, 0.0], [1e3, 1e3]], dtype=torch.float64)
    clients = pulled_clients(far, [10.0, 10.0], STARTS, silent=frozenset({0}))
    method = BPFedAvg(temperature="none")
    before = method.init(clients)
    state, _ = method.round(before, clients)  # the one that answered has weight exp(−10⁷) = 0
    assert torch.equal(state.models.mean, before.models.mean)
    assert state.models.precision.isfinite().all()
