"""The server's side of one round: scores and posteriors asked of the clients behind Flower's grid."""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from flwr.app import RecordDict
from torch import Tensor

import bcfl.engines.flower.lastlayer as lastlayer
from bcfl.belief.gaussian import Gaussian
from bcfl.belief.heads import Asked, Heads
from bcfl.client.client import among, draw_model, is_usable, wanted_models
from bcfl.client.head import Answer, examples_seen
from bcfl.client.trainer import Training
from bcfl.engines.flower.answers import Trained, read_choice, read_posteriors, read_scores
from bcfl.engines.flower.exchange import Ask, ordered
from bcfl.engines.flower.roster import Roster
from bcfl.engines.flower.wire import FIT, SCORE, BeliefArrays, settings_of, to_array
from bcfl.federation import Choice, Jobs, Work, num_held_out
from bcfl.model.flat import ModelFactory

log = logging.getLogger("bcfl")


class FlowerClients:
    """The federation in one round; a client that does not answer a score leaves `present`, the tensor, in place."""

    def __init__(self, roster: Roster, factory: ModelFactory, training: Training, seed: int, round_index: int):
        self.roster, self.exchange, self.factory = roster, roster.exchange, factory
        self.round, self.seed, self.training = round_index, seed, training
        self.local_steps = training.local_steps
        clients = range(roster.num_clients)
        sizes = [roster.sizes_in(client, round_index).num_train for client in clients]
        self.num_examples = torch.tensor(sizes, dtype=torch.float64)  # 0: not met yet
        self.layout = roster.layout
        self.num_parameters, self.num_last_layer = self.layout.num_parameters, self.layout.num_last_layer
        self.num_evaluated, self.head = self.layout.num_evaluated, roster.head
        self.present, self.in_time = roster.participation.draw(roster.num_clients, seed, round_index)
        drawn = int(self.present.sum())
        self.present &= torch.tensor([roster.online(client) for client in clients])
        self.exchange.require(int(self.present.sum()), drawn, "the call", round_index)
        self.work = Work()

    def draw_model(self, *path: int) -> Tensor:
        return draw_model(self.factory, self.layout, self.seed, *path)

    def score(
        self,
        models: Tensor,
        max_examples: int | None = None,
        held_out: float = 0.0,
        *,
        wanted: Tensor | None = None,
    ) -> Tensor:
        settings = {"kind": "score", "max-examples": _or_all(max_examples), "held-out": held_out}
        return self._table(models, settings, max_examples, held_out, wanted, in_order=False)

    def share_explained(self, models: Tensor, max_examples: int | None = None) -> Tensor:
        settings = {"kind": "share", "max-examples": _or_all(max_examples)}
        return self._table(models, settings, max_examples, 0.0, None, in_order=True)

    def _table(
        self,
        models: Tensor,
        settings: dict[str, Any],
        max_examples: int | None,
        held_out: float,
        wanted: Tensor | None,
        *,
        in_order: bool,
    ) -> Tensor:
        """A number per client and model; NaN for clients that are absent or did not answer in full."""
        table = torch.full((len(self.present), len(models)), torch.nan, dtype=torch.float64)
        every = torch.ones(1, dtype=torch.bool).expand(table.shape)
        models_of = wanted_models(self.present, every if wanted is None else wanted)
        for client, part, (row,) in self._scored(models, models_of, settings, in_order=in_order):
            table[client, slice(None) if in_order else part] = row
        incomplete = {client for client, some in models_of.items() if table[client, some].isnan().any()}
        self._part_with(incomplete, len(models_of))
        table[~self.present] = torch.nan
        for client in models_of.keys() & set(self._present_clients()):
            num_models = len(models_of[client])
            self.work.count_scored(num_models * self._num_scored(client, max_examples, held_out))
            self.work.scalars_up += num_models
        return table

    def look(
        self, models: Tensor, max_examples: int | None, wanted: Tensor, first: int, last: int
    ) -> tuple[Tensor, Tensor]:
        models_of = wanted_models(self.present, wanted)
        mean = torch.full((len(self.present), len(models)), torch.nan, dtype=torch.float64)
        covariance = torch.full((*mean.shape, len(models)), torch.nan, dtype=torch.float64)
        settings = {"kind": "look", "max-examples": _or_all(max_examples), "from": first, "to": last}
        for client, _, answer in self._scored(models, models_of, settings, in_order=True):
            mean[client], covariance[client] = among(len(models), models_of[client], *answer)
        incomplete = {client for client, some in models_of.items() if mean[client, some].isnan().any()}
        self._part_with(incomplete, len(models_of))
        for client in models_of.keys() & set(self._present_clients()):
            num_scored = self._num_scored(client, max_examples)
            self.work.count_look(len(models_of[client]), len(models), first, last, num_scored)
        return mean, covariance

    def _scored(
        self, models: Tensor, models_of: dict[int, Tensor], settings: dict[str, Any], *, in_order: bool
    ) -> Iterator[tuple[int, Tensor, tuple[Tensor, ...]]]:
        """The answers of the clients about their models, which come in several messages if they are large.

        Where an answer depends on all of a client's models, they are sent `in_order`: a client must have had one part
        before the next, and the answer to its last part is the answer.
        """
        num_evaluated = self.layout.num_evaluated
        vectors = {m: to_array(models[m, :num_evaluated]) for some in models_of.values() for m in some.tolist()}
        size = self._per_message(4 * num_evaluated)
        parts_of = {client: list(some.split(size)) for client, some in models_of.items()}
        num_stages = max((len(parts) for parts in parts_of.values()), default=0) if in_order else 1
        failed: set[int] = set()
        for stage in range(num_stages):
            stages = slice(stage, stage + 1) if in_order else slice(None)
            pairs = [(c, part) for c, parts in parts_of.items() if c not in failed for part in parts[stages]]
            asks = []
            for client, part in pairs:
                place = {"first": stage * size, "total": len(models_of[client]), "num-models": len(part)}
                arrays = {f"mean.{i}": vectors[m] for i, m in enumerate(part.tolist())}
                asks.append(self.roster.question(client, self.round, {**settings, **place}, arrays))

            def read(position: int, content: RecordDict, asks: list[Ask] = asks) -> tuple[Tensor, ...] | None:
                asked = settings_of(asks[position].content, "ask")
                count = int(self.num_examples[asks[position].client])
                return read_scores(asked, content, count, self.layout.likelihood.discrete)

            failed |= {client for client, _ in pairs}
            for position, answer in self.exchange.ask(SCORE, self.round, asks, self.work, read):
                client, part = pairs[position]
                failed.discard(client)
                if answer is not None:
                    yield client, part, answer
        self.work.exchanges += bool(models_of)
        self.work.parameters_down += sum(len(some) for some in models_of.values()) * num_evaluated

    def last_layer(self, asked: Asked, heads: Heads) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
        head = self.head
        assert head is not None  # the method has seen to it
        clients, num_models = self._present_clients(), len(heads.models)
        settings = {"kind": asked, **lastlayer.settings(heads)}
        arrays = lastlayer.sent_heads(heads, self.layout.num_evaluated)
        asks = [self.roster.question(client, self.round, settings, arrays) for client in clients]

        def read(position: int, content: RecordDict) -> Answer:
            return lastlayer.read_told(content, asked, heads, head, float(self.num_examples[clients[position]]))

        found = dict(self.exchange.ask(SCORE, self.round, asks, self.work, read))
        self.work.exchanges += 1
        self.work.parameters_down += len(clients) * num_models * self.layout.num_evaluated
        for position, client in enumerate(clients):
            self.work.parameters_down += 0 if asked == "sums" else heads.mean.numel() + heads.variance.numel()
            if position in found:
                self.work.count_scored(examples_seen(asked, heads, int(self.num_examples[client])))
                self.work.scalars_up += sum(part.numel() for part in found[position].values())
                yield client, found[position]
        self.exchange.require(len(found), len(clients), SCORE, self.round)

    def _part_with(self, incomplete: set[int], num_asked: int) -> None:
        """Clients that did not answer in full leave the round."""
        self.exchange.require(num_asked - len(incomplete), num_asked, SCORE, self.round)
        self.present[list(incomplete)] = False

    def fit(self, models: Gaussian, jobs: Jobs) -> Iterator[Gaussian | None]:
        clients: list[int] = jobs.client.tolist()
        jobs_of: dict[int, list[int]] = {}
        for job, client in enumerate(clients):
            if self.in_time[client] and self.roster.online(client):
                jobs_of.setdefault(client, []).append(job)
        per_message = self._per_message(8 * self.layout.length)
        shares = [some[i : i + per_message] for some in jobs_of.values() for i in range(0, len(some), per_message)]
        sent = BeliefArrays(models, self.num_parameters)
        asks = [self._fit_ask(share, jobs, sent) for share in shares]

        def read(position: int, content: RecordDict) -> list[Gaussian | None]:
            trained = [self._trained(i, job, models, jobs) for i, job in enumerate(shares[position])]
            posteriors = read_posteriors(content, self.layout, trained)
            return [self._if_usable(asks[position].client, posterior) for posterior in posteriors]

        answered, asked = set(), {job for share in shares for job in share}

        def posteriors() -> Iterator[tuple[int, Gaussian | None]]:
            for position, answer in self.exchange.ask(FIT, self.round, asks, self.work, read):
                answered.add(asks[position].client)
                yield from zip(shares[position], answer, strict=True)

        self.work.exchanges += 1
        # Nobody waits for what was not asked: all the others' answers would be held meanwhile.
        ready = ordered(posteriors(), sorted(asked))
        for job, client in enumerate(clients):
            if job not in asked:
                self.work.late += not self.in_time[client]
                yield None
                continue
            start = 0 if jobs.start is None else self.layout.length
            self.work.parameters_down += self.layout.numbers_sent(jobs.curvature) + start
            answer = next(ready)
            if answer is not None:
                self._count_trained(client, jobs.curvature, jobs.num_steps)
            yield None if answer is None else answer[0]
        self.exchange.require(len(answered), len(jobs_of), FIT, self.round)

    def _fit_ask(self, share: list[int], jobs: Jobs, sent: BeliefArrays) -> Ask:
        """One message to one client with that share of the jobs."""
        client, beliefs = int(jobs.client[share[0]]), [int(jobs.belief[job]) for job in share]
        strengths = [1.0 if jobs.strength is None else float(jobs.strength[job]) for job in share]
        arrays = {name: array for belief in beliefs for name, array in sent.of(belief).items()}
        if jobs.start is not None:
            arrays["start"] = to_array(jobs.start[client])
        settings = {"kind": "all", **_fit_settings(beliefs, strengths, sent, jobs)}
        return self.roster.question(client, self.round, settings, arrays, len(share))

    def fit_best(
        self, models: Gaussian, strength: float, curvature: bool, max_examples: int | None, racing: float = 0.0
    ) -> Iterator[Choice]:
        if len(models) > self._per_message(8 * self.layout.length):
            yield from self._fit_best_in_two(models, strength, curvature, max_examples)
            return
        present = self._present_clients()
        clients = [client for client in present if self.in_time[client]]
        sent, beliefs = BeliefArrays(models, self.num_parameters), list(range(len(models)))
        power = torch.full((len(models),), strength)  # single precision, as every engine has it
        settings = {"kind": "best", "max-examples": _or_all(max_examples), "racing": racing}
        arrays = {name: array for belief in beliefs for name, array in sent.of(belief).items()}

        def jobs_of(client: int) -> Jobs:  # one for each belief, of which the client does one
            return Jobs(torch.arange(len(models)), torch.full((len(models),), client), power, curvature)

        asks = []
        for client in clients:
            more = _fit_settings(beliefs, power.tolist(), sent, jobs_of(client))
            asks.append(self.roster.question(client, self.round, settings | more, arrays))

        def read(position: int, content: RecordDict) -> tuple[Choice, int]:
            client, (best, num_scored) = clients[position], read_choice(content, len(models))
            trained = [self._trained(best, best, models, jobs_of(client))]
            posterior = read_posteriors(content, self.layout, trained, "choice")[0]
            return Choice(client, best, self._if_usable(client, posterior)), num_scored

        self.work.exchanges += 1
        self.work.late += len(present) - len(clients)
        num_answers = 0
        # In the order of the clients, so that sums repeat.
        answers = ordered(self.exchange.ask(FIT, self.round, asks, self.work, read), range(len(clients)))
        for client, answer in zip(clients, answers, strict=True):
            self.work.parameters_down += len(models) * self.layout.numbers_sent(curvature)
            if answer is not None:
                num_answers += 1
                choice, num_scored = answer[0]
                in_full = len(models) * self._num_scored(client, max_examples)
                self.work.count_scored(num_scored, in_full if racing else None)
                self._count_trained(client, curvature, None)
                self.work.scalars_up += 1
                yield choice
        self.exchange.require(num_answers, len(clients), FIT, self.round)

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

    def _trained(self, index: int, job: int, models: Gaussian, jobs: Jobs) -> Trained:
        num_examples = self.num_examples[int(jobs.client[job])]
        prior = models.precision[int(jobs.belief[job]), : self.num_parameters]
        if jobs.strength is not None:
            prior = prior * jobs.strength[job]
        return Trained(index, prior, float(num_examples - num_held_out(num_examples, jobs.held_out)), jobs.curvature)

    def _if_usable(self, client: int, posterior: Gaussian) -> Gaussian | None:
        """None for a posterior that cannot be fused, as of a training that diverged."""
        if is_usable(posterior, self.layout.variances):
            return posterior
        self.work.rejected += 1
        who = self.exchange.name(client)
        log.warning("round %s, %s, %s: a posterior that cannot be fused is left out", self.round, FIT, who)
        return None

    def _per_message(self, num_bytes: int) -> int:
        return max(1, self.exchange.terms.message_bytes // num_bytes)

    def _present_clients(self) -> list[int]:
        return self.present.nonzero()[:, 0].tolist()

    def _num_scored(self, client: int, max_examples: int | None, held_out: float = 0.0) -> int:
        there = self.num_examples[client]
        num_examples = int(num_held_out(there, held_out) or there)
        return min(num_examples, max_examples or num_examples)

    def _count_trained(self, client: int, curvature: bool, num_steps: int | None) -> None:
        self.work.trainings += 1
        self.work.local_steps += num_steps or self.training.steps_of(int(self.num_examples[client]))
        self.work.parameters_up += self.layout.numbers_sent(curvature)


def _fit_settings(beliefs: list[int], strengths: list[float], sent: BeliefArrays, jobs: Jobs) -> dict[str, Any]:
    return {
        "beliefs": beliefs,
        "parents": [b if jobs.parent_of is None else int(jobs.parent_of[b]) for b in beliefs],
        "strengths": strengths,
        "levels": [sent.level(belief) for belief in beliefs],
        "curvature": int(jobs.curvature),
        "num-steps": jobs.num_steps or -1,
        "held-out": jobs.held_out,
    }


def _or_all(max_examples: int | None) -> int:
    return -1 if max_examples is None else max_examples
