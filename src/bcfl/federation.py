"""The contract between methods and engines: what a client can be asked, what a server remembers.

A client is asked only two kinds of things: *how likely is your data under these models?* (score; look and
share_explained are about the same numbers) and *train from this prior* (fit; fit_best scores first, in the same
exchange). A method turns the server's state into the next one with these questions; an engine answers them, on one
machine or across many. Neither knows more of the other than what stands here.

A model is one flat vector: its parameters first, then statistics that are not learned by gradient but travel with
them (BatchNorm's running mean and variance, and momentum where it is carried with the belief). A belief's precision
over the statistics is the number of examples behind them, so that fusing beliefs averages them by examples; as a
prior they are always flat.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from bcfl.belief.gaussian import Gaussian, temper
from bcfl.belief.heads import Asked, HeadLayout, Heads

Mixture = Mapping[int, float]  # model -> its share in what serves a client; the shares sum to one
Serving = tuple[Gaussian, Sequence[Mixture]]  # (model, vector), and of these each client's mixture


@dataclass(frozen=True)
class Hypotheses:
    """What the server believes between two rounds: weighted stories of who belongs where, and the models they imply.

    Each distinct belief is stored once; hypotheses refer to it by index. Methods without hypotheses have one.
    """

    models: Gaussian  # (belief, vector)
    model_of: Tensor  # (hypothesis, cluster) -> belief; −1: the hypothesis has no such cluster
    log_weight: Tensor  # (hypothesis,), normalised, best first; −∞: only proposed, to be scored in the next round
    assignment: Tensor  # (hypothesis, client) -> cluster; −1: never associated yet
    parent_of: Tensor  # (belief,) -> the belief it came from in the round before
    family: Tensor  # (hypothesis,) -> the initial draw of cluster models that it descends from

    @property
    def num_clusters(self) -> int:
        return self.model_of.shape[1]

    @property
    def hypotheses(self) -> "Hypotheses":
        """Itself: for many methods the state is nothing else."""
        return self

    def serving(self) -> None:
        """Clients are served by the models of their clusters."""
        return

    def model_of_client(self) -> Tensor:
        """The model of each client's cluster in the best hypothesis.

        A client that was never associated is served by the cluster with the most clients.
        """  # (client,) -> belief
        own, beliefs = self.assignment[0], self.model_of[0]
        size = torch.bincount(own[own >= 0], minlength=self.num_clusters)
        largest = torch.where(beliefs >= 0, size, -1).argmax()
        return beliefs[torch.where(own >= 0, own, largest)]


class State(Protocol):
    """What is asked of what a method remembers between two rounds: any frozen dataclass that tells these two things.

    Whatever else it holds is the method's own. It is stored and comes back as it was, if it is made of tensors, plain
    values, and lists, tuples, mappings and dataclasses of these, and if the annotations of `init` and `round` name it.
    """

    @property
    def hypotheses(self) -> Hypotheses:
        """Who belongs where, and the clusters' models; a method that knows no several stories tells the best one."""
        ...

    def serving(self) -> Serving | None:
        """What predicts for each client, for methods that give clients models of their own; None: its cluster's does.

        With None, predictions with uncertainty are mixtures over all hypotheses.
        """
        ...


@runtime_checkable
class OwnHeads(Protocol):
    """A state of a method whose clients each have a last layer of their own, which they make from these priors."""

    @property
    def heads(self) -> Heads | None: ...


def heads_in(state: State) -> Heads | None:
    """The priors of the clients' own last layers, where they have such."""
    heads = state.heads if isinstance(state, OwnHeads) else None
    return heads if isinstance(heads, Heads) else None  # a method may call something else so


def served(state: State) -> Serving:
    """What serves each client as one answer: what its state says, or its cluster's model in the best hypothesis."""
    serving = state.serving()
    if serving is not None:
        return serving
    hypotheses = state.hypotheses
    return hypotheses.models, [{model: 1.0} for model in hypotheses.model_of_client().tolist()]


@dataclass(frozen=True)
class Jobs:
    """Local trainings to be done, each distinct (belief, client) pair once.

    The prior of job i is models[belief[i]] to the power strength[i] on the parameters, and flat on the statistics.
    """

    belief: Tensor  # (job,)
    client: Tensor  # (job,)
    strength: Tensor | None = None  # (job,), 1 everywhere if None
    curvature: bool = False  # whether the posterior's precision is learned; else it counts examples
    start: Tensor | None = None  # (client, vector) where a client starts, if not at the prior's mean
    parent_of: Tensor | None = None  # (belief,) -> belief of the round before, whose momentum a client continues
    num_steps: int | None = None  # local steps, if not the usual number
    held_out: float = 0.0  # the share of its examples that a client does not train on: see num_held_out

    def __len__(self) -> int:
        return len(self.belief)


@dataclass(frozen=True)
class Choice:
    """A client's answer when it picks its own best belief and trains only that."""

    client: int
    belief: int
    posterior: Gaussian | None  # None: it did not come back in time, or came back non-finite


class Clients(Protocol):
    """The federation as a method sees it in one round; row order is client order, always."""

    num_examples: Tensor  # (client,) float64
    num_parameters: int
    num_last_layer: int  # of the parameters, the last ones: the model's last layer
    num_evaluated: int  # parameters, then BatchNorm's statistics: what predictions need; momentum may follow
    present: Tensor  # (client,) bool: who takes part in this round; one who fails to answer a score leaves it
    local_steps: int  # of one fit, unless its jobs say otherwise
    head: HeadLayout | None  # the last layer, if that is a torch.nn.Linear
    seed: int
    round: int

    def draw_model(self, *path: int) -> Tensor:
        """A freshly initialised model, a function of the run's seed and `path`."""  # (vector,)
        ...

    def score(
        self,
        models: Tensor,
        max_examples: int | None = None,
        held_out: float = 0.0,
        *,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Log-likelihood of each client's data under each model, scaled up to all of the client's examples.

        All models of a client are scored on the same examples (at most `max_examples`); rows of absent clients are NaN.
        With `held_out` a client's data are that share of its examples, which jobs of the same share never train on.
        With `wanted` (client, model) only those are scored, and all others are NaN.
        """  # (model, vector) -> (client, model) float64
        ...

    def look(
        self, models: Tensor, max_examples: int | None, wanted: Tensor, first: int, last: int
    ) -> tuple[Tensor, Tensor]:
        """Mean and covariance of the models' log-likelihoods over a part of the examples that a score would use.

        The part is first:last, as far as a client has so many, in an order that is random, but the same for all models
        and looks of a round. Only the `wanted` (client, model) are looked at; all others are NaN. A client that fails
        to answer leaves the round.
        """  # (model, vector) -> (client, model) and (client, model, model) float64
        ...

    def share_explained(self, models: Tensor, max_examples: int | None = None) -> Tensor:
        """The share of each client's examples that each model explains best; NaN for absent clients."""
        ...  # (model, vector) -> (client, model) float64

    def last_layer(self, asked: Asked, heads: Heads) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
        """What each present client's data say of its last layer, on the features of these models, in client order.

        `sums`: of products of features and targets, by folds, for normal noise; they say everything. `expansion`: the
        log-likelihood as a quadratic at the client's mode under each prior. `held_out`: for each candidate the
        log-likelihood of all examples, each while its fold was kept aside. Who does not answer is left out.
        """
        ...

    def fit(self, models: Gaussian, jobs: Jobs) -> Iterator[Gaussian | None]:
        """One local posterior per job, in the order of the jobs, as they become ready; None where none is usable."""
        ...

    def fit_best(
        self, models: Gaussian, strength: float, curvature: bool, max_examples: int | None, racing: float = 0.0
    ) -> Iterator[Choice]:
        """Score and fit in one exchange: every present client trains the one belief that explains its data best.

        With `racing` a client may miss its best belief with this probability, and scores less.
        """
        ...


@dataclass(frozen=True)
class RoundInfo:
    """What a reader wants to know about a round's associations, before any merging."""

    parent: Tensor  # (hypothesis,) -> hypothesis of the round before
    assignment: Tensor  # (hypothesis, client) -> cluster
    log_weight: Tensor  # (hypothesis,)
    events: tuple[dict[str, Any], ...] | None = None  # clusters that came or went, for methods in which they do
    # (client, cluster), or (hypothesis, client, cluster) by each one's own numbers, to six decimals: for methods that
    # know who belongs where otherwise than by weighing stories
    probability: Tensor | None = None


class Method(Protocol):
    """A federated method: how the server starts, and how one round turns its state into the next."""

    def init(self, clients: Clients) -> State: ...

    def round(self, state: Any, clients: Clients) -> tuple[State, RoundInfo]:
        """The next state; `state` is what `init` or an earlier round returned."""
        ...


@dataclass
class Work:
    """What a round has cost so far; engines count it, so that no method can forget to."""

    trainings: int = 0
    local_steps: int = 0
    scored_examples: int = 0  # (example, model) pairs
    spared_examples: int | None = None  # how many more a scoring without racing would have taken; None: no racing
    parameters_down: int = 0  # numbers sent to clients that belong to models
    parameters_up: int = 0
    scalars_up: int = 0  # scores, what looks tell, and choices
    exchanges: int = 0
    rejected: int = 0  # answers left out because they were not finite, or beyond all bounds
    late: int = 0  # answers left out because they did not come in time

    def as_dict(self) -> dict[str, int]:
        counts = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: count for name, count in counts.items() if count is not None}

    def count_scored(self, num_scored: int, num_without_racing: int | None = None) -> None:
        """Add scored (example, model) pairs and, where there is a race, how many it would have been without."""
        self.scored_examples += num_scored
        if num_without_racing is not None:
            self.spared_examples = (self.spared_examples or 0) + num_without_racing - num_scored

    def count_look(self, num_wanted: int, num_models: int, first: int, last: int, num_scored: int) -> None:
        """Add a client's look at first:last of the examples that it would score under all models without a race."""
        self.count_scored(num_wanted * (min(last, num_scored) - first), 0 if first else num_models * num_scored)
        self.scalars_up += num_wanted * (num_wanted + 1)  # means and covariances


def num_held_out(num_examples: Tensor, share: float) -> Tensor:
    """How many of a client's examples are held out from training: about that share and at least one, but two are
    left for training, because BatchNorm cannot train on one. None of a client that has no more."""  # (client,)
    if not share:
        return torch.zeros_like(num_examples)
    return (num_examples * share).round().clamp(min=1).minimum((num_examples - 2).clamp(min=0))


def prior_of(belief: Gaussian, strength: float, num_parameters: int) -> Gaussian:
    """The prior that a belief becomes for local training: belief^strength on the parameters, flat on the statistics."""
    precision = torch.zeros_like(belief.precision)
    precision[..., :num_parameters] = temper(belief[..., :num_parameters], strength).precision
    return Gaussian(belief.mean, precision)


def one_story(state: State) -> RoundInfo:
    """The associations of a state that holds a single hypothesis, as a round's info."""
    return RoundInfo(
        torch.zeros(1, dtype=torch.int64), state.hypotheses.assignment, torch.zeros(1, dtype=torch.float64)
    )
