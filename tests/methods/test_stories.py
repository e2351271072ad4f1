"""Hypotheses that differ: what BCFL keeps by default, and what it says of who belongs where."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_fixtures import ConjugateClients, simulator
from torch import Tensor

from bcfl.association.conceptual import ConjugateClient, conceptual_bcfl
from bcfl.association.membership import co_membership, mixed
from bcfl.association.seating import canonical
from bcfl.belief.gaussian import Gaussian, merge, stack
from bcfl.federation import RoundInfo
from bcfl.methods.bcfl import BCFL
from bcfl.predict.predictors import client_mixture
from bcfl.randomness import generator
from bcfl.runs.loop import load_result, resume, start
from bcfl.runs.settings import load_config, parse_config
from bcfl.runs.store import RunFolder

EXACT = {"fusion": "exact", "forgetting": 0.0, "temperature": "none", "scoring_examples": None, "prior_precision": 0.7}


def federation(seed: int, apart: float, num_clients: int = 6, starts: int = 1, **options: Any) -> ConjugateClients:
    """Clients of two kinds, so far apart; the first start knows the kinds, the others are drawn."""
    draws = generator(seed, "stories")

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draws, dtype=torch.float64)

    kinds = apart * torch.tensor([[-1.0, 0.5], [1.0, -0.5]], dtype=torch.float64)
    clients = [ConjugateClient(kinds[j % 2] + 0.3 * normal(2), 1 + normal(2).square(), 0.0) for j in range(num_clients)]
    drawn = torch.cat([kinds[None] + 0.1 * normal(1, 2, 2), normal(starts, 2, 2)])[:starts]
    return ConjugateClients(clients, drawn, torch.full((num_clients,), 8.0, dtype=torch.float64), **options)


def rounds(method: BCFL, clients: ConjugateClients, count: int) -> tuple[Any, RoundInfo]:
    state, info = method.round(method.init(clients), clients)
    for _ in range(count - 1):
        state, info = method.round(state, clients)
    return state, info


def groupings(assignment: Tensor) -> list[tuple[int, ...]]:
    return [canonical(row) for row in assignment]


@pytest.mark.parametrize("temperature", ["none", "per_example"])
def test_where_places_are_clear_one_hypothesis_is_left(temperature: str) -> None:
    clients = federation(0, apart=6.0)
    options = {**EXACT, "temperature": temperature, "initial": "same"}
    state, info = rounds(BCFL(2, "multi", 4, **options), clients, 3)
    assert len(info.log_weight) == 1
    copies, told = rounds(BCFL(2, "multi", 4, hypotheses="all", **options), clients, 3)
    assert len(told.log_weight) == 4
    assert len(state.models) < len(copies.models)


@pytest.mark.parametrize("hypotheses", ["distinct", "merged"])
@pytest.mark.parametrize("seed", range(4))
def test_kept_hypotheses_group_the_clients_differently(hypotheses: Any, seed: int) -> None:
    method = BCFL(2, "multi", 5, hypotheses=hypotheses, **EXACT)
    clients = federation(seed, apart=0.4, starts=5)
    state = method.init(clients)
    for _ in range(4):
        state, info = method.round(state, clients)
        assert len(set(groupings(info.assignment))) == len(info.assignment) <= 5
        assert float(info.log_weight.exp().min()) >= 1e-3
        assert float(info.log_weight.exp().sum()) == pytest.approx(1)


def test_of_two_starts_that_come_to_one_grouping_the_heavier_is_kept_or_both_are_merged() -> None:
    """The starts differ a little: the clusters' models do, and the grouping does not."""
    base = federation(3, apart=6.0)
    nearby = torch.cat([base.starts, base.starts.flip(1) + 0.5])  # the other start numbers its clusters otherwise
    clients = ConjugateClients(base.clients, nearby, base.num_examples)
    kept = {h: rounds(BCFL(2, "multi", 2, hypotheses=h, **EXACT), clients, 1) for h in ("all", "distinct", "merged")}
    (_, both), (one, heaviest), (together, moments) = kept["all"], kept["distinct"], kept["merged"]
    assert groupings(both.assignment)[0] == groupings(both.assignment)[1]
    assert len(heaviest.log_weight) == len(moments.log_weight) == 1
    assert torch.equal(heaviest.assignment[0], both.assignment[0])
    state = BCFL(2, "multi", 2, **EXACT).init(clients)
    weight = both.log_weight[both.parent.argsort()]  # of the first and the second start
    first = int(both.parent[0])
    for cluster in range(2):
        beliefs = [state.models[int(state.model_of[h, cluster if h == first else 1 - cluster])] for h in range(2)]
        prior = merge(stack(beliefs), weight)
        members = [c for c, own in zip(clients.clients, moments.assignment[0].tolist(), strict=True) if own == cluster]
        for client in members:
            prior = client.posterior(prior)
        found = together.models[int(together.model_of[0, cluster])]
        assert torch.allclose(found.mean, prior.mean, atol=1e-9)
        assert torch.allclose(found.precision, prior.precision, atol=1e-9)
    assert not torch.allclose(together.models.mean, one.models.mean, atol=1e-3)


def test_what_is_said_of_a_client_is_its_evidence_at_each_hypothesis_models() -> None:
    """Also where only one story is kept, and whatever temperature keeps stories alive."""
    clients = federation(1, apart=0.5, starts=3)
    for method in (BCFL(2, "multi", 3, **{**EXACT, "temperature": "per_example"}), BCFL(2, "multi", 1, **EXACT)):
        state = method.init(clients)
        new, info = method.round(state, clients)
        assert info.probability is not None
        scores = clients.score(state.models.mean)  # (client, belief)
        for h, parent in enumerate(info.parent.tolist()):
            expected = scores[:, state.model_of[parent]].softmax(1)
            assert torch.allclose(info.probability[h], expected, atol=1e-6)
        together = mixed(info.probability, info.assignment, info.log_weight)
        assert torch.allclose(together.sum(1), torch.ones(6, dtype=torch.float64), atol=1e-5)
        share = client_mixture(new, info, 2)
        assert sum(share.values()) == pytest.approx(1)
        assert co_membership(info.probability, info.log_weight).max() == 1


def test_who_is_away_is_where_it_was_and_who_never_came_is_anywhere() -> None:
    method, everybody = BCFL(2, "multi", 2, initial="same", **EXACT), federation(2, apart=6.0)
    state = method.init(federation(2, apart=6.0, absent=frozenset({5})))
    state, first = method.round(state, federation(2, apart=6.0, absent=frozenset({5})))
    assert first.probability is not None
    assert first.probability[0, 5].tolist() == [0.5, 0.5]
    state, _ = method.round(state, everybody)
    _, told = method.round(state, federation(2, apart=6.0, absent=frozenset({4})))
    assert told.probability is not None
    assert told.probability[0, 4].tolist() == torch.eye(2)[int(state.assignment[0, 4])].tolist()


SMALL = ["method.name=bcfl-mh-3", "experiment.rounds=2", "data.partition=label(2,4,0.5)", "method.num_clusters=2"]


def test_a_run_tells_its_memberships_and_reads_them_back(tmp_path: Path) -> None:
    result = start(load_config(None, SMALL), tmp_path / "run", num_workers=1)
    again = load_result(tmp_path / "run")
    assert result.info is not None
    assert result.info.probability is not None
    assert torch.equal(again.probability, result.probability)
    assert torch.equal(again.co_association, result.co_association)
    assert torch.allclose(result.probability.sum(1), torch.ones(8, dtype=torch.float64), atol=1e-5)
    lines = RunFolder(tmp_path / "run").lines("associations.jsonl")
    assert all(len(line["probability"]["rows"]) == len(set(line["parent"])) for line in lines)


def test_a_run_of_before_goes_on_as_it_was(tmp_path: Path) -> None:
    """Its settings do not tell of hypotheses: it kept the heaviest, whatever they were."""
    old = start(load_config(None, [*SMALL, "method.hypotheses=all"]), tmp_path / "old", num_workers=1)
    settings = json.loads((tmp_path / "old" / "config.json").read_text())
    assert not {"hypotheses", "evidence_precision"} & settings["method"].keys()
    assert old.info is not None
    assert old.info.probability is None
    (tmp_path / "old" / "result.json").unlink()
    for checkpoint in sorted((tmp_path / "old" / "checkpoints").iterdir())[1:]:
        checkpoint.unlink()
    resumed = resume(tmp_path / "old", num_workers=1)
    assert torch.equal(resumed.state.hypotheses.models.mean, old.state.hypotheses.models.mean)
    assert resumed.config.method["hypotheses"] == "all"
    assert parse_config({}).method["hypotheses"] == "distinct" or "hypotheses" not in parse_config({}).method


def test_greedy_runs_have_no_such_option() -> None:
    with simulator() as engine:
        state, info = BCFL(2, "greedy", 1).round(BCFL(2, "greedy", 1).init(engine.begin(0)), engine.begin(1))
    assert info.probability is None
    assert len(state.hypotheses.log_weight) == 1
    with pytest.raises(ValueError, match=r"method\.hypotheses is an option of"):
        load_config(None, ["method.name=bcfl-g", "method.hypotheses=all"])


def test_evidence_comes_nearer_the_exact_posterior_with_more_points_of_the_beliefs_own_precision() -> None:
    """Over all associations of one round; with 1000 added to a precision of 1 the points all lie at the mean."""
    far: dict[Any, float] = {1: 0.0, 8: 0.0, 512: 0.0, "held": 0.0}
    for seed in range(6):
        clients = federation(seed, apart=0.7, num_clients=4)
        prior = [Gaussian(mean, torch.ones_like(mean)) for mean in clients.starts[0]]
        exact = {s.assignments[0]: math.exp(s.log_weight) for s in conceptual_bcfl(prior, [clients.clients])}
        for points in far:
            options = {**EXACT, "prior_precision": 1.0, "hypotheses": "all", "initial": "same"} | {
                "evidence_kind": "random"
            }
            count, held = (512, 1000.0) if points == "held" else (points, 0.0)
            method = BCFL(2, "multi", 16, evidence_points=count, evidence_precision=held, **options)
            _, info = method.round(method.init(clients), clients)
            found = zip(map(tuple, info.assignment.tolist()), info.log_weight.exp().tolist(), strict=True)
            far[points] += sum(abs(exact[story] - weight) for story, weight in found) / 2 / 6
    assert far[512] < far[8]
    assert far[512] < 0.5 * far["held"]
    assert far["held"] == pytest.approx(far[1], abs=0.05)
