"""Racing on real training states: the same hypotheses and weights from fewer scored examples."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from federation_fixtures import advance, by_story, linear, run, simulator, tiny_federation

from bcfl.association.hypotheses import Branches
from bcfl.belief.gaussian import Gaussian
from bcfl.client.client import Scoring, best
from bcfl.client.trainer import Alone
from bcfl.engines.participation import Participation
from bcfl.engines.simulator import Simulator
from bcfl.extensions.racing import TOLERANCE
from bcfl.federation import Hypotheses
from bcfl.methods import make_method
from bcfl.model.flat import FlatModel, SharedModels
from bcfl.runs.packing import pack
from bcfl.runs.problem import load_data, model_factory
from bcfl.runs.settings import load_config

NAMES = ["bcfl-g", "bcfl-c-3", "bcfl-mh-3"]
STAGES = (1, 3, 16)  # rounds after which groups are all alike, beginning to differ, and separated
NUM_DRAWS = 10  # of the scored examples and of the looks, for each stage
NUM_CLIENTS, NUM_SCORED = 8, 320

Digits = tuple[Simulator, dict[str, list[Hypotheses]]]


@pytest.fixture(scope="module")
def digits() -> Iterator[Digits]:
    """Rotated digits, two clients a group, and what the methods believe at each stage from a warm start."""
    config = load_config(None, ["data.partition=feature(4,2)"])
    states: dict[str, list[Hypotheses]] = {}
    with Simulator(model_factory(config), load_data(config), config.training, 0, num_workers=1) as engine:
        for name in ("bcfl-c-3", "bcfl-mh-3"):
            method, before = make_method(f"{name}-w", {"hypotheses": "all"}), 0
            state, states[name] = method.init(engine.begin(0)), []
            for stage in STAGES:
                state = advance(method, engine, state, range(before + 1, stage + 1))
                states[name].append(state)
                before = stage
        yield engine, {**states, "bcfl-g": states["bcfl-c-3"]}  # one hypothesis, too


def associated(name: str, engine: Simulator, state: Hypotheses, index: int, racing: float) -> tuple[Branches, int, int]:
    """What the method keeps in that round, and how many pairs it scored and spared; BCFL-G's clients race alone."""
    if name != "bcfl-g":
        clients = engine.begin(index)
        kept = make_method(name, {"racing": racing, "hypotheses": "all"})._associate(state, None, clients).kept
        return kept, clients.work.scored_examples, clients.work.spared_examples or 0
    network, models = Alone(FlatModel(engine.factory())), SharedModels.of(state.models.mean)
    choices = best(models, Scoring(index, NUM_SCORED), racing / NUM_CLIENTS, engine.clients, network)
    scored = sum(pairs for _, pairs in choices)
    kept = Branches(torch.zeros(1).long(), torch.tensor([[belief for belief, _ in choices]]), torch.zeros(1).double())
    return kept, scored, NUM_CLIENTS * len(state.models) * NUM_SCORED - scored


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_is_what_full_scoring_keeps_at_the_stated_rate(name: str, digits: Digits) -> None:
    engine, states = digits
    racing, wrong = 0.1, 0
    for state in states[name]:
        for index in range(100, 100 + NUM_DRAWS):
            expected, in_full, _ = associated(name, engine, state, index, 0.0)
            found, scored, spared = associated(name, engine, state, index, racing)
            one, other = by_story(found), by_story(expected)
            same = one.keys() == other.keys()
            assert not same or one == pytest.approx(other, rel=0, abs=TOLERANCE if name == "bcfl-mh-3" else 1e-9)
            assert scored + spared == in_full
            wrong += not same
    assert wrong <= racing * len(STAGES) * NUM_DRAWS


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least"), [("bcfl-g", 6.0), ("bcfl-c-3", 3.0), ("bcfl-mh-3", 3.0)])
def test_separated_groups_need_few_scored_examples(name: str, least: float, digits: Digits) -> None:
    engine, states = digits
    work = [associated(name, engine, states[name][-1], index, 0.05)[1:] for index in range(200, 205)]
    scored, spared = (sum(counts) for counts in zip(*work, strict=True))
    assert (scored + spared) / scored >= least


# --- whole rounds -----------------------------------------------------------------------------------------------------

LARGE = {"num_examples": 150, "num_groups": 2}  # enough examples that all clients race


def tiny(
    rounds: int, name: str, num_workers: int = 1, participation: Participation | None = None, **options: Any
) -> Any:
    method = make_method(name, {"num_clusters": 2, **options})
    data = tiny_federation(**LARGE)
    with simulator(data, linear, num_workers=num_workers, participation=participation) as engine:
        return run(method, engine, rounds)


def assert_near(found: Hypotheses, expected: Hypotheses, tolerance: float) -> None:
    one, other = pack(found).tensors, pack(expected).tensors
    assert one.keys() == other.keys()
    for key, values in one.items():
        assert torch.allclose(values, other[key], rtol=tolerance, atol=tolerance), key


@pytest.mark.parametrize("name", ["bcfl-g", "bcfl-c-3", "bcfl-mh-3", "bcfl-mh-3-w"])
def test_a_raced_run_ends_where_the_other_does(name: str) -> None:
    # Consensus merges by the weights, in which the clients that are settled cancel up to rounding.
    assert_near(tiny(6, name, racing=0.01), tiny(6, name), 1e-5 if "-c-" in name else 1e-9)


@pytest.mark.parametrize("name", ["bcfl-g", "bcfl-c-3", "bcfl-mh-3"])
def test_raced_runs_repeat_with_any_number_of_workers_and_whoever_takes_part(name: str) -> None:
    some = Participation(0.7, dropout=0.2, straggling=0.2)
    one, two = (tiny(4, name, workers, some, racing=0.05, scoring_examples=None) for workers in (1, 2))
    assert_near(one, two, 0.0)
    assert one.models.is_finite()


def near_copies(engine: Simulator) -> Hypotheses:
    """Three stories of two separated groups, whose models differ by next to nothing."""
    one = run(make_method("bcfl-g-w", {"num_clusters": 2}), engine, 6)
    mean, precision = (values.repeat(3, 1) for values in (one.models.mean, one.models.precision))
    mean += 1e-4 * torch.randn(mean.shape, generator=torch.Generator().manual_seed(0))
    return Hypotheses(
        models=Gaussian(mean, precision),
        model_of=torch.arange(6).view(3, 2),
        log_weight=torch.full((3,), 1 / 3, dtype=torch.float64).log(),
        assignment=one.assignment.repeat(3, 1),
        parent_of=torch.arange(6),
        family=torch.arange(3),
    )


@pytest.mark.parametrize(("min_weight", "hypotheses"), [(0.0, "all"), (0.1, "all"), (0.0, "distinct")])
def test_a_race_stops_at_nearly_right_weights_unless_these_decide_what_is_dropped(
    min_weight: float, hypotheses: str
) -> None:
    options = {"num_clusters": 2, "min_weight": min_weight, "hypotheses": hypotheses}
    raced, full = (make_method("bcfl-mh-3", {**options, "racing": racing}) for racing in (0.05, 0.0))
    with simulator(tiny_federation(**LARGE), linear) as engine:
        state = near_copies(engine)
        found, expected = (method._associate(state, None, engine.begin(7)).kept for method in (raced, full))
    assert by_story(found) == pytest.approx(by_story(expected), rel=0, abs=TOLERANCE)
    assert torch.allclose(found.log_weight, expected.log_weight, rtol=0, atol=1e-9) == (
        min_weight > 0 or hypotheses == "distinct"
    )


@pytest.mark.parametrize("name", ["bcfl-g", "bcfl-c-3", "bcfl-mh-3"])
def test_without_racing_nothing_is_said_of_it(name: str) -> None:
    method = make_method(name, {"num_clusters": 2})
    with simulator(tiny_federation(**LARGE), linear) as engine:
        clients = engine.begin(1)
        method.round(method.init(engine.begin(0)), clients)
    assert "spared_examples" not in clients.work.as_dict()


# --- the clients' answers ---------------------------------------------------------------------------------------------


@pytest.fixture
def engine() -> Any:
    with simulator(tiny_federation(**LARGE), linear, participation=Participation(5)) as own:
        yield own


def some_models(engine: Simulator) -> torch.Tensor:
    return torch.stack([engine.begin(0).draw_model(0, k) for k in range(3)])


def test_looks_ask_for_what_is_wanted_and_count_what_is_spared(engine: Simulator) -> None:
    models, clients, full = some_models(engine), engine.begin(1), engine.begin(1)
    full.score(models, 100)
    everything = torch.ones(6, 3, dtype=torch.bool)
    wanted = torch.rand(6, 3, generator=torch.Generator().manual_seed(0)) < 0.5
    clients.look(models, 100, everything, 0, 32)
    mean, covariance = clients.look(models, 100, wanted, 32, 1000)  # there are 100
    asked = wanted & clients.present[:, None]
    assert torch.equal(mean.isnan(), ~asked)
    assert torch.equal(covariance.isnan(), ~(asked[:, :, None] & asked[:, None, :]))
    num_present = int(clients.present.sum())
    assert clients.work.scored_examples == 32 * 3 * num_present + 68 * int(asked.sum())
    assert clients.work.scored_examples + (clients.work.spared_examples or 0) == full.work.scored_examples
    means_and_covariances = [count + count**2 for count in asked.sum(1).tolist()]
    assert clients.work.scalars_up == (3 + 9) * num_present + sum(means_and_covariances)
    before = clients.work.exchanges
    assert clients.look(models, 100, torch.zeros_like(wanted), 32, 100)[0].isnan().all()
    assert clients.work.exchanges == before


def test_looks_are_at_distinct_random_parts_of_the_scored_examples(engine: Simulator) -> None:
    models, clients = some_models(engine), engine.begin(1)
    everything = torch.ones(6, 3, dtype=torch.bool)
    parts = [clients.look(models, 96, everything, first, first + 32) for first in (0, 32, 64)]
    means = torch.stack([mean for mean, _ in parts]).mean(0)  # all 96 of them
    assert torch.allclose(means * clients.num_examples[:, None], clients.score(models, 96), equal_nan=True)
    assert parts[0][0].isnan().any(1).tolist() == (~clients.present).tolist()
    assert not torch.allclose(parts[0][0], parts[1][0], equal_nan=True)


def test_data_sorted_by_label_are_looked_at_in_a_random_order() -> None:
    """Else the first look would see a single label, and the best model for that is often not the best of all."""
    data = tiny_federation(**LARGE)
    data = replace(data, train_of=tuple(own[data.y_train[own].argsort()] for own in data.train_of))
    with simulator(data, linear) as engine:
        clients = engine.begin(1)
        always_first = torch.zeros_like(clients.draw_model(0, 0))
        always_first[12] = 100.0  # the bias of the first class
        everything = torch.ones(6, 1, dtype=torch.bool)
        mean, _ = clients.look(always_first[None], None, everything, 0, 32)
        share = torch.tensor([(data.y_train[own] == 0).double().mean() for own in data.train_of])
    assert (mean[:, 0] + 100 * (1 - share)).abs().max() < 30  # about as many of the others as there are
