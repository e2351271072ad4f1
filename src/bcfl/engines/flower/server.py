"""The server's side: an engine like the simulator, whose clients are behind Flower's grid."""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError
from torch import Tensor

from bcfl.client import trainer as local
from bcfl.client.client import layout_of
from bcfl.client.trainer import Evaluation, Training
from bcfl.engines.flower.privacy import Releases
from bcfl.engines.flower.questions import FlowerClients
from bcfl.engines.flower.wire import (
    DESCRIBE,
    DOUBLE,
    EVALUATE,
    INT,
    arrays_of,
    finite,
    list_of,
    one_line,
    read_array,
    settings_of,
    to_array,
    whole_number,
)
from bcfl.engines.simulator import Participation
from bcfl.federation import Mixture, Work
from bcfl.model.flat import FlatModel, ModelFactory, build

T = TypeVar("T")
log = logging.getLogger("bcfl")
POLL = 0.2  # seconds between two looks for answers
MOST_NOISES = 100  # of a client's privacy report
UNPACKING = (DecodeError, ValueError, TypeError, KeyError)  # what bytes of a sender's choice can lead to


@dataclass(frozen=True)
class Terms:
    """[deploy] the terms on which a federation works together; none of them changes a sound answer."""

    num_clients: int
    min_share: float = 0.5  # of the clients asked: with fewer answers the run stops, to be resumed
    deadline: float = 600.0  # seconds for the answers to one question
    wait: float = 120.0  # seconds to wait for clients before a round that has too few of them
    message_bytes: int = 2**28  # a larger set of models is sent in several messages
    model_bytes: int = 2**30  # a larger model is refused

    def check(self) -> None:
        rules = {
            "num_clients": (self.num_clients >= 1, "≥ 1"),
            "min_share": (0 < self.min_share <= 1, "in (0, 1]"),
            "deadline": (self.deadline > 0, "> 0"),
            "wait": (self.wait >= 0, "≥ 0"),
            "message_bytes": (self.message_bytes >= 1, "≥ 1"),
            "model_bytes": (self.model_bytes >= 1, "≥ 1"),
        }
        for name, (holds, allowed) in rules.items():
            if not holds:
                raise ValueError(f"deploy.{name} must be {allowed}, got {getattr(self, name)}")


@dataclass(frozen=True)
class Sizes:
    """What a client said about the data that it holds from a round on."""

    num_train: int
    num_test: int
    group: int  # −1: it did not say
    first_round: int = 0


@dataclass(frozen=True)
class Member:
    """A client as the server knows it: the node that speaks for it, and what it said about its data."""

    node: int
    num_classes: int
    sizes: Sizes
    later: Sizes | None = None  # where its data change in mid-run: only in simulations

    def sizes_in(self, round_index: int) -> Sizes:
        return self.sizes if self.later is None or round_index < self.later.first_round else self.later


@dataclass(frozen=True)
class Ask:
    """One message to one client."""

    client: int  # −1: not known yet
    node: int
    content: RecordDict
    num_answers: int = 1  # results that are lost if no sound answer comes


class FlowerEngine:
    """The federation behind a Grid; `begin(round)` gives it as a method sees it in that round."""

    def __init__(
        self,
        grid: Grid,
        factory: ModelFactory,
        training: Training,
        seed: int,
        participation: Participation,
        terms: Terms,
    ):
        terms.check()
        self.grid, self.factory, self.training, self.seed = grid, factory, training, seed
        self.participation, self.terms = participation, terms
        self.layout = layout_of(FlatModel(build(factory, seed, "probe")), training)
        if 4 * self.layout.length > terms.model_bytes:
            raise ValueError(
                f"the model takes {4 * self.layout.length} bytes, deploy.model_bytes allows {terms.model_bytes}"
            )
        self.momentum: dict[int, dict[int, Tensor]] = {}  # always empty: clients keep their own
        self.members: dict[int, Member] = {}
        self.privacy: dict[int, tuple[Releases, float]] = {}  # client -> its releases and δ, where it protects its data
        self._online: set[int] = set()
        self._refused: set[int] = set()
        self._meetings = 0
        self._silent: dict[
            int, tuple[int, int]
        ] = {}  # node -> how often it did not answer, the meeting to ask it again
        expected = self._num_joined(0)
        self.meet(expected, expected)

    @property
    def num_clients(self) -> int:
        return self.terms.num_clients

    def group_in(self, round_index: int) -> Tensor | None:
        """The clients' true groups in that round, if all of them told."""  # (client,)
        groups = [self.sizes_in(client, round_index).group for client in range(self.num_clients)]
        return None if min(groups) < 0 else torch.tensor(groups)

    def sizes_in(self, client: int, round_index: int) -> Sizes:
        """What a client holds in that round: nothing, for all that is known, of one that was not met yet."""
        return self.members[client].sizes_in(round_index) if client in self.members else Sizes(0, 0, -1)

    def online(self, client: int) -> bool:
        return client in self.members and self.members[client].node in self._online

    def _num_joined(self, round_index: int) -> int:
        """How many clients belong to the federation by that round."""
        return int(self.participation.joined(self.num_clients, round_index).sum())

    def meet(self, enough: int, expected: int) -> None:
        """See who is there, ask newcomers who they are, and wait until `enough` of the `expected` came, or long."""
        until = time.monotonic() + self.terms.wait
        asked: set[int] = set()  # a newcomer that fails is asked again before a later round, not at once
        self._meetings += 1
        while True:
            self._online = set(self.grid.get_node_ids())
            known = {member.node for member in self.members.values()} | self._refused
            known |= {node for node, (_, again) in self._silent.items() if again > self._meetings}
            newcomers = sorted(self._online - known - asked)
            asked.update(newcomers)
            asks = [Ask(-1, node, RecordDict({"ask": ConfigRecord({"client": -1})})) for node in newcomers]
            for position, member in self.exchange(DESCRIBE, 0, asks, Work(), self._read_member):
                self._welcome(replace(member[1], node=newcomers[position]), member[0])
            present = sum(self.online(client) for client in self.members)
            if present >= enough or time.monotonic() > until:
                break
            time.sleep(POLL)
        if present < self.least(expected):
            raise ConnectionError(f"{present} of {expected} clients are there, "
                                  f"at least {self.least(expected)} are needed (deploy.min_share)")  # fmt: skip

    def least(self, asked: int) -> int:
        """How many of `asked` clients must answer."""
        return max(1, math.ceil(self.terms.min_share * asked - 1e-9))

    def _read_member(self, position: int, content: RecordDict) -> tuple[int, Member]:
        said = settings_of(content, "answer")
        client = whole_number(said, "client", 0, self.num_clients - 1)
        length = whole_number(said, "vector-length", 1, 2**62)
        shapes, layers = (list_of(said, key, str) for key in ("shapes", "layers"))
        if not (shapes and layers):
            raise ValueError("shapes and layers of the model must be told")
        self.layout.refuse_other(length, shapes, layers, "at the client")
        num_classes = whole_number(said, "num-classes", 1, 2**20)
        later = _read_sizes(settings_of(content, "later")) if "later" in content.config_records else None
        return client, Member(0, num_classes, _read_sizes({**said, "round": 0}), later)

    def _welcome(self, member: Member, client: int) -> None:
        if self.online(client):
            # Who came first stays: nobody may push a working client aside by claiming its number.
            self._refused.add(member.node)
            log.warning("node %s says that it is client %s, which is already here: refused", member.node, client)
            return
        self.members[client] = member

    def begin(self, round_index: int) -> FlowerClients:
        expected = self._num_joined(round_index)
        self.meet(self.least(expected), expected)
        return FlowerClients(self, round_index)

    def evaluate(self, models: Tensor, mixtures: Sequence[Mixture], round_index: int = 0) -> list[Evaluation | None]:
        """Each client's mixture on its own test data; None for a client without any, or without a sound answer."""
        joined = self.participation.joined(self.num_clients, round_index)
        tested = [c for c in self.members if joined[c] and self.online(c) and self.sizes_in(c, round_index).num_test]
        needed = max((len(mixtures[c]) for c in tested), default=0) * 4 * self.layout.num_evaluated
        if needed > max(self.terms.message_bytes, self.terms.model_bytes):
            raise ValueError(f"a client's mixture of models takes {needed} bytes, more than deploy.message_bytes and "
                             "deploy.model_bytes allow; switch experiment.mixture off or raise them")  # fmt: skip
        vectors = {
            m: to_array(models[m, : self.layout.num_evaluated]) for m in set().union(*(mixtures[c] for c in tested))
        }
        asks = [
            self.ask(
                c,
                round_index,
                {"shares": list(mixtures[c].values())},
                {f"mean.{i}": vectors[m] for i, m in enumerate(mixtures[c])},
            )
            for c in tested
        ]
        evaluations: list[Evaluation | None] = [None] * self.num_clients

        def read(position: int, content: RecordDict) -> Evaluation:
            return self._read_evaluation(tested[position], round_index, content)

        for position, evaluation in self.exchange(EVALUATE, round_index, asks, Work(), read):
            evaluations[tested[position]] = evaluation
        return evaluations

    def _read_evaluation(self, client: int, round_index: int, content: RecordDict) -> Evaluation:
        arrays, num_classes = arrays_of(content, "answer"), self.members[client].num_classes
        num_test = self.sizes_in(client, round_index).num_test
        confusion = read_array(arrays.get("confusion"), (num_classes, num_classes), INT, "confusion")
        calibration = read_array(arrays.get("calibration"), (local.NUM_BINS, 3), DOUBLE, "calibration")
        total = float(
            finite(read_array(arrays.get("log-likelihood"), (1,), DOUBLE, "log-likelihood"), "log-likelihood")
        )
        brier = float(finite(read_array(arrays.get("brier"), (1,), DOUBLE, "brier"), "brier"))
        if int(confusion.min()) < 0 or int(confusion.max()) > num_test or int(confusion.sum()) != num_test:
            raise ValueError(f"confusion must count the client's {num_test} test examples")
        if not local.FLOOR * num_test <= total <= 0:
            raise ValueError(f"log-likelihood must be between {local.FLOOR:g} and 0 for each test example")
        counted = finite(calibration, "calibration")[:, :1]
        if float(calibration.min()) < 0 or int(counted.sum()) != num_test:
            raise ValueError(f"calibration must count the client's {num_test} test examples")
        if bool((calibration > counted * 1.001 + 1e-6).any()):
            raise ValueError("calibration: confidence and successes must not be above what is counted")
        if not 0 <= brier <= 2.001 * num_test:
            raise ValueError(f"brier must be between 0 and 2 for each of the client's {num_test} test examples")
        return Evaluation(confusion, total, calibration, brier)

    def ask(
        self, client: int, round_index: int, settings: dict[str, Any], arrays: dict[str, Array], num_answers: int = 1
    ) -> Ask:
        record = ConfigRecord({"client": client, "round": round_index, **settings})
        content = RecordDict({"ask": record, "models": ArrayRecord(arrays)})
        return Ask(client, self.members[client].node, content, num_answers)

    def exchange(
        self,
        kind: str,
        round_index: int,
        asks: Sequence[Ask],
        work: Work,
        read: Callable[[int, RecordDict], T],
    ) -> Iterator[tuple[int, T]]:
        """The sound answers, as (position of the question, what `read` makes of it), in the order of their arrival.

        Answers that do not come before the deadline are left out, and so is everything that answers no open question,
        such as a straggler's answer to an earlier one.
        """
        deadline = self.terms.deadline
        messages = [Message(a.content, a.node, kind, ttl=deadline, group_id=str(round_index)) for a in asks]
        sent = list(self.grid.push_messages(messages)) if messages else []
        sent += [""] * (len(asks) - len(sent))
        waiting = {message: position for position, message in enumerate(sent) if message}
        end = time.monotonic() + deadline
        for position, message in enumerate(sent):
            if not message:
                self._leave_out(kind, round_index, asks[position], work, "late", "the message could not be delivered")
        while waiting:
            for reply in self._pull(waiting):
                found = waiting.pop(reply.metadata.reply_to_message_id, None)
                if found is None:
                    continue
                if not reply.has_content():
                    reason = reply.error.reason if reply.has_error() else "an empty answer"
                    self._leave_out(kind, round_index, asks[found], work, "late", f"failed: {reason}")
                    continue
                try:
                    answer = read(found, reply.content)
                except ValueError as error:
                    self._leave_out(kind, round_index, asks[found], work, "rejected", f"answer rejected: {error}")
                    continue
                self._note_privacy(asks[found].client, reply.content)
                yield found, answer
            if waiting and time.monotonic() > end:
                for position in waiting.values():
                    self._leave_out(kind, round_index, asks[position], work, "late", f"no answer in {deadline:g} s")
                return
            if waiting:
                time.sleep(POLL)

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
            delta = report.get("delta")
            if (
                not isinstance(delta, float)
                or not 0 < delta < 1
                or not all(0 < one < math.inf for one in [*noise, *count])
            ):
                raise ValueError("noise and counts must be finite and above 0, delta between 0 and 1")
            if len(noise) > MOST_NOISES:
                raise ValueError(f"it tells of {len(noise)} noises, at most {MOST_NOISES} are added up")
        except ValueError as error:
            log.warning("client %s: its privacy report is unsound: %s", client, one_line(error))
            return
        self.privacy[client] = (dict(zip(noise, count, strict=True)), delta)

    def _leave_out(self, kind: str, round_index: int, ask: Ask, work: Work, count: str, reason: str) -> None:
        setattr(work, count, getattr(work, count) + ask.num_answers)
        who = f"client {ask.client}" if ask.client >= 0 else f"node {ask.node}"
        log.warning("round %s, %s, %s: %s", round_index, kind, who, one_line(reason))
        if kind == DESCRIBE and count == "rejected":
            self._refused.add(ask.node)
        elif kind == DESCRIBE:  # everybody waits for a node that does not answer: it is asked ever more rarely
            times = self._silent.get(ask.node, (0, 0))[0] + 1
            self._silent[ask.node] = times, self._meetings + 2**times

    def require(self, answered: int, asked: int, kind: str, round_index: int) -> None:
        if asked and answered < self.least(asked):
            raise ConnectionError(f"round {round_index}: {answered} of {asked} clients answered {kind}, "
                                  f"at least {self.least(asked)} must (deploy.min_share)")  # fmt: skip


def _read_sizes(said: Mapping[str, Any]) -> Sizes:
    sizes = whole_number(said, "num-train", 1, 2**40), whole_number(said, "num-test", 0, 2**40)
    return Sizes(*sizes, whole_number(said, "group", -1, 2**20), whole_number(said, "round", 0, 2**31))
