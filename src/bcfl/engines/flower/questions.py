"""The server's side of one round: scores and posteriors asked of the clients behind Flower's grid."""

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from flwr.app import Array, RecordDict
from torch import Tensor

from bcfl.belief.gaussian import Gaussian
from bcfl.client import trainer as local
from bcfl.client.client import among, draw_model, is_usable, wanted_models
from bcfl.engines.flower.wire import (
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

if TYPE_CHECKING:
    from bcfl.engines.flower.server import Ask, FlowerEngine

log = logging.getLogger("bcfl")


class FlowerClients:
    """The federation in one round; a client that does not answer a score leaves `present`, the tensor, in place."""

    def __init__(self, engine: "FlowerEngine", round_index: int):
        self.engine, self.round, self.seed = engine, round_index, engine.seed
        sizes = [engine.sizes_in(client, round_index).num_train for client in range(engine.num_clients)]
        self.num_examples = torch.tensor(sizes, dtype=torch.float64)  # 0: not met yet
        self.layout, self.local_steps = engine.layout, engine.training.local_steps
        self.num_parameters, self.num_last_layer = self.layout.num_parameters, self.layout.num_last_layer
        self.num_evaluated = self.layout.num_evaluated
        self.present, self.in_time = engine.participation.draw(engine.num_clients, engine.seed, round_index)
        drawn = int(self.present.sum())
        self.present &= torch.tensor([engine.online(client) for client in range(engine.num_clients)])
        engine.require(int(self.present.sum()), drawn, "the call", round_index)
        self.work = Work()

    def draw_model(self, *path: int) -> Tensor:
        return draw_model(self.engine.factory, self.layout, self.seed, *path)

    def score(
        self,
        models: Tensor,
        max_examples: int | None = None,
        held_out: float = 0.0,
    ) -> Tensor:
        own_of = self._all_models(models)
        scores = torch.full((len(self.present), len(models)), torch.nan, dtype=torch.float64)
        settings = {"kind": "score", "max-examples": _or_all(max_examples), "held-out": held_out}
        for client, part, (row,) in self._scored(models, own_of, settings, in_order=False):
            scores[client, part] = row
        self._part_with({client for client, own in own_of.items() if scores[client, own].isnan().any()}, own_of)
        scores[~self.present] = torch.nan
        for client in self._present_clients():
            self.work.count_scored(len(models) * self._num_scored(client, max_examples, held_out))
            self.work.scalars_up += len(models)
        return scores

    def share_explained(self, models: Tensor, max_examples: int | None = None) -> Tensor:
        own_of = self._all_models(models)
        shares = torch.full((len(self.present), len(models)), torch.nan, dtype=torch.float64)
        settings = {"kind": "share", "max-examples": _or_all(max_examples)}
        for client, _, (row,) in self._scored(models, own_of, settings, in_order=True):
            shares[client] = row
        self._part_with({client for client in own_of if shares[client].isnan().any()}, own_of)
        for client in self._present_clients():
            self.work.count_scored(len(models) * self._num_scored(client, max_examples))
            self.work.scalars_up += len(models)
        return shares

    def look(
        self, models: Tensor, max_examples: int | None, wanted: Tensor, first: int, last: int
    ) -> tuple[Tensor, Tensor]:
        own_of = wanted_models(self.present, wanted)
        mean = torch.full((len(self.present), len(models)), torch.nan, dtype=torch.float64)
        covariance = torch.full((*mean.shape, len(models)), torch.nan, dtype=torch.float64)
        settings = {"kind": "look", "max-examples": _or_all(max_examples), "from": first, "to": last}
        for client, _, answer in self._scored(models, own_of, settings, in_order=True):
            mean[client], covariance[client] = among(len(models), own_of[client], *answer)
        self._part_with({client for client, own in own_of.items() if mean[client, own].isnan().any()}, own_of)
        for client in own_of.keys() & set(self._present_clients()):
            num_scored = self._num_scored(client, max_examples)
            self.work.count_look(len(own_of[client]), len(models), first, last, num_scored)
        return mean, covariance

    def _all_models(self, models: Tensor) -> dict[int, Tensor]:
        return dict.fromkeys(self._present_clients(), torch.arange(len(models)))

    def _scored(
        self, models: Tensor, own_of: dict[int, Tensor], settings: dict[str, Any], in_order: bool
    ) -> Iterator[tuple[int, Tensor, tuple[Tensor, ...]]]:
        """The answers of the clients about their own models, which come in several messages if they are large.

        Where an answer depends on all of a client's models, they are sent `in_order`: a client must have had one part
        before the next, and the answer to its last part is the answer.
        """
        vectors = {m: to_array(models[m, : self.layout.num_evaluated]) for own in own_of.values() for m in own.tolist()}
        size = self._per_message(4 * self.layout.num_evaluated)
        parts_of = {client: list(own.split(size)) for client, own in own_of.items()}
        num_stages = max((len(parts) for parts in parts_of.values()), default=0) if in_order else 1
        failed: set[int] = set()
        for stage in range(num_stages):
            stages = slice(stage, stage + 1) if in_order else slice(None)
            pairs = [(c, part) for c, parts in parts_of.items() if c not in failed for part in parts[stages]]
            asks = []
            for client, part in pairs:
                place = {"first": stage * size, "total": len(own_of[client]), "num-models": len(part)}
                arrays = {f"mean.{i}": vectors[m] for i, m in enumerate(part.tolist())}
                asks.append(self.engine.ask(client, self.round, {**settings, **place}, arrays))

            def read(position: int, content: RecordDict, asks: "list[Ask]" = asks) -> tuple[Tensor, ...] | None:
                client = asks[position].client
                return _read_scores(settings_of(asks[position].content, "ask"), content, int(self.num_examples[client]))

            failed |= {client for client, _ in pairs}
            for position, answer in self.engine.exchange(SCORE, self.round, asks, self.work, read):
                client, part = pairs[position]
                failed.discard(client)
                if answer is not None:
                    yield client, part, answer
        self.work.exchanges += bool(own_of)
        self.work.parameters_down += sum(len(own) for own in own_of.values()) * self.layout.num_evaluated

    def _part_with(self, incomplete: set[int], own_of: dict[int, Tensor]) -> None:
        """Clients that did not answer in full leave the round."""
        self.engine.require(len(own_of) - len(incomplete), len(own_of), SCORE, self.round)
        self.present[list(incomplete)] = False

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
            # Nobody waits for what was not asked: all the others' answers would be held meanwhile.
            while job in asked and job not in ready and (answer := next(answers, None)) is not None:
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
        self, models: Gaussian, strength: float, curvature: bool, max_examples: int | None, racing: float = 0.0
    ) -> Iterator[Choice]:
        if len(models) > self._per_message(8 * self.layout.length):
            yield from self._fit_best_in_two(models, strength, curvature, max_examples)
            return
        present = self._present_clients()
        clients = [client for client in present if self.in_time[client]]
        sent, everything = _BeliefArrays(models, self.num_parameters), list(range(len(models)))
        jobs = Jobs(torch.empty(0), torch.empty(0), curvature=curvature)
        power = float(torch.tensor(strength))  # single precision, as every engine has it
        settings = self._fit_settings("best", everything, [power] * len(models), sent, jobs)
        settings |= {"max-examples": _or_all(max_examples), "racing": racing}
        arrays = {name: array for belief in everything for name, array in sent.of(belief).items()}
        asks = [self.engine.ask(client, self.round, settings, arrays) for client in clients]

        def read(position: int, content: RecordDict) -> tuple[Choice, int]:
            said, client = settings_of(content, "choice"), clients[position]
            best, num_scored = whole_number(said, "choice", 0, len(models) - 1), whole_number(said, "scored", 0, 2**62)
            return Choice(client, best, self._read_posterior(client, best, content, jobs)), num_scored

        answers = self.engine.exchange(FIT, self.round, asks, self.work, read)
        self.work.exchanges += 1
        self.work.late += len(present) - len(clients)
        ready: dict[int, tuple[Choice, int]] = {}
        num_answers = 0
        for position, client in enumerate(clients):  # in the order of the clients, so that sums repeat
            while position not in ready and (answer := next(answers, None)) is not None:
                ready[answer[0]] = answer[1]
                num_answers += 1
            self.work.parameters_down += len(models) * self.layout.numbers_sent(curvature)
            if position in ready:
                choice, num_scored = ready.pop(position)
                in_full = len(models) * self._num_scored(client, max_examples)
                self.work.count_scored(num_scored, in_full if racing else None)
                self._count_trained(curvature, None)
                self.work.scalars_up += 1
                yield choice
        self.engine.require(num_answers, len(clients), FIT, self.round)

    def _fit_best_in_two(
        self, models: Gaussian, strength: float, curvature: bool, max_examples: int | None
    ) -> Iterator[Choice]:
        """The same where the beliefs do not fit into one message: first the scores, then the best belief alone.

        Nobody races here: a client that has one part of the beliefs cannot drop what it has not seen.
        """
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
    ) -> dict[str, Any]:
        return {
            "kind": kind,
            "beliefs": beliefs,
            "parents": [b if jobs.parent_of is None else int(jobs.parent_of[b]) for b in beliefs],
            "strengths": strengths,
            "levels": [sent.level(belief) for belief in beliefs],
            "curvature": int(jobs.curvature),
            "num-steps": jobs.num_steps or -1,
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

    def _num_scored(self, client: int, max_examples: int | None, held_out: float = 0.0) -> int:
        own = self.num_examples[client]
        num_examples = int(num_held_out(own, held_out) or own)
        return min(num_examples, max_examples or num_examples)

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


def _or_all(max_examples: int | None) -> int:
    return -1 if max_examples is None else max_examples


def _read_scores(ask: Mapping[str, Any], content: RecordDict, num_examples: int) -> tuple[Tensor, ...] | None:
    """What a client says of its models, after it is found sound; None where more of its models are to come first.

    A score is a row of log-likelihoods of discrete labels, so none is above 0; shares sum to one; a look gives mean
    log-likelihoods and their covariance. No example counts below local.FLOOR, as none of an honest client does: what is
    far beyond would drown everybody else's numbers in rounding.
    """
    arrays, count, total = arrays_of(content, "answer"), ask["num-models"], ask["total"]

    def numbers(name: str, *shape: int) -> Tensor:
        return finite(read_array(arrays.get(name), shape, DOUBLE, name), name)

    if ask["kind"] == "score":
        scores = numbers("scores", count)
        if float(scores.max()) > 0:
            raise ValueError("log-likelihoods must be ≤ 0")
        return (scores.clamp(min=local.FLOOR * num_examples),)
    if ask["first"] + count < total:
        return None
    if ask["kind"] == "share":
        share = numbers("scores", total)
        if float(share.min()) < 0 or abs(float(share.sum()) - 1) > 1e-6:
            raise ValueError("shares must be ≥ 0 and sum to one")
        return (share,)
    mean, covariance = numbers("mean", total), numbers("covariance", total, total)
    if float(mean.max()) > 0 or float(covariance.diagonal().min()) < 0:
        raise ValueError("mean log-likelihoods must be ≤ 0 and their variances ≥ 0")
    if float(mean.min()) < local.FLOOR or float(covariance.abs().max()) > local.FLOOR**2:
        raise ValueError(f"mean log-likelihoods must be ≥ {local.FLOOR:g}, and covariances no larger than that allows")
    return mean, covariance
