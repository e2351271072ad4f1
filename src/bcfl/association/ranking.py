"""The best assignments of clients to clusters, by what each client costs in each cluster.

A cost is a negative log-probability, so small is likely, sums are joint, and +∞ is impossible.
"""

import heapq
import math
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import scipy  # loads its optimisers when they are first used: a client never needs them
import torch
from torch import Tensor

ClusterSize = tuple[int, int]  # fewest and most clients in every cluster
Search = Literal["exact", "one_change"]
Counts = npt.NDArray[np.int64]  # (cluster,)


class Ranked(NamedTuple):
    """The best assignments, written as changes to the very best: k rows of a million clients need not exist."""

    best: Tensor  # (client,) -> cluster
    totals: list[float]
    changes: list[list[tuple[int, int]]]  # per assignment: (client, cluster) pairs that differ from `best`

    def assignment(self, rank: int) -> Tensor:
        row = self.best.clone()
        for client, cluster in self.changes[rank]:
            row[client] = cluster
        return row  # (client,)


def k_best_assignments(cost: Tensor, k: int, cluster_size: ClusterSize | None = None) -> tuple[Tensor, Tensor]:
    """The k cheapest ways to give each client one cluster, cheapest first, exact and without repetition.

    `cost` is (client, cluster); a total is the sum of the chosen entries (the paper, section 4.1). Returns the
    assignments (k', client) and totals (k',), where k' = min(k, number of assignments of finite cost), which is
    K^C when no entry is +∞.

    Order of equal totals: clusters of a client are ranked by (cost, index), clients by (gap between their two best
    clusters, index); each assignment is the list of its departures (client rank, cluster rank) from the very best
    one, and equal totals come in the lexicographic order of these lists. So the k best are always the beginning of
    the k+1 best. With `cluster_size` = (fewest, most) clients in every cluster the k best among the assignments
    within these limits are found by Murty's algorithm; equal totals then come in a fixed order of discovery.

    Sums are taken in float64: totals that differ by less than their rounding count as equal.
    """
    return _in_full(rank(cost, k, cluster_size))


def one_change_assignments(cost: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The best assignment and the cheapest single changes of it: the paper's heuristic, for comparison only.

    From the fourth entry on it can miss assignments in which two clients change together.
    """
    return _in_full(rank(cost, k, search="one_change"))


def _in_full(ranked: Ranked) -> tuple[Tensor, Tensor]:
    assignments = ranked.best.expand(len(ranked.totals), -1).clone()
    for rank, changes in enumerate(ranked.changes):
        for client, cluster in changes:
            assignments[rank, client] = cluster
    return assignments, torch.tensor(ranked.totals, dtype=torch.float64)


def rank(
    cost: Tensor,
    k: int,
    cluster_size: ClusterSize | None = None,
    elsewhere: Tensor | None = None,
    search: Search = "exact",
) -> Ranked:
    """The k best assignments as changes to the very best; `elsewhere` (cluster,) counts clients that are not asked."""
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    best_cost, best = _cheapest_clusters(cost)
    if cluster_size is not None:
        return _rank_limited(cost, k, *_places(cost, cluster_size, elsewhere))
    if search == "one_change":
        return _rank_one_change(cost, best_cost, best, k)
    return _rank_free(cost, best_cost, best, k)


def _cheapest_clusters(cost: Tensor) -> tuple[Tensor, Tensor]:
    """Each client's smallest cost and where it is (the first, among equals), after the matrix is found sound."""
    if cost.dim() != 2 or 0 in cost.shape or not cost.is_floating_point():
        raise ValueError(f"cost must be a non-empty floating-point (client, cluster) matrix, "
                         f"got {tuple(cost.shape)} of {cost.dtype}")  # fmt: skip
    best_cost, best = cost.min(1)  # NaN and −∞ both surface in the minimum, so the matrix is read once
    for wrong, what in (
        (best_cost.isnan(), "cost holds NaN"),
        (best_cost == -math.inf, "cost holds −∞"),
        (best_cost == math.inf, "cost is +∞ for every cluster"),
    ):
        if wrong.any():
            client = int(wrong.nonzero()[0])
            raise ValueError(f"{what} for client {client}; allowed are finite numbers, and +∞ for some of its clusters")
    return best_cost, best


def _rank_free(cost: Tensor, best_cost: Tensor, best: Tensor, k: int) -> Ranked:
    """Best-first search over departures from the best assignment: O(CK) to prepare, O(k log k) after that.

    Only the k − 1 clients with the smallest gap between their two best clusters can take part: for any other, the
    best assignment and k − 1 single departures are at least as good.
    """
    base = float(best_cost.sum(dtype=torch.float64))
    if k == 1:  # the gaps are not needed
        return Ranked(best, [base], [[]])
    second = cost.scatter(1, best[:, None], math.inf).amin(1)
    gap = second.double() - best_cost.double()
    clients = (gap <= gap.kthvalue(k - 1).values).nonzero()[:, 0] if k <= len(gap) else torch.arange(len(gap))
    clients = clients[gap[clients].argsort(stable=True)][: k - 1]
    clients = clients[gap[clients].isfinite()]
    row_cost, clusters = cost[clients].double().sort(dim=1, stable=True)
    extra = (row_cost - row_cost[:, :1]).tolist()  # [client rank][cluster rank]
    client_of, cluster_of = clients.tolist(), clusters.tolist()

    totals: list[float] = []
    changes: list[list[tuple[int, int]]] = []
    # An entry: its total, its departures, and the total without the last one. Every successor below is at least as
    # dear and lexicographically later, also in floating point (addition is monotone), so the search is in order.
    queue: list[tuple[float, tuple[tuple[int, int], ...], float]] = [(0.0, (), 0.0)]
    while queue and len(totals) < k:
        total, departures, without_last = heapq.heappop(queue)
        totals.append(base + total)
        changes.append([(client_of[i], cluster_of[i][r]) for i, r in departures])
        last, rank = departures[-1] if departures else (-1, 0)
        successors = [(departures, (last + 1, 1), total)]  # one client more departs
        if departures:
            successors.append((departures[:-1], (last, rank + 1), without_last))  # it departs further
            if rank == 1:
                successors.append((departures[:-1], (last + 1, 1), without_last))  # the next client instead of it
        for head, (i, r), head_total in successors:
            if i < len(extra) and r < len(extra[i]) and extra[i][r] < math.inf:
                heapq.heappush(queue, (head_total + extra[i][r], (*head, (i, r)), head_total))
    return Ranked(best, totals, changes)


def _rank_one_change(cost: Tensor, best_cost: Tensor, best: Tensor, k: int) -> Ranked:
    base = float(best_cost.sum(dtype=torch.float64))
    extra = (cost - best_cost[:, None]).scatter(1, best[:, None], math.inf).flatten()
    order = extra.argsort(stable=True)[: k - 1]
    order = order[extra[order].isfinite()]
    changes = [[divmod(place, cost.shape[1])] for place in order.tolist()]
    return Ranked(best, [base, *(base + dear for dear in extra[order].tolist())], [[], *changes])


def _places(cost: Tensor, cluster_size: ClusterSize, elsewhere: Tensor | None) -> tuple[Counts, Counts]:
    """How many of the clients at hand every cluster must take, and how many it can take."""
    num_clients, num_clusters = cost.shape
    fewest, most = cluster_size
    if not 0 <= fewest <= most:
        raise ValueError(f"cluster_size must be (fewest, most) with 0 ≤ fewest ≤ most, got {cluster_size}")
    taken = np.zeros(num_clusters, dtype=np.int64) if elsewhere is None else elsewhere.numpy()
    if elsewhere is not None:  # while few clients are known, clusters may have fewer of them
        while (fewest - taken).clip(0).sum() > num_clients:
            fewest -= 1
    least, room = (fewest - taken).clip(0), (most - taken).clip(0)
    if not least.sum() <= num_clients <= room.sum():
        raise ValueError(f"cluster_size {cluster_size} with {num_clusters} clusters allows {least.sum()} to "
                         f"{room.sum()} clients, not {num_clients}: no assignment exists")  # fmt: skip
    return least, room.clip(max=num_clients)


def _rank_limited(cost: Tensor, k: int, least: Counts, room: Counts) -> Ranked:
    """Murty's algorithm: split what remains behind each solution by the first client that differs from it."""
    num_clients, num_clusters = cost.shape
    rows = cost.detach().double().numpy()
    gaps = rows - rows.min(1, keepdims=True)  # the same solutions, but a client's large offset does not eat the digits
    cluster_of_slot = np.repeat(np.arange(num_clusters), room)
    # Stand-ins fill the places that clients leave free, but may not take those of a cluster that must be filled.
    optional = np.concatenate([np.arange(places) >= needed for needed, places in zip(least, room, strict=True)])
    stand_ins = np.where(optional, 0.0, math.inf)[None].repeat(len(optional) - num_clients, 0)

    def solve(fixed: tuple[int, ...], banned: frozenset[int]) -> tuple[float, tuple[int, ...]] | None:
        """The best assignment in which the first clients are `fixed` and the next avoids `banned`."""
        allowed = gaps.copy()
        for client, cluster in enumerate(fixed):
            allowed[client] = math.inf
            allowed[client, cluster] = gaps[client, cluster]
        if banned:
            allowed[len(fixed), list(banned)] = math.inf
        try:
            _, slot = scipy.optimize.linear_sum_assignment(np.concatenate([allowed[:, cluster_of_slot], stand_ins]))
        except ValueError:  # SciPy's word for: every assignment is infinitely dear
            return None
        chosen = cluster_of_slot[slot[:num_clients]]
        return math.fsum(rows[np.arange(num_clients), chosen]), tuple(chosen.tolist())

    first = solve((), frozenset())
    if first is None:
        raise ValueError("cluster_size: no assignment of finite cost keeps every cluster within it")
    best = first[1]
    totals: list[float] = []
    changes: list[list[tuple[int, int]]] = []
    queue = [(*first, 0, frozenset[int]())]  # total, assignment, how many clients are fixed, bans on the next one
    while queue and len(totals) < k:
        total, chosen, num_fixed, banned = heapq.heappop(queue)
        totals.append(total)
        changes.append([(j, new) for j, (new, old) in enumerate(zip(chosen, best, strict=True)) if new != old])
        for j in range(num_fixed, num_clients):
            bans = (banned if j == num_fixed else frozenset[int]()) | {chosen[j]}
            solution = solve(chosen[:j], bans)
            if solution is not None:
                # What remains behind a solution is never cheaper; where rounding says so, the totals shall not.
                heapq.heappush(queue, (max(total, solution[0]), solution[1], j, bans))
    return Ranked(torch.tensor(best), totals, changes)
