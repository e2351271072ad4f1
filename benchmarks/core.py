"""The speed and memory of the Bayesian core: k-best assignments of many clients, fusion of large models."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from measure import Row, best_seconds, peak_bytes, row
from torch import Tensor

from bcfl.association.ranking import k_best_assignments
from bcfl.belief.gaussian import Gaussian, fuse
from bcfl.randomness import generator

NUM_CLIENTS, NUM_CLUSTERS, K_BEST = 1_000_000, 20, 100
NUM_POSTERIORS, NUM_PARAMETERS = 100, 26_000_000  # the Digits-Five net


def rows() -> list[Row]:
    return [k_best_time(), k_best_memory(), fusion_memory()]


def large_cost() -> Tensor:
    return torch.rand(NUM_CLIENTS, NUM_CLUSTERS, generator=generator(0, "cost"))  # (client, cluster), float32


def k_best_time() -> Row:
    cost = large_cost()
    ours, yardstick = best_seconds(lambda: k_best_assignments(cost, K_BEST), lambda: torch.topk(cost, 2), repeats=7)
    note = f"{ours:.3f} s against {yardstick:.3f} s, best of 7, {torch.get_num_threads()} threads"
    return row(f"{K_BEST}-best, 10⁶ clients × {NUM_CLUSTERS}: time", ours / yardstick, 4, "topk(cost, 2)", note)


def k_best_memory() -> Row:
    # With many rows the peak is the result's own allocation, with few it is the search: the worse of the two counts.
    size = NUM_CLIENTS * NUM_CLUSTERS * 4
    beyond = max(peak_bytes(partial(_k_best, k))[0] - k * (NUM_CLIENTS + 1) * 8 for k in (2, K_BEST))
    note = f"beyond the result, whose dense int64 rows are k·C·8 = {K_BEST * NUM_CLIENTS * 8 / 1e6:.0f} MB"
    return row(f"{K_BEST}-best, 10⁶ clients × {NUM_CLUSTERS}: memory", beyond / size, 3, "cost matrices", note)


def _k_best(k: int) -> Callable[[], object]:
    k_best_assignments(torch.rand(1000, NUM_CLUSTERS), k)  # what torch loads at first use is not the call's memory
    cost = large_cost()
    return lambda: k_best_assignments(cost, k)


def fusion_memory() -> Row:
    vectors = peak_bytes(_fusion)[0] / (NUM_PARAMETERS * 4)
    note = "beyond the prior and one posterior at a time; the fused belief's own two vectors are counted"
    return row(f"fusing {NUM_POSTERIORS} × 26 million parameters: memory", vectors, 4, "vectors", note)


def _fusion() -> Callable[[], object]:
    small = Gaussian(torch.ones(1000), torch.ones(1000))
    fuse([small, small], small, "exact")
    # Ones, not zeros: memory that was never written to is not yet resident, and would be counted as the fold's.
    prior = Gaussian(torch.ones(NUM_PARAMETERS), torch.ones(NUM_PARAMETERS))
    # The posteriors arrive one by one in the same two vectors, as from a wire: all the rest is the fold's.
    mean, precision = torch.ones(NUM_PARAMETERS), torch.ones(NUM_PARAMETERS)

    def arriving() -> Iterator[Gaussian]:
        for j in range(NUM_POSTERIORS):
            yield Gaussian(mean.fill_(j), precision.fill_(2 + j))

    return lambda: fuse(arriving(), prior, "exact")
