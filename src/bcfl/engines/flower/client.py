"""The client's side: answers to the server's questions, from data that stay where they are."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

import bcfl.engines.flower.lastlayer as lastlayer
from bcfl.belief.gaussian import Gaussian
from bcfl.belief.heads import HeadLayout, Heads
from bcfl.client.client import (
    Later,
    LocalClient,
    Order,
    Scoring,
    best,
    continued_momentum,
    evaluations,
    is_usable,
    layout_of,
    posteriors,
    scores,
)
from bcfl.client.head import answer, head_layout, tested
from bcfl.client.score import total_log_likelihood
from bcfl.client.trainer import Alone
from bcfl.engines.flower.answers import NOT_KNOWN
from bcfl.engines.flower.privacy import Protection
from bcfl.engines.flower.wire import (
    FLOAT,
    INT,
    arrays_of,
    finite,
    list_of,
    number_of,
    one_line,
    only,
    read_array,
    settings_of,
    to_array,
    whole_number,
)
from bcfl.extensions.racing import moments
from bcfl.likelihood.measures import Evaluation
from bcfl.model.flat import FlatModel, SharedModels

MAX_STEPS = 1_000_000  # of all local trainings that one question asks for: no client trains more, whoever asks

KINDS_OF_SCORES = ("score", "share", "look")
ASK_KEYS = {
    *("client", "round", "kind", "max-examples", "held-out", "num-models", "first", "total", "from", "to", "shares"),
    *("beliefs", "parents", "strengths", "levels", "curvature", "num-steps", "racing"),
    *("priors", "folds"),
}


@dataclass(frozen=True)
class Respondent:
    """One client's answers; it trusts a question no more than the server trusts an answer."""

    client: LocalClient
    model: FlatModel
    num_classes: int
    group: int | None = None  # its true group, where that is known: only in simulations
    protection: Protection | None = None
    later: Later | None = None  # where its data change in mid-run
    name: str = ""  # by which the server's log calls it

    def describe(self) -> RecordDict:
        layout = layout_of(self.model, self.client.training)
        answer: dict[str, Any] = {
            "client": self.client.index,
            "num-classes": self.num_classes,
            "vector-length": layout.length,
            "shapes": list(layout.shapes),
            "layers": list(layout.layers),
            "name": self.name,
            **self._sizes(self.client, self.group),
        }
        said = RecordDict({"answer": ConfigRecord(answer)})
        if self.later is not None:
            sizes = self._sizes(self.later.client, self.later.group)
            said["later"] = ConfigRecord({"round": self.later.round, **sizes})
        return said

    def _sizes(self, client: LocalClient, group: int | None) -> dict[str, int]:
        # Counts over test data are not blurred, so a client that protects its data is not tested.
        num_test = len(client.test) if self.protection is None else 0
        return {"num-train": len(client.train), "num-test": num_test, "group": -1 if group is None else group}

    def _client(self, round_index: int) -> LocalClient:
        """The client with the data that it holds in that round."""
        return self.client if self.later is None or round_index < self.later.round else self.later.client

    def score(self, content: RecordDict, state: RecordDict) -> RecordDict:
        """Log-likelihoods of the models, or the share of examples that each explains best, or what a look tells.

        Where the models of a share or a look come in several messages, what the answer needs is kept in between.
        """
        ask, round_index = self._ask(content)
        client, kind = self._client(round_index), ask.get("kind")
        if kind in lastlayer.KINDS:
            return self._last_layer(content, ask, client)
        count, bound = whole_number(ask, "num-models", 1, 2**31), _bound(ask)
        first, total = whole_number(ask, "first", 0, 2**31), whole_number(ask, "total", 1, 2**31)
        if kind not in KINDS_OF_SCORES or first + count > total:
            raise ValueError(f"kind must be one of {', '.join(KINDS_OF_SCORES)}, of models {first} to {total}")
        models = self._vectors(content, count)
        held_out = number_of(ask, "held-out", 0, 1) if kind == "score" else 0.0
        part = self._part(ask, client.num_scored(bound)) if kind == "look" else None
        asked = client.question(models, Scoring(round_index, bound, held_out, part))
        (values,) = Alone(self.model).log_likelihoods([asked])
        if kind == "look":
            return self._look(values, round_index, first, total, state)
        if kind == "share":
            return self._share(values, round_index, first, total, state)
        num_examples = len(client.scored(held_out))
        scores = total_log_likelihood(values, num_examples)
        if self.protection is not None:
            scores = self.protection.privacy.scores(scores, num_examples, self.model.likelihood.discrete)
        return self._scores(scores)

    def _last_layer(self, content: RecordDict, ask: Mapping[str, Any], client: LocalClient) -> RecordDict:
        """What the client's data say of its last layer."""
        if self.protection is not None:
            raise ValueError("this client protects its data and tells nothing of its last layer: take another method")
        heads, layout = self._heads(content, ask)
        return lastlayer.told(answer(lastlayer.asked_of(ask), heads, client, self.model, layout))

    def _heads(self, content: RecordDict, ask: Mapping[str, Any]) -> tuple[Heads, HeadLayout]:
        """The priors of last layers that a message brings, and where this model has its own."""
        layout = head_layout(self.model)
        if layout is None:
            raise ValueError("this client's model does not end in a torch.nn.Linear")
        sent, count = arrays_of(content, "models"), whole_number(ask, "num-models", 1, 2**20)
        models = torch.stack([self._vector(sent, f"mean.{i}", len(self.model.vector)) for i in range(count)])
        return lastlayer.read_heads(content, ask, models, layout.num_coefficients), layout

    def _part(self, ask: Mapping[str, Any], num_scored: int) -> tuple[int, int]:
        """The part of the examples that a look is at."""
        if self.protection is not None:
            raise ValueError("this client protects its data and tells only blurred scores: set method.racing = 0")
        first = whole_number(ask, "from", 0, num_scored - 1)
        return first, min(whole_number(ask, "to", first + 1, 2**62), num_scored)

    def _share(self, values: Tensor, round_index: int, first: int, total: int, state: RecordDict) -> RecordDict:
        """The share of examples that each model explains best, once all models have come."""
        best, model_of = values.max(0)
        model_of = model_of + first
        if first:
            kept = arrays_of(state, f"best.{round_index}.{first}")
            before = read_array(kept.get("value"), tuple(best.shape), FLOAT, "the best so far")
            model_before = read_array(kept.get("model"), tuple(best.shape), INT, "the best model so far")
            model_of = torch.where(best > before, model_of, model_before)
            best = torch.maximum(best, before)
        _forget(state, "best.")
        if first + len(values) < total:
            kept_now = ArrayRecord({"value": to_array(best), "model": to_array(model_of)})
            state[f"best.{round_index}.{first + len(values)}"] = kept_now
            return RecordDict({"answer": ArrayRecord({})})
        shares = torch.bincount(model_of, minlength=total).double() / len(model_of)
        return self._scores(shares if self.protection is None else self.protection.privacy.shares(shares))

    def _look(self, values: Tensor, round_index: int, first: int, total: int, state: RecordDict) -> RecordDict:
        """Mean and covariance of the log-likelihoods, once all models of the look have come."""
        if first:
            kept = arrays_of(state, f"look.{round_index}.{first}")
            before = read_array(kept.get("values"), (first, values.shape[1]), FLOAT, "the look so far")
            values = torch.cat([before, values])
        _forget(state, "look.")
        if len(values) < total:
            state[f"look.{round_index}.{len(values)}"] = ArrayRecord({"values": to_array(values)})
            return RecordDict({"answer": ArrayRecord({})})
        mean, covariance = moments(values)
        return RecordDict({"answer": ArrayRecord({"mean": to_array(mean), "covariance": to_array(covariance)})})

    def fit(self, content: RecordDict, state: RecordDict) -> RecordDict:
        """A posterior per belief, or only of the one that explains the client's data best."""
        ask, round_index = self._ask(content)
        wanted, client = self._read_fit(content, ask), self._client(round_index)
        if ask.get("kind") not in ("all", "best"):
            raise ValueError(f"kind must be all or best, got {one_line(ask.get('kind'))[:40]}")
        chosen, choice = list(range(len(wanted.beliefs))), None
        if ask["kind"] == "best":
            chosen_one, num_scored = self._best(
                torch.stack([belief.mean for belief in wanted.beliefs]), ask, round_index
            )
            chosen, choice = [chosen_one], ConfigRecord({"choice": chosen_one, "scored": num_scored})
        steps = len(chosen) * (wanted.num_steps or client.training.steps_of(len(client.train)))
        if steps > MAX_STEPS:
            raise ValueError(f"{steps} local steps are asked for, at most {MAX_STEPS} are trained")
        memory = _Momentum(state, round_index) if client.training.momentum_state == "client" else None
        answer: dict[str, Array] = {}
        for i in chosen:
            momentum = continued_momentum(memory.before, wanted.parents[i]) if memory else None
            order = Order(
                round_index, wanted.strengths[i], wanted.curvature, wanted.start, wanted.num_steps, momentum,
                wanted.held_out,
            )  # fmt: skip
            ((posterior, velocity),) = posteriors([(client, wanted.beliefs[i], order)], Alone(self.model))
            answer |= self._told(posterior, wanted, i)
            if memory and is_usable(posterior, self.model.variances):
                memory.now[wanted.indices[i]] = velocity
        if memory:
            memory.write(state)
        said = RecordDict({"answer": ArrayRecord(answer)})
        if choice is not None:
            said["choice"] = choice
        return self._charged(said, len(chosen) * (1 + wanted.curvature) + (choice is not None))

    def _read_fit(self, content: RecordDict, ask: Mapping[str, Any]) -> "_Wanted":
        indices = list_of(ask, "beliefs", int)
        parents = list_of(ask, "parents", int, len(indices))
        strengths, levels = (list_of(ask, key, float, len(indices)) for key in ("strengths", "levels"))
        if not indices or any(not (math.isfinite(s) and s >= 0) for s in strengths):
            raise ValueError("strengths must be finite numbers ≥ 0, one per belief and at least one")
        if not all(map(math.isfinite, levels)):
            raise ValueError("levels must be finite numbers")
        names = {f"mean.{b}" for b in indices} | {"start"}
        names |= {f"precision.{b}" for b, level in zip(indices, levels, strict=True) if level < 0}
        arrays, length = arrays_of(content, "models", names), layout_of(self.model, self.client.training).length
        num_steps = whole_number(ask, "num-steps", -1, MAX_STEPS)
        return _Wanted(
            indices=indices,
            parents=parents,
            strengths=strengths,
            beliefs=[
                Gaussian(self._vector(arrays, f"mean.{b}", length), self._precision(arrays, b, level, length))
                for b, level in zip(indices, levels, strict=True)
            ],
            start=self._vector(arrays, "start", length) if "start" in arrays else None,
            num_steps=num_steps if num_steps > 0 else None,
            curvature=bool(whole_number(ask, "curvature", 0, 1)),
            held_out=number_of(ask, "held-out", 0, 1),
        )

    def _told(self, posterior: Gaussian, wanted: "_Wanted", i: int) -> dict[str, Array]:
        """A posterior as it leaves the client: clipped and blurred if it protects its data."""
        layout = layout_of(self.model, self.client.training)
        mean, precision = posterior.mean, posterior.precision[: layout.num_parameters]
        if self.protection is not None:
            privacy, belief = self.protection.privacy, wanted.beliefs[i]
            mean = privacy.mean(mean, belief.mean if wanted.start is None else wanted.start, layout.variances)
            precision = privacy.precision(precision, belief.precision[: len(precision)] * wanted.strengths[i])
        told = {f"mean.{i}": to_array(mean)}
        return told | {f"precision.{i}": to_array(precision)} if wanted.curvature else told

    def _best(self, means: Tensor, ask: Mapping[str, Any], round_index: int) -> tuple[int, int]:
        """The belief that explains the client's data best, and how many (example, model) pairs were scored."""
        client, bound, racing = self._client(round_index), _bound(ask), number_of(ask, "racing", 0, 1)
        scoring, network = Scoring(round_index, bound), Alone(self.model)
        if self.protection is None:
            return best(SharedModels.of(means), scoring, racing, [client], network)[0]
        # A choice by blurred scores needs all of them in full, racing or not.
        (found,) = scores(scoring, total_log_likelihood, [(client, means)], network)
        blurred = self.protection.privacy.scores(found, len(client.train), self.model.likelihood.discrete)
        return int(blurred.argmax()), len(means) * client.num_scored(bound)

    def evaluate(self, content: RecordDict) -> RecordDict:
        """What a mixture of models, most often one, makes of the client's test data."""
        ask, round_index = self._ask(content)
        if self.protection is not None:
            raise ValueError("this client protects its data and is not tested")
        client = self._client(round_index)
        if "priors" in ask:
            heads, layout = self._heads(content, ask)
            evaluation = tested(heads, client, self.model, layout, self.num_classes)
        else:
            evaluation = self._by_models(content, ask, client)
        if evaluation is None:
            raise ValueError("this client has no test data")
        rows = {"sums": evaluation.sums, "values": evaluation.values}
        answer = {
            name: to_array(
                torch.tensor(list(of.values()), dtype=torch.float64).reshape(len(of), 2).nan_to_num(NOT_KNOWN)
            )
            for name, of in rows.items()
        } | {name: to_array(table) for name, table in evaluation.tables.items()}
        return RecordDict({"answer": ArrayRecord(answer)})

    def _by_models(self, content: RecordDict, ask: Mapping[str, Any], client: LocalClient) -> Evaluation | None:
        shares = list_of(ask, "shares", float)
        if not shares or any(not 0 < share <= 1.001 for share in shares):
            raise ValueError("shares must be numbers in (0, 1], one per model and at least one")
        vectors, log_weight = self._vectors(content, len(shares)), torch.tensor(shares, dtype=torch.float64).log()
        (found,) = evaluations(self.num_classes, [(client, list(vectors), log_weight)], Alone(self.model))
        return found

    def _ask(self, content: RecordDict) -> tuple[Mapping[str, Any], int]:
        only(content, ("ask", "models"))
        ask = settings_of(content, "ask")
        only(ask, ASK_KEYS)
        if type(ask.get("client")) is not int or ask["client"] != self.client.index:
            raise ValueError(f"this is client {self.client.index}, but client {one_line(ask.get('client'))} was asked")
        return ask, whole_number(ask, "round", 0, 2**31)

    def _vectors(self, content: RecordDict, count: int) -> Tensor:
        """The models that a message brings, `count` of them and nothing else."""  # (model, vector)
        sent = arrays_of(content, "models")
        if len(sent) != count:
            raise ValueError(f"{count} models are announced, but {len(sent)} were sent")
        return torch.stack([self._vector(sent, f"mean.{i}", len(self.model.vector)) for i in range(count)])

    def _vector(self, arrays: Mapping[str, Array], name: str, length: int) -> Tensor:
        vector = finite(read_array(arrays.get(name), (length,), FLOAT, name), name)
        if any(float(vector[part].min()) < 0 for part in self.model.variances if part.stop <= length):
            raise ValueError(f"{name}: a running variance must be ≥ 0")
        return vector

    def _precision(self, arrays: Mapping[str, Array], belief: int, level: float, length: int) -> Tensor:
        """The belief's precision: one level for all parameters, or (where that is negative) a number for each."""
        if level >= 0:
            return torch.tensor(level).expand(length)
        precision = torch.zeros(length)  # over the statistics a prior is always flat
        count = self.model.num_parameters
        name = f"precision.{belief}"
        precision[:count] = finite(read_array(arrays.get(name), (count,), FLOAT, name), name)
        return precision

    def _scores(self, scores: Tensor) -> RecordDict:
        return self._charged(RecordDict({"answer": ArrayRecord({"scores": to_array(scores)})}), 1)

    def _charged(self, answer: RecordDict, num_releases: int) -> RecordDict:
        """The answer, once the releases in it are written down; with it goes what the client has said in all."""
        if self.protection is not None:
            releases = self.protection.ledger.charge(self.protection.privacy, num_releases)
            report: dict[str, Any] = {
                "noise": list(releases),
                "count": list(releases.values()),
                "delta": self.protection.privacy.delta,
            }
            answer["privacy"] = ConfigRecord(report)
        return answer


def _bound(ask: Mapping[str, Any]) -> int | None:
    """How many examples may be scored, if not all."""
    max_examples = whole_number(ask, "max-examples", -1, 2**62)
    if max_examples == 0:
        raise ValueError("max-examples must not be 0: a score of no examples says nothing")
    return None if max_examples < 0 else max_examples


def _forget(state: RecordDict, prefix: str) -> None:
    for name in [name for name in state if name.startswith(prefix)]:
        del state[name]


@dataclass(frozen=True)
class _Wanted:
    """What a fit is asked for, once it is found sound."""

    indices: list[int]  # of the beliefs, on the server
    parents: list[int]
    strengths: list[float]
    beliefs: list[Gaussian]
    start: Tensor | None
    num_steps: int | None
    curvature: bool
    held_out: float


class _Momentum:
    """What the client keeps of its trainings for momentum_state = "client": of the last round it took part in."""

    def __init__(self, state: RecordDict, round_index: int):
        arrays = arrays_of(state, "momentum")
        kept = state.config_records.get("momentum-of") or ConfigRecord({"round": -1, "before": [], "now": []})
        parts = {
            part: {int(b): torch.from_numpy(arrays[f"{part}.{b}"].numpy()) for b in list_of(kept, part, int)}
            for part in ("before", "now")
        }
        same_round = kept["round"] == round_index  # another message of a round that is under way
        self.round = round_index
        self.before = parts["before"] if same_round else parts["now"] or parts["before"]
        self.now = parts["now"] if same_round else {}

    def write(self, state: RecordDict) -> None:
        parts = {"before": self.before, "now": self.now}
        state["momentum"] = ArrayRecord({f"{p}.{b}": to_array(v) for p, kept in parts.items() for b, v in kept.items()})
        state["momentum-of"] = ConfigRecord({"round": self.round, **{p: list(kept) for p, kept in parts.items()}})
