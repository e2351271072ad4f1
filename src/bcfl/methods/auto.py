"""BCFL that is not told the number of clusters: they are born, joined and die; examples nobody trained on decide."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from bcfl.association.hypotheses import Branches, branch
from bcfl.association.seating import log_partition_prior, log_seat
from bcfl.belief.evidence import coarsen, sum_error
from bcfl.belief.gaussian import flat
from bcfl.belief.robust import bounded_scores
from bcfl.extensions.births import MEMORY, SKETCH, Pulls, Searching, Stories, View, events, heaviest, split, stacked
from bcfl.federation import Clients, Hypotheses, RoundInfo, num_held_out
from bcfl.methods.bounds import Defence, Forgetting, Fusing, MinWeight, ScoringExamples
from bcfl.methods.steps import Fuse, distinct_groups, single_story, train_groups


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
        told = kept if trial is None else stacked([kept, trial])
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
        info = RoundInfo(kept.parent, kept.assignment, kept.log_weight, tuple(events(past, kept)))
        return Searching(new, pulls.sketch), info

    def _associate(self, state: Hypotheses, clients: Clients, held_out: float) -> Stories:
        """The best stories: the past ones with clients moved or a cluster given up, and the trial."""
        scores = clients.score(state.models.mean, self.scoring_examples, held_out=held_out)
        held = num_held_out(clients.num_examples, held_out)
        num_scored = torch.where(held > 0, held, clients.num_examples)  # who holds out nothing is scored on all
        evidence = coarsen(scores, num_scored, self.effective_examples)[clients.present]  # (client, belief)
        evidence = bounded_scores(evidence, self.robust)
        views = [View(state, h, evidence, clients.present) for h in range(len(state.log_weight))]
        past, trials = ([v for v in views if (v.log_weight > -math.inf) == scored] for scored in (True, False))
        found = [view.story(view.own, self._carried(view) + self._posterior(view, view.own)) for view in past]
        others = [story for view in past for story in self._changed(view, searching=held_out > 0)]
        others += [story for trial in trials for story in self._born(past[0], trial)]
        # A grouping that several stories come to is told by the one that was there before: its models are made for it.
        found += sorted(others, key=lambda story: -float(story.log_weight))
        return heaviest(found, self.max_stories, self.min_weight)

    def _changed(self, view: View, searching: bool) -> Iterator[Stories]:
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

    def _born(self, before: View, trial: View) -> Iterator[Stories]:
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

    def _seated(self, view: View) -> Tensor:
        """What each client makes of each cluster, by its data and by who else is there."""  # (client, cluster)
        seat = log_seat(view.everyone(view.own), view.value.shape[1], self.concentration)
        return view.value + seat[view.present]

    def _carried(self, view: View) -> float:
        """What a hypothesis' past adds to the log-weight of its continuations: weights are smoothed over rounds.

        One that stays as it is weighs MEMORY times what it weighed and 1 − MEMORY times its posterior now.
        """
        return MEMORY * (view.log_weight - self._posterior(view, view.own))

    def _posterior(self, view: View, own: Tensor) -> float:
        """log p(grouping, data of the present clients), up to a constant."""
        return float(view.of(own).sum() + log_partition_prior(view.everyone(own), self.concentration))
