"""bcfl-auto: against the exact posterior over groupings, and piece by piece; what it finds on real digits is slow."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_fixtures import ConjugateClients, client_data, linear, network, predictors, simulator
from torch import Tensor

from bcfl.association.conceptual import ConjugateClient, log_likelihood_at_mean, partition_posterior
from bcfl.association.hypotheses import Branches
from bcfl.association.seating import canonical
from bcfl.belief.gaussian import Gaussian, flat
from bcfl.client.trainer import Training
from bcfl.data.arrays import from_arrays
from bcfl.data.drift import with_drift
from bcfl.engines.participation import Participation
from bcfl.extensions.births import SKETCH, Pulls, Searching, Stories, View, split
from bcfl.federation import Hypotheses, RoundInfo
from bcfl.methods.auto import AutoBCFL
from bcfl.methods.steps import distinct_groups
from bcfl.randomness import generator
from bcfl.runs.loop import resume, start
from bcfl.runs.settings import load_config

EXACT = AutoBCFL(
    fusion="exact",
    forgetting=1.0,  # the data are the same in every round: each round's belief is their posterior, from a flat prior
    effective_examples=1e9,
    caution=0.0,
    max_stories=15,  # all groupings of four clients
    min_weight=0.0,
    search_rounds=None,
)


def conjugate(seed: int, truth: list[list[float]], noise: float = 1.0, **options: Any) -> ConjugateClients:
    """Clients whose data are drawn about their group's parameters, for training and held out."""
    draws = generator(seed, "auto")
    means = torch.tensor(truth, dtype=torch.float64)

    def drawn(information: float) -> list[ConjugateClient]:
        estimate = means + noise * torch.randn(means.shape, generator=draws, dtype=torch.float64)
        return [ConjugateClient(one, torch.full_like(one, information), 0.0) for one in estimate]

    starts = torch.zeros(1, 1, means.shape[1], dtype=torch.float64)
    return ConjugateClients(
        drawn(1.0), starts, torch.full((len(truth),), 10.0, dtype=torch.float64), held=drawn(1.0), **options
    )


def rounds(
    method: AutoBCFL, clients: ConjugateClients, num_rounds: int, state: Searching | None = None
) -> tuple[Searching, list[RoundInfo]]:
    state, infos = state or method.init(clients), []
    for _ in range(num_rounds):
        clients.round += 1
        state, info = method.round(state, clients)
        infos.append(info)
    return state, infos


def posterior_of(info: RoundInfo) -> dict[tuple[int, ...], float]:
    rows = [canonical(row) for row in info.assignment]
    assert len(set(rows)) == len(rows)  # each grouping once
    return dict(zip(rows, info.log_weight.tolist(), strict=True))


# --- against enumeration ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "concentration"), [(0, 0.3), (3, 1.0)])
def test_the_weights_are_the_exact_posterior_over_groupings(seed: int, concentration: float) -> None:
    """Spread over many groupings, since two groups lie two standard deviations apart, of few data each."""
    clients = conjugate(seed, [[0.0, 0.0], [2.0, 0.0], [0.0, 0.0], [2.0, 0.0]])
    _, infos = rounds(replace(EXACT, concentration=concentration), clients, 12)
    assert clients.held is not None
    prior = flat(torch.zeros(2, dtype=torch.float64))
    exact = partition_posterior(clients.clients, clients.held, prior, concentration, log_likelihood_at_mean)
    assert math.exp(max(exact.values())) < 0.9  # there is something to compare
    reached = [_distance(posterior_of(info), exact) for info in infos[-4:]]
    assert reached[-1] < 0.03
    assert reached[-1] < 0.5 * reached[0]  # a story's weight forgets half of where it came from in every round


def _distance(found: dict[tuple[int, ...], float], exact: dict[tuple[int, ...], float]) -> float:
    """Total variation."""
    return 0.5 * sum(abs(math.exp(found.get(one, -math.inf)) - math.exp(weight)) for one, weight in exact.items())


def test_clients_in_another_order_give_the_same_posterior() -> None:
    truth, order = [[0.0, 0.0], [3.0, 0.0], [0.0, 0.0], [3.0, 0.0]], [2, 3, 1, 0]
    clients = conjugate(4, truth)
    assert clients.held is not None
    permuted = replace(
        clients, clients=[clients.clients[j] for j in order], held=[clients.held[j] for j in order], fitted=[]
    )
    (_, own), (_, other) = (rounds(replace(EXACT, max_stories=4), one, 5) for one in (clients, permuted))
    found = {canonical(torch.tensor(g)[order]): weight for g, weight in posterior_of(own[-1]).items()}
    assert found == pytest.approx(posterior_of(other[-1]))


# --- births, joinings, deaths -----------------------------------------------------------------------------------------

FAR = [[0.0, 0.0], [9.0, 0.0], [0.0, 9.0]]
PLAIN = AutoBCFL(forgetting=1.0, fusion="exact", search_rounds=None)


def test_three_groups_are_found_from_one_cluster() -> None:
    clients = conjugate(0, FAR * 4, noise=0.3)
    state, infos = rounds(PLAIN, clients, 12)
    assert canonical(state.hypotheses.assignment[0]) == (0, 1, 2) * 4
    assert infos[0].assignment.tolist() == [[0] * 12]
    births = [e for info in infos for e in info.events or () if e["hypothesis"] == 0]
    assert [e["kind"] for e in births] == ["birth"] * 2
    assert len(clients.fitted) == 12 * 12  # one training for each client and round: trials cost none


def test_one_group_stays_one_cluster() -> None:
    for seed in range(3):
        state, infos = rounds(PLAIN, conjugate(seed, [[1.0, 1.0]] * 10), 12)
        assert state.hypotheses.assignment[0].unique().tolist() == [0]
        assert all(not info.events for info in infos)


def two_clusters(own: list[int], means: list[list[float]]) -> Searching:
    """A state in which the clients are split as said, of whom nothing else is known."""
    return Searching(in_clusters(own, means), torch.zeros(len(own), SKETCH))


def in_clusters(own: list[int], means: list[list[float]]) -> Hypotheses:
    models = Gaussian(torch.tensor(means, dtype=torch.float64), torch.ones(len(means), 2, dtype=torch.float64))
    return Hypotheses(
        models,
        torch.arange(len(means))[None],
        torch.zeros(1, dtype=torch.float64),
        torch.tensor([own]),
        torch.arange(len(means)),
        torch.zeros(1, dtype=torch.int64),
    )


def test_a_needless_cluster_is_joined_again_and_its_number_is_free() -> None:
    clients = conjugate(1, [[0.0, 0.0]] * 8, noise=0.3)
    state, (info,) = rounds(PLAIN, clients, 1, two_clusters([0, 1, 1, 1, 0, 1, 0, 1], [[0.1, 0.0], [0.0, 0.1]]))
    assert len(state.hypotheses.assignment[0].unique()) == 1
    (event,) = info.events or ()
    assert (event["kind"], event["from"]) == ("merge", [0, 1])
    assert event["cluster"] == int(state.hypotheses.assignment[0, 0])
    assert int((state.hypotheses.model_of[0] >= 0).sum()) == 1


def test_two_clusters_that_differ_stay_apart() -> None:
    clients = conjugate(1, [[0.0, 0.0], [5.0, 0.0]] * 4, noise=0.3)
    state, (info,) = rounds(PLAIN, clients, 1, two_clusters([0, 1] * 4, [[0.1, 0.0], [5.0, 0.1]]))
    assert state.hypotheses.assignment[0].tolist() == [0, 1] * 4
    assert not info.events


def test_a_cluster_whose_clients_all_leave_dies() -> None:
    clients = conjugate(1, [[0.0, 0.0], [5.0, 0.0]] * 4, noise=0.3)
    state, (info,) = rounds(PLAIN, clients, 1, two_clusters([2, 2] * 4, [[0.1, 0.0], [5.0, 0.1], [99.0, 99.0]]))
    assert state.hypotheses.assignment[0].tolist() == [0, 1] * 4
    assert {"kind": "death", "hypothesis": 0, "cluster": 2, "from": [2], "into": [0, 1]} in (info.events or ())
    assert len(state.hypotheses.models) - 2 * int(state.hypotheses.log_weight.isinf().sum()) == 2


def test_absent_clients_stay_and_newcomers_find_their_cluster() -> None:
    clients = conjugate(1, [[0.0, 0.0], [5.0, 0.0]] * 4, noise=0.3, absent=frozenset({0, 7}))
    state, _ = rounds(PLAIN, clients, 1, two_clusters([1, 1, 0, 1, 0, 1, 0, -1], [[0.1, 0.0], [5.0, 0.1]]))
    assert state.hypotheses.assignment[0].tolist() == [
        1,
        1,
        0,
        1,
        0,
        1,
        0,
        -1,
    ]  # the first is away
    clients.absent = frozenset()
    state, _ = rounds(PLAIN, clients, 1, state)
    assert state.hypotheses.assignment[0].tolist() == [0, 1] * 4


def test_clients_that_are_away_count_for_the_size_of_their_cluster() -> None:
    state = in_clusters([0] * 5 + [1] * 5, [[0.0, 0.0], [5.0, 0.0]])
    present = torch.tensor([True] * 6 + [False] * 4)
    evidence = torch.zeros(6, 2, dtype=torch.float64)
    view, method = View(state, 0, evidence, present), AutoBCFL(concentration=0.1)
    seated = method._seated(view)
    assert seated[0].exp().tolist() == pytest.approx([4, 5])
    assert seated[5].exp().tolist() == pytest.approx([5, 4])
    moved = view.own.index_fill(0, torch.tensor(5), 0)
    change = method._posterior(view, moved) - method._posterior(view, view.own)
    assert change == pytest.approx(math.log(5 / 4))


def test_a_birth_must_win_by_more_than_its_noise() -> None:
    """Halves that gain in the mean, with gains that scatter widely from client to client."""
    bold, cautious = (AutoBCFL(caution=caution, concentration=1.0) for caution in (0.0, 2.0))
    assert born(bold, [9.0, -3.0, 8.0, -4.0])
    assert not born(cautious, [9.0, -3.0, 8.0, -4.0])
    assert born(cautious, [3.0, 2.0, 3.0, 2.0])  # as much, and steadily


def test_a_joining_must_win_by_more_than_its_noise() -> None:
    """A cluster that is cheaper to give up than to keep, with losses that scatter from client to client, or do not."""
    bold, cautious = (AutoBCFL(caution=caution) for caution in (0.0, 2.0))
    assert joined(bold, [0.6, 2.4, 0.6, 2.4])
    assert not joined(cautious, [0.6, 2.4, 0.6, 2.4])
    assert joined(cautious, [1.5, 1.5, 1.5, 1.5])  # as much, and steadily


def test_held_out_examples_count_as_at_most_so_many() -> None:
    """Two of each client: their gains are enough for a birth, and those of a tenth of an example are not."""
    all_of_them, hardly_any = (AutoBCFL(concentration=1.0, effective_examples=count) for count in (2.0, 0.1))
    assert born(all_of_them, [3.0, 2.0, 3.0, 2.0])
    assert not born(hardly_any, [3.0, 2.0, 3.0, 2.0])


class Scored:
    """Clients of ten examples, with given scores."""

    num_parameters = 2

    def __init__(self, scores: Tensor):
        self.present = torch.ones(len(scores), dtype=torch.bool)
        self.num_examples = torch.full((len(scores),), 10.0, dtype=torch.float64)
        self._scores = scores  # (client, model)

    def score(self, models: Tensor, max_examples: int | None = None, held_out: float = 0.0) -> Tensor:
        return self._scores


def born(method: AutoBCFL, gain: list[float]) -> bool:
    """Whether the best story is a trial, whose two models explain the clients that much better than their parent."""
    gains = torch.tensor(gain, dtype=torch.float64).repeat(2)
    clients = Scored(torch.stack([torch.full_like(gains, -20.0), *[-20.0 + gains] * 2], 1))
    half = [0] * len(gain) + [1] * len(gain)
    state = replace(
        in_clusters([0] * len(half), [[0.0, 0.0]] * 3),
        model_of=torch.tensor([[0, -1], [1, 2]]),
        log_weight=torch.tensor([0.0, -math.inf], dtype=torch.float64),
        assignment=torch.tensor([[0] * len(half), half]),
    )
    kept = method._associate(state, clients, 0.2)  # type: ignore[arg-type]
    return kept.assignment[0].tolist() == half


def joined(method: AutoBCFL, loss: list[float]) -> bool:
    """Whether the best story gives a second cluster up, whose clients the first explains that much worse."""
    losses = torch.tensor(loss, dtype=torch.float64)
    at_home = torch.full_like(losses, -20.0)
    first, second = torch.stack([at_home, at_home - 20], 1), torch.stack([at_home - losses, at_home], 1)
    state = in_clusters([0] * len(loss) + [1] * len(loss), [[0.0, 0.0]] * 2)
    kept = method._associate(state, Scored(torch.cat([first, second])), 0.2)  # type: ignore[arg-type]
    return kept.assignment[0].tolist() == [0] * 2 * len(loss)


# --- pieces -----------------------------------------------------------------------------------------------------------


def stories(model_of: list[int], own: list[int]) -> Stories:
    weight = torch.zeros(1, dtype=torch.float64)
    return Stories(torch.tensor([0]), torch.tensor([model_of]), torch.tensor([own]), weight)


def test_a_split_follows_the_sketches_and_takes_a_free_number() -> None:
    clients = conjugate(0, [[0.0, 0.0]] * 6, absent=frozenset({4}), round=1)
    sketch = torch.zeros(6, SKETCH)
    sketch[[0, 1, 2], 7] = torch.tensor([1.0, 2.0, 3.0])  # the direction counts, not the length
    sketch[[3, 4, 5], 8] = 1.0
    trial = split(stories([5, -1, 7], [0, 0, 0, 0, 0, 2]), sketch, clients)
    assert trial is not None
    assert trial.model_of.tolist() == [[5, 5, 7, -1]]
    assert trial.assignment.tolist() == [[0, 0, 0, 1, 0, 2]]  # the absent one stays, a cluster of one is not split
    assert split(stories([5], [0] * 6), torch.zeros(6, SKETCH), clients) is None  # nobody's pull is known


def test_clusters_take_turns() -> None:
    clients, sketch = conjugate(0, [[0.0, 0.0]] * 4), torch.eye(4, SKETCH)
    turns = []
    for clients.round in (1, 2, 3):
        trial = split(stories([0, 1], [0, 0, 1, 1]), sketch, clients)
        assert trial is not None
        turns.append(int(trial.model_of[0, 2]))
    assert turns == [1, 0, 1]


def test_sketches_keep_angles() -> None:
    """Of long updates: two directions and their mixture, seen through the sketch."""
    size = 20_000
    clients = conjugate(0, [[0.0] * size] * 3)
    draws = generator(0, "updates")
    one, other = torch.randn(2, size, generator=draws, dtype=torch.float64)
    state = replace(in_clusters([0, 0, 0], [[0.0, 0.0]]), models=flat(torch.zeros(1, size, dtype=torch.float64)))
    pulls = Pulls(Searching(state, torch.zeros(3, SKETCH)), stories([0], [0, 0, 0]), clients)
    for client, update in enumerate((5 * one, other, one + other)):
        pulls.add(0, client, flat(update))
        pulls.add(1, client, flat(-update))  # of a belief that is not the client's in the best story
    cosine = pulls.sketch @ pulls.sketch.T
    expected = torch.tensor([[1, 0, 0.5**0.5], [0, 1, 0.5**0.5], [0.5**0.5, 0.5**0.5, 1]])
    assert torch.allclose(cosine, expected, atol=0.15)


def test_groups_of_a_story_with_fewer_clusters() -> None:
    model_of, own = torch.tensor([[0, -1], [0, 1]]), torch.tensor([[0, 0, 0], [0, 0, 1]])
    branches = Branches(torch.arange(2), own, torch.zeros(2, dtype=torch.float64))
    groups = distinct_groups(model_of, branches, torch.ones(3, dtype=torch.bool))
    assert groups.model_of.tolist() == [[0, -1], [1, 2]]
    assert groups.belief.tolist() == [0, 0, 1]


def test_a_story_without_the_first_cluster_serves_newcomers_from_a_cluster_that_is_there() -> None:
    state = replace(in_clusters([-1, -1], [[1.0, 0.0]]), model_of=torch.tensor([[-1, 0]]))
    _, model_of_client = predictors(state)
    assert model_of_client.tolist() == [0, 0]


# --- real training ----------------------------------------------------------------------------------------------------


def grouped() -> Any:
    return from_arrays(client_data(num_clients=8, num_examples=80))


TRAINING = Training(local_steps=10, batch_size=16, learning_rate=0.1)


def test_held_out_examples_are_scored_and_never_trained() -> None:
    with simulator(grouped(), linear, TRAINING) as engine:
        for client in engine.clients:
            held, kept = client.scored(0.2).index.tolist(), client._part(0.2, held=False).index.tolist()
            assert len(held) == round(0.2 * len(client.train))
            assert sorted(held + kept) == sorted(client.train.index.tolist())
            assert client.scored(0.0).index.tolist() == client.train.index.tolist()


def test_what_was_held_out_stays_so_when_data_change_hands() -> None:
    data = with_drift(replace(grouped(), group=torch.tensor([0, 1] * 4)), 3, 0.5, 0)
    assert data.drift is not None
    with simulator(data, linear, TRAINING) as engine:
        first, later = (engine.clients_in(index, range(8)) for index in (1, 3))
        assert data.drift.source.tolist() != list(range(8))
        for client, source in enumerate(data.drift.source.tolist()):
            assert later[client].scored(0.2).index.tolist() == first[source].scored(0.2).index.tolist()


@pytest.mark.parametrize("device", ["cpu", "stacked-cpu"])
def test_a_client_of_two_examples_keeps_both_for_training(device: str) -> None:
    """BatchNorm cannot train on the one that holding out the other would leave."""
    sizes, method = [8, 8, 3, 2], AutoBCFL()
    data = from_arrays([(x[:n], y[:n], *test) for n, (x, y, *test) in zip(sizes, client_data(4), strict=True)])
    with simulator(data, network, TRAINING, device=device) as engine:
        assert [len(client._part(0.2, held=False)) for client in engine.clients] == [6, 6, 2, 2]
        assert [len(client.scored(0.2)) for client in engine.clients] == [2, 2, 1, 2]
        assert [client.num_scored(None, 0.2) for client in engine.clients] == [2, 2, 1, 2]
        assert [len(client._part(0.9, held=False)) for client in engine.clients] == [2, 2, 2, 2]
        state = method.init(engine.begin(0))
        for index in range(1, 5):
            clients = engine.begin(index)
            state, _ = method.round(state, clients)
            assert clients.work.rejected == 0
    assert state.hypotheses.models.is_finite()


def test_two_groups_are_found_and_the_search_ends() -> None:
    method = AutoBCFL(search_rounds=12)
    with simulator(grouped(), linear, TRAINING, Participation(dropout=0.1)) as engine:
        state = method.init(engine.begin(0))
        for index in range(1, 15):
            clients = engine.begin(index)
            state, _ = method.round(state, clients)
            assert clients.work.trainings <= 1.5 * int(clients.present.sum())
            assert bool(state.hypotheses.log_weight.isinf().any()) == (2 <= index < 12)  # a trial waits to be scored
    assert canonical(state.hypotheses.assignment[0]) == (0, 1) * 4


def test_a_run_records_events_and_resumes_exactly(tmp_path: Path) -> None:
    settings = ["method.name=bcfl-auto", "data.rotations=[0,180]", "data.partition=feature(2,3)"]
    whole = start(load_config(None, [*settings, "experiment.rounds=5"]), tmp_path / "whole")
    lines = [json.loads(line) for line in (tmp_path / "whole" / "associations.jsonl").read_text().splitlines()]
    assert all("events" in line for line in lines)
    events = list(itertools.chain.from_iterable(line["events"] for line in lines))
    assert {"kind": "birth", "hypothesis": events[0]["hypothesis"], "cluster": 1, "from": [0]} == events[0]
    assert len(whole.models) == len(whole.assignment.unique()) == 2
    (tmp_path / "whole" / "result.json").unlink()
    last = max((tmp_path / "whole" / "checkpoints").iterdir())
    last.unlink()  # the round before is kept as well
    again = resume(tmp_path / "whole")
    assert torch.equal(again.state.hypotheses.models.mean, whole.state.hypotheses.models.mean)
    assert torch.equal(again.state.hypotheses.assignment, whole.state.hypotheses.assignment)
    assert again.info is not None
    assert again.info.events == tuple(lines[-1]["events"])
