"""What one client that went off does to a round of BCFL-G: fusion by precision beside fusion by numbers of examples.

python experiments/fusion_dips.py RUN_FOLDER NUM_ROUNDS

Goes on from where the run ended. Every round is played once; its posteriors are fused by the method's own rule, which
the next round starts from, and also averaged by examples. Printed: the accuracy of both, and of the client whose mean
precision is highest, its own model's accuracy and how its precision compares with the median of all.
"""

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from runs import parser_for
from torch import Tensor

import bcfl
from bcfl.engines.simulator import Simulator
from bcfl.predict.metrics import summarise
from bcfl.runs.problem import prepare


class Watched:
    """The clients of a round, with what they answered kept."""

    def __init__(self, clients: Any):
        self._clients = clients
        self.choices: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._clients, name)

    def fit_best(self, *args: Any) -> Iterator[Any]:
        for choice in self._clients.fit_best(*args):
            self.choices.append(choice)
            yield choice


def by_examples(models: Tensor, choices: list[Any], num_examples: Tensor) -> Tensor:
    """The models that plain averaging would have made of the same posteriors."""
    averaged = models.clone()
    for belief in {choice.belief for choice in choices}:
        own = [choice for choice in choices if choice.belief == belief]
        weight = torch.tensor([float(num_examples[choice.client]) for choice in own])
        averaged[belief] = torch.einsum("c,cv->v", weight / weight.sum(), torch.stack([c.posterior.mean for c in own]))
    return averaged


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("num_rounds", type=int)
    options = parser.parse_args()
    result = bcfl.load(options.run_folder)
    config, state = result.config, result.state
    problem = prepare(config)
    seed, first = config.experiment.seed, config.experiment.rounds + 1
    both = []
    with Simulator(problem.factory, problem.data, config.training, seed, num_workers=1) as engine:

        def accuracy(models: Tensor, clusters: list[int]) -> float:
            return 100 * float(summarise(engine.evaluate(models, [{cluster: 1.0} for cluster in clusters]))["accuracy"])

        for index in range(first, first + options.num_rounds):
            clients = Watched(engine.begin(index))
            state, _ = problem.method.round(state, clients)
            answers = sorted(clients.choices, key=lambda choice: choice.client)
            placed = state.hypotheses.assignment[0].tolist()
            averaged = by_examples(state.hypotheses.models.mean, answers, clients.num_examples)
            both.append((accuracy(state.hypotheses.models.mean, placed), accuracy(averaged, placed)))
            precision = [float(answer.posterior.precision[: clients.num_parameters].mean()) for answer in answers]
            loud = max(range(len(answers)), key=lambda j: precision[j])
            alone = engine.evaluate(answers[loud].posterior.mean[None], [{0: 1.0}] * len(answers))[loud]
            assert alone is not None
            own = 100 * float(alone.confusion.diag().sum() / alone.confusion.sum())
            times = precision[loud] / median(precision)
            print(f"round {index}: by precision {both[-1][0]:.2f}, by examples {both[-1][1]:.2f}; client {loud} has "
                  f"{times:.1f} times the median precision, its own model {own:.1f}", flush=True)  # fmt: skip
    precise, plain = zip(*both, strict=True)
    print(f"means {fmean(precise):.2f} and {fmean(plain):.2f}, worst {min(precise):.2f} and {min(plain):.2f}")


if __name__ == "__main__":
    main()
