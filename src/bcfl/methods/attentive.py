"""Personal models that listen to others: FedAMP by distance between models, FedSoft by soft cluster membership."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from bcfl.association.k_means import squared_distances
from bcfl.belief.gaussian import Gaussian, flat
from bcfl.belief.robust import all_bounded, middle, weight_of
from bcfl.federation import Clients, Hypotheses, Jobs, RoundInfo, one_story
from bcfl.methods.bounds import Defence, NumClusters, Proximal, ScoringExamples
from bcfl.methods.steps import Personal, draw_starts, mean_by_examples, single_story, unit
from bcfl.randomness import numpy_generator


@dataclass(frozen=True)
class FedAMP:
    """Each client's model is drawn towards a mixture of all that have trained, in which similar models count more.

    uᵢ = Σⱼ ξᵢⱼ wⱼ, then wᵢ = argmin Fᵢ(w) + proximal/2 ‖w − uᵢ‖², where proximal is the paper's λ/α. `distance`:
    ξᵢⱼ = α A′(‖wᵢ−wⱼ‖²), A(x) = 1 − exp(−x/σ), ξᵢᵢ = 1 − Σ ξᵢⱼ; `cosine`: ξᵢᵢ = ½, the rest ∝ exp(10 cos(wᵢ, wⱼ)).
    `variant = "attentive_mean"` is what the published experiments of BCFL ran: a client starts from uᵢ, trains without
    the proximal term (theirs has no gradient), and the mixture of what comes back is what is tested.
    """

    attention: Annotated[
        Literal["distance", "cosine"],
        Field(description="how alike two models are, as in its paper, or as in its published experiments (cosine)"),
    ] = "distance"
    sigma: Annotated[
        Annotated[float, Field(ge=1e-30, le=1e30)] | None,
        Field(description='the scale of distances; "none": the median squared distance, which suits any model'),
    ] = None
    alpha: Annotated[
        Annotated[float, Field(ge=1e-30, le=1e30)] | None,
        Field(description='the step; "none": σ ÷ clients, so that equal models are averaged equally'),
    ] = None
    proximal: Proximal = 1.0
    variant: Annotated[
        Literal["personal", "attentive_mean"],
        Field(description="what trains and is tested: a client's own model, or the mixture that it is sent"),
    ] = "personal"
    robust: Annotated[
        Literal["none", "clip"],
        Field(description="clip: changes of unusual length are cut; each mixture is of its own, so there is no median"),
    ] = "none"

    def init(self, clients: Clients) -> Hypotheses:
        num_clients = len(clients.present)
        own = clients.draw_model(0, 0).repeat(num_clients, 1)
        return single_story(flat(own), torch.arange(num_clients))

    def round(self, state: Hypotheses, clients: Clients) -> tuple[Hypotheses, RoundInfo]:
        own, present = state.models.mean, clients.present.nonzero()[:, 0]
        if self.variant == "attentive_mean":
            return self._round_of_means(own, present, state, clients)
        untrained = clients.draw_model(0, 0)
        trained = torch.tensor([not torch.equal(model, untrained) for model in own])
        trained |= ~trained.any()  # at the beginning all are alike
        mixtures = self._shares(own[:, : clients.num_parameters], trained).to(own.dtype) @ own
        # Whoever trains for the first time begins where the others have come to.
        start = own if trained.all() else torch.where(trained[:, None], own, mixtures)
        strength = self.proximal * clients.num_examples[present]
        answers = clients.fit(unit(mixtures), Jobs(present, present, strength, start=start))
        arrived, posteriors = self._arrived(present, start, answers, clients)
        new_own = own.clone()
        for client, posterior in zip(arrived.tolist(), posteriors, strict=True):
            new_own[client] = posterior.mean
        new = single_story(flat(new_own), state.assignment)
        return new, one_story(new)

    def _round_of_means(
        self, means: Tensor, present: Tensor, state: Hypotheses, clients: Clients
    ) -> tuple[Hypotheses, RoundInfo]:
        """The mixtures of what the present clients make of their last mixtures; those of all others stay."""
        answers = clients.fit(flat(means), Jobs(present, present))
        arrived, posteriors = self._arrived(present, means, answers, clients)
        new_means = means.clone()
        if len(arrived):
            trained = torch.stack([posterior.mean for posterior in posteriors])
            shares = self.attention_weights(trained[:, : clients.num_parameters])
            new_means[arrived] = shares.to(trained.dtype) @ trained
        new = single_story(flat(new_means), state.assignment)
        return new, one_story(new)

    def _arrived(
        self, present: Tensor, starts: Tensor, answers: Iterable[Gaussian | None], clients: Clients
    ) -> tuple[Tensor, list[Gaussian]]:
        """Who gave an answer, and the answers as far as they are usual."""
        told = [(client, one) for client, one in zip(present.tolist(), answers, strict=True) if one is not None]
        arrived = torch.tensor([client for client, _ in told], dtype=torch.int64)
        return arrived, all_bounded([one for _, one in told], starts[arrived], clients.num_parameters, self.robust)

    def _shares(self, own: Tensor, trained: Tensor) -> Tensor:
        """ξ among those who have trained; who has not is drawn to their mean: nothing tells yet whom it resembles."""
        if trained.all():
            return self.attention_weights(own)
        shares = (trained.double() / trained.sum()).repeat(len(own), 1)
        shares[trained[:, None] & trained] = self.attention_weights(own[trained]).flatten()
        return shares  # (client, client)

    def attention_weights(self, own: Tensor) -> Tensor:
        """ξ, the share of each client's model in each mixture; rows sum to one."""  # (client, client)
        num_clients = len(own)
        if self.attention == "cosine":
            directions = torch.nn.functional.normalize(own)
            others = (10 * (directions @ directions.T).double()).fill_diagonal_(-torch.inf).softmax(1)
            return _with_own_share(0.5 * others.nan_to_num(0))  # a client that is alone has no others
        distance = squared_distances(own)
        median = float(distance[~torch.eye(num_clients, dtype=torch.bool)].median()) if num_clients > 1 else 1.0
        sigma = self.sigma or median or 1.0
        alpha = self.alpha or sigma / num_clients
        weights = alpha / sigma * torch.exp(-distance / sigma)
        weights.fill_diagonal_(0)
        # Too large an α must not make a client's own share negative.
        return _with_own_share(weights / weights.sum(1, keepdim=True).clamp(min=1))


def _with_own_share(others: Tensor) -> Tensor:
    """The shares of the others (zero diagonal) completed on the diagonal, so that rows sum to one."""
    return others + torch.diag(1 - others.sum(1))


@dataclass(frozen=True)
class FedSoft:
    """Clients belong to clusters in shares; each keeps one own model near the centres it belongs to.

    uᵢₛ is the share of client i's examples that centre s explains best. Per cluster a selection of clients is drawn
    with probability ∝ uᵢₛ nᵢ; the selected minimise Fᵢ(w) + proximal/2 Σₛ uᵢₛ ‖w − cₛ‖² from their own model; a centre
    becomes the mean of its selection.
    """

    num_clusters: NumClusters = 4
    proximal: Proximal = 0.1
    selection: Annotated[int, Field(ge=1, description="the clients that are drawn for each cluster")] = 10
    smoothing: Annotated[float, Field(gt=0, le=1, description="the least share of a client in a cluster")] = 1e-4
    scoring_examples: ScoringExamples = 320
    robust: Defence = "none"

    def init(self, clients: Clients) -> Personal:
        centres = draw_starts(clients, self.num_clusters)
        num_clients = len(clients.present)
        own = clients.draw_model(0, 0).repeat(num_clients, 1)
        return Personal(single_story(flat(centres), torch.full((num_clients,), -1)), own)

    def round(self, state: Personal, clients: Clients) -> tuple[Personal, RoundInfo]:
        shared, own = state.hypotheses, state.personal.clone()
        centres, assignment = shared.models.mean, shared.assignment.clone()
        share = clients.share_explained(centres, self.scoring_examples)
        present = clients.present.nonzero()[:, 0]  # who answered
        share = share[present].clamp(min=self.smoothing)
        share = share / share.sum(1, keepdim=True)  # (present client, cluster)
        assignment[0, present] = share.argmax(1)
        num_examples = weight_of(clients.num_examples, self.robust)
        selections = self._select(share * num_examples[present, None], clients)
        chosen = sorted(set().union(*selections))
        # Σₛ uᵢₛ ‖w − cₛ‖² is ‖w − Σₛ uᵢₛ cₛ‖² up to a constant, because the shares sum to one.
        means = share[chosen].to(centres.dtype) @ centres
        members = present[chosen]
        jobs = Jobs(torch.arange(len(chosen)), members, self.proximal * clients.num_examples[members], start=own)
        answers = [*zip(chosen, clients.fit(unit(means), jobs), strict=True)]
        arrived = [row for row, posterior in answers if posterior is not None]
        posteriors = [posterior for _, posterior in answers if posterior is not None]
        drawn_to = [means[chosen.index(row)] for row in arrived]
        for row, posterior in zip(
            arrived, all_bounded(posteriors, drawn_to, clients.num_parameters, self.robust), strict=True
        ):
            own[present[row]] = posterior.mean
        new_centres, statistics = centres.clone(), slice(clients.num_parameters, clients.num_evaluated)
        for cluster, selection in enumerate(selections):
            back = [int(present[row]) for row in selection if row in arrived]
            if back and self.robust in ("median", "trimmed"):
                new_centres[cluster] = middle(list(own[back]), self.robust)
            elif back:
                new_centres[cluster] = own[back].mean(0)
                new_centres[cluster, statistics] = mean_by_examples(own[back, statistics], num_examples[back])
        new = Personal(single_story(flat(new_centres), assignment), own)
        return new, one_story(new)

    def _select(self, weight: Tensor, clients: Clients) -> list[list[int]]:
        """Per cluster, distinct rows of `weight` drawn with probability proportional to it."""
        random = numpy_generator(clients.seed, "selection", clients.round)
        selections = []
        for column in weight.T:
            count = min(self.selection, int(column.count_nonzero()))  # fewer eligible clients than the selection
            share = (column / column.sum()).numpy() if count else None
            selections.append(random.choice(len(weight), count, replace=False, p=share).tolist())
        return selections
