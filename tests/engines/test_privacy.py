"""Clipping and noise on the client's side, and what they are worth."""

import errno
import json
import math
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_fixtures import client_data, examples_of, network
from scipy.optimize import brentq
from scipy.stats import kstest, norm
from torch import Tensor
from torch.nn.functional import one_hot

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from bcfl.client.client import LocalClient, draw_model, layout_of
from bcfl.client.score import log_likelihoods
from bcfl.client.trainer import Training
from bcfl.engines.flower.client import Respondent
from bcfl.engines.flower.privacy import LEAST_VARIANCE, Ledger, Privacy, Protection, privacy_from, spent
from bcfl.engines.flower.wire import to_array
from bcfl.likelihood.measures import FLOOR
from bcfl.model.flat import FlatModel, build

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
    monkeypatch.setattr(os, "urandom", lambda size: random.Random(0).randbytes(size))
    model = FlatModel(build(network, 0))
    layout, (x, y, *_) = layout_of(model, Training(momentum_state=state)), client_data(1)[0]
    examples, start = examples_of(x, y), torch.zeros(layout.length)
    start[: layout.num_evaluated] = model.vector
    plain, positive = (Privacy(noise=3.0).mean(start, start, parts) for parts in ((), layout.variances))
    variances = torch.cat([plain[part] for part in layout.variances])
    assert bool((variances < 0).any())
    assert all(bool((positive[part] > 0).all()) for part in layout.variances)
    assert int((plain != positive).sum()) == int((variances < LEAST_VARIANCE).sum())  # and nothing else is changed
    scores = log_likelihoods(model, [plain, positive], examples, torch.arange(len(examples)))
    assert bool((scores[0] == FLOOR).all())
    assert bool((scores[1] > FLOOR).all())
    assert len(scores[1].unique()) > 1


def test_a_training_that_diverged_tells_nothing() -> None:
    start = torch.zeros(3)
    assert torch.isfinite(Privacy(noise=1.0).mean(torch.tensor([math.nan, 1.0, math.inf]), start, ())).all()


def test_scores_are_clipped_per_example_and_never_above_zero() -> None:
    scores = Privacy(noise=ALMOST_NONE, score_clip=5.0).scores(torch.tensor([-30.0, -90.0], dtype=torch.float64), 10)
    assert torch.allclose(scores, torch.tensor([-30.0, -50.0], dtype=torch.float64), atol=1e-4)
    noisy = torch.stack([Privacy(noise=10.0).scores(torch.tensor([-0.1, -0.1]), 1) for _ in range(50)])
    assert float(noisy.max()) <= 0
    assert float(noisy.std()) > 1


def test_scores_of_densities_are_clipped_on_both_sides_with_noise_for_that() -> None:
    given = torch.tensor([-300.0, 30.0, 90.0], dtype=torch.float64)
    scores = Privacy(noise=ALMOST_NONE, score_clip=5.0).scores(given, 10, discrete=False)
    assert torch.allclose(scores, torch.tensor([-50.0, 30.0, 50.0], dtype=torch.float64), atol=1e-4)
    one = torch.zeros(1, dtype=torch.float64)
    drawn = {kind: torch.cat([Privacy(noise=1.0, score_clip=5.0).scores(one - 1e9, 1, kind) for _ in range(2000)])
             for kind in (True, False)}  # fmt: skip
    assert float(drawn[False].std()) == pytest.approx(5.0, rel=0.1)  # half of the interval's length
    assert float(drawn[True].std()) < 3


def test_a_score_that_is_no_number_counts_as_the_lowest() -> None:
    given = torch.tensor([math.nan, -math.inf, -10.0], dtype=torch.float64)
    scores = Privacy(noise=ALMOST_NONE, score_clip=5.0).scores(given, 10)
    assert torch.allclose(scores, torch.tensor([-50.0, -50.0, -10.0], dtype=torch.float64), atol=1e-4)


def test_shares_stay_shares() -> None:
    for _ in range(20):
        shares = Privacy(noise=2.0).shares(torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64))
        assert float(shares.min()) >= 0
        assert float(shares.sum()) == pytest.approx(1)


def test_precision_never_falls_below_the_prior() -> None:
    prior = torch.full((1000,), 3.0)
    blurred = Privacy(noise=5.0).precision(prior + 1, prior)
    assert float((blurred - prior).min()) >= 0


MANY = 20_000
BOUNDS = {"clip": 2.0, "precision_clip": 300.0, "score_clip": 5.0}
BOUND_OF = {"mean": 2.0, "precision": 300.0, "scores": 2.5 * math.sqrt(MANY), "shares": math.sqrt(2) / 2}  # as norms


def released(kind: str, noise: float, values: float | Tensor) -> Tensor:
    """What a client says whose many numbers have these values."""
    privacy, many = Privacy(noise=noise, **BOUNDS), torch.zeros(MANY) + values
    if kind == "mean":
        return privacy.mean(many, torch.zeros(MANY), ())
    if kind == "precision":
        return privacy.precision(many + 3, torch.full((MANY,), 3.0)) - 3
    if kind == "scores":
        return privacy.scores(many * 10, 10) / 10
    return privacy.shares(many.double())


@pytest.mark.parametrize(
    ("kind", "noise", "middle"),  # so little noise that nothing is made positive, or a share, afterwards
    [("mean", 3.0, 0.0), ("precision", 1e-3, 2.0), ("scores", 1e-3, -2.5), ("shares", 1e-5, 1 / MANY)],
)
def test_the_noise_is_as_strong_as_it_says_and_new_every_time(kind: str, noise: float, middle: float) -> None:
    first, second = released(kind, noise, middle), released(kind, noise, middle)
    assert float(first.std()) == pytest.approx(noise * BOUND_OF[kind], rel=0.05)
    assert not torch.equal(first, second)


def test_all_noise_is_fresh_from_the_systems_secure_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's generator keeps 32 bits of its seed: noise from it is found, and taken away, within minutes."""
    secure, num_bits = os.urandom, []
    monkeypatch.setattr(os, "urandom", lambda size: num_bits.append(8 * size) or secure(size))
    for name in ("Generator", "randn", "normal"):
        monkeypatch.setattr(torch, name, None)
    before = torch.random.get_rng_state()
    for kind in BOUND_OF:
        released(kind, 1.0, 0.0)
    assert sum(num_bits) >= 64 * MANY * len(BOUND_OF)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_noise_is_gaussian_and_no_two_releases_share_it() -> None:
    first, second = (Privacy(noise=3.0)._blur(torch.zeros(MANY), 2.0) / 6 for _ in range(2))
    both = torch.cat([first, second])
    assert kstest(both.numpy(), "norm").pvalue > 1e-6
    assert float(both.var()) == pytest.approx(1, abs=6 * math.sqrt(2 / len(both)))
    halves = torch.stack([first[: MANY // 2], first[MANY // 2 :], second[: MANY // 2], second[MANY // 2 :]])
    assert bool((torch.corrcoef(halves) - torch.eye(4)).abs().max() < 6 / math.sqrt(MANY / 2))


@pytest.mark.parametrize("value", [0.0, 1 / 3, -1e6, 1e-12])
def test_what_is_released_lies_on_a_grid_that_no_data_move(value: float) -> None:
    """The low bits of floating-point noise tell what it was added to; those of a whole number of steps do not."""
    released = Privacy(noise=3.0)._blur(torch.full((1001,), value), 2.0)
    steps = released / 2.0**-14  # the least power of two that is 6 / 2¹⁶ or less
    assert torch.equal(steps, steps.round())
    assert float((steps % 2).mean()) == pytest.approx(0.5, abs=0.1)  # and on no coarser one


@pytest.mark.parametrize(
    ("kind", "one", "other", "num_bounds"),
    [
        ("mean", 1e6, -1e6, 2),
        ("precision", 1e6, 0.0, 1),  # that it falls is never said
        ("scores", 0.0, -1e6, 2),
        ("shares", one_hot(torch.tensor(0), MANY), one_hot(torch.tensor(1), MANY), 2),
    ],
)
def test_answers_differ_by_their_bound_however_different_the_data(
    kind: str, one: float | Tensor, other: float | Tensor, num_bounds: int
) -> None:
    difference = released(kind, ALMOST_NONE, one) - released(kind, ALMOST_NONE, other)
    assert float(difference.double().norm()) == pytest.approx(num_bounds * BOUND_OF[kind], rel=1e-3)


# ---- a client's answers ---------------------------------------------------------------------------------------------

NUM_BELIEFS = 3
SCORES = ("score", "share")


def respondent(protection: Protection | None) -> Respondent:
    x, y, *_ = client_data(1)[0]
    examples, training = examples_of(x, y), Training(local_steps=1)
    client = LocalClient(0, examples, examples, training, 0, draws_globally=False)
    return Respondent(client, FlatModel(build(network, 0)), 3, protection=protection)


def protected(tmp_path: Path, noise: float = 20.0) -> Respondent:
    return respondent(Protection(Privacy(noise=noise), Ledger(tmp_path / "ledger.json")))


def numbers_sent() -> dict[str, Tensor]:
    """The beliefs' means, where training starts, and the precision of the second belief."""
    model = FlatModel(build(network, 0))
    layout = layout_of(model, Training())
    means = {f"mean.{i}": draw_model(network, layout, 1, i) for i in range(NUM_BELIEFS)}
    start = draw_model(network, layout, 1, NUM_BELIEFS)
    return {**means, "start": start, "precision.1": torch.arange(float(model.num_parameters))}


def ask(who: Respondent, kind: str, curvature: int = 1) -> RecordDict:
    """The answer to a question about all beliefs."""
    settings: dict[str, Any] = {"client": 0, "round": 1, "kind": kind, "max-examples": -1, "held-out": 0.0}
    settings |= {"num-models": NUM_BELIEFS, "first": 0, "total": NUM_BELIEFS}
    settings |= {"beliefs": [0, 1, 2], "parents": [0, 1, 2], "strengths": [0.5, 0.25, 1.0], "levels": [2.0, -1.0, 0.0]}
    settings |= {"curvature": curvature, "num-steps": -1, "racing": 0.0}
    size = len(who.model.vector) if kind in SCORES else None  # momentum, which follows, has no part in a score
    sent = {name: values for name, values in numbers_sent().items() if kind not in SCORES or name.startswith("mean")}
    models = ArrayRecord({name: to_array(values[:size]) for name, values in sent.items()})
    content = RecordDict({"ask": ConfigRecord(settings), "models": models})
    return (who.score if kind in SCORES else who.fit)(content, RecordDict())


def arrays_in(answer: RecordDict) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array.numpy()) for name, array in answer["answer"].items()}


def known_beforehand(kind: str) -> dict[str, Tensor]:
    """What a client says that has heard the question and seen no data."""
    if kind in SCORES:
        return {"scores": torch.full((NUM_BELIEFS,), 0.0 if kind == "score" else 1 / NUM_BELIEFS, dtype=torch.float64)}
    sent = numbers_sent()
    priors = [torch.full_like(sent["precision.1"], 2.0 * 0.5), sent["precision.1"] * 0.25, 0 * sent["precision.1"]]
    chosen = [0] if kind == "best" else range(NUM_BELIEFS)  # of equal scores the first is the best
    return {f"mean.{i}": sent["start"] for i in chosen} | {f"precision.{i}": priors[i] for i in chosen}


@pytest.mark.parametrize("kind", [*SCORES, "all", "best"])
def test_nothing_that_is_not_blurred_is_in_an_answer(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ask(respondent(None), kind)
    monkeypatch.setattr(Privacy, "_blur", lambda self, values, bound: torch.zeros_like(values))
    answer = ask(protected(tmp_path), kind)
    said, expected = arrays_in(answer), known_beforehand(kind)
    assert said.keys() == expected.keys()
    assert all(torch.equal(said[name], expected[name]) for name in expected)
    if kind == "best":
        assert answer["choice"]["choice"] == 0 != plain["choice"]["choice"]
    else:  # there would have been something to tell
        assert not any(torch.equal(values, expected[name]) for name, values in arrays_in(plain).items())


def test_a_client_answers_with_positive_running_variances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "urandom", lambda size: random.Random(0).randbytes(size))
    who = protected(tmp_path, noise=3.0)
    said = arrays_in(ask(who, "all"))["mean.0"]
    assert float(said.min()) < 0
    assert all(bool((said[part] > 0).all()) for part in who.model.variances)


@pytest.mark.parametrize(
    ("kind", "curvature", "num_releases"),
    [
        ("score", 0, 1),  # of all models together
        ("share", 0, 1),
        ("all", 0, 3),  # a mean for each belief
        ("all", 1, 6),  # and a precision
        ("best", 0, 2),  # the choice, and the mean of one belief
        ("best", 1, 3),
    ],
)
def test_every_release_is_written_down(kind: str, curvature: int, num_releases: int, tmp_path: Path) -> None:
    who = protected(tmp_path)
    for count in (num_releases, 2 * num_releases):
        answer = ask(who, kind, curvature)
        assert json.loads((tmp_path / "ledger.json").read_text()) == {"20.0": count}
        assert dict(answer["privacy"]) == {"noise": [20.0], "count": [count], "delta": 1e-5}


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


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_full_disk_does_not_make_the_ledger_forget(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    ledger = Ledger(tmp_path / "ledger.json")
    ledger.charge(Privacy(noise=20.0), 3)
    with monkeypatch.context() as patch:
        patch.setattr(os if broken == "fsync" else Path, broken, fail)
        with pytest.raises(OSError, match="No space"):
            ledger.charge(Privacy(noise=20.0), 2)
    assert ledger.charge(Privacy(noise=20.0), 1) == {20.0: 4}


@pytest.mark.parametrize("text", ["", '{"20.0": ', "[3]", '{"20.0": null}'])
def test_a_damaged_ledger_is_not_an_empty_one(text: str, tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"^the privacy ledger .*ledger\.json is damaged: "):
        Ledger(path).charge(Privacy(noise=20.0), 1)
    assert path.read_text() == text


def test_releases_at_the_same_time_are_all_counted(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: Ledger(tmp_path / "ledger.json").charge(Privacy(noise=20.0), 1), range(40)))
    assert json.loads((tmp_path / "ledger.json").read_text()) == {"20.0": 40}


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
    whole = privacy_from({"privacy-noise": 2, "privacy-max-epsilon": 10})
    assert whole is not None
    assert [type(value) for value in (whole.noise, whole.max_epsilon)] == [float, float]
