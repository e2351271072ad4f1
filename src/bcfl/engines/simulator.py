"""Many clients on one machine: distinct jobs only, in threads or stacked on a device, the same answers either way."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, islice
from typing import TypeVar

import torch
from torch import Tensor

from bcfl.belief.gaussian import Gaussian
from bcfl.belief.heads import Asked, Heads
from bcfl.client.check import check_model
from bcfl.client.client import (
    LocalClient,
    Order,
    Scoring,
    among,
    choices,
    continued_momentum,
    draw_model,
    evaluations,
    is_usable,
    layout_of,
    looks,
    posteriors,
    scores,
    wanted_models,
)
from bcfl.client.examples import Examples, pool
from bcfl.client.head import answers, evaluations_by_heads, examples_seen, head_layout, is_sound
from bcfl.client.score import Summary, share_explained, total_log_likelihood
from bcfl.client.together import Together
from bcfl.client.trainer import Network, Training, alone
from bcfl.data.lazy import Held, LazyClients
from bcfl.data.partition import FederatedData
from bcfl.engines.crew import Crowd, crew_for
from bcfl.engines.heap import give_back_memory, keep_blocks, keep_freed_memory
from bcfl.engines.participation import Participation
from bcfl.engines.workers import Workers
from bcfl.federation import Choice, Jobs, Mixture, Work
from bcfl.likelihood.measures import Evaluation
from bcfl.model.flat import FlatModel, ModelFactory, SharedModels, build

A = TypeVar("A")
T = TypeVar("T")
Places = Sequence[LocalClient] | dict[int, LocalClient]  # clients by their places
OPENED = 10_000  # clients whose data are open at a time, where all are tested


class Simulator:
    """All clients' data and who computes for them; `begin(round)` gives the federation as a method sees it then."""

    def __init__(
        self,
        factory: ModelFactory,
        data: Held,
        training: Training,
        seed: int,
        participation: Participation | None = None,
        num_workers: int | None = None,
        device: str = "cpu",
        together: Together = None,
        hire: Callable[[int | None], Crowd] | None = None,
    ):
        """`hire` finds others to compute, so many of them if that is said; without it workers are threads here."""
        keep_freed_memory(factory)
        self.factory, self.training, self.seed = factory, training, seed
        self.participation = participation or Participation()
        self._lazy = data if isinstance(data, LazyClients) else None
        known = data.sample if isinstance(data, LazyClients) else data  # of lazy clients the first ones
        train, test = examples_of(known)
        self.num_examples = data.num_examples.double()
        if not self.num_examples.all():
            raise ValueError(f"client {int((self.num_examples == 0).nonzero()[0])} has no training data")
        probe = FlatModel(build(factory, seed, "probe"))
        self.num_classes, draws_globally = check_model(
            probe, min(train, key=len), known.num_classes, batch_size=training.batch_size
        )
        self.layout, self.head = layout_of(probe, training), head_layout(probe)
        keep_blocks(self.layout.length * probe.vector.element_size())
        shown = [max(train, key=len), test[0]]
        crew = crew_for(
            probe, shown, training, draws_globally, device, together, lambda: FlatModel(build(factory, seed, "probe"))
        )
        self._away = hire is not None  # the data of clients that are opened when asked are opened elsewhere
        if hire is not None:
            self._workers: Crowd = hire(1 if draws_globally else num_workers)
        else:
            count = (num_workers or os.cpu_count() or 1) if crew.several and not draws_globally else 1
            self._workers = Workers(count, crew.network or partial(alone, factory, seed))
        self.num_workers = self._workers.count
        self.at_a_time = crew.at_a_time
        self._draws_globally = draws_globally
        # All of them or, of those that are opened when asked, the ones of the last round.
        everybody = [] if self._lazy else list(self._clients(range(len(train)), train, test).values())
        self.clients: Places = {} if self._lazy else everybody
        self.drift = data.drift
        if data.drift is not None:  # the same clients once their data have changed
            sources = zip(everybody, data.drift.source.tolist(), strict=True)
            self._later = [replace(own, train=train[s], test=test[s], holder=s) for own, s in sources]
        # client -> belief -> the momentum that the client keeps of it: only for momentum_state = "client".
        self.momentum: dict[int, dict[int, Tensor]] = {}
        # The server's own sums, spread over the cores, would fight the workers and depend on how many cores there are.
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(1)

    def close(self) -> None:
        self._workers.close()
        give_back_memory()
        torch.set_num_threads(self._threads_before)

    def __enter__(self) -> "Simulator":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_clients(self) -> int:
        return len(self.num_examples)

    def _clients(
        self, places: Sequence[int], train: Sequence[Examples], test: Sequence[Examples]
    ) -> dict[int, LocalClient]:
        held = zip(places, train, test, strict=True)
        return {
            place: LocalClient(place, own, tested, self.training, self.seed, self._draws_globally)
            for place, own, tested in held
        }

    def clients_in(self, round_index: int, wanted: Sequence[int]) -> Places:
        """The wanted clients, and perhaps others, with the data that they hold in that round."""
        if self._lazy is not None:
            if self._away:
                return {client: self._stub(client) for client in wanted}
            if not set(wanted) <= set(self.clients):
                self.clients = {}  # first: what both hold together may be too much
                self.clients = self._clients(wanted, *examples_of(self._lazy.open(wanted)))
            return self.clients
        return self.clients if self.drift is None or round_index < self.drift.round else self._later

    def _stub(self, client: int) -> LocalClient:
        """A client of whom is known how many examples it has."""
        rows = torch.zeros(1, dtype=torch.int64).expand(int(self.num_examples[client]))
        unknown = Examples(torch.empty(0), torch.empty(0), rows, images=False)
        return LocalClient(client, unknown, unknown, self.training, self.seed, self._draws_globally)

    def num_examples_in(self, round_index: int) -> Tensor:
        """How many training examples each client has in that round."""  # (client,)
        changed = self.drift is not None and round_index >= self.drift.round
        return self.num_examples[self.drift.source] if self.drift is not None and changed else self.num_examples

    def begin(self, round_index: int) -> "SimulatedClients":
        return SimulatedClients(self, round_index)

    def ask(self, task: Callable[[list[A], Network], list[T]], asked: Iterable[A]) -> Iterator[T]:
        """The answers to all that is asked, in its order; only a few are ever ahead, so that memory stays bounded."""
        rest = iter(asked)
        groups = iter(lambda: list(islice(rest, self.at_a_time)), [])
        return chain.from_iterable(self._workers.stream(partial(task, group) for group in groups))

    def play(self, tasks: Iterable[Callable[[Network], T]]) -> Iterator[T]:
        """The results of whole tasks, in their order."""
        return self._workers.stream(tasks)

    def evaluate(
        self, models: Tensor, mixtures: Sequence[Mixture], round_index: int = 0, who: Tensor | None = None
    ) -> list[Evaluation | None]:
        """Each client's mixture of models on the test data that it holds in that round.

        None for a client without any, that is not there yet, or is none of those who are to be tested.
        """
        tested = self.participation.joined(self.num_clients, round_index)
        places = (tested if who is None else tested & who).nonzero()[:, 0].tolist()
        found: list[Evaluation | None] = [None] * self.num_clients
        size = OPENED if self._lazy else max(len(places), 1)
        rows = list(models)  # so that who shares a model shares its tensor
        for first in range(0, len(places), size):
            some = places[first : first + size]
            clients = self.clients_in(round_index, some)
            asked = ((clients[c], [rows[m] for m in mixtures[c]], log_shares(mixtures[c])) for c in some)
            for client, evaluation in zip(some, self.ask(partial(evaluations, self.num_classes), asked), strict=True):
                found[client] = evaluation
        return found

    def evaluate_heads(self, heads: Heads, round_index: int = 0, who: Tensor | None = None) -> list[Evaluation | None]:
        """Each client's own last layers on the test data that it holds in that round; None as in `evaluate`."""
        assert self.head is not None  # without one there are no heads
        tested = self.participation.joined(self.num_clients, round_index)
        places = (tested if who is None else tested & who).nonzero()[:, 0].tolist()
        found: list[Evaluation | None] = [None] * self.num_clients
        size = OPENED if self._lazy else max(len(places), 1)
        for first in range(0, len(places), size):
            some = places[first : first + size]
            clients = self.clients_in(round_index, some)
            task = partial(evaluations_by_heads, heads, self.head, self.num_classes)
            for client, evaluation in zip(some, self.ask(task, [clients[c] for c in some]), strict=True):
                found[client] = evaluation
        return found


def examples_of(data: FederatedData) -> tuple[list[Examples], list[Examples]]:
    """Each client's training and test examples, in pools that all share."""
    (x_train, images), (x_test, _) = pool(data.x_train), pool(data.x_test)
    train = [Examples(x_train, data.y_train, index, images) for index in data.train_of]
    return train, [Examples(x_test, data.y_test, index, images) for index in data.test_of]


def log_shares(mixture: Mixture) -> Tensor:
    return torch.tensor(list(mixture.values()), dtype=torch.float64).log()


class SimulatedClients:
    """The federation in one round; counts the work that it is asked for."""

    def __init__(self, engine: Simulator, round_index: int):
        self.engine, self.round, self.seed = engine, round_index, engine.seed
        self.num_examples = engine.num_examples_in(round_index)
        self.layout, self.local_steps = engine.layout, engine.training.local_steps
        self.num_parameters, self.num_last_layer = self.layout.num_parameters, self.layout.num_last_layer
        self.num_evaluated, self.head = self.layout.num_evaluated, engine.head
        self.present, self.in_time = engine.participation.draw(engine.num_clients, engine.seed, round_index)
        self.work = Work()
        self._momentum_before, engine.momentum = engine.momentum, dict(engine.momentum)

    @cached_property
    def clients(self) -> Places:
        """Those who are present, by their places."""
        return self.engine.clients_in(self.round, self._present_clients())

    def draw_model(self, *path: int) -> Tensor:
        return draw_model(self.engine.factory, self.layout, self.seed, *path)

    def score(
        self,
        models: Tensor,
        max_examples: int | None = None,
        held_out: float = 0.0,
        *,
        wanted: Tensor | None = None,
    ) -> Tensor:
        return self._score(models, Scoring(self.round, max_examples, held_out), total_log_likelihood, wanted)

    def share_explained(self, models: Tensor, max_examples: int | None = None) -> Tensor:
        return self._score(models, Scoring(self.round, max_examples), share_explained)

    def _score(self, models: Tensor, scoring: Scoring, summary: Summary, wanted: Tensor | None = None) -> Tensor:
        found = torch.full((len(self.present), len(models)), torch.nan, dtype=torch.float64)
        shared, every = SharedModels.of(models), torch.ones(1, dtype=torch.bool).expand(found.shape)
        places_of = wanted_models(self.present, every if wanted is None else wanted)
        asked = [(self.clients[client], shared if wanted is None else shared.only(places.tolist()))
                 for client, places in places_of.items()]  # fmt: skip
        answers = self.engine.ask(partial(scores, scoring, summary), asked)
        for (client, places), row in zip(places_of.items(), answers, strict=True):
            found[client, places] = row
            num_scored = self.clients[client].num_scored(scoring.max_examples, scoring.held_out)
            self.work.count_scored(len(places) * num_scored)
            self.work.scalars_up += len(places)
        self._count_asked(sum(map(len, places_of.values())))
        return found

    def look(
        self, models: Tensor, max_examples: int | None, wanted: Tensor, first: int, last: int
    ) -> tuple[Tensor, Tensor]:
        shared, scoring = SharedModels.of(models), Scoring(self.round, max_examples, part=(first, last))
        mean = torch.full((len(self.present), len(models)), torch.nan, dtype=torch.float64)
        covariance = torch.full((*mean.shape, len(models)), torch.nan, dtype=torch.float64)
        of_client = wanted_models(self.present, wanted)
        asked = [(self.clients[client], shared.only(places.tolist())) for client, places in of_client.items()]
        for (client, places), answer in zip(
            of_client.items(), self.engine.ask(partial(looks, scoring), asked), strict=True
        ):
            mean[client], covariance[client] = among(len(models), places, *answer)
            self.work.count_look(len(places), len(models), first, last, self.clients[client].num_scored(max_examples))
        self._count_asked(sum(map(len, of_client.values())))
        return mean, covariance

    def last_layer(self, asked: Asked, heads: Heads) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
        assert self.head is not None  # the method has seen to it
        clients = [self.clients[client] for client in self._present_clients()]
        told = self.engine.ask(partial(answers, asked, heads, self.head), clients)
        self._count_asked(len(clients) * len(heads.models))
        for client, answer in zip(clients, told, strict=True):
            self.work.count_scored(examples_seen(asked, heads, len(client.train)))
            self.work.parameters_down += 0 if asked == "sums" else heads.mean.numel() + heads.variance.numel()
            self.work.scalars_up += sum(part.numel() for part in answer.values())
            if is_sound(answer):
                yield client.index, answer
            else:
                self.work.rejected += 1

    def _count_asked(self, num_models: int) -> None:
        self.work.exchanges += num_models > 0
        self.work.parameters_down += num_models * self.layout.num_evaluated

    def fit(self, models: Gaussian, jobs: Jobs) -> Iterator[Gaussian | None]:
        pairs = list(zip(jobs.belief.tolist(), jobs.client.tolist(), strict=True))
        asked = (
            (self.clients[client], models[belief], self._order(jobs, client, belief, i))
            for i, (belief, client) in enumerate(pairs)
            if self.in_time[client]
        )
        answers = self.engine.ask(posteriors, asked)
        self.work.exchanges += 1
        for belief, client in pairs:
            if not self.in_time[client]:
                self.work.late += 1
                yield None
                continue
            self.work.parameters_down += self.layout.numbers_sent(jobs.curvature) + (
                0 if jobs.start is None else models.mean.shape[1]
            )
            yield self._received(client, belief, jobs, *next(answers))

    def fit_best(
        self, models: Gaussian, strength: float, curvature: bool, max_examples: int | None, racing: float = 0.0
    ) -> Iterator[Choice]:
        jobs = Jobs(torch.empty(0), torch.empty(0), strength=torch.tensor([strength]), curvature=curvature)
        clients = self._present_clients()
        in_time = [client for client in clients if self.in_time[client]]
        self.work.exchanges += 1
        self.work.late += len(clients) - len(in_time)
        asked = ((self.clients[c], [self._order(jobs, c, belief, 0) for belief in range(len(models))]) for c in in_time)
        scoring = Scoring(self.round, max_examples)
        answers = self.engine.ask(partial(choices, models, SharedModels.of(models.mean), scoring, racing), asked)
        for client, (best, num_scored, answer) in zip(in_time, answers, strict=True):
            in_full = len(models) * self.clients[client].num_scored(max_examples)
            self.work.count_scored(num_scored, in_full if racing else None)
            self.work.scalars_up += 1
            self.work.parameters_down += len(models) * self.layout.numbers_sent(curvature)
            yield Choice(client, best, self._received(client, best, jobs, *answer))

    def _present_clients(self) -> list[int]:
        return self.present.nonzero()[:, 0].tolist()

    def _order(self, jobs: Jobs, client: int, belief: int, job: int) -> Order:
        parent = belief if jobs.parent_of is None else int(jobs.parent_of[belief])
        return Order(
            self.round,
            1.0 if jobs.strength is None else float(jobs.strength[job]),
            jobs.curvature,
            None if jobs.start is None else jobs.start[client],
            jobs.num_steps,
            continued_momentum(self._momentum_before.get(client, {}), parent),
            jobs.held_out,
        )

    def _received(self, client: int, belief: int, jobs: Jobs, posterior: Gaussian, momentum: Tensor) -> Gaussian | None:
        self.work.trainings += 1
        training, held = self.engine.training, len(self.clients[client].train)
        self.work.local_steps += jobs.num_steps or training.steps_of(held)
        self.work.parameters_up += self.layout.numbers_sent(jobs.curvature)
        if not is_usable(posterior, self.layout.variances):
            self.work.rejected += 1
            return None
        if self.engine.training.momentum_state == "client":
            if self.engine.momentum.get(client) is self._momentum_before.get(client):
                self.engine.momentum[client] = {}
            self.engine.momentum[client][belief] = momentum
        return posterior
