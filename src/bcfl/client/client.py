"""What one client does when it is asked: the same in every engine, so that every engine gives the same numbers."""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bcfl.belief.gaussian import Gaussian, distinct, temper
from bcfl.client import trainer
from bcfl.client.examples import Examples
from bcfl.client.score import Evaluation, Summary, evaluate, log_mixture, scoring_rows, total_log_likelihood
from bcfl.client.trainer import Training
from bcfl.extensions.racing import moments, race
from bcfl.federation import num_held_out
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
    carried = model.num_parameters if training.momentum_state == "belief" else 0
    num_statistics = model.num_statistics + carried
    sizes = model.num_parameters, model.num_last_layer, len(model.vector), num_statistics
    return Layout(*sizes, model.variances, model.shapes, model.layers)


def draw_model(factory: ModelFactory, layout: Layout, seed: int, *path: int) -> Tensor:
    """A freshly initialised model, a function of `seed` and `path`; carried momentum starts at rest."""  # (vector,)
    vector = torch.zeros(layout.length)
    vector[: layout.num_evaluated] = FlatModel(build(factory, seed, *path)).vector
    return vector


class Learning(Protocol):
    """Whoever computes for a client: bcfl.client.trainer, or a device that does the same for many clients at once."""

    def fit(
        self,
        model: FlatModel,
        start: Tensor,
        prior: Gaussian,
        examples: Examples,
        training: Training,
        generator: torch.Generator,
        *,
        curvature: bool,
        num_steps: int | None = None,
        momentum: Tensor | None = None,
    ) -> tuple[Gaussian, Tensor]: ...

    def log_likelihoods(
        self, model: FlatModel, vectors: Tensor | Sequence[Tensor], examples: Examples, rows: Tensor
    ) -> Tensor: ...

    def log_probabilities(
        self, model: FlatModel, vectors: Tensor | Sequence[Tensor], examples: Examples, rows: Tensor
    ) -> Tensor: ...


@dataclass(frozen=True)
class LocalClient:
    """A client's place in the federation, its data and how it trains; every draw is a function of round and client."""

    index: int
    train: Examples
    test: Examples
    training: Training
    seed: int
    draws_globally: bool  # whether the model draws from torch's global generator: see check_model
    learning: Learning = trainer  # who computes
    holder: int | None = None  # whose data these were at first, where clients have changed data in mid-run

    def num_scored(self, max_examples: int | None, held_out: float = 0.0) -> int:
        """How many examples a score uses."""
        num_examples = self._num_held_out(held_out) or len(self.train)
        return min(num_examples, max_examples or num_examples)

    def score(
        self,
        model: FlatModel,
        models: Tensor | Sequence[Tensor],
        round_index: int,
        max_examples: int | None,
        summary: Summary,
        held_out: float = 0.0,
    ) -> Tensor:
        """A number per model that says how well it explains the client's data."""  # (model, vector) -> (model,)
        values = self.log_likelihoods(model, models, round_index, max_examples, held_out)
        return summary(values, len(self.scored(held_out)))

    def log_likelihoods(
        self,
        model: FlatModel,
        models: Tensor | Sequence[Tensor],
        round_index: int,
        max_examples: int | None,
        held_out: float = 0.0,
        part: tuple[int, int] | None = None,
    ) -> Tensor:
        """log p(y|x) under each model of the examples that this round scores.

        A part (first, last) is of these examples in a random order: as they lie they may be sorted by label.
        """  # (model, example)
        examples = self.scored(held_out)
        rows = scoring_rows(len(examples), max_examples, self._stream("score", round_index, self.index))
        if part is not None:
            order = torch.randperm(len(rows), generator=self._stream("look", round_index, self.index))
            rows = rows[order[slice(*part)]]
        return self.learning.log_likelihoods(model, models, examples, rows)

    def best(
        self,
        model: FlatModel,
        models: Tensor | Sequence[Tensor],
        round_index: int,
        max_examples: int | None,
        racing: float,
    ) -> tuple[int, int]:
        """The model that explains the client's data best, and how many (example, model) pairs were scored to find it.

        With `racing` it is another one with that probability at most: see `bcfl.extensions.racing`.
        """
        num_models, num_scored, pairs = len(models), self.num_scored(max_examples), 0
        if not racing:
            scores = self.score(model, models, round_index, max_examples, total_log_likelihood)
            return int(scores.argmax()), num_models * num_scored

        shared = SharedModels.of(models)

        def look(wanted: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
            nonlocal pairs
            own = wanted[0].nonzero()[:, 0]
            pairs += len(own) * (min(last, num_scored) - first)
            vectors = shared.only(own.tolist())
            part = self.log_likelihoods(model, vectors, round_index, max_examples, part=(first, last))
            mean, covariance = among(num_models, own, *moments(part))
            return mean[None], covariance[None]

        one, beliefs = torch.ones(1, dtype=torch.float64), torch.arange(num_models)[None]
        left, mean = race(look, one.bool(), one * num_scored, one, beliefs, one.log(), 1, racing)
        return int(mean.masked_fill(~left, -torch.inf).argmax()), pairs

    def scored(self, held_out: float) -> Examples:
        """The examples that scores are taken on: all, or those that are held out from training."""
        return self._part(held_out, held=True)

    def _num_held_out(self, held_out: float) -> int:
        return int(num_held_out(torch.tensor(len(self.train), dtype=torch.float64), held_out))

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

    def fit(
        self,
        model: FlatModel,
        belief: Gaussian,
        round_index: int,
        *,
        strength: float,
        curvature: bool,
        start: Tensor | None = None,
        num_steps: int | None = None,
        momentum: Tensor | None = None,
        held_out: float = 0.0,
    ) -> tuple[Gaussian, Tensor]:
        """The client's posterior from the prior belief^strength, and the momentum at its end."""
        return self.learning.fit(
            model,
            belief.mean if start is None else start,
            temper(belief[: model.num_parameters], strength),  # flat on the statistics: they have no part in it
            self._part(held_out, held=False),
            self.training,
            self._stream("fit", round_index, self.index),  # the same batches for every belief: a fair comparison
            curvature=curvature,
            num_steps=num_steps,
            momentum=momentum,
        )

    def evaluate(
        self, model: FlatModel, vectors: Tensor | Sequence[Tensor], log_weight: Tensor, num_classes: int
    ) -> Evaluation | None:
        """How the mixture of these models, often a single one, does on the client's test data; None if it has none."""
        if not len(self.test):
            return None
        self._stream("evaluate", self.index)
        log_p = self.learning.log_probabilities(model, vectors, self.test, torch.arange(len(self.test)))
        return evaluate(log_mixture(log_p, log_weight), self.test.y[self.test.index], num_classes)

    def _stream(self, *path: int | str) -> torch.Generator:
        """The client's stream of that name; torch's global generator joins it if the model draws from that."""
        stream = generator(self.seed, *path)
        if self.draws_globally:
            torch.manual_seed(stream.initial_seed())
        return stream


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
