"""What leaves a client, clipped and blurred by the client itself, and what that is worth as differential privacy.

Each release is a vector whose norm is clipped to a bound, plus Gaussian noise: two data sets of one client, however
different, give vectors at most twice the bound apart. So everything a client says is (ε, δ)-differentially private
towards the server with respect to the client's whole data set. The sums that follow are the accountant's.

Which examples a client scores or trains on is drawn from the run's seed and known to the server: the accountant counts
on nothing but the noise.
"""

import fcntl
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bcfl.files import write_atomically

# Of a running variance that noise has made smaller, or negative: BatchNorm divides by its root. So small a one is far
# below the noise anyway, and blows a channel up by no more than thirty times.
LEAST_VARIANCE = 1e-3
STEPS_A_DEVIATION = 2.0**16  # at least so many steps of the grid make one standard deviation of the noise


@dataclass(frozen=True)
class Privacy:
    """How a client protects what it says; set on its own machine, so that no server can weaken it."""

    noise: float  # standard deviation of the noise on every number, in units of the bound
    clip: float = 1.0  # bound on the change of the model, as a norm over the whole vector
    precision_clip: float = 100.0  # bound on what training adds to the precision, likewise
    score_clip: float = 5.0  # bound on a log-likelihood per example, in nats
    delta: float = 1e-5
    max_epsilon: float | None = None  # the client says nothing more once it would have spent this

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value is None:
                continue
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not (value > 0 and math.isfinite(value))
            ):
                raise ValueError(f"privacy-{item.name.replace('_', '-')} must be a finite number > 0, got {value!r}")
        if self.delta >= 1:
            raise ValueError(f"privacy-delta must be below 1, got {self.delta}")

    def scores(self, scores: Tensor, num_examples: int, discrete: bool = True) -> Tensor:
        """Log-likelihoods whose means per example are clipped, then blurred; one release for all models together.

        Of a `discrete` target none is above 0; those of densities are clipped on both sides. One that is no number
        counts as the lowest: that a model fails on these data is told to nobody.
        """
        least, most = -self.score_clip, 0.0 if discrete else self.score_clip
        mean = (scores / num_examples).nan_to_num(nan=least).clamp(least, most)  # (model,)
        # Each mean lies in an interval of that length: about its middle the norm is at most this.
        bound = (most - least) / 2 * math.sqrt(len(mean))
        return self._blur(mean, bound).clamp(max=0.0 if discrete else math.inf) * num_examples

    def shares(self, shares: Tensor) -> Tensor:
        """Shares of examples, blurred and made shares again; one release."""
        # Two points of the simplex are at most √2 apart: twice the bound.
        blurred = self._blur(shares, math.sqrt(2) / 2).clamp(min=0)
        total = float(blurred.sum())
        return blurred / total if total > 0 else torch.full_like(shares, 1 / len(shares))

    def mean(self, mean: Tensor, start: Tensor, variances: Sequence[slice]) -> Tensor:
        """The trained vector with its change from `start` clipped and blurred; one release.

        BatchNorm's running `variances` stay positive. What is done to a blurred vector costs no privacy.
        """
        blurred = start + self._blur(_clipped(mean - start, self.clip), self.clip).to(start.dtype)
        for part in variances:
            blurred[part].clamp_(min=LEAST_VARIANCE)
        return blurred

    def precision(self, precision: Tensor, prior: Tensor) -> Tensor:
        """The precision with what training added to the prior's clipped and blurred; one release."""
        learned = _clipped(precision - prior, self.precision_clip)
        return prior + self._blur(learned, self.precision_clip).clamp(min=0).to(prior.dtype)

    def _blur(self, values: Tensor, bound: float) -> Tensor:
        """The values plus noise, in float64 and on a grid whose step depends on no data.

        Values on a grid plus noise rounded to it are the sum with the noise as drawn, rounded, and what is done to a
        Gaussian release costs no privacy. In whole numbers of steps the sum is exact, so that its low bits tell no
        more. (In floating point they do: Mironov 2012; Holohan and Braghin 2021.)
        """
        deviation = self.noise * bound
        step = 2.0 ** math.floor(math.log2(deviation / STEPS_A_DEVIATION))
        # Towards zero: no rounding makes two vectors differ by more than clipping allows.
        steps = (values.double() / step).trunc()
        return (steps + (deviation / step * _gaussian(values.numel())).round().view(values.shape)) * step


def _gaussian(count: int) -> Tensor:
    """Standard normal numbers of which nobody can know any from the others, by Box and Muller's formula, (number,).

    Every bit is fresh from the system's secure source, and none from the run's seed: whoever knows the noise can take
    it away. Of 64 bits each, so that the tails reach to 9.4 deviations; what is beyond has probability 2⁻⁶⁴.
    """
    bits = np.frombuffer(os.urandom(16 * (-(-count // 2))), dtype=np.uint64).astype(np.float64).reshape(2, -1)
    radius = np.sqrt(-2 * np.log((bits[0] + 1) * 2.0**-64))
    angle = 2 * math.pi * 2.0**-64 * bits[1]
    return torch.from_numpy(np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count])


def _clipped(vector: Tensor, bound: float) -> Tensor:
    vector = vector.double()
    norm = float(vector.norm())
    if not math.isfinite(norm):  # that a training diverged is told to nobody
        return torch.zeros_like(vector)
    return vector * (bound / norm) if norm > bound else vector


Releases = dict[float, int]  # noise -> number of releases with it


def spent(releases: Releases, delta: float) -> float:
    """ε after these Gaussian releases, by Google's dp-accounting (Rényi); their sensitivity is twice the bound."""
    if not any(releases.values()):
        return 0.0
    try:
        from dp_accounting import GaussianDpEvent
        from dp_accounting.rdp import RdpAccountant
    except ImportError:
        raise ValueError("privacy accounting needs dp-accounting: pip install 'bcfl[flower]'") from None
    accountant = RdpAccountant()
    for noise, count in releases.items():
        accountant.compose(GaussianDpEvent(noise / 2), count)
    return float(accountant.get_epsilon(delta))


@dataclass(frozen=True)
class Ledger:
    """What a client has said so far, in a file on its own machine: a new run does not make it forget."""

    path: Path

    def charge(self, privacy: Privacy, num_releases: int) -> Releases:
        """All releases so far, these included and written down; a ValueError if the budget does not allow them."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # A lock beside it: the ledger itself is replaced as a whole, so that no crash and no full disk makes it forget.
        with self.path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            releases = self._read()
            releases[privacy.noise] = releases.get(privacy.noise, 0) + num_releases
            if privacy.max_epsilon is not None and spent(releases, privacy.delta) > privacy.max_epsilon:
                raise ValueError(f"the privacy budget of ε = {privacy.max_epsilon:g} at δ = {privacy.delta:g} is spent")
            write_atomically(self.path, json.dumps(releases).encode())
        return releases

    def _read(self) -> Releases:
        """All releases so far; a ledger that says nothing sound is no empty one, and whoever keeps it says no more."""
        try:
            return {float(noise): int(count) for noise, count in json.loads(self.path.read_bytes()).items()}
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"the privacy ledger {self.path} is damaged: {error}") from None


@dataclass(frozen=True)
class Protection:
    """A client's privacy and the ledger that it keeps: nothing is blurred without being written down."""

    privacy: Privacy
    ledger: Ledger


def privacy_from(node_config: Mapping[str, Any]) -> Privacy | None:
    """A node's privacy settings, from its `privacy-…` keys; None if it has none."""
    names = {f"privacy-{item.name.replace('_', '-')}": item.name for item in fields(Privacy)}
    given = {key: value for key, value in node_config.items() if key.startswith("privacy")}
    unknown = sorted(given.keys() - names.keys())
    if unknown:
        raise ValueError(f"unknown node setting {unknown[0]}; allowed: {', '.join(names)}")
    if given and "privacy-noise" not in given:
        raise ValueError("privacy-noise must be given where other privacy settings are")
    # A whole number is a number, too, but what is reported must be of one kind.
    numbers = {names[key]: float(value) if type(value) is int else value for key, value in given.items()}
    return Privacy(**numbers) if numbers else None
