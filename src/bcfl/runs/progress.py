"""What people see while runs go on: bars on a terminal, plain lines where there is none."""

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from bcfl.console import console_for
from bcfl.likelihood.measures import TITLES
from bcfl.runs.observers import Observer
from bcfl.runs.pace import Outlook, Pace
from bcfl.runs.planning import Planned
from bcfl.runs.problem import Split
from bcfl.runs.settings import Config

SECONDS_BETWEEN_LINES = 5.0  # of one run
SECONDS_BETWEEN_LINES_OF_A_SWEEP = 30.0  # which may go on for days


def _bars(console: Console, *more: ProgressColumn) -> Progress:
    name, note = (TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[note]}"))
    return Progress(name, BarColumn(), MofNCompleteColumn(), *more, note, console=console)


class LiveProgress(Observer):
    """A bar with round, accuracy, changes and time left, on a terminal and in a notebook; elsewhere plain `lines`."""

    def __init__(self, *, lines: bool = True) -> None:
        self._console, self._lines = console_for(stderr=True), lines
        self._bar: Progress | None = None
        self._rounds = 0
        self._last_line = 0.0

    def started(self, config: Config, data: Split, first_round: int) -> None:
        self._rounds = config.experiment.rounds
        name = f"{config.method['name']} on {data.description}"
        if self._console.is_terminal or self._console.is_jupyter:
            self._bar = _bars(self._console, TimeRemainingColumn())
            self._bar.start()
            self._task = self._bar.add_task(name, total=self._rounds, completed=first_round - 1, note="")
        elif self._lines:
            self._console.print(
                f"{name}, {data.num_clients} clients, rounds {first_round} to {self._rounds}", soft_wrap=True
            )

    def round_done(self, record: dict[str, Any], seconds: float) -> None:
        last = record["round"] == self._rounds
        if self._bar:
            self._bar.update(self._task, completed=record["round"], note=_note(record))
        elif self._lines and (last or time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES):
            self._last_line = time.monotonic()
            self._console.print(f"round {record['round']}/{self._rounds}  {_note(record)}", soft_wrap=True)

    def ended(self) -> None:
        if self._bar:
            self._bar.stop()

    def failed(self, error: BaseException) -> None:
        self.ended()


class SweepProgress:
    """One bar for all runs, with the time left, and one for the run at hand; plain lines where there is no terminal."""

    def __init__(self, runs: Sequence[Planned], names: Sequence[str]):
        self._pace = Pace([(run.config, run.path) for run in runs])
        self._name_of = {run.path: f"{name} seed {run.config.experiment.seed}"
                         for run, name in zip(runs, names, strict=True)}  # fmt: skip
        self._number_of = {run.path: f"[{i}/{len(runs)}]" for i, run in enumerate(runs, 1)}
        self._console = console_for(stderr=True)
        self._bars: Progress | None = None
        self._at_once = 1
        self._last_line = 0.0

    def __enter__(self) -> "SweepProgress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars:
            self._bars.stop()

    def begin(self, run: Planned, at_once: int) -> Observer:
        self._at_once = at_once
        return _RunOfSweep(self, f"{self._number_of[run.path]} {self._name_of[run.path]}")

    def wait(self, at_once: int) -> None:
        self._at_once = at_once
        self.show("waiting for what other processes have in hand", 0, 0, "", False)

    def show(self, run: str, done: int, rounds: int, note: str, line_now: bool) -> None:
        """The state of the run at hand and of all of them together."""
        outlook = self._pace.outlook(self._at_once)
        if not self._console.is_terminal:
            if line_now or time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES_OF_A_SWEEP:
                self._last_line = time.monotonic()
                at_hand = f"{run}, round {done}/{rounds}  {note}" if rounds else run
                self._console.print(f"{at_hand}  |  {_all_rounds(outlook)}", soft_wrap=True)
            return
        if self._bars is None:
            self._bars = _bars(self._console)
            self._all, self._own = (self._bars.add_task("", note="") for _ in range(2))
        whole = f"all, {outlook.runs_done} of {outlook.num_runs} runs done"
        self._bars.update(
            self._all, description=whole, completed=outlook.rounds_done, total=outlook.num_rounds, note=_left(outlook)
        )
        self._bars.update(self._own, description=run, completed=done, total=rounds or None, note=note)
        self._bars.start()  # where it runs already, nothing happens

    def begun(self, run: str, num_clients: int, first_round: int, rounds: int) -> None:
        if self._console.is_terminal:
            self.show(run, first_round - 1, rounds, "", False)
        else:
            self._console.print(f"{run}, {num_clients} clients, rounds {first_round} to {rounds}", soft_wrap=True)


class _RunOfSweep(Observer):
    """The observer that tells a sweep's view of its run."""

    def __init__(self, whole: SweepProgress, name: str):
        self._whole, self._name, self._rounds = whole, name, 0

    def started(self, config: Config, data: Split, first_round: int) -> None:
        self._rounds = config.experiment.rounds
        self._whole.begun(self._name, data.num_clients, first_round, self._rounds)

    def round_done(self, record: dict[str, Any], seconds: float) -> None:
        last = record["round"] == self._rounds
        self._whole.show(self._name, record["round"], self._rounds, _note(record), last)


def _note(record: dict[str, Any]) -> str:
    lead = record.get("lead", {}).get("measure", "accuracy")
    parts = [f"{TITLES[lead]} {record[lead]:.3f}"] if lead in record else []
    return "  ".join([*parts, f"{record['changes']} moved"])


def _all_rounds(outlook: Outlook) -> str:
    return (
        f"all: {outlook.runs_done} of {outlook.num_runs} runs, "
        f"{outlook.rounds_done:,} of {outlook.num_rounds:,} rounds, {_left(outlook)}"
    )


def _left(outlook: Outlook) -> str:
    """The time left in words, and how much of it is a guess."""
    if outlook.seconds_left is None:
        return "time left not known yet"
    guessed = f", {outlook.guessed} runs' share guessed from other methods" if outlook.guessed else ""
    return f"about {_words(outlook.seconds_left)} left{guessed}"


def _words(seconds: float) -> str:
    minutes = round(seconds / 60)
    if seconds < 120:
        return f"{seconds:.0f} s"
    if minutes < 90:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes / 60 / 24:.1f} days"
