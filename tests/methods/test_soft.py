"""Soft membership: against closed forms on conjugate clients, and where clients really belong to several clusters."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from federation_fixtures import ConjugateClients, client_data, linear, one_round, run, simulator
from torch import Tensor

from bcfl.association.conceptual import ConjugateClient
from bcfl.belief.evidence import TEMPERATURES, learned_temperature
from bcfl.belief.gaussian import Gaussian
from bcfl.client.trainer import Training
from bcfl.data.arrays import from_arrays
from bcfl.engines.participation import Participation
from bcfl.federation import served
from bcfl.methods.soft import NEGLIGIBLE, Soft, SoftBCFL
from bcfl.randomness import generator
from bcfl.runs.packing import classes_of, pack, unpack

EXACT = {"fusion": "exact", "forgetting": 0.0, "temperature": "none", "scoring_examples": None}


def world(num_clients: int, apart: float = 1.0) -> tuple[list[ConjugateClient], Tensor]:
    draws = generator(0, "soft world")
    truth = apart * torch.randn(2, 3, generator=draws, dtype=torch.float64)
    clients = [
        ConjugateClient(
            truth[j % 2] + 0.5 * torch.randn(3, generator=draws, dtype=torch.float64),
            torch.rand(3, generator=draws, dtype=torch.float64),
            0.0,
        )
        for j in range(num_clients)
    ]
    return clients, truth + torch.randn(2, 3, generator=draws, dtype=torch.float64)


def federation(clients: list[ConjugateClient], starts: Tensor, **options: Any) -> ConjugateClients:
    return ConjugateClients(clients, starts[None], torch.full((len(clients),), 5.0, dtype=torch.float64), **options)


def test_a_soft_round_is_a_step_of_em() -> None:
    """E: softmax of log-likelihoods at the means. M: the prior times every likelihood to the power of its share."""
    clients, starts = world(5)
    method = SoftBCFL(2, prior_precision=0.7, **EXACT)
    asked = federation(clients, starts)
    state, info = method.round(method.init(asked), asked)
    scores = torch.stack([client.log_likelihood(starts) for client in clients])
    share = scores.softmax(1)
    assert torch.allclose(state.membership, share, atol=1e-12)
    assert torch.allclose(info.probability, share, atol=1e-6)
    for k in range(2):
        information = torch.stack([client.information for client in clients]) * share[:, k, None]
        precision = 0.7 + information.sum(0)
        estimates = torch.stack([client.estimate for client in clients])
        mean = (0.7 * starts[k] + (information * estimates).sum(0)) / precision
        assert torch.allclose(state.hypotheses.models.precision[k], precision, atol=1e-12)
        assert torch.allclose(state.hypotheses.models.mean[k], mean, atol=1e-12)


def test_without_oneself_every_round_counts_the_data_once() -> None:
    """Beliefs stay prior times data, however many rounds; and a client is scored under what all others say."""
    clients, starts = world(6)
    method = SoftBCFL(2, prior_precision=0.7, without_oneself=True, shares="learn", **EXACT)
    state = method.init(federation(clients, starts))
    assert torch.equal(state.hypotheses.models.mean[0], state.hypotheses.models.mean[1])
    for index in range(1, 9):
        before = state
        state, _ = method.round(state, federation(clients, starts, round=index))
    for k in range(2):
        power = torch.where(state.membership >= NEGLIGIBLE, state.membership, 0.0)[:, k, None]
        information = torch.stack([client.information for client in clients]) * power
        estimates = torch.stack([client.estimate for client in clients])
        precision = 0.7 + information.sum(0)
        assert torch.allclose(state.hypotheses.models.precision[k], precision, atol=1e-9)
        mean = (0.7 * starts[0] + (information * estimates).sum(0)) / precision
        assert torch.allclose(state.hypotheses.models.mean[k], mean, atol=1e-9)
    prior = Gaussian(starts[0], torch.full_like(starts[0], 0.7))
    log_share = ((before.membership.sum(0) + 1) / (6 + 2)).log()  # by the clusters' sizes
    expected = torch.empty(6, 2, dtype=torch.float64)
    for j, own in enumerate(clients):
        for k in range(2):
            belief = prior
            for i, client in enumerate(clients):
                if i != j:
                    part = replace(client, information=client.information * float(before.membership[i, k]))
                    belief = part.posterior(belief)
            expected[j, k] = own.log_likelihood(belief.mean) + log_share[k]
    assert torch.allclose(state.membership, expected.softmax(1), atol=2e-3)  # what is negligible was left out


def test_where_places_are_clear_nothing_is_trained_twice() -> None:
    clients, starts = world(6, apart=30.0)
    method = SoftBCFL(2, prior_precision=0.7, **EXACT)
    asked = federation(clients, starts)
    state = method.init(asked)
    for _ in range(3):
        asked.fitted.clear()
        state, _ = method.round(state, asked)
    assert sorted(client for _, client in asked.fitted) == list(range(6))


def test_a_client_is_served_by_its_mixture() -> None:
    clients, starts = world(4, apart=0.1)
    method = SoftBCFL(2, **EXACT, prior_precision=1.0)
    state, _ = method.round(method.init(federation(clients, starts)), federation(clients, starts))
    models, shares = served(state)
    assert torch.equal(models.mean, state.hypotheses.models.mean)
    for j, mixture in enumerate(shares):
        assert sum(mixture.values()) == pytest.approx(1)
        assert mixture[0] == pytest.approx(float(state.membership[j, 0]))


@pytest.mark.parametrize("options", [{}, {"without_oneself": True, "prior_precision": 0.5}])
def test_who_is_away_or_late_keeps_its_place_and_what_it_said(options: dict[str, Any]) -> None:
    method = SoftBCFL(2, **options)
    with simulator(factory=linear) as engine:
        before = run(method, engine, 3)
    with simulator(factory=linear, participation=Participation(straggling=1.0)) as engine:
        after, _, _ = one_round(method, engine, before)
        assert torch.allclose(after.hypotheses.models.mean, before.hypotheses.models.mean, atol=1e-6)
    with simulator(factory=linear, participation=Participation(0.5)) as engine:
        after, _, clients = one_round(method, engine, before)
        assert torch.equal(after.membership[~clients.present], before.membership[~clients.present])


@pytest.mark.parametrize("options", [{}, {"without_oneself": True, "prior_precision": 0.5}])
def test_soft_states_are_kept_to_the_bit(options: dict[str, Any]) -> None:
    method = SoftBCFL(2, **options)
    with simulator(participation=Participation(0.7)) as engine:
        whole = run(method, engine, 4)
        half = run(method, engine, 2)
        kept = unpack(pack(half), classes_of(method))
        assert isinstance(kept, Soft)
        for index in (3, 4):
            kept, _ = method.round(kept, engine.begin(index))
    one, other = pack(whole).tensors, pack(kept).tensors
    assert one.keys() == other.keys()
    assert all(torch.equal(values.nan_to_num(), other[key].nan_to_num()) for key, values in one.items())


def test_a_prior_that_holds_nothing_is_refused_where_nothing_else_would() -> None:
    with pytest.raises(ValueError, match="prior_precision must be above 0 with without_oneself"):
        SoftBCFL(2, without_oneself=True)
    with pytest.raises(ValueError, match="warm_up_rounds must be 0"):
        SoftBCFL(2, without_oneself=True, prior_precision=1.0, warm_up_rounds=2)


def two_kinds(seed: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Clients with few examples, whose label rules are much alike: whose is whose cannot be told for sure."""
    draws = generator(seed, "two kinds")
    shared, apart = torch.randn(2, 4, generator=draws).unbind()
    clients = []
    for j in range(24):
        rule = 2 * shared + (1.2 if j % 2 else -1.2) * apart
        x = torch.randn(206, 4, generator=draws)
        y = (torch.rand(206, generator=draws) < (x @ rule).sigmoid()).long()
        clients.append((x[:6], y[:6], x[6:], y[6:]))
    return clients


def held_out_nll(method: Any, data: Any, num_rounds: int) -> Tensor:
    """Each client's NLL on its own test rows after so many rounds."""
    training = Training(learning_rate=0.1, local_steps=5, batch_size=8)
    with simulator(data, lambda: torch.nn.Linear(4, 2), training) as engine:
        state = run(method, engine, num_rounds)
        models, shares = served(state)
        found = engine.evaluate(models.mean, shares, num_rounds)
    return torch.tensor([-one.log_likelihood / 200 for one in found if one is not None], dtype=torch.float64)


@pytest.mark.slow
def test_soft_learning_predicts_better_than_hard_where_places_are_in_doubt() -> None:
    from bcfl.methods.bcfl import BCFL

    gains = []
    for seed in range(3):
        data = from_arrays(two_kinds(seed))
        hard, soft = (held_out_nll(m, data, 10) for m in (BCFL(2, "greedy", 1), SoftBCFL(2)))
        gains.append(hard - soft)
    gain = torch.cat(gains)
    error = float(gain.std()) / math.sqrt(len(gain))
    assert float(gain.mean()) - 1.96 * error > 0


def test_soft_work_counts_every_training() -> None:
    method = SoftBCFL(2)
    with simulator(from_arrays(client_data()), linear) as engine:
        before = run(method, engine, 1)
        after, _, clients = one_round(method, engine, before)
    assert clients.work.trainings == int((after.membership >= NEGLIGIBLE).sum())
    assert clients.work.local_steps == 3 * clients.work.trainings
    assert clients.work.scalars_up == 6 * 2


def test_the_temperature_that_is_learned_is_the_one_that_foretells_what_is_held_back() -> None:
    """Where scores of what was trained on are far too sure, it is high; where they are right, it is 1."""
    draws = generator(0, "temperature")
    truth = torch.randint(2, (400,), generator=draws)
    gap = (
        torch.randn(400, generator=draws, dtype=torch.float64) + 1
    )  # log odds for the right cluster: calibrated, 1 and √2
    signed = torch.where(truth == 0, 1.0, -1.0) * gap * 2
    honest = torch.stack([signed / 2, -signed / 2], 1)
    held = torch.nn.functional.one_hot(truth, 2) * 50.0
    nothing = torch.zeros(2, dtype=torch.float64)
    assert learned_temperature(honest, held, nothing) == 1
    assert learned_temperature(64 * honest, held, nothing) == 64


@pytest.mark.parametrize("options", [{}, {"without_oneself": True, "prior_precision": 0.5}])
def test_a_learned_temperature_is_told_and_nothing_held_out_is_trained_on(options: dict[str, Any]) -> None:
    method = SoftBCFL(2, temperature="learn", **options)
    with simulator(from_arrays(client_data()), linear) as engine:
        before = run(method, engine, 2)
        after, info, clients = one_round(method, engine, before)
    assert after.temperature in TEMPERATURES
    assert info.events == ({"kind": "temperature", "temperature": after.temperature},)
    assert clients.work.scalars_up == 2 * 6 * 2  # of what is trained on and what is not
    assert clients.work.parameters_down > 0
