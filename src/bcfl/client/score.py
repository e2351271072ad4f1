"""How well models explain a client's examples, and how well they predict them: all in evaluation mode."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bcfl.belief.gaussian import Gaussian
from bcfl.client.examples import Examples
from bcfl.likelihood.measures import floored
from bcfl.model.flat import FlatModel

STATISTICS_CHUNK = 512  # examples per pass from which BatchNorm takes statistics: of few they would be noisy


@dataclass(frozen=True)
class Question:
    """What models say of some of a client's examples."""

    vectors: Tensor | Sequence[Tensor]  # (model, vector)
    examples: Examples
    rows: Tensor


def log_likelihoods(model: FlatModel, vectors: Tensor | Sequence[Tensor], examples: Examples, rows: Tensor) -> Tensor:
    """log p(y|x) of each chosen example under each model, in evaluation mode."""  # (model, example)
    return floored(_predicted(model, vectors, examples, rows, model.likelihood.of_models))


Summary = Callable[[Tensor, int], Tensor]  # (model, example) log-likelihoods, the client's examples -> (model,)


def total_log_likelihood(values: Tensor, num_examples: int) -> Tensor:
    """The log-likelihood of all of the client's examples, scaled up from those that were scored."""
    return values.double().mean(1) * num_examples


def share_explained(values: Tensor, num_examples: int) -> Tensor:
    """The share of the scored examples that each model explains best (the first, among equals)."""
    return torch.bincount(values.argmax(0), minlength=len(values)).double() / values.shape[1]


def scoring_rows(num_examples: int, max_examples: int | None, generator: torch.Generator) -> Tensor:
    """Which of a client's examples are used for scoring: all, or `max_examples` drawn without replacement."""
    if max_examples is None or max_examples >= num_examples:
        return torch.arange(num_examples)
    return torch.randperm(num_examples, generator=generator)[:max_examples]


def outputs(model: FlatModel, vectors: Tensor | Sequence[Tensor], examples: Examples, rows: Tensor) -> Tensor:
    """What each model says of the chosen examples, in evaluation mode."""  # (model, example, ...)
    return _predicted(model, vectors, examples, rows, lambda scores, _: scores)


def log_probabilities(model: FlatModel, vectors: Tensor | Sequence[Tensor], examples: Examples, rows: Tensor) -> Tensor:
    """log p(class|x) of the chosen examples under each model, in evaluation mode."""  # (model, example, class)

    def of_classes(scores: Tensor, _: Tensor) -> Tensor:
        return floored(model.likelihood.log_classes(scores))

    return _predicted(model, vectors, examples, rows, of_classes)


def _predicted(
    model: FlatModel,
    vectors: Tensor | Sequence[Tensor],
    examples: Examples,
    rows: Tensor,
    summary: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """What `summary` makes of class scores and labels: (model, example, class), (example,) -> (model, example, ...)."""
    with torch.no_grad():  # not inference_mode: what a model computes once and keeps could never be trained through
        values = [
            torch.cat([summary(scores(x), y) for x, y in examples.chunks(rows)], 1) for scores in model.scorers(vectors)
        ]
    return torch.cat(values)


def batch_norms(module: nn.Module) -> list[_BatchNorm]:
    """The BatchNorm layers that keep statistics."""
    return [layer for layer in module.modules() if isinstance(layer, _BatchNorm) and layer.track_running_stats]


def take_statistics(module: nn.Module, examples: Examples) -> None:
    """Let BatchNorm layers, if there are any, have the statistics of these examples.

    The module is in evaluation mode afterwards, and all of it but these layers meanwhile: dropout draws nothing.
    """
    norms = batch_norms(module.eval())
    momenta = [norm.momentum for norm in norms]
    if not norms:
        return
    if len(examples) < 2:
        raise ValueError("BatchNorm cannot take statistics from fewer than two examples")
    for norm in norms:
        norm.train()
        norm.reset_running_stats()
        norm.momentum = None  # the plain mean over batches
    with torch.no_grad():
        # In a random order: sorted by label, each pass would miss what lies between the labels.
        order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0))
        for rows in order.tensor_split(-(-len(examples) // STATISTICS_CHUNK)):  # of nearly one size, none with one row
            module(examples.batch(rows)[0])
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.eval()
        norm.momentum = momentum


def last_layer_scores(model: FlatModel, belief: Gaussian, examples: Examples, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of the class scores when the last layer's weights are those of the belief: one pass, exact.

    The scores are linear in the weights, z_c = Σ_d w_cd φ_d + b_c, so they are Gaussian and, as the belief is diagonal,
    independent: var z_c = Σ_d φ_d² var w_cd + var b_c.
    """  # (example, class) each
    layer, seen = model.last_layer, []
    if not isinstance(layer, nn.Linear):
        raise ValueError(
            f"beliefs = 'last_layer' needs a model that ends in a torch.nn.Linear, not {type(layer).__name__}"
        )
    end = model.num_parameters
    variance = torch.where(belief.precision > 0, belief.variance, 0.0)[end - model.num_last_layer : end]
    of_weight, of_bias = variance[: layer.weight.numel()].view_as(layer.weight), variance[layer.weight.numel() :]
    watch = layer.register_forward_hook(lambda _, given, scores: seen.append((given[0], scores)))
    model.module.eval()
    model.load(belief.mean)
    means, variances = [], []
    try:
        with torch.no_grad():
            for x, _ in examples.chunks(rows):
                output = model.module(x)
                features, scores = seen.pop()
                if not torch.equal(output.nan_to_num(), scores.nan_to_num()):  # NaN equals nothing
                    raise ValueError("beliefs = 'last_layer' needs a model whose last layer gives its class scores")
                means.append(output)
                variances.append(features.square() @ of_weight.T + (of_bias if len(of_bias) else 0.0))
    finally:
        watch.remove()
    return torch.cat(means), torch.cat(variances)
