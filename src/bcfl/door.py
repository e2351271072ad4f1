"""The Python door: any torch model, any clients, one call."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bcfl.experiment.config import FROM_PYTHON, parse_config
from bcfl.experiment.result import Result
from bcfl.experiment.run import Observer, is_unfinished, load_result, prolong, resume, start
from bcfl.local import Training
from bcfl.models import ModelFactory


def train(
    model: ModelFactory,
    clients: Sequence[Any],
    *,
    method: str = "bcfl-mh-3",
    rounds: int = 30,
    seed: int = 0,
    training: Training | None = None,
    clients_per_round: float = 1.0,
    out: str | Path | None = None,
    go_on_from: str | Path | None = None,
    num_workers: int | None = None,
    device: str = "cpu",
    observers: Sequence[Observer] = (),
    **options: Any,
) -> Result:
    """Train a federation of your own clients and models, and return its result.

    `model` is a function without arguments that returns a new torch.nn.Module with one score per class. `clients` is a
    list; each client is (x, y) or (x, y, x_test, y_test) in tensors or arrays, a mapping with those keys and perhaps
    `group`, a torch Dataset of (x, y) items, or a pair (train Dataset, test Dataset). `options` are the method's own,
    such as num_clusters=4. `device` is "cpu", or "cuda" to train many clients together on a GPU. With `out` the run is
    kept in that folder; if the folder holds this very run, unfinished, it goes on from there. `go_on_from` is the
    folder of a run that had fewer rounds and nothing else different: its rounds are taken over, not trained again.
    """
    config = parse_config(
        {
            "data": {"factory": FROM_PYTHON},
            "model": {"factory": FROM_PYTHON},
            "method": {"name": method, **options},
            "training": asdict(training or Training()),
            "experiment": {"rounds": rounds, "seed": seed, "clients_per_round": clients_per_round},
        }
    )
    folder = None if out is None else Path(out)
    how: dict[str, Any] = {"num_workers": num_workers, "device": device, "observers": observers}
    own: dict[str, Any] = {"clients": clients, "factory": model, **how}
    if go_on_from is not None and folder is None:
        raise ValueError("go_on_from needs out, a new folder for the longer run")
    if folder is not None and is_unfinished(folder, config):
        return resume(folder, **own)
    if folder is not None and go_on_from is not None:
        prolong(Path(go_on_from), folder, config)
        return resume(folder, **own)
    return start(config, folder, **own)


def load(path: str | Path, model: ModelFactory | None = None) -> Result:
    """The result of a run that was kept in a folder; `model` is needed only if the run was given one."""
    return load_result(Path(path), model)
