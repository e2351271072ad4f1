"""Why a row is below the paper's: sentences that are bound to the very runs about which they were written."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from measured import USUAL, Row, setting_of


@dataclass(frozen=True)
class Reason:
    """What is known of a row; once further runs have joined it, somebody has to look whether that is still true."""

    problem: str  # as headings name it
    method: str
    seeds: list[int]
    why: str
    settings: Mapping[str, Any] = field(default_factory=dict)  # section.key -> value

    def fits(self, problem: str, row: Row) -> bool:
        wanted = {**USUAL, **self.settings}  # what the runs have where the reason does not say otherwise
        return (
            (self.problem, self.method, set(self.seeds)) == (problem, row.method, row.seeds)
            and all(setting_of(row.runs[0], key) == value for key, value in wanted.items())
        )  # fmt: skip


def read_reasons(text: str) -> list[Reason]:
    return [Reason(**entry) for entry in tomllib.loads(text).get("reason", [])]


def reason_of(problem: str, row: Row, reasons: Iterable[Reason]) -> str:
    return next((reason.why.strip() for reason in reasons if reason.fits(problem, row)), "Why is not known yet.")
