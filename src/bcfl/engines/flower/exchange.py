"""Questions on their way to clients and answers on their way back; what goes wrong with one is told in one line."""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError
from pydantic import Field

from bcfl.engines.flower.privacy import Releases
from bcfl.engines.flower.wire import list_of, number_of, one_line
from bcfl.federation import Work

T = TypeVar("T")
log = logging.getLogger("bcfl")
POLL = 0.2  # seconds between two looks for answers
MOST_NOISES = 100  # of a client's privacy report
UNPACKING = (DecodeError, ValueError, TypeError, KeyError)  # what bytes of a sender's choice can lead to


@dataclass(frozen=True)
class Terms:
    """[deploy] the terms on which a federation works together; none of them changes a sound answer."""

    num_clients: Annotated[int, Field(ge=1, le=1_000_000, description="as many clients are waited for and asked")]
    min_share: Annotated[
        float,
        Field(gt=0, le=1, description="of the clients asked: with fewer answers the run stops, to be resumed"),
    ] = 0.5
    deadline: Annotated[float, Field(gt=0, le=1e9, description="seconds for the answers to one question")] = 600.0
    wait: Annotated[
        float, Field(ge=0, le=1e9, description="seconds to wait for clients before a round that has too few of them")
    ] = 120.0
    message_bytes: Annotated[int, Field(ge=1, description="a larger set of models is sent in several messages")] = 2**28
    model_bytes: Annotated[int, Field(ge=1, description="a larger model is refused")] = 2**30

    def least(self, asked: int) -> int:
        """How many of `asked` clients must answer."""
        return max(1, math.ceil(self.min_share * asked - 1e-9))


@dataclass(frozen=True)
class Ask:
    """One message to one client."""

    client: int  # −1: not known yet
    node: int
    content: RecordDict
    num_answers: int = 1  # results that are lost if no sound answer comes


@dataclass
class Questions:
    """Messages of one kind that were sent together, and which of them are not answered yet."""

    kind: str
    round: int
    asks: Sequence[Ask]
    work: Work
    end: float
    waiting: dict[str, int] = field(default_factory=dict)  # message -> position in asks
    rejected: list[Ask] = field(default_factory=list)
    late: list[Ask] = field(default_factory=list)


class Exchange:
    """Everything that server and clients say to each other in a run."""

    def __init__(self, grid: Grid, terms: Terms):
        self.grid, self.terms = grid, terms
        self.names: dict[int, str] = {}  # as the clients call themselves, where they do
        self.privacy: dict[int, tuple[Releases, float]] = {}  # client -> its releases and δ, where it protects its data

    def name(self, client: int) -> str:
        """What the log calls a client: its number stays, since anybody may call himself as he likes."""
        return f"{self.names[client]} (client {client})" if client in self.names else f"client {client}"

    def ask(
        self, kind: str, round_index: int, asks: Sequence[Ask], work: Work, read: Callable[[int, RecordDict], T]
    ) -> Iterator[tuple[int, T]]:
        """The sound answers, as (position of the question, what `read` makes of it), in the order of their arrival.

        Answers that do not come before the deadline are left out, and so is everything that answers no open question,
        such as a straggler's answer to an earlier one.
        """
        questions = self.send(kind, round_index, asks, work)
        while questions.waiting:
            yield from self.hear(questions, read)
            if questions.waiting:
                time.sleep(POLL)

    def send(self, kind: str, round_index: int, asks: Sequence[Ask], work: Work) -> Questions:
        deadline = self.terms.deadline
        questions = Questions(kind, round_index, asks, work, time.monotonic() + deadline)
        messages = [Message(a.content, a.node, kind, ttl=deadline, group_id=str(round_index)) for a in asks]
        sent = list(self.grid.push_messages(messages)) if messages else []
        for position, message in enumerate(sent + [""] * (len(asks) - len(sent))):
            if message:
                questions.waiting[message] = position
            else:
                self._leave_out(questions, position, "late", "the message could not be delivered")
        return questions

    def hear(self, questions: Questions, read: Callable[[int, RecordDict], T]) -> Iterator[tuple[int, T]]:
        """The sound answers that are there now; after the deadline nothing is waited for any more."""
        for reply in self._pull(questions.waiting):
            position = questions.waiting.pop(reply.metadata.reply_to_message_id, None)
            if position is None:
                continue
            ask = questions.asks[position]
            if not reply.has_content():
                reason = reply.error.reason if reply.has_error() else "an empty answer"
                self._leave_out(questions, position, "late", f"failed: {reason}")
                continue
            try:
                if reply.metadata.src_node_id != ask.node:
                    raise ValueError(f"it comes from node {reply.metadata.src_node_id}, which was not asked")
                answer = read(position, reply.content)
            except ValueError as error:
                self._leave_out(questions, position, "rejected", f"answer rejected: {error}")
                continue
            self._note_privacy(ask.client, reply.content)
            yield position, answer
        if time.monotonic() > questions.end:
            for position in questions.waiting.values():
                self._leave_out(questions, position, "late", f"no answer in {self.terms.deadline:g} s")
            questions.waiting.clear()

    def require(self, answered: int, asked: int, kind: str, round_index: int) -> None:
        least = self.terms.least(asked)
        if asked and answered < least:
            raise ConnectionError(f"round {round_index}: {answered} of {asked} clients answered {kind}, "
                                  f"at least {least} must (deploy.min_share)")  # fmt: skip

    def _pull(self, waiting: Iterable[str]) -> list[Message]:
        """The answers that have come; one that cannot even be unpacked, which Flower does here, has not."""
        try:
            return list(self.grid.pull_messages(list(waiting)))
        except UNPACKING:
            replies: list[Message] = []
            for message in list(waiting):
                with contextlib.suppress(*UNPACKING):
                    replies += self.grid.pull_messages([message])
            return replies

    def _note_privacy(self, client: int, content: RecordDict) -> None:
        """Keep what a client says of its own privacy: no result depends on it, but it is added up every round."""
        report = content.config_records.get("privacy")
        if report is None:
            return
        try:
            noise = list_of(report, "noise", float)
            count = list_of(report, "count", int, len(noise))
            if not all(0 < one < math.inf for one in [*noise, *count]):
                raise ValueError("noise and counts must be finite and above 0")
            if len(noise) > MOST_NOISES:
                raise ValueError(f"it tells of {len(noise)} noises, at most {MOST_NOISES} are added up")
            delta = number_of(report, "delta", math.nextafter(0, 1), 1)
        except ValueError as error:
            log.warning("%s: its privacy report is unsound: %s", self.name(client), one_line(error))
            return
        self.privacy[client] = (dict(zip(noise, count, strict=True)), delta)

    def _leave_out(self, questions: Questions, position: int, why: str, reason: str) -> None:
        ask, work = questions.asks[position], questions.work
        if why == "rejected":
            work.rejected += ask.num_answers
            questions.rejected.append(ask)
        else:
            work.late += ask.num_answers
            questions.late.append(ask)
        who = self.name(ask.client) if ask.client >= 0 else f"node {ask.node}"
        log.warning("round %s, %s, %s: %s", questions.round, questions.kind, who, one_line(reason))


def ordered(answers: Iterator[tuple[int, T]], keys: Iterable[int]) -> Iterator[tuple[T] | None]:
    """The answers in the order of their keys, each as soon as it is there; None for those that do not come."""
    ready: dict[int, T] = {}
    for key in keys:
        while key not in ready and (answer := next(answers, None)) is not None:
            ready[answer[0]] = answer[1]
        yield (ready.pop(key),) if key in ready else None
