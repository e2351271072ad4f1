"""Runs of a second, what they must have in common, and ways to stop them."""

import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from bcfl.cli import main
from bcfl.methods import METHODS
from bcfl.runs import store
from bcfl.runs.settings import Config, load_config
from bcfl.runs.store import RunFolder

SMALL = [
    "data.partition=feature(4,2)",
    "experiment.rounds=3",
    "training.local_steps=3",
    "method.scoring_examples=40",
]
COMPARED = [name.replace("-M", "-3") for name in METHODS]  # settings of any of them may stand beside the others
FEDERATIONS = {
    "plain": [],
    "momentum kept by clients": ["training.momentum_state=client", "method.name=bcfl-mh-4"],
    "clients come and go": ["experiment.clients_per_round=0.7", "experiment.dropout=0.2", "experiment.straggling=0.2"],
    "drift, with a memory": ["data.drift_round=2", "method.stay=learn"],
    "one joins later": ["experiment.joins=[[5, 2]]", "experiment.mixture=true"],
    "warm-up": ["method.name=bcfl-mh-3-w", "experiment.checkpoint_every=2"],
}


def small_config(*overrides: str) -> Config:
    return load_config(None, [*SMALL, *overrides], compared=COMPARED)


def command(path: Path, *overrides: str) -> list[str]:
    """The command line of a small run into `path`."""
    settings = [part for override in (*SMALL, *overrides) for part in ("--set", override)]
    return ["run", "--out", str(path), "--workers", "1", "--quiet", *settings]


def outcome(path: Path) -> dict[str, Any]:
    """All that a run must give again to the last bit: settings, split, metrics, associations, summary and state."""
    names = ("config.json", "manifest.json", "rounds.jsonl", "associations.jsonl", "result.json")
    last = sorted((path / "checkpoints").iterdir())[-1]
    with safe_open(last, "pt") as file:
        keys = file.keys()
        tensors = {key: file.get_tensor(key).flatten().view(torch.uint8).tolist() for key in keys}
    return {"last": last.name, **{name: (path / name).read_bytes() for name in names}, **tensors}


# Everything that a run does to its disk: between any two of these it may be killed.
STEPS: list[tuple[Any, str]] = [
    (os, "fsync"),
    (os, "truncate"),
    (Path, "mkdir"),
    (Path, "replace"),
    (Path, "unlink"),
    (RunFolder, "append"),
]


def before_every_step(
    do: Callable[[int], None], patch: Callable[[Any, str, Any], None] = setattr
) -> "itertools.count[int]":
    """From now on `do(number)` is called before every step on the disk; returns the counter of steps."""
    numbers = itertools.count()

    def watched(step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)
        def call(*arguments: Any, **options: Any) -> Any:
            do(next(numbers))
            return step(*arguments, **options)

        return call

    for owner, name in STEPS:
        patch(owner, name, watched(getattr(owner, name)))
    return numbers


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_before_step(arguments: list[str], number: int) -> None:
    """Run a command in this process and be killed before its n-th step on the disk."""
    before_every_step(lambda step: die() if step == number else None)
    sys.exit(main(arguments))


def die_while_writing(arguments: list[str], file_name: str) -> None:
    """Run a command in this process and be killed with that file half written."""

    def half(path: Path, content: bytes) -> None:
        if path.name != file_name:
            return whole(path, content)
        path.with_name(path.name + ".tmp").write_bytes(content[: len(content) // 2])
        return die()

    whole = store.write_atomically
    store.write_atomically = half  # type: ignore[assignment]
    sys.exit(main(arguments))


def die_while_appending(arguments: list[str], name: str, number: int) -> None:
    """Run a command in this process and be killed with the n-th line of that log half written."""
    lines = itertools.count()

    def half(folder: RunFolder, log: str, record: Any) -> None:
        if log == name and next(lines) == number:
            with (folder.path / log).open("ab") as file:
                file.write(b'{"round":')
            die()
        whole(folder, log, record)

    whole = RunFolder.append
    RunFolder.append = half  # type: ignore[method-assign, assignment]
    sys.exit(main(arguments))


def files_in(path: Path) -> Iterator[Path]:
    return (item for item in path.rglob("*") if item.is_file())
