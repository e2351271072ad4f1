"""What the server's log tells of a federation at work, by its clients' names: what a run of hours looks like from afar.

Who is waited for, who comes and who leaves is told where it is seen: `bcfl.engines.flower.roster`.
"""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bcfl.runs.observers import Observer
from bcfl.runs.problem import Split
from bcfl.runs.settings import Config
from bcfl.runs.store import RunFolder

log = logging.getLogger("bcfl")


@dataclass
class Logbook(Observer):
    """A line for each round, with what it took and, where clients were tested, how good the models are."""

    out: Path
    num_rounds: int = 0

    def started(self, config: Config, data: Split, first_round: int) -> None:
        self.num_rounds = config.experiment.rounds
        method, folder = config.method["name"], self.out.resolve()
        log.info("%s: rounds %s to %s, kept in %s", method, first_round, self.num_rounds, folder)

    def round_done(self, record: dict[str, Any], seconds: float) -> None:
        tested = [one for one in record.get("client_accuracy") or () if one is not None]
        quality = f"accuracy {record['accuracy']:.3f} over {len(tested)} tested clients, " if tested else ""
        log.info("round %s of %s: %s%.1f s", record["round"], self.num_rounds, quality, seconds)


@contextlib.contextmanager
def told(out: Path) -> Iterator[None]:
    """All that bcfl says of the run in here is in the process's log, and in the end how it ended and goes on."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
        log.info("the run is complete: see it with `bcfl report %s`", out.resolve())
    except Exception as error:
        ways_on = getattr(error, "__notes__", [])
        begun = RunFolder(out).has("rounds.jsonl") and not RunFolder(out).complete
        if begun and not ways_on:
            ways_on = ["with the same settings and folder it goes on from the last round that was kept"]
        log.error("the run has stopped: %s", "; ".join([str(error), *ways_on]))
        raise
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
