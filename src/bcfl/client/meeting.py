"""Tasks that are played side by side, so that what they ask for at the same time can be answered together.

A task is ordinary code that knows nothing of the others: where it needs a computation it calls `Meeting.ask` and gets
the answer. Each has a thread of its own, but only one thread ever runs, in the order of the tasks: a task stops where
it asks, and goes on when all others have asked or ended. So nothing depends on timing, and nothing needs a lock.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")
Q = TypeVar("Q")


class Meeting(Generic[Q]):
    """Plays tasks, at most `size` at a time; `answer` is given the questions of all that wait for an answer."""

    def __init__(self, answer: Callable[[Sequence[Q]], Sequence[Any]], size: int):
        self._answer, self._size = answer, size
        # One core is enough for each, as only one ever runs; by default each would keep a pool for all cores.
        self._threads = ThreadPoolExecutor(size, "bcfl-client", initializer=partial(torch.set_num_threads, 1))
        # What the running task says last: a question with the place for its answer, or None when it has ended.
        self._said: SimpleQueue[tuple[Q, Future[Any]] | None] = SimpleQueue()

    def close(self) -> None:
        self._threads.shutdown()

    def ask(self, question: Q) -> Any:
        """The answer to a question; called by a task."""
        answer: Future[Any] = Future()
        self._said.put((question, answer))
        return answer.result()

    def stream(self, tasks: Iterable[Callable[[], T]]) -> Iterator[T]:
        """The results of the tasks, in their order."""
        rest = iter(tasks)
        while group := list(islice(rest, self._size)):
            yield from self._play(group)

    def _play(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        results: list[Future[T]] = []
        waiting: list[tuple[Q, Future[Any]]] = []
        num_running = 0

        def listen() -> None:
            nonlocal num_running
            said = self._said.get()
            num_running -= 1
            if said is not None:
                waiting.append(said)

        try:
            for task in tasks:
                num_running += 1
                results.append(self._threads.submit(self._until_its_end, task))
                listen()
            while waiting:
                answers = self._answer([question for question, _ in waiting])
                for (_, place), answer in zip(waiting[:], answers, strict=True):
                    num_running += 1
                    del waiting[0]
                    place.set_result(answer)
                    listen()
        except BaseException as error:  # an interrupt too: threads that wait for ever would keep the program alive
            while num_running or waiting:
                while waiting:
                    num_running += 1
                    waiting.pop()[1].set_exception(error)
                listen()
            raise
        return [result.result() for result in results]

    def _until_its_end(self, task: Callable[[], T]) -> T:
        try:
            return task()
        finally:
            self._said.put(None)
