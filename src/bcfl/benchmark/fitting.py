"""One contestant on one task: trained on the sites' training rows, asked for their held-out ones."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from bcfl.api import train
from bcfl.benchmark.answers import Answer, answer_of, calibration_of, measure_of, nll_of
from bcfl.benchmark.contestants import POOLED, STATISTICIAN, Contestant
from bcfl.benchmark.measures import mean, pair_calibration
from bcfl.benchmark.mixed_model import mixed_model
from bcfl.benchmark.preparation import Federation
from bcfl.federation import served
from bcfl.model.zoo import SIZED
from bcfl.predict.predictors import module_of
from bcfl.randomness import numpy_generator
from bcfl.runs.result import Result

POOLED_STEPS = 4  # times as many steps as a site takes, of batches as many times as large
VALIDATION = 3  # one row in so many of a site's training rows, where options are chosen
MODELS = {"linear": "linear", "network": "table"}  # what every contestant is given: those of bcfl's for tables
BYTES = 4  # of a number that belongs to a model


@dataclass(frozen=True)
class Setting:
    """How much work everyone may do: the same for all."""

    rounds: int = 30
    local_steps: int = 10
    learning_rate: float = 0.05
    batch_size: int = 32


@dataclass(frozen=True)
class Fitted:
    """What a contestant states of every site's held-out rows, and what it took."""

    answers: tuple[Answer, ...]
    work: Mapping[str, int] = field(default_factory=dict)
    membership: Any = None  # (site, cluster): where the sites belong, for methods that say so


def fit(contestant: Contestant, model: str, data: Federation, setting: Setting, options: Mapping[str, Any]) -> Fitted:
    """What the contestant makes of the task with these options."""
    if contestant.name == STATISTICIAN:
        return Fitted(mixed_model(data))
    pooled = contestant.name == POOLED
    told: dict[str, Any] = {**asdict(setting), **contestant.options_for(len(data.sites)), **options}
    if pooled:
        told |= {"local_steps": POOLED_STEPS * told["local_steps"], "batch_size": POOLED_STEPS * told["batch_size"]}
    if data.task.kind != "classes":
        told["likelihood"] = data.task.likelihood
    outputs = data.num_classes if data.task.kind == "classes" else 1
    result = train(
        partial(SIZED[MODELS[model]], data.num_inputs, outputs),
        [(np.concatenate(data.x), np.concatenate(data.y))] if pooled else list(zip(data.x, data.y, strict=True)),
        method="local" if pooled else contestant.name,
        seed=data.draw,
        num_workers=1,
        device="stacked-cpu",
        progress=False,
        **told,
    )
    parts = _serving(result)
    answers = tuple(
        answer_of(parts[0 if pooled else site], torch.tensor(x), torch.tensor(y))
        for site, (x, y) in enumerate(zip(data.x_test, data.y_test, strict=True))
    )
    membership = None if pooled else result.probability.numpy()
    return Fitted(answers, result.summary()["work"], membership)


def _serving(result: Result) -> list[list[tuple[float, nn.Module]]]:
    """For each client the networks that serve it, each with its share."""
    models, mixtures = served(result.state)
    modules = [module_of(result.factory, mean) for mean in models.mean]
    return [[(share, modules[model]) for model, share in mixture.items()] for mixture in mixtures]


def tuned(contestant: Contestant, model: str, data: Federation, setting: Setting) -> Mapping[str, Any]:
    """Of the contestant's options as they are and its grid, those with the least mean loss on the validation rows."""
    if not contestant.grid:
        return {}
    inner = _validation(data)
    candidates: list[Mapping[str, Any]] = [{}, *contestant.grid]
    losses = [_loss(fit(contestant, model, inner, setting, candidate)) for candidate in candidates]
    return candidates[int(np.argmin(losses))]


def _loss(fitted: Fitted) -> float:
    found = mean([nll_of(answer) for answer in fitted.answers])
    return float("inf") if found is None or not np.isfinite(found) else found


def _validation(data: Federation) -> Federation:
    """The same task within its training rows: a third of each site's is held out, of sites with three at least."""
    kept, held = [], []
    for site, rows in enumerate(map(len, data.y)):
        order = numpy_generator(data.draw, "validation", site).permutation(rows)
        count = rows // VALIDATION
        held.append(np.sort(order[:count]))
        kept.append(np.sort(order[count:]))
    used = tuple(site for site, rows in enumerate(held) if len(rows))
    parts = {
        name: tuple(column[site][rows[site]] for site in used)
        for name, column, rows in (
            ("x", data.x, kept), ("y", data.y, kept), ("x_test", data.x, held), ("y_test", data.y, held)
        )
    }  # fmt: skip
    return Federation(
        task=data.task,
        draw=data.draw,
        sites=tuple(data.sites[site] for site in used),
        group=None,
        newcomers=(),
        **parts,
    )


def record(contestant: Contestant, model: str, data: Federation, setting: Setting, *, tune: bool) -> dict[str, Any]:
    """Everything that is kept of one contestant on one task: each site's numbers, what was stated, what it took."""
    torch.set_num_threads(1)
    began = time.process_time()
    options = tuned(contestant, model, data, setting) if tune else {}
    chosen = time.process_time()
    fitted = fit(contestant, model, data, setting, options)
    taken = time.process_time() - chosen
    y = [np.asarray(values, np.float64) for values in data.y_test]
    work = fitted.work
    known = fitted.membership is not None and data.group is not None
    return {
        "task": data.task.name,
        "contestant": contestant.name,
        "model": model,
        "draw": data.draw,
        "tuned": tune,
        "options": {**(contestant.options_for(len(data.sites)) if contestant.federated else {}), **options},
        "setting": asdict(setting),
        "sites": list(data.sites),
        "rows": [len(values) for values in data.y],
        "test_rows": [len(values) for values in y],
        "nll": [_short(nll_of(answer)) for answer in fitted.answers],
        data.task.measure: [
            _short(measure_of(data.task, answer, values)) for answer, values in zip(fitted.answers, y, strict=True)
        ],
        "calibration": {name: _short(value) for name, value in calibration_of(data.task, fitted.answers, y).items()},
        "membership": pair_calibration(fitted.membership, data.group) if known and data.group is not None else None,
        "seconds": round(taken, 2),
        "tuning_seconds": round(chosen - began, 2),
        "local_steps": work.get("local_steps"),
        "bytes_down": BYTES * work.get("parameters_down", 0),
        "bytes_up": BYTES * (work.get("parameters_up", 0) + 2 * work.get("scalars_up", 0)),
    }


def _short(value: float | None) -> float | None:
    """To six digits; None for what is no number."""
    return float(f"{value:.6g}") if value is not None and np.isfinite(value) else None
