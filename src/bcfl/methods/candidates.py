"""What the method `bcfl` chooses among, and how: by what each candidate says of examples that it was not made from."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bcfl.belief.heads import HeadLayout, Heads
from bcfl.belief.mixed import Clusters, Fit, fit
from bcfl.belief.spread import Quadratics
from bcfl.belief.starts import best_fit, flat_prior, pooled_start
from bcfl.randomness import generator

STARTS = 4  # of a mixture on all examples
FOLD_STARTS = 2  # on all but a fold
TOLERANCE = 1e-6  # of a fit on all but a fold: the choice does not hang on more
CLEAR = 0.5  # standard errors by which a candidate must be better than a simpler one
VARIANCES = (0.03, 0.3, 3.0, 30.0)  # of a client alone, in units in which coefficients are about 1
NOISES = (1.0, 0.5, 0.25, 0.1)  # of a client alone, as shares of that of one model for all


@dataclass(frozen=True, order=True)
class Candidate:
    """So many clusters, and whether their members differ; no cluster: each client alone."""

    num_clusters: int
    spread: bool

    def __str__(self) -> str:
        if not self.num_clusters:
            return "each alone"
        clusters = "one model" if self.num_clusters == 1 else f"{self.num_clusters} clusters"
        return clusters + (" with a spread" if self.spread else "")


ALONE = Candidate(0, True)
ONE = Candidate(1, False)
ONE_SPREAD = Candidate(1, True)


@dataclass(frozen=True)
class Sums:
    """What clients have told of their last layers, fold by fold."""

    given: Quadratics  # (client, fold) in the place of (client, cluster)
    heard: Tensor  # (client,) bool

    def without(self, fold: int) -> Quadratics:
        """The log-likelihoods of those heard, of all examples but a fold's; −1: of all."""
        own = self.given

        def left(part: Tensor) -> Tensor:
            total = part.sum(1, keepdim=True)
            return (total if fold < 0 else total - part[:, fold : fold + 1])[self.heard]

        return Quadratics(
            left(own.curvature), left(own.linear), left(own.constant), left(own.num_examples)[:, 0], noisy=own.noisy
        )


def one_fit(given: Quadratics, layout: HeadLayout, *, spread: bool, tolerance: float = 1e-9) -> Fit:
    """One cluster, with or without a spread, at the maximum of its likelihood."""
    start = pooled_start(given, layout.shared, spread=spread)
    return fit(given, start, flat_prior(start.mean[0]), spread=spread, tolerance=tolerance)


def candidate_fit(given: Quadratics, base: Fit, candidate: Candidate, seed: int, fold: int) -> Fit:
    """Several clusters, from several starts."""
    on_all = fold < 0
    return best_fit(
        given,
        base,
        candidate.num_clusters,
        spread=candidate.spread,
        starts=STARTS if on_all else FOLD_STARTS,
        tolerance=1e-9 if on_all else TOLERANCE,
        generator=generator(seed, "clusters", candidate.num_clusters, int(candidate.spread), fold + 1),
    )


def all_fits(
    given: Quadratics, layout: HeadLayout, candidates: Sequence[Candidate], seed: int, fold: int
) -> dict[Candidate, Fit]:
    """Each of the candidates that has clusters, on what is given of a fold."""
    tolerance = 1e-9 if fold < 0 else TOLERANCE
    base = one_fit(given, layout, spread=True, tolerance=tolerance)
    found = {}
    for candidate in candidates:
        if candidate == ONE_SPREAD:
            found[candidate] = base
        elif candidate == ONE:
            found[candidate] = one_fit(given, layout, spread=False, tolerance=tolerance)
        elif candidate.num_clusters:
            found[candidate] = candidate_fit(given, base, candidate, seed, fold)
    return found


def alone(given: Quadratics, layout: HeadLayout) -> Clusters:
    """What a client alone assumes of its last layer: a grid of widths and noises, among which its own data choose."""
    one = pooled_start(given, layout.shared, spread=True)
    diagonal = given.curvature[:, 0].sum(0).diagonal(dim1=-2, dim2=-1)
    unit = given.num_examples.sum() / diagonal.clamp(min=1e-9 * float(diagonal.max()))
    unit = torch.where(layout.shared.view_as(unit), 0.0, unit)
    noises = NOISES if given.noisy else (1.0,)
    size = len(VARIANCES) * len(noises)
    mean = torch.where(layout.shared.view_as(unit), one.mean[0], 0.0).expand(size, *unit.shape)
    variance = torch.stack([unit * width for width in VARIANCES for _ in noises])
    noise = torch.tensor([float(one.noise) * share for _ in VARIANCES for share in noises], dtype=torch.float64)
    return Clusters(mean, variance, torch.full((size,), -math.log(size), dtype=torch.float64), noise)


def heads_of(
    models: Tensor, parts: Sequence[tuple[int, int, Clusters]], num_folds: int, body_of: Tensor | None = None
) -> Heads:
    """The clusters of several candidates and folds as one question; each is (candidate, fold, clusters)."""
    sizes = [len(clusters.log_share) for *_, clusters in parts]
    stretched = torch.tensor(sizes)
    return Heads(
        models,
        torch.zeros(sum(sizes), dtype=torch.int64) if body_of is None else body_of,
        torch.cat([clusters.mean.flatten(1) for *_, clusters in parts]),
        torch.cat([clusters.variance.flatten(1) for *_, clusters in parts]),
        torch.cat([clusters.noise.expand(size) for size, (*_, clusters) in zip(sizes, parts, strict=True)]),
        torch.cat([clusters.log_share for *_, clusters in parts]),
        torch.tensor([candidate for candidate, *_ in parts]).repeat_interleave(stretched),
        torch.tensor([fold for _, fold, _ in parts]).repeat_interleave(stretched),
        num_folds,
    )


@dataclass(frozen=True)
class Choice:
    """What was chosen among, how each did on held-out examples, and how clear the choice was."""

    candidates: tuple[str, ...]
    held_out: Tensor  # (client, candidate): mean log-likelihood per example; NaN: not told
    chosen: int
    best: int  # the one with the highest mean; what was chosen may be simpler
    behind: Tensor  # (candidate,): how much less than the best, over clients
    error: Tensor  # (candidate,): the standard error of that


def choose(candidates: Sequence[Candidate], held_out: Tensor, allowed: Tensor | None = None) -> Choice:
    """The simplest candidate that is not clearly worse than the best: simplest first in the list.

    Differences are paired over clients. `allowed` (candidate,) may be chosen, others are only for comparison.
    """
    known = held_out.isfinite().all(1)
    table = held_out[known]
    may = torch.ones(len(candidates), dtype=torch.bool) if allowed is None else allowed
    mean = table.mean(0).masked_fill(~may, -torch.inf)
    best = int(mean.argmax())
    loss = table[:, best : best + 1] - table
    behind = loss.mean(0)
    error = loss.std(0) / math.sqrt(len(table)) if len(table) > 1 else torch.zeros_like(behind)
    near = may & (behind <= CLEAR * error + 1e-12)
    chosen = int(near.nonzero()[0])
    return Choice(tuple(map(str, candidates)), held_out, chosen, best, behind, error)
