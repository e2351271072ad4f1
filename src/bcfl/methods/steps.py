"""From local posteriors to new beliefs: which trainings a set of hypotheses needs, and their fusion as they arrive."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bcfl.association.hypotheses import Branches
from bcfl.belief.gaussian import Fusion, FusionRule, Gaussian, flat
from bcfl.belief.robust import CLIP_AFTER, Robust, Usual, middle_of, weight_of
from bcfl.federation import Clients, Hypotheses, Jobs, Serving, prior_of


@dataclass(frozen=True)
class Personal:
    """A state in which each client has a model of its own beside the shared ones."""

    hypotheses: Hypotheses
    personal: Tensor  # (client, vector)

    def serving(self) -> Serving:
        return flat(self.personal), [{client: 1.0} for client in range(len(self.personal))]


@dataclass(frozen=True)
class Groups:
    """The distinct new beliefs of a round: each is an old belief trained by a set of clients, needed by hypotheses.

    Hypotheses that agree on a cluster's past and present members share one group, and a (belief, client) pair that
    several groups need is one job: work is shared exactly, nothing is approximated.
    """

    belief: Tensor  # (group,) -> belief it starts from
    model_of: Tensor  # (hypothesis, cluster) -> group; −1 where a hypothesis has no such cluster
    job_belief: Tensor  # (job,) -> belief, ordered by belief, then client
    job_client: Tensor  # (job,) -> client
    users_of_job: list[list[int]]  # [job] -> groups that fuse its posterior


def distinct_groups(model_of: Tensor, branches: Branches, present: Tensor) -> Groups:
    """The groups that `branches` of the hypotheses with models `model_of` need; absent clients train nothing."""
    index_of: dict[tuple[int, tuple[int, ...]], int] = {}
    table = []
    for parent, assignment in zip(branches.parent, branches.assignment, strict=True):
        row = []
        for cluster, belief in enumerate(model_of[parent].tolist()):
            members = tuple((present & (assignment == cluster)).nonzero()[:, 0].tolist())
            row.append(index_of.setdefault((belief, members), len(index_of)) if belief >= 0 else -1)
        table.append(row)
    users: dict[tuple[int, int], list[int]] = {}
    for (belief, members), group in index_of.items():
        for client in members:
            users.setdefault((belief, client), []).append(group)
    jobs = sorted(users)
    return Groups(
        belief=torch.tensor([belief for belief, _ in index_of]),
        model_of=torch.tensor(table),
        job_belief=torch.tensor([belief for belief, _ in jobs], dtype=torch.int64),
        job_client=torch.tensor([client for _, client in jobs], dtype=torch.int64),
        users_of_job=[users[job] for job in jobs],
    )


class FusionStack:
    """One fusion per group, written in place into the stack of new beliefs; an untrained group keeps its old belief.

    With `robust` "clip" the first few posteriors are held, with "median" and "trimmed" all of them until the end.
    """

    def __init__(
        self,
        priors: Gaussian,
        models: Gaussian,
        belief_of_group: Tensor,
        rule: FusionRule,
        num_parameters: int = 0,
        robust: Robust = "none",
    ):
        shape = (len(belief_of_group), models.mean.shape[1])
        self._mean, self._precision = models.mean.new_empty(shape), models.mean.new_empty(shape)
        self._models, self._belief = models, belief_of_group.tolist()
        self._priors, self._rule, self._robust = priors, rule, robust
        self.came: set[tuple[int, int]] = set()  # (belief, client) whose posteriors have arrived
        storage = zip(self._mean, self._precision, strict=True)
        self._folds = [Fusion(priors[b], rule, rows) for b, rows in zip(self._belief, storage, strict=True)]
        self._usual, self._held = Usual(num_parameters), list[tuple[Sequence[int], Gaussian, float, Tensor]]()
        self._members: list[list[Gaussian]] = [[] for _ in self._belief]  # of each group, for its middle

    def add(self, groups: Sequence[int], posterior: Gaussian | None, weight: float = 1.0) -> None:
        """Fold a client's posterior into groups of one belief; a client that gave none changes nothing."""
        if posterior is not None and self._robust == "none":
            self._fold(groups, posterior, weight)
        elif posterior is not None:
            measures = self._usual.measure(posterior, self._start(groups), weight)
            self._held.append((groups, posterior, weight, measures))
            if self._robust == "clip" and len(self._usual.measured) >= CLIP_AFTER:
                self._let_in()

    def _start(self, groups: Sequence[int]) -> Tensor:
        return self._models.mean[self._belief[groups[0]]]

    def _let_in(self) -> None:
        """What was held is folded, as far as it is usual."""
        for groups, posterior, weight, measures in self._held:
            bounded = self._usual.bounded(posterior, self._start(groups), measures)
            self._fold(groups, bounded, weight)
        self._held.clear()

    def _fold(self, groups: Sequence[int], posterior: Gaussian, weight: float) -> None:
        for group in groups:
            if self._robust in ("none", "clip"):
                self._folds[group].add(posterior, weight)
            else:
                self._members[group].append(posterior)

    @property
    def trained(self) -> Tensor:
        """Which groups have had a posterior."""  # (group,) bool
        self._let_in()
        pairs = zip(self._folds, self._members, strict=True)
        return torch.tensor([fold.count > 0 or bool(members) for fold, members in pairs])

    def results(self) -> Gaussian:
        self._let_in()
        for group, (fold, members) in enumerate(zip(self._folds, self._members, strict=True)):
            if members:
                fold.add(middle_of(members, self._robust), len(members))
            if fold.count:
                fold.result()
            else:
                old = self._models[self._belief[group]]
                self._mean[group], self._precision[group] = old.mean, old.precision
        return Gaussian(self._mean, self._precision)  # (group, vector)


@dataclass(frozen=True)
class Fuse:
    """How posteriors become beliefs: by which rule, from priors that forget how much, and safe from liars or not."""

    rule: FusionRule
    forgetting: float
    robust: Robust = "none"

    def start(self, models: Gaussian, belief_of_group: Tensor, clients: Clients) -> FusionStack:
        """Fusions of posteriors whose priors are the models with some of their precision forgotten."""
        # Only exact fusion looks at the prior's precision; the others can do without another vector per belief.
        priors = prior_of(models, 1 - self.forgetting, clients.num_parameters) if self.rule == "exact" else models
        return FusionStack(priors, models, belief_of_group, self.rule, clients.num_parameters, self.robust)

    def weights(self, clients: Clients) -> list[float]:
        """How much of each client's posterior is fused: precisions tell by themselves how many examples there are."""
        weight = weight_of(clients.num_examples, self.robust)
        return (weight if self.rule == "pooled" else torch.ones_like(weight)).tolist()


def train_groups(
    state: Hypotheses,
    groups: Groups,
    clients: Clients,
    fuse: Fuse,
    held_out: float = 0.0,
    watch: Callable[[int, int, Gaussian], None] = lambda belief, client, posterior: None,
) -> FusionStack:
    """One fusion per group, of the local posteriors of its clients as they arrive; `watch` sees each of them."""
    folds = fuse.start(state.models, groups.belief, clients)
    jobs = Jobs(
        belief=groups.job_belief,
        client=groups.job_client,
        strength=torch.full((len(groups.job_belief),), 1 - fuse.forgetting, dtype=torch.float64),
        curvature=True,
        parent_of=state.parent_of,
        held_out=held_out,
    )
    weight = fuse.weights(clients)
    for job, posterior in enumerate(clients.fit(state.models, jobs)):
        client = int(groups.job_client[job])
        if posterior is not None:
            belief = int(groups.job_belief[job])
            folds.came.add((belief, client))
            watch(belief, client, posterior)
        folds.add(groups.users_of_job[job], posterior, weight[client])
    return folds


def distinct_results(groups: Groups, folds: FusionStack) -> tuple[Gaussian, Tensor, Tensor]:
    """The new beliefs, who uses which, and which old one each was; those that turned out the same are one.

    Groups differ in whom they asked. Where a client was late, or its training went off, two of them may have learned
    the same: as two beliefs they would be trained and scored twice for ever.
    """  # (belief, vector), (hypothesis, cluster) -> belief, (belief,) -> old belief
    models, learned = folds.results(), [[belief] for belief in groups.belief.tolist()]
    jobs = zip(groups.job_belief.tolist(), groups.job_client.tolist(), strict=True)
    for job, users in zip(jobs, groups.users_of_job, strict=True):
        for group in users if job in folds.came else ():
            learned[group].append(job[1])
    first = {tuple(what): group for group, what in reversed(list(enumerate(learned)))}
    if len(first) == len(learned):
        return models, groups.model_of, groups.belief
    kept = sorted(first.values())
    number = torch.tensor([kept.index(first[tuple(what)]) for what in learned])
    model_of = torch.where(groups.model_of >= 0, number[groups.model_of], -1)
    return models[kept], model_of, groups.belief[kept]


def draw_starts(clients: Clients, num_clusters: int, num_hypotheses: int = 1) -> Tensor:
    """Models for the clusters to start from, each drawn anew; refused if all are the same, as they would stay so."""
    starts = torch.stack([clients.draw_model(h, k) for h in range(num_hypotheses) for k in range(num_clusters)])
    if num_clusters > 1 and all(torch.equal(start, starts[0]) for start in starts[1:]):
        raise ValueError(
            f"model factory draws the same numbers every time, so that all {num_clusters} clusters would stay alike: "
            "let it draw its own start, or take a method that starts from one model: bcfl-g-w, bcfl-auto, wecfl"
        )
    return starts  # (hypothesis × cluster, vector)


def mean_by_examples(rows: Tensor, num_examples: Tensor) -> Tensor:
    """What clients have counted, as BatchNorm's statistics, for all of them: whatever their models are weighed by."""
    weight = num_examples.to(rows.dtype)  # (client,) beside (client, number)
    return weight @ rows / weight.sum()  # (number,)


def unit(mean: Tensor) -> Gaussian:
    """Precision 1 everywhere; with strength N·λ the proximal term λ/2 ‖θ − mean‖² beside the mean loss."""
    return Gaussian(mean, mean.new_ones(()).expand_as(mean))


def single_story(models: Gaussian, assignment: Tensor) -> Hypotheses:
    """A state with one hypothesis whose clusters are the models, in order."""
    return Hypotheses(
        models=models,
        model_of=torch.arange(len(models))[None],
        log_weight=torch.zeros(1, dtype=torch.float64),
        assignment=assignment.view(1, -1),
        parent_of=torch.arange(len(models)),
        family=torch.zeros(1, dtype=torch.int64),
    )
