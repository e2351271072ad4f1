"""Clipping and noise on the client's side, and what they are worth."""

import json
import math
import secrets
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_fixtures import client_data, examples_of, network
from scipy.optimize import brentq
from scipy.stats import norm

pytest.importorskip("flwr")

from bcfl import local
from bcfl.engines.client import LocalClient, draw_model, layout_of
from bcfl.engines.flower.privacy import LEAST_VARIANCE, Ledger, Privacy, privacy_from, spent
from bcfl.local import Training
from bcfl.models import FlatModel, build

ALMOST_NONE = 1e-9  # so little noise that only the clipping shows


def exact_epsilon(noise: float, num_releases: int, delta: float) -> float:
    """The ε of a composition of Gaussian releases in closed form (Balle and Wang 2018), sensitivity 2."""
    mu = 2 * math.sqrt(num_releases) / noise

    def excess(epsilon: float) -> float:
        return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu) - delta

    return float(brentq(excess, 0, 500))


@pytest.mark.parametrize(("noise", "count"), [(20.0, 1), (20.0, 60), (100.0, 300)])
def test_what_is_spent_bounds_the_closed_form_closely(noise: float, count: int) -> None:
    pytest.importorskip("dp_accounting")
    exact = exact_epsilon(noise, count, 1e-5)
    assert exact <= spent({noise: count}, 1e-5) <= 1.15 * exact
    assert spent({}, 1e-5) == 0


def test_releases_with_different_noise_add_up() -> None:
    pytest.importorskip("dp_accounting")
    both = spent({20.0: 10, 40.0: 10}, 1e-5)
    assert max(spent({20.0: 10}, 1e-5), spent({40.0: 10}, 1e-5)) < both < spent({20.0: 20}, 1e-5)


def test_a_change_of_the_model_is_clipped_as_a_whole() -> None:
    privacy, start = Privacy(noise=ALMOST_NONE, clip=2.0), torch.tensor([1.0, 1.0])
    far = privacy.mean(torch.tensor([31.0, 41.0]), start, ())
    assert torch.allclose(far, torch.tensor([2.2, 2.6]), atol=1e-6)  # (30, 40) has norm 50, 2 of it is left
    near = torch.tensor([1.5, 1.5])
    assert torch.allclose(privacy.mean(near, start, ()), near, atol=1e-6)


@pytest.mark.parametrize("state", ["fresh", "belief"])
def test_a_blurred_model_with_batchnorm_can_still_be_scored(state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise makes some of its running variances negative, whose roots are NaN, and then all scores the least."""
    monkeypatch.setattr(secrets, "randbits", lambda _: 0)
    model = FlatModel(build(network, 0))
    layout, (x, y, *_) = layout_of(model, Training(momentum_state=state)), client_data(1)[0]
    examples, start = examples_of(x, y), torch.zeros(layout.length)
    start[: layout.num_evaluated] = model.vector
    plain, positive = (Privacy(noise=3.0).mean(start, start, parts) for parts in ((), layout.variances))
    variances = torch.cat([plain[part] for part in layout.variances])
    assert bool((variances < 0).any())
    assert all(bool((positive[part] > 0).all()) for part in layout.variances)
    assert int((plain != positive).sum()) == int((variances < LEAST_VARIANCE).sum())  # and nothing else is changed
    scores = local.log_likelihoods(model, [plain, positive], examples, torch.arange(len(examples)))
    assert bool((scores[0] == local.FLOOR).all())
    assert bool((scores[1] > local.FLOOR).all())
    assert len(scores[1].unique()) > 1


def test_a_client_answers_with_positive_running_variances(monkeypatch: pytest.MonkeyPatch) -> None:
    flwr = pytest.importorskip("flwr.app")
    from bcfl.engines.flower.records import FLOAT, read_array, to_array
    from bcfl.engines.flower.respondent import Respondent

    monkeypatch.setattr(secrets, "randbits", lambda _: 0)
    model, (x, y, *_) = FlatModel(build(network, 0)), client_data(1)[0]
    training, examples = Training(local_steps=1), examples_of(x, y)
    layout = layout_of(model, training)
    own = LocalClient(0, examples, examples, training, 0, draws_globally=False)
    ask = {"client": 0, "round": 1, "kind": "all", "beliefs": [0], "parents": [0], "strengths": [0.5], "levels": [0.0]}
    ask |= {"curvature": 1, "num-steps": -1, "held-out": 0.0}
    models = flwr.ArrayRecord({"mean.0": to_array(draw_model(network, layout, 0, 0))})
    content = flwr.RecordDict({"ask": flwr.ConfigRecord(ask), "models": models})
    answer = Respondent(own, model, 3, privacy=Privacy(noise=3.0)).fit(content, flwr.RecordDict())
    said = read_array(answer["answer"]["mean.0"], (layout.length,), FLOAT, "mean.0")
    assert float(said.min()) < 0
    assert all(bool((said[part] > 0).all()) for part in layout.variances)


def test_a_training_that_diverged_tells_nothing() -> None:
    start = torch.zeros(3)
    assert torch.isfinite(Privacy(noise=1.0).mean(torch.tensor([math.nan, 1.0, math.inf]), start, ())).all()


def test_scores_are_clipped_per_example_and_never_above_zero() -> None:
    scores = Privacy(noise=ALMOST_NONE, score_clip=5.0).scores(torch.tensor([-30.0, -90.0], dtype=torch.float64), 10)
    assert torch.allclose(scores, torch.tensor([-30.0, -50.0], dtype=torch.float64), atol=1e-4)
    noisy = torch.stack([Privacy(noise=10.0).scores(torch.tensor([-0.1, -0.1]), 1) for _ in range(50)])
    assert float(noisy.max()) <= 0
    assert float(noisy.std()) > 1


def test_shares_stay_shares() -> None:
    for _ in range(20):
        shares = Privacy(noise=2.0).shares(torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64))
        assert float(shares.min()) >= 0
        assert float(shares.sum()) == pytest.approx(1)


def test_precision_never_falls_below_the_prior() -> None:
    prior = torch.full((1000,), 3.0)
    blurred = Privacy(noise=5.0).precision(prior + 1, prior)
    assert float((blurred - prior).min()) >= 0


def test_the_noise_is_as_strong_as_it_says_and_new_every_time() -> None:
    privacy, zero = Privacy(noise=3.0, clip=2.0), torch.zeros(20_000)
    first, second = privacy.mean(zero, zero, ()), privacy.mean(zero, zero, ())
    assert float(first.std()) == pytest.approx(6.0, rel=0.05)
    assert not torch.equal(first, second)


def test_the_ledger_outlives_runs_and_stops_at_the_budget(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    budget = spent({20.0: 5}, 1e-5)
    privacy = Privacy(noise=20.0, max_epsilon=budget)
    path = tmp_path / "flwr" / "ledger.json"
    assert Ledger(path).charge(privacy, 3) == {20.0: 3}
    assert Ledger(path).charge(privacy, 2) == {20.0: 5}
    with pytest.raises(ValueError, match="budget"):
        Ledger(path).charge(privacy, 1)
    assert json.loads(path.read_text()) == {"20.0": 5}  # what was refused was not said


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"privacy-nois": 1.0}, "unknown node setting privacy-nois; allowed: privacy-noise"),
        ({"privacy-clip": 1.0}, "privacy-noise must be given"),
        ({"privacy-noise": 0.0}, "privacy-noise must be a finite number > 0"),
        ({"privacy-noise": 1.0, "privacy-delta": 1.5}, "privacy-delta must be below 1"),
    ],
)
def test_unsound_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        privacy_from(settings)


def test_without_settings_there_is_no_privacy() -> None:
    assert privacy_from({"partition-id": 0}) is None
    assert privacy_from({"privacy-noise": 2.0, "privacy-score-clip": 1.0}) == Privacy(2.0, score_clip=1.0)
