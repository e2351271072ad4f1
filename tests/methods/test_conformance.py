"""What every method must do, whichever it is; a new entry in METHODS is tested without another line here."""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from federation_fixtures import (
    METHOD_NAMES,
    OPTIONS,
    advance,
    alike,
    asked,
    client_data,
    linear,
    network,
    one_round,
    predictors,
    run,
    simulator,
    tiny_federation,
)
from safetensors.torch import load, save
from torch import Tensor

from bcfl.association.hypotheses import co_association
from bcfl.belief.gaussian import Gaussian
from bcfl.client.trainer import Training
from bcfl.data.arrays import from_arrays
from bcfl.engines.participation import Participation
from bcfl.federation import Choice, Hypotheses, Jobs, Method, State
from bcfl.methods import METHODS, all_options, make_method
from bcfl.methods.steps import Personal
from bcfl.runs.packing import Packed, classes_of, pack, unpack

MOMENTUM_STATES = ["fresh", "client", "belief"]
FROM_ONE = ("fedavg", "fedprox", "bcfl-auto", "bcfl")  # with one model for all, or at the start
TRAINED = [name for name in METHOD_NAMES if name != "bcfl"]  # which solves a linear model instead, as a whole


def method_of(name: str, **options: Any) -> Method:
    name, *own = name.split()
    return make_method(name, {**OPTIONS, **dict(option.split("=") for option in own), **options})


def assert_same(first: Hypotheses, second: Hypotheses) -> None:
    """Bit for bit."""
    one, other = pack(first).tensors, pack(second).tensors
    assert one.keys() == other.keys()
    for key, values in one.items():
        assert torch.equal(values, other[key]), key


def models_of_clients(state: State) -> Tensor:
    """The vector that serves each client, whatever its cluster is called."""  # (client, vector)
    models, own = predictors(state)
    return models[own]


# --- repetition -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_deterministic(name: str) -> None:
    states = []
    for num_workers in (1, 2):
        with simulator(num_workers=num_workers) as engine:
            states.append(run(method_of(name), engine, 3))
    assert_same(*states)
    with simulator(seed=1) as engine:
        assert not torch.equal(models_of_clients(run(method_of(name), engine, 3)), models_of_clients(states[0]))


@pytest.mark.parametrize("momentum_state", MOMENTUM_STATES)
@pytest.mark.parametrize("name", METHOD_NAMES)
def test_resumable(name: str, momentum_state: str) -> None:
    training, participation = Training(local_steps=2, batch_size=8, momentum_state=momentum_state), Participation(0.7)
    with simulator(training=training, participation=participation) as engine:
        uninterrupted = run(method_of(name), engine, 4)
    with simulator(training=training, participation=participation) as engine:
        kept = pack(run(method_of(name), engine, 2))
        stored = save(dict(kept.tensors))
        # The store may read what clients keep back in any order.
        momentum = {c: dict(reversed(kept.items())) for c, kept in engine.momentum.items()}
    state = unpack(Packed(load(stored), kept.form), classes_of(method_of(name)))
    with simulator(training=training, participation=participation) as engine:
        engine.momentum = momentum
        resumed = advance(method_of(name), engine, state, range(3, 5))
    assert_same(resumed, uninterrupted)


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_a_round_leaves_the_state_before_it_as_it_was(name: str) -> None:
    with simulator() as engine:
        state = run(method_of(name), engine, 1)
        before = {key: values.clone() for key, values in pack(state).tensors.items()}
        advance(method_of(name), engine, state, range(2, 4))
    assert all(torch.equal(values, before[key]) for key, values in pack(state).tensors.items())


# --- order ------------------------------------------------------------------------------------------------------------

FULL_BATCH = Training(local_steps=4, batch_size=1000)  # so that chance decides only the order of sums
ORDER = [3, 0, 5, 1, 4, 2]


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_permuted_clients_give_permuted_results(name: str) -> None:
    # Which examples a client holds out hangs on its index: nothing is held out without a search.
    method = method_of(name, scoring_examples=None, selection=len(ORDER), search_rounds=0)
    clients, states = client_data(), []
    for data in (clients, [clients[j] for j in ORDER]):
        with simulator(from_arrays(data), linear, FULL_BATCH) as engine:
            states.append(run(method, engine, 3))
    assert torch.allclose(models_of_clients(states[1]), models_of_clients(states[0])[ORDER], atol=2e-4)
    own, permuted = (state.hypotheses for state in states)
    assert torch.allclose(permuted.log_weight, own.log_weight, atol=1e-4)
    together = co_association(own.assignment, own.log_weight)[ORDER][:, ORDER]
    assert torch.allclose(co_association(permuted.assignment, permuted.log_weight), together, atol=1e-4)
    assert len(models_of_clients(states[0]).unique(dim=0)) > 1 or name in FROM_ONE


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_clusters_that_begin_alike_are_refused_or_come_apart(name: str) -> None:
    with simulator(factory=alike()) as engine:
        if re.fullmatch(
            r"bcfl-(g|c-\d|mh-\d|soft)|ifca|fedsoft", name.split()[0]
        ):  # every cluster is drawn, none warmed up
            with pytest.raises(ValueError, match="all 2 clusters would stay alike"):
                method_of(name).init(engine.begin(0))
            method_of(name, num_clusters=1).init(engine.begin(0))  # a single cluster has no other to be like
        else:
            state = run(method_of(name), engine, 3)
            assert len(models_of_clients(state).unique(dim=0)) > 1 or name in FROM_ONE


# --- states -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_states_are_well_formed(name: str) -> None:
    with simulator() as engine:
        state = run(method_of(name), engine, 2).hypotheses
    num_beliefs, num_clusters = len(state.models), state.num_clusters
    assert state.models.is_finite()
    referred = state.model_of[state.model_of >= 0]
    assert referred.unique().tolist() == list(range(num_beliefs))  # each belief is referred to
    assert len(state.models.mean.unique(dim=0)) == num_beliefs  # and stored once
    assert float(state.log_weight.exp().sum()) == pytest.approx(1)
    assert state.log_weight.tolist() == sorted(state.log_weight.tolist(), reverse=True)
    assert state.assignment.shape == (len(state.log_weight), 6)
    assert state.assignment.min() >= 0
    assert state.assignment.max() < num_clusters
    assert state.parent_of.shape == (num_beliefs,)
    assert state.family.shape == state.log_weight.shape


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_info_tells_the_rounds_stories(name: str) -> None:
    with simulator() as engine:
        before = run(method_of(name), engine, 1)
        after, info, _ = one_round(method_of(name), engine, before)
    assert float(info.log_weight.exp().sum()) == pytest.approx(1)
    assert torch.equal(info.assignment[0], after.hypotheses.assignment[0])
    assert info.parent.max() < len(before.hypotheses.log_weight)


# --- who takes part ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_partial_participation(name: str) -> None:
    with simulator(participation=Participation(0.6, dropout=0.3, straggling=0.3)) as engine:
        method = method_of(name, search=False)  # nothing is chosen anew on the way
        state = method.init(engine.begin(0))
        for index in range(1, 7):
            clients, before = engine.begin(index), state
            state, info = method.round(state, clients)
            gone = ~clients.present
            assert state.hypotheses.models.is_finite()
            told, past = state.hypotheses, before.hypotheses
            assert torch.equal(told.assignment[0, gone], past.assignment[info.parent[0], gone])
            if isinstance(before, Personal):
                kept = (state.personal == before.personal).all(1)
                # One that has never adapted may follow the model that all share.
                follows = [(s.personal == s.hypotheses.models.mean[0]).all(1) for s in (before, state)]
                assert (kept | (follows[0] & follows[1]))[gone].all()
        assert models_of_clients(state).isfinite().all()


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_a_latecomer_is_placed_in_its_first_round_and_leaves_no_trace_before(name: str) -> None:
    first, last = client_data(), client_data()
    last[5] = (*(-part if part.is_floating_point() else (part + 1) % 3 for part in last[5]),)
    states = []
    for clients in (first, last):
        with simulator(from_arrays(clients), participation=Participation(joins=((5, 3),))) as engine:
            method = method_of(name)
            before = run(method, engine, 2)
            assert [one is None for one in engine.evaluate(*asked(before), 2)] == [False] * 5 + [True]
            after = advance(method, engine, before, range(3, 4))
            assert all(one is not None for one in engine.evaluate(*asked(after), 3))
        states.append((before, after))
    (before, after), (other_before, other_after) = states
    assert torch.equal(before.hypotheses.models.mean, other_before.hypotheses.models.mean)
    assert torch.equal(before.hypotheses.assignment, other_before.hypotheses.assignment)
    assert not torch.equal(models_of_clients(after), models_of_clients(other_after))
    assert int(after.hypotheses.assignment.min()) >= 0


def assert_beliefs_kept(earlier: State, later: State, parents: Tensor) -> None:
    """Every cluster of every hypothesis believes what it believed in its parent."""
    before, after = earlier.hypotheses, later.hypotheses
    for h in range(len(after.log_weight)):
        now, then = after.model_of[h], before.model_of[parents[h]]
        own, old = after.models[now[now >= 0]], before.models[then[then >= 0]]
        # Merging (consensus) inverts the precisions twice, which may change their last digit.
        assert torch.allclose(own.mean, old.mean, rtol=1e-6, atol=1e-7)
        assert torch.allclose(own.precision, old.precision, rtol=1e-5)
    if isinstance(earlier, Personal):
        assert torch.equal(later.personal, earlier.personal)


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_a_round_whose_answers_are_all_late_leaves_the_beliefs(name: str) -> None:
    with simulator() as engine:
        before = run(method_of(name), engine, 2)
    with simulator(participation=Participation(straggling=1.0)) as engine:
        start = method_of(name).init(engine.begin(0))  # a warm-up, too, must do without anybody
        assert start.hypotheses.models.is_finite()
        after, info, clients = one_round(method_of(name), engine, before)
        assert clients.work.late > 0
        assert clients.work.trainings == 0
    assert_beliefs_kept(before, after, info.parent)


@pytest.mark.parametrize("name", TRAINED)
def test_a_round_whose_answers_are_all_rejected_leaves_the_beliefs(name: str) -> None:
    with simulator(factory=linear) as engine:
        before = run(method_of(name), engine, 2)
    # Other labels than before, else a client whose examples are all explained has nothing to learn and answers well.
    overflowing = from_arrays([(x * 1e38, (y + 1) % 3) for x, y, *_ in client_data()])
    with simulator(overflowing, linear) as engine:
        after, info, clients = one_round(method_of(name), engine, before)
        assert clients.work.rejected == clients.work.trainings > 0
    assert_beliefs_kept(before, after, info.parent)
    assert after.hypotheses.log_weight.isfinite().all()


# --- an empty cluster -------------------------------------------------------------------------------------------------


def with_hypotheses(state: State, hypotheses: Hypotheses) -> State:
    return hypotheses if isinstance(state, Hypotheses) else replace(state, hypotheses=hypotheses)


@pytest.mark.parametrize("name", [n for n in TRAINED if n.startswith(("bcfl", "ifca")) and n != "bcfl-auto"])
def test_an_empty_cluster_keeps_its_belief(name: str) -> None:
    method = method_of(name, temperature="none")
    with simulator(factory=linear) as engine:
        before = run(method, engine, 2)
        state = before.hypotheses
        mean = state.models.mean.clone()
        hopeless = state.model_of[:, 1]
        mean[hopeless, : 4 * 3 + 3] = 1e3 * torch.randn(4 * 3 + 3)  # confident nonsense
        state = replace(state, models=Gaussian(mean, state.models.precision))
        played, info, _ = one_round(method, engine, with_hypotheses(before, state))
        after = played.hypotheses
    assert after.assignment[0].eq(0).all()
    own, old = after.models[int(after.model_of[0, 1])], state.models[int(state.model_of[info.parent[0], 1])]
    assert torch.equal(own.mean, old.mean)
    assert torch.allclose(own.precision, old.precision, rtol=1e-6)
    assert not torch.equal(after.models.mean[after.model_of[0, 0]], mean[state.model_of[info.parent[0], 0]])


# --- one method as a special case of another --------------------------------------------------------------------------


def final(name: str, equal: bool = False, **options: Any) -> Hypotheses:
    with simulator(tiny_federation(equal=equal)) as engine:
        return run(method_of(name, **options), engine, 3)


def test_wecfl_with_one_cluster_is_fedavg() -> None:
    assert torch.allclose(final("wecfl", num_clusters=1).models.mean, final("fedavg").models.mean, atol=1e-6)


@pytest.mark.parametrize("name", ["fesem", "ifca"])
def test_plain_means_with_one_cluster_are_fedavg_among_equal_clients(name: str) -> None:
    one, average = final(name, True, num_clusters=1), final("fedavg", True)
    assert torch.allclose(one.models.mean, average.models.mean, atol=1e-6)
    assert torch.equal(one.assignment, average.assignment)
    one, average = final(name, num_clusters=1), final("fedavg")
    assert not torch.allclose(one.models.mean, average.models.mean, atol=1e-4)


@pytest.mark.parametrize("num_clusters", [1, 2, 3])
@pytest.mark.parametrize("name", ["bcfl-mh-1", "bcfl-c-1"])
@pytest.mark.parametrize("suffix", ["", "-w"])
def test_one_hypothesis_is_greedy(name: str, suffix: str, num_clusters: int) -> None:
    for options in ({}, {"fusion": "exact", "forgetting": 0.3, "prior_precision": 0.5}, {"fusion": "product"}):
        assert_same(*(final(n + suffix, num_clusters=num_clusters, **options) for n in (name, "bcfl-g")))


def test_with_one_cluster_there_is_one_story() -> None:
    greedy = final("bcfl-g", num_clusters=1)
    for name in ("bcfl-c-2", "bcfl-mh-2"):
        assert_same(final(name, num_clusters=1, initial="same"), greedy)


def test_bcfl_without_curvature_of_the_prior_is_ifcas_association() -> None:
    """The first round decides by the same scores of the same models."""
    with simulator() as engine:
        first = [one_round(m, engine, m.init(engine.begin(0)))[0] for m in (method_of("ifca"), method_of("bcfl-g"))]
    assert torch.equal(first[0].assignment, first[1].assignment)


@pytest.mark.parametrize("name", [n for n in METHOD_NAMES if n.endswith("-w")])
def test_warm_up_changes_the_start_only(name: str) -> None:
    warm, cold = method_of(name), method_of(name.removesuffix("-w"))
    with simulator() as engine:
        start = warm.init(engine.begin(0))
        first, drawn = (state.hypotheses.models.mean for state in (start, cold.init(engine.begin(0))))
        assert not torch.equal(first, drawn[: len(first)])
        assert_same(advance(warm, engine, start, range(1, 4)), advance(cold, engine, start, range(1, 4)))


# --- the prior acts ---------------------------------------------------------------------------------------------------

STRENGTHS = [0.0, 0.1, 1.0, 10.0, 1e3, 1e6]


def drifts(distances: list[float]) -> None:
    assert all(stronger <= weaker * (1 + 1e-4) for weaker, stronger in pairwise(distances)), distances
    assert distances[2] < 0.95 * distances[0], distances  # it acts long before it is overwhelming
    assert distances[-1] < 1e-3 * distances[0], distances


@pytest.mark.parametrize("name", ["fesem", "wecfl"])
def test_the_proximal_term_holds_clients_at_their_centre(name: str) -> None:
    distances = []
    for strength in STRENGTHS:
        method = method_of(name, proximal=strength, num_clusters=1)
        with simulator(factory=linear) as engine:
            before = method.init(engine.begin(0))
            after, *_ = one_round(method, engine, before)
            distances.append(float((after.models.mean - before.models.mean)[:, :15].norm()))
    drifts(distances)


def test_the_proximal_term_holds_fedamp_at_the_mixture() -> None:
    with simulator(factory=linear) as engine:
        before = run(method_of("fedamp", proximal=0.0), engine, 3)
        mixture = (method_of("fedamp").attention_weights(before.models.mean[:, :15]).float() @ before.models.mean)[
            :, :15
        ]
        distances = []
        for strength in STRENGTHS:
            after, *_ = one_round(method_of("fedamp", proximal=strength), engine, before)
            distances.append(float((after.models.mean[:, :15] - mixture).norm()))
    drifts(distances)


def test_the_proximal_term_holds_fedsoft_at_its_centres() -> None:
    with simulator(factory=linear) as engine:
        before = run(method_of("fedsoft", proximal=0.0, selection=6), engine, 2)
        clients, centres = engine.begin(1), before.hypotheses.models.mean
        share = clients.share_explained(centres, 16).clamp(min=1e-4)
        target = ((share / share.sum(1, keepdim=True)).float() @ centres)[:, :15]
        distances = []
        for strength in STRENGTHS:
            after, *_ = one_round(method_of("fedsoft", proximal=strength, selection=6), engine, before)
            distances.append(float((after.personal[:, :15] - target).norm()))
    drifts(distances)


@pytest.mark.parametrize("name", ["bp-fedavg", *(n for n in TRAINED if n.startswith("bcfl") and "w" not in n)])
def test_the_prior_holds_the_posterior_at_its_mean(name: str) -> None:
    method = method_of(name, forgetting=0.0, initial="same")
    distances = []
    with simulator(factory=linear) as engine:
        state = method.init(engine.begin(0))
        start = state.hypotheses
        for strength in STRENGTHS:
            precision = start.models.precision.clone()
            precision[:, :15] = 30 * strength  # in units of a client's examples
            before = replace(start, models=Gaussian(start.models.mean, precision))
            played, *_ = one_round(method, engine, with_hypotheses(state, before))
            after = played.hypotheses
            own = after.models.mean[after.model_of[0], :15]
            distances.append(float((own - start.models.mean[start.model_of[0], :15]).norm()))
    drifts(distances)


# --- the registry -----------------------------------------------------------------------------------------------------


def test_all_methods_are_there() -> None:
    names = "bcfl-g bcfl-c-M bcfl-mh-M bcfl-soft bcfl bcfl-auto local fedavg bp-fedavg fedamp fesem wecfl fedsoft"
    names += " fedprox ditto fedrep ifca"
    assert list(METHODS) == names.split()


def test_names_set_the_options() -> None:
    method = make_method("bcfl-mh-6-w", {"num_clusters": 5})
    assert (method.strategy, method.max_hypotheses, method.warm_up_rounds, method.num_clusters) == ("multi", 6, 2, 5)
    assert make_method("bcfl-c-3", {}).strategy == "consensus"
    assert make_method("wecfl", {}).weighted
    assert not make_method("fesem", {}).weighted


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fedavgg", "unknown method 'fedavgg'; did you mean 'fedavg'"),
        ("bcfl-mh-M", "unknown method 'bcfl-mh-M'"),
        ("bcfl-mh-0", "at least 1 hypothesis"),
        ("fedavg-w", "unknown method"),
        ("bcfl-g-2", "unknown method"),
    ],
)
def test_unknown_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_method(name, {})


def test_options_of_other_methods_are_left_aside_and_unknown_ones_refused() -> None:
    assert make_method("fedavg", {"proximal": 3.0, "num_clusters": 2}) == make_method("fedavg", {})
    with pytest.raises(ValueError, match=r"unknown method option 'proximall', allowed: .*proximal"):
        make_method("fedavg", {"proximall": 3.0})
    assert {"num_clusters", "fusion", "temperature", "initial", "proximal", "selection"} <= set(all_options())
    assert "strategy" not in all_options()  # the name says it


def test_the_network_of_these_tests_has_every_part() -> None:
    with simulator(factory=network) as engine:
        clients = engine.begin(0)
        assert clients.num_evaluated == clients.num_parameters + 16  # BatchNorm's statistics
        assert len(clients.draw_model(0, 0)) == clients.num_evaluated + clients.num_parameters  # the momentum


@pytest.mark.parametrize("name", ["fedavg", "bp-fedavg", "ifca", "fesem", "wecfl", "fedsoft", "bcfl-g"])
def test_batch_statistics_of_several_clients_are_averaged_by_examples(name: str) -> None:
    """Also where every client's weights count the same, or by likelihood (SPEC 5.7)."""
    with simulator() as engine:
        method = method_of(name, num_clusters=1, selection=6)
        before = method.init(engine.begin(0))
        clients = engine.begin(1)
        trained: dict[int, Tensor] = {}
        fit, fit_best = clients.fit, clients.fit_best

        def watched_fit(models: Gaussian, jobs: Jobs) -> Iterator[Gaussian | None]:
            for client, posterior in zip(jobs.client.tolist(), fit(models, jobs), strict=True):
                trained[client] = posterior.mean.clone()
                yield posterior

        def watched_fit_best(*how: Any) -> Iterator[Choice]:
            for choice in fit_best(*how):
                trained[choice.client] = choice.posterior.mean.clone()
                yield choice

        clients.fit, clients.fit_best = watched_fit, watched_fit_best
        after, _ = method.round(before, clients)
    statistics = slice(clients.num_parameters, clients.num_evaluated)
    own = torch.stack([trained[client] for client in range(6)])[:, statistics]
    weight = clients.num_examples.float()
    expected = weight @ own / weight.sum()
    assert not torch.allclose(expected, own.mean(0), atol=1e-4)
    assert torch.allclose(after.hypotheses.models.mean[0, statistics], expected, atol=1e-5)
