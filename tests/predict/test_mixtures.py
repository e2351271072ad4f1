"""Association of newcomers and predictive mixtures against brute force, sampling and sums by hand."""

import itertools
import math

import pytest
import torch
from federation_fixtures import NUM_CLASSES, NUM_FEATURES, examples_of, network
from torch import Tensor, nn

from bcfl.belief.gaussian import Gaussian, sample
from bcfl.client.score import last_layer_scores, log_probabilities
from bcfl.likelihood.measures import evaluate, log_mixture
from bcfl.model.flat import FlatModel, build
from bcfl.predict.mixtures import (
    accuracy_at_coverage,
    belief_shares,
    client_joint,
    cluster_log_prior,
    expected_softmax,
    newcomer_posterior,
    points_of,
    varied,
)
from bcfl.randomness import generator

MODEL_OF = torch.tensor([[0, 1, 2], [2, 3, 1]])  # (hypothesis, cluster): two beliefs are shared
LOG_WEIGHT = torch.tensor([0.7, 0.3], dtype=torch.float64).log()
ASSIGNMENT = torch.tensor([[0, 0, 1, -1], [2, 1, 1, -1]])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed, "predictive"), dtype=torch.float64)


@pytest.mark.parametrize("kind", ["uniform", "size"])
def test_a_newcomers_posterior_is_bayes_rule_written_out(kind: str) -> None:
    log_p = 5 * normal(8, 4) - 700  # (example, belief); e^-700 is all but lost in plain arithmetic
    log_prior = cluster_log_prior(ASSIGNMENT, MODEL_OF, kind)  # type: ignore[arg-type]
    joint = newcomer_posterior(log_p.sum(0), MODEL_OF, LOG_WEIGHT, log_prior)
    members = [[2, 1, 0], [0, 2, 1]]
    weight = {}
    for h, k in itertools.product(range(2), range(3)):
        prior = 1 / 3 if kind == "uniform" else (members[h][k] + 1) / 6
        relative = math.prod(math.exp(float(row[MODEL_OF[h, k]] - row.max())) for row in log_p)
        weight[h, k] = float(LOG_WEIGHT[h].exp()) * prior * relative
    for (h, k), value in weight.items():
        assert float(joint[h, k]) == pytest.approx(value / sum(weight.values()), rel=1e-9)
    batch = newcomer_posterior(torch.stack([log_p.sum(0)] * 2), MODEL_OF, LOG_WEIGHT, log_prior)
    assert torch.allclose(batch, joint.expand(2, 2, 3))


def test_an_unknown_prior_is_refused() -> None:
    with pytest.raises(ValueError, match="prior must be one of uniform, size, got 'sizes'"):
        cluster_log_prior(ASSIGNMENT, MODEL_OF, "sizes")  # type: ignore[arg-type]


def test_beliefs_that_hypotheses_share_add_up() -> None:
    joint = torch.tensor([[0.1, 0.2, 0.3], [0.15, 0.05, 0.2]], dtype=torch.float64)
    assert belief_shares(joint, MODEL_OF, 5).tolist() == pytest.approx([0.1, 0.4, 0.45, 0.05, 0.0])


def test_a_known_client_is_where_its_hypotheses_say_and_an_unplaced_one_anywhere() -> None:
    placed = client_joint(ASSIGNMENT, MODEL_OF, LOG_WEIGHT, 1)
    assert torch.allclose(placed, torch.tensor([[0.7, 0, 0], [0, 0.3, 0]]).double())
    anywhere = client_joint(ASSIGNMENT, MODEL_OF, LOG_WEIGHT, 3)
    assert torch.allclose(anywhere, torch.tensor([[0.7 / 3] * 3, [0.1] * 3]).double())


@pytest.mark.parametrize("kind", ["uniform", "size"])
def test_a_hypothesis_with_fewer_clusters_is_no_less_likely_for_that(kind: str) -> None:
    model_of = torch.tensor([[0, 1, 2], [3, -1, -1]])
    assignment = torch.tensor([[0, 0, 1, -1], [0, 0, 0, -1]])
    log_prior = cluster_log_prior(assignment, model_of, kind)  # type: ignore[arg-type]
    joint = newcomer_posterior(torch.full((4,), -700.0), model_of, LOG_WEIGHT, log_prior)  # all explain it alike
    assert joint.sum(1).tolist() == pytest.approx([0.7, 0.3])
    assert joint[1].tolist() == pytest.approx([0.3, 0, 0])
    assert client_joint(assignment, model_of, LOG_WEIGHT, 3).sum(1).tolist() == pytest.approx([0.7, 0.3])


def test_only_the_chosen_parameters_vary() -> None:
    belief = Gaussian(torch.arange(6.0), torch.tensor([4.0, 0.0, 1.0, 0.0, 9.0, 9.0]))
    uncertain = varied(belief, num_parameters=4, num_varied=3, prior_precision=2.0)
    assert uncertain.precision.tolist() == [math.inf, 2.0, 3.0, 2.0, math.inf, math.inf]
    draws = points_of(uncertain, "samples", 4000, generator(0))
    assert draws[:, [0, 4, 5]].eq(belief.mean[[0, 4, 5]]).all()
    assert torch.allclose(draws[:, 1:4].var(0), 1 / torch.tensor([2.0, 3.0, 2.0]), rtol=0.1)
    sigma = points_of(uncertain, "sigma", 8, generator(0))
    assert torch.allclose(sigma.mean(0), belief.mean)
    frozen = torch.tensor([True, False, True, False])
    assert varied(belief, 4, 3, 2.0, frozen).precision.tolist() == [math.inf, 2.0, math.inf, 2.0, math.inf, math.inf]
    point = points_of(varied(belief, 4, 4, math.inf), "samples", 3, generator(0))
    assert point.eq(belief.mean).all()
    with pytest.raises(ValueError, match="prior_precision must be a number ≥ 0"):
        varied(belief, 4, 4, -1.0)


def test_the_last_layers_scores_have_the_moments_of_sampled_networks() -> None:
    model, x = FlatModel(build(network, 0)), normal(5, NUM_FEATURES).float()
    examples, rows = examples_of(x, torch.zeros(5, dtype=torch.int64)), torch.arange(5)
    precision = torch.full_like(model.vector, 10.0)
    belief = varied(Gaussian(model.vector.clone(), precision), model.num_parameters, model.num_last_layer, 10.0)
    mean, variance = last_layer_scores(model, belief, examples, rows)
    outputs = []
    model.module.eval()
    with torch.no_grad():
        for vector in sample(belief, 4000, generator(1)):
            model.load(vector)
            outputs.append(model.module(x))
    drawn = torch.stack(outputs)  # (draw, example, class)
    assert torch.allclose(drawn.mean(0), mean, atol=0.03)
    assert torch.allclose(drawn.var(0), variance, rtol=0.15)
    expected = expected_softmax(mean, variance, 20000, generator(2)).exp()
    assert torch.allclose(drawn.softmax(2).mean(0), expected, atol=0.01)
    assert torch.allclose(expected.sum(1), torch.ones(5), atol=1e-5)


def test_a_last_layer_that_gives_no_scores_is_named() -> None:
    x = torch.randn(3, NUM_FEATURES, generator=generator(0))
    examples = examples_of(x, torch.zeros(3, dtype=torch.int64))
    for module, message in (
        (nn.Sequential(nn.Linear(NUM_FEATURES, 3), nn.BatchNorm1d(3)), "ends in a torch.nn.Linear, not BatchNorm1d"),
        (nn.Sequential(nn.Linear(NUM_FEATURES, 3), nn.Tanh()), "whose last layer gives its class scores"),
    ):
        model = FlatModel(module)
        belief = Gaussian(model.vector.clone(), torch.ones_like(model.vector))
        with pytest.raises(ValueError, match=message):
            last_layer_scores(model, belief, examples, torch.arange(3))


def test_a_mixture_is_the_mean_of_probabilities_and_of_one_model_its_own() -> None:
    log_p = normal(3, 6, NUM_CLASSES).log_softmax(2).float()
    weight = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    by_hand = sum(w * p.double().exp() for w, p in zip(weight.tolist(), log_p, strict=True))
    assert torch.allclose(log_mixture(log_p, weight.log()).double().exp(), by_hand, atol=1e-6)
    assert torch.equal(log_mixture(log_p[:1], torch.zeros(1)), log_p[0])


def test_an_evaluated_mixture_is_that_of_its_probabilities() -> None:
    x, y = normal(70, NUM_FEATURES).float(), torch.arange(70) % NUM_CLASSES
    examples, model = examples_of(x, y), FlatModel(build(network, 0))
    vectors = torch.stack([FlatModel(build(network, seed)).vector for seed in (0, 1)])
    share = torch.tensor([0.25, 0.75], dtype=torch.float64)
    log_p = log_mixture(log_probabilities(model, vectors, examples, torch.arange(70)), share.log())
    found = evaluate(log_p, y, NUM_CLASSES)
    p = torch.zeros(70, NUM_CLASSES)
    with torch.no_grad():
        for w, vector in zip(share.tolist(), vectors, strict=True):
            model.load(vector)
            p += w * model.module.eval()(x).softmax(1)
    assert found.log_likelihood == pytest.approx(float(p.gather(1, y[:, None]).log().sum()), abs=1e-3)
    squares = (p - nn.functional.one_hot(y, NUM_CLASSES)).square().sum()
    assert found.brier == pytest.approx(float(squares), abs=1e-3)
    assert int(found.confusion.diagonal().sum()) == int((p.argmax(1) == y).sum())


def test_brier_by_hand() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    found = evaluate(p.log(), torch.tensor([0, 1, 1]), 3)
    assert found.brier == pytest.approx((0.25 + 0.09 + 0.04) + 0.0 + 2.0)


def test_accuracy_at_coverage_by_brute_force() -> None:
    confidence, correct = normal(40).sigmoid(), normal(40, seed=1) > 0
    found = accuracy_at_coverage(confidence, correct, (0.01, 0.25, 0.5, 1.0))
    ranked = sorted(range(40), key=lambda i: -float(confidence[i]))
    assert found == pytest.approx([sum(bool(correct[i]) for i in ranked[:n]) / n for n in (1, 10, 20, 40)])
