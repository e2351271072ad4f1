"""A round of FedAvg by bcfl, as a run with its default settings makes it."""

import sys
from collections.abc import Callable

import problem
import torch
from problem import BATCH, LEARNING_RATE, MOMENTUM, STEPS, Work

import bcfl
from bcfl.client.trainer import Training
from bcfl.data.arrays import from_arrays
from bcfl.engines.simulator import Simulator
from bcfl.methods.averaging import FedAvg
from bcfl.model.zoo import cifar_cnn, mlp


def make(work: Work) -> tuple[Callable[[int], int], str]:
    x, y = work.data()
    data = from_arrays([(torch.from_numpy(one), torch.from_numpy(own)) for one, own in zip(x, y, strict=True)])
    training = Training(LEARNING_RATE, MOMENTUM, BATCH, STEPS)
    factory = mlp if sys.argv[1] == "mlp" else cifar_cnn
    engine = Simulator(factory, data, training, 0, num_workers=1, together="auto")
    method, state = FedAvg(), FedAvg().init(engine.begin(0))

    def play(index: int) -> int:
        nonlocal state
        clients = engine.begin(index)
        state, _ = method.round(state, clients)
        return clients.work.local_steps

    return play, f"bcfl {bcfl.__version__}, {engine.at_a_time} clients at a time"


if __name__ == "__main__":
    problem.serve(make)
