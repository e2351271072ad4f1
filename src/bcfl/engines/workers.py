"""Persistent one-thread workers that play tasks side by side; a single one is the caller itself.

Workers are threads: torch lets go of the interpreter while it computes, so they scale like processes for real
networks, and a model may be any callable of the user's, a lambda in a notebook included. One task runs in one worker
from beginning to end and results are handed out in the order of the tasks, so nothing depends on how many there are.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from bcfl.models import FlatModel

T = TypeVar("T")


class Workers:
    """So many threads, or the caller itself, each with a model of its own for its tasks to work with."""

    def __init__(self, count: int, make_model: Callable[[], FlatModel]):
        self.count, self._make_model = count, make_model
        self._thread = threading.local()
        self._threads = ThreadPoolExecutor(count, "bcfl-worker", initializer=self._start)
        # One worker shall keep one core busy, not a second one with what becomes of its results: no thread is started.
        self._alone = make_model() if count == 1 else None

    def _start(self) -> None:
        torch.set_num_threads(1)
        self._thread.model = self._make_model()

    def close(self) -> None:
        self._alone = None
        self._threads.shutdown(cancel_futures=True)

    def stream(self, tasks: Iterable[Callable[[FlatModel], T]]) -> Iterator[T]:
        """The results of the tasks, in their order; only a few are ever ahead, so that memory stays bounded."""
        if self.count == 1:
            yield from map(self._run_alone, tasks)
            return
        waiting: deque[Future[T]] = deque()
        for task in tasks:
            waiting.append(self._threads.submit(self._run, task))
            if len(waiting) > 2 * self.count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def _run(self, task: Callable[[FlatModel], T]) -> T:
        return task(self._thread.model)

    def _run_alone(self, task: Callable[[FlatModel], T]) -> T:
        if self._alone is None:
            raise RuntimeError("cannot play tasks after shutdown")
        # As in a fresh thread, whatever the caller has set for its own.
        torch.set_num_threads(1)
        with torch.inference_mode(False), torch.enable_grad():
            return task(self._alone)
