"""A client's own last layer by Laplace's approximation: its mode under a Gaussian prior, and the evidence there.

The coefficients are θ = (unknowns, then one row of weights per output); output_c = φ·θ_c, and the unknowns stand behind
it. Under the prior N(μ, diag v) the mode is found by Newton steps in z, θ = μ + √v z, which also work at v = 0, where a
coefficient is what the prior says. Many priors are taken at once, each with its own weights of the examples.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

MOST_STEPS = 50
CLOSE = 1e-6  # a Newton step, in units of the prior's spread, after which the mode is found

Values = Callable[[Tensor], Tensor]


class Slopes(NamedTuple):
    """The log-likelihood's derivatives in each example's outputs and unknowns."""

    log_prob: Tensor  # (prior, example)
    gradient: Tensor  # (prior, example, output)
    curvature: Tensor  # (prior, example, output, output), of −log p: expected where the likelihood knows it


@dataclass(frozen=True)
class Rows:
    """A client's examples as its last layer sees them."""

    features: Tensor  # (example, feature), with a column of ones where there is a bias
    log_prob: Values  # (prior, example, output + unknown) -> (prior, example)
    information: Values  # -> (prior, example, output, output)
    num_outputs: int
    num_unknowns: int = 0
    blocks: bool = False  # whether outputs are kept apart in the curvature: for many coefficients

    @property
    def num_coefficients(self) -> int:
        return self.num_unknowns + self.num_outputs * self.features.shape[1]

    def outputs(self, theta: Tensor) -> Tensor:
        """What the last layer gives."""  # (prior, coefficient) -> (prior, example, output + unknown)
        unknown, rows = theta[:, : self.num_unknowns], theta[:, self.num_unknowns :]
        outputs = torch.einsum("nd,qcd->qnc", self.features, rows.view(len(theta), self.num_outputs, -1))
        return torch.cat([outputs, unknown[:, None].expand(-1, len(self.features), -1)], -1)

    def back(self, slope: Tensor) -> Tensor:
        """A gradient in the outputs as one in the coefficients."""  # (prior, example, output) -> (prior, coefficient)
        rows = torch.einsum("nd,qnc->qcd", self.features, slope[..., : self.num_outputs])
        return torch.cat([slope[..., self.num_outputs :].sum(1), rows.flatten(1)], 1)

    def slopes(self, theta: Tensor) -> Slopes:
        with torch.enable_grad():
            output = self.outputs(theta).detach().requires_grad_()
            log_prob = self.log_prob(output)
            (gradient,) = torch.autograd.grad(log_prob.sum(), output)
        return Slopes(log_prob.detach(), gradient, self.output_curvature(output.detach()))

    def output_curvature(self, output: Tensor) -> Tensor:
        """Of −log p: the likelihood's information, and as observed where unknowns have a part in it."""
        if not self.num_unknowns:
            return self.information(output)
        keep = output.requires_grad
        with torch.enable_grad():
            point = output if keep else output.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.log_prob(point).sum(), point, create_graph=True)
            columns = [
                torch.autograd.grad(-gradient[..., c].sum(), point, create_graph=keep, retain_graph=True)[0]
                for c in range(self.num_outputs, point.shape[-1])
            ]
        crossed = torch.stack(columns, -1)  # (prior, example, output + unknown, unknown)
        top = torch.cat([self.information(output), crossed[..., : self.num_outputs, :]], -1)
        return torch.cat([top, crossed.mT], -2)

    def curvature(self, weighted: Tensor) -> Tensor:
        """Σ Jᵀ h J over the examples."""  # (prior, example, output, output) -> (prior, block, p, p)
        phi, C, U = self.features, self.num_outputs, self.num_unknowns
        if self.blocks:
            own = weighted.diagonal(dim1=-2, dim2=-1)[..., :C]
            return torch.einsum("qnc,nd,ne->qcde", own, phi, phi)
        size = C * phi.shape[1]
        rows = torch.einsum("qncb,nde->qcdbe", weighted[..., :C, :C], phi[:, :, None] * phi[:, None, :])
        rows = rows.reshape(len(weighted), size, size)
        if not U:
            return rows[:, None]
        crossed = torch.einsum("qncu,nd->qcdu", weighted[..., :C, C:], phi).reshape(len(weighted), size, U)
        corner = weighted[..., C:, C:].sum(1)
        return torch.cat([torch.cat([corner, crossed.mT], -1), torch.cat([crossed, rows], -1)], -2)[:, None]

    def blocked(self, theta: Tensor) -> Tensor:
        return theta.view(len(theta), self.num_outputs if self.blocks else 1, -1)


@dataclass(frozen=True)
class Mode:
    """Where a client's posterior is highest under each prior, and the log-likelihood as a quadratic there."""

    theta: Tensor  # (prior, coefficient)
    log_likelihood: Tensor  # (prior,), at the mode
    gradient: Tensor  # (prior, block, p), of the log-likelihood
    curvature: Tensor  # (prior, block, p, p)
    covariance: Tensor  # (prior, block, p, p), of the posterior
    log_evidence: Tensor  # (prior,)
    log_prob: Tensor  # (prior, example)


def mode(rows: Rows, mean: Tensor, variance: Tensor, weight: Tensor, start: Tensor | None = None) -> Mode:
    """The posterior's mode under each prior N(mean, diag variance), and Laplace's approximation there.

    `weight` (prior, example) is how much each example counts: 0 where it is held out.
    """  # (prior, coefficient) twice
    root = variance.sqrt()
    z = torch.zeros_like(mean)
    if start is not None:
        z = torch.where(root > 0, (start - mean) / root.clamp(min=1e-150), 0.0)
    value = _height(rows, mean + root * z, z, weight)
    for _ in range(MOST_STEPS):
        found = rows.slopes(mean + root * z)
        _, factor = _factors(rows, found, root, weight)
        slope = rows.blocked(root * rows.back(found.gradient * weight[..., None]) - z)
        step = torch.cholesky_solve(slope[..., None], factor)[..., 0].flatten(1)
        z, value, size = _climbed(rows, mean, root, z, step, value, weight)
        if float(size) < CLOSE:
            break
    return _expanded(rows, mean, root, z, weight)


def _factors(rows: Rows, found: Slopes, root: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """H, and the Cholesky factor of I + √v H √v."""
    curvature = rows.curvature(found.curvature * weight[..., None, None])
    scale = rows.blocked(root)
    scaled = scale[..., :, None] * curvature * scale[..., None, :]
    scaled.diagonal(dim1=-2, dim2=-1).add_(1)
    return curvature, torch.linalg.cholesky(scaled)


def _height(rows: Rows, theta: Tensor, z: Tensor, weight: Tensor) -> Tensor:
    return (rows.log_prob(rows.outputs(theta)) * weight).sum(1) - z.square().sum(1) / 2


def _climbed(
    rows: Rows, mean: Tensor, root: Tensor, z: Tensor, step: Tensor, value: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """z after as much of the step as makes the posterior higher, how high that is, and the largest change."""
    size = torch.ones_like(value)
    for _ in range(12):
        trial = z + size[:, None] * step
        height = _height(rows, mean + root * trial, trial, weight)
        higher = height >= value - 1e-10 * (1 + value.abs())
        if bool(higher.all()):
            break
        size = torch.where(higher, size, size / 2)
    moved = torch.where(higher[:, None], trial, z)
    return moved, torch.where(higher, height, value), (moved - z).abs().max()


def _expanded(rows: Rows, mean: Tensor, root: Tensor, z: Tensor, weight: Tensor) -> Mode:
    theta = mean + root * z
    found = rows.slopes(theta)
    curvature, factor = _factors(rows, found, root, weight)
    half = torch.linalg.solve_triangular(factor, torch.diag_embed(rows.blocked(root)), upper=False)
    likelihood = (found.log_prob * weight).sum(1)
    log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum((-1, -2))
    gradient = rows.blocked(rows.back(found.gradient * weight[..., None]))
    evidence = likelihood - z.square().sum(1) / 2 - log_det
    return Mode(theta, likelihood, gradient, curvature, half.mT @ half, evidence, found.log_prob)


def pulls(rows: Rows, at: Mode, mean: Tensor, variance: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """What the evidence's gradient in μ and log v has beyond that of the quadratic at the mode.

    −½ log|I + √v H √v| changes with the mode, by t = ½ ∂⟨C, H(θ)⟩/∂θ; the mode changes with μ by I − CH and with
    √vᵢ by zᵢ(I − CH)eᵢ + C eᵢ gᵢ/√vᵢ.
    """  # (prior, block, p) twice
    C = rows.num_outputs
    of_outputs = _output_covariance(rows, at.covariance)  # (prior, example, output, output)
    with torch.enable_grad():
        output = rows.outputs(at.theta).detach().requires_grad_()
        curvature = rows.output_curvature(output)[..., :C, :C]
        total = (of_outputs * curvature * weight[..., None, None]).sum() / 2
        (slope,) = torch.autograd.grad(total, output) if total.requires_grad else (torch.zeros_like(output),)
    t = rows.blocked(rows.back(slope))
    root = rows.blocked(variance.sqrt())
    z = torch.where(root > 0, rows.blocked(at.theta - mean) / root.clamp(min=1e-150), 0.0)
    rest = t - (at.curvature @ (at.covariance @ t[..., None]))[..., 0]  # (I − HC) t
    shift = (at.covariance @ t[..., None])[..., 0]  # C t
    by_root = z * rest + torch.where(root > 0, at.gradient * shift / root.clamp(min=1e-150), 0.0)
    return -rest, -by_root * root / 2


def _output_covariance(rows: Rows, covariance: Tensor) -> Tensor:
    """The covariance of each example's outputs under the posterior, output by output where blocks are kept apart."""
    phi, C, U = rows.features, rows.num_outputs, rows.num_unknowns
    if rows.blocks:
        own = torch.einsum("nd,qcde,ne->qnc", phi, covariance, phi)
        return torch.diag_embed(own)
    inner = covariance[:, 0, U:, U:].view(len(covariance), C, phi.shape[1], C, phi.shape[1])
    return torch.einsum("nd,qcdbe,ne->qncb", phi, inner, phi)


def as_quadratic(rows: Rows, at: Mode) -> tuple[Tensor, Tensor, Tensor]:
    """The log-likelihood about the mode as c + bᵀθ − ½ θᵀHθ: H, b and c."""  # (prior, block, p, p), ..., (prior,)
    theta = rows.blocked(at.theta)
    product = (at.curvature @ theta[..., None])[..., 0]
    constant = at.log_likelihood - (at.gradient * theta).sum((-1, -2)) - (theta * product).sum((-1, -2)) / 2
    return at.curvature, at.gradient + product, constant
