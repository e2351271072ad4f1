"""A round of FedAvg by Flower's own client and strategy, each client called in this process.

Its simulation would start Ray, whose processes take more than the training: what is measured here is what Flower does
with answers and parameters beside the steps in plain torch.
"""

from collections.abc import Callable
from typing import Any

import flwr
import limit
import problem
import torch
import torch.nn.functional as F
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.strategy import FedAvg
from problem import LEARNING_RATE, MOMENTUM, STEPS, Work
from torch import nn


def make(work: Work) -> tuple[Callable[[int], int], str]:
    torch.set_num_threads(1)
    x, y = map(torch.from_numpy, work.data())
    module: nn.Module = limit.module_for(work)
    strategy = FedAvg()
    parameters = ndarrays_to_parameters([p.detach().numpy() for p in module.parameters()])

    def fit(client: int, order: Any) -> FitRes:
        with torch.no_grad():
            for parameter, value in zip(module.parameters(), parameters_to_ndarrays(parameters), strict=True):
                parameter.copy_(torch.from_numpy(value))
        optimiser = torch.optim.SGD(module.parameters(), LEARNING_RATE, MOMENTUM)
        for rows in order:
            optimiser.zero_grad()
            F.cross_entropy(module(x[client][rows]), y[client][rows]).backward()
            optimiser.step()
        found = ndarrays_to_parameters([p.detach().numpy() for p in module.parameters()])
        return FitRes(Status(Code.OK, ""), found, work.num_examples, {"steps": len(order)})

    def play(index: int) -> int:
        nonlocal parameters
        order = torch.from_numpy(work.order(index))
        answers: list[Any] = [(None, fit(client, order[client])) for client in range(work.num_clients)]
        found, _ = strategy.aggregate_fit(index, answers, [])
        assert found is not None
        parameters = found
        return sum(int(answer.metrics["steps"]) for _, answer in answers) // STEPS * STEPS

    return play, f"flwr {flwr.__version__}, clients in one process"


if __name__ == "__main__":
    problem.serve(make)
