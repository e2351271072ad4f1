"""What a few posteriors that lie can do to the others: nothing beyond the usual."""

import math

import pytest
import torch

from bcfl.belief import robust
from bcfl.belief.gaussian import FUSION_RULES, Gaussian, fuse
from bcfl.belief.robust import all_bounded, bounded_scores, middle, middle_of, weight_of
from bcfl.randomness import generator

START = torch.zeros(6)


def posteriors(count: int = 7) -> list[Gaussian]:
    draws = generator(0, "posteriors")
    return [Gaussian(torch.randn(6, generator=draws), 1 + torch.rand(6, generator=draws)) for _ in range(count)]


@pytest.mark.parametrize("kind", ["clip", "median", "trimmed"])
def test_usual_posteriors_are_left_as_they_are(kind: robust.Robust) -> None:
    honest = posteriors()
    assert all(a is b for a, b in zip(all_bounded(honest, [START] * 7, 4, kind), honest, strict=True))


@pytest.mark.parametrize("lie", ["parameters", "statistics", "precision", "everything"])
def test_a_change_or_a_precision_beyond_the_usual_becomes_the_median_one(lie: str) -> None:
    honest = posteriors()
    mean, precision = honest[0].mean.clone(), honest[0].precision.clone()
    if lie in ("parameters", "everything"):
        mean[:4] *= 1e6
    if lie in ("statistics", "everything"):
        mean[4:] *= 1e6
    if lie in ("precision", "everything"):
        precision[:4] = 1e17
    bounded, *others = all_bounded([Gaussian(mean, precision), *honest[1:]], [START] * 7, 4, "clip")
    assert others == honest[1:]
    norms = sorted(float(one.mean[:4].norm()) for one in [Gaussian(mean, precision), *honest[1:]])
    if lie in ("parameters", "everything"):
        assert float(bounded.mean[:4].norm()) == pytest.approx(norms[3], rel=1e-5)
        assert torch.nn.functional.cosine_similarity(bounded.mean[:4], mean[:4], 0) > 0.9999
    else:
        assert torch.equal(bounded.mean[:4], mean[:4])
    assert float(bounded.precision[:4].sum()) < 8
    assert float(bounded.mean[4:].norm()) < 10


def test_the_middle_is_that_of_each_coordinate_whatever_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(robust, "BLOCK", 4)
    for count in range(1, 8):
        rows = [one.mean for one in posteriors(count)]
        table = torch.stack(rows).double()
        assert middle(rows, "median").double() == pytest.approx(table.quantile(0.5, 0), abs=1e-6)
        kept = table.sort(0).values[count // 3 : count - count // 3]
        assert middle(rows, "trimmed").double() == pytest.approx(kept.mean(0), abs=1e-6)


@pytest.mark.parametrize("rule", FUSION_RULES)
@pytest.mark.parametrize("kind", ["median", "trimmed"])
def test_the_middle_of_posteriors_that_agree_is_their_fusion(rule: str, kind: robust.Robust) -> None:
    prior, alike = Gaussian(START, torch.full((6,), 0.5)), posteriors(1) * 4
    expected, result = fuse(alike, prior, rule), fuse([middle_of(alike, kind)] * 4, prior, rule)
    assert torch.allclose(result.mean, expected.mean, atol=1e-6)
    assert torch.allclose(result.precision, expected.precision, rtol=1e-5)


def test_less_than_a_third_of_liars_cannot_move_the_middle_beyond_the_others() -> None:
    honest = [one.mean for one in posteriors(5)]
    least, most = torch.stack(honest).aminmax(dim=0)
    for kind in ("median", "trimmed"):
        result = middle([*honest, torch.full((6,), 1e9), torch.full((6,), -1e9)], kind)
        assert bool(((least <= result) & (result <= most)).all())


def test_scores_beyond_the_usual_count_as_the_usual_and_keep_their_order() -> None:
    scores = torch.tensor([[-1.0, -2.0], [-2.0, -1.0], [-3.0, -1.5], [0.0, -1e6]], dtype=torch.float64)
    assert torch.equal(bounded_scores(scores, "none"), scores)
    assert bounded_scores(scores, "median")[3].tolist() == [0, -1]
    assert bounded_scores(scores, "clip")[3].tolist() == [0, -10]
    assert torch.equal(bounded_scores(scores, "clip")[:3], scores[:3])
    impossible = torch.tensor([[-1.0, -math.inf], [-2.0, -1.0]], dtype=torch.float64)
    assert bounded_scores(impossible, "median")[0, 1] == -math.inf


def test_a_claim_of_a_million_times_the_examples_counts_as_the_usual_number() -> None:
    claimed = torch.tensor([50.0, 60.0, 4e7, 0.0], dtype=torch.float64)
    assert torch.equal(weight_of(claimed, "none"), claimed)
    assert weight_of(claimed, "clip").tolist() == [50, 60, 60, 0]
    assert weight_of(claimed, "median").tolist() == [1, 1, 1, 1]
