"""Clients that lie, against every method and every defence: what the honest clients are left with.

`python benchmarks/attacks.py` makes all runs that benchmarks/attacks.json does not hold yet (half an hour), and
writes the table of SECURITY.md anew. `--again NAME` makes those of one method again.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bcfl.belief.gaussian import Gaussian
from bcfl.belief.robust import FURTHEST, SUREST
from bcfl.client.client import is_usable
from bcfl.data.partition import FederatedData
from bcfl.engines.simulator import Simulator
from bcfl.federation import Choice, Jobs, served
from bcfl.methods import entry_of
from bcfl.randomness import generator
from bcfl.runs.problem import prepare
from bcfl.runs.settings import Config, load_config

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/attacks.json"
PAGE = ROOT / "SECURITY.md"
BEGIN, END = "<!-- attacks -->", "<!-- end of attacks -->"

METHODS: tuple[str, ...] = ("fedavg", "bp-fedavg", "fedamp", "ifca", "fesem", "wecfl", "fedsoft")
METHODS += ("bcfl-g", "bcfl-g-w", "bcfl-c-3", "bcfl-mh-3", "bcfl-mh-3-w", "bcfl-auto")
DEFENCES = ("none", "clip", "median", "trimmed")
FEDERATIONS = {"1 of 8": (4, (0,)), "2 of 12": (6, (0, 6))}  # clients of each of the two groups, and who lies
ROUNDS = 20
LAST = 5  # rounds whose mean accuracy counts
SEED = 0
NUM_LISTED = 6  # attacks that a defence must stop; the others are told as well
SURE = 1e17
CLAIM = 1e6


@dataclass(frozen=True)
class Attack:
    """What the lying clients say in place of what they have learned."""

    summary: str
    lie: Callable[[Gaussian, Tensor, Tensor], tuple[Tensor, Tensor]] = lambda told, start, noise: (
        told.mean,
        told.precision,
    )
    claim: float = 1.0  # times as many examples as they have
    flips: bool = False  # their labels are others
    alternates: bool = False  # they say that one belief after the other suits them by far the best


def _moved(told: Gaussian, start: Tensor, times: float) -> Tensor:
    """Where the client would have come to, had it gone so many times as far; below 0 the other way."""
    return start + times * (told.mean - start)


ATTACKS = {
    "none": Attack("nobody lies"),
    "random": Attack("a random vector, each number from N(0, 1)", lambda told, start, noise: (noise, told.precision)),
    "× 10⁶": Attack(
        "a change a million times as long", lambda told, start, noise: (_moved(told, start, 1e6), told.precision)
    ),
    "1e17": Attack(
        "a precision of 1e17", lambda told, start, noise: (told.mean, torch.full_like(told.precision, SURE))
    ),
    "labels": Attack("labels counted from the other end", flips=True),
    "size": Attack("that, and a claim of a million times the examples", claim=CLAIM, flips=True),
    "scores": Attack(
        "one cluster after the other is said to suit by far the best, and is sent a random vector",
        lambda told, start, noise: (noise, told.precision),
        alternates=True,
    ),
    "away": Attack(
        "the same scores, and a change of the usual length the other way",
        lambda told, start, noise: (_moved(told, start, -1), told.precision),
        alternates=True,
    ),
    "bounds": Attack(
        "nearly as far the other way, and as sure, as clip lets through",
        lambda told, start, noise: (_moved(told, start, -0.9 * FURTHEST), 0.9 * SUREST * told.precision),
    ),
}


@dataclass
class WithLiars:
    """A round's clients, some of whom lie: all that they say goes through here, as it would through a wire."""

    inner: Any
    liars: tuple[int, ...]
    attack: Attack

    def __post_init__(self) -> None:
        self.num_examples = self.inner.num_examples.clone()
        self.num_examples[list(self.liars)] *= self.attack.claim

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def score(self, models: Tensor, *args: Any, **options: Any) -> Tensor:
        found: Tensor = self.inner.score(models, *args, **options)
        for liar in self.liars:
            found[liar] *= self.attack.claim
            if self.attack.alternates:
                found[liar] = -1e4 * self.num_examples[liar]
                found[liar, self.inner.round % len(models)] = 0
        return found

    def fit(self, models: Gaussian, jobs: Jobs) -> Iterator[Gaussian | None]:
        told = zip(jobs.belief.tolist(), jobs.client.tolist(), self.inner.fit(models, jobs), strict=True)
        for belief, client, posterior in told:
            start = models.mean[belief] if jobs.start is None else jobs.start[client]
            yield self._said(client, posterior, start, jobs.curvature)

    def fit_best(self, models: Gaussian, strength: float, curvature: bool, *args: Any) -> Iterator[Choice]:
        for one in self.inner.fit_best(models, strength, curvature, *args):
            if one.client not in self.liars or not self.attack.alternates:
                said = self._said(one.client, one.posterior, models.mean[one.belief], curvature)
                yield replace(one, posterior=said)
                continue
            belief = self.inner.round % len(models.mean)
            jobs = Jobs(torch.tensor([belief]), torch.tensor([one.client]), torch.tensor([strength]), curvature)
            yield Choice(one.client, belief, next(iter(self.fit(models, jobs))))

    def _said(self, client: int, told: Gaussian | None, start: Tensor, curvature: bool) -> Gaussian | None:
        if client not in self.liars or told is None:
            return told
        random = generator(self.inner.seed, "liars", self.inner.round)  # they lie alike
        mean, precision = self.attack.lie(told, start, torch.randn(start.shape, generator=random))
        # Without curvature a server counts the examples itself, as many as were claimed.
        said = Gaussian(mean, precision if curvature else told.precision * self.attack.claim)
        return said if is_usable(said) else None  # as every engine has it


def config_of(method: str, defence: str, clients_per_group: int, seed: int) -> Config:
    """Digits in two groups, of which one has its images turned by a quarter."""
    options = {"num_clusters": "2", "robust": defence, "search_rounds": str(ROUNDS // 2)}
    known = entry_of(method).options
    settings = [f"method.{key}={value}" for key, value in options.items() if key in known]
    return load_config(None, [
        f"data.partition=feature(2,{clients_per_group})", "data.rotations=[0, 90]", f"method.name={method}", *settings,
        f"experiment.rounds={ROUNDS}", f"experiment.seed={seed}",
    ])  # fmt: skip


def flipped(data: FederatedData, liars: Sequence[int]) -> FederatedData:
    """The liars' labels are counted from the other end."""
    y = data.y_train.clone()
    for liar in liars:
        rows = data.train_of[liar]
        y[rows] = data.num_classes - 1 - y[rows]
    return replace(data, y_train=y)


def honest_accuracy(method: str, defence: str, federation: str, attack: Attack, seed: int) -> float:
    """The share of the honest clients' test examples that are told rightly, a mean over the last rounds."""
    clients_per_group, liars = FEDERATIONS[federation]
    problem = prepare(config := config_of(method, defence, clients_per_group, seed))
    liars = liars if attack is not ATTACKS["none"] else ()
    assert isinstance(problem.data, FederatedData)
    data = flipped(problem.data, liars) if attack.flips else problem.data
    honest = [client for client in range(2 * clients_per_group) if client not in FEDERATIONS[federation][1]]
    found = []
    with Simulator(problem.factory, data, config.training, seed, device="stacked-cpu") as engine:
        state = problem.method.init(WithLiars(engine.begin(0), liars, attack))
        for index in range(1, ROUNDS + 1):
            state, _ = problem.method.round(state, WithLiars(engine.begin(index), liars, attack))
            if index > ROUNDS - LAST:
                models, shares = served(state)
                tested = engine.evaluate(models.mean, shares, index)
                right = [one.confusion for one in (tested[client] for client in honest) if one is not None]
                confusion = torch.stack(right).sum(0)
                found.append(float(confusion.diagonal().sum() / confusion.sum()))
    return sum(found) / len(found)


def defences_of(method: str) -> tuple[str, ...]:
    """What method.robust may be: FedAMP, each of whose mixtures is another, has no median."""
    return DEFENCES[:2] if method == "fedamp" else DEFENCES


Found = dict[str, float]  # "method, federation, defence, attack" -> the honest clients' accuracy


def measure(found: Found, methods: Sequence[str]) -> None:
    """All runs of these methods that are not among the figures yet; every figure is kept at once."""
    for method, federation in itertools.product(methods, FEDERATIONS):
        for defence, name in itertools.product(defences_of(method), ATTACKS):
            key = ", ".join((method, federation, defence, name))
            if key not in found:
                found[key] = round(honest_accuracy(method, defence, federation, ATTACKS[name], SEED), 4)
                RESULTS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        print(lines_of(found, method, federation)[0], flush=True)


def lines_of(found: Found, method: str, federation: str) -> list[str]:
    """A method's row without a defence and, below it, with the one under which the worst listed attack does least."""

    def row(defence: str) -> list[float]:
        return [100 * found[", ".join((method, federation, defence, name))] for name in ATTACKS]

    def least(defence: str) -> float:
        return min(row(defence)[: 1 + NUM_LISTED])

    best = max(defences_of(method)[1:], key=least, default=None)
    lines = [f"| {method}, {federation} | none | " + " | ".join(f"{value:.1f}" for value in row("none")) + " | |"]
    if best is not None:
        cells = " | ".join(f"{value:.1f}" for value in row(best))
        lines.append(f"| | {best} | {cells} | {max(0.0, row('none')[0] - least(best)):.1f} |")
    return lines


def table(found: Found) -> list[str]:
    """The table of SECURITY.md."""
    heads = ["", "robust", "nobody lies", *list(ATTACKS)[1:], "lost"]
    rows = [line for method in METHODS for federation in FEDERATIONS for line in lines_of(found, method, federation)]
    return ["| " + " | ".join(heads) + " |", "|---|---|" + "---|" * (len(heads) - 2), *rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--again", default=[], nargs="*", choices=METHODS, help="methods whose runs are made again")
    again = parser.parse_args().again
    kept: Found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    found = {key: value for key, value in kept.items() if key.partition(",")[0] not in again}
    measure(found, METHODS)
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{PAGE.name} must hold {BEGIN} and {END}")
    PAGE.write_text("\n".join([before + begin, *table(found), end + after]))


if __name__ == "__main__":
    main()
