"""The default: clusters whose members differ, as many as held-out examples ask for, with nothing to tune."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from bcfl.belief.gaussian import Gaussian
from bcfl.belief.heads import HeadLayout, Heads
from bcfl.belief.mixed import Clusters, Fit, WeakPrior
from bcfl.belief.spread import TINY, Quadratics
from bcfl.belief.starts import flat_prior, pooled_start, population
from bcfl.federation import Clients, Hypotheses, RoundInfo, one_story
from bcfl.methods.candidates import (
    ALONE,
    ONE,
    ONE_SPREAD,
    Candidate,
    Choice,
    Sums,
    all_fits,
    alone,
    candidate_fit,
    choose,
    heads_of,
)
from bcfl.methods.lastlayers import Key, Stand, ask_held_out, at_nothing, climb, expand, hear_sums

NUM_FOLDS = 5  # where sums say everything
FOLDS_CLIMBED = 3  # where clients must be asked again and again
EXCHANGES = 20  # at most, of a climb on all examples
EXCHANGES_IN_FOLD = 4
MORE_HEARD = 1.5  # times as many clients as at the last choice: it is made anew
EVERYTHING = -1  # no fold


@dataclass(frozen=True)
class MixedState:
    """What the server remembers: the clusters, where the clients are, and why it was chosen so."""

    hypotheses: Hypotheses
    heads: Heads | None = None  # priors of the clients' own last layers
    membership: Tensor | None = None  # (client, cluster); NaN for a client never heard of
    error: Tensor | None = None  # (cluster, coefficient): the standard errors of the means
    sums: Sums | None = None
    choice: Choice | None = None
    heard: Tensor | None = None  # (client,) bool: who had a part in the choice

    def serving(self) -> None:
        """Clients are served by their own last layers or, without, by their clusters' models."""
        return


@dataclass(frozen=True)
class Found:
    """A candidate on all examples."""

    candidate: Candidate
    fit: Fit
    who: Tensor  # (client of the fit,) -> client


@dataclass(frozen=True)
class Mixed:
    """Clusters of clients that differ within them: a mixture of mixed models in the last layer.

    zⱼ ~ Cat(π), θⱼ | zⱼ=k ~ N(μₖ, diag vₖ): K, and whether vₖ is 0, by held-out log-likelihood.
    """

    max_clusters: Annotated[int, Field(ge=1, le=64, description="most clusters that are tried")] = 4
    search: Annotated[
        bool, Field(description="whether clusters and spread are chosen by held-out examples, or taken as they are set")
    ] = True
    num_clusters: Annotated[int, Field(ge=1, le=64, description="K, where search is off")] = 1
    spread: Annotated[
        Literal["none", "last_layer"],
        Field(description="whether a cluster's members differ in the last layer, where search is off"),
    ] = "last_layer"

    @property
    def candidates(self) -> list[Candidate]:
        """What is chosen among, simplest first, and each client alone."""
        if not self.search:
            given = Candidate(self.num_clusters, self.spread != "none")
            return list(dict.fromkeys([given, ONE, ALONE]))
        more = [Candidate(k, True) for k in range(2, self.max_clusters + 1)]
        return [ONE, ONE_SPREAD, *more, ALONE]

    def init(self, clients: Clients) -> MixedState:
        start = clients.draw_model(0, 0)
        return MixedState(_story(start[None], torch.zeros_like(start)[None], torch.full((len(clients.present),), -1)))

    def round(self, state: MixedState, clients: Clients) -> tuple[MixedState, RoundInfo]:
        if clients.head is None or not clients.head.is_all:
            raise ValueError("method bcfl needs a model that is one torch.nn.Linear")
        new = self._by_sums(state, clients) if clients.head.exact else self._by_climbing(state, clients)
        return new, one_story(new.hypotheses)

    def _by_sums(self, state: MixedState, clients: Clients) -> MixedState:
        """Normal noise: one exchange says everything, another tells how the candidates do on held-out examples."""
        model, layout = state.hypotheses.models.mean[0], clients.head
        assert layout is not None
        sums = hear_sums(clients, model, NUM_FOLDS, state.sums)
        if not sums.heard.any() or (state.sums is not None and _same(sums, state.sums)):
            return state
        who, seed = sums.heard.nonzero()[:, 0], clients.seed
        on_all = sums.without(EVERYTHING)
        if not self._is_time(state, sums.heard):
            candidate = self.candidates[state.choice.chosen] if state.choice else ONE_SPREAD
            fits = all_fits(on_all, layout, [ONE_SPREAD, candidate], seed, EVERYTHING)
            found = None if candidate == ALONE else Found(candidate, fits[candidate], who)
            return self._settled(replace(state, sums=sums), clients, found, alone(on_all, layout))
        candidates = self.candidates
        parts = []
        for fold in range(NUM_FOLDS):
            given = sums.without(fold)
            fits = all_fits(given, layout, candidates, seed, fold)
            parts += [(candidates.index(c), fold, one.clusters) for c, one in fits.items()]
            parts.append((candidates.index(ALONE), fold, alone(given, layout)))
        choice = self._chosen(ask_held_out(clients, model[None], parts, NUM_FOLDS))
        candidate = candidates[choice.chosen]
        fits = all_fits(on_all, layout, [candidate], seed, EVERYTHING)
        found = None if candidate == ALONE else Found(candidate, fits[candidate], who)
        known = replace(state, sums=sums, choice=choice, heard=sums.heard)
        return self._settled(known, clients, found, alone(on_all, layout))

    def _chosen(self, held_out: Tensor) -> Choice:
        allowed = torch.tensor([self.search or place == 0 for place in range(len(self.candidates))])
        return choose(self.candidates, held_out, allowed)

    def _is_time(self, state: MixedState, heard: Tensor) -> bool:
        """Whether to choose anew: at first, and whenever many clients more have been heard."""
        return state.heard is None or int(heard.sum()) >= MORE_HEARD * int(state.heard.sum())

    def _by_climbing(self, state: MixedState, clients: Clients) -> MixedState:
        """Any other likelihood: clients expand theirs about their own modes until nothing moves."""
        model = state.hypotheses.models.mean[:1]
        if state.choice is not None and not self._is_time(state, clients.present):
            return state
        folds = [EVERYTHING, *range(FOLDS_CLIMBED)]
        bases = self._bases(clients, model, folds)
        if not bases:
            return state
        starts: dict[Key, Clusters] = {}
        priors: dict[Candidate, WeakPrior] = {}
        for candidate in self.candidates:
            if candidate.num_clusters > 1:
                for fold in folds:
                    base = bases[ONE_SPREAD, fold]
                    starts[candidate, fold] = candidate_fit(
                        _of_one(base.given), base.fit, candidate, clients.seed, fold
                    ).clusters
                priors[candidate] = population(bases[ONE_SPREAD, EVERYTHING].fit)
        stands = bases | (climb(clients, model, starts, priors, FOLDS_CLIMBED, EXCHANGES_IN_FOLD) if starts else {})
        layout = clients.head
        assert layout is not None
        parts = []
        for fold in range(FOLDS_CLIMBED):
            known = [c for c in self.candidates if (c, fold) in stands]
            parts += [(self.candidates.index(c), fold, stands[c, fold].fit.clusters) for c in known]
            by_one = alone(_of_one(bases[ONE, fold].given), layout)
            parts.append((self.candidates.index(ALONE), fold, by_one))
        choice = self._chosen(ask_held_out(clients, model, parts, FOLDS_CLIMBED))
        candidate = self.candidates[choice.chosen]
        found = None
        if candidate != ALONE:
            prior = {candidate: priors.get(candidate, flat_prior(bases[ONE, EVERYTHING].fit.clusters.mean[0]))}
            begin = {(candidate, EVERYTHING): stands[candidate, EVERYTHING].fit.clusters}
            stand = climb(clients, model, begin, prior, FOLDS_CLIMBED, EXCHANGES)[candidate, EVERYTHING]
            found = Found(candidate, stand.fit, torch.tensor(stand.who))
        heard = torch.zeros_like(clients.present)
        heard[list(bases[ONE, EVERYTHING].who)] = True
        by_one = alone(_of_one(bases[ONE, EVERYTHING].given), layout)
        return self._settled(replace(state, choice=choice, heard=heard), clients, found, by_one)

    def _bases(self, clients: Clients, model: Tensor, folds: Sequence[int]) -> dict[Key, Stand]:
        """One cluster, with and without a spread, for all examples and without each fold."""
        layout = clients.head
        assert layout is not None
        nothing = {(ONE, fold): at_nothing(layout, model[0]) for fold in folds}
        first = expand(clients, model, nothing, FOLDS_CLIMBED)
        if not first:
            return {}
        starts: dict[Key, Clusters] = {}
        for (_, fold), (_, given) in first.items():
            for candidate in (ONE, ONE_SPREAD):
                starts[candidate, fold] = pooled_start(given, layout.shared, spread=candidate.spread)
        flat = flat_prior(starts[ONE, EVERYTHING].mean[0])
        return climb(clients, model, starts, {ONE: flat, ONE_SPREAD: flat}, FOLDS_CLIMBED, EXCHANGES_IN_FOLD)

    def _settled(self, state: MixedState, clients: Clients, found: Found | None, by_itself: Clusters) -> MixedState:
        """The state with what was found: clusters as models and as priors of the clients' own last layers."""
        layout, template = clients.head, state.hypotheses.models.mean[0]
        assert layout is not None
        num_clients = len(clients.present)
        if found is None:  # each alone
            mean = layout.put(template, by_itself.mean[0].flatten(), by_itself.noise[0])
            story = _story(mean[None], torch.zeros_like(mean)[None], torch.zeros(num_clients, dtype=torch.int64))
            heads = heads_of(mean[None], [(0, EVERYTHING, by_itself)], 1)
            return replace(state, hypotheses=story, heads=heads, membership=torch.ones(num_clients, 1).double())
        clusters = found.fit.clusters
        models = torch.stack([layout.put(template, mean.flatten(), clusters.noise) for mean in clusters.mean])
        precision = torch.stack([_precision(layout, row.flatten(), template) for row in clusters.variance])
        assignment = torch.full((num_clients,), -1)
        assignment[found.who] = found.fit.membership.argmax(1)
        membership = clusters.log_share.exp().repeat(num_clients, 1)
        membership[found.who] = found.fit.membership
        return replace(
            state,
            hypotheses=_story(models, precision, assignment),
            heads=heads_of(models[:1], [(0, EVERYTHING, clusters)], 1),
            membership=membership,
            error=_errors(found.fit),
        )


def _same(new: Sums, old: Sums) -> bool:
    pairs = zip(
        (new.heard, new.given.curvature, new.given.linear, new.given.constant),
        (old.heard, old.given.curvature, old.given.linear, old.given.constant),
        strict=True,
    )
    return all(torch.equal(*pair) for pair in pairs)


def _of_one(given: Quadratics) -> Quadratics:
    """The quadratics themselves, at the modes of one cluster, with nothing said of other places."""
    return replace(given, pull=None)


def _story(models: Tensor, precision: Tensor, assignment: Tensor) -> Hypotheses:
    return Hypotheses(
        models=Gaussian(models, precision),
        model_of=torch.arange(len(models))[None],
        log_weight=torch.zeros(1, dtype=torch.float64),
        assignment=assignment.view(1, -1),
        parent_of=torch.arange(len(models)),
        family=torch.zeros(1, dtype=torch.int64),
    )


def _precision(layout: HeadLayout, variance: Tensor, template: Tensor) -> Tensor:
    """Of a cluster's belief: how little its members differ, at most 1/TINY; 0 where the model has no last layer."""
    return layout.put(torch.zeros_like(template), 1 / variance.clamp(min=TINY)).clamp(min=0)


def _errors(found: Fit) -> Tensor:
    """The standard errors of the clusters' means."""  # (cluster, coefficient)
    information = torch.einsum("jk,jkbpq->kbpq", found.membership, found.members.information)
    covariance: Tensor = torch.linalg.pinv(information, hermitian=True)
    return covariance.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt().flatten(1)
