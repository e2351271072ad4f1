"""FedProx, Ditto and FedRep by hand, on clients whose local solutions are closed forms, and on small networks."""

from dataclasses import replace

import pytest
import torch
from federation_fixtures import linear, network, one_round, predictors, pulled_clients, run, simulator

from bcfl.client.trainer import Training
from bcfl.engines.participation import Participation
from bcfl.methods.averaging import FedAvg, Local
from bcfl.methods.near import Ditto, FedProx, divided
from bcfl.methods.representation import FedRep

TARGETS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [4.0, 4.0]], dtype=torch.float64)
SIZES = [10.0, 20.0, 10.0]
STARTS = torch.zeros(1, 1, 2, dtype=torch.float64)


@pytest.mark.parametrize("proximal", [0.5, 3.0])
def test_fedprox_solves_each_client_s_proximal_problem_and_averages_by_examples(proximal: float) -> None:
    """argmin ½‖w − t‖² + μ/2 ‖w − 0‖² is t / (1 + μ)."""
    clients = pulled_clients(TARGETS, SIZES, STARTS)
    state, _ = FedProx(proximal).round(FedProx(proximal).init(clients), clients)
    by_hand = (torch.tensor(SIZES).double()[:, None] * TARGETS).sum(0) / 40 / (1 + proximal)
    assert torch.allclose(state.models.mean[0], by_hand)


def test_fedprox_with_proximal_0_is_fedavg_to_the_bit() -> None:
    with simulator() as engine:
        prox = run(FedProx(proximal=0.0), engine, 3)
    with simulator() as engine:
        assert torch.equal(prox.models.mean, run(FedAvg(), engine, 3).models.mean)


@pytest.mark.parametrize("proximal", [0.5, 3.0])
def test_ditto_draws_each_client_s_own_model_to_the_average_as_it_was_sent(proximal: float) -> None:
    """argmin ½‖v − t‖² + λ/2 ‖v − w̄‖² is (t + λ w̄) / (1 + λ), while w̄ goes on as FedAvg's."""
    clients = pulled_clients(TARGETS, SIZES, STARTS, absent=frozenset({2}))
    method = Ditto(proximal)
    state, _ = method.round(method.init(clients), clients)
    first = (10 * TARGETS[0] + 20 * TARGETS[1]) / 30
    assert torch.allclose(state.hypotheses.models.mean[0], first)
    assert torch.allclose(state.personal[:2], TARGETS[:2] / (1 + proximal))
    assert torch.equal(state.personal[2], torch.zeros(2).double())  # it was not there
    state, _ = method.round(state, clients)
    assert torch.allclose(state.personal[:2], (TARGETS[:2] + proximal * first) / (1 + proximal))
    models, own = predictors(state)
    assert torch.equal(models[own], state.personal)


def test_ditto_s_average_is_fedavg_with_its_part_of_the_steps() -> None:
    training = Training(local_steps=3, batch_size=8, momentum_state="fresh")
    with simulator(training=replace(training, local_steps=6)) as engine:
        ditto = run(Ditto(), engine, 1)
    with simulator(training=training) as engine:
        assert torch.equal(ditto.hypotheses.models.mean, run(FedAvg(), engine, 1).models.mean)


def test_the_stronger_the_nearer_to_the_average() -> None:
    distance = []
    for proximal in (0.01, 1.0, 100.0):
        with simulator(factory=linear, training=Training(local_steps=40, momentum_state="fresh")) as engine:
            state = run(Ditto(proximal), engine, 10)
        distance.append(float((state.personal - state.hypotheses.models.mean).norm()))
    assert distance[0] > 1.2 * distance[1] > 1.2 * 1.2 * distance[2]


@pytest.mark.parametrize("method", [Ditto(), FedRep(), FedProx()])
def test_nobody_takes_more_local_steps_than_others(method: Ditto | FedRep | FedProx) -> None:
    with simulator(training=Training(local_steps=7, batch_size=8)) as engine:
        _, _, clients = one_round(method, engine, method.init(engine.begin(0)))
        assert clients.work.local_steps == 7 * 6


@pytest.mark.parametrize(("steps", "share", "expected"), [(10, 0.5, (5, 5)), (3, 0.1, (1, 2)), (1, 0.5, (1, 1))])
def test_steps_are_divided_with_one_for_each_at_least(steps: int, share: float, expected: tuple[int, int]) -> None:
    assert divided(steps, share) == expected


def test_fedrep_shares_all_but_the_last_layer() -> None:
    with simulator(participation=Participation(0.7)) as engine:
        clients = engine.begin(0)
        head = slice(clients.num_parameters - clients.num_last_layer, clients.num_parameters)
        state = run(FedRep(), engine, 3)
    bodies = state.personal.clone()
    bodies[:, head] = 0
    assert len(bodies.unique(dim=0)) == 1
    assert len(state.personal[:, head].unique(dim=0)) == len(state.personal)


@pytest.mark.parametrize("momentum_state", ["fresh", "belief"])
def test_fedrep_trains_the_head_on_the_body_that_was_sent_and_then_the_body_under_the_new_head(
    momentum_state: str,
) -> None:
    training = Training(local_steps=4, batch_size=8, momentum_state=momentum_state)
    with simulator(training=training, factory=network) as engine:
        clients = engine.begin(0)
        head = slice(clients.num_parameters - clients.num_last_layer, clients.num_parameters)
        before = FedRep().init(clients)
        after, _, _ = one_round(FedRep(), engine, before)
    asked: list[torch.Tensor] = []
    with simulator(training=training, factory=network) as engine:
        clients = engine.begin(1)
        fit = clients.fit

        def watched(models, jobs):  # type: ignore[no-untyped-def]
            answers = list(fit(models, jobs))
            asked.extend([models.mean, torch.stack([answer.mean for answer in answers])])
            yield from answers

        clients.fit = watched  # type: ignore[method-assign]
        FedRep().round(before, clients)
    head_start, head_end, body_start, body_end = asked
    parameters = slice(0, clients.num_parameters)
    moved = (head_end - head_start)[:, parameters].abs()
    assert moved[:, head].min(1).values.max() > 0
    moved[:, head] = 0
    assert moved.max() < 1e-5  # the body stood still
    assert torch.equal(body_start[:, head], head_end[:, head])
    assert torch.allclose(body_end[:, head], body_start[:, head], atol=1e-5)
    assert torch.equal(after.personal[:, head], head_end[:, head])


def test_where_all_is_last_layer_fedrep_is_local() -> None:
    clients = pulled_clients(TARGETS, SIZES, STARTS, num_last_layer=2)
    rep, _ = FedRep().round(FedRep().init(clients), clients)
    alone, _ = Local().round(Local().init(clients), clients)
    assert torch.equal(rep.personal, alone.models.mean)


def test_fedrep_s_body_is_the_mean_by_examples_of_what_came_back() -> None:
    clients = pulled_clients(TARGETS, SIZES, STARTS, silent=frozenset({2}))  # the body is the first number
    state, _ = FedRep().round(FedRep().init(clients), clients)
    assert state.hypotheses.models.mean[0, 0] == pytest.approx((10 * 1 + 20 * 0) / 30)
    assert state.personal[:, 1].tolist() == pytest.approx([0, 1, 0])
