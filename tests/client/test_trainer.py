"""What a client does, against closed forms, independent optimisers, torch's own SGD and plain loops."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
import torch.nn.functional as F
from federation_fixtures import NUM_CLASSES, NUM_FEATURES, client_data, examples_of, linear, network
from torch import Tensor, nn

from bcfl.belief.gaussian import Fusion, Gaussian, flat
from bcfl.client.check import check_model
from bcfl.client.examples import Examples, batches
from bcfl.client.fisher import exact_fisher
from bcfl.client.score import (
    log_likelihoods,
    log_probabilities,
    scoring_rows,
    share_explained,
    total_log_likelihood,
)
from bcfl.client.trainer import Alone, Job, Training, _descend, fit, proximal_pull
from bcfl.likelihood.measures import FLOOR, NUM_BINS, evaluate
from bcfl.model.flat import LARGE, FlatModel, build
from bcfl.randomness import generator

FULL = Training(learning_rate=0.5, momentum=0.9, batch_size=10_000, local_steps=2000, momentum_state="fresh")


def tiny_examples(num_examples: int = 30) -> Examples:
    x, y, *_ = client_data(1, 1, num_examples)[0]
    return examples_of(x, y)


def fitted(
    model: FlatModel, prior: Gaussian, examples: Examples, training: Training, *, curvature: bool = False
) -> Gaussian:
    return fit(Alone(model), [Job(prior.mean, prior, examples, generator(0), training, curvature)])[0][0]


def objective_minimum(prior: Gaussian, examples: Examples) -> Tensor:
    """argmin of NLL + ½ Σ precision (θ − mean)² of the linear model, by SciPy in double precision."""
    x, y = examples.batch(torch.arange(len(examples)))
    mean, precision = prior.mean.double(), prior.precision.double()

    def objective(theta: np.ndarray) -> tuple[float, np.ndarray]:
        own = torch.tensor(theta, requires_grad=True)
        split = NUM_CLASSES * NUM_FEATURES
        scores = x.double() @ own[:split].view(NUM_CLASSES, NUM_FEATURES).T + own[split:]
        total = F.cross_entropy(scores, y, reduction="sum") + 0.5 * (precision * (own - mean).square()).sum()
        total.backward()
        return total.item(), own.grad.numpy()

    found = scipy.optimize.minimize(
        objective, mean.numpy(), jac=True, method="L-BFGS-B", options={"gtol": 1e-10, "ftol": 1e-15}
    )
    return torch.from_numpy(found.x)


# --- the posterior's mean ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fit_finds_the_map_of_logistic_regression(momentum: float) -> None:
    model, examples = FlatModel(build(linear, 0)), tiny_examples()
    draws = generator(1)
    prior = Gaussian(
        torch.randn(len(model.vector), generator=draws), torch.rand(len(model.vector), generator=draws) * 3 + 1
    )
    training = replace(FULL, momentum=momentum)
    assert torch.allclose(
        fitted(model, prior, examples, training).mean.double(), objective_minimum(prior, examples), atol=2e-4
    )


@pytest.mark.parametrize("momentum_state", ["fresh", "client"])
def test_many_short_trainings_come_to_the_same_map(momentum_state: str) -> None:
    """A proximal term counts the same whether momentum goes on or begins anew every ten steps."""
    model, examples = FlatModel(build(linear, 0)), tiny_examples()
    prior = Gaussian(torch.zeros(len(model.vector)), torch.full((len(model.vector),), 3.0))
    training = replace(FULL, local_steps=10, learning_rate=0.2, momentum_state=momentum_state)
    theta, momentum = prior.mean, None
    for _ in range(300):
        job = Job(theta, prior, examples, generator(0), training, momentum=momentum)
        ((posterior, after),) = fit(Alone(model), [job])
        theta, momentum = posterior.mean, after if momentum_state == "client" else None
    assert torch.allclose(theta.double(), objective_minimum(prior, examples), atol=2e-4)


def gaussian_columns(information: Tensor, estimate: Tensor) -> nn.Module:
    """A module whose mean cross-entropy is, to second order at the estimate, a diagonal quadratic in its parameters."""

    class Quadratic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.theta = nn.Parameter(torch.zeros(len(estimate)))

        def forward(self, x: Tensor) -> Tensor:
            # log-odds s with log(1 + eˢ) = q + log 2: the loss of label 0 is exactly q + log 2.
            q = 0.5 * (information * (self.theta - estimate).square()).sum()
            odds = torch.log(torch.expm1(q + np.log(2)))
            return torch.stack([torch.zeros(len(x)), odds.expand(len(x))], 1)

    return Quadratic()


def test_fit_finds_the_closed_form_of_a_linear_gaussian_model() -> None:
    """Loss ½ λ (θ − ω̂)² per example: the posterior mean is (N λ ω̂ + Λ μ) / (N λ + Λ) in every coordinate."""
    information, estimate = torch.tensor([1.0, 0.5, 2.0]), torch.tensor([1.0, -1.0, 0.3])
    examples = examples_of(torch.zeros(5, 1), torch.zeros(5, dtype=torch.int64))
    prior = Gaussian(torch.tensor([-1.0, 0.5, 2.0]), torch.tensor([5.0, 1.0, 0.0]))
    model = FlatModel(gaussian_columns(information, estimate))
    posterior = fitted(model, prior, examples, replace(FULL, learning_rate=0.1, local_steps=400))
    expected = (5 * information * estimate + prior.precision * prior.mean) / (5 * information + prior.precision)
    assert torch.allclose(posterior.mean, expected, atol=1e-5)


def test_a_stronger_prior_holds_the_solution_closer_and_never_blows_up() -> None:
    model, examples = FlatModel(build(linear, 0)), tiny_examples()
    mean = torch.randn(len(model.vector), generator=generator(2))
    strengths = [0.0, *(10.0**e for e in range(-3, 13)), torch.inf]
    for steps in (10, 300):
        training = Training(learning_rate=0.5, local_steps=steps, momentum_state="fresh")
        distances = []
        for strength in strengths:
            posterior = fitted(model, Gaussian(mean, torch.full_like(mean, strength)), examples, training)
            assert posterior.is_finite()
            distances.append(float((posterior.mean - mean).norm()))
        # Up to the noise of the batches, which hardly feel a prior of less than one example's weight.
        assert all(stronger <= weaker * (1 + 1e-3) for weaker, stronger in pairwise(distances)), distances
        assert distances[0] > 10 * distances[strengths.index(1e4)]
        assert distances[-2] < 1e-6
        assert distances[-1] == 0


def test_a_weak_prior_keeps_its_digits() -> None:
    pull = proximal_pull(torch.tensor([[1e-6, 0.0, torch.inf]]), [1], Training(learning_rate=0.01, momentum=0.9))
    assert pull is not None
    assert pull[0].tolist() == pytest.approx([1e-7, 0, 1], rel=1e-5)


def test_the_result_is_a_function_of_the_arguments() -> None:
    model, examples = FlatModel(build(network, 0)), tiny_examples()
    start = model.vector.clone()
    first, second = (fitted(model, flat(start), examples, Training(), curvature=True) for _ in range(2))
    assert torch.equal(first.mean, second.mean)
    assert torch.equal(first.precision, second.precision)
    assert not torch.equal(first.mean, start)


# --- momentum ---------------------------------------------------------------------------------------------------------


def reference_sgd(vector: Tensor, examples: Examples, training: Training, num_rounds: int, fresh: bool) -> Tensor:
    """The same batches through torch.optim.SGD; round r takes the stream that the test gives to `fit`."""
    model = FlatModel(build(linear, 0))
    model.load(vector)
    parameters = list(model.module.parameters())
    optimiser = torch.optim.SGD(parameters, training.learning_rate, training.momentum)
    for index in range(num_rounds):
        if fresh:
            optimiser = torch.optim.SGD(parameters, training.learning_rate, training.momentum)
        for rows in batches(len(examples), training.batch_size, training.local_steps, generator(index)):
            x, y = examples.batch(rows)
            model.gradient.zero_()
            F.cross_entropy(model.module(x), y).backward()
            optimiser.step()
    return model.vector.clone()


@pytest.mark.parametrize("state", ["fresh", "client", "belief"])
def test_momentum_is_that_of_torch(state: str) -> None:
    model, examples, training = FlatModel(build(linear, 0)), tiny_examples(), Training(batch_size=8, local_steps=7)
    start, num = model.vector.clone(), model.num_parameters
    vector = torch.cat([start, torch.zeros(num)]) if state == "belief" else start
    momentum = None
    for index in range(3):
        job = Job(vector, flat(vector), examples, generator(index), training, momentum=momentum)
        ((posterior, velocity),) = fit(Alone(model), [job])
        vector = posterior.mean
        if state == "client":
            momentum = velocity
        if state == "belief":  # it travels in the vector's tail, and weighs as many examples as the client has
            assert torch.equal(vector[num:], velocity)
            assert float(posterior.precision[-1]) == len(examples)
    expected = reference_sgd(start, examples, training, 3, fresh=state == "fresh")
    assert torch.allclose(vector[:num], expected, atol=1e-6)


# --- the posterior's precision ----------------------------------------------------------------------------------------


def per_example_loop(model: FlatModel, vector: Tensor, examples: Examples) -> Tensor:
    """The mean of squared gradients, one example at a time."""
    model.module.eval()
    model.load(vector)
    total = torch.zeros(model.num_parameters)
    for row in range(len(examples)):
        x, y = examples.batch(torch.tensor([row]))
        model.gradient.zero_()
        F.cross_entropy(model.module(x), y).backward()
        total += model.gradient.square()
    return total / len(examples)


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(), nn.Linear(12, 3)
    )


def repeating() -> nn.Module:
    """Calls one layer in two places."""
    layer = nn.Linear(NUM_FEATURES, NUM_FEATURES)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.ReLU(), nn.Linear(NUM_FEATURES, NUM_CLASSES))


class Remembering(nn.Module):
    """A GRU, which vmap cannot do."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.last = nn.GRU(1, 3, batch_first=True), nn.Linear(3, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cells(x[..., None])[0][:, -1])  # type: ignore[no-any-return]


def frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(NUM_FEATURES, 5), nn.ReLU(), nn.Linear(5, NUM_CLASSES))
    module[0].requires_grad_(False)
    return module


def image_examples(num_examples: int = 40) -> Examples:
    draws = generator(3)
    x = torch.randn(num_examples, 2, 6, 6, generator=draws)
    return examples_of(x, torch.randint(3, (num_examples,), generator=draws))


def trained_vector(model: FlatModel, examples: Examples) -> Tensor:
    """A vector whose BatchNorm statistics are not the initial ones."""
    return fitted(model, flat(model.vector.clone()), examples, Training(local_steps=5)).mean


@pytest.mark.parametrize(
    ("factory", "examples"),
    [
        *[(factory, tiny_examples()) for factory in (network, repeating, frozen, Remembering)],
        (convolutional, image_examples()),
    ],
)
@pytest.mark.parametrize("closed", [True, False])
def test_exact_fisher_is_the_mean_of_squared_gradients(
    factory: type[nn.Module], examples: Examples, closed: bool
) -> None:
    model = FlatModel(build(factory, 0))
    vector = trained_vector(model, examples)
    expected = per_example_loop(model, vector, examples)
    model.load(vector)
    found = exact_fisher(model, examples, torch.arange(len(examples)), closed=closed)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-8)
    assert torch.equal(model.vector, vector)  # the running statistics too
    assert torch.equal(per_example_loop(model, vector, examples), expected)  # and the module is as it was


@pytest.mark.parametrize(("factory", "examples"), [(network, tiny_examples()), (convolutional, image_examples())])
def test_exact_fisher_agrees_with_backpack(factory: type[nn.Module], examples: Examples) -> None:
    backpack = pytest.importorskip("backpack", reason="pip install --no-deps backpack-for-pytorch einops unfoldNd")
    from backpack.extensions import SumGradSquared

    model = FlatModel(build(factory, 0))
    vector = trained_vector(model, examples)
    plain = build(factory, 0)
    model.load(vector)
    plain.load_state_dict(
        {k: v.clone(memory_format=torch.contiguous_format) for k, v in model.module.state_dict().items()}
    )
    plain = backpack.extend(plain.eval())
    x, y = examples.batch(torch.arange(len(examples)))
    loss = backpack.extend(nn.CrossEntropyLoss())(plain(x.contiguous().requires_grad_()), y)
    with backpack.backpack(SumGradSquared()):
        loss.backward()
    found = model.parameter_views(exact_fisher(model, examples, torch.arange(len(examples)), closed=True))
    for name, parameter in plain.named_parameters():
        expected = len(examples) * parameter.sum_grad_squared  # of gradients of the mean loss: each is 1/N of its own
        assert torch.allclose(found[name], expected, rtol=1e-4, atol=1e-8), name


def test_exact_fisher_of_some_examples_is_over_those() -> None:
    model, examples = FlatModel(build(linear, 0)), tiny_examples()
    rows = torch.randperm(len(examples), generator=generator(5))[:7]
    drawn = replace(examples, index=examples.index[rows])
    expected = per_example_loop(model, model.vector.clone(), drawn)
    assert torch.allclose(exact_fisher(model, examples, rows, closed=True), expected, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("kind", ["exact", "examples"])
def test_posterior_precision_is_the_priors_plus_n_times_exact_fisher(kind: Any) -> None:
    model, examples = FlatModel(build(network, 0)), tiny_examples()
    start = model.vector.clone()
    prior = Gaussian(start, torch.where(torch.arange(len(start)) < model.num_parameters, 2.0, 0.0))
    posterior = fitted(model, prior, examples, Training(fisher=kind), curvature=True)
    fisher = per_example_loop(model, posterior.mean, examples)
    split = model.num_parameters
    assert torch.allclose(posterior.precision[:split], 2 + 30 * fisher, rtol=1e-4)
    assert posterior.precision[split:].eq(30).all()  # the statistics' precision counts examples, whatever the prior's


def test_batch_fisher_is_batch_size_times_the_squared_batch_gradient() -> None:
    """With a learning rate of nearly zero all gradients are taken at the start, and can be taken again by hand."""
    model, examples = FlatModel(build(linear, 0)), tiny_examples()
    start = model.vector.clone()
    training = Training(learning_rate=1e-12, batch_size=8, local_steps=4)
    posterior = fitted(model, flat(start), examples, training, curvature=True)
    expected = torch.zeros(model.num_parameters)
    for rows in batches(len(examples), 8, 4, generator(0)):
        x, y = examples.batch(rows)
        model.gradient.zero_()
        F.cross_entropy(model.module(x), y).backward()
        expected += 8 * model.gradient.square() / 4
    assert torch.allclose(posterior.precision, len(examples) * expected, rtol=1e-4)


def test_batch_fisher_with_one_example_per_batch_is_the_exact_one() -> None:
    model, examples = FlatModel(build(linear, 0)), tiny_examples()
    start = model.vector.clone()
    one_pass = Training(learning_rate=1e-12, batch_size=1, local_steps=len(examples))
    batch, exact = (
        fitted(model, flat(start), examples, replace(one_pass, fisher=kind), curvature=True)
        for kind in ("batch", "exact")
    )
    assert torch.allclose(batch.precision, exact.precision, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("num_examples", [20, 32])
def test_a_client_that_fits_into_a_batch_has_the_exact_fisher(num_examples: int) -> None:
    """Its only batch is all of its data, whose mean gradient vanishes at the optimum."""
    model, examples = FlatModel(build(linear, 0)), tiny_examples(num_examples)
    trained = fitted(model, flat(model.vector.clone()), examples, replace(FULL, local_steps=500)).mean
    training = Training(learning_rate=0.01, momentum_state="fresh")
    by_batch, exact = (
        fitted(model, flat(trained), examples, replace(training, fisher=kind), curvature=True)
        for kind in ("auto", "examples")
    )
    assert torch.equal(by_batch.mean, exact.mean)
    assert torch.equal(by_batch.precision, exact.precision)
    expected = num_examples * per_example_loop(model, by_batch.mean, examples)
    assert torch.allclose(by_batch.precision, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("batch_size", [5, 10, 15])  # of 30 examples, so that no batch lies across two passes
def test_batch_fisher_is_too_small_by_the_share_of_a_batch(batch_size: int) -> None:
    """Without replacement a batch of B has B·ḡ² + (N−B)/(N−1)·(F − ḡ²) on average, as docs/maths.md says."""
    model, examples = FlatModel(build(linear, 0)), tiny_examples()
    start = model.vector.clone()
    training = Training(learning_rate=1e-12, batch_size=batch_size, local_steps=6000, momentum_state="fresh")
    found = fitted(model, flat(start), examples, training, curvature=True).precision / len(examples)
    fisher = per_example_loop(model, start, examples)
    model.load(start)
    x, y = examples.batch(torch.arange(len(examples)))
    mean = torch.cat([own.clone() for _, own in model.gradients(F.cross_entropy(model.module(x), y))])
    share = (len(examples) - batch_size) / (len(examples) - 1)
    expected = batch_size * mean**2 + share * (fisher - mean**2)
    assert torch.allclose(found, expected, rtol=0.1)


def test_without_curvature_the_precision_counts_examples() -> None:
    model, examples = FlatModel(build(network, 0)), tiny_examples()
    posterior = fitted(model, flat(model.vector.clone()), examples, Training())
    assert posterior.precision.eq(30).all()


def test_statistics_are_averaged_by_examples_when_posteriors_are_fused() -> None:
    model = FlatModel(build(network, 0))
    start, split = model.vector.clone(), model.num_parameters
    prior = Gaussian(start, torch.where(torch.arange(len(start)) < split, 1.0, 0.0))
    for curvature in (False, True):
        posteriors = [fitted(model, prior, tiny_examples(n), Training(), curvature=curvature) for n in (10, 30)]
        for rule in ("product", "exact", "geometric"):
            fold = Fusion(prior, rule)
            for posterior in posteriors:
                fold.add(posterior)
            expected = (10 * posteriors[0].mean + 30 * posteriors[1].mean)[split:] / 40
            assert torch.allclose(fold.result().mean[split:], expected, atol=1e-6)


# --- batches ----------------------------------------------------------------------------------------------------------


def test_batches_pass_over_all_examples_before_any_comes_again() -> None:
    taken = list(batches(10, 4, 5, generator(0)))
    assert [len(rows) for rows in taken] == [4] * 5
    order = torch.cat(taken)
    assert sorted(order[:10].tolist()) == sorted(order[10:].tolist()) == list(range(10))


def test_a_client_smaller_than_a_batch_gives_all_it_has() -> None:
    taken = list(batches(3, 32, 4, generator(0)))
    assert len(taken) == 4
    assert all(sorted(rows.tolist()) == [0, 1, 2] for rows in taken)


# --- scores and evaluation --------------------------------------------------------------------------------------------


def test_scores_are_log_likelihoods_in_evaluation_mode() -> None:
    examples = tiny_examples(150)  # more than one chunk
    model, plain = FlatModel(build(network, 0)), FlatModel(build(network, 0))
    vectors = torch.stack([trained_vector(model, examples), trained_vector(FlatModel(build(network, 1)), examples)])
    found = log_likelihoods(model, vectors, examples, torch.arange(150))
    for i, vector in enumerate(vectors):
        plain.load(vector)
        x, y = examples.batch(torch.arange(150))
        with torch.no_grad():
            expected = plain.module.eval()(x).log_softmax(1).gather(1, y[:, None])[:, 0]
        assert torch.allclose(found[i], expected, atol=1e-5)


def test_scores_do_not_depend_on_what_else_is_in_the_batch() -> None:
    examples = tiny_examples(100)
    model = FlatModel(build(network, 0))
    vectors = trained_vector(model, examples)[None]
    together = log_likelihoods(model, vectors, examples, torch.arange(100))
    alone = torch.cat([log_likelihoods(model, vectors, examples, torch.tensor([row])) for row in range(100)], 1)
    assert torch.allclose(together, alone, atol=1e-5)
    assert torch.equal(model.vector, vectors[0])  # scoring left the running statistics as they were


def test_total_log_likelihood_is_scaled_up_to_all_examples() -> None:
    values = torch.tensor([[-1.0, -3.0], [-2.0, -2.5]])
    assert total_log_likelihood(values, 10).tolist() == [-20, -22.5]
    assert total_log_likelihood(values, 10).dtype == torch.float64


def test_share_explained_counts_the_best_model_of_each_example() -> None:
    values = torch.tensor([[-1.0, -3.0, -1.0, -9.0], [-2.0, -2.0, -1.0, -8.0], [-5.0, -5.0, -5.0, -7.0]])
    assert share_explained(values, 100).tolist() == [0.5, 0.25, 0.25]


def test_scoring_rows_are_all_or_a_draw_without_repetition() -> None:
    assert scoring_rows(5, None, generator(0)).tolist() == [0, 1, 2, 3, 4]
    assert scoring_rows(5, 9, generator(0)).tolist() == [0, 1, 2, 3, 4]
    some = scoring_rows(50, 20, generator(0))
    assert len(set(some.tolist())) == 20
    assert torch.equal(some, scoring_rows(50, 20, generator(0)))


def test_an_overflow_is_the_worst_score_and_not_a_nan() -> None:
    examples = replace(tiny_examples(), x=torch.full((30, NUM_FEATURES), 3e38))
    model = FlatModel(build(linear, 0))
    vectors = torch.stack([model.vector * 100, torch.zeros_like(model.vector)])
    values = log_likelihoods(model, vectors, examples, torch.arange(30))
    assert values[0].eq(FLOOR).any()
    assert values.isfinite().all()
    assert torch.allclose(values[1], -torch.log(torch.tensor(3.0)))
    log_p = log_probabilities(model, vectors[:1], examples, torch.arange(30))[0]
    evaluation = evaluate(log_p, examples.y, NUM_CLASSES)
    assert int(evaluation.confusion.sum()) == 30
    assert np.isfinite(evaluation.log_likelihood)
    assert evaluation.calibration.isfinite().all()


def test_evaluation_by_hand() -> None:
    examples = tiny_examples(100)
    model = FlatModel(build(network, 0))
    vector = trained_vector(model, examples)
    model.module.train()  # whatever was done before
    predictions = log_probabilities(model, vector[None], examples, torch.arange(100))[0]
    found = evaluate(predictions, examples.y, NUM_CLASSES)
    assert torch.equal(model.vector, vector)
    log_p = torch.empty(100, NUM_CLASSES, dtype=torch.float64)
    with torch.no_grad():
        for row in range(100):
            log_p[row] = model.module.eval()(examples.batch(torch.tensor([row]))[0]).double().log_softmax(1)[0]
    predicted, confidence = log_p.argmax(1), log_p.exp().amax(1)
    confusion = torch.zeros(NUM_CLASSES, NUM_CLASSES, dtype=torch.int64)
    table = torch.zeros(NUM_BINS, 3, dtype=torch.float64)
    for own, guess, sure in zip(examples.y.tolist(), predicted.tolist(), confidence.tolist(), strict=True):
        confusion[own, guess] += 1
        table[min(int(sure * NUM_BINS), NUM_BINS - 1)] += torch.tensor([1.0, sure, float(own == guess)])
    assert torch.equal(found.confusion, confusion)
    assert found.log_likelihood == pytest.approx(float(log_p.gather(1, examples.y[:, None]).sum()), abs=1e-4)
    assert torch.allclose(found.calibration, table, atol=1e-4)


# --- whether a model fits the data ------------------------------------------------------------------------------------


def test_check_model_tells_classes_and_global_draws() -> None:
    assert check_model(FlatModel(build(network, 0)), tiny_examples(), 2) == (NUM_CLASSES, False)

    class Drawing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), training=self.training)

    state = torch.get_rng_state()
    model = FlatModel(build(lambda: Drawing(NUM_FEATURES, NUM_CLASSES), 0))
    assert check_model(model, tiny_examples(), NUM_CLASSES) == (NUM_CLASSES, True)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("module", "num_classes", "message"),
    [
        (nn.Linear(5, 3), 3, r"does not accept inputs of shape \(4,\)"),
        (nn.Linear(4, 2), 3, "at least 3 classes"),
        (nn.Sequential(nn.Linear(4, 3), nn.Flatten(0)), 3, "example, class"),
    ],
)
def test_check_model_refuses_what_does_not_fit(module: nn.Module, num_classes: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_model(FlatModel(module), tiny_examples(), num_classes)


class Indexing(nn.Module):
    """A model that takes its inputs for indices of something."""

    def __init__(self, look_up: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.table, self.look_up = nn.Parameter(torch.randn(9, NUM_CLASSES)), look_up

    def forward(self, x: Tensor) -> Tensor:
        return self.look_up(x, self.table)


@pytest.mark.parametrize(
    "look_up",
    [
        F.embedding_bag,
        lambda x, table: F.embedding(x, table).mean(1),
        lambda x, table: table[x].mean(1),
        lambda x, table: table.index_select(0, x[:, 0]),
        lambda x, table: F.one_hot(x, 9).float().mean(1) @ table,
    ],
)
def test_check_model_tells_whoever_takes_inputs_for_indices(look_up: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, y = torch.arange(16.0).view(4, 4) % 9, torch.arange(4) % NUM_CLASSES
    with pytest.raises(ValueError, match=r"; inputs arrive as float32: use x\.long\(\)$"):
        check_model(FlatModel(Indexing(look_up)), examples_of(x, y), NUM_CLASSES)
    with pytest.raises(ValueError, match="does not accept inputs") as refused:  # for what they are, not for their type
        check_model(FlatModel(Indexing(lambda x, t: look_up(x.long() + 9, t))), examples_of(x, y), NUM_CLASSES)
    assert "float32" not in str(refused.value)
    whole = FlatModel(Indexing(lambda x, table: look_up(x.long(), table)))
    assert check_model(whole, examples_of(x, y), NUM_CLASSES) == (NUM_CLASSES, False)


def test_check_model_tries_a_batch_of_training_or_a_prediction() -> None:
    model, one = FlatModel(build(network, 0)), tiny_examples(1)
    with pytest.raises(ValueError, match=r"trained on one example at a time \(.*\): a client has one training example"):
        check_model(model, one, NUM_CLASSES, batch_size=32)
    with pytest.raises(ValueError, match=r"at a time .*: training\.batch_size is 1, at least 2 are needed"):
        check_model(model, tiny_examples(), NUM_CLASSES, batch_size=1)
    assert check_model(model, one, NUM_CLASSES, predicts_only=True) == (NUM_CLASSES, False)
    assert check_model(FlatModel(build(linear, 0)), one, NUM_CLASSES, batch_size=1) == (NUM_CLASSES, False)
    with pytest.raises(ValueError, match=r"does not accept inputs of shape \(4,\)"):  # not for want of examples
        check_model(FlatModel(nn.Linear(5, 3)), one, NUM_CLASSES, batch_size=1)


class Replacing(nn.Linear):
    """Puts new tensors where it could write into the old ones."""

    def __init__(self, what: str):
        super().__init__(NUM_FEATURES, NUM_CLASSES)
        self.register_buffer("mean", torch.zeros(NUM_FEATURES))
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "weight":
            self.weight.data = torch.renorm(self.weight.data, 2, 0, 1.0)
        elif self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(x - self.mean)


@pytest.mark.parametrize("what", ["weight", "mean"])
def test_check_model_refuses_a_model_that_replaces_its_tensors(what: str) -> None:
    with pytest.raises(ValueError, match=f"puts another tensor in the place of {what} when it is called"):
        check_model(FlatModel(Replacing(what)), tiny_examples(), NUM_CLASSES)


def test_check_model_tells_how_to_flatten_images() -> None:
    class Viewing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.view(len(x), -1))

    with pytest.raises(ValueError, match=r"use x.flatten\(1\), not x.view"):
        check_model(FlatModel(Viewing(72, 3)), image_examples(), 3)


def test_what_a_model_keeps_from_scoring_can_be_trained_through() -> None:
    class Caching(nn.Linear):
        scale: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.scale is None:
                self.scale = torch.linspace(1, 2, NUM_CLASSES)
            return super().forward(x) * self.scale

    model, examples = FlatModel(Caching(NUM_FEATURES, NUM_CLASSES)), tiny_examples()
    start = model.vector.clone()
    log_likelihoods(model, [start], examples, torch.arange(4))
    assert not torch.equal(fitted(model, flat(start), examples, Training()).mean, start)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("length", [LARGE, LARGE + 64, LARGE + 5, 1000])
def test_a_step_has_the_bits_of_its_plain_operations(length: int, momentum: float) -> None:
    draws = generator(0, "step", length)
    theta, velocity, gradient = (torch.randn(length, generator=draws) ** 5 for _ in range(3))
    expected_velocity = velocity * momentum + gradient
    expected = theta.sub(expected_velocity, alpha=0.03)
    _descend(theta, velocity, gradient, Training(learning_rate=0.03, momentum=momentum))
    assert torch.equal(velocity, expected_velocity)
    assert torch.equal(theta, expected)
