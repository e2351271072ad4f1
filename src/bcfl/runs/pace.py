"""How far many runs have come and how long they still take, learned from the rounds that are done.

All of it is read from the run folders, so that rounds which another process does count as well.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from bcfl.files import GrowingLog
from bcfl.methods import method_of
from bcfl.runs.settings import Config

RECENT = 20  # rounds that tell a run's present pace: the first ones may have more to train, or a busier machine


@dataclass(frozen=True)
class Outlook:
    """Where many runs stand together."""

    runs_done: int
    num_runs: int
    rounds_done: int
    num_rounds: int
    seconds_left: float | None  # None: no round of any of them has been timed yet
    guessed: int  # runs among those to do whose like has not been timed: their pace is a guess from other methods


class Pace:
    """The seconds that a round of each run takes: measured, or measured on its like, or guessed."""

    def __init__(self, runs: Sequence[tuple[Config, Path]]):
        self._runs = runs
        self._kind_of = [_kind(config) for config, _ in runs]
        self._weight_of = [_guessed_weight(config) for config, _ in runs]
        self._seconds_of = [GrowingLog(path / "timings.jsonl", _seconds) for _, path in runs]

    def outlook(self, at_once: int = 1) -> Outlook:
        """Where the runs stand, and the time left while `at_once` of them go on side by side."""
        done = [log.records() for log in self._seconds_of]  # (run, round)
        left = [max(config.experiment.rounds - len(own), 0) for (config, _), own in zip(self._runs, done, strict=True)]
        pace = [fmean(own[-RECENT:]) if own else None for own in done]
        alike: dict[tuple[str, str], list[float]] = defaultdict(list)  # what is known of the same settings
        on_data: dict[str, list[float]] = defaultdict(list)  # and of other methods on the same data, for a weight of 1
        anywhere: list[float] = []
        for kind, weight, known in zip(self._kind_of, self._weight_of, pace, strict=True):
            if known is not None:
                alike[kind].append(known)
                on_data[kind[0]].append(known / weight)
                anywhere.append(known / weight)
        total, guessed = 0.0, 0
        for kind, weight, known, rounds in zip(self._kind_of, self._weight_of, pace, left, strict=True):
            if rounds and known is None and kind not in alike:
                guessed += 1
                known = weight * fmean(on_data.get(kind[0]) or anywhere) if anywhere else 0.0
            total += rounds * (fmean(alike[kind]) if known is None else known) if rounds else 0.0
        return Outlook(
            runs_done=sum(rounds == 0 for rounds in left),
            num_runs=len(left),
            rounds_done=sum(map(len, done)),
            num_rounds=sum(config.experiment.rounds for config, _ in self._runs),
            seconds_left=total / at_once if anywhere or not any(left) else None,
            guessed=guessed,
        )


def _seconds(line: bytes) -> float:
    """What a finished round took."""
    return float(json.loads(line)["seconds"])


def _kind(config: Config) -> tuple[str, str]:
    """The data and how they are learned from, and the method: runs of one kind differ in their seeds alone."""
    values = config.as_dict()
    values["data"].pop("seed")
    values["experiment"] = {key: values["experiment"][key] for key in ("clients_per_round", "evaluate_every")}
    method = values.pop("method")
    return json.dumps(values, sort_keys=True), json.dumps(method, sort_keys=True)


def _guessed_weight(config: Config) -> int:
    """How often a method may train its clients in a round, at most: once for each hypothesis that it keeps."""
    method = method_of(config.method)
    return max(int(getattr(method, name, 1)) for name in ("max_hypotheses", "max_stories"))
