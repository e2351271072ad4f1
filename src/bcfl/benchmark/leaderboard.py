"""From kept results to tables: who loses how much where, with intervals over sites, and who is better than whom."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bcfl.benchmark.contestants import ALONE, CONTESTANTS
from bcfl.benchmark.measures import (
    Difference,
    critical_difference,
    difference,
    interval,
    mean,
    mean_ranks,
    share_that_gains,
    worst_tenth,
)
from bcfl.benchmark.tasks import Task, all_tasks

REFERENCES = ("bcfl", "fedavg")  # what others are compared with: the first of these that there is
Losses = list[float | None]
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    """What a contestant comes to on a task."""

    loss: Difference  # the mean over sites of the held-out loss per row, with its interval
    worst: float  # over the worst tenth of the sites
    measure: float | None  # the task's own, mean over sites
    gains: float | None  # the share of the sites that lose less than alone
    against: Difference | None  # to the reference: below zero this one is better
    failed: int  # sites for which it has no finite number
    seconds: float
    local_steps: int | None
    megabytes: float
    calibration: Mapping[str, float]
    membership: Mapping[str, float] | None


@dataclass(frozen=True)
class Row:
    contestant: str
    cells: tuple[Cell | None, ...]  # as the board's tasks
    rank: float | None  # mean over the board's natural tasks, of those who did all of them

    def verdicts(self, verdict: str) -> int:
        """On how many tasks it is better, worse or neither than the reference."""
        return sum(cell is not None and cell.against is not None and cell.against.verdict == verdict
                   for cell in self.cells)  # fmt: skip


@dataclass(frozen=True)
class Board:
    """All contestants with one model, tuned or not, on sites that they were trained on or on newcomers."""

    model: str
    tuned: bool
    newcomers: bool
    tasks: tuple[str, ...]
    rows: tuple[Row, ...]  # best mean rank first
    reference: str
    ranked_tasks: int
    ranked: int  # contestants

    @property
    def title(self) -> str:
        names = {"linear": "linear model", "network": "small network"}
        return names.get(self.model, self.model) + ", tuned" * self.tuned + ", new sites" * self.newcomers

    @property
    def critical_difference(self) -> float | None:
        """How far two ranks must be apart; None where too few are ranked."""
        return (
            critical_difference(self.ranked, self.ranked_tasks) if self.ranked > 1 and self.ranked_tasks > 1 else None
        )

    def task(self, name: str) -> Task:
        return all_tasks()[name]


def boards(records: Iterable[Record]) -> list[Board]:
    """A board for each model, tuned and not, of known sites and new ones, of what there are results of."""
    by_board: dict[tuple[bool, str, bool], list[Record]] = {}
    for record in records:
        if record["task"] in all_tasks():
            by_board.setdefault((record["newcomers"], record["model"], record["tuned"]), []).append(record)
    return [_board(*which, found) for which, found in sorted(by_board.items())]


def _board(newcomers: bool, model: str, tuned: bool, records: Sequence[Record]) -> Board:
    table: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        table.setdefault((record["contestant"], record["task"]), []).append(record)
    present = {record["contestant"] for record in records}
    tasks = tuple(name for name in all_tasks() if any(task == name for _, task in table))
    names = [*(name for name in CONTESTANTS if name in present), *sorted(present - set(CONTESTANTS))]
    reference = next((name for name in REFERENCES if name in present), names[0])
    rows = {name: tuple(_cell(table, name, task, reference) for task in tasks) for name in names}
    ranks, ranked_tasks = _ranks(rows, tasks)
    ordered = sorted(names, key=lambda name: (ranks.get(name, float("inf")), names.index(name)))
    sorted_rows = tuple(Row(name, rows[name], ranks.get(name)) for name in ordered)
    return Board(model, tuned, newcomers, tasks, sorted_rows, reference, ranked_tasks, len(ranks))


def _ranks(rows: Mapping[str, Sequence[Cell | None]], tasks: Sequence[str]) -> tuple[dict[str, float], int]:
    """Mean ranks on natural tasks of the contestants that did all of them, and how many tasks these are."""
    natural = [place for place, task in enumerate(tasks) if not all_tasks()[task].control]
    losses = {
        name: {tasks[place]: float("inf") if cell.failed else cell.loss.mean
               for place in natural if (cell := cells[place]) is not None}
        for name, cells in rows.items()
    }  # fmt: skip
    complete = {name: of for name, of in losses.items() if natural and len(of) == len(natural)}
    return mean_ranks(complete), len(natural) if complete else 0


def _cell(table: Mapping[tuple[str, str], Sequence[Record]], name: str, task: str, reference: str) -> Cell | None:
    if (name, task) not in table:
        return None
    records = table[name, task]
    draws = [record["draw"] for record in records]
    losses = losses_of(records)
    loss = interval(losses)
    worst = worst_tenth(losses)
    if loss is None or worst is None:
        return None
    alone, other = (_shared(table.get((one, task), ()), draws) for one in (ALONE, reference))
    measure = [mean(record[all_tasks()[task].measure]) for record in records]
    return Cell(
        loss=loss,
        worst=worst,
        measure=mean(measure),
        gains=share_that_gains(losses, alone) if alone and name != ALONE else None,
        against=difference(losses, other) if other and name != reference else None,
        failed=sum(loss is None for loss in losses),
        seconds=sum(record["seconds"] for record in records) / len(records),
        local_steps=records[0]["local_steps"],
        megabytes=sum(record["bytes_down"] + record["bytes_up"] for record in records) / len(records) / 1e6,
        calibration=records[0]["calibration"],
        membership=records[0]["membership"],
    )


def _shared(records: Sequence[Record], draws: Sequence[int]) -> Losses:
    """The losses over the same draws; none, if one of them is missing."""
    found = [record for record in records if record["draw"] in draws]
    return losses_of(found) if len(found) == len(draws) else []


def losses_of(records: Sequence[Record]) -> Losses:
    """Each site's loss, the mean over the draws; None where one of them has no finite number."""
    by_site: dict[str, list[float | None]] = {}
    for record in sorted(records, key=lambda record: record["draw"]):
        for site, loss in zip(record["sites"], record["nll"], strict=True):
            by_site.setdefault(site, []).append(loss)
    return [None if None in found else float(np.mean(found)) for found in by_site.values()]  # type: ignore[arg-type]
