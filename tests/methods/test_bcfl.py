"""BCFL against its oracle on conjugate clients, and its rules by hand."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_fixtures import ConjugateClients, linear, one_round, pulled_clients, run, simulator
from torch import Tensor

from bcfl.association.conceptual import (
    ConjugateClient,
    Story,
    conceptual_bcfl,
    joint_log_evidence,
    log_likelihood_at_mean,
)
from bcfl.association.hypotheses import Branches, Families, branch
from bcfl.belief.gaussian import FUSION_RULES, Gaussian, fuse, merge
from bcfl.extensions.staying import Remembering
from bcfl.federation import Hypotheses, Jobs
from bcfl.methods.bcfl import BCFL
from bcfl.randomness import generator
from bcfl.runs.loop import start
from bcfl.runs.settings import load_config

LEAST_PRECISION = 1000.0  # what was added to every precision before its evidence was taken at several points


def published(*args: Any, **options: Any) -> BCFL:
    """The method as published runs had it; what has become of its hypotheses since is in test_stories.py."""
    return BCFL(*args, **{"hypotheses": "all", "evidence_precision": LEAST_PRECISION, **options})


# --- the oracle -------------------------------------------------------------------------------------------------------

PRECISION = 0.7
EXACT = {
    "strategy": "multi", "fusion": "exact", "forgetting": 0.0, "temperature": "none", "initial": "same",
    "scoring_examples": None, "prior_precision": PRECISION,
}  # fmt: skip


def world(
    seed: int, num_rounds: int, num_clients: int, num_clusters: int
) -> tuple[Tensor, list[list[ConjugateClient]]]:
    """Starting means and new data in every round, spread so that many stories have weight."""
    draws = generator(seed, "conjugate world")

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draws, dtype=torch.float64)

    truth = normal(num_clusters, 2)
    rounds = [
        [
            ConjugateClient(truth[j % num_clusters] + normal(2), 0.3 + normal(2).square(), float(normal()))
            for j in range(num_clients)
        ]
        for _ in range(num_rounds)
    ]
    return truth + normal(num_clusters, 2), rounds


def stories_of(method: BCFL, starts: Tensor, rounds: list[list[ConjugateClient]]) -> dict[Any, tuple[float, Any]]:
    """The method's final mixture: each kept story by its assignments, with its log-weight and beliefs."""

    def federation(index: int) -> ConjugateClients:
        own = rounds[max(index - 1, 0)]
        return ConjugateClients(own, starts[None], torch.ones(len(own), dtype=torch.float64), round=index)

    state = method.init(federation(0))
    told: list[tuple[tuple[int, ...], ...]] = [()]
    for index in range(1, len(rounds) + 1):
        state, info = method.round(state, federation(index))
        told = [(*told[p], tuple(row)) for p, row in zip(info.parent.tolist(), info.assignment.tolist(), strict=True)]
    beliefs = [[state.models[int(b)] for b in row] for row in state.model_of]
    return {story: (w, own) for story, w, own in zip(told, state.log_weight.tolist(), beliefs, strict=True)}


def oracle(starts: Tensor, rounds: list[list[ConjugateClient]], **options: Any) -> list[Story]:
    return conceptual_bcfl([Gaussian(row, torch.full_like(row, PRECISION)) for row in starts], rounds, **options)


@pytest.mark.parametrize(("num_clients", "num_clusters", "num_rounds"), [(2, 2, 3), (3, 2, 3), (2, 3, 2)])
def test_with_all_hypotheses_bcfl_is_the_conceptual_solution(
    num_clients: int, num_clusters: int, num_rounds: int
) -> None:
    starts, rounds = world(0, num_rounds, num_clients, num_clusters)
    num_stories = num_clusters ** (num_clients * num_rounds)
    method = published(num_clusters=num_clusters, max_hypotheses=num_stories, **EXACT)
    found = stories_of(method, starts, rounds)
    expected = oracle(starts, rounds, evidence=log_likelihood_at_mean)
    assert len(found) == len(expected) == num_stories
    for story in expected:
        log_weight, beliefs = found[story.assignments]
        assert log_weight == pytest.approx(story.log_weight, abs=1e-9)
        for own, belief in zip(beliefs, story.beliefs, strict=True):
            # No two stories write into one belief, or this fails in most of them (SPEC 5.2).
            assert torch.allclose(own.mean, belief.mean, rtol=0, atol=1e-9)
            assert torch.allclose(own.precision, belief.precision, rtol=0, atol=1e-9)


def distance(found: dict[Any, tuple[float, Any]], expected: list[Story]) -> float:
    """Total variation between two mixtures of stories."""
    gaps = (math.exp(s.log_weight) - math.exp(found.get(s.assignments, (-math.inf,))[0]) for s in expected)
    return 0.5 * sum(abs(gap) for gap in gaps)


def test_the_distance_to_the_oracle_falls_with_the_number_of_hypotheses() -> None:
    counts = [1, 2, 4, 8, 16, 32, 64]
    total = dict.fromkeys(counts, 0.0)
    for seed in range(6):
        starts, rounds = world(seed, 3, 2, 2)
        expected = oracle(starts, rounds, evidence=log_likelihood_at_mean)
        for count in counts:
            total[count] += distance(
                stories_of(published(num_clusters=2, max_hypotheses=count, **EXACT), starts, rounds), expected
            )
    distances = list(total.values())
    assert distances == sorted(distances, reverse=True)
    assert distances[0] > 0.2 * 6
    assert distances[-1] < 1e-9


@pytest.mark.parametrize("known", [0.0, 0.5, 0.999])
def test_evidence_by_many_points_comes_near_the_exact_evidence(known: float) -> None:
    """One round, all associations: weights by random points of the beliefs against the integral (eq. fed_weight).

    The integral is over a belief of which LEAST_PRECISION is a part, all of it where nothing is `known`: the same world
    in another unit of length.
    """
    starts, rounds = world(3, 1, 2, 2)
    unit = math.sqrt(PRECISION * (1 - known) / LEAST_PRECISION)
    clients = [replace(c, estimate=c.estimate * unit, information=c.information / unit**2) for c in rounds[0]]
    expected = oracle(starts, rounds, evidence=joint_log_evidence)
    options = {**EXACT, "prior_precision": LEAST_PRECISION * known / (1 - known), "num_clusters": 2}
    at_mean, by_points = (
        distance(stories_of(published(max_hypotheses=4, **points, **options), starts * unit, [clients]), expected)
        for points in ({}, {"evidence_points": 20_000, "evidence_kind": "random"})
    )
    assert by_points < 0.02 < at_mean


@pytest.mark.parametrize("kind", ["sigma", "random"])
def test_more_points_find_the_groups_of_real_networks(kind: str, tmp_path: Path) -> None:
    """Most weights of a network see little of the data: points that vary them freely would be noise."""
    settings = ["method.name=bcfl-mh-3-w", "method.evidence_points=4", f"method.evidence_kind={kind}"]
    settings += ["method.hypotheses=all", f"method.evidence_precision={LEAST_PRECISION}"]
    result = start(load_config(None, [*settings, "experiment.rounds=3"]), tmp_path / "run", num_workers=1)
    assert torch.bincount(result.assignment).tolist() == [5, 5, 5, 5]


def test_points_vary_untrained_weights_and_no_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[Tensor] = []
    with simulator() as engine:
        clients, method = engine.begin(1), published(2, evidence_points=4)
        state, score = method.init(engine.begin(0)), clients.score
        monkeypatch.setattr(clients, "score", lambda models, *rest: (scored.append(models), score(models, *rest))[1])
        method.round(state, clients)
        weights, statistics = (scored[0].view(4, *state.models.mean.shape) - state.models.mean).tensor_split(
            [clients.num_parameters], -1
        )
    assert torch.allclose(weights.abs(), torch.tensor(LEAST_PRECISION**-0.5), rtol=1e-3)
    assert not statistics.any()


def test_more_stories_are_ranked_than_kept_where_evidence_is_refined() -> None:
    """Either client alone is explained best by the first cluster, but by points of it that contradict each other."""
    spread = LEAST_PRECISION**-0.5  # of an untrained belief: its two points lie that far from its mean
    starts = torch.tensor([[[0.0], [-2.1 * spread]]], dtype=torch.float64)
    clients = [
        ConjugateClient(torch.tensor([seen], dtype=torch.float64), torch.tensor([1e5], dtype=torch.float64), 0.0)
        for seen in (spread, -spread)
    ]
    method = published(2, "multi", 1, evidence_points=2, temperature="none")
    federation = ConjugateClients(clients, starts, torch.ones(2, dtype=torch.float64))
    _, info = method.round(method.init(federation), federation)
    assert info.assignment.tolist() == [[0, 1]]


# --- one round by hand ------------------------------------------------------------------------------------------------

TARGETS = torch.tensor([[0.0, 1.0], [0.0, 2.0], [9.0, 0.0]], dtype=torch.float64)
SIZES = [10.0, 30.0, 20.0]
STARTS = torch.tensor([[[0.0, 0.0], [10.0, 0.0]], [[-5.0, 0.0], [5.0, 0.0]]], dtype=torch.float64)


def tiny(**options: Any) -> ConjugateClients:
    return pulled_clients(TARGETS, SIZES, STARTS, **options)


@pytest.mark.parametrize("fusion", ["product", "exact", "geometric"])
@pytest.mark.parametrize("forgetting", [0.0, 0.4])
def test_a_greedy_round_fuses_local_posteriors_by_the_rule(fusion: Any, forgetting: float) -> None:
    method = published(2, "greedy", 1, fusion=fusion, forgetting=forgetting, prior_precision=2.0)
    clients = tiny()
    state, _ = method.round(method.init(clients), clients)
    assert state.assignment.tolist() == [[0, 0, 1]]
    for cluster, members in enumerate([[0, 1], [2]]):
        prior = Gaussian(STARTS[0, cluster], torch.full((2,), 2.0 * (1 - forgetting), dtype=torch.float64))
        expected = fuse([clients.clients[j].posterior(prior) for j in members], prior, fusion)
        assert torch.allclose(state.models.mean[cluster], expected.mean)
        assert torch.allclose(state.models.precision[cluster], expected.precision)


@pytest.mark.parametrize("strategy", ["greedy", "consensus", "multi"])
def test_pooled_fusion_weighs_clients_by_their_examples(strategy: Any) -> None:
    method = published(2, strategy, 1, fusion="pooled", forgetting=0.0, prior_precision=2.0)
    clients = tiny()
    state, _ = method.round(method.init(clients), clients)
    prior = Gaussian(STARTS[0, 0], torch.full((2,), 2.0, dtype=torch.float64))
    few, many = (clients.clients[j].posterior(prior) for j in (0, 1))
    own = state.models[int(state.model_of[0, 0])]
    assert torch.allclose(own.mean, (10 * few.mean + 30 * many.mean) / 40)
    assert torch.allclose(own.precision, (10 * few.precision + 30 * many.precision) / 40)


@pytest.mark.parametrize("fusion", FUSION_RULES)
def test_statistics_are_averaged_by_examples_in_every_round(fusion: Any) -> None:
    """BatchNorm's statistics and the momentum are no evidence: however sure a belief is, they count examples afresh."""
    method = published(1, "greedy", 1, fusion=fusion)
    with simulator() as engine:
        before = run(method, engine, 1)
        clients = engine.begin(2)
        jobs = Jobs(
            torch.zeros(6).long(),
            torch.arange(6),
            torch.full((6,), 0.5),
            curvature=True,
            parent_of=torch.zeros(1).long(),
        )
        tails = torch.stack([answer.mean[clients.num_parameters :] for answer in clients.fit(before.models, jobs)])
        after, _ = method.round(before, engine.begin(2))
    expected = (clients.num_examples.float() @ tails) / clients.num_examples.sum()
    assert torch.allclose(after.models.mean[0, clients.num_parameters :], expected, atol=1e-5)


def test_forgetting_lets_the_precision_settle() -> None:
    """The same data again and again: with half forgotten the precision tends to twice one round's evidence."""
    clients, method = tiny(), published(2, "greedy", 1, fusion="exact", forgetting=0.5)
    state = method.init(clients)
    for _ in range(40):
        state, _ = method.round(state, clients)
    assert state.models.precision[0].tolist() == pytest.approx([2 * 40, 2 * 40])
    assert state.models.precision[1].tolist() == pytest.approx([2 * 20, 2 * 20])
    keeping = published(2, "greedy", 1, fusion="exact", forgetting=0.0)
    for _ in range(10):
        state, _ = keeping.round(state, clients)
    assert state.models.precision[0, 0] == pytest.approx(80 + 10 * 40)


def test_weights_are_tempered_by_the_number_of_examples() -> None:
    clients = tiny()
    method = published(2, "multi", 8, initial="same", temperature="per_example")
    state, info = method.round(method.init(clients), clients)
    loss = 0.5 * (TARGETS[:, None] - STARTS[0]).square().sum(2)  # (client, cluster): −mean log-likelihood
    for row, log_weight in zip(info.assignment, info.log_weight, strict=True):
        expected = -sum(loss[j, row[j]] for j in range(3)) - torch.logsumexp(-loss, 1).sum()
        assert float(log_weight) == pytest.approx(float(expected), abs=1e-9)
    assert torch.equal(state.log_weight, info.log_weight)


def test_consensus_merges_the_best_associations() -> None:
    clients = tiny()
    many = published(2, "multi", 3, initial="same", prior_precision=1.0)
    one = published(2, "consensus", 3, prior_precision=1.0)
    apart, _ = many.round(many.init(clients), clients)
    merged, info = one.round(one.init(clients), clients)
    assert len(merged.log_weight) == 1
    assert torch.equal(info.log_weight, apart.log_weight)
    for cluster in range(2):
        expected = merge(apart.models[apart.model_of[:, cluster]], apart.log_weight)
        assert torch.allclose(merged.models.mean[cluster], expected.mean)
        assert torch.allclose(merged.models.precision[cluster], expected.precision)
    assert torch.equal(merged.assignment[0], apart.assignment[0])


def test_different_starts_are_drawn_for_every_hypothesis() -> None:
    state = published(2, "multi", 2).init(tiny())
    assert torch.equal(state.models.mean, STARTS.flatten(0, 1))
    assert state.model_of.tolist() == [[0, 1], [2, 3]]
    assert state.log_weight.exp().tolist() == pytest.approx([0.5, 0.5])
    assert state.family.tolist() == [0, 1]
    same = published(2, "multi", 2, initial="same").init(tiny())
    assert torch.equal(same.models.mean, STARTS[0])
    assert published(2, "consensus", 2).init(tiny()).model_of.tolist() == [[0, 1]]


def test_min_weight_and_max_hypotheses_prune() -> None:
    clients = tiny()
    for options, count in (({}, 8), ({"min_weight": 0.2}, 1), ({"max_hypotheses": 3}, 3)):
        method = published(**{"num_clusters": 2, "max_hypotheses": 8, "initial": "same", **options})
        state, _ = method.round(method.init(clients), clients)
        assert len(state.log_weight) == count


def test_the_papers_heuristic_changes_one_client_of_the_best_story() -> None:
    for search, furthest in (("exact", [0, 1, 1, 1, 2, 2, 2, 3]), ("one_change", [0, 1, 1, 1])):
        method = published(2, "multi", 8, initial="same", search=search)
        _, info = method.round(method.init(tiny()), tiny())
        assert sorted((info.assignment != info.assignment[0]).sum(1).tolist()) == furthest


def test_a_start_that_is_too_light_leaves_its_place_to_a_heavier_story(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one start both stories are likely; the other has a place by precedence, and not the weight to keep it."""
    clients = pulled_clients(TARGETS[:1], SIZES[:1], STARTS)
    scores = torch.tensor([[0.0, -0.4, -3.5, -9.0]], dtype=torch.float64)
    monkeypatch.setattr(clients, "score", lambda models, *rest: scores)
    for min_weight, families in ((0.0, [0, 1]), (0.05, [0, 0])):
        method = published(2, "multi", 2, temperature="none", min_weight=min_weight)
        state, _ = method.round(method.init(clients), clients)
        assert state.family.tolist() == families


@pytest.mark.parametrize(("strategy", "count"), [("greedy", 1), ("multi", 3), ("consensus", 2)])
def test_cluster_size_limits_hold_for_every_strategy(strategy: Any, count: int) -> None:
    alike = pulled_clients(TARGETS[[0, 0, 0]], SIZES, STARTS)  # all would be in the first cluster
    for limits, sizes in ((None, {3}), ((1, 2), {1, 2})):
        method = published(2, strategy, count, cluster_size=limits, initial="same")
        _, info = method.round(method.init(alike), alike)
        best = info.assignment[:1] if limits is None else info.assignment
        assert {row.tolist().count(0) for row in best} <= sizes


def test_the_greedy_strategy_scores_at_several_points_where_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    clients, counts = tiny(), []
    score = clients.score
    monkeypatch.setattr(clients, "score", lambda models, *rest: (counts.append(len(models)), score(models, *rest))[1])
    several = {"evidence_points": 4, "initial": "same", "prior_precision": 1.0}
    greedy, multi = published(2, "greedy", 1, **several), published(2, "multi", 1, **several)
    state, info = greedy.round(greedy.init(clients), clients)
    expected, told = multi.round(multi.init(clients), clients)
    assert torch.equal(state.models.mean, expected.models.mean)
    assert torch.equal(info.assignment, told.assignment)
    assert counts == [8, 8]  # two beliefs at four points


@pytest.mark.parametrize("stay", [None, 0.8])
def test_stories_that_differ_in_a_training_that_never_came_are_one_from_then_on(stay: float | None) -> None:
    method = published(2, "multi", 8, initial="same", stay=stay)
    late = tiny(silent=frozenset({1}))
    before, _ = method.round(method.init(late), late)
    state = before.hypotheses
    assert len(state.model_of) == 8  # all of them
    learned = [tuple(row) for row in state.model_of.tolist()]
    assert len(set(learned)) == 4  # where the late client is makes no difference to that
    assert len(state.models) == 8  # each of two, trained by each part of the other two clients
    for row, own in zip(state.model_of.tolist(), state.assignment.tolist(), strict=True):
        for cluster, belief in enumerate(row):
            assert state.parent_of[belief] == cluster
            untrained = torch.equal(state.models.mean[belief], STARTS[0, cluster])
            assert untrained == (cluster not in (own[0], own[2]))
    continued, info = method.round(before, tiny(round=2))
    after = continued.hypotheses
    stories = {
        (learned[parent], *own) for parent, own in zip(info.parent.tolist(), info.assignment.tolist(), strict=True)
    }
    assert len(stories) == len(info.log_weight) == 8
    # As if the weight of both had been at the first before.
    first = [learned.index(one) for one in dict.fromkeys(learned)]
    both = [[h for h, one in enumerate(learned) if one == learned[f]] for f in first]
    weight = torch.stack([state.log_weight[copies].logsumexp(0) for copies in both])
    rows = {name: getattr(state, name)[first] for name in ("model_of", "assignment", "family")}
    single: Any = replace(state, log_weight=weight, **rows)
    if isinstance(before, Remembering):
        single = replace(before, hypotheses=single, membership=before.membership[first])
    again, _ = method.round(single, tiny(round=2))
    expected = again.hypotheses
    assert torch.allclose(after.log_weight, expected.log_weight)
    assert torch.equal(after.assignment, expected.assignment)
    # While the late client is away, where it was is a part of its story.
    _, apart = method.round(before, tiny(round=2, absent=frozenset({1})))
    assert apart.assignment[:, 1].unique().tolist() == [0, 1]


def test_absent_clients_stay_where_their_story_had_them() -> None:
    method = published(2, "multi", 4, initial="same")
    state, _ = method.round(method.init(tiny()), tiny())
    assignment = state.assignment.clone()
    assignment[:, 1] = torch.tensor([0, 1, 0, 1])  # the stories disagree about the client that will be absent
    before = replace(state, assignment=assignment, log_weight=torch.full((4,), 0.25, dtype=torch.float64).log())
    clients = tiny(absent=frozenset({1}), round=2)
    after, info = method.round(before, clients)
    assert len(info.parent.unique()) > 1
    assert torch.equal(after.assignment[:, 1], assignment[info.parent, 1])
    assert torch.equal(after.assignment, info.assignment)
    assert all(client != 1 for _, client in clients.fitted)


def test_hypotheses_never_write_into_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kept story, replayed alone with its assignments forced, ends in the same beliefs (SPEC 5.2)."""
    method = published(num_clusters=2, max_hypotheses=4, initial="same")
    with simulator(factory=linear) as engine:
        state: Hypotheses = method.init(engine.begin(0))
        start, told = state, [[]]
        for index in (1, 2, 3):
            state, info = method.round(state, engine.begin(index))
            told = [[*told[p], row] for p, row in zip(info.parent.tolist(), info.assignment, strict=True)]
        assert len({tuple(map(tuple, (row.tolist() for row in story))) for story in told}) == len(told) == 4
        for h, story in enumerate(told):
            alone = start
            for index, row in enumerate(story, 1):
                monkeypatch.setattr(
                    "bcfl.methods.bcfl.branch",
                    lambda *_, row=row, **__: Branches(
                        torch.zeros(1, dtype=torch.int64), row[None], torch.zeros(1, dtype=torch.float64)
                    ),
                )
                alone, _ = published(num_clusters=2, max_hypotheses=1, initial="same").round(alone, engine.begin(index))
            for cluster in range(2):
                own, expected = (
                    state.models[int(state.model_of[h, cluster])],
                    alone.models[int(alone.model_of[0, cluster])],
                )
                assert torch.equal(own.mean, expected.mean)
                assert torch.equal(own.precision, expected.precision)


def test_work_is_shared_exactly() -> None:
    """From one start, M stories differ by single clients: far fewer trainings than M·C, and none done twice."""
    clients = tiny()
    method = published(2, "multi", 3, initial="same")
    _, info = method.round(method.init(clients), clients)
    assert len(clients.fitted) == len(set(clients.fitted))
    needed = {(c, j) for row in info.assignment.tolist() for j, c in enumerate(row)}
    assert set(clients.fitted) == needed


def test_warm_up_starts_from_the_groups() -> None:
    clients = tiny()
    state = published(2, "multi", 3, warm_up_rounds=2, prior_precision=0.5).init(clients)
    found = state.models.mean[state.models.mean[:, 0].argsort()]
    assert torch.allclose(found, torch.tensor([[0, 70 / 40], [9, 0]], dtype=torch.float64))
    assert state.models.precision.eq(0.5).all()
    assert len(state.log_weight) == 1


@pytest.mark.slow
def test_different_starts_and_warm_up_find_the_groups() -> None:
    with simulator(factory=linear) as engine:
        for method in (published(2, "multi", 4), published(2, "greedy", 1, warm_up_rounds=2)):
            state = run(method, engine, 12)
            row = state.assignment[0]
            assert torch.equal(row == row[0], torch.tensor([True, False] * 3))


def test_bcfl_g_needs_one_exchange_and_sends_no_scores() -> None:
    method = published(2, "greedy", 1)
    with simulator(factory=linear) as engine:
        *_, clients = one_round(method, engine, method.init(engine.begin(0)))
    assert clients.work.exchanges == 1
    assert clients.work.scalars_up == 6  # each client's choice


# --- families ---------------------------------------------------------------------------------------------------------


def family_branch(k: int, family: list[int] | None, margin: float) -> tuple[list[int], list[float]]:
    """Two clients, two clusters, three past hypotheses of equal weight whose best costs are 0, 1 and 4."""
    cost = torch.tensor([[[0.0, 0.5], [0.0, 0.6]], [[0.5, 9.0], [0.5, 9.0]], [[2.0, 9.0], [2.0, 9.0]]])
    log_weight = torch.full((3,), 1 / 3, dtype=torch.float64).log()
    families = None if family is None else Families(torch.tensor(family), margin)
    kept = branch(log_weight, cost, k, families=families)
    return kept.parent.tolist(), kept.log_weight.tolist()


def test_without_families_near_copies_crowd_out_the_others() -> None:
    assert family_branch(3, None, 0.0)[0] == [0, 0, 0]  # totals 0, 0.5, 0.6


@pytest.mark.parametrize(
    ("k", "family", "margin", "parents"),
    [
        (3, [0, 1, 2], 0.99, [0, 0, 0]),  # both others are too far behind
        (3, [0, 1, 2], 1.01, [0, 0, 1]),  # the second is just within the margin
        (3, [0, 1, 2], 5.0, [0, 1, 2]),  # all have their place
        (2, [0, 1, 2], 5.0, [0, 1]),  # more families than places: the best of them
        (1, [0, 1, 2], 5.0, [0]),
        (3, [0, 1, 1], 5.0, [0, 0, 1]),  # a family has one place, for its best member
        (3, [0, 0, 0], 5.0, [0, 0, 0]),  # one family: the plain ranking
        (4, [0, 1, 2], 5.0, [0, 0, 1, 2]),  # what is left goes to the best of all
    ],
)
def test_families_within_the_margin_keep_a_place(k: int, family: list[int], margin: float, parents: list[int]) -> None:
    assert family_branch(k, family, margin)[0] == parents


def test_a_place_does_not_change_the_weights() -> None:
    parents, log_weight = family_branch(3, [0, 1, 2], 5.0)
    expected = torch.tensor([0.0, -1.0, -4.0]).log_softmax(0)
    assert parents == [0, 1, 2]
    assert log_weight == pytest.approx(expected.tolist(), abs=1e-6)


def test_a_start_is_given_up_once_the_evidence_has_spoken() -> None:
    far_off = torch.stack([STARTS[0], 100 * STARTS[1]])
    clients = pulled_clients(TARGETS, SIZES, far_off)
    patient, hasty = (
        published(2, "multi", 2, give_up_weight=1e-300, temperature=1e5),
        published(2, "multi", 2, give_up_weight=0.5, temperature=1e5),
    )
    families = [m.round(m.init(clients), clients)[0].family.tolist() for m in (patient, hasty)]
    assert sorted(families[0]) == [0, 1]
    assert len(set(families[1])) == 1


# --- memory -----------------------------------------------------------------------------------------------------------


def remembering(rounds: list[list[ConjugateClient]], starts: Tensor, method: BCFL) -> list[Hypotheses]:
    """The states of every round, of clients that only score: the models stay as they are."""
    sizes, states = torch.ones(len(rounds[0]), dtype=torch.float64), []
    everybody = frozenset(range(len(sizes)))
    state = method.init(ConjugateClients(rounds[0], starts[None], sizes))
    for index, own in enumerate(rounds, 1):
        state, _ = method.round(state, ConjugateClients(own, starts[None], sizes, round=index, silent=everybody))
        states.append(state)
    return states


def forward(rounds: list[list[ConjugateClient]], starts: Tensor, stay: float) -> list[Tensor]:
    """The textbook's forward algorithm, client by client."""
    num_clusters = len(starts)
    transition = torch.full((num_clusters, num_clusters), (1 - stay) / (num_clusters - 1), dtype=torch.float64)
    transition.fill_diagonal_(stay)
    alpha, found = torch.full((len(rounds[0]), num_clusters), 1 / num_clusters, dtype=torch.float64), []
    for own in rounds:
        likelihood = torch.stack([client.log_likelihood(starts) for client in own])
        alpha = (alpha @ transition) * (likelihood - likelihood.amax(1, keepdim=True)).exp()
        alpha = alpha / alpha.sum(1, keepdim=True)
        found.append(alpha)
    return found


@pytest.mark.parametrize("temperature", ["none", "per_example", 3.0])
@pytest.mark.parametrize(("strategy", "count"), [("greedy", 1), ("consensus", 3), ("multi", 3)])
def test_the_memory_is_the_forward_filter_of_every_client(strategy: Any, count: int, temperature: Any) -> None:
    starts, rounds = world(2, 5, 4, 3)
    method = published(3, strategy, count, temperature=temperature, stay=0.8, initial="same")
    states = remembering(rounds, starts, method)
    for state, expected in zip(states, forward(rounds, starts, 0.8), strict=True):
        assert torch.allclose(state.membership, expected.expand_as(state.membership))
        assert torch.equal(state.hypotheses.assignment[0], expected.argmax(1))  # whatever the temperature


def test_the_memory_calms_noise_and_follows_a_change() -> None:
    """A client whose evidence wavers around its cluster, then speaks clearly for another."""
    starts = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    wavering = [0.1, 0.6, 0.3, 0.55, 0.4, 0.65, 0.2, 2.5, 2.5]
    rounds = [[ConjugateClient(torch.tensor([seen]), torch.tensor([4.0]), 0.0)] for seen in wavering]

    def path(stay: Any) -> list[int]:
        return [
            int(state.hypotheses.assignment[0, 0])
            for state in remembering(rounds, starts, published(2, "greedy", 1, stay=stay))
        ]

    assert path(None) == [0, 1, 0, 1, 0, 1, 0, 1, 1]
    assert path(0.95) == [0, 0, 0, 0, 0, 0, 0, 1, 1]


def test_a_stay_as_likely_as_any_move_is_no_memory() -> None:
    for strategy, count in (("greedy", 1), ("multi", 2)):
        with simulator(factory=linear) as engine:
            with_memory, without = (run(published(2, strategy, count, stay=stay), engine, 3) for stay in (0.5, None))
        assert torch.equal(with_memory.hypotheses.assignment, without.assignment)
        assert torch.equal(with_memory.hypotheses.models.mean, without.models.mean)


def test_an_absent_client_becomes_less_sure() -> None:
    method = published(2, "greedy", 1, stay=0.9)
    state, _ = method.round(method.init(tiny()), tiny())
    after, _ = method.round(state, tiny(absent=frozenset({1}), round=2))
    expected = 0.9 * state.membership[0, 1] + 0.1 * (1 - state.membership[0, 1])
    assert torch.allclose(after.membership[0, 1], expected)


def test_more_points_keep_the_memory() -> None:
    """Points of a belief that is sure of itself are its mean: the stories, weighed again, weigh the same."""
    starts, rounds = world(4, 3, 3, 2)
    sure = {**EXACT, "prior_precision": 1e14, "num_clusters": 2, "max_hypotheses": 8, "stay": 0.9}
    one, refined = (
        remembering(rounds, starts, published(evidence_points=count, **sure))[-1].hypotheses for count in (1, 4)
    )
    assert torch.equal(refined.assignment, one.assignment)
    assert torch.allclose(refined.log_weight, one.log_weight, atol=1e-4)
    forgetful = remembering(rounds, starts, published(evidence_points=4, **{**sure, "stay": None}))[-1]
    assert not torch.allclose(forgetful.log_weight, one.log_weight, atol=1e-1)


def test_the_memory_of_several_points_hangs_on_no_temperature() -> None:
    starts, rounds = world(3, 1, 4, 2)
    several = {"evidence_points": 4, "prior_precision": 1.0, "stay": 0.8}
    pure, tempered = (
        remembering(rounds, starts, published(2, "greedy", 1, temperature=temperature, **several))[-1].membership
        for temperature in ("none", 5.0)
    )
    assert torch.allclose(tempered, pure)
    assert not torch.allclose(pure, torch.full_like(pure, 0.5), atol=0.1)


def test_learned_stays_and_moves_are_counted_and_fade() -> None:
    starts, rounds = world(2, 4, 4, 2)
    states = remembering(rounds, starts, published(2, "greedy", 1, stay="learn", temperature="none"))
    assert states[0].stays.tolist() == [0, 0]  # nobody has a past yet
    assert [float(state.stays.sum()) for state in states[1:]] == pytest.approx([4, 4 + 3.6, 4 + 3.6 + 3.24])


def test_greedy_with_a_memory_needs_a_second_exchange() -> None:
    with simulator(factory=linear) as engine:
        for stay, exchanges in ((None, 1), (0.9, 2)):
            method = published(2, "greedy", 1, stay=stay)
            _, _, clients = one_round(method, engine, method.init(engine.begin(0)))
            assert clients.work.exchanges == exchanges
