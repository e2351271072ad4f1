"""A grid without a network: messages go through Flower's own serialisation, straight into the ClientApp."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from bcfl.deploy import folder
from bcfl.deploy.app import client, server
from bcfl.runs.loop import load_result
from bcfl.runs.result import Result
from bcfl.runs.settings import Config

FIRST_NODE = 1000
Tamper = Callable[[Message, Message], Message | None]  # (question, answer) -> the answer that arrives, if any


def when(change: Callable[[Message], Message | None], **wanted: Any) -> Tamper:
    """Changes the answers to questions of that `message` type, client, round or kind, and no others."""

    def tamper(question: Message, answer: Message) -> Message | None:
        said = {"message": question.metadata.message_type, "node": question.metadata.dst_node_id, **settings(question)}
        return change(answer) if all(said.get(key) == value for key, value in wanted.items()) else answer

    return tamper


class InProcessGrid(Grid):
    """The unchanged apps, with nodes that answer at once; `tamper` may change, drop or delay what they say."""

    def __init__(self, config: Config, out: Path, num_nodes: int, **deploy: Any):
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        terms = {"num_clients": num_nodes, "wait": 0.0, "deadline": 0.3, "out": str(out), **deploy}
        self.run_config, self.out = folder.run_config(config, terms), out
        self.tamper: Tamper = lambda question, answer: answer
        self.contexts = {
            FIRST_NODE + i: Context(1, FIRST_NODE + i, {"partition-id": i}, RecordDict(), self.run_config)
            for i in range(num_nodes)
        }
        self.offline: set[int] = set()
        self.asked: list[Message] = []  # the questions so far
        self.late: list[Message] = []  # delivered with whatever is pulled next
        self._ids = itertools.count(1)
        self._replies: dict[str, Message] = {}

    def serve(self, tamper: Tamper | None = None) -> Result:
        """The result of the whole run."""
        self.tamper = tamper or self.tamper
        server(self, Context(1, 1, {}, RecordDict(), self.run_config))
        return load_result(self.out)

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in self.contexts if node not in self.offline]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._deliver(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Sequence[Message]:
        late, self.late = self.late, []
        return late + [self._replies.pop(one) for one in message_ids if one in self._replies]

    def _deliver(self, message: Message) -> str:
        name = f"message-{next(self._ids)}"
        question = _over_the_wire(message, name)
        self.asked.append(question)
        context = self.contexts[question.metadata.dst_node_id]
        if question.metadata.dst_node_id in self.offline:
            return name
        try:
            answer = client(question, context)
        except Exception as error:  # a SuperNode, too, turns whatever its app raises into an error reply
            answer = Message(Error(2, str(error)), reply_to=question)
        answer.metadata.__dict__["_message_id"] = f"reply-{name}"
        arrived = self.tamper(question, answer)
        if arrived is not None:
            self._replies[name] = _over_the_wire(arrived, f"reply-{name}")
        return name


def _over_the_wire(message: Message, name: str) -> Message:
    message.metadata.__dict__["_message_id"] = name
    contents = {key: part.deflate() for key, part in get_all_nested_objects(message).items()}
    arrived: Any = inflate_object_from_contents(message.object_id, contents)
    arrived.metadata.__dict__["_message_id"] = name
    return arrived  # type: ignore[no-any-return]


def federate(config: Config, num_nodes: int, out: Path, tamper: Tamper | None = None, **deploy: Any) -> Result:
    """The result of the unchanged apps on an in-process grid."""
    return InProcessGrid(config, out, num_nodes, **deploy).serve(tamper)


def settings(message: Message) -> ConfigRecord:
    return message.content.config_records["ask"]
