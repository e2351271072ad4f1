"""Who is there: the nodes behind Flower's grid, the clients they speak for, and what these say of their data."""

import logging
import time
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from bcfl.belief.heads import HeadLayout
from bcfl.client.client import Layout
from bcfl.engines.flower.answers import Member, Sizes, read_member
from bcfl.engines.flower.exchange import POLL, Ask, Exchange, Questions
from bcfl.engines.flower.wire import DESCRIBE
from bcfl.engines.participation import Participation
from bcfl.federation import Work

log = logging.getLogger("bcfl")
TELL_EVERY = 30.0  # seconds between two lines about who is still waited for
PAUSE = 1.0  # seconds; a node that failed is asked again after twice as many, then after four times as many …
LONGEST_PAUSE = 600.0
MOST_NAMES = 10  # of those who are waited for, in one line


class Roster:
    """The federation's clients, met as their nodes appear."""

    def __init__(self, exchange: Exchange, layout: Layout, head: HeadLayout | None, participation: Participation):
        self.exchange, self.layout, self.head, self.participation = exchange, layout, head, participation
        self.num_clients = exchange.terms.num_clients
        self.members: dict[int, Member] = {}
        self.node_of: dict[int, int] = {}  # client -> the node that speaks for it
        self._online: set[int] = set()
        self._refused: set[int] = set()
        self._failed: dict[int, tuple[int, float]] = {}  # node -> how often it did not say, when to ask again
        self._calls: list[Questions] = []  # to nodes that have not said yet who they are

    def online(self, client: int) -> bool:
        return client in self.members and self.node_of[client] in self._online

    def sizes_in(self, client: int, round_index: int) -> Sizes:
        """What a client holds in that round: nothing, for all that is known, of one that was not met yet."""
        return self.members[client].sizes_in(round_index) if client in self.members else Sizes(0, 0, -1)

    def joined(self, round_index: int) -> Tensor:
        """Who belongs to the federation by that round."""  # (client,) bool
        return self.participation.joined(self.num_clients, round_index)

    def question(
        self, client: int, round_index: int, settings: dict[str, Any], arrays: dict[str, Array], num_answers: int = 1
    ) -> Ask:
        record = ConfigRecord({"client": client, "round": round_index, **settings})
        content = RecordDict({"ask": record, "models": ArrayRecord(arrays)})
        return Ask(client, self.node_of[client], content, num_answers)

    def meet(self, round_index: int, *, everybody: bool) -> None:
        """See who is there for that round, and wait for those who are missing: as many as must be, or `everybody`.

        A node that appears is asked who it is. One that fails to say is asked again while clients are missing, and
        else ever more rarely: nobody waits for it a second time. After deploy.wait it is seen whether enough came.
        """
        expected = int(self.joined(round_index).sum())
        least = self.exchange.terms.least(expected)
        began = told = time.monotonic()
        self._look_around(ask=True)
        while not self._complete(expected if everybody else least):
            in_time = time.monotonic() <= began + self.exchange.terms.wait
            if not in_time and not any(questions.waiting for questions in self._calls):
                break
            if told == began or time.monotonic() > told + TELL_EVERY:
                told = time.monotonic()
                whom = self._missing(round_index) or "newcomers to say who they are"
                log.info("waiting for %s (deploy.wait: %g s)", whom, self.exchange.terms.wait)
            time.sleep(POLL)
            self._look_around(ask=in_time)
        present = self._num_present()
        if present < least:
            raise ConnectionError(f"{present} of {expected} clients are there, at least {least} are needed "
                                  f"(deploy.min_share); missing: {self._missing(round_index)}")  # fmt: skip

    def _num_present(self) -> int:
        return sum(self.online(client) for client in self.members)

    def _complete(self, enough: int) -> bool:
        """Whether enough are present and nobody is about to say for the first time who he is."""
        first_calls = any(
            questions.asks[position].node not in self._failed
            for questions in self._calls
            for position in questions.waiting.values()
        )
        return self._num_present() >= enough and not first_calls

    def _look_around(self, *, ask: bool) -> None:
        """Who came and who left is known and told; newcomers are asked who they are, and heard."""
        before, self._online = self._online, set(self.exchange.grid.get_node_ids())
        for node in self._online - before:  # whoever comes back is asked at once, though not waited for again
            self._refused.discard(node)
            if node in self._failed:
                self._failed[node] = self._failed[node][0], 0.0
        for client, node in self.node_of.items():
            if (node in before) != (node in self._online):
                what = "is back" if node in self._online else "left: its machine is not connected any more"
                log.info("%s %s", self.exchange.name(client), what)
        if ask:
            self._call_newcomers()
        for questions in self._calls:
            for position, member in self.exchange.hear(questions, self._read_member):
                self._welcome(member, questions.asks[position].node)
            self._refused.update(one.node for one in questions.rejected)
            for one in questions.late:
                times = self._failed.get(one.node, (0, 0.0))[0] + 1
                self._failed[one.node] = times, time.monotonic() + min(PAUSE * 2**times, LONGEST_PAUSE)
            questions.rejected.clear()
            questions.late.clear()
        self._calls = [questions for questions in self._calls if questions.waiting]

    def _call_newcomers(self) -> None:
        now = time.monotonic()
        known = {*self.node_of.values()} | self._refused
        known |= {node for node, (_, again) in self._failed.items() if now < again}
        known |= {questions.asks[position].node for questions in self._calls for position in questions.waiting.values()}
        asks = [
            Ask(-1, node, RecordDict({"ask": ConfigRecord({"client": -1})})) for node in sorted(self._online - known)
        ]
        if asks:
            self._calls.append(self.exchange.send(DESCRIBE, 0, asks, Work()))

    def _missing(self, round_index: int) -> str:
        missing = [c for c in self.joined(round_index).nonzero()[:, 0].tolist() if not self.online(c)]
        more = f" and {len(missing) - MOST_NAMES} more" if len(missing) > MOST_NAMES else ""
        return ", ".join(map(self.exchange.name, missing[:MOST_NAMES])) + more

    def _read_member(self, position: int, content: RecordDict) -> Member:
        return read_member(content, self.layout, self.num_clients)

    def _welcome(self, member: Member, node: int) -> None:
        client = member.client
        if self.online(client):
            # Who came first stays: nobody may push a working client aside by claiming its number.
            self._refused.add(node)
            log.warning("node %s says that it is client %s, which is already here: refused", node, client)
            return
        again = client in self.members
        self.members[client], self.node_of[client] = member, node
        if member.name:
            self.exchange.names[client] = member.name
        sizes = f"{member.sizes.num_train} training and {member.sizes.num_test} test examples"
        log.info("%s %s, with %s", self.exchange.name(client), "is back" if again else "joined", sizes)
