"""FedAvg, Local and BP-FedAvg by hand, on clients whose local solutions are closed forms."""

from dataclasses import replace
from itertools import combinations, permutations

import pytest
import torch
from federation_fixtures import client_data, linear, predictors, pulled_clients, run, simulator, tiny_federation

from bcfl.belief.gaussian import Gaussian, merge, stack
from bcfl.client.trainer import Training
from bcfl.data.arrays import from_arrays
from bcfl.engines.participation import Participation
from bcfl.methods.averaging import BPFedAvg, FedAvg, Local
from bcfl.methods.steps import Personal

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
    models, own = predictors(state)
    assert torch.equal(models[own], state.models.mean)


def test_local_is_the_same_with_and_without_others() -> None:
    with simulator() as engine:
        together = run(Local(), engine, 3)
    with simulator(tiny_federation(num_clients=1)) as engine:
        alone = run(Local(), engine, 3)
    assert torch.equal(together.models.mean[:1], alone.models.mean)


def test_bp_fedavg_matches_the_moments_of_the_weighted_posteriors() -> None:
    clients = pulled_clients(TARGETS, SIZES, STARTS)
    method = BPFedAvg(forgetting=0.5)
    prior = Gaussian(torch.tensor([[0.5, 0.5]], dtype=torch.float64), torch.tensor([[8.0, 4.0]], dtype=torch.float64))
    state, _ = method.round(believing(method.init(clients), prior), clients)
    half = Gaussian(prior.mean[0], prior.precision[0] / 2)
    posteriors = [client.posterior(half) for client in clients.clients]
    # By the mean log-likelihood of each client's data at the prior's mean: −½‖mean − target‖².
    log_weight = -0.5 * (prior.mean - TARGETS).square().sum(1)
    both = Gaussian(torch.stack([p.mean for p in posteriors]), torch.stack([p.precision for p in posteriors]))
    expected = merge(both, log_weight)
    assert torch.allclose(state.hypotheses.models.mean[0], expected.mean)
    assert torch.allclose(state.hypotheses.models.precision[0], expected.precision)
    weight = log_weight.softmax(0)
    by_hand = sum(w * p.mean for w, p in zip(weight, posteriors, strict=True))
    assert torch.allclose(state.hypotheses.models.mean[0], by_hand)
    models, own = predictors(state)  # tested after adaptation
    assert torch.allclose(models[own], both.mean)


@pytest.mark.parametrize("order", list(permutations(range(4))), ids=str)
def test_bp_fedavg_weighs_those_who_arrive_among_each_other(order: tuple[int, ...]) -> None:
    """In whatever order, and whoever is missing: as if only they had been asked."""
    # Distances from the prior's mean that make the log-weights −5, −5.6, −41.5 and −5·10⁶.
    distance = torch.tensor([1.0, 1.058, 2.88, 1e3], dtype=torch.float64)[list(order)]
    towards = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]], dtype=torch.float64)
    method = BPFedAvg(forgetting=0.5, temperature="none")
    prior = Gaussian(torch.zeros(1, 2, dtype=torch.float64), torch.tensor([[8.0, 4.0]], dtype=torch.float64))
    for lost in subsets_of(4):
        clients = pulled_clients(distance[:, None] * towards, [10.0] * 4, STARTS, silent=frozenset(lost))
        state, _ = method.round(believing(method.init(clients), prior), clients)
        there = [client for client in range(4) if client not in lost]
        half = Gaussian(prior.mean[0], prior.precision[0] / 2)
        posteriors = stack([clients.clients[client].posterior(half) for client in there])
        expected = merge(posteriors, -5 * distance[there].square())
        assert torch.allclose(state.hypotheses.models.mean[0], expected.mean)
        assert torch.allclose(state.hypotheses.models.precision[0], expected.precision)
        assert torch.equal(state.personal[there], posteriors.mean)  # also of those whose weight is nothing
        assert torch.equal(state.personal[list(lost)], state.hypotheses.models.mean[0].expand(len(lost), 2))


def believing(state: Personal, models: Gaussian) -> Personal:
    return replace(state, hypotheses=replace(state.hypotheses, models=models))


def subsets_of(count: int) -> list[tuple[int, ...]]:
    """All but the whole."""
    return [subset for size in range(count) for subset in combinations(range(count), size)]


@pytest.mark.parametrize("distance", [4.5, 1e3])  # e⁻¹⁰¹ is nothing in single precision, exp(−5·10⁶) in any
def test_bp_fedavg_goes_on_with_whoever_answers(distance: float) -> None:
    clients = pulled_clients(
        torch.tensor([[0.0, 0.0], [distance, 0.0]]), [10.0, 10.0], STARTS.float(), silent=frozenset({0})
    )
    method = BPFedAvg(temperature="none")
    state, _ = method.round(method.init(clients), clients)
    assert state.hypotheses.models.mean[0].tolist() == [distance, 0.0]
    assert state.hypotheses.models.precision[0].tolist() == pytest.approx([10.0, 10.0])
    clients.silent = frozenset({0, 1})
    after, _ = method.round(state, clients)
    assert torch.equal(after.hypotheses.models.mean, state.hypotheses.models.mean)
    assert torch.equal(after.hypotheses.models.precision, state.hypotheses.models.precision)


def test_bp_fedavg_with_clients_that_contradict_each_other_and_answer_late() -> None:
    rows = client_data(4, 1, 500, equal=True)
    contradicting = [(x, (y + j // 2) % 3, x_test, y_test) for j, (x, y, x_test, y_test) in enumerate(rows)]
    training = Training(local_steps=10, learning_rate=0.5)
    method = BPFedAvg(temperature="none")
    with simulator(from_arrays(contradicting), linear, training, Participation(straggling=0.5)) as engine:
        state = method.init(engine.begin(0))
        for index in range(1, 9):
            clients, before = engine.begin(index), state
            state, _ = method.round(state, clients)
            assert state.hypotheses.models.is_finite()
            adapted = (state.personal != before.personal).any(1)
            assert adapted[clients.in_time].all()


def test_bp_fedavg_serves_who_never_adapted_with_what_all_share() -> None:
    clients = pulled_clients(TARGETS, SIZES, STARTS, absent=frozenset({1, 2}))
    method = BPFedAvg()
    first, _ = method.round(method.init(clients), clients)
    assert torch.equal(first.personal, TARGETS[:1].expand(3, 2))  # a flat prior: client 0 alone is the global belief
    clients.absent = frozenset({0, 2})
    second, _ = method.round(first, clients)
    assert torch.equal(second.personal[0], TARGETS[0])  # its own adaptation, though the belief has moved on
    assert not torch.equal(second.hypotheses.models.mean[0], TARGETS[0])
    assert torch.equal(second.personal[1:], second.hypotheses.models.mean.expand(2, 2))
    clients.absent = frozenset({0, 1})
    third, _ = method.round(second, clients)
    assert torch.equal(third.personal[:2], second.personal[:2])


def test_bp_fedavg_associates_whoever_has_adapted() -> None:
    clients = pulled_clients(TARGETS, SIZES, STARTS, absent=frozenset({1}), silent=frozenset({2}))
    method = BPFedAvg()
    start = method.init(clients)
    assert start.hypotheses.assignment.tolist() == [[-1, -1, -1]]
    first, info = method.round(start, clients)
    assert first.hypotheses.assignment.tolist() == info.assignment.tolist() == [[0, -1, -1]]
    clients.absent, clients.silent = frozenset({0}), frozenset()
    second, _ = method.round(first, clients)
    assert second.hypotheses.assignment.tolist() == [[0, 0, 0]]
    assert start.hypotheses.assignment.tolist() == [[-1, -1, -1]]


def test_bp_fedavg_goes_on_with_runs_that_did_not_remember_who_adapted() -> None:
    """Their clients are all associated from the start, and so count as if all had adapted."""
    clients = pulled_clients(TARGETS, SIZES, STARTS, absent=frozenset({1}))
    method = BPFedAvg()
    start = method.init(clients)
    everywhere = torch.zeros_like(start.hypotheses.assignment)
    old = replace(start, hypotheses=replace(start.hypotheses, assignment=everywhere))
    state, _ = method.round(old, clients)
    assert torch.equal(state.personal[1], old.personal[1])
    assert not torch.equal(state.personal[0], old.personal[0])
