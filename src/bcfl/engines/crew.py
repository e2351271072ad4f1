"""Who computes for the clients: on which device, and how many jobs at a time."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from bcfl.client.examples import Examples
from bcfl.client.stacked import Stacked
from bcfl.client.together import Together, jobs_together
from bcfl.client.trainer import Network, Training
from bcfl.model.flat import FlatModel

DEVICES = "cpu, cuda, cuda:N, stacked-cpu"


def find_device(name: str) -> torch.device | None:
    """The device on which clients are stacked; None for "cpu", where each is trained alone, in threads."""
    kind, colon, number = name.partition(":")
    if name == "cpu" or name.partition(",")[0].partition(":")[0] == "ray":
        return None
    if name == "stacked-cpu":
        return torch.device("cpu")
    if kind != "cuda" or (colon and not number.isdecimal()):
        raise ValueError(f"device must be one of {DEVICES}, got {name!r}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(number or 0) >= count:
        here = ", ".join(["cpu", *(f"cuda:{i}" for i in range(count)), "stacked-cpu"])
        raise ValueError(f"device {name!r} is not here: torch {torch.__version__} finds {count} CUDA devices; "
                         f"allowed here: {here}")  # fmt: skip
    return torch.device(name)


class Crowd(Protocol):
    """Those who compute."""

    count: int

    def stream(self, tasks: Iterable[Any]) -> Iterator[Any]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Crew:
    """Who computes: how a worker's network is made, how many jobs it takes at a time, and whether several pay."""

    network: Callable[[], Network] | None  # None: the module itself, one job at a time
    at_a_time: int
    several: bool


def crew_for(
    model: FlatModel,
    examples: Sequence[Examples],
    training: Training,
    draws_globally: bool,
    device: str,
    together: Together,
    another: Callable[[], FlatModel],
) -> Crew:
    """Who computes for clients with such examples on that device, so many jobs together as asked or as pays.

    Several workers each have `another` model like the first: in one module they would be in each other's way.
    """
    where, asked = find_device(device), None if together == "auto" else together
    if where is None:
        count = jobs_together(model, examples[0], training) if together == "auto" else together or 1
        if count == 1 or draws_globally:
            return Crew(None, 1, True)
        try:
            stacked = Stacked(model, torch.device("cpu"), examples, training, False, count, tells=together != "auto")
        except ValueError:  # another function, with others in the place of its parameters
            if together != "auto":
                raise
            return Crew(None, 1, True)
        if together == "auto" and not stacked.is_stacked:
            return Crew(None, 1, True)
        if not stacked.has_kernels:  # vmap calls so many operations that two workers would wait for Python's lock
            return Crew(lambda: stacked, count, False)
        return Crew(lambda: Stacked(another(), torch.device("cpu"), examples, training, False, count), count, True)
    stacked = Stacked(model, where, examples, training, draws_globally, asked)
    return Crew(lambda: stacked, stacked.at_a_time, False)
