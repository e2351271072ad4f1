"""What a round holds in memory, and how long the command line takes to begin."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from measure import Row, best_seconds, peak_bytes, row
from rounds import NUM_WORKERS
from workloads import NETS, Workload

from bcfl.client.trainer import Training
from bcfl.federation import State
from bcfl.methods.bcfl import BCFL

PER_WORKER = 8  # beliefs' worth of memory that a worker may take: its model, gradients, a posterior on its way
DIGITS_FIVE = replace(NETS[-1], num_examples=64, training=Training(local_steps=1, momentum_state="fresh"))


def rows() -> list[Row]:
    return [*memory(DIGITS_FIVE), *start_up()]


def memory(net: Workload, clients: tuple[int, int] = (10, 80)) -> list[Row]:
    """The peak of a BCFL-MH-6 round beyond the beliefs before it, in beliefs: two vectors, mean and precision."""
    beside, told = [], []  # what the work itself takes
    for num_clients in clients:
        # As many trainings for both: how many posteriors meet in memory is also a matter of chance.
        operation = partial(_rounds, replace(net, num_clients=num_clients), max(clients) // num_clients)
        peak, (num_after, belief) = peak_bytes(operation, _size)
        beside.append(peak / belief - num_after)
        told.append(f"{peak / belief:.1f} beliefs, {num_after} of them new ones")
    few, many = clients
    allowed = PER_WORKER * NUM_WORKERS
    name = f"{net.name}, BCFL-MH-6: memory"
    note = f"{told[1]}, with {many} clients; {told[0]}, with {few}"
    same = f"{beside[1]:.1f} beliefs beside the new ones against {beside[0]:.1f}"
    return [
        row(f"{name} beside the new beliefs", max(beside) / allowed, 1, "of 8 beliefs per worker", note),
        row(f"{name} with {many} clients", beside[1] / beside[0], 1.1, f"of that with {few}", same),
    ]


def _rounds(net: Workload, times: int) -> Callable[[], State]:
    """The second round of a run, whose hypotheses share some beliefs and not others, so many times."""
    simulator = net.simulator(NUM_WORKERS)
    method = BCFL(net.num_groups, "multi", 6, initial="same", scoring_examples=net.training.batch_size)
    state, _ = method.round(method.init(simulator.begin(0)), simulator.begin(1))

    def play() -> State:
        for _ in range(times - 1):
            method.round(state, simulator.begin(2))
        return method.round(state, simulator.begin(2))[0]

    return play


def _size(state: State) -> tuple[int, int]:
    """How many beliefs there are, and the bytes of one: mean and precision."""
    models = state.hypotheses.models
    return len(models), 2 * models.mean[0].nbytes


def start_up(repeats: int = 10) -> list[Row]:
    command = shutil.which("bcfl", path=Path(sys.executable).parent)
    assert command is not None, "bcfl is not installed beside this Python"
    help_text, nothing = best_seconds(
        partial(_run, command, "--help"), partial(_run, sys.executable, "-c", "pass"), repeats=repeats
    )
    few = -(-repeats // 4)
    with tempfile.TemporaryDirectory() as folder:
        counter = iter(range(few))
        first_round, torch_alone = best_seconds(
            lambda: _run(command, "run", "--quiet", "--set", "experiment.rounds=1",
                         "--out", f"{folder}/{next(counter)}"),
            partial(_run, sys.executable, "-c", "import torch"),
            repeats=few,
        )  # fmt: skip
    return [
        row("bcfl --help", help_text / nothing, 3, "python -c pass", f"{help_text:.3f} s against {nothing:.3f} s"),
        row(
            "bcfl run, until its first round is done", first_round - torch_alone, 5, "s beyond import torch",
            f"{first_round:.2f} s against {torch_alone:.2f} s",
        ),
    ]  # fmt: skip


def _run(*command: str) -> None:
    # Installed packages have their bytecode beside them; where Python is told to write none, ours would be compiled
    # anew at every start.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(command, check=True, capture_output=True, env=environment)
