"""The Python door: any torch model, any clients, one call."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bcfl.client.trainer import Training
from bcfl.data.lazy import LazyClients, given_clients
from bcfl.data.tables import Table
from bcfl.likelihood import AUTO, Likelihood, Own, attach
from bcfl.model.flat import ModelFactory
from bcfl.runs.loop import is_unfinished, load_result, prolong, resume, start
from bcfl.runs.observers import Observer
from bcfl.runs.problem import Given
from bcfl.runs.progress import LiveProgress
from bcfl.runs.result import Result
from bcfl.runs.sections import FROM_PYTHON
from bcfl.runs.settings import Config, settings_named, written_config

_FROM_PYTHON = {"factory": FROM_PYTHON}


def train(
    model: ModelFactory | str | None,
    clients: Iterable[Any] | LazyClients,
    *,
    method: str = "bcfl-mh-3",
    rounds: int = 30,
    seed: int = 0,
    training: Training | Mapping[str, Any] | None = None,
    clients_per_round: float = 1.0,
    likelihood: str | Likelihood | Callable[[Tensor, Tensor], Tensor] = AUTO,
    experiment: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    go_on_from: str | Path | None = None,
    num_workers: int | None = None,
    device: str | torch.device = "cpu",
    observers: Sequence[Observer] = (),
    progress: bool = True,
    **options: Any,
) -> Result:
    """Train a federation of your own clients and models, and return its result.

    `model` is a function without arguments that returns a new torch.nn.Module with one score per class, or the name of
    a known one; None is what suits a table: one hidden layer beside a linear model ("linear": that alone). `clients` is
    a list, or a mapping from name to client; each client is (x, y) or (x, y, x_test, y_test) in tensors or arrays, a
    mapping with those keys and perhaps `group`, a torch Dataset of (x, y) items, or a pair (train Dataset, test
    Dataset). `bcfl.table` makes them of a frame that has a column of sites.

    `likelihood` says what y is: a name, perhaps with options ("poisson", "normal(scale=network)"), what
    `bcfl.likelihood.of` returns, or any function (output, y) -> log-probability of each example. By itself it is found
    where y leaves no doubt: whole numbers are classes, real numbers have normal noise.

    `method` is one of `bcfl list methods`; `options` are its own, such as num_clusters=4, and any settings of
    [training] and [experiment] by their names, such as local_steps=20 or evaluate_every=5; several at once may be given
    as the mappings `training` and `experiment`. `rounds` are trained; all draws follow from `seed`. Up to 1,
    `clients_per_round` is the share of clients that takes part in a round; above, their number.

    With `out` the run is kept in that folder; if the folder holds this very run, unfinished, it goes on from there.
    `go_on_from` is the folder of a run that had fewer rounds and nothing else different: its rounds are taken over, not
    trained again. `num_workers` threads train clients, as many as there are cores if None. `device` is "cpu", or "cuda"
    to train many clients together on a GPU. `observers` are told of every round (see
    `bcfl.runs.observers`); on a terminal and in a notebook, `progress` shows a bar.
    """
    given = {"rounds": rounds, "seed": seed, "clients_per_round": clients_per_round}
    sections = {
        "training": _section("training", {}, asdict(training) if isinstance(training, Training) else training),
        "experiment": _section("experiment", given, experiment),
        "method": {"name": method},
    }
    name = _named(model, clients)
    told = _told(likelihood, model)
    by = {"name": name} if name else _FROM_PYTHON
    config = written_config({"data": {**_FROM_PYTHON, "likelihood": told}, "model": by, **_placed(options, sections)})
    if num_workers is not None and not (isinstance(num_workers, Integral) and num_workers >= 1):
        raise ValueError(f"num_workers must be a whole number of at least 1, got {num_workers!r}")
    folder = None if out is None else Path(out)
    followed_by = [*observers, *([LiveProgress(lines=False)] if progress else [])]
    brought = Given(given_clients(clients), None if name else _with_own(model, likelihood))
    if go_on_from is not None:
        _take_over(Path(go_on_from), folder, config)
    how: dict[str, Any] = {"num_workers": num_workers, "device": str(device), "observers": followed_by}
    if folder is not None and is_unfinished(folder, config):
        return resume(folder, given=brought, **how)
    return start(config, folder, given=brought, **how)


def _take_over(shorter: Path, folder: Path | None, config: Config) -> None:
    """The folder holds the rounds of a shorter run, to go on from there; if it does already, it is left alone."""
    if folder is None:
        raise ValueError("go_on_from needs out, a new folder for the longer run")
    if not is_unfinished(folder, config):
        prolong(shorter, folder, config)


def _named(model: ModelFactory | str | None, clients: Any) -> str | None:
    """The name of the model, if it is one of those known by name."""
    if model is None and not isinstance(clients, Table):
        raise ValueError("model must be given: only a table (bcfl.table) has one by default")
    return "table" if model is None else model if isinstance(model, str) else None


def _told(likelihood: Any, model: Any) -> str:
    """The likelihood as the setting's text; one of the user's own has none."""
    if isinstance(likelihood, str):
        return likelihood
    if isinstance(likelihood, Likelihood) and not isinstance(likelihood.family, Own):
        return likelihood.spec
    if model is None or isinstance(model, str):
        raise ValueError("likelihood: a function of one's own goes with a model of one's own, a function that makes it")
    return FROM_PYTHON


def _with_own(model: Any, likelihood: Any) -> ModelFactory:
    """The model, with a likelihood that is the user's own function attached to it."""
    if isinstance(likelihood, str) or (isinstance(likelihood, Likelihood) and not isinstance(likelihood.family, Own)):
        made: ModelFactory = model
        return made
    return attach(model, likelihood if isinstance(likelihood, Likelihood) else Likelihood(Own(likelihood)))


def _placed(options: Mapping[str, Any], sections: dict[str, Any]) -> dict[str, Any]:
    """The sections with each option in the one that has it; what none has is left to be refused as the method's."""
    for option, value in options.items():
        if option == "name":
            raise ValueError("unknown method option name: the method's name is given as method=…")
        homes = [setting.partition(".")[0] for setting in settings_named(option)] or ["method"]
        home = "method" if "method" in homes else homes[0]
        if home not in sections:
            raise ValueError(f"{home}.{option} is for files and --set: here clients and model are given as they are")
        sections[home] = _section(home, {option: value}, sections[home])
    return sections


def _section(name: str, parameters: Mapping[str, Any], further: Any) -> Any:
    """A section of train's own parameters and further settings, none of them given twice."""
    if not isinstance(further, Mapping):
        return dict(parameters) if further is None else further  # which is refused as no section
    for key in parameters.keys() & further.keys():
        raise ValueError(f"{name}.{key} is given as {key}=… here, and once more in {name}=…")
    return {**further, **parameters}


def load(
    path: str | Path,
    model: ModelFactory | None = None,
    likelihood: Likelihood | Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Result:
    """The result of a run that was kept in a folder; `model` and `likelihood` only if the run was given its own."""
    if model is not None and likelihood is not None:
        model = _with_own(model, likelihood)
    return load_result(Path(path), model)
