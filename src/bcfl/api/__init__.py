"""The Python door: any torch model, any clients, one call."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from bcfl.client.trainer import Training
from bcfl.data.arrays import listed
from bcfl.methods import option_types
from bcfl.model.flat import ModelFactory
from bcfl.runs.loop import Observer, is_unfinished, load_result, prolong, resume, start
from bcfl.runs.result import Result
from bcfl.runs.settings import FROM_PYTHON, parse_config, settings_named

GIVEN = {"training": "training=Training({}=…)", "experiment": "experiment={{'{}': …}}"}  # section -> how, in Python


def train(
    model: ModelFactory,
    clients: Iterable[Any],
    *,
    method: str = "bcfl-mh-3",
    rounds: int = 30,
    seed: int = 0,
    training: Training | Mapping[str, Any] | None = None,
    clients_per_round: float = 1.0,
    experiment: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    go_on_from: str | Path | None = None,
    num_workers: int | None = None,
    device: str | torch.device = "cpu",
    observers: Sequence[Observer] = (),
    **options: Any,
) -> Result:
    """Train a federation of your own clients and models, and return its result.

    `model` is a function without arguments that returns a new torch.nn.Module with one score per class. `clients` is a
    list; each client is (x, y) or (x, y, x_test, y_test) in tensors or arrays, a mapping with those keys and perhaps
    `group`, a torch Dataset of (x, y) items, or a pair (train Dataset, test Dataset).

    `method` is one of `bcfl list methods`; `options` are its own, such as num_clusters=4. `rounds` are trained; all
    draws follow from `seed`. `training` says how clients train, as `Training` or as a mapping of its settings.
    Up to 1, `clients_per_round` is the share of clients that takes part in a round; above, their number. `experiment`
    holds further settings of [experiment]: evaluate_every, checkpoint_every, dropout, straggling, joins, mixture.

    With `out` the run is kept in that folder; if the folder holds this very run, unfinished, it goes on from there.
    `go_on_from` is the folder of a run that had fewer rounds and nothing else different: its rounds are taken over, not
    trained again. `num_workers` threads train clients, as many as there are cores if None. `device` is "cpu", or "cuda"
    to train many clients together on a GPU. `observers` are told of every round.
    """
    _refuse_misplaced(options)
    training = Training() if training is None else training
    config = parse_config(
        {
            "data": {"factory": FROM_PYTHON},
            "model": {"factory": FROM_PYTHON},
            "method": {"name": method, **options},
            "training": asdict(training) if isinstance(training, Training) else training,
            "experiment": _section(
                {"rounds": rounds, "seed": seed, "clients_per_round": clients_per_round}, experiment
            ),
        }
    )
    if num_workers is not None and not (isinstance(num_workers, Integral) and num_workers >= 1):
        raise ValueError(f"num_workers must be a whole number of at least 1, got {num_workers!r}")
    folder = None if out is None else Path(out)
    how: dict[str, Any] = {"num_workers": num_workers, "device": str(device), "observers": observers}
    own: dict[str, Any] = {"clients": listed(clients), "factory": model, **how}
    if go_on_from is not None:
        if folder is None:
            raise ValueError("go_on_from needs out, a new folder for the longer run")
        if not is_unfinished(folder, config):
            prolong(Path(go_on_from), folder, config)
    if folder is not None and is_unfinished(folder, config):
        return resume(folder, **own)
    return start(config, folder, **own)


def _refuse_misplaced(options: Iterable[str]) -> None:
    """Nothing happens unless another section's setting is given as a method's option: then it is told where to."""
    for option in options:
        if option == "name":
            raise ValueError("unknown method option name: the method's name is given as method=…")
        for setting in settings_named(option) if option not in option_types() else ():
            given = GIVEN.get(setting.partition(".")[0])
            if given is None:
                raise ValueError(f"{setting} is for files and --set: here clients and model are given as they are")
            raise ValueError(f"unknown method option {option}; did you mean {setting}: {given.format(option)}")


def _section(parameters: Mapping[str, Any], further: Any) -> Any:
    """The section [experiment] of train's own parameters and further settings, none of them given twice."""
    if not isinstance(further, Mapping):
        return parameters if further is None else further  # which parse_config refuses
    for key in parameters.keys() & further.keys():
        raise ValueError(f"experiment.{key} is given as {key}=… here")
    return {**parameters, **further}


def load(path: str | Path, model: ModelFactory | None = None) -> Result:
    """The result of a run that was kept in a folder; `model` is needed only if the run was given one."""
    return load_result(Path(path), model)
