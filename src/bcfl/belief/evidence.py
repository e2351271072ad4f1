"""How well a belief explains a client's data: the weights that decide the association (section 3.1).

A client answers with log-likelihoods at points; the server combines them. At the mean alone the evidence of a
hypothesis is a sum over clients. With several points per belief it is not, because the clients of a cluster share
one unknown model: the product over clients is taken at each point first, then the points are averaged.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from bcfl.belief.gaussian import Gaussian, sample, sigma_points

PointKind = Literal["random", "sigma"]
POINT_KINDS: tuple[str, ...] = get_args(PointKind)
TEMPERATURES = tuple(2.0**power for power in range(11))  # among which one is learned
Temperature = float | Literal["per_example", "none"]


def evidence_points(
    belief: Gaussian, num_points: int, kind: PointKind, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Points of the belief and their log-weights log α; one point is the mean."""  # (point, ..., parameter), (point,)
    if kind not in POINT_KINDS:
        raise ValueError(f"unknown kind of evidence points {kind!r}, allowed: {', '.join(POINT_KINDS)}")
    if num_points == 1:
        points = belief.mean[None]
    else:
        points = sample(belief, num_points, generator) if kind == "random" else sigma_points(belief, num_points)
    return points, torch.full((num_points,), -math.log(num_points), dtype=torch.float64)


def temper_scores(log_likelihood: Tensor, num_examples: Tensor, temperature: Temperature) -> Tensor:
    """Log-likelihoods divided by the temperature; the first axis is the client.

    `per_example` divides by the client's number of examples (a mean log-likelihood, what the paper's experiments
    use), `none` by 1 (the pure posterior), a number by itself.
    """
    if temperature == "per_example":
        return log_likelihood / num_examples.view(-1, *[1] * (log_likelihood.dim() - 1))
    if temperature == "none":
        return log_likelihood
    if isinstance(temperature, str) or not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature must be 'per_example', 'none' or a number > 0, got {temperature!r}")
    return log_likelihood / temperature


def learned_temperature(kept: Tensor, held: Tensor, log_prior: Tensor) -> float:
    """The temperature under which what a client has shown foretells best what it has held back.

    `kept` and `held` (client, cluster) are log-likelihoods of the examples a client trains on and of those it does not:
    argmax_T Σ_j log Σ_k softmax_k(log π + kept_j / T) · exp(held_jk), over TEMPERATURES, the coldest of equals. A
    client tells nothing but these sums.
    """

    def foretold(temperature: float) -> float:
        share = (log_prior + kept.double() / temperature).log_softmax(1)
        return float((share + held.double()).logsumexp(1).sum())

    return max(TEMPERATURES, key=foretold)


def client_evidence(log_likelihood: Tensor, log_point_weight: Tensor) -> Tensor:
    """log Σ_l α_l p(Dʲ|ω_l): each client's evidence as if it were alone in the cluster; the last axis is the point."""
    return (log_likelihood + log_point_weight).logsumexp(-1)


def hypothesis_evidence(
    log_likelihood: Tensor,  # (client, belief, point)
    log_point_weight: Tensor,  # (point,)
    assignment: Tensor,  # (hypothesis, client) -> cluster, −1 for a client that takes no part
    belief_of: Tensor,  # (hypothesis, cluster) -> belief
) -> Tensor:
    """log Π_i Σ_l α_l Π_{j∈θⁱ} p(Dʲ|ωⁱ_l) of each hypothesis; an empty cluster contributes nothing."""
    if assignment.shape != (len(belief_of), len(log_likelihood)) or log_likelihood.shape[2:] != log_point_weight.shape:
        shapes = [tuple(t.shape) for t in (log_likelihood, log_point_weight, assignment, belief_of)]
        raise ValueError("log_likelihood, log_point_weight, assignment and belief_of must be (client, belief, point), "
                         f"(point,), (hypothesis, client) and (hypothesis, cluster), got {shapes}")  # fmt: skip
    log_evidence = []
    for clusters, beliefs in zip(assignment, belief_of, strict=True):
        clients = (clusters >= 0).nonzero()[:, 0]
        own = log_likelihood[clients, beliefs[clusters[clients]]].double()  # (client, point)
        joint = torch.zeros(len(beliefs), own.shape[-1], dtype=torch.float64).index_add(0, clusters[clients], own)
        log_evidence.append(client_evidence(joint, log_point_weight).sum())
    return torch.stack(log_evidence)  # (hypothesis,)


def coarsen(log_likelihood: Tensor, num_examples: Tensor, effective: float) -> Tensor:
    """Log-likelihoods of n examples to the power min(1, effective/n): they count as at most `effective` examples.

    No model is exact: with enough examples, any small difference between clients would become proof of another
    cluster. A power that falls as 1/n is Miller and Dunson's (2019) remedy against too many clusters.
    """  # (client, model), (client,) -> (client, model)
    return log_likelihood * (effective / num_examples).clamp(max=1)[:, None]


def sum_error(values: Tensor, part: Tensor) -> float:
    """The standard error of the sum of independent values whose mean may differ between parts: √Σ n·s², part by part.

    A part of one value has no spread that could be seen, and adds none.
    """  # (value,), (value,) -> part
    parts = [values[part == one] for one in part.unique()]
    return math.sqrt(sum(len(own) * float(own.var()) for own in parts if len(own) > 1))
