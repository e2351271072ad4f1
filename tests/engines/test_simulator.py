"""The simulator: the same bits for any number of workers, bounded memory, absent and broken clients, honest counts."""

import math
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federation_fixtures import (
    NUM_CLASSES,
    NUM_FEATURES,
    advance,
    asked,
    client_data,
    linear,
    network,
    one_round,
    run,
    simulator,
    tiny_federation,
)
from torch import Tensor, nn

from bcfl.belief.gaussian import Gaussian, flat
from bcfl.client import trainer
from bcfl.client.client import LARGEST, continued_momentum, is_usable
from bcfl.client.examples import batches
from bcfl.client.trainer import Job, Network, Trained, Training
from bcfl.data.arrays import from_arrays
from bcfl.engines.participation import Participation
from bcfl.engines.simulator import Simulator
from bcfl.federation import Hypotheses, Jobs
from bcfl.methods import make_method
from bcfl.methods.averaging import FedAvg
from bcfl.methods.bcfl import BCFL
from bcfl.model.flat import FlatModel, build

QUICK = Training(local_steps=3, batch_size=8)


def same(first: Hypotheses, second: Hypotheses) -> bool:
    return all(
        torch.equal(a, b)
        for a, b in [
            (first.models.mean, second.models.mean),
            (first.models.precision, second.models.precision),
            (first.model_of, second.model_of),
            (first.log_weight, second.log_weight),
            (first.assignment, second.assignment),
        ]
    )


# --- workers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["fresh", "client", "belief"])
def test_any_number_of_workers_gives_the_same_bits(state: str) -> None:
    training = replace(QUICK, momentum_state=state, fisher="exact")
    results = []
    for num_workers in (1, 2, 3):
        with simulator(training=training, num_workers=num_workers) as engine:
            final = run(BCFL(num_clusters=2, scoring_examples=10), engine, 3)
            results.append((final, engine.evaluate(*asked(final))))
    for other, evaluations in results[1:]:
        assert same(results[0][0], other)
        assert [e.log_likelihood for e in evaluations] == [e.log_likelihood for e in results[0][1]]


def test_results_come_in_the_order_of_the_tasks() -> None:
    with simulator(num_workers=3) as engine:

        def task(i: int) -> Any:
            def sleepy(model: FlatModel) -> int:
                time.sleep(0.02 if i % 3 == 0 else 0)  # early tasks end last
                return i

            return sleepy

        assert list(engine._workers.stream(task(i) for i in range(20))) == list(range(20))


def test_jobs_are_answered_in_their_order_and_by_their_client() -> None:
    with simulator(num_workers=3) as engine:
        clients = engine.begin(1)
        models = flat(torch.stack([clients.draw_model(0, k) for k in range(2)]))
        belief, client = torch.tensor([1, 0, 1, 0]), torch.tensor([5, 0, 2, 5])
        answers = list(clients.fit(models, Jobs(belief, client)))
        for b, c, answer in zip(belief, client, answers, strict=True):
            (alone,) = engine.begin(1).fit(models, Jobs(b[None], c[None]))
            assert torch.equal(answer.mean, alone.mean)


def test_dropout_does_not_cost_the_workers() -> None:
    with simulator(factory=network, num_workers=3) as engine:  # its dropout layer draws from a stream of its own
        assert engine.num_workers == 3


class Drawing(nn.Module):
    """A model that draws from torch's global generator whenever it is called, in evaluation as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(NUM_FEATURES, 8), nn.Linear(8, NUM_CLASSES)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](F.dropout(self.layers[0](x).relu(), 0.5, training=True))


@pytest.mark.parametrize("fisher", ["batch", "exact"])
def test_a_model_that_draws_globally_is_trained_by_one_worker_and_repeats(fisher: str) -> None:
    results = []
    for ambient in (1, 2):
        torch.manual_seed(ambient)  # what the caller did before must not matter
        with simulator(factory=Drawing, training=replace(QUICK, fisher=fisher), num_workers=3) as engine:
            assert engine.num_workers == 1
            final = run(BCFL(num_clusters=2), engine, 2)
            results.append((final, [e.log_likelihood for e in engine.evaluate(*asked(final))]))
    assert same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


# --- memory -----------------------------------------------------------------------------------------------------------


def test_only_a_few_posteriors_are_ever_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    alive = {"now": 0, "peak": 0}
    fit = trainer.fit

    def counted(network: Network, jobs: Sequence[Job]) -> list[Trained]:
        found = fit(network, jobs)
        alive["now"] += len(found)
        alive["peak"] = max(alive.values())
        for posterior, _ in found:
            weakref.finalize(posterior, lambda: alive.update(now=alive["now"] - 1))
        return found

    monkeypatch.setattr("bcfl.client.client.fit", counted)
    with simulator(tiny_federation(num_clients=60, num_examples=8), linear, num_workers=2) as engine:
        for method in (FedAvg(), make_method("ifca", {}), make_method("bcfl-g", {}), make_method("bcfl-mh-3", {})):
            run(method, engine, 1)
    assert alive["now"] <= 2
    assert 0 < alive["peak"] <= 2 * 2 + 4  # the window ahead, what workers hold, what is being folded


MEASURE = """
import resource, sys, torch
from torch import nn
from bcfl.data.arrays import from_arrays
from bcfl.engines.simulator import Simulator
from bcfl.client.trainer import Job, Network, Trained, Training
from bcfl.methods import make_method

def model():
    return nn.Sequential(nn.Linear(4, 250), nn.ReLU(), nn.Linear(250, 250), nn.ReLU(), nn.Linear(250, 2))

num_clients = int(sys.argv[1])
y = torch.tensor([0, 1, 0, 1])
data = from_arrays([(torch.randn(4, 4), y) for _ in range(num_clients)])
training = Training(local_steps=1, batch_size=4, momentum_state="fresh")
with Simulator(model, data, training, 0, num_workers=2) as engine:
    for name in ("fedavg", "bcfl-g"):
        method = make_method(name, {"num_clusters": 2})
        state, _ = method.round(method.init(engine.begin(0)), engine.begin(1))
        assert state.hypotheses.models.is_finite()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_server_memory_does_not_grow_with_the_clients() -> None:
    """1000 posteriors of these models (64 000 parameters, mean and precision) are 500 MB; a few must be enough."""
    peak = {}
    for num_clients in (10, 1000):
        done = subprocess.run([sys.executable, "-c", MEASURE, str(num_clients)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        peak[num_clients] = int(done.stdout) / 1024  # MB
    assert peak[1000] - peak[10] < 60, peak


# --- who takes part ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "count"), [(1.0, 20), (0.25, 5), (0.01, 1), (7, 7), (50, 20)])
def test_a_share_or_a_number_of_clients_takes_part(asked: float, count: int) -> None:
    draws = [Participation(asked).draw(20, 0, index) for index in range(10)]
    assert all(int(present.sum()) == count for present, _ in draws)
    assert all(in_time.all() for _, in_time in draws)
    assert len({tuple(present.tolist()) for present, _ in draws}) > 1 or count == 20


def test_participation_is_a_function_of_seed_and_round() -> None:
    participation = Participation(0.5, 0.3, 0.3)
    first, again = participation.draw(50, 3, 4), participation.draw(50, 3, 4)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], participation.draw(50, 3, 5)[0])


def test_dropout_and_straggling_have_their_rates_and_leave_somebody() -> None:
    draws = [Participation(1.0, 0.3, 0.2).draw(100, 0, index) for index in range(50)]
    assert sum(float(present.float().mean()) for present, _ in draws) / 50 == pytest.approx(0.7, abs=0.03)
    assert sum(float(in_time.float().mean()) for _, in_time in draws) / 50 == pytest.approx(0.8, abs=0.03)
    assert all(Participation(2, 0.999).draw(5, 0, index)[0].any() for index in range(20))


def test_latecomers_are_drawn_from_their_first_round_on_and_others_as_ever() -> None:
    late = Participation(joins=((1, 3), (4, 2)))
    assert [late.draw(5, 0, index)[0].tolist() for index in (0, 1, 2, 3)] == [
        [True, False, True, True, False],
        [True, False, True, True, False],
        [True, False, True, True, True],
        [True] * 5,
    ]
    half = Participation(0.5, joins=((0, 5), (1, 5)))
    draws = torch.stack([half.draw(6, 0, index)[0] for index in range(5)])
    assert draws.sum(1).tolist() == [2] * 5  # half of the four that are there
    assert not draws[:, :2].any()
    assert torch.equal(half.draw(6, 0, 5)[0], Participation(0.5).draw(6, 0, 5)[0])  # once all are there


def test_absent_clients_cost_nothing_and_stay_where_they_were() -> None:
    with simulator(participation=Participation(clients_per_round=2)) as engine:
        for method in (BCFL(num_clusters=2, max_hypotheses=2), make_method("bcfl-g", {"num_clusters": 2})):
            before = replace(method.init(engine.begin(0)), assignment=torch.ones(1, 6, dtype=torch.int64))
            if len(before.log_weight) > 1:
                before = replace(before, assignment=torch.ones(2, 6, dtype=torch.int64))
            after, _, clients = one_round(method, engine, before)
            absent = ~clients.present
            assert int(absent.sum()) == 4
            assert after.assignment[:, absent].eq(1).all()
            assert clients.work.trainings <= 2 * len(after.log_weight)
            sizes = sum(len(engine.clients[c].train) for c in clients.present.nonzero()[:, 0].tolist())
            assert clients.work.scored_examples == len(before.models) * sizes


def test_rows_of_absent_clients_are_nan() -> None:
    with simulator(participation=Participation(clients_per_round=2)) as engine:
        clients = engine.begin(1)
        models = clients.draw_model(0, 0)[None]
        for answer in (clients.score(models), clients.share_explained(models)):
            assert torch.equal(answer.isnan()[:, 0], ~clients.present)


def test_late_clients_are_counted_and_train_nothing() -> None:
    with simulator(participation=Participation(straggling=0.5)) as engine:
        clients = engine.begin(1)
        late = int((~clients.in_time).sum())
        assert 0 < late < 6
        answers = list(clients.fit(flat(clients.draw_model(0, 0)[None]), Jobs(torch.zeros(6).long(), torch.arange(6))))
        assert [answer is None for answer in answers] == (~clients.in_time).tolist()
        assert (clients.work.late, clients.work.trainings) == (late, 6 - late)
        best = engine.begin(1)
        chosen = list(best.fit_best(flat(clients.draw_model(0, 0)[None]), 0.0, False, None))
        assert [choice.client for choice in chosen] == clients.in_time.nonzero()[:, 0].tolist()
        assert (best.work.late, best.work.trainings) == (late, 6 - late)


# --- broken clients ---------------------------------------------------------------------------------------------------


def with_overflow(client: int, scale: float = 1e38) -> Any:
    """The tiny federation with one client whose features are finite but overflow in the network or its gradients."""
    clients = client_data()
    x, y, x_test, y_test = clients[client]
    clients[client] = (x * scale, y, x_test * scale, y_test)
    return from_arrays(clients)


@pytest.mark.parametrize(
    "name", ["fedavg", "ifca", "wecfl", "bp-fedavg", "fedamp", "fedsoft", "bcfl-g", "bcfl-c-2", "bcfl-mh-2-w"]
)
def test_a_posterior_that_is_not_finite_is_left_out_and_counted(name: str) -> None:
    method = make_method(name, {"num_clusters": 2, "selection": 6})
    with simulator(with_overflow(2), linear, Training(local_steps=3)) as engine:
        state, rejected = method.init(engine.begin(0)), 0
        for index in (1, 2):
            clients = engine.begin(index)
            state, _ = method.round(state, clients)
            rejected += clients.work.rejected
            assert state.hypotheses.models.is_finite()
            assert state.hypotheses.log_weight.isfinite().all()
        assert rejected >= 2
        evaluations = engine.evaluate(*asked(state))
        assert all(e is not None and torch.tensor(e.log_likelihood).isfinite() for e in evaluations)


@pytest.mark.parametrize("scale", [1e20, 1e30, 1e36, 1e37, 1e38])
def test_a_rejected_client_changes_nothing_for_the_others(scale: float) -> None:
    """FedAvg with a broken client is FedAvg without it, also where its model is absurd but just about finite."""
    with simulator(with_overflow(5, scale), linear) as engine:
        broken = run(FedAvg(), engine, 3)
    with simulator(from_arrays(client_data()[:5]), linear) as engine:
        without = run(FedAvg(), engine, 3)
    assert torch.equal(broken.models.mean, without.models.mean)


def test_problems_are_named_before_anything_is_trained() -> None:
    single = from_arrays([*client_data(2), (torch.ones(1, NUM_FEATURES), torch.tensor([0]))])
    with pytest.raises(ValueError, match="more than 1 value per channel"):  # BatchNorm cannot train on one example
        simulator(single, network)
    with pytest.raises(ValueError, match=r"one example at a time .*: training\.batch_size is 1, at least 2 are needed"):
        simulator(training=Training(batch_size=1))
    empty = replace(tiny_federation(), train_of=(*tiny_federation().train_of[:-1], torch.empty(0, dtype=torch.int64)))
    with pytest.raises(ValueError, match="client 5 has no training data"):
        simulator(empty)


# --- work, by hand ----------------------------------------------------------------------------------------------------

SIZES = [24, 26, 28, 30, 32, 34]
PARAMETERS = NUM_FEATURES * NUM_CLASSES + NUM_CLASSES


def work_of(name: str, training: Training = QUICK, **options: Any) -> dict[str, int]:
    method = make_method(name, {"num_clusters": 2, "scoring_examples": 30, **options})
    with simulator(factory=linear, training=training) as engine:
        *_, clients = one_round(method, engine, method.init(engine.begin(0)))
        return clients.work.as_dict()


def test_work_of_fedavg() -> None:
    vector = 2 * PARAMETERS  # parameters and the momentum that travels with them
    assert work_of("fedavg") == {
        "trainings": 6, "local_steps": 18, "scored_examples": 0, "exchanges": 1, "scalars_up": 0,
        "parameters_down": 6 * vector, "parameters_up": 6 * vector, "rejected": 0, "late": 0,
    }  # fmt: skip
    assert work_of("fedavg", replace(QUICK, momentum_state="fresh"))["parameters_up"] == 6 * PARAMETERS


def test_work_of_bcfl_g_is_one_exchange() -> None:
    belief = 3 * PARAMETERS  # mean, momentum, precision
    assert work_of("bcfl-g") == {
        "trainings": 6, "local_steps": 18, "scored_examples": 2 * sum(min(n, 30) for n in SIZES), "exchanges": 1,
        "scalars_up": 6, "parameters_down": 6 * 2 * belief, "parameters_up": 6 * belief, "rejected": 0, "late": 0,
    }  # fmt: skip


def test_work_of_bcfl_mh_counts_each_distinct_training_once() -> None:
    """From one start the second best association differs by one client: seven trainings, not twelve."""
    belief = 3 * PARAMETERS
    assert work_of("bcfl-mh-2", initial="same") == {
        "trainings": 7, "local_steps": 21, "scored_examples": 2 * sum(min(n, 30) for n in SIZES), "exchanges": 2,
        "scalars_up": 12, "parameters_down": 6 * 2 * PARAMETERS + 7 * belief, "parameters_up": 7 * belief,
        "rejected": 0, "late": 0,
    }  # fmt: skip


def test_work_of_warm_up_is_two_rounds_of_training() -> None:
    method = make_method("bcfl-g-w", {"num_clusters": 2})
    with simulator(factory=linear) as engine:
        clients = engine.begin(0)
        method.init(clients)
    assert (clients.work.trainings, clients.work.local_steps, clients.work.exchanges) == (6, 6 * 2 * 3, 1)


# --- momentum between rounds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["client", "belief"])
def test_carried_momentum_of_a_lone_client_is_one_long_training(state: str) -> None:
    data = from_arrays(client_data(1))
    training = replace(QUICK, momentum_state=state)
    with simulator(data, linear, training) as engine:
        found = run(FedAvg(), engine, 3).models.mean[0, :PARAMETERS]
        own, start = engine.clients[0].train, engine.begin(0).draw_model(0, 0)
        model = FlatModel(build(linear, 0))
        model.load(start)
        optimiser = torch.optim.SGD(model.module.parameters(), training.learning_rate, training.momentum)
        for index in (1, 2, 3):
            stream = torch.Generator().manual_seed(engine.clients[0]._stream("fit", index, 0).initial_seed())
            for rows in batches(len(own), training.batch_size, training.local_steps, stream):
                x, y = own.batch(rows)
                model.gradient.zero_()
                F.cross_entropy(model.module(x), y).backward()
                optimiser.step()
    assert torch.allclose(found, model.vector, atol=1e-6)


def test_momentum_of_a_belief_is_averaged_by_examples() -> None:
    with simulator(factory=linear) as engine:
        clients = engine.begin(1)
        start = clients.draw_model(0, 0)
        answers = list(clients.fit(flat(start[None]), Jobs(torch.zeros(6).long(), torch.arange(6))))
        new, _ = FedAvg().round(FedAvg().init(engine.begin(0)), engine.begin(1))
        expected = sum(n * answer.mean[PARAMETERS:] for n, answer in zip(SIZES, answers, strict=True)) / sum(SIZES)
        assert torch.allclose(new.models.mean[0, PARAMETERS:], expected, atol=1e-6)


def test_client_momentum_follows_the_beliefs_line_of_descent(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[dict[tuple[int, bytes], tuple[Tensor | None, Tensor]]] = []  # [round][client, start]
    fit = trainer.fit

    def recorded(network: Network, jobs: Sequence[Job]) -> list[Trained]:
        found = fit(network, jobs)
        for job, (_, velocity) in zip(jobs, found, strict=True):
            key = (int(job.examples.index[0]), job.start.numpy().tobytes())
            trained[-1][key] = (job.momentum, velocity.clone())
        return found

    monkeypatch.setattr("bcfl.client.client.fit", recorded)
    method = BCFL(num_clusters=2, max_hypotheses=3)
    with simulator(factory=linear, training=replace(QUICK, momentum_state="client")) as engine:
        state, descended = method.init(engine.begin(0)), 0
        before, parent_of = state, {}
        for index in range(1, 5):
            trained.append({})
            old, before, line = before, state, parent_of
            state, info = method.round(state, engine.begin(index))
            parent_of = {
                int(belief): int(before.model_of[info.parent[h], cluster])
                for h, row in enumerate(state.model_of)
                for cluster, belief in enumerate(row)
            }
            if index == 1:
                assert all(momentum is None for momentum, _ in trained[0].values())
                continue
            for (client, start), (momentum, _) in trained[-1].items():
                belief = next(b for b, mean in enumerate(before.models.mean) if mean.numpy().tobytes() == start)
                parent = old.models.mean[line[belief]].numpy().tobytes()
                assert momentum is not None
                if (client, parent) in trained[-2]:
                    assert torch.equal(momentum, trained[-2][client, parent][1])
                    descended += 1
    assert descended > 10


def test_a_client_that_trained_elsewhere_goes_on_with_its_last_belief_in_any_order() -> None:
    kept = {2: torch.tensor([2.0]), 10: torch.tensor([10.0])}
    for order in (kept, dict(reversed(kept.items()))):
        assert continued_momentum(order, 2).item() == 2
        assert continued_momentum(order, 5).item() == 10
    assert continued_momentum({}, 5) is None


def test_no_momentum_is_kept_unless_it_is_the_clients() -> None:
    for state, kept in (("fresh", 0), ("belief", 0), ("client", 6)):
        with simulator(factory=linear, training=replace(QUICK, momentum_state=state)) as engine:
            run(FedAvg(), engine, 1)
            assert len(engine.momentum) == kept


# --- evaluation mode --------------------------------------------------------------------------------------------------


def test_scores_are_those_of_the_whole_data_and_leave_the_models() -> None:
    with simulator() as engine:
        state = run(FedAvg(), engine, 2)
        models = state.models.mean.clone()
        scores = engine.begin(3).score(models)
        assert torch.equal(models, state.models.mean)
        module = FlatModel(build(network, 0))
        module.load(models[0])
        for c, own in enumerate(client_data()):
            with torch.no_grad():
                alone = sum(
                    -float(F.cross_entropy(module.module.eval()(x[None]), y[None]))
                    for x, y in zip(own[0], own[1], strict=True)
                )
            assert float(scores[c, 0]) == pytest.approx(alone, rel=1e-5)


def test_all_models_of_a_client_are_scored_on_the_same_examples() -> None:
    with simulator() as engine:
        clients = engine.begin(1)
        first, second = clients.draw_model(0, 0), clients.draw_model(0, 1)
        scores = clients.score(torch.stack([first, second, first]), max_examples=5)
        assert torch.equal(scores[:, 0], scores[:, 2])
        assert torch.equal(scores[:, 1], engine.begin(1).score(second[None], max_examples=5)[:, 0])
        assert not torch.equal(scores[:, 1], engine.begin(2).score(second[None], max_examples=5)[:, 0])


def test_a_client_without_test_data_is_not_evaluated() -> None:
    data = from_arrays([own if j else own[:2] for j, own in enumerate(client_data(3))])
    with simulator(data) as engine:
        state = run(FedAvg(), engine, 1)
        assert [e is None for e in engine.evaluate(*asked(state))] == [True, False, False]


def test_a_round_can_be_played_again() -> None:
    """Rounds are functions of state and index: what was played before leaves no trace (without client momentum)."""
    method = BCFL(num_clusters=2)
    with simulator() as engine:
        state = run(method, engine, 2)
        once, twice = (advance(method, engine, state, range(3, 5)) for _ in range(2))
    assert same(once, twice)


def test_the_server_computes_in_one_thread_while_workers_do_and_gives_the_others_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with simulator():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("value", "usable"),
    [(0.0, True), (-LARGEST, True), (1.1 * LARGEST, False), (-1e30, False), (math.inf, False), (math.nan, False)],
)
def test_an_answer_is_usable_if_every_number_is_finite_and_within_bounds(value: float, usable: bool) -> None:
    many = torch.full((100,), LARGEST / 2)  # whose squares' sum is beyond what a single one may be
    for others in (torch.zeros(100), many):
        mean = others.clone()
        mean[37] = value
        assert is_usable(Gaussian(mean, torch.ones(100))) == usable
        assert is_usable(Gaussian(mean, torch.ones(()).expand(100))) == usable
        if not value < 0:
            assert is_usable(Gaussian(torch.ones(100), mean)) == usable


def test_no_running_variance_may_be_below_zero() -> None:
    mean = torch.zeros(10)
    mean[7] = -1e-6
    answer = Gaussian(mean, torch.ones(10))
    assert is_usable(answer, [slice(0, 7)])
    assert not is_usable(answer, [slice(0, 2), slice(6, 10)])


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_the_caller_is_one_of_the_workers(num_workers: int) -> None:
    together = threading.Barrier(num_workers)  # nobody gets on until each worker has a task

    def worker(model: FlatModel) -> int:
        together.wait(timeout=60)
        return threading.get_ident()

    with simulator(num_workers=num_workers) as engine:
        seen = set(engine._workers.stream([worker] * num_workers))
    assert threading.get_ident() in seen
    assert len(seen) == num_workers


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_a_task_that_fails_does_so_in_its_turn_and_ends_the_stream(num_workers: int) -> None:
    played = []

    def task(i: int, model: FlatModel) -> int:
        played.append(i)
        if i == 2:
            raise ValueError("task 2 cannot be done")
        return i

    with simulator(num_workers=num_workers) as engine:
        answers = engine._workers.stream(partial(task, i) for i in range(100))
        assert [next(answers), next(answers)] == [0, 1]
        with pytest.raises(ValueError, match="task 2"):
            next(answers)
    assert len(played) < 20


def test_what_is_left_of_an_abandoned_stream_is_not_played() -> None:
    played = []

    def task(i: int, model: FlatModel) -> None:
        played.append(i)
        time.sleep(0.05)

    with simulator(num_workers=2) as engine:
        answers = engine._workers.stream(partial(task, i) for i in range(10))
        next(answers)
        answers.close()
        before = len(played)
        list(engine._workers.stream([lambda model: time.sleep(0.1)] * 4))  # what came before would be played before
    assert len(played) <= before + 1  # one may have been taken and not yet begun


@pytest.mark.parametrize("num_workers", [1, 2])
def test_what_the_caller_has_set_for_itself_does_not_reach_the_clients(num_workers: int) -> None:
    def told(model: FlatModel) -> tuple[int, bool, bool]:
        return torch.get_num_threads(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    with simulator(num_workers=num_workers) as engine:
        torch.set_num_threads(2)
        with torch.inference_mode():
            assert list(engine._workers.stream([told])) == [(1, True, False)]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_engine_can_be_closed_and_is_closed_by_with(num_workers: int) -> None:
    engine: Simulator
    with simulator(num_workers=num_workers) as engine:
        pass
    with pytest.raises(RuntimeError, match="shutdown"):
        list(engine._workers.stream([lambda model: None]))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_an_engine_that_is_closed_amid_its_tasks_says_so(num_workers: int) -> None:
    engine = simulator(num_workers=num_workers)
    answers = engine._workers.stream([lambda model: time.sleep(0.2)] * 5)  # as many as are offered at a time to two
    next(answers)
    engine.close()
    with pytest.raises(RuntimeError, match="shutdown"):
        list(answers)
