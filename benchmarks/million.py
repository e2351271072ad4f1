"""A million clients of a generated problem, ten thousand in each round: seconds, memory, size of the run folder.

    python benchmarks/million.py [bcfl-g] [--clients 1000000] [--rounds 3]

A client is made when it is opened: 64 examples of 64 numbers, whose labels follow the rule of its group. Nothing is
kept of clients but where they belong.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bcfl
from bcfl.data.lazy import LazyClients
from bcfl.model.zoo import mlp
from bcfl.randomness import generator
from bcfl.runs.observers import Observer

NUM_GROUPS, NUM_EXAMPLES, NUM_TESTED, NUM_INPUTS, NUM_CLASSES = 4, 64, 16, 64, 10
TARGETS = {"fedavg": 15.0, "bcfl-g": 30.0}  # seconds a round
SHARE = 100  # of the clients, one in so many takes part in a round


def clients(count: int) -> LazyClients:
    rules = torch.randn(NUM_GROUPS, NUM_INPUTS, NUM_CLASSES, generator=generator(0, "rules"))

    def opener(client: int) -> tuple[Tensor, ...]:
        x = torch.randn(NUM_EXAMPLES + NUM_TESTED, NUM_INPUTS, generator=generator(0, "client", client))
        y = (x @ rules[client % NUM_GROUPS]).argmax(1)
        return x[:NUM_EXAMPLES], y[:NUM_EXAMPLES], x[NUM_EXAMPLES:], y[NUM_EXAMPLES:]

    sizes = torch.full((count,), NUM_EXAMPLES)
    return bcfl.lazy(opener, sizes, group=torch.arange(count) % NUM_GROUPS, description="a generated problem")


class Clock(Observer):
    """The observer that tells of each round how long it took, while it goes on."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cpu: list[float] = []
        self._cpu = time.process_time()

    def round_done(self, record: dict[str, Any], seconds: float) -> None:
        now = time.process_time()
        self.seconds.append(seconds)
        self.cpu.append(now - self._cpu)
        self._cpu = now
        ari = record["ari"]
        print(f"  round {record['round']}: {seconds:.1f} s, {self.cpu[-1]:.1f} s of processor time, "
              f"accuracy {record.get('accuracy', float('nan')):.3f}, ari {ari:.3f}", flush=True)  # fmt: skip


def measure(method: str, count: int, rounds: int) -> dict[str, float]:
    options: dict[str, Any] = {} if method == "fedavg" else {"num_clusters": NUM_GROUPS}
    clock, per_round = Clock(), max(count // SHARE, 1)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        settings: dict[str, Any] = {"clients_per_round": per_round, "evaluate": "present", "momentum_state": "fresh"}
        bcfl.train(mlp, clients(count), method=method, rounds=rounds, out=out, observers=[clock], progress=False,
                   **settings, **options)  # fmt: skip
        sizes = {path.name: path.stat().st_size for path in out.rglob("*") if path.is_file()}
    logs = sum(size for name, size in sizes.items() if name.endswith(".jsonl"))
    return {
        "seconds": min(clock.seconds),
        "cpu_seconds": min(clock.cpu),
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "folder_mb_of_100_rounds": (sum(sizes.values()) - logs + logs * 100 / rounds) / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", nargs="?", default="fedavg", choices=sorted(TARGETS))
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print(f"{given.method}, {given.clients} clients, one in {SHARE} in each of {given.rounds} rounds", flush=True)
    found = measure(given.method, given.clients, given.rounds)
    targets = {"seconds": TARGETS[given.method], "peak_gb": 4.0, "folder_mb_of_100_rounds": 200.0}
    for name, value in found.items():
        target = targets.get(name)
        verdict = "" if target is None else f"  target ≤ {target:g}  {'ok' if value <= target else 'short'}"
        print(f"{name:<26}{value:10.2f}{verdict}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
