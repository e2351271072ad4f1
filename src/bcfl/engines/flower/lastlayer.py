"""Questions about a client's last layer and their answers, as they travel and as they are checked."""

from collections.abc import Mapping

import torch
from flwr.app import Array, ArrayRecord, RecordDict
from torch import Tensor

from bcfl.belief.heads import Asked, HeadLayout, Heads, num_blocks
from bcfl.client.head import Answer
from bcfl.engines.flower.wire import (
    DOUBLE,
    INT,
    arrays_of,
    finite,
    number_of,
    one_line,
    only,
    read_array,
    to_array,
    whole_number,
)

KINDS: tuple[Asked, ...] = ("sums", "expansion", "held_out")
ROUNDING = 1e-6  # relative, within which a curvature is the same both ways
PARTS = ("mean", "variance", "noise", "log_share")
PLACES = ("body_of", "candidate", "fold")


def settings(heads: Heads) -> dict[str, float]:
    """What is said of the priors beside their numbers."""
    counts = {"num-models": len(heads.models), "priors": len(heads), "folds": heads.num_folds}
    return {**counts, "held-out": heads.held_out}


def sent_heads(heads: Heads, num_evaluated: int) -> dict[str, Array]:
    """The priors and their bodies as arrays."""
    arrays = {f"mean.{i}": to_array(model[:num_evaluated]) for i, model in enumerate(heads.models)}
    return arrays | {f"head.{name}": to_array(getattr(heads, name)) for name in (*PARTS, *PLACES)}


def read_heads(content: RecordDict, ask: Mapping[str, object], models: Tensor, size: int) -> Heads:
    """The priors of a question, once they are found sound."""
    count, num_folds = whole_number(ask, "priors", 0, 2**20), whole_number(ask, "folds", 1, 2**20)
    arrays = arrays_of(content, "models")

    def numbers(name: str, *shape: int) -> Tensor:
        return finite(read_array(arrays.get(f"head.{name}"), (count, *shape), DOUBLE, name), name)

    mean, variance = numbers("mean", size), numbers("variance", size)
    noise, log_share = numbers("noise"), numbers("log_share")
    body_of, candidate, fold = (read_array(arrays.get(f"head.{n}"), (count,), INT, n) for n in PLACES)
    for name, sound in (
        ("variance", bool((variance >= 0).all())),
        ("noise", bool((noise > 0).all())),
        ("body_of", bool(((body_of >= 0) & (body_of < len(models))).all())),
        ("candidate", bool(((candidate >= 0) & (candidate < count)).all())),
        ("fold", bool(((fold >= -1) & (fold < num_folds)).all())),
    ):
        if not sound:
            raise ValueError(f"{name} of a last layer's prior is out of range")
    held_out = number_of(ask, "held-out", 0, 1)
    return Heads(models, body_of, mean, variance, noise, log_share, candidate, fold, num_folds, held_out)


def asked_of(ask: Mapping[str, object]) -> Asked:
    kind = ask.get("kind")
    for known in KINDS:
        if kind == known:
            return known
    raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {one_line(kind)[:40]}")


def told(answer: Answer) -> RecordDict:
    return RecordDict({"answer": ArrayRecord({name: to_array(part) for name, part in answer.items()})})


def shapes_of(asked: Asked, heads: Heads, layout: HeadLayout) -> dict[str, tuple[int, ...]]:
    """What an answer is made of."""
    size, count = layout.num_coefficients, len(heads)
    if asked == "held_out":
        return {"log_likelihood": (heads.num_candidates,), "num_examples": (1,)}
    if asked == "sums":
        folds = heads.num_folds
        return {
            "curvature": (folds, size, size),
            "linear": (folds, size),
            "constant": (folds,),
            "num_examples": (folds,),
        }
    blocks = num_blocks(layout)
    block = (count, blocks, size // blocks)
    return {
        "curvature": (*block, size // blocks),
        "linear": block,
        "constant": (count,),
        "pull_mean": block,
        "pull_spread": block,
        "num_examples": (count,),
    }


def read_told(content: RecordDict, asked: Asked, heads: Heads, layout: HeadLayout, num_examples: float) -> Answer:
    """A client's answer, once it is found sound."""
    only(content, ("answer",))
    shapes = shapes_of(asked, heads, layout)
    arrays = arrays_of(content, "answer", tuple(shapes))
    found = {name: finite(read_array(arrays.get(name), shape, DOUBLE, name), name) for name, shape in shapes.items()}
    if "curvature" in found:
        curvature = found["curvature"]
        least = float(curvature.diagonal(dim1=-2, dim2=-1).min())
        if least < 0 or not torch.allclose(curvature, curvature.mT, ROUNDING, ROUNDING * float(curvature.abs().max())):
            raise ValueError("a curvature must be the same both ways, and its diagonal not below 0")
        count = found["num_examples"]
        total = float(count.sum()) if asked == "sums" else float(count.max())
        if float(count.min()) < 0 or total > num_examples:
            raise ValueError(f"num_examples must count at most the client's {num_examples:g} examples")
    return found
