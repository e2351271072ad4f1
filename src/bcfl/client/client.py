"""What one client does when it is asked: the same in every engine, so that every engine gives the same numbers."""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bcfl.belief.gaussian import Gaussian, distinct, temper
from bcfl.client.examples import Examples
from bcfl.client.score import (
    Question,
    Summary,
    scoring_rows,
    total_log_likelihood,
)
from bcfl.client.trainer import Job, Network, Trained, Training, fit
from bcfl.extensions.racing import Stakes, moments, race
from bcfl.federation import num_held_out
from bcfl.likelihood import CATEGORICAL, Likelihood
from bcfl.likelihood.measures import Evaluation, measured
from bcfl.model.flat import FlatModel, ModelFactory, SharedModels, build
from bcfl.randomness import generator

LARGEST = 1e18  # of a mean or precision: training that went off beyond it has diverged


@dataclass(frozen=True)
class Layout:
    """How a run's flat vector is laid out: parameters, BatchNorm statistics, then momentum where it travels along."""

    num_parameters: int
    num_last_layer: int  # of the parameters, the last ones
    num_evaluated: int  # what a forward pass needs: parameters and BatchNorm statistics
    num_statistics: int  # all that follows the parameters
    variances: tuple[slice, ...]  # where BatchNorm's running variances are
    shapes: tuple[str, ...]  # of parameters and statistics, in their order: "100×50"
    layers: tuple[str, ...]  # what the network is made of: see bcfl.model.architecture
    likelihood: Likelihood = CATEGORICAL

    @property
    def length(self) -> int:
        return self.num_parameters + self.num_statistics

    def numbers_sent(self, curvature: bool) -> int:
        """How many numbers a belief is when it travels: its precision counts only where curvature is learned."""
        return self.length + (self.num_parameters if curvature else 0)

    def refuse_other(self, length: int, shapes: Sequence[str], layers: Sequence[str], where: str) -> None:
        """Nothing happens if a vector means here what it means there; shapes or layers that are not known are empty."""
        for what, these, those in (("tensor", self.shapes, shapes), ("layer", self.layers, layers)):
            for number, (here, there) in enumerate(itertools.zip_longest(these, those, fillvalue="missing"), 1):
                if here != there and those:
                    told = " ".join(there.split())[:200]  # by whoever it may be
                    raise ValueError(f"the model's {what} {number} is {here}, but {where} {told}")
        if length != self.length:
            raise ValueError(f"the model's vectors have {self.length} numbers, momentum included, but {where} {length}")


def layout_of(model: FlatModel, training: Training) -> Layout:
    """The layout of the vectors by which a run with this model and training exchanges beliefs."""
    carried = training.num_carried(model.num_parameters) if training.momentum_state == "belief" else 0
    num_statistics = model.num_statistics + carried
    sizes = model.num_parameters, model.num_last_layer, len(model.vector), num_statistics
    return Layout(*sizes, model.variances, model.shapes, model.layers, model.likelihood)


def draw_model(factory: ModelFactory, layout: Layout, seed: int, *path: int) -> Tensor:
    """A freshly initialised model, a function of `seed` and `path`; carried momentum starts at rest."""  # (vector,)
    vector = torch.zeros(layout.length)
    vector[: layout.num_evaluated] = FlatModel(build(factory, seed, *path)).vector
    return vector


@dataclass(frozen=True)
class Scoring:
    """Which of a client's examples a score is taken on.

    A part (first, last) is of these examples in a random order: as they lie they may be sorted by label.
    """

    round: int
    max_examples: int | None = None
    held_out: float = 0.0  # the share of the examples that is held out from training, and alone scored
    part: tuple[int, int] | None = None


@dataclass(frozen=True)
class Order:
    """How a client is to train a belief: its prior is belief^strength."""

    round: int
    strength: float = 1.0
    curvature: bool = False
    start: Tensor | None = None  # if not the belief's mean
    num_steps: int | None = None
    momentum: Tensor | None = None
    held_out: float = 0.0


@dataclass(frozen=True)
class LocalClient:
    """A client's place in the federation, its data and how it trains; every draw is a function of round and client."""

    index: int
    train: Examples
    test: Examples
    training: Training
    seed: int
    draws_globally: bool  # whether the model draws from torch's global generator: see check_model
    holder: int | None = None  # whose data these were at first, where clients have changed data in mid-run

    def num_scored(self, max_examples: int | None, held_out: float = 0.0) -> int:
        """How many examples a score uses."""
        num_examples = self._num_held_out(held_out) or len(self.train)
        return min(num_examples, max_examples or num_examples)

    def question(self, models: Tensor | Sequence[Tensor], scoring: Scoring) -> Question:
        """What the models say of the examples that this round scores."""
        examples = self.scored(scoring.held_out)
        stream = self._stream("score", scoring.round, self.index)
        rows = scoring_rows(len(examples), scoring.max_examples, stream)
        if scoring.part is not None:
            order = torch.randperm(len(rows), generator=self._stream("look", scoring.round, self.index))
            rows = rows[order[slice(*scoring.part)]]
        return Question(models, examples, rows)

    def test_question(self, models: Tensor | Sequence[Tensor]) -> Question:
        """What the models say of its test data."""
        self._stream("evaluate", self.index)
        return Question(models, self.test, torch.arange(len(self.test)))

    def job(self, belief: Gaussian, order: Order, num_parameters: int) -> Job:
        """The training of a belief; it goes through the same batches for every belief: a fair comparison."""
        return Job(
            belief.mean if order.start is None else order.start,
            temper(belief[:num_parameters], order.strength),  # flat on the statistics: they have no part in it
            self._part(order.held_out, held=False),
            self._stream("fit", order.round, self.index),
            self.training.in_round(order.round),
            order.curvature,
            order.num_steps,
            order.momentum,
        )

    def scored(self, held_out: float) -> Examples:
        """The examples that scores are taken on: all, or those that are held out from training."""
        return self._part(held_out, held=True)

    def _num_held_out(self, held_out: float) -> int:
        return 0 if not held_out else int(num_held_out(torch.tensor(len(self.train), dtype=torch.float64), held_out))

    def _part(self, held_out: float, held: bool) -> Examples:
        """The examples held out, or those left for training; who is which is the same in every round and engine.

        It goes with the data when they change hands: models have been trained on what was not held out before.
        """
        count = self._num_held_out(held_out)
        if not count:  # nothing is held out, or of one or two examples nothing can be
            return self.train
        holder = self.index if self.holder is None else self.holder
        order = torch.randperm(len(self.train), generator=generator(self.seed, "held out", holder))
        return dataclasses.replace(self.train, index=self.train.index[order[:count] if held else order[count:]])

    def _stream(self, *path: int | str) -> torch.Generator:
        """The client's stream of that name; torch's global generator joins it if the model draws from that."""
        stream = generator(self.seed, *path)
        if self.draws_globally:
            torch.manual_seed(stream.initial_seed())
        return stream


# What clients do when they are asked, several at a time where the network can: each answer is one client's.


def scores(
    scoring: Scoring,
    summary: Summary,
    asked: Sequence[tuple[LocalClient, Tensor | Sequence[Tensor]]],
    network: Network,
) -> list[Tensor]:
    """A number per model of each client that says how well it explains the client's data."""  # (model,) each
    values = network.log_likelihoods([client.question(models, scoring) for client, models in asked])
    sizes = (len(client.scored(scoring.held_out)) for client, _ in asked)
    return [summary(of_client, size) for of_client, size in zip(values, sizes, strict=True)]


def looks(
    scoring: Scoring, asked: Sequence[tuple[LocalClient, Sequence[Tensor]]], network: Network
) -> list[tuple[Tensor, Tensor]]:
    """Mean and covariance of the log-likelihoods of each client's models, over a part of its examples."""
    values = network.log_likelihoods([client.question(models, scoring) for client, models in asked])
    return [moments(of_client) for of_client in values]


def posteriors(asked: Sequence[tuple[LocalClient, Gaussian, Order]], network: Network) -> list[Trained]:
    """The clients' posteriors from the prior belief^strength, and the momenta at their ends."""
    return fit(network, [client.job(belief, order, network.num_parameters) for client, belief, order in asked])


def choices(
    models: Gaussian,
    shared: SharedModels,
    scoring: Scoring,
    racing: float,
    asked: Sequence[tuple[LocalClient, Sequence[Order]]],
    network: Network,
) -> list[tuple[int, int, Trained]]:
    """Each client's best belief, what it took to find it as in `best`, and its training, ordered for each belief."""
    found = best(shared, scoring, racing, [client for client, _ in asked], network)
    fits = [(client, models[b], orders[b]) for (client, orders), (b, _) in zip(asked, found, strict=True)]
    return [(*of_client, trained) for of_client, trained in zip(found, posteriors(fits, network), strict=True)]


def best(
    models: SharedModels, scoring: Scoring, racing: float, clients: Sequence[LocalClient], network: Network
) -> list[tuple[int, int]]:
    """The model that explains each client's data best, and how many (example, model) pairs were scored to find it.

    With `racing` it is another one with that probability at most: see `bcfl.extensions.racing`.
    """
    if racing:
        return [_raced(models, scoring, racing, client, network) for client in clients]
    found = scores(scoring, total_log_likelihood, [(client, models) for client in clients], network)
    pairs = (len(models) * client.num_scored(scoring.max_examples) for client in clients)
    return [(int(of_client.argmax()), count) for of_client, count in zip(found, pairs, strict=True)]


def _raced(
    models: SharedModels, scoring: Scoring, racing: float, client: LocalClient, network: Network
) -> tuple[int, int]:
    num_models, num_scored, pairs = len(models), client.num_scored(scoring.max_examples), 0

    def look(wanted: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
        nonlocal pairs
        places = wanted[0].nonzero()[:, 0]
        pairs += len(places) * (min(last, num_scored) - first)
        part = dataclasses.replace(scoring, part=(first, last))
        (told,) = looks(part, [(client, models.only(places.tolist()))], network)
        mean, covariance = among(num_models, places, *told)
        return mean[None], covariance[None]

    one, beliefs = torch.ones(1, dtype=torch.float64), torch.arange(num_models)[None]
    left, mean = race(look, one.bool(), one * num_scored, one, Stakes(beliefs, one.log(), 1, racing))
    return int(mean.masked_fill(~left, -torch.inf).argmax()), pairs


def evaluations(
    num_classes: int, asked: Sequence[tuple[LocalClient, Sequence[Tensor], Tensor]], network: Network
) -> list[Evaluation | None]:
    """How the mixture of each client's models, often a single one, does on its test data; None if it has none."""
    tested = [(client, models, log_weight) for client, models, log_weight in asked if len(client.test)]
    found = network.outputs([client.test_question(models) for client, models, _ in tested])
    done = {
        client.index: measured(network.likelihood, said, log_weight, client.test.y[client.test.index], num_classes)
        for (client, _, log_weight), said in zip(tested, found, strict=True)
    }
    return [done.get(client.index) for client, *_ in asked]


def wanted_models(present: Tensor, wanted: Tensor) -> dict[int, Tensor]:
    """Which models each client is to score, for the present clients that are to score any."""
    clients: list[int] = present.nonzero()[:, 0].tolist()
    return {client: wanted[client].nonzero()[:, 0] for client in clients if wanted[client].any()}


def among(num_models: int, own: Tensor, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """What a look at a client's own models tells, in its place among all models; NaN for the others."""
    all_means = torch.full((num_models,), torch.nan, dtype=torch.float64)
    all_covariances = torch.full((num_models, num_models), torch.nan, dtype=torch.float64)
    all_means[own] = mean
    all_covariances[own[:, None], own] = covariance
    return all_means, all_covariances


@dataclass(frozen=True)
class Later:
    """A client once its data have changed, and the round in which they do; only simulations know beforehand."""

    round: int
    client: LocalClient
    group: int | None  # its true group from then on


def is_usable(posterior: Gaussian, variances: Sequence[slice] = ()) -> bool:
    """Whether a client's answer can be fused: finite, and small enough that its products and their sums stay so.

    And BatchNorm's running `variances` are none below 0: no network survives the square root of such a one.
    """
    bounded = all(_is_bounded(distinct(values)) for values in (posterior.mean, posterior.precision))
    return bounded and all(float(posterior.mean[part].min()) >= 0 for part in variances)


def _is_bounded(values: Tensor) -> bool:
    # No square exceeds their sum, which takes half as long as the extremes; the factor is for its rounding.
    # No comparison with a NaN is true.
    if float(values.dot(values)) <= LARGEST**2 / 2:
        return True
    return all(-LARGEST <= float(end) <= LARGEST for end in values.aminmax())


def continued_momentum(kept: dict[int, Tensor], parent: int) -> Tensor | None:
    """What a client kept of the belief's line of descent, or of its last belief if it trained elsewhere, if anything.

    The last is the one with the largest index: the order in which a checkpoint is read back must not matter.
    """
    return kept.get(parent, kept[max(kept)] if kept else None)
