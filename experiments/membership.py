"""Is membership stated rightly where it is in doubt? Beside the exact posterior, over many drawn federations.

16 clients with 6 examples each belong to one of 2 clusters. An input is one of 4 cells; a cluster has a label, 0 or 1,
for every cell, drawn by a coin; 10 % of the labels are flipped. The exact posterior sums over all 2^15 groupings. What
is compared are pairs of clients: the stated probability that they share a cluster, against whether they do, which
needs no numbers for clusters.

    python experiments/membership.py 200 results/membership/doubt.json
"""

import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bcfl import likelihood
from bcfl.association.membership import co_membership
from bcfl.client.trainer import Training
from bcfl.data.arrays import from_arrays
from bcfl.engines.simulator import Simulator
from bcfl.methods.soft import SoftBCFL
from bcfl.randomness import generator

NUM_CLIENTS, NUM_EXAMPLES, NUM_CELLS, FLIPPED = 16, 6, 4, 0.1
ROUNDS = 10
# The logit of a label, ±log 9, has this precision around 0.
PRIOR_PRECISION = round(1 / math.log(9) ** 2, 3)
TRAINING = Training(learning_rate=2.0, momentum=0.0, local_steps=20, momentum_state="fresh")
PAIRS = torch.triu(torch.ones(NUM_CLIENTS, NUM_CLIENTS, dtype=torch.bool), 1)


def federation(draw: int) -> tuple[Tensor, Tensor, Tensor]:
    """Each client's cluster, its cells and its labels."""
    draws = generator(draw, "membership in doubt")
    labels = torch.randint(2, (2, NUM_CELLS), generator=draws)
    cluster = torch.randint(2, (NUM_CLIENTS,), generator=draws)
    cell = torch.randint(NUM_CELLS, (NUM_CLIENTS, NUM_EXAMPLES), generator=draws)
    flipped = torch.rand(cell.shape, generator=draws) < FLIPPED
    return cluster, cell, labels[cluster[:, None], cell] ^ flipped


def exact(cell: Tensor, y: Tensor) -> Tensor:
    """p(two clients share a cluster | data), by all groupings."""
    cells = torch.nn.functional.one_hot(cell, NUM_CELLS).double()
    ones, zeros = ((cells * (y == label)[..., None]).sum(1) for label in (1, 0))  # (client, cell)
    groupings = torch.tensor(list(itertools.product((0.0, 1.0), repeat=NUM_CLIENTS - 1)), dtype=torch.float64)
    groupings = torch.cat([groupings, torch.zeros(len(groupings), 1, dtype=torch.float64)], 1)
    log_weight = sum(_log_evidence(member @ ones, member @ zeros) for member in (groupings, 1 - groupings))
    assert isinstance(log_weight, Tensor)
    weight = log_weight.softmax(0)
    return sum(((member * weight[:, None]).T @ member for member in (groupings, 1 - groupings)), torch.zeros(()))


def _log_evidence(ones: Tensor, zeros: Tensor) -> Tensor:
    """log p of a cluster's labels, each cell's true one drawn by a coin."""  # (grouping,)
    right, wrong = math.log(1 - FLIPPED), math.log(FLIPPED)
    return torch.logaddexp(ones * right + zeros * wrong, ones * wrong + zeros * right).sum(1)


def network() -> nn.Module:
    """One weight a cell: the logit of label 1."""
    layer = nn.Linear(NUM_CELLS, 1, bias=False)
    nn.init.zeros_(layer.weight)
    return layer


def stated(cell: Tensor, y: Tensor, draw: int, *, without_oneself: bool) -> Tensor:
    """The same by bcfl-soft, each client scored under what all others say of the clusters, or under the clusters."""
    inputs = torch.nn.functional.one_hot(cell, NUM_CELLS).float()
    data = from_arrays(list(zip(inputs, y, strict=True)), likelihood=likelihood.of("bernoulli"))
    method = SoftBCFL(2, prior_precision=PRIOR_PRECISION, without_oneself=True)
    factory = likelihood.attach(network, data.likelihood)
    with Simulator(factory, data, TRAINING, draw, num_workers=1, device="stacked-cpu") as engine:
        state = method.init(engine.begin(0))
        for index in range(1, ROUNDS + 1):
            state, info = method.round(state, engine.begin(index))
        if without_oneself:
            assert info.probability is not None
            return co_membership(info.probability, info.log_weight)
        scores = engine.begin(ROUNDS + 1).score(state.hypotheses.models.mean)
    return co_membership(scores.softmax(1), torch.zeros(1, dtype=torch.float64))


def measured(probability: Tensor, cluster: Tensor) -> dict[str, float]:
    """Over the pairs of clients: the NLL of the truth, how sure the likelier answer is, how often it is right."""
    share = probability[PAIRS].clamp(1e-9, 1 - 1e-9)
    same = (cluster[:, None] == cluster)[PAIRS]
    nll = -torch.where(same, share, 1 - share).log().mean()
    sure = torch.maximum(share, 1 - share).mean()
    return {"nll": float(nll), "stated": float(sure), "right": float(((share > 0.5) == same).double().mean())}


def summary(found: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Means over draws, and of each way the ratio of its NLL to the exact one's with a 95 % interval, paired."""
    told: dict[str, Any] = {"draws": len(found)}
    for way in found[0]:
        values = {key: torch.tensor([one[way][key] for one in found], dtype=torch.float64) for key in found[0][way]}
        reference = torch.tensor([one["exact"]["nll"] for one in found], dtype=torch.float64)
        ratio = float(values["nll"].mean() / reference.mean())
        error = float((values["nll"] - ratio * reference).std()) / math.sqrt(len(found)) / float(reference.mean())
        gap = values["stated"] - values["right"]
        told[way] = {key: round(float(one.mean()), 4) for key, one in values.items()} | {
            "nll_ratio": [round(ratio, 3), round(ratio - 1.96 * error, 3), round(ratio + 1.96 * error, 3)],
            "stated_minus_right": round(float(gap.mean()), 4),
            "its_standard_error": round(float(gap.std()) / math.sqrt(len(found)), 4),
        }
    return told


def main(num_draws: int, out: Path) -> None:
    found = []
    for draw in range(num_draws):
        cluster, cell, y = federation(draw)
        ways = {
            "exact": exact(cell, y),
            "without_oneself": stated(cell, y, draw, without_oneself=True),
            "with_oneself": stated(cell, y, draw, without_oneself=False),
        }
        found.append({way: measured(probability, cluster) for way, probability in ways.items()})
        if draw % 20 == 19:
            print(json.dumps(summary(found)), flush=True)
    out.write_text(json.dumps({"what": __doc__, "summary": summary(found), "draws": found}, indent=1) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
