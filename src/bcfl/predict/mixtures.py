"""What a run says beyond its own clients and beyond one model: where a newcomer belongs, and mixtures that predict.

A newcomer is scored and nothing else: p(h, i | D) ∝ π_h · p(i | h) · p(D | ωⁱ_h)^(1/T) over hypotheses h and their
clusters i. A prediction is the mean of the models' predictions, p(y | x) = Σ_b share_b ∫ p(y | x, ω) N(ω; belief b) dω.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from bcfl.belief.evidence import evidence_points
from bcfl.belief.gaussian import Gaussian

ClusterPrior = Literal["uniform", "size"]
CLUSTER_PRIORS: tuple[str, ...] = get_args(ClusterPrior)
BeliefKind = Literal["mean", "samples", "sigma", "last_layer"]
BELIEF_KINDS: tuple[str, ...] = get_args(BeliefKind)
COVERAGES = tuple(share / 20 for share in range(1, 21))


def cluster_log_prior(assignment: Tensor, model_of: Tensor, kind: ClusterPrior) -> Tensor:
    """log p(cluster) of a client that nothing is known of, in every hypothesis, over the clusters that it has.

    `uniform`: 1/K. `size`: (members + 1) / (clients + K), so that an empty cluster is possible too.
    """  # (hypothesis, client), (hypothesis, cluster) -> (hypothesis, cluster)
    if kind not in CLUSTER_PRIORS:
        raise ValueError(f"prior must be one of {', '.join(CLUSTER_PRIORS)}, got {kind!r}")
    share = (model_of >= 0).double()
    if kind == "size":
        share *= (assignment[:, :, None] == torch.arange(model_of.shape[1])).sum(1) + 1
    return (share / share.sum(1, keepdim=True)).log()


def newcomer_posterior(score: Tensor, model_of: Tensor, log_weight: Tensor, log_prior: Tensor) -> Tensor:
    """p(hypothesis, cluster | data) of a client that was never seen; sums to one over both.

    `score` (..., belief) is its tempered log-likelihood under each belief, `model_of` (hypothesis, cluster) -> belief.
    """  # (..., hypothesis, cluster)
    joint = log_weight.double()[:, None] + log_prior + score.double()[..., model_of]
    joint = joint.masked_fill(model_of < 0, -math.inf)  # a hypothesis may have fewer clusters than others
    return joint.flatten(-2).softmax(-1).view_as(joint)


def belief_shares(joint: Tensor, model_of: Tensor, num_beliefs: int) -> Tensor:
    """The weight of each belief in a client's predictive mixture: hypotheses that share one add up."""  # (belief,)
    there = model_of >= 0
    return torch.zeros(num_beliefs, dtype=torch.float64).index_add(0, model_of[there], joint[there])


def client_joint(assignment: Tensor, model_of: Tensor, log_weight: Tensor, client: int) -> Tensor:
    """p(hypothesis, cluster) of a known client; in a hypothesis that never placed it, it may be anywhere."""
    own = assignment[:, client, None]
    placed = (own == torch.arange(model_of.shape[1])).double()
    anywhere = cluster_log_prior(assignment, model_of, "uniform").exp()
    return log_weight.double().exp()[:, None] * torch.where(own < 0, anywhere, placed)  # (hypothesis, cluster)


def varied(
    belief: Gaussian, num_parameters: int, num_varied: int, prior_precision: float, frozen: Tensor | None = None
) -> Gaussian:
    """The belief to draw predictions from: only the last `num_varied` of its parameters are uncertain.

    `prior_precision` is added to theirs: about a weight that no gradient ever reached the data say nothing, and a
    network does not survive a draw from nothing. BatchNorm statistics stay at their mean, and so do parameters that
    are `frozen` (parameter,). ∞ is the point prediction.
    """
    if not prior_precision >= 0:
        raise ValueError(f"prior_precision must be a number ≥ 0, got {prior_precision}")
    first = num_parameters - num_varied
    precision = torch.full_like(belief.precision, torch.inf)
    precision[..., first:num_parameters] = belief.precision[..., first:num_parameters] + prior_precision
    if frozen is not None:
        precision[..., :num_parameters].masked_fill_(frozen, torch.inf)
    return Gaussian(belief.mean, precision)


def points_of(belief: Gaussian, kind: BeliefKind, num_points: int, generator: torch.Generator) -> Tensor:
    """Equally weighted models that stand for the belief: its mean, random draws, or sigma points."""
    if kind == "mean":
        return belief.mean[None]
    points, _ = evidence_points(belief, num_points, "random" if kind == "samples" else "sigma", generator)
    return points  # (point, ..., vector)


def expected_softmax(mean: Tensor, variance: Tensor, num_points: int, generator: torch.Generator) -> Tensor:
    """log E softmax(z) for independent z ~ N(mean, variance), by antithetic draws that all rows share.

    A diagonal Gaussian over a last linear layer makes the class scores of an example exactly such z.
    """  # (example, class) twice -> (example, class)
    half = torch.randn(-(-num_points // 2), 1, mean.shape[1], generator=generator)
    noise = torch.cat([half, -half])
    log_p = (mean + noise * variance.sqrt()).log_softmax(2)
    return log_p.logsumexp(0) - math.log(len(noise))


def accuracy_at_coverage(confidence: Tensor, correct: Tensor, coverages: tuple[float, ...] = COVERAGES) -> list[float]:
    """The accuracy over the most confident share of the examples, for every share: what abstaining buys.

    Of equally confident examples the earlier one is answered first.
    """
    order = confidence.argsort(descending=True, stable=True)
    running = correct[order].double().cumsum(0)
    counts = [max(1, round(share * len(order))) for share in coverages]
    return [float(running[count - 1] / count) for count in counts]
