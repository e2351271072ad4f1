"""Clients whose data change in mid-run: pairs of clients of different groups hold each other's data from a round on."""

from dataclasses import replace

import torch

from bcfl.data.partition import Drift, FederatedData
from bcfl.randomness import numpy_generator


def with_drift(data: FederatedData, first_round: int, share: float, seed: int) -> FederatedData:
    """The same data, of which a `share` of the clients swap theirs with a client of another group in `first_round`.

    As data are swapped, every example still belongs to exactly one client. Who swaps with whom is drawn from the seed.
    """
    setting = f"data.drift_round = {first_round}"
    if data.group is None:
        raise ValueError(f"{setting}: the true groups of {data.description} are not known, so none can be changed")
    group, num_pairs = data.group.tolist(), max(1, round(share * data.num_clients / 2))
    if len(set(group)) < 2:
        raise ValueError(f"{setting}: there must be at least 2 groups, but all clients are of one")
    # No group may give more than one client to every pair, else somebody would have to swap with its own group.
    chosen: list[int] = []
    given = dict.fromkeys(group, 0)
    for client in numpy_generator(seed, "drift").permutation(data.num_clients).tolist():
        if len(chosen) < 2 * num_pairs and given[group[client]] < num_pairs:
            chosen.append(client)
            given[group[client]] += 1
    if len(chosen) < 2 * num_pairs:
        raise ValueError(f"data.drift_share = {share:g}: {2 * num_pairs} of {data.num_clients} clients would swap, but "
                         f"only {len(chosen)} find partners in other groups")  # fmt: skip
    # In the order of groups, one half is shifted against the other by as many clients as any group has at most.
    chosen.sort(key=lambda client: group[client])
    source = torch.arange(data.num_clients)
    for one, other in zip(chosen[:num_pairs], chosen[num_pairs:], strict=True):
        source[one], source[other] = other, one
    return replace(data, drift=Drift(first_round, source))
