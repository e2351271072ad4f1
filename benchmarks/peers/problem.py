"""The work that everybody is given, in NumPy: it imports neither bcfl nor a peer, and counts the steps that are made.

A contestant is a script that says how many steps its round makes and then answers each line `go` with the seconds of
processor time that a round took: `serve(steps, play)`. So that a busy spell of the machine meets all alike, the driver
lets them take turns.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

LEARNING_RATE, MOMENTUM, BATCH, STEPS = 0.05, 0.9, 32, 10
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Work:
    """Clients with examples of one shape; each makes the same steps in every round of FedAvg."""

    num_clients: int
    num_examples: int
    shape: tuple[int, ...]
    num_classes: int = 10

    def data(self) -> tuple[Array, Array]:
        draws = np.random.default_rng(0)
        x = draws.standard_normal((self.num_clients, self.num_examples, *self.shape), dtype=np.float32)
        return x, draws.integers(self.num_classes, size=(self.num_clients, self.num_examples))

    def order(self, round_index: int) -> Array:
        """Rows of each client's examples: pass after pass, each in a new order."""  # (client, step, example)
        draws, passes = np.random.default_rng(round_index), -(-STEPS * BATCH // self.num_examples)
        keys = draws.random((self.num_clients, passes, self.num_examples))
        order = keys.argsort(2).reshape(self.num_clients, -1)
        return order[:, : STEPS * BATCH].reshape(self.num_clients, STEPS, BATCH)

    @property
    def num_steps(self) -> int:
        return self.num_clients * STEPS


WORKS = {"mlp": Work(1000, 64, (64,)), "cnn": Work(10, 320, (3, 32, 32))}


def serve(make: Callable[[Work], tuple[Callable[[int], int], str]]) -> None:
    """Answer the driver: the first round, which compiles and warms up, is not measured."""
    play, version = make(WORKS[sys.argv[1]])
    play(0)
    print(json.dumps({"ready": version}), flush=True)
    for index, _ in enumerate(sys.stdin, 1):
        wall, processor = time.perf_counter(), time.process_time()
        steps = play(index)
        processor, wall = time.process_time() - processor, time.perf_counter() - wall
        print(json.dumps({"steps": steps, "cpu": processor, "wall": wall}), flush=True)
