"""The server's side: an engine like the simulator, whose clients are behind Flower's grid."""

from collections.abc import Sequence

import torch
from flwr.app import RecordDict
from flwr.serverapp import Grid
from torch import Tensor

import bcfl.engines.flower.lastlayer as lastlayer
from bcfl.belief.heads import Heads
from bcfl.client.client import layout_of
from bcfl.client.head import head_layout
from bcfl.client.trainer import Training
from bcfl.engines.flower.answers import read_evaluation
from bcfl.engines.flower.exchange import Ask, Exchange, Terms
from bcfl.engines.flower.questions import FlowerClients
from bcfl.engines.flower.roster import Roster
from bcfl.engines.flower.wire import EVALUATE, to_array
from bcfl.engines.participation import Participation
from bcfl.federation import Mixture, Work
from bcfl.likelihood.measures import Evaluation
from bcfl.model.flat import FlatModel, ModelFactory, build


class FlowerEngine:
    """The federation behind a Grid; `begin(round)` gives it as a method sees it in that round."""

    def __init__(
        self,
        grid: Grid,
        factory: ModelFactory,
        training: Training,
        seed: int,
        participation: Participation,
        terms: Terms,
    ):
        self.factory, self.training, self.seed, self.terms = factory, training, seed, terms
        probe = FlatModel(build(factory, seed, "probe"))
        self.layout = layout_of(probe, training)
        if 4 * self.layout.length > terms.model_bytes:
            raise ValueError(
                f"the model takes {4 * self.layout.length} bytes, deploy.model_bytes allows {terms.model_bytes}"
            )
        self.momentum: dict[int, dict[int, Tensor]] = {}  # always empty: clients keep their own
        self.exchange = Exchange(grid, terms)
        self.roster = Roster(self.exchange, self.layout, head_layout(probe), participation)
        self.roster.meet(0, everybody=True)

    def group_in(self, round_index: int) -> Tensor | None:
        """The clients' true groups in that round, if all of them told."""  # (client,)
        groups = [self.roster.sizes_in(client, round_index).group for client in range(self.terms.num_clients)]
        return None if min(groups) < 0 else torch.tensor(groups)

    def begin(self, round_index: int) -> FlowerClients:
        self.roster.meet(round_index, everybody=False)
        return FlowerClients(self.roster, self.factory, self.training, self.seed, round_index)

    def evaluate(
        self, models: Tensor, mixtures: Sequence[Mixture], round_index: int = 0, who: Tensor | None = None
    ) -> list[Evaluation | None]:
        """Each client's mixture on its own test data; None for a client without any, or without a sound answer."""
        roster, joined, num_evaluated = self.roster, self.roster.joined(round_index), self.layout.num_evaluated
        joined = joined if who is None else joined & who
        sizes = {c: roster.sizes_in(c, round_index) for c in roster.members if joined[c] and roster.online(c)}
        tested = [client for client, size in sizes.items() if size.num_test]
        needed = max((len(mixtures[c]) for c in tested), default=0) * 4 * num_evaluated
        if needed > max(self.terms.message_bytes, self.terms.model_bytes):
            raise ValueError(f"a client's mixture of models takes {needed} bytes, more than deploy.message_bytes and "
                             "deploy.model_bytes allow; switch experiment.mixture off or raise them")  # fmt: skip
        vectors = {m: to_array(models[m, :num_evaluated]) for m in set().union(*(mixtures[c] for c in tested))}
        asks = []
        for client in tested:
            arrays = {f"mean.{i}": vectors[m] for i, m in enumerate(mixtures[client])}
            shares = {"shares": list(mixtures[client].values())}
            asks.append(roster.question(client, round_index, shares, arrays))

        return self._evaluations(asks, round_index)

    def evaluate_heads(self, heads: Heads, round_index: int = 0, who: Tensor | None = None) -> list[Evaluation | None]:
        """Each client's own last layers on its own test data; None as in `evaluate`."""
        roster, joined = self.roster, self.roster.joined(round_index)
        joined = joined if who is None else joined & who
        there = [client for client in roster.members if joined[client] and roster.online(client)]
        settings = lastlayer.settings(heads)
        arrays = lastlayer.sent_heads(heads, self.layout.num_evaluated)
        tested = [client for client in there if roster.sizes_in(client, round_index).num_test]
        return self._evaluations(
            [roster.question(client, round_index, settings, arrays) for client in tested], round_index
        )

    def _evaluations(self, asks: Sequence[Ask], round_index: int) -> list[Evaluation | None]:
        """What the clients that are asked make of their test data."""

        def read(position: int, content: RecordDict) -> Evaluation:
            client = asks[position].client
            num_test = self.roster.sizes_in(client, round_index).num_test
            return read_evaluation(content, self.layout.likelihood, self.roster.members[client].num_classes, num_test)

        evaluations: list[Evaluation | None] = [None] * self.terms.num_clients
        for position, evaluation in self.exchange.ask(EVALUATE, round_index, asks, Work(), read):
            evaluations[asks[position].client] = evaluation
        return evaluations
