"""Each family against closed forms, torch.distributions, scipy, statsmodels or lifelines."""

import re
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from bcfl import likelihood
from bcfl.likelihood import Likelihood

N = 40


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def times(generator: torch.Generator) -> Tensor:
    time = 0.1 + 3 * torch.rand(N, generator=generator)
    return torch.stack([time, (torch.rand(N, generator=generator) < 0.7).float()], 1)


def targets(of: Likelihood) -> Tensor:
    g = draws(1)
    kind, width = of.family.kind, getattr(of.family, "values", 1)
    if kind == "times":
        return times(g)
    found = {
        "classes": torch.randint(3, (N,), generator=g),
        "labels": torch.randint(2, (N, 2), generator=g),
        "real": 3 + 2 * torch.randn((N, width) if width > 1 else (N,), generator=g),
        "counts": torch.randint(9, (N,), generator=g),
    }[kind]
    return of.check(found, "y")


EVERY = [
    likelihood.of(name, **options)
    for name, options in (
        ("categorical", {}),
        ("categorical", {"class_weight": (1.0, 2.0, 0.5)}),
        ("bernoulli", {"labels": 2}),
        ("ordinal", {"num_classes": 3}),
        ("normal", {}),
        ("normal", {"values": 2, "center": 3.0, "spread": 2.0}),
        ("normal", {"scale": "network"}),
        ("student_t", {"degrees": 3.0, "center": 3.0, "spread": 2.0}),
        ("quantile", {"levels": (0.1, 0.5, 0.9)}),
        ("poisson", {}),
        ("negative_binomial", {}),
        ("weibull", {"unit": 2.0}),
        ("lognormal", {"unit": 2.0}),
        ("hazard", {"edges": (0.5, 1.0, 2.0, 4.0)}),
    )
]


def outputs(of: Likelihood, *leading: int) -> Tensor:
    count = of.family.num_outputs or 3
    own = torch.randn(*leading, N, count, generator=draws(2)) * 0.7
    return torch.cat([own, (of.initial() + 0.1).expand(*leading, N, -1)], -1)


@pytest.mark.parametrize("of", EVERY, ids=lambda of: of.spec)
def test_a_likelihoods_text_means_it(of: Likelihood) -> None:
    assert likelihood.parse(of.spec) == of


@pytest.mark.parametrize("of", EVERY, ids=lambda of: of.spec)
def test_models_may_be_asked_together(of: Likelihood) -> None:
    output, y = outputs(of, 3), targets(of)
    together = of.log_prob(output, y)
    assert torch.allclose(together, torch.stack([of.log_prob(one, y) for one in output]), atol=1e-6)
    assert of.mean(output).shape[:2] == (3, N)


@pytest.mark.parametrize("of", [one for one in EVERY if one.name not in ("quantile", "hazard", "weibull", "lognormal")],
                         ids=lambda of: of.spec)  # fmt: skip
def test_log_probabilities_are_those_of_torchs_distribution(of: Likelihood) -> None:
    output, y = outputs(of), targets(of)
    found = of.distribution(output)
    assert found is not None
    expected = found.log_prob(y)
    expected = expected.sum(1) if expected.dim() == 2 else expected
    if of.name == "categorical" and getattr(of.family, "class_weight", None):
        expected = expected * torch.tensor(of.family.class_weight)[y]  # type: ignore[attr-defined]
    assert torch.allclose(of.log_prob(output, y), expected, atol=1e-4)


def test_censored_times_have_the_density_of_events_and_the_survival_of_others() -> None:
    for name in ("weibull", "lognormal"):
        of = likelihood.of(name, unit=2.0)
        output, y = outputs(of), targets(of)
        location, scale = output[:, 0].exp().numpy() * 2.0, (output[:, 1].exp() + 1e-3).numpy()
        theirs = scipy.stats.weibull_min(scale, scale=location) if name == "weibull" else None
        theirs = theirs or scipy.stats.lognorm(scale, scale=location)
        expected = np.where(y[:, 1] > 0, theirs.logpdf(y[:, 0]), theirs.logsf(y[:, 0]))
        assert np.allclose(of.log_prob(output, y).numpy(), expected, atol=1e-4)
        alive = of.family.survival(output, torch.tensor([0.5, 2.0]))  # type: ignore[attr-defined]
        assert np.allclose(alive[1].numpy(), theirs.sf(2.0), atol=1e-5)
        assert np.allclose(of.mean(output).numpy(), theirs.mean(), rtol=1e-3)


def test_a_hazard_in_intervals_is_a_row_of_yes_or_no() -> None:
    of = likelihood.of("hazard", edges=(1.0, 2.0, 3.0))
    output = torch.tensor([[0.2, -0.3, 0.5]]).expand(4, -1)
    h = output[0].sigmoid()
    y = torch.tensor([[0.5, 1.0], [1.5, 0.0], [2.5, 1.0], [9.0, 0.0]])  # event, censored, event, beyond
    expected = [h[0], 1 - h[0], (1 - h[0]) * (1 - h[1]) * h[2], (1 - h[0]) * (1 - h[1]) * (1 - h[2])]
    assert torch.allclose(of.log_prob(output, y).exp(), torch.stack(expected))
    alive = of.family.survival(output, torch.tensor([1.0, 2.0]))  # type: ignore[attr-defined]
    assert torch.allclose(alive[1], (1 - h[0]) * (1 - h[1]))


def test_quantiles_are_best_where_the_data_have_them() -> None:
    y = torch.randn(2001, generator=draws()).sort().values
    of = likelihood.of("quantile", levels=(0.25, 0.75))
    grid = torch.linspace(-1.5, 1.5, 301)
    output = torch.stack([grid, grid, torch.full_like(grid, -1.0)], 1)
    for place, level in enumerate((0.25, 0.75)):
        others = output.clone()
        others[:, 1 - place] = 0.0
        total = of.log_prob(others[:, None].expand(-1, len(y), -1), y).sum(1)
        assert float(grid[total.argmax()]) == pytest.approx(float(y.quantile(level)), abs=0.02)


EXPECTED = [one for one in EVERY if one.name not in ("quantile", "weibull", "lognormal", "hazard", "ordinal")]


@pytest.mark.parametrize("of", [one for one in EXPECTED if not getattr(one.family, "class_weight", None)],
                         ids=lambda of: of.spec)  # fmt: skip
def test_information_is_the_expected_square_of_the_gradient(of: Likelihood) -> None:
    """By sampling: E[g gᵀ] over y drawn from the distribution itself."""
    output = outputs(of)[:2].double()
    count = output.shape[1] - of.num_unknowns
    found = of.distribution(output)
    assert found is not None
    torch.manual_seed(0)
    y = found.sample((40_000,))  # (draw, example, ...)
    sampled = torch.zeros(2, count, count, dtype=torch.float64)
    for e in range(2):
        rows = output[e].expand(40_000, -1).clone().requires_grad_()
        (slope,) = torch.autograd.grad(of.log_prob(rows, y[:, e]).sum(), rows)
        slope = slope[:, :count]
        sampled[e] = slope.T @ slope / 40_000
    info = of.information(output, y[0])
    assert torch.allclose(info, sampled, atol=0.05 * float(info.abs().max()))


@pytest.mark.parametrize("name", ["weibull", "lognormal", "hazard"])
def test_the_information_of_times_is_how_the_log_likelihood_bends(name: str) -> None:
    of = next(one for one in EVERY if one.name == name)
    output, y = outputs(of).double(), targets(of).double()
    count = of.family.num_outputs or 1

    def one(own: Tensor, rest: Tensor, y: Tensor) -> Tensor:
        return -of.log_prob(torch.cat([own, rest])[None], y[None])[0]

    rows = zip(output[:, :count], output[:, count:], y, strict=True)
    bend = torch.stack([torch.autograd.functional.hessian(lambda own: one(own, rest, of_y), own)  # noqa: B023
                        for own, rest, of_y in rows])  # fmt: skip
    assert torch.allclose(of.information(output, y), bend, atol=1e-5)


def test_the_information_of_an_order_is_the_expected_bend() -> None:
    of = likelihood.of("ordinal", num_classes=4)
    output = torch.cat([torch.randn(5, 1, generator=draws()).double(), of.initial().double().expand(5, -1)], 1)
    p = of.mean(output)
    assert torch.allclose(p.sum(1), torch.ones(5).double())
    total = torch.zeros(5, dtype=torch.float64)
    for k in range(4):
        rows = output.clone().requires_grad_()
        (slope,) = torch.autograd.grad(of.log_prob(rows, torch.full((5,), k)).sum(), rows)
        total += p[:, k] * slope[:, 0].square()
    assert torch.allclose(of.information(output, torch.zeros(5))[:, 0, 0], total, atol=1e-8)


def test_cut_points_are_those_of_the_proportional_odds_model() -> None:
    of = likelihood.of("ordinal", num_classes=3)
    output = torch.tensor([[0.4, -1.0, 0.3]])
    cuts = np.array([-1.0, -1.0 + np.exp(0.3) + 1e-4])
    upto = scipy.stats.logistic.cdf(cuts - 0.4)
    assert np.allclose(of.mean(output)[0].numpy(), np.diff([0, *upto, 1]), atol=1e-6)


def fitted(of: Likelihood, x: Tensor, y: Tensor, steps: int = 60) -> tuple[Tensor, Tensor]:
    """The maximum likelihood of a linear model: its weights, and the unknowns."""
    width = of.family.num_outputs or 1
    weights = torch.zeros(x.shape[1], width, dtype=torch.float64, requires_grad=True)
    unknowns = of.initial().double().requires_grad_()
    best = torch.optim.LBFGS([weights, unknowns], max_iter=steps * 10, line_search_fn="strong_wolfe",
                             tolerance_grad=1e-9, tolerance_change=1e-12)  # fmt: skip

    def loss() -> Tensor:
        best.zero_grad()
        value = -of.log_prob(torch.cat([x @ weights, unknowns.expand(len(x), -1)], 1), y).sum()
        value.backward()
        return value

    best.step(loss)  # type: ignore[no-untyped-call]
    return weights.detach(), unknowns.detach()


def regression(seed: int = 0) -> tuple[Tensor, Tensor]:
    x = torch.cat([torch.ones(300, 1), torch.randn(300, 2, generator=draws(seed))], 1).double()
    return x, x @ torch.tensor([0.5, 0.8, -0.4], dtype=torch.float64)


def test_counts_with_exposure_are_fitted_as_statsmodels_does() -> None:
    sm = pytest.importorskip("statsmodels.api")
    x, eta = regression()
    exposure = 0.5 + 2 * torch.rand(300, generator=draws(3)).double()
    random = np.random.default_rng(0)
    y = torch.from_numpy(random.negative_binomial(2.0, 1 / (1 + (eta.exp() * exposure).numpy() / 2.0))).double()
    both = torch.stack([y, exposure], 1)
    poisson, _ = fitted(likelihood.of("poisson", extras="exposure"), x, both)
    theirs = sm.GLM(y.numpy(), x.numpy(), family=sm.families.Poisson(), exposure=exposure.numpy()).fit()
    assert np.allclose(poisson[:, 0].numpy(), theirs.params, atol=1e-4)
    found, unknowns = fitted(likelihood.of("negative_binomial", extras="exposure"), x, both)
    theirs = sm.NegativeBinomial(y.numpy(), x.numpy(), exposure=exposure.numpy()).fit(disp=0)
    assert np.allclose(found[:, 0].numpy(), theirs.params[:3], atol=1e-2)
    assert float(unknowns.exp()) == pytest.approx(theirs.params[3], rel=0.02)


def test_censored_times_are_fitted_as_lifelines_does() -> None:
    lifelines, pandas = pytest.importorskip("lifelines"), pytest.importorskip("pandas")
    x, eta = regression()
    random = np.random.default_rng(0)
    time = eta.exp().numpy() * random.weibull(1.5, 300)
    last = 2.5 * random.random(300) + 0.2
    event = (time <= last).astype(float)
    y = torch.from_numpy(np.stack([np.minimum(time, last), event], 1))
    frame = pandas.DataFrame(x[:, 1:].numpy(), columns=["a", "b"]).assign(time=y[:, 0].numpy(), event=event)
    for name, theirs in (("weibull", lifelines.WeibullAFTFitter()), ("lognormal", lifelines.LogNormalAFTFitter())):
        theirs.fit(frame, "time", "event")
        found, unknowns = fitted(likelihood.of(name, unit=1.0), x, y)
        params: Any = theirs.params_
        location = next(key for key in ("lambda_", "mu_") if key in params.index.get_level_values(0))
        expected = [params[location]["Intercept"], params[location]["a"], params[location]["b"]]
        assert np.allclose(found[:, 0].numpy(), expected, atol=2e-3)
        second = next(key for key in ("rho_", "sigma_") if key in params.index.get_level_values(0))
        assert float(unknowns) == pytest.approx(params[second]["Intercept"], abs=5e-3)


def test_weights_count_examples_so_often_and_offsets_add_to_the_output() -> None:
    weighted = likelihood.of("normal", extras=("weight", "offset"))
    y = torch.stack([torch.randn(N, generator=draws()), torch.full((N,), 3.0), torch.full((N,), 0.5)], 1)
    output = outputs(likelihood.of("normal"))
    shifted = output + torch.tensor([0.5, 0.0])
    plain = likelihood.of("normal")
    assert torch.allclose(weighted.log_prob(output, y), 3 * plain.log_prob(shifted, y[:, 0]))


@pytest.mark.parametrize(
    ("spec", "y", "message"),
    [
        ("poisson", [0.5], "whole numbers ≥ 0"),
        ("poisson", [-1.0], "whole numbers ≥ 0"),
        ("bernoulli", [0, 2], "0 and 1 only"),
        ("categorical", [0.5], "one row of integer labels"),
        ("weibull", [1.0, 2.0], "two columns, time and event"),
        ("weibull", [[1.0, 0.5]], "1 where the event came and 0"),
        ("weibull", [[0.0, 1.0]], "finite times > 0"),
        ("poisson(extras=exposure)", [[1.0, 0.0]], "exposure must be finite and > 0"),
        ("poisson(extras=exposure)", [1.0], "a column for the target and then for exposure"),
        ("tokens", [1, 2], r"shape \(example, position\)"),
        ("ordinal(num_classes=2)", [0, 2], "num_classes is 2"),
    ],
)
def test_targets_that_do_not_fit_are_named(spec: str, y: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        likelihood.parse(spec).check(torch.tensor(y), "site 'a'")
    assert str(caught.value).startswith("site 'a': ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("poison", "did you mean 'poisson'"),
        ("normal(scale=wide)", "scale must be learned or network"),
        ("normal(width=2)", "unknown option width; allowed: values, scale, center, spread, extras, per"),
        ("poisson(extras=width)", "extras must be of weight, offset, exposure"),
        ("categorical(extras=exposure)", "takes no exposure"),
        ("normal(per=site)", "per must be one of all, cluster"),
        ("normal(2)", "written name=value"),
        ("hazard(edges=2.0+1.0)", "edges must rise"),
    ],
)
def test_a_likelihood_that_there_is_not_is_named(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        likelihood.parse(spec)


def test_y_says_what_it_is_only_where_there_is_no_doubt() -> None:
    assert likelihood.choose(torch.tensor([0, 2])).name == "categorical"
    assert likelihood.choose(torch.tensor([0.0, 2.5])).name == "normal"
    for doubtful in (torch.tensor([0.0, 2.0]), torch.ones(3, 2), torch.zeros(3, 2, dtype=torch.int64)):
        with pytest.raises(ValueError, match="say which by likelihood="):
            likelihood.choose(doubtful)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("normal(values=a b)", "values must be of int"),
        ("normal(values=0)", "values must be from 1 to 1,000,000"),
        ("bernoulli(labels=-1)", "labels must be from 1"),
        ("ordinal(num_classes=nan)", "num_classes must be of int"),
        ("weibull(unit=-5)", "unit must be above 0"),
        ("normal(center=none)", "center must be of float | None"),
        ("hazard(edges=1+nan)", "edges must be of tuple"),
        ("categorical(class_weight=1+-1)", "class_weight must be above 0"),
        ("pixels(total=3)", "total must be of bool"),
        ("normal" * 200, "at most 500 characters"),
    ],
)
def test_options_of_the_wrong_kind_are_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)) as refused:
        likelihood.parse(text)
    assert str(refused.value).isprintable()
