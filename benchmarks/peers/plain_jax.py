"""A round of FedAvg in plain JAX: all clients by vmap, all steps by scan, compiled."""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import problem
from problem import LEARNING_RATE, MOMENTUM, Work


def init_mlp(key: Any) -> Any:
    keys = jax.random.split(key, 2)
    return [(jax.random.normal(k, s) * 0.1, jnp.zeros(s[1])) for k, s in zip(keys, ((64, 32), (32, 10)), strict=True)]


def mlp(parameters: Any, x: Any) -> Any:
    (first, first_bias), (second, second_bias) = parameters
    return jax.nn.relu(x @ first + first_bias) @ second + second_bias


def init_cnn(key: Any) -> Any:
    shapes = ((6, 3, 5, 5), (16, 6, 5, 5), (400, 120), (120, 84), (84, 10))
    keys = jax.random.split(key, len(shapes))
    outputs = (6, 16, 120, 84, 10)
    return [(jax.random.normal(k, s) * 0.05, jnp.zeros(n)) for k, s, n in zip(keys, shapes, outputs, strict=True)]


def cnn(parameters: Any, x: Any) -> Any:
    for weight, bias in parameters[:2]:
        x = jax.lax.conv(x, weight, (1, 1), "VALID") + bias[:, None, None]
        x = jax.lax.reduce_window(jax.nn.relu(x), -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    x = x.reshape(len(x), -1)
    for place, (weight, bias) in enumerate(parameters[2:]):
        x = (x if place == 0 else jax.nn.relu(x)) @ weight + bias
    return x


def loss(apply: Any, parameters: Any, x: Any, y: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(apply(parameters, x)), y[:, None], 1).mean()


def make(work: Work) -> tuple[Callable[[int], int], str]:
    init, apply = (init_mlp, mlp) if sys.argv[1] == "mlp" else (init_cnn, cnn)
    x, y = map(jnp.asarray, work.data())
    parameters = init(jax.random.key(0))

    def client(start: Any, x: Any, y: Any, order: Any) -> Any:
        def step(state: Any, rows: Any) -> Any:
            now, velocity = state
            gradient = jax.grad(lambda p: loss(apply, p, x[rows], y[rows]))(now)
            velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, gradient)
            return (jax.tree.map(lambda p, v: p - LEARNING_RATE * v, now, velocity), velocity), rows[0] * 0 + 1

        (end, _), steps = jax.lax.scan(step, (start, jax.tree.map(jnp.zeros_like, start)), order)
        return end, steps.sum()

    def round_of(start: Any, order: Any) -> Any:
        ends, steps = jax.vmap(client, (None, 0, 0, 0))(start, x, y, order)
        return jax.tree.map(lambda one: one.mean(0), ends), steps.sum()

    compiled = jax.jit(round_of)

    def play(index: int) -> int:
        nonlocal parameters
        parameters, steps = jax.block_until_ready(compiled(parameters, np.asarray(work.order(index))))
        return int(steps)

    return play, f"jax {jax.__version__}, vmap"


if __name__ == "__main__":
    problem.serve(make)
