"""Births, joinings and deaths of clusters: trial splits by where clients' data pull, and the stories that they make."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bcfl.association.hypotheses import normalise
from bcfl.association.k_means import k_means
from bcfl.association.seating import canonical
from bcfl.belief.gaussian import Gaussian
from bcfl.federation import Clients, Hypotheses
from bcfl.randomness import generator, stream_seed

SKETCH = 512  # numbers that stand for a client's update: squared distances keep to within about 2/√512
MEMORY = 0.5  # the share of the round before in a story's weight and in a sketch: the data are the same again


@dataclass(frozen=True)
class Searching:
    """The hypotheses, the last of them perhaps a trial, and where its data pull each client's model."""

    hypotheses: Hypotheses
    sketch: Tensor  # (client, number)

    def serving(self) -> None:
        """Clients are served by the models of their clusters."""
        return


@dataclass(frozen=True)
class Stories:
    """Stories of a round before it is trained: which clusters there are, from which beliefs, and who is in them."""

    parent: Tensor  # (story,) -> hypothesis of the round before
    model_of: Tensor  # (story, cluster) -> belief that it continues; −1: no such cluster
    assignment: Tensor  # (story, client) -> cluster
    log_weight: Tensor  # (story,)

    def __len__(self) -> int:
        return len(self.parent)


class View:
    """One hypothesis as the present clients see it."""

    def __init__(self, state: Hypotheses, h: int, evidence: Tensor, present: Tensor):
        self._state, self._h, self.present, self._beliefs = state, h, present, state.model_of[h]
        self.log_weight = float(state.log_weight[h])
        self.value = evidence[:, self._beliefs].masked_fill(self._beliefs < 0, -math.inf)  # (client, cluster)
        own = state.assignment[h, present]
        self.own = torch.where(own >= 0, own, self.value.argmax(1))  # (client,) -> cluster; a newcomer in its best

    def of(self, own: Tensor) -> Tensor:
        """What the clients' data say for the clusters that they are given."""  # (client,)
        return self.value.gather(1, own[:, None])[:, 0]

    def everyone(self, own: Tensor) -> Tensor:
        """The grouping with the present clients where `own` says; the absent stay where they were."""
        return self._state.assignment[self._h].masked_scatter(self.present, own)  # (client,) -> cluster

    def belief_of(self, own: Tensor) -> Tensor:
        return self._beliefs[own]  # (client,) -> belief

    def story(self, own: Tensor, log_weight: float, parent: int | None = None) -> Stories:
        """The hypothesis with the present clients where `own` says; clusters without any client are gone."""
        parent = self._h if parent is None else parent
        assignment = self._state.assignment[parent].clone()  # absent clients stay where they were
        assignment[self.present] = own
        size = torch.bincount(assignment[assignment >= 0], minlength=len(self._beliefs))
        weight = torch.tensor([log_weight], dtype=torch.float64)
        return Stories(torch.tensor([parent]), torch.where(size > 0, self._beliefs, -1)[None], assignment[None], weight)


def stacked(stories: list[Stories]) -> Stories:
    """The stories one below the other; where one has fewer clusters, the others' are missing in it."""
    width = max(one.model_of.shape[1] for one in stories)
    return Stories(
        torch.cat([one.parent for one in stories]),
        torch.cat([F.pad(one.model_of, (0, width - one.model_of.shape[1]), value=-1) for one in stories]),
        torch.cat([one.assignment for one in stories]),
        torch.cat([one.log_weight for one in stories]),
    )


def heaviest(found: list[Stories], max_stories: int, min_weight: float) -> Stories:
    """The heaviest stories, without those under `min_weight`; of those that group alike only the first."""
    distinct: dict[tuple[int, ...], Stories] = {}
    for one in found:
        distinct.setdefault(canonical(one.assignment[0]), one)
    kept = sorted(distinct.values(), key=lambda one: -float(one.log_weight))[:max_stories]
    share = normalise(torch.cat([one.log_weight for one in kept])).exp()
    kept = [one for i, one in enumerate(kept) if i == 0 or share[i] >= min_weight]
    stories = stacked(kept)
    width = int((stories.model_of >= 0).any(0).nonzero().max()) + 1
    return Stories(stories.parent, stories.model_of[:, :width], stories.assignment, normalise(stories.log_weight))


def split(stories: Stories, sketch: Tensor, clients: Clients) -> Stories | None:
    """The best story with one of its clusters split in two by where its clients' data pull; None if none can be.

    The clusters take turns. Whoever is absent stays with the larger half, which keeps the cluster's number.
    """
    model_of, own = stories.model_of[0], stories.assignment[0]
    known = clients.present & sketch.any(1)
    members_of = {k: (known & (own == k)).nonzero()[:, 0] for k in (model_of >= 0).nonzero()[:, 0].tolist()}
    clusters = [k for k, members in members_of.items() if len(members) > 1]
    if not clusters:
        return None
    cluster = clusters[clients.round % len(clusters)]
    members = members_of[cluster]
    points, weight = F.normalize(sketch[members]), torch.ones(len(members), dtype=torch.float64)
    half = k_means(points, weight, 2, stream_seed(clients.seed, "split", clients.round))
    smaller = half == int(2 * int(half.sum()) <= len(half))
    if not smaller.any() or smaller.all():  # all updates are the same
        return None
    model_of = F.pad(model_of, (0, 1), value=-1)
    newborn = int((model_of < 0).nonzero()[0])
    model_of[newborn] = model_of[cluster]
    assignment = own.clone()
    assignment[members[smaller]] = newborn
    return Stories(stories.parent[:1], model_of[None], assignment[None], stories.log_weight[:1])


class Pulls:
    """Where each client's data pull its model: a running mean of its normalised updates, as short sketches.

    Number i of a sketch is the sum, with random signs, of every 512th entry of the update from the i-th on. It takes
    one pass, and keeps distances in expectation; so the server need not hold C updates to see which are alike.
    """

    def __init__(self, state: Searching, stories: Stories, clients: Clients):
        self.sketch = state.sketch.clone()  # (client, number)
        self._means, self._size = state.hypotheses.models.mean, clients.num_parameters
        self._own = stories.model_of[0][stories.assignment[0]]  # (client,) -> belief, in the best story
        draws = generator(clients.seed, "sketch")
        self._sign = torch.randint(0, 2, (self._size,), generator=draws, dtype=torch.int8).mul_(2).sub_(1)

    def add(self, belief: int, client: int, posterior: Gaussian) -> None:
        if belief == self._own[client]:
            update = (posterior.mean[: self._size] - self._means[belief, : self._size]).mul_(self._sign)
            sketch = F.pad(update, (0, -self._size % SKETCH)).view(-1, SKETCH).sum(0)
            self.sketch[client] = MEMORY * self.sketch[client] + F.normalize(sketch, dim=0)


def events(state: Hypotheses, kept: Stories) -> Iterator[dict[str, Any]]:
    """The clusters that came and went in each story since its parent, and where their clients were or are."""
    for h, parent in enumerate(kept.parent.tolist()):
        before, now = state.assignment[parent], kept.assignment[h]
        was = {k for k, belief in enumerate(state.model_of[parent].tolist()) if belief >= 0}
        is_now = {k for k, belief in enumerate(kept.model_of[h].tolist()) if belief >= 0}
        for cluster in sorted(is_now - was):
            origin = before[now == cluster].unique().tolist()
            yield {"kind": "birth", "hypothesis": h, "cluster": cluster, "from": origin}
        for cluster in sorted(was - is_now):
            into = now[before == cluster].unique().tolist()
            if len(into) == 1:
                yield {"kind": "merge", "hypothesis": h, "cluster": into[0], "from": sorted([*into, cluster])}
            else:
                yield {"kind": "death", "hypothesis": h, "cluster": cluster, "from": [cluster], "into": into}
