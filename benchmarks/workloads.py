"""What is measured: the paper's nets on made-up clients in separate groups, and the same steps in a bare loop."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import local as thread_local

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.utils import convert_conv2d_weight_memory_format

from bcfl.association.hypotheses import Branches
from bcfl.client.examples import batches
from bcfl.client.trainer import Training
from bcfl.data.arrays import from_arrays
from bcfl.data.partition import FederatedData
from bcfl.engines.heap import keep_freed_memory
from bcfl.engines.simulator import Simulator
from bcfl.federation import Hypotheses, Method, State
from bcfl.methods.bcfl import BCFL
from bcfl.methods.steps import Fuse, distinct_groups, single_story, train_groups
from bcfl.model.flat import ModelFactory, build
from bcfl.model.zoo import amazon_mlp, cifar_cnn, digits_five_cnn, fashion_cnn, mlp
from bcfl.randomness import generator

SEED = 0


@dataclass(frozen=True)
class Workload:
    """A net, the shape of its inputs and the federation that trains it."""

    name: str
    factory: ModelFactory
    shape: tuple[int, ...]
    num_clients: int = 40
    num_groups: int = 4
    num_examples: int = 320  # of every client
    num_classes: int = 10
    training: Training = field(default_factory=lambda: Training(learning_rate=0.005))  # the paper's

    @property
    def group(self) -> Tensor:
        """Every client's, by turns."""  # (client,)
        return torch.arange(self.num_clients) % self.num_groups

    def data(self) -> FederatedData:
        """Clients whose groups call the same kinds of input by different labels: trained beliefs tell them apart.

        Clients of one group hold the same examples: no figure depends on it, and memory stays small.
        """
        draws = generator(SEED, "workload")
        kinds = torch.randn(self.num_classes, *self.shape, generator=draws)
        kind = torch.arange(self.num_groups * self.num_examples) % self.num_classes
        x = kinds[kind] + torch.randn(len(kind), *self.shape, generator=draws)
        y = (kind + torch.arange(len(kind)) // self.num_examples) % self.num_classes
        own = torch.arange(len(kind)).split(self.num_examples)
        nothing = torch.empty(0, dtype=torch.int64)
        held, tested = tuple(own[g] for g in self.group), (nothing,) * self.num_clients
        return FederatedData(x, y, x[:1], y[:1], held, tested, self.group, self.num_classes, 0, "made up")

    def simulator(self, num_workers: int) -> Simulator:
        keep_freed_memory(self.factory)  # before there are data, as in a run
        return Simulator(self.factory, self.data(), self.training, SEED, num_workers=num_workers, together="auto")


NETS = (
    Workload("Fashion-MNIST net", fashion_cnn, (1, 28, 28)),
    Workload("CIFAR-10 net", cifar_cnn, (3, 32, 32)),
    Workload("AmazonReview net", amazon_mlp, (5000,), num_classes=2),
    Workload("Digits-Five net", digits_five_cnn, (3, 28, 28), num_clients=10, num_groups=5),
)
TINY = Workload("64-32-10 net", mlp, (64,), num_examples=32, training=Training(local_steps=1))


def turned_digits(num_clients: int, num_examples: int = 320, num_groups: int = 4) -> FederatedData:
    """Real digits: each client has drawn so many of scikit-learn's, turned by as many quarters as its group's number.

    Clients may hold the same images: there are fewer than they need, and racing compares models, not clients.
    """
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32).view(-1, 8, 8) / 16, torch.tensor(labels)
    clients = []
    for client in range(num_clients):
        own = torch.randperm(len(x), generator=generator(SEED, "digits", client))[:num_examples]
        turned = x[own].rot90(client % num_groups, (1, 2)).flatten(1)
        clients.append((turned, y[own], turned[:1], y[own][:1]))
    return from_arrays(clients)


def round_of(method: Method, engine: Simulator, num_rounds: int = 1) -> tuple[Callable[[], object], State]:
    """One round of the method, to be played as often as wished, from where so many rounds before have led."""
    state = method.init(engine.begin(0))
    for index in range(1, num_rounds + 1):
        state, _ = method.round(state, engine.begin(index))
    return lambda: method.round(state, engine.begin(num_rounds + 1)), state


def with_known_groups(method: BCFL, engine: Simulator, group: Tensor, num_rounds: int) -> Hypotheses:
    """The state after so many rounds in which every client trained its own group's belief.

    Left to itself a random start may well put all clients into one cluster: what a round costs once the groups are
    apart must not hang on that.
    """
    state = method.init(engine.begin(0)).hypotheses
    truth = Branches(torch.zeros(1, dtype=torch.int64), group[None], torch.zeros(1, dtype=torch.float64))
    for index in range(1, num_rounds + 1):
        clients = engine.begin(index)
        groups = distinct_groups(state.model_of, truth, clients.present)
        folds = train_groups(state, groups, clients, Fuse(method.fusion, method.forgetting))
        state = single_story(folds.results(), group)
    return state


class BareLoop:
    """The training steps of a FedAvg round in plain torch, as one would write them for speed and nothing else.

    Modules and images lie in channels-last format, one-thread workers take client after client from a common queue,
    gradients are not zeroed but dropped, the optimiser is torch's own in its fused form. The batches are the same.
    """

    def __init__(self, workload: Workload, num_workers: int):
        data = workload.data()
        self._images = len(workload.shape) == 3
        self._x = data.x_train.permute(0, 2, 3, 1).contiguous() if self._images else data.x_train
        self._y, self._held, self._workload = data.y_train, data.train_of, workload
        self._start = [p.detach().clone() for p in self._module().parameters()]
        self._own = thread_local()
        self._workers = ThreadPoolExecutor(num_workers, initializer=self._start_worker)

    def _module(self) -> nn.Module:
        module = build(self._workload.factory, SEED, "bare")
        return convert_conv2d_weight_memory_format(module, torch.channels_last) if self._images else module

    def _start_worker(self) -> None:
        torch.set_num_threads(1)
        self._own.module, training = self._module(), self._workload.training
        parameters = self._own.module.parameters()
        self._own.optimiser = torch.optim.SGD(parameters, training.learning_rate, training.momentum, fused=True)

    def __call__(self) -> None:
        for _ in self._workers.map(self._train, range(self._workload.num_clients)):
            pass

    def _train(self, client: int) -> None:
        module, training, held = self._own.module, self._workload.training, self._held[client]
        with torch.no_grad():
            for parameter, start in zip(module.parameters(), self._start, strict=True):
                parameter.copy_(start)
        optimiser = self._own.optimiser
        optimiser.state.clear()  # a client starts at rest; a new optimiser for each would take longer
        stream = generator(SEED, "fit", 1, client)  # as the engine draws in its first round
        for rows in batches(len(held), training.batch_size, training.local_steps, stream):
            x, y = self._batch(held[rows])
            optimiser.zero_grad()
            F.cross_entropy(module(x), y).backward()
            optimiser.step()

    def _batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        x = self._x.index_select(0, rows)
        return (x.permute(0, 3, 1, 2) if self._images else x), self._y.index_select(0, rows)

    def close(self) -> None:
        self._workers.shutdown()
