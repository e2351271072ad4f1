"""One-thread workers that play tasks side by side; the caller is one of them.

Workers are threads: torch lets go of the interpreter while it computes, so they scale like processes for real
networks, and a model may be any callable of the user's, a lambda in a notebook included. One task runs in one worker
from beginning to end and results are handed out in the order of the tasks, so nothing depends on how many there are.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

N = TypeVar("N")
T = TypeVar("T")


@dataclass
class Offer(Generic[N, T]):
    """A task for whoever is first to take it; to cancel its result is to take the task."""

    task: Callable[[N], T]
    result: Future[T]


class Workers(Generic[N]):
    """The caller and so many threads less one, each with a network of its own for its tasks to work with.

    The caller plays tasks while it waits, and does with their results what it likes in between. A thread more, for the
    caller alone, would take from the others' cores what those results cost, and the last of them would be late by it.
    """

    def __init__(self, count: int, make_network: Callable[[], N]):
        self.count, self._make_network = count, make_network
        self._network: N | None = make_network()
        self._thread = threading.local()
        self._others = ThreadPoolExecutor(count - 1, "bcfl-worker", initializer=self._start) if count > 1 else None

    def _start(self) -> None:
        torch.set_num_threads(1)
        self._thread.network = self._make_network()

    def close(self) -> None:
        self._network = None
        if self._others is not None:
            self._others.shutdown(cancel_futures=True)

    def stream(self, tasks: Iterable[Callable[[N], T]]) -> Iterator[T]:
        """The results of the tasks, in their order; only a few are ever ahead, so that memory stays bounded."""
        offers: deque[Offer[N, T]] = deque()
        try:
            for task in tasks:
                offers.append(self._offer(task))
                if len(offers) > 2 * self.count:
                    yield self._first_result(offers)
            while offers:
                yield self._first_result(offers)
        finally:  # nobody wants what is left of an abandoned stream
            for offer in offers:
                offer.result.cancel()

    def _offer(self, task: Callable[[N], T]) -> Offer[N, T]:
        return Offer(task, Future() if self._others is None else self._others.submit(self._play_there, task))

    def _first_result(self, offers: deque[Offer[N, T]]) -> T:
        while not (result := offers[0].result).done() or result.cancelled():  # the latter only by close()
            taken = next((offer for offer in offers if offer.result.cancel()), None)
            if taken is None:  # others are at work on all of them
                break
            taken.result = self._play_here(taken.task)
        return offers.popleft().result.result()

    def _play_there(self, task: Callable[[N], T]) -> T:
        return task(self._thread.network)

    def _play_here(self, task: Callable[[N], T]) -> Future[T]:
        if self._network is None:
            raise RuntimeError("cannot play tasks after shutdown")
        played: Future[T] = Future()
        # As in a fresh thread, whatever the caller has set for its own.
        torch.set_num_threads(1)
        with torch.inference_mode(False), torch.enable_grad():
            try:
                played.set_result(task(self._network))
            except Exception as error:  # raised when it is this task's turn
                played.set_exception(error)
        return played
