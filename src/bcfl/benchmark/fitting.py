"""One contestant on one task: trained on the sites' training rows, asked for their held-out ones."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from bcfl.api import train
from bcfl.benchmark.answers import Answer, answer_of, calibration_of, measure_of, nll_of
from bcfl.benchmark.contestants import POOLED, STATISTICIAN, Contestant
from bcfl.benchmark.measures import pair_calibration
from bcfl.benchmark.mixed_model import mixed_model
from bcfl.benchmark.preparation import Federation
from bcfl.federation import heads_in, served
from bcfl.model.zoo import SIZED
from bcfl.predict.predictors import module_of
from bcfl.randomness import numpy_generator
from bcfl.runs.result import Result

POOLED_STEPS = 4  # times as many steps as a site takes, of batches as many times as large
VALIDATION = 3  # one in so many of a site's training rows judges when to stop
EVERY = 1  # so many rounds it is judged again
MODELS = {"linear": "linear", "network": "table"}  # what every contestant is given: those of bcfl's for tables
BYTES = 4  # of a number that belongs to a model


@dataclass(frozen=True)
class Setting:
    """How much work everyone may do: the same for all."""

    rounds: int = 20  # at most
    local_steps: int = 10
    learning_rate: float = 0.05
    batch_size: int = 32


@dataclass(frozen=True)
class Fitted:
    """What a contestant's statements on every site's held-out rows come to, and what it took."""

    nll: Sequence[float | None]  # each (site,)
    measure: Sequence[float | None]  # the task's own
    calibration: Mapping[str, float | None]
    work: Mapping[str, int] = field(default_factory=dict)
    membership: Any = None  # (site, cluster): where the sites belong, for methods that say so


def fit(
    contestant: Contestant,
    model: str,
    data: Federation,
    setting: Setting,
    options: Mapping[str, Any],
    new: Federation | None = None,
) -> Fitted:
    """What the contestant makes of the task with these options; of the new sites, if there are such.

    A new site is placed by its training rows, without training.
    """
    if contestant.name == STATISTICIAN:
        return _told(new or data, mixed_model(data, new or data))
    pooled = contestant.name == POOLED
    clients = [*zip(data.x, data.y, data.x_test, data.y_test, strict=True)]
    asked = {"evaluate_every": setting.rounds, **options}
    result = _trained(contestant, model, data, setting, asked, [_together(clients)] if pooled else clients)
    if new is not None:
        return replace(_told(new, [_of_newcomer(result, new, site) for site in range(len(new.sites))]),
                       work=result.summary()["work"])  # fmt: skip
    heads = heads_in(result.state) is not None  # a site's predictions then are its own posterior's: its engine's to say
    found = _recorded(data, result.history[-1]) if heads else _told(data, _answers(data, result))
    membership = None if pooled else result.probability.numpy()
    return replace(found, work=result.summary()["work"], membership=membership)


def _told(data: Federation, answers: Sequence[Answer]) -> Fitted:
    """What these answers come to."""
    y = [np.asarray(values, np.float64) for values in data.y_test]
    measure = [measure_of(data.task, answer, values) for answer, values in zip(answers, y, strict=True)]
    return Fitted([nll_of(answer) for answer in answers], measure, calibration_of(data.task, answers, y))


def _recorded(data: Federation, last: Mapping[str, Any]) -> Fitted:
    """What a run's own evaluation in its last round says."""
    names = {"ece": "ece", "coverage90": "coverage_90"}
    calibration = {ours: last.get(theirs) for ours, theirs in names.items() if last.get(theirs) is not None}
    return Fitted(last["client_nll"], last[f"client_{data.task.measure}"], calibration)


def _answers(data: Federation, result: Result) -> list[Answer]:
    """What the networks that serve the sites state of their held-out rows; one client stands for all sites."""
    parts = _serving(result)
    return [
        answer_of(parts[0 if len(parts) == 1 else site], torch.tensor(x), torch.tensor(y))
        for site, (x, y) in enumerate(zip(data.x_test, data.y_test, strict=True))
    ]


def _of_newcomer(result: Result, new: Federation, site: int) -> Answer:
    """What the models that a new site's training rows speak for state of its held-out rows.

    Where clients have last layers of their own, that is its own last layer's posterior; else a mixture of models.
    """
    x, y, x_test, y_test = (torch.tensor(part[site]) for part in (new.x, new.y, new.x_test, new.y_test))
    if heads_in(result.state) is not None:
        own = result.own_model(x, y)
        point = own.predict_proba(x_test) if new.task.kind == "classes" else own.predict(x_test)
        return Answer(own.log_prob(x_test, y_test).numpy(), point.numpy())
    placed = result.associate(x, y).predictor
    modules = [module_of(result.factory, mean) for mean in placed.beliefs.mean]
    return answer_of([*zip(placed.share.tolist(), modules, strict=True)], x_test, y_test)


def _trained(
    contestant: Contestant, model: str, data: Federation, setting: Setting, options: Mapping[str, Any], clients: Any
) -> Result:
    """The contestant's run on these clients; evaluated on their test rows, where they have any."""
    pooled = contestant.name == POOLED
    told: dict[str, Any] = {**asdict(setting), **contestant.options_for(len(data.sites)), **options}
    if pooled:
        told |= {"local_steps": POOLED_STEPS * told["local_steps"], "batch_size": POOLED_STEPS * told["batch_size"]}
    if data.task.kind != "classes":
        told["likelihood"] = data.task.likelihood
    outputs = data.num_classes if data.task.kind == "classes" else 1
    return train(
        partial(SIZED[MODELS[model]], data.num_inputs, outputs),
        clients,
        method="local" if pooled else contestant.name,
        seed=data.draw,
        num_workers=1,
        progress=False,
        **{"evaluate_every": EVERY, **told},
    )


def _together(clients: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """All clients' rows as those of one."""
    return tuple(np.concatenate(part) for part in zip(*clients, strict=True))


def _serving(result: Result) -> list[list[tuple[float, nn.Module]]]:
    """For each client the networks that serve it, each with its share."""
    models, mixtures = served(result.state)
    modules = [module_of(result.factory, mean) for mean in models.mean]
    return [[(share, modules[model]) for model, share in mixture.items()] for mixture in mixtures]


def chosen(contestant: Contestant, model: str, data: Federation, setting: Setting, *, tune: bool) -> dict[str, Any]:
    """When to stop and, with `tune`, which of the contestant's options to take: what loses least on validation rows.

    A third of every site's training rows judges, the mean over sites of their loss; test rows are not looked at.
    """
    if contestant.name == STATISTICIAN or contestant.chooses_itself:
        return {}
    inner = _validation(data)
    clients = [*zip(inner.x, inner.y, inner.x_test, inner.y_test, strict=True)]
    if contestant.name == POOLED:
        clients = [_together(clients)]
    found: list[tuple[float, dict[str, Any]]] = []
    for candidate in ({}, *contestant.grid) if tune else ({},):
        history = _trained(contestant, model, inner, setting, candidate, clients).history
        found += [(_loss(one), {**candidate, "rounds": one["round"]}) for one in history if one.get("client_nll")]
    return min(found, key=lambda one: one[0])[1]


def _loss(evaluated: Mapping[str, Any]) -> float:
    """The mean over sites of their losses in a round; infinite where one has no finite number."""
    losses = evaluated["client_nll"]
    return float("inf") if any(loss is None for loss in losses) else float(np.mean(losses))


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


def record(
    contestant: Contestant, model: str, data: Federation, setting: Setting, *, tune: bool, newcomers: bool = False
) -> dict[str, Any]:
    """Everything that is kept of one contestant on one task: each site's numbers, what was stated, what it took.

    With `newcomers` a fifth of the sites are kept out of the training, and the numbers are theirs.
    """
    torch.set_num_threads(1)
    if newcomers:
        kept = tuple(site for site in range(len(data.sites)) if site not in data.newcomers)
        data, new = data.only(kept), data.only(data.newcomers)
    else:
        new = None
    began = time.process_time()
    options = chosen(contestant, model, data, setting, tune=tune)
    middle = time.process_time()
    fitted = fit(contestant, model, data, setting, options, new)
    judged = new or data
    taken = time.process_time() - middle
    work = fitted.work
    return {
        "task": data.task.name,
        "contestant": contestant.name,
        "model": model,
        "draw": data.draw,
        "tuned": tune,
        "newcomers": newcomers,
        "options": {**(contestant.options_for(len(data.sites)) if contestant.federated else {}), **options},
        "setting": asdict(setting),
        "sites": list(judged.sites),
        "rows": [len(values) for values in judged.y],
        "test_rows": [len(values) for values in judged.y_test],
        "nll": [_short(loss) for loss in fitted.nll],
        data.task.measure: [_short(value) for value in fitted.measure],
        "calibration": {name: _short(value) for name, value in fitted.calibration.items()},
        "membership": _judged(fitted.membership, data.group),
        "seconds": round(taken, 2),
        "choosing_seconds": round(middle - began, 2),
        "local_steps": work.get("local_steps"),
        "bytes_down": BYTES * work.get("parameters_down", 0),
        "bytes_up": BYTES * (work.get("parameters_up", 0) + 2 * work.get("scalars_up", 0)),
    }


def _judged(membership: Any, group: Sequence[int] | None) -> dict[str, float] | None:
    """How honest the membership is, where the kinds are known."""
    if membership is None or group is None:
        return None
    return {name: float(f"{value:.6g}") for name, value in pair_calibration(membership, group).items()}


def _short(value: float | None) -> float | None:
    """To six digits; None for what is no number."""
    return float(f"{value:.6g}") if value is not None and np.isfinite(value) else None
