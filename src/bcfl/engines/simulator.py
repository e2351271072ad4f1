"""Many clients on one machine: persistent one-thread workers, distinct jobs only, the same bits for any number of them.

Workers are threads: torch lets go of the interpreter while it computes, so they scale like processes for real
networks, and a model may be any callable of the user's, a lambda in a notebook included. One job runs in one worker
from beginning to end and results are handed out in the order of the jobs, so nothing depends on how many there are.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from bcfl import local
from bcfl.data.partition import FederatedData
from bcfl.engines.client import LocalClient, continued_momentum, draw_model, is_usable, layout_of
from bcfl.federation import Choice, Jobs, Mixture, Work
from bcfl.gaussian import Gaussian
from bcfl.local import Evaluation, Examples, Training
from bcfl.models import FlatModel, ModelFactory, build
from bcfl.randomness import numpy_generator

T = TypeVar("T")


@dataclass(frozen=True)
class Participation:
    """Who takes part in a round, who vanishes and who is late; all of it drawn from the run's seed."""

    clients_per_round: float = 1.0  # up to 1: a share of all clients; above: their number
    dropout: float = 0.0  # probability that a chosen client vanishes before it answers anything
    straggling: float = 0.0  # probability that a client answers a score in time, but not a fit
    joins: tuple[tuple[int, int], ...] = ()  # (client, the first round it can take part in); all others from the start

    def joined(self, num_clients: int, round_index: int) -> Tensor:
        """Who belongs to the federation by that round."""  # (client,) bool
        joined = torch.ones(num_clients, dtype=torch.bool)
        for client, first_round in self.joins:
            joined[client] = round_index >= first_round
        return joined

    def draw(self, num_clients: int, seed: int, round_index: int) -> tuple[Tensor, Tensor]:
        """Who is present and who is in time for the fit; at least one client is present."""  # (client,) bool each
        random = numpy_generator(seed, "participation", round_index)
        share, joined = self.clients_per_round, self.joined(num_clients, round_index)
        num_joined = int(joined.sum())
        count = round(share * num_joined) if share <= 1 else int(share)
        present = torch.zeros(num_clients, dtype=torch.bool)
        order = random.permutation(num_clients)
        chosen = order[joined.numpy()[order]][: min(max(count, 1), num_joined)]
        vanished = random.random(len(chosen)) < self.dropout
        vanished[0] &= not vanished.all()  # a round needs somebody
        present[chosen[~vanished]] = True
        in_time = torch.from_numpy(random.random(num_clients) >= self.straggling)
        return present, in_time


class Simulator:
    """All clients' data and the workers; `begin(round)` gives the federation as a method sees it in that round."""

    def __init__(
        self,
        factory: ModelFactory,
        data: FederatedData,
        training: Training,
        seed: int,
        participation: Participation | None = None,
        num_workers: int | None = None,
    ):
        self.factory, self.training, self.seed = factory, training, seed
        self.participation = participation or Participation()
        (x_train, images), (x_test, _) = local.pool(data.x_train), local.pool(data.x_test)
        train = [Examples(x_train, data.y_train, index, images) for index in data.train_of]
        test = [Examples(x_test, data.y_test, index, images) for index in data.test_of]
        self.num_examples = torch.tensor([len(own) for own in train], dtype=torch.float64)
        if not self.num_examples.all():
            raise ValueError(f"client {int((self.num_examples == 0).nonzero()[0])} has no training data")
        probe = FlatModel(build(factory, seed, "probe"))
        self.num_classes, draws_globally = local.check_model(probe, min(train, key=len), data.num_classes)
        self.layout = layout_of(probe, training)
        self.clients = [
            LocalClient(c, *own, training, seed, draws_globally) for c, own in enumerate(zip(train, test, strict=True))
        ]
        self.num_workers = 1 if draws_globally else (num_workers or os.cpu_count() or 1)
        # client -> belief -> the momentum that the client keeps of it: only for momentum_state = "client".
        self.momentum: dict[int, dict[int, Tensor]] = {}
        self._joined = self.participation.joined(len(train), 0)  # by the round that was begun last
        self._thread = threading.local()
        self._workers = ThreadPoolExecutor(self.num_workers, "bcfl-worker", initializer=self._start_worker)
        # The server's own sums, spread over the cores, would fight the workers and depend on how many cores there are.
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(1)

    def _start_worker(self) -> None:
        torch.set_num_threads(1)
        self._thread.model = FlatModel(build(self.factory, self.seed, "probe"))

    def close(self) -> None:
        self._workers.shutdown(cancel_futures=True)
        torch.set_num_threads(self._threads_before)

    def __enter__(self) -> "Simulator":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_clients(self) -> int:
        return len(self.clients)

    def begin(self, round_index: int) -> "SimulatedClients":
        self._joined = self.participation.joined(self.num_clients, round_index)
        return SimulatedClients(self, round_index)

    def run(self, task: Callable[[FlatModel], T]) -> "Future[T]":
        return self._workers.submit(lambda: task(self._thread.model))

    def stream(self, tasks: Iterable[Callable[[FlatModel], T]]) -> Iterator[T]:
        """The results of the tasks, in their order; only a few are ever ahead, so that memory stays bounded."""
        waiting: deque[Future[T]] = deque()
        for task in tasks:
            waiting.append(self.run(task))
            if len(waiting) > 2 * self.num_workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def evaluate(self, models: Tensor, mixtures: Sequence[Mixture]) -> list[Evaluation | None]:
        """Each client's mixture of models on its own test data; None for a client without any, or not there yet."""

        def task(client: LocalClient, mixture: Mixture) -> Callable[[FlatModel], Evaluation | None]:
            if not self._joined[client.index]:
                return lambda model: None
            log_weight = torch.tensor(list(mixture.values()), dtype=torch.float64).log()
            return lambda model: client.evaluate(model, models[list(mixture)], log_weight, self.num_classes)

        return list(self.stream(task(client, mix) for client, mix in zip(self.clients, mixtures, strict=True)))


class SimulatedClients:
    """The federation in one round; counts the work that it is asked for."""

    def __init__(self, engine: Simulator, round_index: int):
        self.engine, self.round, self.seed = engine, round_index, engine.seed
        self.num_examples = engine.num_examples
        self.layout, self.local_steps = engine.layout, engine.training.local_steps
        self.num_parameters, self.num_last_layer = self.layout.num_parameters, self.layout.num_last_layer
        self.num_statistics = self.layout.num_statistics
        self.present, self.in_time = engine.participation.draw(engine.num_clients, engine.seed, round_index)
        self.work = Work()
        self._momentum_before, engine.momentum = engine.momentum, dict(engine.momentum)

    def draw_model(self, *path: int) -> Tensor:
        return draw_model(self.engine.factory, self.layout, self.seed, *path)

    def score(self, models: Tensor, max_examples: int | None = None) -> Tensor:
        return self._score(models, max_examples, local.total_log_likelihood)

    def share_explained(self, models: Tensor, max_examples: int | None = None) -> Tensor:
        return self._score(models, max_examples, local.share_explained)

    def _score(self, models: Tensor, max_examples: int | None, summary: local.Summary) -> Tensor:
        clients = self._present_clients()
        tasks = (
            partial(self._scores_of, c, models=models, max_examples=max_examples, summary=summary) for c in clients
        )
        scores = torch.full((len(self.present), len(models)), torch.nan, dtype=torch.float64)
        for client, row in zip(clients, self.engine.stream(tasks), strict=True):
            scores[client] = row
            self._count_scored(client, len(models), max_examples)
        self.work.exchanges += 1
        self.work.scalars_up += len(clients) * len(models)
        self.work.parameters_down += len(clients) * len(models) * self.layout.num_evaluated
        return scores

    def fit(self, models: Gaussian, jobs: Jobs) -> Iterator[Gaussian | None]:
        pairs = zip(jobs.belief.tolist(), jobs.client.tolist(), strict=True)
        in_time = [(i, belief, client) for i, (belief, client) in enumerate(pairs) if self.in_time[client]]
        tasks = (partial(self._posterior_of, client, belief, models, jobs, i) for i, belief, client in in_time)
        results = self.engine.stream(tasks)
        self.work.exchanges += 1
        for client, belief in zip(jobs.client.tolist(), jobs.belief.tolist(), strict=True):
            if not self.in_time[client]:
                self.work.late += 1
                yield None
                continue
            self.work.parameters_down += self.layout.numbers_sent(jobs.curvature) + (
                0 if jobs.start is None else models.mean.shape[1]
            )
            yield self._received(client, belief, jobs, *next(results))

    def fit_best(
        self, models: Gaussian, strength: float, curvature: bool, max_examples: int | None
    ) -> Iterator[Choice]:
        def task(client: int, model: FlatModel) -> tuple[int, tuple[Gaussian, Tensor]]:
            scores = self._scores_of(client, model, models.mean, max_examples, local.total_log_likelihood)
            best = int(scores.argmax())
            return best, self._posterior_of(client, best, models, jobs, 0, model)

        jobs = Jobs(torch.empty(0), torch.empty(0), strength=torch.tensor([strength]), curvature=curvature)
        clients = self._present_clients()
        in_time = [client for client in clients if self.in_time[client]]
        self.work.exchanges += 1
        self.work.late += len(clients) - len(in_time)
        for client, (best, answer) in zip(in_time, self.engine.stream(partial(task, c) for c in in_time), strict=True):
            self._count_scored(client, len(models), max_examples)
            self.work.scalars_up += 1
            self.work.parameters_down += len(models) * self.layout.numbers_sent(curvature)
            yield Choice(client, best, self._received(client, best, jobs, *answer))

    def _present_clients(self) -> list[int]:
        return self.present.nonzero()[:, 0].tolist()

    def _scores_of(
        self, client: int, model: FlatModel, models: Tensor, max_examples: int | None, summary: local.Summary
    ) -> Tensor:
        return self.engine.clients[client].score(model, models, self.round, max_examples, summary)

    def _posterior_of(
        self, client: int, belief: int, models: Gaussian, jobs: Jobs, job: int, model: FlatModel
    ) -> tuple[Gaussian, Tensor]:
        parent = belief if jobs.parent_of is None else int(jobs.parent_of[belief])
        return self.engine.clients[client].fit(
            model,
            models[belief],
            self.round,
            strength=1.0 if jobs.strength is None else float(jobs.strength[job]),
            curvature=jobs.curvature,
            start=None if jobs.start is None else jobs.start[client],
            num_steps=jobs.num_steps,
            momentum=continued_momentum(self._momentum_before.get(client, {}), parent),
        )

    def _received(self, client: int, belief: int, jobs: Jobs, posterior: Gaussian, momentum: Tensor) -> Gaussian | None:
        self.work.trainings += 1
        self.work.local_steps += jobs.num_steps or self.local_steps
        self.work.parameters_up += self.layout.numbers_sent(jobs.curvature)
        if not is_usable(posterior):
            self.work.rejected += 1
            return None
        if self.engine.training.momentum_state == "client":
            if self.engine.momentum.get(client) is self._momentum_before.get(client):
                self.engine.momentum[client] = {}
            self.engine.momentum[client][belief] = momentum
        return posterior

    def _count_scored(self, client: int, num_models: int, max_examples: int | None) -> None:
        num_examples = len(self.engine.clients[client].train)
        self.work.scored_examples += num_models * min(num_examples, max_examples or num_examples)
