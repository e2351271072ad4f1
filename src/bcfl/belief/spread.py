"""Clusters whose members differ: what a client's data say of a cluster, θⱼ | zⱼ=k ~ N(μₖ, diag vₖ).

A client's log-likelihood of its coefficients θ enters as a quadratic, c + bᵀθ − ½ θᵀHθ: exact for a linear model with
Gaussian noise, Laplace's approximation at the posterior's mode otherwise. Coordinates of variance 0 are shared by all
members, so that v = 0 everywhere is a cluster with one model. Blocks of coefficients that do not act on each other may
be kept apart, H (…, block, p, p); one block is a full matrix.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

TINY = 1e-12  # a variance below which a coefficient is the same for all


@dataclass(frozen=True)
class Pull:
    """What the gradient of Laplace's evidence has beyond the quadratic's: the mode moves, and the curvature with it."""

    mean: Tensor  # (client, cluster, block, p), in μ
    spread: Tensor  # (client, cluster, block, p), in log v
    at_mean: Tensor  # (cluster, block, p), where it was taken
    at_variance: Tensor

    def evidence(self, mean: Tensor, variance: Tensor) -> Tensor:
        """What it adds to the evidence away from there."""  # (client, cluster)
        moved = (variance.clamp(min=TINY) / self.at_variance.clamp(min=TINY)).log()
        return (self.mean * (mean - self.at_mean) + self.spread * moved).sum((-1, -2))


@dataclass(frozen=True)
class Quadratics:
    """Each client's log-likelihood c + bᵀθ − ½ θᵀHθ, and how it is scaled by the noise, if it is Gaussian.

    `noisy`: these are XᵀX, Xᵀy, −½yᵀy of n rows, to be divided by the noise variance and normalised.
    """

    curvature: Tensor  # (client, cluster or 1, block, p, p)
    linear: Tensor  # (client, cluster or 1, block, p)
    constant: Tensor  # (client, cluster or 1)
    num_examples: Tensor  # (client,) float64
    noisy: bool = False
    pull: Pull | None = None  # none where the quadratic is exact

    def at_noise(self, noise: Tensor | float) -> "Quadratics":
        """The log-likelihood under Gaussian noise of that variance; of another likelihood, itself."""
        if not self.noisy:
            return self
        scale = torch.as_tensor(noise, dtype=torch.float64)
        constant = self.constant / scale - self.num_examples[:, None] / 2 * (2 * torch.pi * scale).log()
        return Quadratics(self.curvature / scale, self.linear / scale, constant, self.num_examples)

    def minus(self, other: "Quadratics") -> "Quadratics":
        """The log-likelihood of the examples that are not among the other's."""
        return replace(
            self,
            curvature=self.curvature - other.curvature,
            linear=self.linear - other.linear,
            constant=self.constant - other.constant,
            num_examples=self.num_examples - other.num_examples,
        )


@dataclass(frozen=True)
class Members:
    """What each client's data say of being a member of each cluster, and its posterior N(mean, covariance) if so."""

    log_evidence: Tensor  # (client, cluster)
    mean: Tensor  # (client, cluster, block, p)
    covariance: Tensor  # (client, cluster, block, p, p)
    score: Tensor  # (client, cluster, block, p): the evidence's gradient in the cluster's mean
    information: Tensor  # (client, cluster, block, p, p): W = (H⁻¹ + diag v)⁻¹, about the cluster's mean
    curvature: Tensor  # (client, cluster, block, p, p): H


def members(given: Quadratics, mean: Tensor, variance: Tensor) -> Members:
    """The clients as members of clusters N(mean, diag variance); both are (cluster, block, p).

    With S = v^½, M = I + SHS and g the gradient at the cluster's mean: the evidence is that at the mean
    + ½ gᵀCg − ½ log|M|, C = S M⁻¹ S the posterior's covariance. No inverse of v or of H, so both may be singular.
    """
    curvature = given.curvature
    gradient = given.linear - (curvature @ mean[..., None])[..., 0]
    at_mean = given.constant + ((given.linear + gradient) * mean).sum((-1, -2)) / 2
    root = variance.sqrt()
    scaled = root[..., :, None] * curvature * root[..., None, :]
    scaled.diagonal(dim1=-2, dim2=-1).add_(1)
    factor = torch.linalg.cholesky(scaled)
    half = torch.linalg.solve_triangular(factor, torch.diag_embed(root).expand_as(scaled), upper=False)
    covariance = half.mT @ half
    shift = (covariance @ gradient[..., None])[..., 0]
    log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum((-1, -2))  # half of log|M|
    product = curvature @ covariance
    information = curvature - product @ curvature
    evidence = at_mean + (gradient * shift).sum((-1, -2)) / 2 - log_det
    if given.pull is not None:
        evidence = evidence + given.pull.evidence(mean, variance)
    score = gradient - (curvature @ shift[..., None])[..., 0]
    return Members(evidence, mean + shift, covariance, score, information, curvature)
