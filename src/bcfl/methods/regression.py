"""The default method on a linear model, which is all last layer: no training by gradients, but sums and modes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bcfl.belief.heads import HeadLayout
from bcfl.belief.mixed import Clusters, Fit, WeakPrior
from bcfl.belief.spread import TINY, Quadratics
from bcfl.belief.starts import flat_prior, pooled_start, population
from bcfl.federation import Clients
from bcfl.methods.candidates import ALONE, ONE, ONE_SPREAD, Candidate, Sums, all_fits, alone, candidate_fit, heads_of
from bcfl.methods.lastlayers import Key, Stand, ask_held_out, at_nothing, climb, expand, hear_sums
from bcfl.methods.mixedstate import MixedState, Plan, one_story_of

NUM_FOLDS = 5  # where sums say everything
FOLDS_CLIMBED = 3  # where clients must be asked again and again
EXCHANGES = 20  # at most, of a climb on all examples
EXCHANGES_IN_FOLD = 4
EVERYTHING = -1  # no fold
BARELY = 0.02  # of an example's information


@dataclass(frozen=True)
class Found:
    """A candidate on all examples."""

    candidate: Candidate
    fit: Fit
    who: Tensor  # (client of the fit,) -> client


def by_sums(plan: Plan, state: MixedState, clients: Clients) -> MixedState:
    """Normal noise: one exchange says everything, another tells how the candidates do on held-out examples."""
    model, layout = state.hypotheses.models.mean[0], clients.head
    assert layout is not None
    sums = hear_sums(clients, model, NUM_FOLDS, state.sums)
    if not sums.heard.any() or (state.sums is not None and _same(sums, state.sums)):
        return state
    who, seed = sums.heard.nonzero()[:, 0], clients.seed
    on_all = sums.without(EVERYTHING)
    if not plan.is_time(state, sums.heard):
        candidate = plan.candidates[state.choice.chosen] if state.choice else ONE_SPREAD
        fits = all_fits(on_all, layout, [ONE_SPREAD, candidate], seed, EVERYTHING)
        found = None if candidate == ALONE else Found(candidate, fits[candidate], who)
        return _settled(replace(state, sums=sums), clients, found, alone(on_all, layout))
    candidates = plan.candidates
    parts = []
    for fold in range(NUM_FOLDS):
        given = sums.without(fold)
        fits = all_fits(given, layout, candidates, seed, fold)
        parts += [(candidates.index(c), fold, one.clusters) for c, one in fits.items()]
        parts.append((candidates.index(ALONE), fold, alone(given, layout)))
    choice = plan.choose(ask_held_out(clients, heads_of(model[None], parts, NUM_FOLDS)))
    candidate = candidates[choice.chosen]
    fits = all_fits(on_all, layout, [candidate], seed, EVERYTHING)
    found = None if candidate == ALONE else Found(candidate, fits[candidate], who)
    known = replace(state, sums=sums, choice=choice, heard=sums.heard)
    return _settled(known, clients, found, alone(on_all, layout))


def by_climbing(plan: Plan, state: MixedState, clients: Clients) -> MixedState:
    """Any other likelihood: clients expand theirs about their own modes until nothing moves."""
    model = state.hypotheses.models.mean[:1]
    if state.choice is not None and not plan.is_time(state, clients.present):
        return state
    folds = [EVERYTHING, *range(FOLDS_CLIMBED)]
    bases, barely = _bases(clients, model, folds)
    if not bases:
        return state
    starts: dict[Key, Clusters] = {}
    priors: dict[Key, WeakPrior] = {}
    for candidate in plan.candidates:
        if candidate.num_clusters > 1:
            for fold in folds:
                base = bases[ONE_SPREAD, fold]
                starts[candidate, fold] = candidate_fit(
                    _of_one(base.given), base.fit, candidate, clients.seed, fold
                ).clusters
                priors[candidate, fold] = population(base.fit)  # without the fold, which else would tell of itself
    stands = bases | (climb(clients, model, starts, priors, FOLDS_CLIMBED, EXCHANGES_IN_FOLD) if starts else {})
    layout = clients.head
    assert layout is not None
    parts = []
    for fold in range(FOLDS_CLIMBED):
        known = [c for c in plan.candidates if (c, fold) in stands]
        parts += [(plan.candidates.index(c), fold, stands[c, fold].fit.clusters) for c in known]
        by_one = alone(_of_one(bases[ONE, fold].given), layout)
        parts.append((plan.candidates.index(ALONE), fold, by_one))
    choice = plan.choose(ask_held_out(clients, heads_of(model, parts, FOLDS_CLIMBED)))
    candidate = plan.candidates[choice.chosen]
    found = None
    if candidate != ALONE:
        key = candidate, EVERYTHING
        begin, prior = {key: stands[key].fit.clusters}, {key: priors.get(key, barely)}
        stand = climb(clients, model, begin, prior, FOLDS_CLIMBED, EXCHANGES)[key]
        found = Found(candidate, stand.fit, torch.tensor(stand.who))
    heard = torch.zeros_like(clients.present)
    heard[list(bases[ONE, EVERYTHING].who)] = True
    by_one = alone(_of_one(bases[ONE, EVERYTHING].given), layout)
    return _settled(replace(state, choice=choice, heard=heard), clients, found, by_one)


def _bases(clients: Clients, model: Tensor, folds: Sequence[int]) -> tuple[dict[Key, Stand], WeakPrior]:
    """One cluster, with and without a spread, for all examples and without each fold."""
    layout = clients.head
    assert layout is not None
    nothing = {(ONE, fold): at_nothing(layout, model[0]) for fold in folds}
    first = expand(clients, model, nothing, FOLDS_CLIMBED)
    if not first:
        return {}, flat_prior(layout.take(model[0])[None])
    starts: dict[Key, Clusters] = {}
    for (_, fold), (_, given) in first.items():
        for candidate in (ONE, ONE_SPREAD):
            starts[candidate, fold] = pooled_start(given, layout.shared, spread=candidate.spread)
    barely = _barely(first[ONE, EVERYTHING][1], layout)
    priors = dict.fromkeys(starts, barely)
    return climb(clients, model, starts, priors, FOLDS_CLIMBED, EXCHANGES_IN_FOLD), barely


def _barely(given: Quadratics, layout: HeadLayout) -> WeakPrior:
    """Next to nothing assumed of the coefficients, so that they stay finite where classes can be told apart without
    error: about 0, with a standard deviation of some ten in units in which they are about 1."""
    diagonal = given.curvature[:, 0].sum(0).diagonal(dim1=-2, dim2=-1) / given.num_examples.sum()
    nothing = flat_prior(diagonal)
    return replace(nothing, precision=torch.where(layout.shared.view_as(diagonal), 0.0, BARELY * diagonal))


def _settled(state: MixedState, clients: Clients, found: Found | None, by_itself: Clusters) -> MixedState:
    """The state with what was found: clusters as models and as priors of the clients' own last layers."""
    layout, template = clients.head, state.hypotheses.models.mean[0]
    assert layout is not None
    num_clients = len(clients.present)
    if found is None:  # each alone
        mean = layout.put(template, by_itself.mean[0].flatten(), by_itself.noise[0])
        story = one_story_of(mean[None], torch.zeros_like(mean)[None], torch.zeros(num_clients, dtype=torch.int64))
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
        hypotheses=one_story_of(models, precision, assignment),
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


def _precision(layout: HeadLayout, variance: Tensor, template: Tensor) -> Tensor:
    """Of a cluster's belief: how little its members differ, at most 1/TINY; 0 where the model has no last layer."""
    return layout.put(torch.zeros_like(template), 1 / variance.clamp(min=TINY)).clamp(min=0)


def _errors(found: Fit) -> Tensor:
    """The standard errors of the clusters' means."""  # (cluster, coefficient)
    information = torch.einsum("jk,jkbpq->kbpq", found.membership, found.members.information)
    covariance: Tensor = torch.linalg.pinv(information, hermitian=True)
    return covariance.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt().flatten(1)
