"""The limit: the bare arithmetic of a FedAvg round in torch, written by hand for this work and nothing else.

For the small net all clients go through each step in one batched product forward and two backward; for the CNN the
module is trained in channels-last format, with torch's fused SGD, client after client.
"""

import sys
from collections.abc import Callable

import problem
import torch
import torch.nn.functional as F
from problem import BATCH, LEARNING_RATE, MOMENTUM, STEPS, Work
from torch import Tensor, nn


def make_mlp(work: Work) -> tuple[Callable[[int], int], str]:
    torch.set_num_threads(1)
    x, y = map(torch.from_numpy, work.data())
    count, hidden = work.num_clients, 32
    flat_x, flat_y = x.flatten(0, 1), y.flatten()
    start = [torch.randn(s) * 0.1 for s in ((hidden, 64), (1, hidden), (work.num_classes, hidden), (1, 10))]
    first_row = work.num_examples * torch.arange(count)[:, None]

    def play(index: int) -> int:
        nonlocal start
        order = torch.from_numpy(work.order(index))
        parameters = [one.expand(count, *one.shape).clone() for one in start]
        velocities = [torch.zeros_like(one) for one in parameters]
        for step in range(STEPS):
            rows = first_row + order[:, step]
            batch = flat_x.index_select(0, rows.flatten()).view(count, BATCH, -1)
            for parameter, velocity, gradient in zip(parameters, velocities, gradients(parameters, batch, flat_y[rows]),
                                                     strict=True):  # fmt: skip
                parameter.sub_(velocity.mul_(MOMENTUM).add_(gradient), alpha=LEARNING_RATE)
        start = [one.mean(0) for one in parameters]
        return count * STEPS

    return play, f"torch {torch.__version__}, by hand"


def gradients(parameters: list[Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    first, first_bias, second, second_bias = parameters
    hidden = torch.baddbmm(first_bias, x, first.mT).relu_()
    scores = torch.baddbmm(second_bias, hidden, second.mT)
    delta = (scores - scores.amax(2, keepdim=True)).exp_()
    delta.div_(delta.sum(2, keepdim=True))
    delta.scatter_add_(2, y[..., None], delta.new_full((*y.shape, 1), -1.0)).div_(x.shape[1])
    back = torch.bmm(delta, second).mul_(hidden > 0)
    return torch.bmm(back.mT, x), back.sum(1, keepdim=True), torch.bmm(delta.mT, hidden), delta.sum(1, keepdim=True)


def module_for(work: Work) -> nn.Module:
    if work.shape == (64,):
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def make_cnn(work: Work) -> tuple[Callable[[int], int], str]:
    torch.set_num_threads(1)
    x, y = map(torch.from_numpy, work.data())
    x = x.permute(0, 1, 3, 4, 2).contiguous()
    module = module_for(work).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimiser = torch.optim.SGD(module.parameters(), LEARNING_RATE, MOMENTUM, fused=True)
    start = [p.detach().clone() for p in module.parameters()]

    def play(index: int) -> int:
        nonlocal start
        order, total = torch.from_numpy(work.order(index)), [torch.zeros_like(p) for p in start]
        for client in range(work.num_clients):
            with torch.no_grad():
                for parameter, value in zip(module.parameters(), start, strict=True):
                    parameter.copy_(value)
            optimiser.state.clear()
            for rows in order[client]:
                optimiser.zero_grad()
                batch = x[client].index_select(0, rows).permute(0, 3, 1, 2)
                F.cross_entropy(module(batch), y[client][rows]).backward()
                optimiser.step()
            for sum_of, parameter in zip(total, module.parameters(), strict=True):
                sum_of.add_(parameter.detach(), alpha=1 / work.num_clients)
        start = total
        return work.num_steps

    return play, f"torch {torch.__version__}, by hand"


if __name__ == "__main__":
    problem.serve(make_mlp if sys.argv[1] == "mlp" else make_cnn)
