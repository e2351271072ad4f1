"""BCFL that is not told the number of clusters: they are born, joined and die; examples nobody trained on decide."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from bcfl.association.hypotheses import Branches, branch, normalise
from bcfl.association.seating import canonical, log_partition_prior, log_seat
from bcfl.belief.evidence import coarsen, sum_error
from bcfl.belief.gaussian import Gaussian, flat
from bcfl.belief.robust import bounded_scores
from bcfl.federation import Clients, Hypotheses, RoundInfo, num_held_out
from bcfl.methods.bounds import Defence, Forgetting, Fusing, MinWeight, ScoringExamples
from bcfl.methods.kmeans import k_means
from bcfl.methods.steps import Fuse, distinct_groups, single_story, train_groups
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


@dataclass(frozen=True)
class AutoBCFL:
    """Starts from one cluster; every round one cluster is split in two on trial, and any of them may be given up.

    The halves of a trial are two more fusions of local posteriors that are made anyway, so a trial costs no training.
    It is scored in the next round beside the clusters that there are, on examples that are held out from training.
    """

    concentration: Annotated[
        float,
        Field(ge=1e-9, le=1e9, description="α of the Chinese-restaurant prior: small favours few clusters"),
    ] = 0.1
    held_out: Annotated[
        float, Field(gt=0, lt=1, description="the share of each client's examples that decides about clusters")
    ] = 0.2
    effective_examples: Annotated[
        float, Field(ge=1e-9, le=1e9, description="a client's held-out examples count as at most so many")
    ] = 24.0
    caution: Annotated[
        float, Field(ge=0, le=1e9, description="the standard errors by which a birth or a joining must win")
    ] = 2.0
    search_rounds: Annotated[
        Annotated[int, Field(ge=0)] | None,
        Field(description="then the clusters stay, and clients train on all of their examples"),
    ] = 30
    max_stories: Annotated[int, Field(ge=1, le=1000, description="how many groupings are carried on")] = 2
    min_weight: MinWeight = 0.1
    fusion: Fusing = "geometric"
    forgetting: Forgetting = 0.5
    scoring_examples: ScoringExamples = 320
    robust: Defence = "none"

    def init(self, clients: Clients) -> Searching:
        num_clients = len(clients.present)
        start = single_story(flat(clients.draw_model(0, 0)[None]), torch.full((num_clients,), -1))
        return Searching(start, torch.zeros(num_clients, SKETCH))

    def round(self, state: Searching, clients: Clients) -> tuple[Searching, RoundInfo]:
        past = state.hypotheses
        rounds_left = math.inf if self.search_rounds is None else self.search_rounds - clients.round
        held_out = self.held_out if rounds_left >= 0 else 0.0
        kept = self._associate(past, clients, held_out)
        trial = split(kept, state.sketch, clients) if rounds_left > 0 else None
        told = kept if trial is None else _stack([kept, trial])
        branches = Branches(torch.arange(len(told)), told.assignment, told.log_weight)
        groups = distinct_groups(told.model_of, branches, clients.present)
        pulls = Pulls(state, kept, clients)
        fuse = Fuse(self.fusion, self.forgetting, self.robust)
        folds = train_groups(past, groups, clients, fuse, held_out, pulls.add)
        num_beliefs = int(groups.model_of[: len(kept)].max()) + 1  # the halves of a trial come last
        complete = bool(folds.trained[num_beliefs:].all())  # half a trial is none
        rows, beliefs = (slice(None), slice(None)) if complete else (slice(len(kept)), slice(num_beliefs))
        unscored = kept.log_weight.new_full((len(told) - len(kept),), -math.inf)
        new = Hypotheses(
            models=folds.results()[beliefs],
            model_of=groups.model_of[rows],
            log_weight=torch.cat([kept.log_weight, unscored])[rows],
            assignment=told.assignment[rows],
            parent_of=groups.belief[beliefs],
            family=torch.zeros(len(told), dtype=torch.int64)[rows],
        )
        info = RoundInfo(kept.parent, kept.assignment, kept.log_weight, tuple(_events(past, kept)))
        return Searching(new, pulls.sketch), info

    def _associate(self, state: Hypotheses, clients: Clients, held_out: float) -> Stories:
        """The best stories: the past ones with clients moved or a cluster given up, and the trial."""
        scores = clients.score(state.models.mean, self.scoring_examples, held_out=held_out)
        held = num_held_out(clients.num_examples, held_out)
        num_scored = torch.where(held > 0, held, clients.num_examples)  # who holds out nothing is scored on all
        evidence = coarsen(scores, num_scored, self.effective_examples)[clients.present]  # (client, belief)
        evidence = bounded_scores(evidence, self.robust)
        views = [_View(state, h, evidence, clients.present) for h in range(len(state.log_weight))]
        past, trials = ([v for v in views if (v.log_weight > -math.inf) == scored] for scored in (True, False))
        found = [view.story(view.own, self._carried(view) + self._posterior(view, view.own)) for view in past]
        others = [story for view in past for story in self._changed(view, searching=held_out > 0)]
        others += [story for trial in trials for story in self._born(past[0], trial)]
        # A grouping that several stories come to is told by the one that was there before: its models are made for it.
        found += sorted(others, key=lambda story: -float(story.log_weight))
        return _heaviest(found, self.max_stories, self.min_weight)

    def _changed(self, view: "_View", searching: bool) -> Iterator[Stories]:
        """The hypothesis with the likeliest moves of clients, and without each one of its clusters."""
        seated = self._seated(view)
        best = branch(torch.zeros(1), -seated[None], self.max_stories).assignment
        carried = self._carried(view)
        for own in best:
            yield view.story(own, carried + self._posterior(view, own))
        for cluster in best[0].unique() if searching else ():
            elsewhere = seated.index_fill(1, cluster, -math.inf)
            if elsewhere.isfinite().any():
                leaving = best[0] == cluster
                own = torch.where(leaving, elsewhere.argmax(1), best[0])
                change = view.of(own) - view.of(best[0])
                doubt = self.caution * sum_error(change[leaving], own[leaving])
                yield view.story(own, carried + self._posterior(view, own) - doubt)

    def _born(self, before: "_View", trial: "_View") -> Iterator[Stories]:
        """The trial, judged with the halves as they were proposed: a choice after the scores would flatter it.

        Where it beats what was there, it is also told with every client in its best cluster, as what was there is.
        """
        changed = trial.belief_of(trial.own) != before.belief_of(before.own)
        halves = trial.own[changed]
        if len(halves.unique()) == 2:
            change = trial.of(trial.own) - before.of(before.own)
            doubt = self.caution * sum_error(change[changed], halves)
            proposed, carried = self._posterior(trial, trial.own) - doubt, self._carried(before)
            yield trial.story(trial.own, carried + proposed, parent=0)
            if proposed > self._posterior(before, before.own):
                moved = self._seated(trial).argmax(1)
                yield trial.story(moved, carried + self._posterior(trial, moved) - doubt, parent=0)

    def _seated(self, view: "_View") -> Tensor:
        """What each client makes of each cluster, by its data and by who else is there."""  # (client, cluster)
        seat = log_seat(view.everyone(view.own), view.value.shape[1], self.concentration)
        return view.value + seat[view.present]

    def _carried(self, view: "_View") -> float:
        """What a hypothesis' past adds to the log-weight of its continuations: weights are smoothed over rounds.

        One that stays as it is weighs MEMORY times what it weighed and 1 − MEMORY times its posterior now.
        """
        return MEMORY * (view.log_weight - self._posterior(view, view.own))

    def _posterior(self, view: "_View", own: Tensor) -> float:
        """log p(grouping, data of the present clients), up to a constant."""
        return float(view.of(own).sum() + log_partition_prior(view.everyone(own), self.concentration))


class _View:
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


def _stack(stories: list[Stories]) -> Stories:
    """The stories one below the other; where one has fewer clusters, the others' are missing in it."""
    width = max(one.model_of.shape[1] for one in stories)
    return Stories(
        torch.cat([one.parent for one in stories]),
        torch.cat([F.pad(one.model_of, (0, width - one.model_of.shape[1]), value=-1) for one in stories]),
        torch.cat([one.assignment for one in stories]),
        torch.cat([one.log_weight for one in stories]),
    )


def _heaviest(found: list[Stories], max_stories: int, min_weight: float) -> Stories:
    """The heaviest stories, without those under `min_weight`; of those that group alike only the first."""
    distinct: dict[tuple[int, ...], Stories] = {}
    for one in found:
        distinct.setdefault(canonical(one.assignment[0]), one)
    kept = sorted(distinct.values(), key=lambda one: -float(one.log_weight))[:max_stories]
    share = normalise(torch.cat([one.log_weight for one in kept])).exp()
    kept = [one for i, one in enumerate(kept) if i == 0 or share[i] >= min_weight]
    stories = _stack(kept)
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


def _events(state: Hypotheses, kept: Stories) -> Iterator[dict[str, Any]]:
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
