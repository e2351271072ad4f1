"""Whether a model fits the data it is to be trained on, found out before anything is trained."""

import re

import torch
from torch import Tensor

from bcfl.client.examples import Examples
from bcfl.likelihood import Likelihood
from bcfl.model.flat import FlatModel

WANTS_INDICES = re.compile(r"(?=.*\bind(ex|ices)\b).*\b(long(tensor)?|int64)\b", re.IGNORECASE)  # as torch says it


def check_model(
    model: FlatModel,
    examples: Examples,
    num_classes: int,
    *,
    batch_size: int = 2,
    predicts_only: bool = False,
    has_targets: bool = True,
) -> tuple[int, bool]:
    """How many outputs the model has, classes as a rule, and whether training draws from torch's global generator.

    Such draws cannot be told apart between threads, so an engine must then train in one thread. Raises if the model
    does not fit the data: it is tried on a batch as in training, or in evaluation mode if it only predicts.
    """
    x, y = examples.batch(torch.arange(min(batch_size, len(examples))))
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
    if has_targets or model.likelihood.is_plain:
        _check_outputs(model.likelihood, output, y, num_classes)
    return output.shape[1], drawn


def _check_outputs(likelihood: Likelihood, output: Tensor, y: Tensor, num_classes: int) -> None:
    """Nothing happens if the likelihood can be told from what the network says of examples with these targets."""
    if likelihood.is_plain:
        if output.dim() != 2 or output.shape[0] != len(y) or output.shape[1] < num_classes:
            raise ValueError(f"model must return (example, class) scores with at least {num_classes} classes, as the "
                             f"labels need; it returned {tuple(output.shape)} for {len(y)} examples")  # fmt: skip
        return
    needed = likelihood.family.num_outputs
    own = (*output.shape[:-1], output.shape[-1] - likelihood.num_unknowns)
    told = f"it returned {own} for {len(y)} examples"
    if needed is not None and (own[-1] != needed or len(own) < 2):
        raise ValueError(
            f"model must return {needed} numbers for an example, as likelihood {likelihood.spec} needs; {told}"
        )
    try:
        found = likelihood.log_prob(output, y)
    except Exception as error:  # outputs that do not go with y, or a likelihood of the user's
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"likelihood {likelihood.name} cannot be taken of the model's output: {told} with y of shape "
                         f"{tuple(y.shape)} ({reason})") from error  # fmt: skip
    if tuple(found.shape) != (len(y),):
        raise ValueError(f"likelihood {likelihood.name} must give one log-probability for an example, it gave "
                         f"{tuple(found.shape)} for {len(y)}; {told}")  # fmt: skip


def _accepts(model: FlatModel, x: Tensor) -> bool:
    try:
        with torch.no_grad():
            model.module(x)
    except Exception:  # a user's model may raise anything
        return False
    return True
