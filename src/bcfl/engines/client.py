"""What one client does when it is asked: the same in every engine, so that every engine gives the same numbers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bcfl import local
from bcfl.gaussian import Gaussian, distinct, temper
from bcfl.local import Evaluation, Examples, Training
from bcfl.models import FlatModel, ModelFactory, build
from bcfl.randomness import generator

LARGEST = 1e18  # of a mean or precision: training that went off beyond it has diverged


@dataclass(frozen=True)
class Layout:
    """How a run's flat vector is laid out: parameters, BatchNorm statistics, then momentum where it travels along."""

    num_parameters: int
    num_last_layer: int  # of the parameters, the last ones
    num_evaluated: int  # what a forward pass needs: parameters and BatchNorm statistics
    num_statistics: int  # all that follows the parameters

    @property
    def length(self) -> int:
        return self.num_parameters + self.num_statistics

    def numbers_sent(self, curvature: bool) -> int:
        """How many numbers a belief is when it travels: its precision counts only where curvature is learned."""
        return self.length + (self.num_parameters if curvature else 0)


def layout_of(model: FlatModel, training: Training) -> Layout:
    """The layout of the vectors by which a run with this model and training exchanges beliefs."""
    carried = model.num_parameters if training.momentum_state == "belief" else 0
    return Layout(model.num_parameters, model.num_last_layer, len(model.vector), model.num_statistics + carried)


def draw_model(factory: ModelFactory, layout: Layout, seed: int, *path: int) -> Tensor:
    """A freshly initialised model, a function of `seed` and `path`; carried momentum starts at rest."""  # (vector,)
    vector = torch.zeros(layout.length)
    vector[: layout.num_evaluated] = FlatModel(build(factory, seed, *path)).vector
    return vector


@dataclass(frozen=True)
class LocalClient:
    """A client's place in the federation, its data and how it trains; every draw is a function of round and client."""

    index: int
    train: Examples
    test: Examples
    training: Training
    seed: int
    draws_globally: bool  # whether the model draws from torch's global generator: see local.check_model

    def score(
        self, model: FlatModel, models: Tensor, round_index: int, max_examples: int | None, summary: local.Summary
    ) -> Tensor:
        """A number per model that says how well it explains the client's data."""  # (model, vector) -> (model,)
        return summary(self.log_likelihoods(model, models, round_index, max_examples), len(self.train))

    def log_likelihoods(self, model: FlatModel, models: Tensor, round_index: int, max_examples: int | None) -> Tensor:
        """log p(y|x) under each model of the examples that this round scores."""  # (model, example)
        rows = local.scoring_rows(len(self.train), max_examples, self._stream("score", round_index, self.index))
        return local.log_likelihoods(model, models, self.train, rows)

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
    ) -> tuple[Gaussian, Tensor]:
        """The client's posterior from the prior belief^strength, and the momentum at its end."""
        return local.fit(
            model,
            belief.mean if start is None else start,
            temper(belief[: model.num_parameters], strength),  # flat on the statistics: they have no part in it
            self.train,
            self.training,
            self._stream("fit", round_index, self.index),  # the same batches for every belief: a fair comparison
            curvature=curvature,
            num_steps=num_steps,
            momentum=momentum,
        )

    def evaluate(self, model: FlatModel, vector: Tensor, num_classes: int) -> Evaluation | None:
        """How the model does on the client's test data; None if it has none."""
        self._stream("evaluate", self.index)
        return local.evaluate(model, vector, self.test, num_classes) if len(self.test) else None

    def _stream(self, *path: int | str) -> torch.Generator:
        """The client's stream of that name; torch's global generator joins it if the model draws from that."""
        stream = generator(self.seed, *path)
        if self.draws_globally:
            torch.manual_seed(stream.initial_seed())
        return stream


def is_usable(posterior: Gaussian) -> bool:
    """Whether a client's answer can be fused: finite, and small enough that its products and their sums stay so."""
    extremes = (end for values in (posterior.mean, posterior.precision) for end in distinct(values).aminmax())
    return all(-LARGEST <= float(end) <= LARGEST for end in extremes)  # no comparison with a NaN is true


def continued_momentum(kept: dict[int, Tensor], parent: int) -> Tensor | None:
    """What a client kept of the belief's line of descent, or of its last belief if it trained elsewhere, if anything.

    The last is the one with the largest index: the order in which a checkpoint is read back must not matter.
    """
    return kept.get(parent, kept[max(kept)] if kept else None)
