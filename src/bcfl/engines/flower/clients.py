"""The server's side of one round: scores and posteriors asked of the clients behind Flower's grid."""

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from flwr.app import Array, RecordDict
from torch import Tensor

from bcfl.engines.client import draw_model, is_usable
from bcfl.engines.flower.records import (
    DOUBLE,
    FIT,
    FLOAT,
    SCORE,
    arrays_of,
    finite,
    read_array,
    settings_of,
    to_array,
    whole_number,
)
from bcfl.federation import Choice, Jobs, Work, num_held_out
from bcfl.gaussian import Gaussian

if TYPE_CHECKING:
    from bcfl.engines.flower.engine import Ask, FlowerEngine

log = logging.getLogger("bcfl")


class FlowerClients:
    """The federation in one round; a client that does not answer a score leaves `present`, the tensor, in place."""

    def __init__(self, engine: "FlowerEngine", round_index: int):
        self.engine, self.round, self.seed = engine, round_index, engine.seed
        self.num_examples = engine.num_examples.clone()
        self.layout, self.local_steps = engine.layout, engine.training.local_steps
        self.num_parameters, self.num_last_layer = self.layout.num_parameters, self.layout.num_last_layer
        self.num_statistics = self.layout.num_statistics
        self.present, self.in_time = engine.participation.draw(engine.num_clients, engine.seed, round_index)
        drawn = int(self.present.sum())
        self.present &= torch.tensor([engine.online(client) for client in range(engine.num_clients)])
        engine.require(int(self.present.sum()), drawn, "the call", round_index)
        self.work = Work()

    def draw_model(self, *path: int) -> Tensor:
        return draw_model(self.engine.factory, self.layout, self.seed, *path)

    def score(self, models: Tensor, max_examples: int | None = None, held_out: float = 0.0) -> Tensor:
        return self._score("score", models, max_examples, held_out)

    def share_explained(self, models: Tensor, max_examples: int | None = None) -> Tensor:
        return self._score("share", models, max_examples)

    def _score(self, kind: str, models: Tensor, max_examples: int | None, held_out: float = 0.0) -> Tensor:
        clients = self._present_clients()
        scores = torch.full((len(self.present), len(models)), torch.nan, dtype=torch.float64)
        vectors = [to_array(model[: self.layout.num_evaluated]) for model in models]
        parts = list(torch.arange(len(models)).split(self._per_message(4 * self.layout.num_evaluated)))
        # The share of a model depends on all the others: each client must have had one part before the next.
        stages = [[part] for part in parts] if kind == "share" else [parts]
        for stage in stages:
            pairs = [(client, part) for client in clients for part in stage]
            asks = [self._score_ask(kind, client, part, vectors, max_examples, held_out) for client, part in pairs]

            def read(position: int, content: RecordDict, pairs: list[tuple[int, Tensor]] = pairs) -> Tensor:
                return _read_scores(kind, pairs[position][1], len(models), content)

            answered = set()
            for position, answer in self.engine.exchange(SCORE, self.round, asks, self.work, read):
                client, part = pairs[position]
                answered.add(position)
                scores[client, part if kind == "score" else slice(None)] = answer
            if kind == "share":
                clients = [client for i, (client, _) in enumerate(pairs) if i in answered]
        self.work.exchanges += 1
        self.work.parameters_down += int(self.present.sum()) * len(models) * self.layout.num_evaluated
        complete = ~scores.isnan().any(1)
        self.engine.require(int(complete.sum()), int(self.present.sum()), SCORE, self.round)
        self.present &= complete
        scores[~self.present] = torch.nan
        for client in self._present_clients():
            self._count_scored(client, len(models), max_examples, held_out)
            self.work.scalars_up += len(models)
        return scores

    def _score_ask(
        self, kind: str, client: int, part: Tensor, vectors: list[Array], max_examples: int | None, held_out: float
    ) -> "Ask":
        settings = {
            "kind": kind,
            "num-models": len(part),
            "first": int(part[0]),
            "total": len(vectors),
            "max-examples": -1 if max_examples is None else max_examples,
            "held-out": held_out,
        }
        return self.engine.ask(client, self.round, settings, {f"mean.{i}": vectors[m] for i, m in enumerate(part)})

    def fit(self, models: Gaussian, jobs: Jobs) -> Iterator[Gaussian | None]:
        beliefs, clients = jobs.belief.tolist(), jobs.client.tolist()
        sent = _BeliefArrays(models, self.num_parameters)
        jobs_of: dict[int, list[int]] = {}
        for job, client in enumerate(clients):
            if self.in_time[client] and self.engine.online(client):
                jobs_of.setdefault(client, []).append(job)
        per_message = self._per_message(8 * self.layout.length)
        shares = [own[i : i + per_message] for own in jobs_of.values() for i in range(0, len(own), per_message)]
        asks = []
        for share in shares:
            settings = self._fit_settings(
                "all",
                [beliefs[job] for job in share],
                [1.0 if jobs.strength is None else float(jobs.strength[job]) for job in share],
                sent,
                jobs,
            )
            arrays = {name: array for job in share for name, array in sent.of(beliefs[job]).items()}
            client = clients[share[0]]
            if jobs.start is not None:
                arrays["start"] = to_array(jobs.start[client])
            asks.append(self.engine.ask(client, self.round, settings, arrays, len(share)))

        def read(position: int, content: RecordDict) -> list[Gaussian | None]:
            client = clients[shares[position][0]]
            return [self._read_posterior(client, i, content, jobs) for i in range(len(shares[position]))]

        answers = self.engine.exchange(FIT, self.round, asks, self.work, read)
        self.work.exchanges += 1
        ready: dict[int, Gaussian | None] = {}
        answered = set()
        asked = {job for share in shares for job in share}
        for job, client in enumerate(clients):
            while job not in ready and (answer := next(answers, None)) is not None:
                ready.update(zip(shares[answer[0]], answer[1], strict=True))
                answered.add(asks[answer[0]].client)
            if job in asked:
                self.work.parameters_down += self.layout.numbers_sent(jobs.curvature) + (
                    0 if jobs.start is None else self.layout.length
                )
            elif not self.in_time[client]:
                self.work.late += 1
            if job in ready:
                self._count_trained(jobs.curvature, jobs.num_steps)
            yield ready.pop(job, None)
        self.engine.require(len(answered), len(jobs_of), FIT, self.round)

    def fit_best(
        self, models: Gaussian, strength: float, curvature: bool, max_examples: int | None
    ) -> Iterator[Choice]:
        if len(models) > self._per_message(8 * self.layout.length):
            yield from self._fit_best_in_two(models, strength, curvature, max_examples)
            return
        present = self._present_clients()
        clients = [client for client in present if self.in_time[client]]
        sent, everything = _BeliefArrays(models, self.num_parameters), list(range(len(models)))
        jobs = Jobs(torch.empty(0), torch.empty(0), curvature=curvature)
        power = float(torch.tensor(strength))  # single precision, as every engine has it
        settings = self._fit_settings("best", everything, [power] * len(models), sent, jobs, max_examples)
        arrays = {name: array for belief in everything for name, array in sent.of(belief).items()}
        asks = [self.engine.ask(client, self.round, settings, arrays) for client in clients]

        def read(position: int, content: RecordDict) -> Choice:
            best = whole_number(settings_of(content, "choice"), "choice", 0, len(models) - 1)
            return Choice(clients[position], best, self._read_posterior(clients[position], best, content, jobs))

        answers = self.engine.exchange(FIT, self.round, asks, self.work, read)
        self.work.exchanges += 1
        self.work.late += len(present) - len(clients)
        ready: dict[int, Choice] = {}
        num_answers = 0
        for position, client in enumerate(clients):  # in the order of the clients, so that sums repeat
            while position not in ready and (answer := next(answers, None)) is not None:
                ready[answer[0]] = answer[1]
                num_answers += 1
            self.work.parameters_down += len(models) * self.layout.numbers_sent(curvature)
            if position in ready:
                self._count_scored(client, len(models), max_examples)
                self._count_trained(curvature, None)
                self.work.scalars_up += 1
                yield ready.pop(position)
        self.engine.require(num_answers, len(clients), FIT, self.round)

    def _fit_best_in_two(
        self, models: Gaussian, strength: float, curvature: bool, max_examples: int | None
    ) -> Iterator[Choice]:
        """The same where the beliefs do not fit into one message: first the scores, then the best belief alone."""
        best = self.score(models.mean, max_examples).nan_to_num(-torch.inf).argmax(1)
        clients = self.present.nonzero()[:, 0]
        jobs = Jobs(best[clients], clients, torch.full((len(clients),), strength), curvature)
        for client, posterior in zip(clients.tolist(), self.fit(models, jobs), strict=True):
            if self.in_time[client]:
                yield Choice(client, int(best[client]), posterior)

    def _fit_settings(
        self,
        kind: str,
        beliefs: list[int],
        strengths: list[float],
        sent: "_BeliefArrays",
        jobs: Jobs,
        max_examples: int | None = None,
    ) -> dict[str, Any]:
        return {
            "kind": kind,
            "beliefs": beliefs,
            "parents": [b if jobs.parent_of is None else int(jobs.parent_of[b]) for b in beliefs],
            "strengths": strengths,
            "levels": [sent.level(belief) for belief in beliefs],
            "curvature": int(jobs.curvature),
            "num-steps": jobs.num_steps or -1,
            "max-examples": -1 if max_examples is None else max_examples,
            "held-out": jobs.held_out,
        }

    def _read_posterior(self, client: int, i: int, content: RecordDict, jobs: Jobs) -> Gaussian | None:
        """The i-th posterior of an answer; None if it is sound but not finite, as of a training that diverged."""
        own = self.num_examples[client]
        arrays, num_examples = arrays_of(content, "answer"), float(own - num_held_out(own, jobs.held_out))
        mean = read_array(arrays.get(f"mean.{i}"), (self.layout.length,), FLOAT, f"mean.{i}")
        if not jobs.curvature:  # the precision counts examples, which the server knows
            posterior = Gaussian(mean, torch.tensor(num_examples).expand(len(mean)))
        else:
            precision = torch.full_like(mean, num_examples)
            precision[: self.num_parameters] = read_array(
                arrays.get(f"precision.{i}"), (self.num_parameters,), FLOAT, f"precision.{i}"
            )
            posterior = Gaussian(mean, precision)  # refuses a negative precision
        if is_usable(posterior):
            return posterior
        self.work.rejected += 1
        log.warning("round %s, %s, client %s: a posterior that is not finite is left out", self.round, FIT, client)
        return None

    def _per_message(self, num_bytes: int) -> int:
        return max(1, self.engine.terms.message_bytes // num_bytes)

    def _present_clients(self) -> list[int]:
        return self.present.nonzero()[:, 0].tolist()

    def _count_scored(self, client: int, num_models: int, max_examples: int | None, held_out: float = 0.0) -> None:
        own = self.num_examples[client]
        num_examples = int(num_held_out(own, held_out) or own)
        self.work.scored_examples += num_models * min(num_examples, max_examples or num_examples)

    def _count_trained(self, curvature: bool, num_steps: int | None) -> None:
        self.work.trainings += 1
        self.work.local_steps += num_steps or self.local_steps
        self.work.parameters_up += self.layout.numbers_sent(curvature)


class _BeliefArrays:
    """The beliefs as they travel, each made once however many messages share it."""

    def __init__(self, models: Gaussian, num_parameters: int):
        self._models, self._num_parameters = models, num_parameters
        self._made: dict[int, tuple[float, dict[str, Array]]] = {}

    def level(self, belief: int) -> float:
        """The precision of all parameters where it is one number; −1 where it is not and travels as an array."""
        return self._get(belief)[0]

    def of(self, belief: int) -> dict[str, Array]:
        return self._get(belief)[1]

    def _get(self, belief: int) -> tuple[float, dict[str, Array]]:
        if belief not in self._made:
            precision = self._models.precision[belief, : self._num_parameters]
            low, high = precision.aminmax()
            arrays = {f"mean.{belief}": to_array(self._models.mean[belief])}
            if low != high:
                arrays[f"precision.{belief}"] = to_array(precision)
            self._made[belief] = (float(low) if low == high else -1.0, arrays)
        return self._made[belief]


def _read_scores(kind: str, part: Tensor, num_models: int, content: RecordDict) -> Tensor:
    """A row of scores: log-likelihoods of discrete labels, so none is above 0; or shares, which sum to one."""
    arrays = arrays_of(content, "answer")
    if kind == "share":
        if int(part[-1]) + 1 < num_models:
            return torch.full((num_models,), torch.nan, dtype=torch.float64)  # the last part brings the shares
        share = finite(read_array(arrays.get("scores"), (num_models,), DOUBLE, "scores"), "scores")
        if float(share.min()) < 0 or abs(float(share.sum()) - 1) > 1e-6:
            raise ValueError("shares must be ≥ 0 and sum to one")
        return share
    scores = finite(read_array(arrays.get("scores"), (len(part),), DOUBLE, "scores"), "scores")
    if float(scores.max()) > 0:
        raise ValueError("log-likelihoods must be ≤ 0")
    return scores
