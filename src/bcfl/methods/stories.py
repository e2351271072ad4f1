"""Stories that turn out to be one: joined, merged, or the heaviest kept for all of them."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bcfl.association.distinct import alike, futures, heaviest_of_each, without_near_copies
from bcfl.association.hypotheses import Branches, renumbering
from bcfl.association.membership import log_odds, memberships
from bcfl.association.ranking import ClusterSize
from bcfl.association.seating import canonical
from bcfl.belief.gaussian import Gaussian, merge, stack
from bcfl.federation import Hypotheses
from bcfl.methods.steps import single_story


@dataclass(frozen=True)
class Scored:
    """What the present clients make of the beliefs, tempered."""

    scores: Tensor  # (present client, belief, point)
    log_point_weight: Tensor  # (point,)
    log_prior: Tensor  # (1 or past hypothesis, 1 or present client, 1 or cluster): of the clients' places
    power: Tensor  # (present client,): to which power a likelihood is in its score, if not by a chosen temperature


def membership_of(state: Hypotheses, present: Tensor, told: Scored, cluster_size: ClusterSize | None = None) -> Tensor:
    """How likely each client is in each cluster at the models of each past hypothesis, by Bayes' rule.

    What keeps hypotheses alive for longer than the data do, "per_example", is taken out again by the powers; a
    temperature that is a number stays. Whoever is away is where it was; where nobody knows, anywhere.
    """  # (past hypothesis, client, cluster)
    num_clusters = state.num_clusters
    away = state.assignment[..., None] == torch.arange(num_clusters)
    found = torch.where((state.assignment < 0)[..., None], 1 / num_clusters, away.double())
    log_prior = told.log_prior.expand(len(state.log_weight), len(told.power), num_clusters) / told.power[:, None]
    elsewhere = (away & ~present[:, None]).sum(1)
    for h in state.log_weight.isfinite().nonzero()[:, 0].tolist():
        own = told.scores[:, state.model_of[h]] / told.power[:, None, None]
        found[h, present] = memberships(own, told.log_point_weight, log_prior[h], cluster_size, elsewhere[h])
    return found


def joined(state: Hypotheses, present: Tensor, membership: Tensor | None, *, as_numbered: bool) -> Hypotheses:
    """The state with all the weight of stories that are the same from now on at the first of them.

    They have the same beliefs, and where a client is absent, it is in the same place: they differ in where a client is
    that is asked again now, and whose training with either never came. As two, they would go on in pairs for ever.
    With `as_numbered` stories that differ in the clusters' numbers alone count as two, as in published runs.
    """
    weight, first = state.log_weight.clone(), dict[Any, int]()
    told = futures(state.model_of, state.assignment, ~present, membership)
    for h in range(len(weight)):
        remembered = None if membership is None else tuple(membership[h].flatten().tolist())
        numbered = (*state.model_of[h].tolist(), *state.assignment[h, ~present].tolist(), remembered)
        future = numbered if as_numbered else told[h]
        if (same := first.setdefault(future, h)) != h:
            weight[same], weight[h] = torch.logaddexp(weight[same], weight[h]), -torch.inf
    return replace(state, log_weight=weight)


def differing(candidates: Branches, membership: Tensor) -> Branches:
    """The candidates without near-copies, and of those that group clients alike the heaviest, with the weight of all.

    `membership` (past hypothesis, client, cluster) is how likely each client is in each cluster of its models.
    """
    kept = without_near_copies(candidates, log_odds(membership[candidates.parent], candidates.assignment))
    return heaviest_of_each(kept, alike(kept.assignment))


def from_merged(state: Hypotheses, candidates: Branches, kept: Branches) -> tuple[Hypotheses, Tensor]:
    """The models that each kept story starts from, if it stands for all candidates that group the clients alike.

    Where these descend from several hypotheses, its clusters' beliefs have the moments of theirs: the state holds them
    beside the others, in rows of `model_of` that follow the hypotheses.
    """  # state, (hypothesis,) -> row
    start = kept.parent.clone()
    for place, own in enumerate(kept.assignment):
        rows = [h for h, row in enumerate(candidates.assignment) if canonical(row) == canonical(own)]
        if len(candidates.parent[rows].unique()) > 1:
            start[place] = len(state.model_of)
            state = _with_merged(state, candidates, rows)
    return state, start


def _with_merged(state: Hypotheses, candidates: Branches, rows: list[int]) -> Hypotheses:
    """The state with one more row of clusters: each has the moments of the beliefs that the candidates have of it.

    Clusters have the first candidate's numbers, which is the heaviest.
    """
    parents, weight = candidates.parent[rows], candidates.log_weight[rows]
    # (row, cluster of the first) -> cluster of that row
    names = renumbering(candidates.assignment[rows], state.num_clusters).argsort(1)
    belief_of = state.model_of[parents].gather(1, names)
    merged = [_moments(state.models, own, weight) for own in belief_of.T]
    new = torch.arange(len(state.models), len(state.models) + len(merged))
    return replace(
        state,
        models=Gaussian(
            *(
                torch.cat([old, part])
                for old, part in zip(
                    (state.models.mean, state.models.precision),
                    (stack(merged).mean, stack(merged).precision),
                    strict=True,
                )
            )
        ),
        model_of=torch.cat([state.model_of, new[None]]),
        parent_of=torch.cat([state.parent_of, state.parent_of[belief_of[0]]]),
    )


def _moments(models: Gaussian, beliefs: Tensor, log_weight: Tensor) -> Gaussian:
    """The belief with the moments of a mixture of beliefs, of which some may be the same."""
    distinct, position = beliefs.unique(return_inverse=True)
    total = torch.full((len(distinct),), -torch.inf, dtype=torch.float64)
    for i, log_share in zip(position, log_weight, strict=True):
        total[i] = torch.logaddexp(total[i], log_share)
    own = [models[belief] for belief in distinct.tolist()]  # where they are: a stack of them would be a copy
    return own[0] if len(own) == 1 else merge(own, total)


def consensus(models: Gaussian, model_of: Tensor, kept: Branches) -> Hypotheses:
    """The one hypothesis in which each cluster's belief has the moments of the kept mixture (BCFL-C, section 4.2)."""
    clusters = [_moments(models, beliefs, kept.log_weight) for beliefs in model_of.T]
    return single_story(stack(clusters), kept.assignment[0])
