"""A round of FedAvg by fedjax: its own clients, trainer and aggregation, one client after the other, compiled."""

import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

import fedjax
import jax
import numpy as np
import plain_jax
import problem
from problem import BATCH, LEARNING_RATE, MOMENTUM, STEPS, Work


def make(work: Work) -> tuple[Callable[[int], int], str]:
    init, apply = (plain_jax.init_mlp, plain_jax.mlp) if sys.argv[1] == "mlp" else (plain_jax.init_cnn, plain_jax.cnn)
    x, y = work.data()
    sets = [fedjax.ClientDataset({"x": one, "y": own}) for one, own in zip(x, y, strict=True)]
    optimiser = fedjax.optimizers.sgd(LEARNING_RATE, MOMENTUM)

    def begin(shared: Any, given: Any) -> Any:
        return {"params": shared, "opt": optimiser.init(shared), "steps": 0}

    def step(state: Any, batch: Any) -> Any:
        gradient = jax.grad(lambda p: plain_jax.loss(apply, p, batch["x"], batch["y"]))(state["params"])
        opt, params = optimiser.apply(gradient, state["opt"], state["params"])
        return {"params": params, "opt": opt, "steps": state["steps"] + 1}

    def end(shared: Any, state: Any) -> Any:
        return state["params"], state["steps"]

    each = fedjax.for_each_client(begin, step, end)
    params = init(jax.random.PRNGKey(0))

    def play(index: int) -> int:
        nonlocal params
        batches = [
            (
                str(c),
                own.shuffle_repeat_batch(
                    batch_size=BATCH, num_epochs=None, num_steps=STEPS, seed=index * work.num_clients + c
                ),
                0,
            )
            for c, own in enumerate(sets)
        ]
        total, steps = None, 0
        for _, (found, made) in each(params, batches):
            total = found if total is None else jax.tree.map(np.add, total, found)
            steps += int(made)
        params = jax.tree.map(lambda one: one / work.num_clients, total)
        return steps

    return play, f"fedjax {metadata.version('fedjax')}"


if __name__ == "__main__":
    problem.serve(make)
