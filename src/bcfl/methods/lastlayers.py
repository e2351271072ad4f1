"""Asking clients of their last layers, and climbing with their answers to the maximum of the marginal likelihood."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bcfl.belief.heads import HeadLayout, Heads
from bcfl.belief.mixed import Clusters, Fit, WeakPrior, fit
from bcfl.belief.spread import TINY, Pull, Quadratics
from bcfl.federation import Clients
from bcfl.methods.candidates import Candidate, Sums, heads_of

Key = tuple[Candidate, int]  # a candidate, and the fold that is kept aside
Told = tuple[tuple[int, ...], Quadratics]  # the clients that have answered, and what they said

SETTLED = 1e-6  # a change of means (in units of their errors) and of log variances after which all is found
SETTLED_IN_FOLD = 1e-3
FIRST_STEPS = 30  # of a fit between two exchanges


def hear_sums(clients: Clients, model: Tensor, num_folds: int, before: Sums | None) -> Sums:
    """What clients say of their products by folds; of those that are away, what they said last."""
    head = clients.head
    assert head is not None
    size, count = head.num_coefficients, len(clients.present)
    old = (before or nothing_heard(count, num_folds, size)).given
    heard = torch.zeros(count, dtype=torch.bool) if before is None else before.heard.clone()
    curvature, linear, constant, number = (
        part.clone() for part in (old.curvature, old.linear, old.constant, old.num_examples)
    )
    empty = torch.zeros(0, size, dtype=torch.float64)
    none, nothing = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.float64)
    asked = Heads(model[None], none, empty, empty, nothing, nothing, none, none, num_folds)
    for client, told in clients.last_layer("sums", asked):
        curvature[client], linear[client] = told["curvature"][:, None], told["linear"][:, None]
        constant[client], number[client] = told["constant"], told["num_examples"]
        heard[client] = True
    return Sums(Quadratics(curvature, linear, constant, number, noisy=True), heard)


def nothing_heard(num_clients: int, num_folds: int, size: int) -> Sums:
    """Sums of no examples."""
    first = num_clients, num_folds
    given = Quadratics(
        torch.zeros(*first, 1, size, size, dtype=torch.float64),
        torch.zeros(*first, 1, size, dtype=torch.float64),
        torch.zeros(first, dtype=torch.float64),
        torch.zeros(first, dtype=torch.float64),
        noisy=True,
    )
    return Sums(given, torch.zeros(num_clients, dtype=torch.bool))


def expand(clients: Clients, models: Tensor, at: Mapping[Key, Clusters], num_folds: int) -> dict[Key, Told]:
    """The clients' log-likelihoods as quadratics at their modes under each of the clusters."""
    parts = [(place, fold, clusters) for place, ((_, fold), clusters) in enumerate(at.items())]
    answers = list(clients.last_layer("expansion", heads_of(models, parts, num_folds)))
    who = tuple(client for client, _ in answers)
    if not who:
        return {}
    stacked = {name: torch.stack([told[name] for _, told in answers]) for name in answers[0][1]}
    found, first = {}, 0
    for key, clusters in at.items():
        own = {name: part[:, first : first + len(clusters.log_share)] for name, part in stacked.items()}
        first += len(clusters.log_share)
        pull = Pull(own["pull_mean"], own["pull_spread"], clusters.mean, clusters.variance)
        count = own["num_examples"][:, 0]
        found[key] = who, Quadratics(own["curvature"], own["linear"], own["constant"], count, pull=pull)
    return found


@dataclass(frozen=True)
class Stand:
    """Where a climb is: what clients said there, and the evidence, which is exact there."""

    who: tuple[int, ...]
    given: Quadratics
    fit: Fit


def climb(
    clients: Clients,
    models: Tensor,
    starts: Mapping[Key, Clusters],
    priors: Mapping[Key, WeakPrior],
    num_folds: int,
    exchanges: int,
) -> dict[Key, Stand]:
    """Each of the clusters at, or near, the maximum of the Laplace marginal likelihood.

    Between exchanges the evidence is that of the quadratics with its slopes corrected, so that where nothing moves any
    more the evidence itself is at its maximum. A step after which it is lower is halved.
    """
    stands: dict[Key, Stand] = {}
    going = dict(starts)
    for _ in range(exchanges):
        for key, (who, given) in expand(clients, models, going, num_folds).items():
            here = fit(given, going[key], priors[key], spread=key[0].spread, max_steps=0)
            before = stands.get(key)
            if before is not None and before.who == who and _is_lower(here, before.fit):
                going[key] = _between(before.fit.clusters, going[key])
                continue
            stands[key] = Stand(who, given, here)
            ahead = fit(given, going[key], priors[key], spread=key[0].spread, max_steps=FIRST_STEPS)
            going[key] = ahead.clusters
            if moved(here, ahead.clusters) < (SETTLED if key[1] < 0 else SETTLED_IN_FOLD):
                del going[key]
        if not going:
            break
    return stands


def _is_lower(here: Fit, before: Fit) -> bool:
    return here.log_evidence < before.log_evidence - 1e-9 * (1 + abs(before.log_evidence))


def _between(old: Clusters, new: Clusters) -> Clusters:
    """Halfway back; where that is next to nothing it ends."""
    variance = torch.where(old.variance > TINY, (old.variance * new.variance.clamp(min=TINY)).sqrt(), old.variance)
    share = (old.log_share.exp() + new.log_share.exp()).log()
    return Clusters((old.mean + new.mean) / 2, variance, share - share.logsumexp(0), new.noise)


def moved(here: Fit, to: Clusters) -> float:
    """How far it is, in standard errors of the means and in log variances that matter."""
    information = torch.einsum("jk,jkbpq->kbpq", here.membership, here.members.information)
    errors = information.diagonal(dim1=-2, dim2=-1).sqrt()
    by_mean = ((to.mean - here.clusters.mean).abs() * errors).max()
    change = to.variance - here.clusters.variance
    by_variance = (change.abs() * errors.square()).max() / max(len(here.membership), 1)
    return float(torch.maximum(by_mean, by_variance))


def ask_held_out(clients: Clients, heads: Heads) -> Tensor:
    """Each client's mean log-likelihood of examples while they were kept aside, under each candidate; else NaN."""
    found = torch.full((len(clients.present), heads.num_candidates), torch.nan, dtype=torch.float64)
    for client, told in clients.last_layer("held_out", heads):
        found[client] = told["log_likelihood"] / told["num_examples"]
    return found  # (client, candidate)


def at_nothing(layout: HeadLayout, model: Tensor) -> Clusters:
    """One cluster whose outputs are all 0, with the unknowns as a model has them: where every climb begins."""
    mean = torch.where(layout.shared, layout.take(model), 0.0)[None]
    one = torch.ones((), dtype=torch.float64)
    return Clusters(mean, torch.zeros_like(mean), torch.zeros(1, dtype=torch.float64), one)
