"""Who belongs to which cluster: the best assignments, weighted hypotheses of them, and what they say together.

A cost is a negative log-probability, so small is likely, sums are joint, and +∞ is impossible. Weights are kept as
logarithms throughout. The assignment of client j in hypothesis h is `assignment[h, j]`, a cluster index.
"""

import heapq
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import scipy  # loads its optimisers when they are first used: a client never needs them
import torch
from torch import Tensor

ClusterSize = tuple[int, int]  # fewest and most clients in every cluster
Search = Literal["exact", "one_change"]
Counts = npt.NDArray[np.int64]  # (cluster,)


class _Ranked(NamedTuple):
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

    `cost` is (client, cluster); a total is the sum of the chosen entries (eq. opt_assig, murty_assig). Returns the
    assignments (k', client) and totals (k',), where k' = min(k, number of assignments of finite cost), which is
    K^C when no entry is +∞.

    Order of equal totals: clusters of a client are ranked by (cost, index), clients by (gap between their two best
    clusters, index); each assignment is the list of its departures (client rank, cluster rank) from the very best
    one, and equal totals come in the lexicographic order of these lists. So the k best are always the beginning of
    the k+1 best. With `cluster_size` = (fewest, most) clients in every cluster the k best among the assignments
    within these limits are found by Murty's algorithm; equal totals then come in a fixed order of discovery.

    Sums are taken in float64: totals that differ by less than their rounding count as equal.
    """
    return _in_full(_rank(cost, k, cluster_size))


def one_change_assignments(cost: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The best assignment and the cheapest single changes of it: the paper's heuristic, for comparison only.

    From the fourth entry on it can miss assignments in which two clients change together.
    """
    return _in_full(_rank(cost, k, None, search="one_change"))


def _in_full(ranked: _Ranked) -> tuple[Tensor, Tensor]:
    assignments = ranked.best.expand(len(ranked.totals), -1).clone()
    for rank, changes in enumerate(ranked.changes):
        for client, cluster in changes:
            assignments[rank, client] = cluster
    return assignments, torch.tensor(ranked.totals, dtype=torch.float64)


def _rank(
    cost: Tensor,
    k: int,
    cluster_size: ClusterSize | None,
    elsewhere: Tensor | None = None,
    search: Search = "exact",
) -> _Ranked:
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


def _rank_free(cost: Tensor, best_cost: Tensor, best: Tensor, k: int) -> _Ranked:
    """Best-first search over departures from the best assignment: O(CK) to prepare, O(k log k) after that.

    Only the k − 1 clients with the smallest gap between their two best clusters can take part: for any other, the
    best assignment and k − 1 single departures are at least as good.
    """
    base = float(best_cost.sum(dtype=torch.float64))
    if k == 1:  # the gaps are not needed
        return _Ranked(best, [base], [[]])
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
    return _Ranked(best, totals, changes)


def _rank_one_change(cost: Tensor, best_cost: Tensor, best: Tensor, k: int) -> _Ranked:
    base = float(best_cost.sum(dtype=torch.float64))
    extra = (cost - best_cost[:, None]).scatter(1, best[:, None], math.inf).flatten()
    order = extra.argsort(stable=True)[: k - 1]
    order = order[extra[order].isfinite()]
    changes = [[divmod(place, cost.shape[1])] for place in order.tolist()]
    return _Ranked(best, [base, *(base + dear for dear in extra[order].tolist())], [[], *changes])


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


def _rank_limited(cost: Tensor, k: int, least: Counts, room: Counts) -> _Ranked:
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
    return _Ranked(torch.tensor(best), totals, changes)


@dataclass(frozen=True)
class Branches:
    """Weighted stories about one round: which past hypothesis each continues, and who is where now."""

    parent: Tensor  # (hypothesis,) -> past hypothesis
    assignment: Tensor  # (hypothesis, client) -> cluster
    log_weight: Tensor  # (hypothesis,), normalised, best first


def normalise(log_weight: Tensor) -> Tensor:
    """The log-weights shifted so that the weights sum to one."""
    return log_weight.log_softmax(0)  # takes the maximum off first: large common offsets do not eat the digits


def branch(
    log_weight: Tensor,
    cost: Tensor,
    k: int,
    cluster_size: ClusterSize | None = None,
    family: Tensor | None = None,
    family_margin: float = 0.0,
    elsewhere: Tensor | None = None,
    search: Search = "exact",
) -> Branches:
    """The k likeliest continuations of all past hypotheses together, best first (eq. DA_optimization).

    `cost` is (hypothesis, client, cluster): what each past hypothesis makes of the new data. The log-weight of a
    continuation is that of its parent minus its cost (eq. weight_update), normalised over the k that are returned.
    Equal weights: the earlier parent first, then the order of `k_best_assignments`.

    With `family` (hypothesis,) the best continuation of every family has precedence as long as its log-weight is
    within `family_margin` of the very best: near-copies of one story then cannot crowd out a different one before the
    evidence has spoken.

    `elsewhere` (hypothesis, cluster) counts clients that keep their clusters without being asked: `cluster_size` counts
    them, too. A cluster then has fewer than the fewest only while there are too few clients to give all as many.

    With `search` "one_change" a past hypothesis' continuations are the best and single changes of it, as in
    `one_change_assignments`; it knows no `cluster_size`.
    """
    if log_weight.dim() != 1 or cost.dim() != 3 or len(log_weight) != len(cost) or not len(cost):
        shapes = f"{tuple(log_weight.shape)} and {tuple(cost.shape)}"
        raise ValueError(f"log_weight must be (hypothesis,) beside cost (hypothesis, client, cluster), got {shapes}")
    past = log_weight.double().tolist()
    if not all(weight < math.inf for weight in past) or max(past) == -math.inf:
        raise ValueError("log_weight must not hold NaN or +∞, and at least one entry must be finite")
    ranked = {
        h: _rank(cost[h], k, cluster_size, None if elsewhere is None else elsewhere[h], search)
        for h, weight in enumerate(past)
        if weight > -math.inf
    }
    candidates = sorted(
        (total - past[h], h, rank) for h, row in ranked.items() for rank, total in enumerate(row.totals)
    )
    if family is not None:
        order = _heads_first(
            [-total for total, _, _ in candidates], [int(family[h]) for _, h, _ in candidates], family_margin
        )
        candidates = [candidates[i] for i in order]
    candidates = sorted(candidates[:k])
    return Branches(
        parent=torch.tensor([h for _, h, _ in candidates]),
        assignment=torch.stack([ranked[h].assignment(rank) for _, h, rank in candidates]),
        log_weight=normalise(torch.tensor([-total for total, _, _ in candidates], dtype=torch.float64)),
    )


def reweight(branches: Branches, log_weight: Tensor) -> Branches:
    """The same stories with other (unnormalised) log-weights, best first again; equal weights keep their order."""
    _check_weighted(branches.assignment, log_weight)
    order = log_weight.argsort(descending=True, stable=True)
    return Branches(branches.parent[order], branches.assignment[order], normalise(log_weight[order].double()))


def _heads_first(log_weight: list[float], family: list[int], margin: float) -> list[int]:
    """The order in which stories are kept: first each family's best within `margin` of the very best, then the rest.

    `log_weight` is best first, and both parts stay so.
    """
    heads: dict[int, int] = {}
    for i, own in enumerate(family):
        heads.setdefault(own, i)
    safe = {i for i in heads.values() if log_weight[0] - log_weight[i] <= margin}
    return sorted(range(len(family)), key=lambda i: i not in safe)


def prune(
    branches: Branches,
    max_hypotheses: int,
    min_weight: float = 0.0,
    family: Tensor | None = None,
    family_margin: float = 0.0,
) -> Branches:
    """The heaviest stories: first those under `min_weight` go (never all), then all beyond `max_hypotheses`.

    `family` is that of the past hypotheses and gives precedence to families as in `branch`.
    """
    if max_hypotheses < 1:
        raise ValueError(f"max_hypotheses must be at least 1, got {max_hypotheses}")
    if not 0 <= min_weight < 1:
        raise ValueError(f"min_weight must be in [0, 1), got {min_weight}")
    enough = max(1, int((branches.log_weight.exp() >= min_weight).sum()))
    kept = list(range(enough))
    if family is not None:
        kept = _heads_first(
            branches.log_weight[:enough].tolist(), family[branches.parent[:enough]].tolist(), family_margin
        )
    rows = torch.tensor(sorted(kept[:max_hypotheses]))
    return Branches(branches.parent[rows], branches.assignment[rows], normalise(branches.log_weight[rows]))


def _check_weighted(assignment: Tensor, log_weight: Tensor) -> None:
    if assignment.dim() != 2 or log_weight.shape != assignment.shape[:1]:
        shapes = f"{tuple(log_weight.shape)} and {tuple(assignment.shape)}"
        raise ValueError(f"log_weight must be (hypothesis,) beside assignment (hypothesis, client), got {shapes}")


def marginals(assignment: Tensor, log_weight: Tensor, num_clusters: int) -> Tensor:
    """The probability that a client belongs to a cluster, summed over hypotheses.

    Clusters of the same index must mean the same in all hypotheses: see `align`. A client that a hypothesis leaves
    unassigned (−1) gets none of that hypothesis' weight.
    """  # (client, cluster)
    _check_weighted(assignment, log_weight)
    weight = log_weight.double().exp()
    probability = torch.zeros(assignment.shape[1], num_clusters, dtype=torch.float64)
    for row, share in zip(assignment, weight, strict=True):
        known = (row >= 0).nonzero()[:, 0]
        probability[known, row[known]] += share
    return probability


def renumbering(assignment: Tensor, num_clusters: int) -> Tensor:
    """What each hypothesis' clusters are called in the first hypothesis, so that the two agree most.

    Trajectories from different starts number their clusters differently; what they say together is only visible
    once cluster 2 means the same in all of them.
    """  # (hypothesis, cluster) -> cluster of the first hypothesis
    reference, names = assignment[0], []
    for row in assignment:
        both = (row >= 0) & (reference >= 0)
        pairs = row[both] * num_clusters + reference[both]
        overlap = torch.bincount(pairs, minlength=num_clusters**2).view(num_clusters, num_clusters)
        names.append(torch.from_numpy(scipy.optimize.linear_sum_assignment(overlap.numpy(), maximize=True)[1]))
    return torch.stack(names)


def align(assignment: Tensor, num_clusters: int) -> Tensor:
    """The same groupings with each hypothesis' clusters renumbered as in `renumbering`."""
    renumbered = renumbering(assignment, num_clusters).gather(1, assignment.clamp(min=0))
    return torch.where(assignment >= 0, renumbered, assignment)  # (hypothesis, client) -> cluster of the first


def co_association(assignment: Tensor, log_weight: Tensor) -> Tensor:
    """The probability that two clients share a cluster, whatever its number; unassigned clients share nothing."""
    _check_weighted(assignment, log_weight)
    shared = torch.zeros(assignment.shape[1], assignment.shape[1], dtype=torch.float64)
    for row, share in zip(assignment, log_weight.double().exp().tolist(), strict=True):
        shared += share * ((row[:, None] == row) & (row >= 0)).double()  # a float times a truth value is float32
    return shared  # (client, client)


def entropy(probability: Tensor) -> Tensor:
    """How unsure each client's association is, in nats: 0 when certain, log K when anything goes."""
    nats: Tensor = torch.special.entr(probability).sum(-1)
    return nats  # (client,)


def num_hypotheses(num_clusters: int, num_clients: int, overlapping: bool) -> int:
    """The paper's N(K, C) for one round: 2^(CK) with free association, K^C with one cluster per client."""
    if num_clusters < 1 or num_clients < 0:
        raise ValueError(f"num_clusters must be ≥ 1 and num_clients ≥ 0, got {num_clusters} and {num_clients}")
    count: int = 2 ** (num_clients * num_clusters) if overlapping else num_clusters**num_clients
    return count
