"""Beliefs against closed forms, SciPy, torch.distributions and sampling; the laws of fusion as properties."""

import math
from collections.abc import Callable, Sequence
from typing import get_args

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bcfl.association.conceptual import ConjugateClient
from bcfl.belief import gaussian
from bcfl.belief.gaussian import (
    FUSION_RULES,
    Fusion,
    FusionRule,
    Gaussian,
    Merging,
    flat,
    fuse,
    log_density,
    merge,
    sample,
    sigma_points,
    stack,
    temper,
)
from bcfl.randomness import generator

nan, inf = math.nan, math.inf
RULES: tuple[FusionRule, ...] = get_args(FusionRule)


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def random_belief(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Gaussian:
    draws = generator(seed, "belief")
    mean = torch.randn(shape, generator=draws, dtype=torch.float64)
    precision = torch.randn(shape, generator=draws, dtype=torch.float64).exp()
    return Gaussian(mean.to(dtype), precision.to(dtype))


def assert_close(left: Gaussian, right: Gaussian, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(left.mean, right.mean, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(left.precision, right.precision, rtol=tolerance, atol=tolerance)


def assert_identical(left: Gaussian, right: Gaussian) -> None:
    assert torch.equal(left.mean, right.mean)
    assert torch.equal(left.precision, right.precision)


# --- the belief itself -----------------------------------------------------------------------------------------------


def test_a_stack_is_taken_apart_and_put_together() -> None:
    belief = random_belief(0, 3, 4)
    assert len(belief) == 3
    assert_identical(stack(list(belief)), belief)
    assert_identical(belief[1], Gaussian(belief.mean[1], belief.precision[1]))


def test_variance_at_both_limits() -> None:
    assert Gaussian(vector(0, 0, 0), vector(0, 4, inf)).variance.tolist() == [inf, 0.25, 0.0]
    assert flat(vector(1, 2)).precision.tolist() == [0.0, 0.0]


def test_a_belief_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        random_belief(0, 2).mean = vector(0, 0)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("mean", "precision", "finite"),
    [
        (vector(0), vector(1), True),
        (vector(), vector(), True),
        (vector(0, -inf, 0), vector(1, 1, 1), False),
        (vector(0), vector(inf), False),
        (vector(nan), vector(1), False),
        (vector(0), vector(nan), False),
    ],
)
def test_is_finite(mean: Tensor, precision: Tensor, finite: bool) -> None:
    assert Gaussian(mean, precision).is_finite() is finite


@pytest.mark.parametrize(
    ("mean", "precision", "message"),
    [
        (vector(0, 0), vector(1, -0.5), "precision must be ≥ 0 everywhere, got -0.5"),
        (vector(0, 0), vector(1), r"mean and precision must have one shape \(..., parameter\), got \(2,\) and \(1,\)"),
        (torch.tensor(0.0), torch.tensor(1.0), r"mean and precision must have one shape \(..., parameter\)"),
        (torch.zeros(2), vector(1, 1), "mean and precision must have one floating-point type, got torch.float32"),
        (torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64), "floating-point type, got torch.int64"),
    ],
)
def test_a_bad_belief_is_refused(mean: Tensor, precision: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Gaussian(mean, precision)


def test_temper_is_the_density_to_a_power() -> None:
    belief, x = random_belief(1, 3), random_belief(2, 50, 3).mean
    expected = 0.3 * log_density(belief, x)
    difference = log_density(temper(belief, 0.3), x) - expected
    torch.testing.assert_close(difference, difference[:1].expand(50))  # equal up to the normalising constant
    assert temper(belief, 0).precision.tolist() == [0, 0, 0]


@pytest.mark.parametrize("power", [-1.0, nan, inf])
def test_bad_power_is_refused(power: float) -> None:
    with pytest.raises(ValueError, match="power must be a finite number ≥ 0"):
        temper(random_belief(1, 3), power)


# --- fusion ----------------------------------------------------------------------------------------------------------


def split_data(num_clients: int, num_parameters: int = 4) -> tuple[Gaussian, ConjugateClient, list[ConjugateClient]]:
    """A prior, a linear-Gaussian data set with orthogonal columns, and the same data split over clients."""
    block = torch.linalg.qr(torch.randn(8, num_parameters, generator=generator(3), dtype=torch.float64)).Q
    scale = torch.rand(num_clients, num_parameters, generator=generator(4), dtype=torch.float64) + 0.1
    x = torch.cat([block * s for s in scale])  # (example, parameter)
    truth = torch.randn(num_parameters, generator=generator(5), dtype=torch.float64)
    y = x @ truth + 0.3 * torch.randn(len(x), generator=generator(6), dtype=torch.float64)
    clients = [ConjugateClient.from_data(a, b, 2.5) for a, b in zip(x.split(8), y.split(8), strict=True)]
    return random_belief(7, num_parameters), ConjugateClient.from_data(x, y, 2.5), clients


@pytest.mark.parametrize("num_clients", [1, 2, 3, 10, 50])
def test_exact_fusion_of_a_split_data_set_is_the_posterior_of_the_whole(num_clients: int) -> None:
    prior, whole, clients = split_data(num_clients)
    fused = fuse([client.posterior(prior) for client in clients], prior, "exact")
    assert_close(fused, whole.posterior(prior))


@pytest.mark.parametrize("num_clients", [1, 2, 10])
def test_product_counts_the_prior_once_per_client(num_clients: int) -> None:
    prior, whole, clients = split_data(num_clients)
    fused = fuse([client.posterior(prior) for client in clients], prior, "product")
    assert_close(fused, whole.posterior(temper(prior, num_clients)))  # prior^n · likelihood of everything
    once = whole.posterior(prior)
    torch.testing.assert_close(fused.precision - once.precision, (num_clients - 1) * prior.precision)
    assert bool((fused.precision > once.precision).all()) is (num_clients > 1)


@pytest.mark.parametrize("num_clients", [1, 2, 10])
def test_geometric_is_the_product_to_the_power_one_over_n(num_clients: int) -> None:
    prior, _, clients = split_data(num_clients)
    posteriors = [client.posterior(prior) for client in clients]
    assert_close(fuse(posteriors, prior, "geometric"), temper(fuse(posteriors, prior, "product"), 1 / num_clients))


def test_fusion_by_hand() -> None:
    prior = Gaussian(vector(1), vector(2))
    posteriors = [Gaussian(vector(3), vector(4)), Gaussian(vector(5), vector(6))]
    mean = (4 * 3 + 6 * 5) / 10
    assert_close(fuse(posteriors, prior, "product"), Gaussian(vector(mean), vector(10)))
    assert_close(fuse(posteriors, prior, "geometric"), Gaussian(vector(mean), vector(5)))
    assert_close(fuse(posteriors, prior, "exact"), Gaussian(vector((4 * 3 + 6 * 5 - 2 * 1) / 8), vector(8)))
    assert_close(fuse(posteriors, prior, "pooled"), Gaussian(vector(4), vector(5)))


def test_pooled_is_geometric_where_all_precisions_are_one() -> None:
    prior, means = random_belief(16, 3), random_belief(17, 5, 3).mean
    posteriors = Gaussian(means, random_belief(18, 3).precision.expand_as(means))
    assert_close(fuse(posteriors, prior, "pooled"), fuse(posteriors, prior, "geometric"), 1e-12)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "pooled"])
def test_fusion_with_a_flat_prior_weighs_by_precision(rule: FusionRule) -> None:
    posteriors = random_belief(8, 5, 3)
    fused = fuse(posteriors, flat(vector(7, 7, 7)), rule)
    expected = (posteriors.precision * posteriors.mean).sum(0) / posteriors.precision.sum(0)
    torch.testing.assert_close(fused.mean, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_an_empty_cluster_keeps_its_prior(rule: FusionRule) -> None:
    prior = random_belief(9, 3)
    assert_identical(fuse([], prior, rule), prior)
    unweighted = Fusion(prior, rule)
    unweighted.add(random_belief(10, 3), weight=0.0)
    assert_identical(unweighted.result(), prior)


@pytest.mark.parametrize("rule", RULES)
def test_what_nobody_knows_keeps_the_priors_mean(rule: FusionRule) -> None:
    prior = flat(vector(5, 5))
    fused = fuse([Gaussian(vector(1, 2), vector(0, 1)), Gaussian(vector(3, 4), vector(0, 1))], prior, rule)
    assert fused.mean.tolist() == [5.0, 3.0]
    assert fused.precision[0] == 0


def test_a_client_without_information_changes_nothing() -> None:
    prior, _, clients = split_data(3)
    posteriors = [client.posterior(prior) for client in clients]
    assert_close(fuse([*posteriors, prior, prior], prior, "exact"), fuse(posteriors, prior, "exact"), 1e-12)


def test_exact_fusion_never_leaves_a_negative_precision() -> None:
    # In float32, Σ Λⱼ − (n−1) Λ₀ of posteriors that learned nothing falls below zero by rounding.
    prior = Gaussian(torch.zeros(1000), torch.rand(1000, generator=generator(11)))
    slightly_less = Gaussian(prior.mean, prior.precision * (1 - 1e-7))
    fused = fuse([slightly_less] * 1000, prior, "exact")
    assert bool((fused.precision >= 0).all())
    assert fused.is_finite()


def test_a_large_common_offset_does_not_eat_the_digits() -> None:
    prior = Gaussian(torch.full((4,), 1e6), torch.ones(4))
    posteriors = [Gaussian(torch.full((4,), 1e6 + 0.25), torch.full((4,), 3.0))] * 10
    fused = fuse(posteriors, prior, "product")
    assert fused.mean.tolist() == [1e6 + 0.25] * 4  # Σ Λμ / Σ Λ from zero would be off by the rounding of 3·10⁷


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_fold_is_bit_identical_to_fuse(rule: FusionRule, dtype: torch.dtype) -> None:
    prior, posteriors = random_belief(12, 500, dtype=dtype), random_belief(13, 20, 500, dtype=dtype)
    fold = Fusion(prior, rule)
    for posterior in posteriors:
        fold.add(posterior)
    folded = fold.result()
    assert_identical(folded, fuse(posteriors, prior, rule))
    assert_identical(folded, fuse((posterior for posterior in posteriors), prior, rule))
    assert_identical(prior, random_belief(12, 500, dtype=dtype))  # the fold works on its own memory
    assert_identical(posteriors, random_belief(13, 20, 500, dtype=dtype))


@pytest.mark.parametrize("rule", RULES)
def test_long_vectors_are_taken_in_blocks_with_the_same_bits(rule: FusionRule, monkeypatch: pytest.MonkeyPatch) -> None:
    prior, posteriors = random_belief(19, 500, dtype=torch.float32), random_belief(20, 5, 500, dtype=torch.float32)
    weight = torch.randn(5, generator=generator(21))
    whole = fuse(posteriors, prior, rule), merge(posteriors, weight)
    monkeypatch.setattr(gaussian, "BLOCK", 64)
    for blocked, expected in zip((fuse(posteriors, prior, rule), merge(posteriors, weight)), whole, strict=True):
        assert_identical(blocked, expected)


@pytest.mark.parametrize("rule", RULES)
def test_one_precision_for_all_coordinates_is_added_as_one_number_with_the_same_bits(rule: FusionRule) -> None:
    prior, means = flat(random_belief(22, 500, dtype=torch.float32).mean), torch.randn(5, 500, generator=generator(23))
    short = [Gaussian(mean, torch.tensor(float(n)).expand(500)) for n, mean in enumerate(means, 100)]
    long = [Gaussian(posterior.mean, posterior.precision.clone()) for posterior in short]
    mixed = [*short[:2], *long[2:]]
    assert_identical(fuse(short, prior, rule), fuse(long, prior, rule))
    assert_identical(fuse(mixed, prior, rule), fuse(long, prior, rule))


@pytest.mark.parametrize("rule", RULES)
def test_weight_is_a_power_of_the_posterior(rule: FusionRule) -> None:
    prior, posteriors = random_belief(14, 3), random_belief(15, 2, 3)
    fold = Fusion(prior, rule)
    fold.add(posteriors[0], weight=3.0)
    fold.add(posteriors[1])
    assert_close(fold.result(), fuse([posteriors[0]] * 3 + [posteriors[1]], prior, rule), 1e-12)


beliefs = st.tuples(
    st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=2), st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=2)
).map(lambda pair: Gaussian(vector(*pair[0]), vector(*pair[1])))
# An exact fusion takes the prior away, so each posterior must know at least what the prior does.
gains = st.lists(beliefs, min_size=1, max_size=6)
laws = settings(deadline=None, derandomize=True, max_examples=60)


def learned(prior: Gaussian, gained: Sequence[Gaussian]) -> list[Gaussian]:
    """Posteriors of `prior` after each of the given likelihoods."""
    return [ConjugateClient(gain.mean, gain.precision, 0.0).posterior(prior) for gain in gained]


@pytest.mark.parametrize("rule", RULES)
@laws
@given(prior=beliefs, gained=gains, order=st.randoms(use_true_random=False))
def test_fusion_is_commutative(rule: FusionRule, prior: Gaussian, gained: list[Gaussian], order: object) -> None:
    posteriors = learned(prior, gained)
    shuffled = list(posteriors)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    assert_close(fuse(shuffled, prior, rule), fuse(posteriors, prior, rule))


@pytest.mark.parametrize("rule", ["product", "exact"])
@laws
@given(prior=beliefs, left=gains, right=gains)
def test_fusion_is_associative(rule: FusionRule, prior: Gaussian, left: list[Gaussian], right: list[Gaussian]) -> None:
    first, second = learned(prior, left), learned(prior, right)
    in_two_steps = fuse([fuse(first, prior, rule), fuse(second, prior, rule)], prior, rule)
    assert_close(in_two_steps, fuse([*first, *second], prior, rule))


@laws
@given(prior=beliefs, gained=gains)
def test_exact_fusion_is_learning_one_after_another(prior: Gaussian, gained: list[Gaussian]) -> None:
    belief = prior
    for gain in gained:
        belief = learned(belief, [gain])[0]
    assert_close(fuse(learned(prior, gained), prior, "exact"), belief, 1e-8)


def test_unknown_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown fusion rule 'mean', allowed: product, exact, geometric, pooled"):
        fuse([], random_belief(0, 2), "mean")  # type: ignore[arg-type]
    assert set(FUSION_RULES) == set(RULES)


@pytest.mark.parametrize(
    ("posterior", "message"),
    [
        (flat(vector(1, 2, 3)), r"posterior and prior must have one shape, got \(3,\) and \(2,\)"),
        (flat(torch.zeros(1, 2, dtype=torch.float64)), "posterior and prior must have one shape"),
        (Gaussian(vector(0, 0), vector(1, inf)), r"posteriors\[1\] must have finite means and precisions"),
        (Gaussian(vector(0, nan), vector(1, 1)), r"posteriors\[1\] must have finite means and precisions"),
        (Gaussian(vector(0, 0), vector(1, nan)), r"posteriors\[1\] must have finite means and precisions"),
    ],
)
def test_a_bad_posterior_is_refused(posterior: Gaussian, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fuse([random_belief(16, 2), posterior], random_belief(0, 2), "exact")


def test_a_prior_that_is_a_point_is_refused() -> None:
    with pytest.raises(ValueError, match="prior must have finite means and precisions"):
        fuse([random_belief(16, 2)], Gaussian(vector(0, 0), vector(1, inf)), "exact")


# --- merge -----------------------------------------------------------------------------------------------------------


def mixture_moments(components: Gaussian, log_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance by E[x²] − E[x]² in float64: fine for numbers near zero, which is all it is used for."""
    weight = log_weight.softmax(0).view(-1, *[1] * (components.mean.dim() - 1))
    mean = (weight * components.mean).sum(0)
    return mean, (weight * (components.variance + components.mean.square())).sum(0) - mean.square()


def test_merge_agrees_with_a_million_samples() -> None:
    components, log_weight = random_belief(17, 4, 3), vector(0.0, -1.0, -0.3, -2.0)
    draws, count = generator(18), 1_000_000
    which = torch.multinomial(log_weight.softmax(0), count, replacement=True, generator=draws)
    noise = torch.randn(count, 3, generator=draws, dtype=torch.float64)
    samples = components.mean[which] + noise * components.variance.sqrt()[which]
    merged = merge(components, log_weight)
    centred = (samples - merged.mean).square()
    # Both within 4 standard errors, which the samples tell themselves.
    assert bool(((samples.mean(0) - merged.mean).abs() < 4 * (centred.mean(0) / count).sqrt()).all())
    assert bool(((centred.mean(0) - merged.variance).abs() < 4 * centred.std(0) / math.sqrt(count)).all())


@laws
@given(parts=st.lists(st.tuples(beliefs, st.floats(-20, 20)), min_size=1, max_size=6))
def test_merge_keeps_the_moments(parts: list[tuple[Gaussian, float]]) -> None:
    components, log_weight = stack([belief for belief, _ in parts]), vector(*[weight for _, weight in parts])
    mean, variance = mixture_moments(components, log_weight)
    merged = merge(components, log_weight)
    torch.testing.assert_close(merged.mean, mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(merged.variance, variance, rtol=1e-6, atol=1e-6)


def test_merge_of_one_is_itself() -> None:
    belief = random_belief(19, 1, 3)
    assert_close(merge(belief, vector(-5.0)), belief[0], 1e-15)


def test_merge_of_stacked_beliefs_is_per_belief() -> None:
    components, log_weight = random_belief(20, 3, 2, 4), vector(0.0, -1.0, 1.0)  # (component, cluster, parameter)
    for cluster, merged in enumerate(merge(components, log_weight)):
        assert_identical(merged, merge(components[:, cluster], log_weight))


def test_merge_with_flat_and_point_components() -> None:
    components = Gaussian(
        torch.tensor([[0.0, 0.0, 0.0, 1.0], [2.0, 2.0, 2.0, 1.0]], dtype=torch.float64),
        torch.tensor([[0.0, inf, inf, inf], [1.0, 4.0, inf, inf]], dtype=torch.float64),
    )
    merged = merge(components, vector(0.0, 0.0))
    assert merged.mean.tolist() == [1.0, 1.0, 1.0, 1.0]
    # One flat: flat. Point and Gaussian: (0 + ¼)/2 + 1. Two points: their spread. Twice one point: that point.
    assert merged.variance.tolist() == [inf, 1.125, 1.0, 0.0]
    assert merged.precision[0] == 0


def test_a_component_that_float32_rounds_to_nothing_says_nothing() -> None:
    """Weights of the pure posterior are as small as e⁻¹⁰⁶: not 0 in float64, but 0 in the beliefs' own float32."""
    components = Gaussian(torch.tensor([[1.0, 2.0], [5.0, 2.0]]), torch.tensor([[4.0, 0.0], [1.0, 0.0]]))
    merged = merge(components, vector(0.0, -106.0))
    assert_identical(merged, components[0])


def test_a_component_without_weight_says_nothing() -> None:
    components = stack([random_belief(21, 2), flat(vector(9, 9))])
    assert_close(merge(components, vector(0.0, -inf)), components[0], 1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [0.0, 1.0, 1e4, 1e8, 1e18])
def test_merge_never_gives_a_negative_variance(dtype: torch.dtype, offset: float) -> None:
    draws, rounding = generator(22), torch.finfo(dtype).eps * max(offset, 1.0)
    nudges = torch.randn(30, 200, generator=draws, dtype=torch.float64) * 20 * rounding
    mean = (offset + nudges).to(dtype)
    log_weight = torch.randn(30, generator=draws)
    points = merge(Gaussian(mean, torch.full_like(mean, inf)), log_weight)
    assert bool((points.variance >= 0).all())
    assert not points.precision.isnan().any()
    # With no variance of its own, what is left is the spread of the means as they are stored.
    weight = log_weight.double().softmax(0)[:, None]
    centre = (weight * mean.double()).sum(0)
    spread = (weight * (mean.double() - centre).square()).sum(0)
    torch.testing.assert_close(points.variance.double(), spread, rtol=0.1, atol=5 * rounding**2)


@pytest.mark.parametrize("shift", [0.0, 1e6, -1e6, -1e9])
def test_merging_weighs_its_components_among_each_other(shift: float) -> None:
    components = random_belief(23, 3, 2)
    fold = Merging(components.mean[0])
    for component, log_weight in zip(components, vector(0.1, 0.3, 0.6).log() + shift, strict=True):
        fold.add(component, float(log_weight))
    assert_close(fold.result(), merge(components, vector(0.1, 0.3, 0.6).log()), 1e-6)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)])
def test_what_weighs_nothing_says_nothing_whenever_it_comes(order: tuple[int, ...]) -> None:
    components = stack([random_belief(24, 2), flat(vector(9, 9)), random_belief(25, 2)])
    fold = Merging(components.mean[0])
    for index in order:
        fold.add(components[index], [0.0, -1e4, -1.0][index])
    assert_close(fold.result(), merge(components[[0, 2]], vector(0.0, -1.0)), 1e-12)


@pytest.mark.parametrize(
    ("components", "log_weight", "message"),
    [
        (random_belief(0, 2, 3), torch.zeros(3), r"log_weight must be \(component,\) beside components .*\(3,\)"),
        (random_belief(0, 2, 3), torch.zeros(2, 1), r"log_weight must be \(component,\)"),
        (random_belief(0, 2), torch.zeros(2), r"components of one shape \(..., parameter\)"),
        (
            [random_belief(0, 3), random_belief(0, 1)],
            torch.zeros(2),
            r"components of one shape .* 2 of \[\(1,\), \(3,\)\]",
        ),
        (random_belief(0, 0, 3), torch.zeros(0), "at least one"),
        (random_belief(0, 2, 3), vector(0, nan), r"log_weight must not hold NaN or \+∞"),
        (random_belief(0, 2, 3), vector(0, inf), r"log_weight must not hold NaN or \+∞"),
        (random_belief(0, 2, 3), vector(-inf, -inf), "at least one entry must be finite"),
    ],
)
def test_a_bad_merge_is_refused(components: Gaussian | list[Gaussian], log_weight: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merge(components, log_weight)


def test_an_empty_merge_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one component with a positive weight"):
        Merging(vector(0)).result()


# --- drawing and density ---------------------------------------------------------------------------------------------


def test_samples_have_the_beliefs_distribution() -> None:
    belief = random_belief(24, 2, 2)
    draws = sample(belief, 20_000, generator(25))
    assert draws.shape == (20_000, 2, 2)
    for index in np.ndindex(2, 2):
        scale = float(belief.variance[index].sqrt())
        against = scipy.stats.norm(float(belief.mean[index]), scale)
        assert scipy.stats.kstest(draws[:, *index].numpy(), against.cdf).pvalue > 1e-3
    between = np.corrcoef(draws.flatten(1).T.numpy()) - np.eye(4)
    assert np.abs(between).max() < 4 / math.sqrt(20_000)


def test_a_sample_is_a_function_of_its_generator() -> None:
    belief = random_belief(24, 5)
    assert torch.equal(sample(belief, 3, generator(1)), sample(belief, 3, generator(1)))
    assert not torch.equal(sample(belief, 3, generator(1)), sample(belief, 3, generator(2)))


@pytest.mark.parametrize("draw", [lambda b: sample(b, 4, generator(26)), lambda b: sigma_points(b, 4)])
def test_flat_and_point_coordinates_stay_at_their_mean(draw: Callable[[Gaussian], Tensor]) -> None:
    drawn = draw(Gaussian(vector(3, 4, 5), vector(0, inf, 1)))
    assert drawn[:, 0].tolist() == [3.0] * 4
    assert drawn[:, 1].tolist() == [4.0] * 4
    assert bool((drawn[:, 2] != 5).all())


@pytest.mark.parametrize("num_points", [2, 4, 6, 10, 64])
@pytest.mark.parametrize("num_parameters", [1, 2, 5, 33])
def test_sigma_points_have_the_beliefs_mean_and_variance(num_points: int, num_parameters: int) -> None:
    belief = random_belief(27, 3, num_parameters)
    points = sigma_points(belief, num_points)
    assert points.shape == (num_points, 3, num_parameters)
    torch.testing.assert_close(points.mean(0), belief.mean, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(points.var(0, correction=0), belief.variance, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("num_parameters", "num_points"), [(1, 2), (2, 4), (3, 8), (4, 8), (5, 16), (5, 48), (32, 64)])
def test_enough_sigma_points_have_no_covariance(num_parameters: int, num_points: int) -> None:
    belief = random_belief(28, num_parameters)
    centred = sigma_points(belief, num_points) - belief.mean
    covariance = centred.T @ centred / num_points
    torch.testing.assert_close(covariance, torch.diag(belief.variance), rtol=1e-12, atol=1e-12)


def test_too_few_sigma_points_share_signs() -> None:
    # 4 points are 2 patterns: coordinates 0 and 2 lie 2 apart and move together or against each other, 0 and 1 do not.
    centred = sigma_points(Gaussian(vector(0, 0, 0), vector(1, 1, 1)), 4)
    covariance = centred.T @ centred / 4
    assert covariance.abs().tolist() == [[1, 0, 1], [0, 1, 0], [1, 0, 1]]


@pytest.mark.parametrize("num_points", [4, 16, 64])
def test_few_sigma_points_vary_the_scores_of_a_layer_as_they_should(num_points: int) -> None:
    """Rows of 1024 weights, a multiple of the number of patterns: were only these its signs, all classes' scores would
    swing together, and by far too much."""
    num_classes, width, precision = 10, 1024, 1000.0
    layer = Gaussian(torch.zeros(num_classes * width), torch.full((num_classes * width,), precision))
    inputs = torch.rand(40, width, generator=generator(30))  # not negative, as behind a ReLU
    scores = sigma_points(layer, num_points).view(num_points, num_classes, width) @ inputs.T  # (point, class, example)
    exact = inputs.square().sum(1) / precision
    assert float((scores.var(0, correction=0) / exact).mean()) == pytest.approx(1, abs=0.3)
    apart = scores - scores.mean(1, keepdim=True)  # what a softmax sees
    assert float((apart.var(0, correction=0) / exact).mean()) == pytest.approx(1 - 1 / num_classes, abs=0.3)


@pytest.mark.parametrize("num_points", [-2, 0, 1, 3])
def test_an_odd_number_of_sigma_points_is_refused(num_points: int) -> None:
    with pytest.raises(ValueError, match=f"num_points must be an even number ≥ 2, got {num_points}"):
        sigma_points(random_belief(0, 2), num_points)


def test_no_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="num_samples must be at least 1, got 0"):
        sample(random_belief(0, 2), 0, generator(0))


def test_log_density_is_scipys_and_torchs() -> None:
    belief, x = random_belief(29, 2, 3), random_belief(30, 7, 2, 3).mean
    found = log_density(belief, x)
    by_torch = torch.distributions.Normal(belief.mean, belief.variance.sqrt()).log_prob(x).sum(-1)
    torch.testing.assert_close(found, by_torch, rtol=1e-12, atol=1e-12)
    by_scipy = scipy.stats.multivariate_normal(belief.mean[1].numpy(), np.diag(belief.variance[1].numpy()))
    np.testing.assert_allclose(found[:, 1].numpy(), by_scipy.logpdf(x[:, 1].numpy()), rtol=1e-10)


def test_a_flat_coordinate_has_no_say_in_the_density() -> None:
    known = Gaussian(vector(1), vector(2))
    half_known = Gaussian(vector(1, 5), vector(2, 0))
    assert float(log_density(half_known, vector(0.3, 99))) == float(log_density(known, vector(0.3)))


@pytest.mark.parametrize("x", [torch.zeros(1), torch.zeros(5, 2), torch.tensor(0.0)])
def test_a_point_of_another_space_is_refused(x: Tensor) -> None:
    with pytest.raises(ValueError, match=r"x must be \(..., 3\) like the belief"):
        log_density(random_belief(0, 3), x)
