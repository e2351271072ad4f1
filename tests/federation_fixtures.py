"""Tiny federations: clients that train for real within milliseconds, and clients whose answers are closed forms."""

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bcfl.association.conceptual import ConjugateClient
from bcfl.association.hypotheses import Branches
from bcfl.belief.gaussian import Gaussian
from bcfl.client.examples import Examples, pool
from bcfl.client.together import Together
from bcfl.client.trainer import Training
from bcfl.data.arrays import from_arrays
from bcfl.data.partition import FederatedData
from bcfl.engines.participation import Participation
from bcfl.engines.simulator import SimulatedClients, Simulator
from bcfl.federation import Choice, Jobs, Method, Mixture, RoundInfo, State, prior_of, served
from bcfl.methods import METHODS
from bcfl.randomness import generator

NUM_FEATURES, NUM_CLASSES = 4, 3


def numbered(name: str) -> list[str]:
    """The names that a registry entry stands for, with 2 and 3 for M and with and without warm-up."""
    names = [name.replace("-M", f"-{m}") for m in (2, 3)] if name.endswith("-M") else [name]
    return [n + suffix for n in names for suffix in (("", "-w") if re.match("bcfl-(g|c|mh|soft)", name) else ("",))]


# An option that changes what a state holds is tested as if it were a method of its own.
METHOD_NAMES = [name for entry in METHODS for name in numbered(entry)]
METHOD_NAMES += [f"{name} stay=learn" for name in ("bcfl-g", "bcfl-c-2", "bcfl-mh-3")]
OPTIONS = {"num_clusters": 2, "scoring_examples": 16, "selection": 3}


def linear() -> nn.Module:
    return nn.Linear(NUM_FEATURES, NUM_CLASSES)


def network() -> nn.Module:
    """Every kind of part that a vector is made of: two layers, BatchNorm statistics, a batch counter."""
    return nn.Sequential(
        nn.Linear(NUM_FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, NUM_CLASSES)
    )


def alike() -> Callable[[], nn.Module]:
    """A factory that returns the same numbers whenever it is called, as one of pretrained weights does."""
    net = network()
    return lambda: copy.deepcopy(net)


def client_data(
    num_clients: int = 6, num_groups: int = 2, num_examples: int = 24, equal: bool = False, seed: int = 0
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Clients of group j mod G, whose labels follow their group's linear rule; sizes differ unless `equal`."""
    draws = generator(seed, "tiny federation")
    rules = 3 * torch.randn(num_groups, NUM_FEATURES, NUM_CLASSES, generator=draws)
    clients = []
    for j in range(num_clients):
        size = num_examples if equal else num_examples + 2 * j
        x = torch.randn(size + 10, NUM_FEATURES, generator=draws)
        y = (x @ rules[j % num_groups]).argmax(1)
        clients.append((x[:size], y[:size], x[size:], y[size:]))
    return clients


def tiny_federation(**options: Any) -> FederatedData:
    return from_arrays(client_data(**options))


def examples_of(x: Tensor, y: Tensor) -> Examples:
    """All rows as one client's examples."""
    laid_out, images = pool(x)
    return Examples(laid_out, y, torch.arange(len(y)), images)


def simulator(
    data: FederatedData | None = None,
    factory: Callable[[], nn.Module] = network,
    training: Training | None = None,
    participation: Participation | None = None,
    num_workers: int = 1,
    seed: int = 0,
    device: str = "cpu",
    together: Together = None,
) -> Simulator:
    own, training = data or tiny_federation(), training or Training(local_steps=3, batch_size=8)
    return Simulator(factory, own, training, seed, participation, num_workers, device, together)


def advance(method: Method, engine: Simulator, state: Any, rounds: range) -> Any:
    for index in rounds:
        state, _ = method.round(state, engine.begin(index))
    return state


def asked(state: State) -> tuple[Tensor, list[Mixture]]:
    """What an engine is asked to evaluate."""
    models, mixtures = served(state)
    return models.mean, mixtures


def predictors(state: State) -> tuple[Tensor, Tensor]:
    """The models in use, and which of them serves each client."""
    models, mixtures = asked(state)
    return models, torch.tensor([next(iter(mixture)) for mixture in mixtures])


def run(method: Method, engine: Simulator, num_rounds: int) -> Any:
    """The state after so many rounds from the beginning."""
    return advance(method, engine, method.init(engine.begin(0)), range(1, num_rounds + 1))


def one_round(method: Method, engine: Simulator, state: Any) -> tuple[Any, RoundInfo, SimulatedClients]:
    clients = engine.begin(1)
    new, info = method.round(state, clients)
    return new, info, clients


def by_story(kept: Branches) -> dict[tuple[int, ...], float]:
    """The log-weight of each hypothesis that is kept, by its parent and its assignment."""
    stories = zip(kept.parent.tolist(), kept.assignment.tolist(), kept.log_weight.tolist(), strict=True)
    return {(parent, *assignment): weight for parent, assignment, weight in stories}


@dataclass
class ConjugateClients:
    """Clients of linear-Gaussian models, answering exactly: no training, no approximation, no chance.

    A fit is the closed-form posterior, wherever it starts; its momentum and statistics do not exist.
    """

    clients: Sequence[ConjugateClient]
    starts: Tensor  # (draw, cluster, parameter): what draw_model(draw, cluster) gives
    num_examples: Tensor  # (client,) float64
    round: int = 0
    seed: int = 0
    num_last_layer: int = 1
    absent: frozenset[int] = frozenset()
    silent: frozenset[int] = frozenset()  # clients whose fits do not come back
    shares: Tensor | None = None  # (client, model): the answer to share_explained
    held: Sequence[ConjugateClient] | None = None  # what clients hold out, where they are asked to
    fitted: list[tuple[int, int]] = field(default_factory=list)  # (belief, client) of every fit so far
    local_steps: int = 1

    @property
    def num_parameters(self) -> int:
        return self.starts.shape[-1]

    @property
    def num_evaluated(self) -> int:
        return self.num_parameters

    @property
    def present(self) -> Tensor:
        return torch.tensor([j not in self.absent for j in range(len(self.clients))])

    def draw_model(self, *path: int) -> Tensor:
        return self.starts[path].clone()

    def score(
        self,
        models: Tensor,
        max_examples: int | None = None,
        held_out: float = 0.0,
        *,
        wanted: Tensor | None = None,
    ) -> Tensor:
        scored = self.held if held_out and self.held is not None else self.clients
        scores = torch.stack([client.log_likelihood(models).double() for client in scored])
        asked = self.present[:, None] if wanted is None else wanted & self.present[:, None]
        return torch.where(asked, scores, torch.nan)

    def share_explained(self, models: Tensor, max_examples: int | None = None) -> Tensor:
        assert self.shares is not None
        return torch.where(self.present[:, None], self.shares, torch.nan)

    def fit(self, models: Gaussian, jobs: Jobs) -> Iterator[Gaussian | None]:
        for i, (belief, j) in enumerate(zip(jobs.belief.tolist(), jobs.client.tolist(), strict=True)):
            strength = 1.0 if jobs.strength is None else float(jobs.strength[i])
            yield self._posterior(models[belief], belief, j, strength, jobs.curvature)

    def fit_best(
        self, models: Gaussian, strength: float, curvature: bool, max_examples: int | None, racing: float = 0.0
    ) -> Iterator[Choice]:
        best = self.score(models.mean).argmax(1).tolist()
        for j in self.present.nonzero()[:, 0].tolist():
            yield Choice(j, best[j], self._posterior(models[best[j]], best[j], j, strength, curvature))

    def _posterior(self, model: Gaussian, belief: int, j: int, strength: float, curvature: bool) -> Gaussian | None:
        self.fitted.append((belief, j))
        if j in self.silent:
            return None
        posterior = self.clients[j].posterior(prior_of(model, strength, self.num_parameters))
        if curvature:
            return posterior
        return Gaussian(posterior.mean, torch.full_like(posterior.mean, float(self.num_examples[j])))


def pulled_clients(targets: Tensor, num_examples: Sequence[float], starts: Tensor, **options: Any) -> ConjugateClients:
    """Clients with mean loss ½‖θ − target‖², so that every local solution can be written down."""
    sizes = torch.tensor(num_examples, dtype=torch.float64)
    clients = [ConjugateClient(t, torch.full_like(t, float(n)), 0.0) for t, n in zip(targets, sizes, strict=True)]
    return ConjugateClients(clients, starts, sizes, **options)
