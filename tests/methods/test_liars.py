"""method.robust: the honest clients' numbers where nobody lies, and nearly theirs where somebody does."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from federation_fixtures import predictors, simulator, tiny_federation
from torch import Tensor

from bcfl.association.k_means import k_means
from bcfl.belief.gaussian import Gaussian
from bcfl.belief.robust import Robust, no_farther
from bcfl.engines.simulator import Simulator
from bcfl.federation import Choice, Jobs, State
from bcfl.methods import METHODS, make_method
from bcfl.randomness import generator

FUSING = ["fedavg", "bp-fedavg", "ifca", "wecfl", "fesem", "fedsoft", "fedprox", "ditto", "fedrep"]
FUSING += ["bcfl-g", "bcfl-g-w", "bcfl-c-2", "bcfl-mh-2", "bcfl-auto"]
OPTIONS = {"num_clusters": 1, "scoring_examples": 16}
UNDEFENDED = {"local", "bcfl", "bcfl-soft"}  # of the methods that come along: SECURITY.md says so
LIAR = 2


@dataclass
class WithLiar:
    """A round's clients, of which one says that it has moved a million times as far as it has."""

    inner: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def fit(self, models: Gaussian, jobs: Jobs) -> Iterator[Gaussian | None]:
        told = zip(jobs.belief.tolist(), jobs.client.tolist(), self.inner.fit(models, jobs), strict=True)
        return (_lie(client, posterior, models.mean[belief]) for belief, client, posterior in told)

    def fit_best(self, models: Gaussian, *args: Any) -> Iterator[Choice]:
        for choice in self.inner.fit_best(models, *args):
            posterior = _lie(choice.client, choice.posterior, models.mean[choice.belief])
            yield Choice(choice.client, choice.belief, posterior)


def _lie(client: int, posterior: Gaussian | None, start: Tensor) -> Gaussian | None:
    if client != LIAR or posterior is None:
        return posterior
    return Gaussian(start + 1e6 * (posterior.mean - start), posterior.precision)


def trained(engine: Simulator, name: str, robust: str, lying: bool, **options: str) -> State:
    method = make_method(name, {**OPTIONS, "robust": robust, **options})
    state = method.init(_clients(engine, 0, lying))
    for index in (1, 2):
        state, _ = method.round(state, _clients(engine, index, lying))
    return state


def _clients(engine: Simulator, index: int, lying: bool) -> Any:
    return WithLiar(engine.begin(index)) if lying else engine.begin(index)


@pytest.mark.parametrize("name", FUSING)
def test_one_liar_moves_the_models_no_further_than_training_does(name: str) -> None:
    with simulator(tiny_federation(num_groups=1)) as engine:
        start = engine.begin(0).draw_model(0, 0)
        farthest = {}
        for robust in ("none", "clip", "median", "trimmed"):
            models, used = predictors(trained(engine, name, robust, lying=True))
            honest = [model for client, model in enumerate(used.tolist()) if client != LIAR]
            farthest[robust] = float((models[honest] - start).abs().max())
    assert farthest.pop("none") > 100  # of Ditto's personal models; elsewhere 10⁴ and more
    assert max(farthest.values()) < 20


@pytest.mark.parametrize("name", FUSING)
def test_clip_changes_no_honest_run_to_the_last_bit(name: str) -> None:
    with simulator() as engine:
        plain, clipped = (trained(engine, name, robust, lying=False) for robust in ("none", "clip"))
    assert torch.equal(plain.hypotheses.models.mean, clipped.hypotheses.models.mean)
    assert torch.equal(plain.hypotheses.models.precision, clipped.hypotheses.models.precision)
    assert torch.equal(plain.hypotheses.log_weight, clipped.hypotheses.log_weight)


@pytest.mark.parametrize("variant", ["personal", "attentive_mean"])
def test_a_liar_among_models_that_listen_to_each_other_is_cut_too(variant: str) -> None:
    options = {"attention": "cosine", "variant": variant}
    with simulator(tiny_federation(num_groups=1)) as engine:
        start = engine.begin(0).draw_model(0, 0)

        def farthest(robust: str) -> float:
            models, used = predictors(trained(engine, "fedamp", robust, lying=True, **options))
            honest = [model for client, model in enumerate(used.tolist()) if client != LIAR]
            return float((models[honest] - start).abs().max())

        assert variant == "personal" or farthest("none") > 1e4  # a personal model of one's own is drawn there slowly
        assert farthest("clip") < 100
        plain, clipped = (trained(engine, "fedamp", robust, lying=False, **options) for robust in ("none", "clip"))
    assert torch.equal(plain.hypotheses.models.mean, clipped.hypotheses.models.mean)


def test_every_method_that_learns_of_others_has_a_defence_or_is_known_to_have_none() -> None:
    without = {name for name, entry in METHODS.items() if entry.comes_along and "robust" not in entry.options}
    assert without == UNDEFENDED


def test_clip_folds_as_it_goes_once_it_knows_what_is_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bcfl.methods.steps.CLIP_AFTER", 4)
    with simulator() as engine:
        plain = trained(engine, "fedavg", "none", lying=False)
        assert torch.equal(plain.hypotheses.models.mean, trained(engine, "fedavg", "clip", lying=False).models.mean)
        assert float(trained(engine, "fedavg", "clip", lying=True).models.mean.abs().max()) < 100


@pytest.mark.parametrize("kind", ["median", "trimmed"])
def test_who_goes_far_the_other_way_gets_no_cluster_at_the_cost_of_others(kind: Robust) -> None:
    draws = generator(0, "two groups")
    groups = torch.arange(8) % 2
    start, directions = torch.randn(40, generator=draws), torch.eye(2, 40)[groups]
    points = start + directions + 0.1 * torch.randn(8, 40, generator=draws)
    points[LIAR] = start - 9 * (points[LIAR] - start)
    honest = torch.arange(8) != LIAR

    def grouped(robust: Robust) -> bool:
        labels = k_means(no_farther(points, start[None], robust), torch.ones(8), 2, seed=0)[honest]
        return torch.equal(labels == labels[0], groups[honest] == groups[0])

    assert grouped(kind)
    assert not grouped("clip")
    assert no_farther(points, start[None], "clip") is points
