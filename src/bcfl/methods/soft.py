"""BCFL with soft membership: a client belongs to every cluster by its probability, in learning and in prediction."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from bcfl.association.membership import memberships, rounded
from bcfl.belief.cavity import Sites, cavities, combined, no_sites
from bcfl.belief.evidence import Temperature, client_evidence, evidence_points, learned_temperature, temper_scores
from bcfl.belief.gaussian import Gaussian
from bcfl.federation import Clients, Hypotheses, Jobs, Mixture, RoundInfo, Serving, num_held_out, prior_of
from bcfl.methods.bounds import (
    EvidenceKind,
    EvidencePoints,
    Forgetting,
    Fusing,
    NumClusters,
    PriorPrecision,
    ScoringExamples,
    Tempering,
    WarmUpRounds,
)
from bcfl.methods.steps import Fuse, draw_starts, single_story
from bcfl.methods.warm_up import warm_up
from bcfl.randomness import generator

HELD_OUT = 0.2  # the share of a client's examples that decides about the temperature
NEGLIGIBLE = 1e-3  # a client does not train a cluster to which it belongs with less probability


@dataclass(frozen=True)
class Soft:
    """Cluster models, and how likely each client belongs to each of them."""

    hypotheses: Hypotheses  # a single one: its assignment is the most likely cluster of each client
    membership: Tensor  # (client, cluster); NaN of a client that was never there
    sites: Sites | None = None  # what each client has said of each cluster, where evidence is without oneself
    temperature: float | None = None  # where it is learned: the last round's

    def serving(self) -> Serving:
        """Each client's mixture of its clusters' models; one never met gets them all alike."""
        told = self.membership.nan_to_num(1 / self.membership.shape[1])
        kept = torch.where(told >= NEGLIGIBLE, told, 0.0)
        kept = kept / kept.sum(1, keepdim=True)
        shares: list[Mixture] = [{k: share for k, share in enumerate(row) if share} for row in kept.tolist()]
        return self.hypotheses.models, shares


@dataclass(frozen=True)
class SoftBCFL:
    """Every client trains each cluster that it may belong to, and its probability of that multiplies what it adds.

    A client's probabilities are a softmax of its evidence for the clusters, found
    anew in every round. Where one of them is nearly 1 it trains that cluster alone, at the cost of BCFL-G.
    """

    num_clusters: NumClusters = 4
    warm_up_rounds: WarmUpRounds = 0
    fusion: Fusing = "geometric"
    forgetting: Forgetting = 0.5
    prior_precision: PriorPrecision = 0.0
    temperature: Annotated[
        Tempering | Literal["learn"],
        Field(
            description='log-likelihoods are divided by it: a number, "none" (1), the client\'s number of examples, or '
            '"learn": what foretells best a fifth of the examples, on which nobody trains'
        ),
    ] = "none"
    evidence_points: EvidencePoints = 1
    evidence_kind: EvidenceKind = "sigma"
    scoring_examples: ScoringExamples = 320
    shares: Annotated[
        Literal["uniform", "learn"],
        Field(
            description="how likely a client is in each cluster before its data speak: alike, or by the clusters' "
            "sizes, which with few examples makes one cluster of two that cannot be told apart"
        ),
    ] = "uniform"
    without_oneself: Annotated[
        bool,
        Field(
            description="a client is scored under, and trains from, what all others and the first prior say of a "
            "cluster: for clients with few examples and small models that are trained to convergence; the server keeps "
            "a vector pair per client and cluster (needs prior_precision above 0)"
        ),
    ] = False

    def __post_init__(self) -> None:
        if self.without_oneself and not self.prior_precision > 0:
            raise ValueError("prior_precision must be above 0 with without_oneself: nothing else holds a cluster of "
                             f"one client, got {self.prior_precision:g}")  # fmt: skip
        if self.without_oneself and self.warm_up_rounds:
            raise ValueError("warm_up_rounds must be 0 with without_oneself: all clusters begin with one prior, got "
                             f"{self.warm_up_rounds}")  # fmt: skip
        if self.evidence_kind == "sigma" and self.evidence_points > 1 and self.evidence_points % 2:
            raise ValueError(f'evidence_points must be 1 or even for "sigma" points, got {self.evidence_points}')

    def init(self, clients: Clients) -> Soft:
        num_clients = len(clients.present)
        if self.without_oneself:
            means = clients.draw_model(0, 0).repeat(self.num_clusters, 1)
        elif self.warm_up_rounds:
            means = warm_up(clients, self.num_clusters, self.warm_up_rounds, "none")
        else:
            means = draw_starts(clients, self.num_clusters)
        precision = torch.zeros_like(means)
        precision[:, : clients.num_parameters] = self.prior_precision
        models = Gaussian(means, precision)
        nowhere = torch.full((num_clients,), -1)
        membership = torch.full((num_clients, self.num_clusters), torch.nan, dtype=torch.float64)
        sites = no_sites(models, num_clients, clients.num_parameters) if self.without_oneself else None
        return Soft(single_story(models, nowhere), membership, sites)

    def round(self, state: Soft, clients: Clients) -> tuple[Soft, RoundInfo]:
        membership, temperature = self._associate(state, clients)
        assignment = torch.where(membership[:, 0].isnan(), -1, membership.nan_to_num(-1).argmax(1))
        if state.sites is None:
            new = Soft(single_story(self._trained(state, membership, clients), assignment), membership)
        else:
            new = self._refined(state, state.sites, membership, assignment, clients)
        chosen = None if temperature is None else ({"kind": "temperature", "temperature": temperature},)
        info = RoundInfo(
            torch.zeros(1, dtype=torch.int64),
            assignment[None],
            torch.zeros(1, dtype=torch.float64),
            chosen,
            probability=rounded(membership.nan_to_num(1 / self.num_clusters)),
        )
        return replace(new, temperature=temperature), info

    def _associate(self, state: Soft, clients: Clients) -> tuple[Tensor, float | None]:
        """How likely each client belongs to each cluster; of one that is away, what was known.

        Beside it the temperature, where that is learned.
        """  # (client, cluster)
        membership, present = state.membership.clone(), clients.present
        known = ~membership[:, 0].isnan()
        if state.sites is not None and not bool(known.any()):  # all clusters are alike: somebody must begin
            draws = torch.rand(membership.shape, generator=generator(clients.seed, "places"), dtype=torch.float64)
            membership[present] = (-draws.log() / (-draws.log()).sum(1, keepdim=True))[present]
            return membership, state.temperature
        log_share = torch.zeros(self.num_clusters, dtype=torch.float64)
        if self.shares == "learn":
            log_share = ((membership[known].sum(0) + 1) / (known.sum() + self.num_clusters)).log()
        scores, held, log_alpha = self._scores(state, clients)
        if self.temperature == "learn":
            there = clients.present & (num_held_out(clients.num_examples, HELD_OUT) > 0)
            kept, foretold = (client_evidence(part[there], log_alpha) for part in (scores, held))
            temperature: Temperature = learned_temperature(kept, foretold, log_share)
        else:
            temperature = self.temperature
        scores = temper_scores(scores, clients.num_examples, temperature)
        membership[present] = memberships(scores[present], log_alpha, log_share)
        return membership, temperature if self.temperature == "learn" and isinstance(temperature, float) else None

    @property
    def _held_out(self) -> float:
        """The share of a client's examples on which it does not train."""
        return HELD_OUT if self.temperature == "learn" else 0.0

    def _scores(self, state: Soft, clients: Clients) -> tuple[Tensor, Tensor, Tensor]:
        """Log-likelihoods of each client's data at points of the beliefs, and the points' log-weights.

        In between those of what it holds out, which are no part of the first then; zeros where it holds out nothing.
        """
        size, num_clients, random = (
            clients.num_parameters,
            len(clients.present),
            generator(clients.seed, "evidence", clients.round),
        )
        if state.sites is None:
            drawn_from = prior_of(state.hypotheses.models, 1.0, size)
            wanted = None
        else:
            drawn_from = prior_of(cavities(state.hypotheses.models, state.sites), 1.0, size)
            wanted = torch.eye(num_clients, dtype=torch.bool).repeat_interleave(self.num_clusters, 1)
            wanted = wanted.repeat(1, self.evidence_points)
        points, log_alpha = evidence_points(drawn_from, self.evidence_points, self.evidence_kind, random)
        vectors, share = points.flatten(0, 1), self._held_out
        # To take one from the other, both must be of all examples.
        found = clients.score(vectors, None if share else self.scoring_examples, wanted=wanted)
        held = torch.zeros_like(found)
        if share:
            scored = clients.score(vectors, None, share, wanted=wanted)
            holds = num_held_out(clients.num_examples, share) > 0
            held = torch.where(holds[:, None], scored, 0.0)
        is_own = wanted is not None
        return self._own(found - held, is_own), self._own(held, is_own), log_alpha

    def _own(self, scores: Tensor, is_own: bool) -> Tensor:
        """Each client's scores of its clusters, of which it may have been asked for versions of its own."""
        scores = scores.view(len(scores), self.evidence_points, -1)  # (client, point, belief)
        if is_own:
            own = torch.arange(len(scores) * self.num_clusters).view(len(scores), 1, -1)
            scores = scores.gather(2, own.expand(-1, self.evidence_points, -1))
        return scores.transpose(1, 2)  # (client, cluster, point)

    def _trained(self, state: Soft, membership: Tensor, clients: Clients) -> Gaussian:
        """The beliefs, each trained by the clients that may belong to it and fused by their probabilities of that."""
        beliefs = state.hypotheses
        cluster, client = _pairs(membership, clients)
        fuse = Fuse(self.fusion, self.forgetting)
        folds = fuse.start(beliefs.models, torch.arange(len(beliefs.models)), clients)
        jobs = Jobs(
            belief=cluster,
            client=client,
            strength=torch.full((len(cluster),), 1 - self.forgetting, dtype=torch.float64),
            curvature=True,
            parent_of=beliefs.parent_of,
            held_out=self._held_out,
        )
        weight = fuse.weights(clients)
        for k, j, posterior in zip(cluster.tolist(), client.tolist(), clients.fit(beliefs.models, jobs), strict=True):
            folds.add([k], posterior, weight[j] * float(membership[j, k]))
        return folds.results()

    def _refined(self, state: Soft, sites: Sites, membership: Tensor, assignment: Tensor, clients: Clients) -> Soft:
        """The state after every client has said anew what it adds to each cluster that it may belong to."""
        cluster, client = _pairs(membership, clients)
        others = cavities(state.hypotheses.models, sites)
        priors = others[client * self.num_clusters + cluster]
        jobs = Jobs(belief=torch.arange(len(client)), client=client, curvature=True, held_out=self._held_out)
        pairs = zip(cluster.tolist(), client.tolist(), priors, clients.fit(priors, jobs), strict=True)
        new = sites.copy()
        for k, j, prior, posterior in pairs:
            if posterior is not None:
                new.say(j, k, prior, posterior)
                new.power[j] = torch.where(membership[j] >= NEGLIGIBLE, membership[j], 0.0)
        models = combined(state.hypotheses.models, new, clients.num_examples, clients.num_evaluated)
        return Soft(replace(state.hypotheses, models=models, assignment=assignment[None]), membership, new)


def _pairs(membership: Tensor, clients: Clients) -> tuple[Tensor, Tensor]:
    """Which clusters are trained by which present clients, ordered by cluster, then client."""  # (pair,) twice
    there = (membership >= NEGLIGIBLE) & clients.present[:, None]
    cluster, client = there.T.nonzero().unbind(1)
    return cluster, client
