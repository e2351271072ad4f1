"""Those who follow a run: what measures, warns and stores is told of its rounds as a progress bar or a tracker is.

Observers are told in their order. `Metrics` comes first, as it completes the record that all others are given, and
`Store` before whatever a caller brings, so that a round which somebody has heard of is on disk.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from bcfl.association.hypotheses import align
from bcfl.association.membership import written
from bcfl.belief.gaussian import distinct
from bcfl.belief.heads import Heads
from bcfl.engines.heap import physical_memory
from bcfl.federation import Hypotheses, Serving, heads_in, served
from bcfl.predict.metrics import agreement, summarise
from bcfl.predict.predictors import mixtures
from bcfl.runs.course import Course
from bcfl.runs.problem import Split
from bcfl.runs.records import PACKED_FROM, rows_to_json
from bcfl.runs.settings import Config
from bcfl.runs.store import RunFolder

BELIEFS_SHARE = 0.8  # of the machine's memory: the rest is for data and for trainings under way

logger = logging.getLogger(__name__)


class Observer(Protocol):
    """Somebody who follows a run; a subclass says only what it wants to hear of. What it raises stops the run."""

    def started(self, config: Config, data: Split, first_round: int) -> None:
        """Rounds follow, `first_round` first: a run that is complete is only read, and tells nothing of the kind."""
        return

    def round_done(self, record: dict[str, Any], seconds: float) -> None:
        """A round is done, `seconds` after it began; its record is the line that rounds.jsonl has of it."""
        return

    def ended(self) -> None:
        """All rounds are done."""
        return

    def failed(self, error: BaseException) -> None:
        """The run stops in the middle, by this; whatever is kept of it can be resumed."""
        return


@contextlib.contextmanager
def told_the_end(observers: Sequence[Observer]) -> Iterator[None]:
    """Observers hear how the block ends: that all rounds are done, or what has stopped it."""
    try:
        yield
        for observer in observers:
            observer.ended()
    except BaseException as error:
        for observer in observers:
            observer.failed(error)
        raise


@dataclass
class Metrics(Observer):
    """The observer that adds to each round's record how good its models and its associations are."""

    course: Course[Any]
    before: Tensor | None = None  # (client,) -> cluster, a round ago

    def started(self, config: Config, data: Split, first_round: int) -> None:
        self.before = self.course.state.hypotheses.assignment[0]

    def round_done(self, record: dict[str, Any], seconds: float) -> None:
        course, experiment, index = self.course, self.course.config.experiment, record["round"]
        assert self.before is not None
        record |= _associations(course.state.hypotheses, self.before, course.problem.data.group_in(index))
        self.before = course.state.hypotheses.assignment[0]
        if index % experiment.evaluate_every == 0 or index == experiment.rounds:
            record |= self._evaluated(heads_in(course.state) or served(course.state), index)
            if experiment.mixture:
                record["mixture"] = self._evaluated(mixtures(course.state, course.info), index)

    def _evaluated(self, serving: Serving | Heads, index: int) -> dict[str, Any]:
        course = self.course
        who = course.present if course.config.experiment.evaluate == "present" else None
        if isinstance(serving, Heads):
            evaluations = course.engine.evaluate_heads(serving, index, who)
        else:
            evaluations = course.engine.evaluate(serving[0].mean, serving[1], index, who)
        found = summarise(evaluations, course.engine.layout.likelihood)
        if len(evaluations) < PACKED_FROM:
            return found
        return {key: value for key, value in found.items() if not key.startswith("client_")}  # megabytes each round


def _associations(state: Hypotheses, before: Tensor, group: Tensor | None) -> dict[str, Any]:
    """How the best hypothesis' assignment stands: what changed, and whether it agrees with the true groups."""
    now = state.assignment[0]
    num_clusters = max(state.num_clusters, int(max(now.max(), before.max())) + 1)
    same_numbers = align(torch.stack([before, now]), num_clusters)
    return {
        "num_hypotheses": int(state.log_weight.isfinite().sum()),  # without what is only proposed
        "num_beliefs": len(state.models),
        "changes": int((same_numbers[0] != same_numbers[1]).sum()),
        "ari": None if group is None else agreement(now, group),
    }


@dataclass(frozen=True)
class Warnings(Observer):
    """The observer that tells what a user should know at once: hardly any room, and rounds that teach nothing."""

    course: Course[Any]

    def started(self, config: Config, data: Split, first_round: int) -> None:
        if first_round == 1:
            self._tell_rejected(self.course.history[0])  # in a warm-up
        models, there = self.course.state.hypotheses.models, physical_memory()
        needed = 2 * (models.mean.nbytes + distinct(models.precision).nbytes)
        if there is not None and needed > BELIEFS_SHARE * there:  # the system would end the run without a word
            logger.warning(f"{len(models)} beliefs before and after a round take {needed / 1e9:.1f} GB of this "
                           f"machine's {there / 1e9:.1f}: take a smaller model, or fewer clusters or hypotheses"
                           )  # fmt: skip

    def round_done(self, record: dict[str, Any], seconds: float) -> None:
        self._tell_rejected(record)

    def ended(self) -> None:
        history = self.course.history
        if not any(map(_learned, history)):  # figures of first models would look like results
            trainings = sum(record["work"]["trainings"] for record in history)
            raise ValueError(f"nothing was ever learned: none of {trainings} trainings in {history[-1]['round']} "
                             "rounds stayed finite")  # fmt: skip

    def _tell_rejected(self, record: Mapping[str, Any]) -> None:
        """The first round in which trainings went off is told, with what to try; one that taught nothing, each time."""
        work, said = record["work"], []
        first = not any(past["work"]["rejected"] for past in self.course.history[: record["round"]])
        if record["round"] and not _learned(record):
            said.append("nothing was learned")
        if work["rejected"] and (said or first):
            said.append(f"{work['rejected']} of {work['trainings']} trainings did not stay finite and are left out")
        if said and first:
            remedy = "inputs of another scale, or a smaller training.learning_rate"
            if self.course.config.method.get("fusion") == "product":  # of a cluster of n it multiplies the precision
                # by n(1 − forgetting) each round
                remedy += ", or method.forgetting near 1: with method.fusion product precisions may grow without end"
            said.append(f"try {remedy}")
        if said:
            logger.warning(f"round {record['round']}: {': '.join(said)}")


def _learned(record: Mapping[str, Any]) -> bool:
    work = record["work"]
    if not work["trainings"] and not work["late"]:  # a method that asks for sums, not for trainings
        return bool(work["scalars_up"] > 0 and not work["rejected"])
    return bool(work["trainings"] > work["rejected"])


@dataclass(frozen=True)
class Store(Observer):
    """The observer that keeps a run in its folder: a line for each round, checkpoints, and at the end the summary."""

    course: Course[Any]
    folder: RunFolder
    is_new: bool  # nothing of the run is on disk yet, not even its round 0

    def started(self, config: Config, data: Split, first_round: int) -> None:
        if self.is_new:
            self.folder.append("rounds.jsonl", self.course.history[0])
            self.folder.save_checkpoint(self.course.checkpoint())

    def round_done(self, record: dict[str, Any], seconds: float) -> None:
        info, experiment, index = self.course.info, self.course.config.experiment, record["round"]
        assert info is not None
        associations = {
            "round": index,
            "parent": info.parent.tolist(),
            "log_weight": info.log_weight.tolist(),
            "assignment": rows_to_json(info.assignment),
        }
        if info.events is not None:
            associations["events"] = list(info.events)
        if info.probability is not None:
            associations["probability"] = written(info.probability, info.parent)
        self.folder.append("rounds.jsonl", record)
        self.folder.append("associations.jsonl", associations)
        self.folder.append("timings.jsonl", {"round": index, "seconds": seconds})
        if index % experiment.checkpoint_every == 0 or index == experiment.rounds:
            self.folder.save_checkpoint(self.course.checkpoint())

    def ended(self) -> None:
        if not self.folder.complete:
            self.folder.write("result.json", self.course.result(self.folder.path).summary())
