"""BCFL: clustering as data association. Greedy (G), consensus (C-M) and multi-hypothesis (MH-M).

The paper is arXiv 2410.15473 (https://arxiv.org/abs/2410.15473), whose sections are cited here and in the mathematics.
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from bcfl.association.distinct import LEAST_WEIGHT
from bcfl.association.hypotheses import Branches, Families, branch, num_hypotheses, prune, reweight
from bcfl.association.membership import rounded
from bcfl.association.ranking import Search
from bcfl.belief.evidence import (
    client_evidence,
    evidence_points,
    hypothesis_evidence,
    temper_scores,
)
from bcfl.belief.gaussian import Gaussian
from bcfl.belief.robust import bounded_scores
from bcfl.extensions.racing import TOLERANCE, Stakes, race
from bcfl.extensions.staying import Memory, Places, Remembering, evidence_power
from bcfl.federation import Clients, Hypotheses, RoundInfo, one_story, prior_of
from bcfl.methods.bounds import (
    Defence,
    EvidenceKind,
    EvidencePoints,
    Forgetting,
    Fusing,
    MinWeight,
    NumClusters,
    PriorPrecision,
    ScoringExamples,
    Tempering,
    WarmUpRounds,
)
from bcfl.methods.steps import (
    Fuse,
    distinct_groups,
    distinct_results,
    draw_starts,
    single_story,
    train_groups,
)
from bcfl.methods.stories import Scored, consensus, differing, from_merged, joined, membership_of
from bcfl.methods.warm_up import warm_up
from bcfl.predict.mixtures import varied
from bcfl.randomness import generator

# Candidates ranked per kept hypothesis where the evidence is refined afterwards: the ranking needs a cost per client,
# the refined evidence of a cluster belongs to all of its clients together.
CANDIDATES = 4
_NO_PRIOR = torch.zeros(1, 1, 1, dtype=torch.float64)  # of where clients are: no memory


def _fewest_and_most(size: tuple[int, int]) -> tuple[int, int]:
    if not 0 <= size[0] <= size[1]:
        raise ValueError("[fewest, most] with 0 ≤ fewest ≤ most")
    return size


@dataclass(frozen=True)
class BCFL:
    """Keep the best associations of clients with clusters, and one Gaussian belief per cluster under each of them.

    `greedy` keeps one hypothesis, `consensus` merges the best M of each round into one, `multi` carries them on.
    """

    num_clusters: NumClusters = 4
    strategy: Literal["greedy", "consensus", "multi"] = "multi"
    max_hypotheses: int = 3
    warm_up_rounds: WarmUpRounds = 0
    fusion: Fusing = "geometric"
    # A client's data is the same in every round, so a belief that kept all of its precision would count it again and
    # again, grow without bound and freeze. With half of it forgotten the precision settles at twice one round's
    # evidence, and the prior a client sees weighs as much as its own data.
    forgetting: Forgetting = 0.5
    prior_precision: PriorPrecision = 0.0
    temperature: Tempering = "per_example"
    evidence_points: EvidencePoints = 1
    evidence_kind: EvidenceKind = "sigma"
    evidence_precision: Annotated[
        float,
        Field(
            ge=0,
            le=1e12,
            description="added to a belief's precision before its evidence is taken at several points: a network whose "
            "weights are hardly known does not survive a draw (earlier runs: 1000)",
        ),
    ] = 0.0
    scoring_examples: ScoringExamples = 320
    initial: Annotated[
        Literal["different", "same"],
        Field(description="of bcfl-mh-M: its M hypotheses start from different draws of the models, or all from one"),
    ] = "different"
    # Until a start is given up it keeps a place: untrained models explain all clients alike, so that at first the M
    # best are M near-copies of one start.
    give_up_weight: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="of several starts, one is given up once its best story weighs this much less than the very "
            "best",
        ),
    ] = 0.01
    min_weight: MinWeight = 0.0
    hypotheses: Annotated[
        Literal["distinct", "merged", "all"],
        Field(
            description="which stories are kept: of those that group the clients alike the heaviest (distinct) or one "
            "with the moments of all (merged), no near-copies, none that weighs under 0.001; or the heaviest whatever "
            "they are, as in published runs (all)"
        ),
    ] = "distinct"
    cluster_size: Annotated[
        Annotated[tuple[int, int], AfterValidator(_fewest_and_most)] | None,
        Field(description="[fewest, most] clients of every cluster, those that are away counted where they were last"),
    ] = None
    search: Annotated[
        Search,
        Field(
            description="how the best associations are found; one_change is the paper's heuristic, for comparison: "
            "single changes of the best, which miss some"
        ),
    ] = "exact"
    racing: Annotated[
        float,
        Field(
            ge=0,
            lt=1,
            description="score only what can still change what is kept; about this probability per round of keeping "
            "something else (0: off)",
        ),
    ] = 0.0
    stay: Annotated[
        Annotated[float, Field(gt=0, lt=1)] | Literal["learn"] | None,
        Field(description='the probability that a client stays in its cluster, or "learn" it; "none": no memory'),
    ] = None
    robust: Defence = "none"

    def __post_init__(self) -> None:
        # Memory needs how likely every cluster is, not only the likely ones.
        plain = self.evidence_points == 1 and self.cluster_size is None and self.stay is None
        if self.racing and not plain:
            allowed = "0 (off), or in (0, 1) with evidence_points = 1 and without cluster_size or stay"
            raise ValueError(f"racing must be {allowed}, got {self.racing}")
        if self.search == "one_change" and (self.racing or self.cluster_size is not None):
            raise ValueError('search must be "exact" where there is racing or cluster_size, got one_change')
        if self.evidence_kind == "sigma" and self.evidence_points > 1 and self.evidence_points % 2:
            raise ValueError(f'evidence_points must be 1 or even for "sigma" points, got {self.evidence_points}')

    def check(self, num_clients: int) -> None:
        """Nothing happens if so many clients can be associated in as many ways as are kept, in clusters of that size"""
        possible = num_hypotheses(self.num_clusters, min(num_clients, 64), overlapping=False)
        if self.max_hypotheses > possible:
            raise ValueError(f"{self.max_hypotheses} hypotheses are to be kept, but {num_clients} clients and "
                             f"{self.num_clusters} clusters allow only {possible}")  # fmt: skip
        if self.cluster_size is not None:
            fewest, most = (size * self.num_clusters for size in self.cluster_size)
            if not fewest <= num_clients <= most:
                raise ValueError(f"method.cluster_size {list(self.cluster_size)} with {self.num_clusters} clusters "
                                 f"takes {fewest} to {most} clients, but there are {num_clients}")  # fmt: skip

    def init(self, clients: Clients) -> Hypotheses | Remembering:
        """K cluster models for each hypothesis: drawn independently, or one draw for all, or by warm-up."""
        starts = self.max_hypotheses if self.strategy == "multi" and self.initial == "different" else 1
        if self.warm_up_rounds:
            starts, means = 1, warm_up(clients, self.num_clusters, self.warm_up_rounds, self.robust)
        else:
            means = draw_starts(clients, self.num_clusters, starts)
        precision = torch.zeros_like(means)
        precision[:, : clients.num_parameters] = self.prior_precision
        start = Hypotheses(
            models=Gaussian(means, precision),
            model_of=torch.arange(len(means)).view(starts, self.num_clusters),
            log_weight=torch.full((starts,), 1 / starts, dtype=torch.float64).log(),
            assignment=torch.full((starts, len(clients.num_examples)), -1),
            parent_of=torch.arange(len(means)),
            family=torch.arange(starts),
        )
        return start if self._memory is None else self._memory.start(start)

    def round(self, state: Hypotheses | Remembering, clients: Clients) -> tuple[Hypotheses | Remembering, RoundInfo]:
        if self.strategy == "greedy" and self.evidence_points == 1 and self.cluster_size is None and self.stay is None:
            return self._greedy_round(state.hypotheses, clients)
        before = state if isinstance(state, Remembering) else None
        remembered = None if before is None else before.membership
        past = joined(state.hypotheses, clients.present, remembered, as_numbered=self.hypotheses == "all")
        told = self._associate(past, before, clients)
        kept = told.kept
        started = replace(kept, parent=told.start)
        groups = distinct_groups(told.past.model_of, started, clients.present)
        folds = train_groups(told.past, groups, clients, self._fuse)
        models, model_of, parent_of = distinct_results(groups, folds)
        info = RoundInfo(kept.parent, kept.assignment, kept.log_weight, probability=told.membership)
        if self.strategy == "consensus":
            new = consensus(models, model_of, kept)
        else:
            family = past.family[kept.parent]
            new = Hypotheses(models, model_of, kept.log_weight, kept.assignment, parent_of, family)
        return new if told.places is None else told.places.of(new), info

    def _greedy_round(self, state: Hypotheses, clients: Clients) -> tuple[Hypotheses, RoundInfo]:
        """One exchange: each client picks the belief that explains its data best and trains that one."""
        assignment = state.assignment.clone()
        folds = self._fuse.start(state.models, torch.arange(len(state.models)), clients)
        weight = self._fuse.weights(clients)
        error = self.racing / int(clients.present.sum())  # of each client
        for choice in clients.fit_best(state.models, 1 - self.forgetting, True, self.scoring_examples, error):
            assignment[0, choice.client] = choice.belief
            folds.add([choice.belief], choice.posterior, weight[choice.client])
        new = single_story(folds.results(), assignment)
        return new, one_story(new)

    @property
    def _fuse(self) -> Fuse:
        return Fuse(self.fusion, self.forgetting, self.robust)

    @property
    def _memory(self) -> Memory | None:
        return None if self.stay is None else Memory(self.stay, self.scoring_examples, self.temperature)

    def _associate(self, state: Hypotheses, before: Remembering | None, clients: Clients) -> "_Associations":
        """The best continuations of the past hypotheses, by how well their beliefs explain the clients' data.

        With `stay` also by where the clients were before; beside them what the state remembers of that from now on.
        """
        num_beliefs, present = len(state.models), clients.present
        random, refined = generator(clients.seed, "evidence", clients.round), self.evidence_points > 1
        drawn_from, size = state.models, clients.num_parameters
        if refined:
            drawn_from = varied(prior_of(drawn_from, 1 - self.forgetting, size), size, size, self.evidence_precision)
        points, log_alpha = evidence_points(drawn_from, self.evidence_points, self.evidence_kind, random)
        num_candidates = self._num_candidates(state)
        if self.racing:
            scores = _raced_scores(state, clients, self, num_candidates)
        else:
            scores = clients.score(points.flatten(0, 1), self.scoring_examples)  # (client, point × belief)
        scores = temper_scores(scores, clients.num_examples, self.temperature)[present]
        scores = bounded_scores(scores, self.robust)
        scores = scores.view(len(scores), -1, num_beliefs).transpose(1, 2)  # (client, belief, point)
        memory = self._memory
        # of the clients' places
        log_prior = _NO_PRIOR if memory is None or before is None else memory.log_prior(before, clients)
        cost = -client_evidence(scores, log_alpha)[:, state.model_of].transpose(0, 1) - log_prior
        families = Families(state.family, -math.log(self.give_up_weight))
        absent = state.assignment.masked_fill(present, -1)[..., None] == torch.arange(self.num_clusters)
        kept = branch(state.log_weight, cost, num_candidates, self.cluster_size, families, absent.sum(1), self.search)
        if refined:
            joint = hypothesis_evidence(scores, log_alpha, kept.assignment, state.model_of[kept.parent])
            places = log_prior.expand_as(cost)[kept.parent].gather(-1, kept.assignment[..., None]).sum((1, 2))
            kept = reweight(kept, state.log_weight[kept.parent] + joint + places)
        assignment = state.assignment[kept.parent].clone()  # absent clients stay where they were
        assignment[:, present] = kept.assignment
        kept = replace(kept, assignment=assignment)
        membership, candidates = None, kept
        if self.hypotheses != "all":
            at_points = Scored(scores, log_alpha, log_prior, self._power(clients)[present])
            membership = membership_of(state, present, at_points, self.cluster_size)
            kept = differing(kept, membership)
        kept = prune(kept, self.max_hypotheses, self._least_weight, families)
        past, start = from_merged(state, candidates, kept) if self.hypotheses == "merged" else (state, kept.parent)
        told = None if membership is None else rounded(membership[kept.parent])
        if memory is None or before is None:
            return _Associations(kept, past, start, told)
        remembered = replace(before, hypotheses=state)
        seen = replace(kept, assignment=kept.assignment[:, present])
        return _Associations(kept, past, start, told, memory.remember(remembered, clients, scores, log_alpha, seen))

    def _power(self, clients: Clients) -> Tensor:
        """To which power a client's likelihood enters its tempered score, where that is not by a chosen temperature."""
        if self.stay is not None:  # as in the filter of what is remembered
            return evidence_power(clients.num_examples, self.scoring_examples, self.temperature)
        ones = torch.ones_like(clients.num_examples)
        return ones / clients.num_examples if self.temperature == "per_example" else ones  # (client,)

    def _num_candidates(self, state: Hypotheses) -> int:
        """How many stories are ranked, so that enough are left when some give way to others."""
        count = self.max_hypotheses * (CANDIDATES if self.evidence_points > 1 else 1)
        if self._least_weight:  # a family's best story may go for its weight, and leaves its place to another then
            count += len(state.family.unique()) - 1
        if self.hypotheses != "all":  # one grouping may come once from every hypothesis
            count *= int(state.log_weight.isfinite().sum())
        return count

    @property
    def _least_weight(self) -> float:
        return self.min_weight if self.hypotheses == "all" else max(self.min_weight, LEAST_WEIGHT)


@dataclass(frozen=True)
class _Associations:
    """What a round makes of who belongs where, before anything is trained."""

    kept: Branches
    past: Hypotheses  # with models beside those of the hypotheses, where stories start from merged ones
    start: Tensor  # (hypothesis,) -> row of past.model_of from which its clusters are trained
    membership: Tensor | None  # (hypothesis, client, cluster)
    places: Places | None = None


def _raced_scores(state: Hypotheses, clients: Clients, method: BCFL, num_candidates: int) -> Tensor:
    """Scores that lead to the same hypotheses as full ones, and nearly the same weights, but for `method.racing`.

    A belief that cannot be part of them is impossible. A client with one belief left shifts all weights alike: what its
    looks told will do. Others have looked at all of their examples, or at as many as the weights need.
    """  # (client, belief)
    models, most, told = state.models.mean, method.scoring_examples, state.log_weight > -torch.inf
    left, mean = race(
        lambda wanted, first, last: clients.look(models, most, wanted, first, last),
        clients.present,
        clients.num_examples.clamp(max=math.inf if most is None else most),
        temper_scores(clients.num_examples, clients.num_examples, method.temperature),
        Stakes(
            state.model_of[told],
            state.log_weight[told],
            num_candidates,
            method.racing,
            0.0 if method._least_weight else TOLERANCE,  # what is dropped by weight must not hang on a nearly right one
        ),
    )
    return torch.where(left, mean * clients.num_examples[:, None], -torch.inf)
