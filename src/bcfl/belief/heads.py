"""What a server says of its clients' last layers, and what it may ask about them.

A head's coefficients are the likelihood's unknowns, then for each output its weights and, last, its bias. They are
float64: the sums and evidences in which they stand lose too much otherwise.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Asked = Literal["sums", "expansion", "held_out"]
FULL = 1000  # coefficients up to which the curvature is taken in full; beyond, outputs are kept apart


@dataclass(frozen=True)
class HeadLayout:
    """Where in a model's flat vector its last layer is, and what can be said of it."""

    num_outputs: int
    num_inputs: int
    bias: bool
    num_unknowns: int  # of the likelihood: the vector's first numbers
    num_parameters: int
    exact: bool  # whether the likelihood is normal with one learned noise, so that sums say everything
    least_scale: float = 0.0  # what that likelihood adds to exp of its unknown

    @property
    def num_coefficients(self) -> int:
        return (0 if self.exact else self.num_unknowns) + self.num_outputs * (self.num_inputs + self.bias)

    @property
    def is_all(self) -> bool:
        """Whether there is nothing before the last layer: a linear model."""
        own = self.num_outputs * (self.num_inputs + self.bias)
        return self.num_parameters == own + self.num_unknowns

    @property
    def shared(self) -> Tensor:
        """Which coefficients are the same for all clients of a cluster: the unknowns."""  # (1, coefficient) bool
        shared = torch.zeros(1, self.num_coefficients, dtype=torch.bool)
        shared[0, : 0 if self.exact else self.num_unknowns] = True
        return shared

    def take(self, vector: Tensor) -> Tensor:
        """The head of a model."""  # (..., vector) -> (..., coefficient) float64
        end = self.num_parameters
        weights = self.num_outputs * self.num_inputs
        first = end - weights - (self.num_outputs if self.bias else 0)
        rows = vector[..., first : first + weights].unflatten(-1, (self.num_outputs, self.num_inputs))
        if self.bias:
            rows = torch.cat([rows, vector[..., first + weights : end, None]], -1)
        unknown = vector[..., : 0 if self.exact else self.num_unknowns]
        return torch.cat([unknown, rows.flatten(-2)], -1).double()

    def put(self, vector: Tensor, coefficients: Tensor, noise: Tensor | None = None) -> Tensor:
        """The model with that head, and where the likelihood is normal with that noise variance."""  # (vector,)
        found = vector.clone()
        skipped = 0 if self.exact else self.num_unknowns
        found[:skipped] = coefficients[:skipped].to(found.dtype)
        rows = coefficients[skipped:].view(self.num_outputs, -1).to(found.dtype)
        end, weights = self.num_parameters, self.num_outputs * self.num_inputs
        first = end - weights - (self.num_outputs if self.bias else 0)
        found[first : first + weights] = rows[:, : self.num_inputs].flatten()
        if self.bias:
            found[first + weights : end] = rows[:, -1]
        if self.exact and noise is not None:
            found[0] = self.log_scale(noise)
        return found

    def noise_of(self, models: Tensor) -> Tensor:
        """The noise variance that models have learned, where the likelihood is normal; else 1."""  # (model,)
        if not self.exact:
            return torch.ones(len(models), dtype=torch.float64)
        return (models[:, 0].double().exp() + self.least_scale).square()

    def log_scale(self, noise: Tensor) -> Tensor:
        """The unknown of a normal likelihood whose noise has this variance."""
        return (noise.sqrt() - self.least_scale).clamp(min=1e-6).log()


def num_blocks(layout: HeadLayout) -> int:
    """How many blocks a curvature has: one, or one for each output."""
    return 1 if layout.num_coefficients <= FULL else layout.num_outputs


@dataclass(frozen=True)
class Heads:
    """Priors of clients' last layers, N(mean, diag variance), each on the features of a body.

    Priors of one candidate and fold are the clusters of a mixture; a client's examples of that fold are kept aside.
    """

    models: Tensor  # (body, vector)
    body_of: Tensor  # (prior,) -> body
    mean: Tensor  # (prior, coefficient)
    variance: Tensor  # (prior, coefficient)
    noise: Tensor  # (prior,), of a normal likelihood
    log_share: Tensor  # (prior,)
    candidate: Tensor  # (prior,)
    fold: Tensor  # (prior,); −1: no example is kept aside
    num_folds: int = 1
    held_out: float = 0.0  # if above 0, fold 0 is that share of the examples, which bodies were not trained on

    def __len__(self) -> int:
        return len(self.body_of)

    @property
    def num_candidates(self) -> int:
        return int(self.candidate.max()) + 1 if len(self.candidate) else 0

    @property
    def group(self) -> Tensor:
        """The mixture that each prior is part of: a candidate in a fold."""  # (prior,)
        return self.candidate * (self.num_folds + 1) + self.fold + 1
