"""What a client does with its own data: train from a prior, score models, evaluate a model.

All of it runs in one thread on one FlatModel and is a function of its arguments: the same call gives the same bits
in any worker. Only `take_statistics` changes a module, which is its caller's.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from bcfl.belief.gaussian import Gaussian, blocks, distinct
from bcfl.model.flat import LARGE, FlatModel
from bcfl.model.functional import call

CHUNK = 64  # examples per forward pass where no gradient is needed: more would fall out of the cache
STATISTICS_CHUNK = 512  # examples per pass from which BatchNorm takes statistics: of few they would be noisy
FISHER_CHUNK = 32  # per-example gradients that are held at a time
FISHER_LARGE = 1 << 20  # parameters: of larger models, gradients one by one are faster, and need not be held
NUM_BINS = 15  # of the calibration table
WANTS_INDICES = re.compile(r"(?=.*\bind(ex|ices)\b).*\b(long(tensor)?|int64)\b", re.IGNORECASE)  # as torch says it
FLOOR = -1e6  # the least log-likelihood of an example: an overflow in the network must not become a score of NaN


@dataclass(frozen=True)
class Training:
    """How clients train: the same for every method."""

    learning_rate: float = 0.05  # the paper's experiments set 0.005
    momentum: float = 0.9
    batch_size: int = 32
    local_steps: int = 10
    momentum_state: Literal["fresh", "client", "belief"] = "belief"
    fisher: Literal["batch", "exact"] = "batch"
    fisher_examples: int = 256  # at most so many per-example gradients for fisher = "exact"


@dataclass(frozen=True)
class Examples:
    """A client's examples: its rows of a pool that all clients of this machine share."""

    x: Tensor  # (example, ...) pool; images lie as (example, height, width, channel), see `pool`
    y: Tensor  # (example,) int64 pool
    index: Tensor  # (own example,) -> row of the pool
    images: bool

    def __len__(self) -> int:
        return len(self.index)

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and labels of some of the client's examples."""
        own = self.index[rows]
        x = self.x.index_select(0, own)
        return (x.permute(0, 3, 1, 2) if self.images else x), self.y.index_select(0, own)

    def chunks(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.batch(part) for part in rows.split(CHUNK))


def pool(x: Tensor) -> tuple[Tensor, bool]:
    """The inputs laid out so that a gathered batch of images is in channels-last format; whether they are images."""
    images = x.dim() == 4
    return (x.permute(0, 2, 3, 1).contiguous() if images else x.contiguous()), images


def batches(num_examples: int, batch_size: int, num_steps: int, generator: torch.Generator) -> Iterator[Tensor]:
    """`num_steps` batches of row indices: pass after pass over all examples, each in a new random order."""
    size = min(batch_size, num_examples)
    passes = -(-num_steps * size // num_examples)
    order = torch.cat([torch.randperm(num_examples, generator=generator) for _ in range(passes)])
    return iter(order[: num_steps * size].split(size))


def fit(
    model: FlatModel,
    start: Tensor,
    prior: Gaussian,
    examples: Examples,
    training: Training,
    generator: torch.Generator,
    *,
    curvature: bool,
    num_steps: int | None = None,
    momentum: Tensor | None = None,
) -> tuple[Gaussian, Tensor]:
    """The local posterior p(ω|D) ∝ p(D|ω) prior(ω) in Laplace's approximation, and the momentum at its end.

    SGD from `start` minimises mean NLL + (1/N)·½ Σ precision·(θ − mean)²; the posterior precision is the prior's plus
    N · diagonal Fisher (eq. fed_posterior). Without `curvature` the precision is N everywhere: fusing such posteriors
    is averaging by examples. The statistics' precision is N too, whatever the prior's.

    The quadratic term is applied as a proximal (implicit) step, θ ← θ + w(mean − θ) with w = a/(1+a) and
    a = lr/(1−momentum) · precision/N, where momentum is fresh lr·(1−momentumᵗ)/(1−momentum) · precision/N in step t.
    It has the same fixed point as the gradient step, and stays stable however strong the prior is: an explicit step
    would blow up once lr · precision/N exceeds a few units.
    """
    num_parameters, num_examples = model.num_parameters, len(examples)
    num_steps = num_steps or training.local_steps
    mean = start.clone()  # where the model lives from here on, and in the end the posterior's
    carried = mean[len(model.vector) :]  # empty unless momentum travels along
    velocity = carried if len(carried) else torch.zeros(num_parameters)
    if momentum is not None:
        velocity.copy_(momentum)
    prior_mean = prior.mean[:num_parameters]
    full_pull = proximal_pull(prior.precision[:num_parameters], num_examples, training)
    by_batches = curvature and not needs_exact_fisher(training, num_examples)
    fisher = torch.zeros(num_parameters) if by_batches else None

    with model.living_in(mean):
        model.seed(generator)
        model.module.train()
        for step, rows in enumerate(batches(num_examples, training.batch_size, num_steps, generator), 1):
            pull = pull_in_step(step, full_pull, training)
            x, y = examples.batch(rows)
            for part, gradient in model.gradients(F.cross_entropy(model.module(x), y)):
                if fisher is not None:
                    fisher[part].addcmul_(gradient, gradient, value=len(rows) / num_steps)
                _descend(mean[part], velocity[part], gradient, training)
                if pull is not None:
                    mean[part].lerp_(prior_mean[part], pull[part])
        if curvature and fisher is None:
            fisher = exact_fisher(model, examples, training.fisher_examples, generator)

    if fisher is None:
        return Gaussian(mean, torch.tensor(float(num_examples)).expand(len(mean))), velocity
    precision = torch.full_like(mean, num_examples)
    torch.add(prior.precision[:num_parameters], fisher, alpha=num_examples, out=precision[:num_parameters])
    return Gaussian(mean, precision), velocity


def _descend(theta: Tensor, velocity: Tensor, gradient: Tensor, training: Training) -> None:
    """velocity ← momentum · velocity + gradient, theta ← theta − learning rate · velocity, both in place."""
    # In one pass, the kernel of SGD(fused=True), where that pays. It rounds as the three operations do, except for
    # the numbers left over when its vectors are full: a length without such has the same bits (tests/test_local.py).
    if len(theta) >= LARGE and len(theta) % 64 == 0 and training.momentum > 0:
        torch._fused_sgd_(
            [theta], [gradient], [velocity], lr=training.learning_rate, momentum=training.momentum, dampening=0.0,
            weight_decay=0.0, nesterov=False, maximize=False, is_first_step=False,
        )  # fmt: skip
        return
    theta.sub_(velocity.mul_(training.momentum).add_(gradient), alpha=training.learning_rate)


def proximal_pull(precision: Tensor, num_examples: int | Tensor, training: Training) -> Tensor | None:
    """The weights w of the proximal step towards the prior's mean; None for a flat prior."""
    if not bool(distinct(precision).max() > 0):  # any() would take five times as long
        return None
    scale = training.learning_rate / (1 - training.momentum) / num_examples
    pull = torch.empty_like(precision, memory_format=torch.contiguous_format)
    for part, known in blocks(pull, precision):  # 1/(1 + 1/a) is a/(1+a), also where the precision is 0 or infinite
        torch.mul(known, scale, out=part).reciprocal_().add_(1).reciprocal_()
    return pull


def pull_in_step(step: int, pull: Tensor | None, training: Training) -> Tensor | None:
    """The weights w of the proximal step, in the t-th step: less in the first ones of a training with fresh momentum.

    The gradient has not come to its full rate lr/(1−momentum) there, but to the part c = 1 − momentumᵗ of it; with the
    full pull a prior would count more than twice in ten steps. From w = a/(1+a), that of c·a is c·w/(1 − (1−c)·w).
    """
    if pull is None or training.momentum_state != "fresh":
        return pull
    part = 1 - training.momentum**step
    return part * pull / (1 - (1 - part) * pull)


def needs_exact_fisher(training: Training, num_examples: int) -> bool:
    """Whether the Fisher information must come from single examples, by the settings or for want of examples.

    A batch of all examples shows no scatter: its mean gradient vanishes at the optimum, and their squares do not.
    """
    return training.fisher == "exact" or num_examples <= training.batch_size


def exact_fisher(model: FlatModel, examples: Examples, max_examples: int, generator: torch.Generator) -> Tensor:
    """The diagonal empirical Fisher, the mean over examples of ∂log p(y|x,θ)² at the model's parameters.

    From per-example gradients in evaluation mode: in training mode BatchNorm would tie the examples together.
    """  # (parameter,)
    rows = torch.randperm(len(examples), generator=generator)[:max_examples]
    model.module.eval()
    if model.num_parameters > FISHER_LARGE:
        return _looped_fisher(model, examples, rows)
    try:
        return _stacked_fisher(model, examples, rows)
    except Exception:  # a model may do what vmap cannot
        return _looped_fisher(model, examples, rows)


def _stacked_fisher(model: FlatModel, examples: Examples, rows: Tensor) -> Tensor:
    named = dict(model.module.named_parameters())
    trained = {name: p.detach() for name, p in named.items() if p.requires_grad}
    rest = {name: p.detach() for name, p in named.items() if not p.requires_grad} | dict(model.module.named_buffers())

    def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(call(model.module, values | rest, x[None]), y[None])

    per_example = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")
    fisher = torch.zeros(model.num_parameters)
    views = model.parameter_views(fisher)
    for part in rows.split(FISHER_CHUNK):
        for name, gradient in per_example(trained, *examples.batch(part)).items():
            views[name].add_(gradient.square().sum(0), alpha=1 / len(rows))
    return fisher


def _looped_fisher(model: FlatModel, examples: Examples, rows: Tensor) -> Tensor:
    fisher = torch.zeros(model.num_parameters)
    for row in rows.split(1):
        x, y = examples.batch(row)
        for part, gradient in model.gradients(F.cross_entropy(model.module(x), y)):
            fisher[part].addcmul_(gradient, gradient, value=1 / len(rows))
    return fisher


def log_likelihoods(model: FlatModel, vectors: Tensor | Sequence[Tensor], examples: Examples, rows: Tensor) -> Tensor:
    """log p(y|x) of each chosen example under each model, in evaluation mode."""  # (model, example)

    def of_labels(scores: Tensor, y: Tensor) -> Tensor:
        return scores.log_softmax(2).gather(2, y.expand(len(scores), -1)[..., None])[..., 0]

    return floored(_predicted(model, vectors, examples, rows, of_labels))


def floored(log_p: Tensor) -> Tensor:
    """Log-likelihoods with the least that an example may have for those below it and for NaN."""
    return log_p.nan_to_num(nan=FLOOR).clamp(min=FLOOR)


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


@dataclass(frozen=True)
class Evaluation:
    """Everything that the metrics of one client are computed from."""

    confusion: Tensor  # (true class, predicted class) int64
    log_likelihood: float  # summed over the client's test examples
    calibration: Tensor  # (bin, [examples, sum of confidence, correct]) float64
    brier: float  # Σ (p − 1[y])² over classes, summed over the client's test examples


def evaluate(log_p: Tensor, y: Tensor, num_classes: int) -> Evaluation:
    """How predictions log p(class|x) do on examples with these labels."""  # (example, class), (example,)
    p, predicted = log_p.double().exp(), log_p.argmax(1)
    confidence, likelihood = p.amax(1), log_p.gather(1, y[:, None]).double()
    return Evaluation(
        torch.bincount(y * num_classes + predicted, minlength=num_classes**2).view(num_classes, num_classes),
        float(likelihood.sum()),
        calibration_table(confidence, predicted == y),
        float(p.square().sum() - 2 * likelihood.exp().sum() + len(y)),
    )


def log_probabilities(model: FlatModel, vectors: Tensor | Sequence[Tensor], examples: Examples, rows: Tensor) -> Tensor:
    """log p(class|x) of the chosen examples under each model, in evaluation mode."""  # (model, example, class)
    return _predicted(model, vectors, examples, rows, lambda scores, _: floored(scores.log_softmax(2)))


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


def log_mixture(log_p: Tensor, log_weight: Tensor) -> Tensor:
    """log Σ_m weight_m p_m: the prediction of a mixture; of a single model, to the bit its own."""
    if len(log_p) == 1:
        return log_p[0]
    weighted = log_p.double() + log_weight.double().view(-1, *[1] * (log_p.dim() - 1))
    return weighted.logsumexp(0).to(log_p.dtype)  # (model, ...) -> (...)


def calibration_table(confidence: Tensor, correct: Tensor) -> Tensor:
    """How many examples fall into each bin of confidence, with what confidence in sum, and how many are correct."""
    bins = (confidence * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    rows = torch.stack([torch.ones_like(confidence), confidence, correct.double()], 1).double()
    return torch.zeros(NUM_BINS, 3, dtype=torch.float64).index_add(0, bins, rows)  # (bin, [examples, sum, correct])


def check_model(
    model: FlatModel, examples: Examples, num_classes: int, *, batch_size: int = 2, predicts_only: bool = False
) -> tuple[int, bool]:
    """The number of classes the model tells apart, and whether training draws from torch's global generator.

    Such draws cannot be told apart between threads, so an engine must then train in one thread. Raises if the model
    does not fit the data: it is tried on a batch as in training, or in evaluation mode if it only predicts.
    """
    x, _ = examples.batch(torch.arange(min(batch_size, len(examples))))
    model.seed(torch.Generator())
    model.module.train(not predicts_only)
    before = torch.get_rng_state()
    try:
        with torch.no_grad():
            output = model.module(x)
    except Exception as error:  # a user's model may raise anything
        reason = (str(error) or type(error).__name__).splitlines()[0]
        if len(x) == 1 and not predicts_only and _accepts(model, torch.cat([x, x])):
            cause = "training.batch_size is 1" if batch_size == 1 else "a client has one training example"
            raise ValueError(f"model cannot be trained on one example at a time ({reason}): {cause}, "
                             "at least 2 are needed") from error  # fmt: skip
        if reason.startswith(
            "view size is not compatible"
        ):  # torch's own advice is meant for x.view(...) of the user's
            reason = "images and convolutions lie in channels-last order here: use x.flatten(1), not x.view(len(x), -1)"
        if WANTS_INDICES.search(reason):
            reason = f"{reason.rstrip('.')}; inputs arrive as float32: use x.long()"
        raise ValueError(f"model does not accept inputs of shape {tuple(x.shape[1:])}: {reason}") from error
    if (name := model.replaced()) is not None:
        raise ValueError(f"model puts another tensor in the place of {name} when it is called: it must write into it, "
                         "by copy_() or mul_(), or its numbers cannot be exchanged")  # fmt: skip
    drawn = not torch.equal(before, torch.get_rng_state())
    torch.set_rng_state(before)
    if not isinstance(output, Tensor):
        raise ValueError(f"model must return a tensor of (example, class) scores, it returned {type(output).__name__}")
    if output.dim() != 2 or output.shape[0] != len(x) or output.shape[1] < num_classes:
        raise ValueError(f"model must return (example, class) scores with at least {num_classes} classes, "
                         f"as the labels need; it returned {tuple(output.shape)} for {len(x)} examples")  # fmt: skip
    return output.shape[1], drawn


def _accepts(model: FlatModel, x: Tensor) -> bool:
    try:
        with torch.no_grad():
            model.module(x)
    except Exception:  # a user's model may raise anything
        return False
    return True
