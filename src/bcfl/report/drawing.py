"""What figures show of a run, laid out but not drawn: columns of clients, the trellis and its marks, the graph."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bcfl.association.hypotheses import align
from bcfl.association.membership import co_membership
from bcfl.predict.metrics import rounds_until_associated
from bcfl.report.reading import Floats, Ints, Run


def accumulated_co_association(run: Run, clients: Ints | None = None) -> Floats:
    """The probability that two clients share a cluster, added up over all rounds and divided by their number."""
    chosen = np.arange(run.num_clients) if clients is None else clients
    shared = np.zeros((len(chosen), len(chosen)))
    for one in run.associations:
        if one.membership is not None:
            told = co_membership(one.membership, torch.from_numpy(one.weight).log()).numpy()
            shared += told[np.ix_(chosen, chosen)]
            continue
        # One 0/1 column per (hypothesis, cluster), so that a round's co-association is a single matrix product.
        member = one.assignment[:, chosen, None] == np.arange(run.num_clusters)  # (hypothesis, client, cluster)
        columns = member.transpose(1, 0, 2).reshape(len(chosen), -1).astype(float)
        shared += (columns * np.repeat(one.weight, run.num_clusters)) @ columns.T
    return shared / max(len(run.associations), 1)  # (client, client)


@dataclass(frozen=True)
class Columns:
    """The clients side by side in a figure: one column each, or several neighbours together where there are many."""

    members: list[Ints]  # (column,) -> clients
    colour_of: Ints  # (column,)
    labels: list[str]  # (column,)

    @property
    def thinned(self) -> bool:
        return any(len(m) > 1 for m in self.members)

    def mean(self, values: Floats) -> Floats:
        """The mean of each column's clients, over the first axis."""  # (client, …) -> (column, …)
        return np.stack([values[m].mean(0) for m in self.members])


def columns(run: Run, most: int = 160) -> Columns:
    """At most about `most` columns; only clients of one colour are put together."""
    size = -(-run.num_clients // most)
    members = []
    for colour in np.unique(run.colour_of):
        own = run.order[run.colour_of[run.order] == colour]
        members += [own[i : i + size] for i in range(0, len(own), size)]
    ends = [(run.name_of(m[0]), run.name_of(m[-1])) for m in members]
    labels = [first if first == last else f"{first} … {last}" for first, last in ends]
    return Columns(members, np.array([run.colour_of[m[0]] for m in members]), labels)


def spread(count: int, most: int) -> Ints:
    """At most `most` of 0 … count − 1, evenly spread, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))


@dataclass(frozen=True)
class Trellis:
    """Which hypothesis descends from which; nodes are numbered round by round, heaviest first."""

    round: Ints  # (node,)
    rank: Ints  # (node,)
    weight: Floats  # (node,)
    moved: Ints  # (node,) clients that this hypothesis places differently from the round's best one
    edges: Ints  # (edge, 2) -> parent node, child node
    on_best_line: NDArray[np.bool_]  # (node,) the ancestors of the final best hypothesis, and itself
    pruned: NDArray[np.bool_]  # (node,) without a child in the next round shown


def trellis(run: Run, most_rounds: int = 120) -> Trellis:
    """The lines of descent; of a long run every n-th round is shown, with descent taken across the rounds between."""
    shown = spread(len(run.associations), most_rounds)
    round_of: list[int] = []
    rank: list[int] = []
    weight: list[float] = []
    moved: list[int] = []
    edges: list[tuple[int, int]] = []
    first_node = [0]
    for position, index in enumerate(shown):
        one = run.associations[index]
        count = len(one.weight)
        named = align(torch.from_numpy(one.assignment), run.num_clusters).numpy()
        round_of += [int(index) + 1] * count
        rank += range(count)
        weight += one.weight.tolist()
        moved += (named != named[0]).sum(1).tolist()
        if position:
            ancestor = np.arange(count)
            for step in range(index, shown[position - 1], -1):
                ancestor = run.associations[step].parent[ancestor]
            edges += [(first_node[-2] + int(a), first_node[-1] + h) for h, a in enumerate(ancestor)]
        first_node.append(first_node[-1] + count)
    edge_array = np.array(edges, dtype=np.int64).reshape(-1, 2)
    parent_of = dict(zip(edge_array[:, 1].tolist(), edge_array[:, 0].tolist(), strict=True))
    best_line, node = set(), first_node[-2] if len(shown) else None
    while node is not None:
        best_line.add(node)
        node = parent_of.get(node)
    nodes = np.arange(len(rank))
    in_last_round = nodes >= (first_node[-2] if len(shown) else 0)
    return Trellis(
        round=np.array(round_of, dtype=np.int64),
        rank=np.array(rank, dtype=np.int64),
        weight=np.array(weight),
        moved=np.array(moved, dtype=np.int64),
        edges=edge_array,
        on_best_line=np.isin(nodes, list(best_line)),
        pruned=~np.isin(nodes, edge_array[:, 0]) & ~in_last_round,
    )


@dataclass(frozen=True)
class Mark:
    """Something that happened in a round of a hypothesis, as a reader is told of it."""

    kind: str  # one of KINDS_OF_MARK
    round: int
    rank: int  # the hypothesis, heaviest first
    text: str


MARK_NAMES = {
    "birth": "born",
    "merge": "merged",
    "death": "given up",
    "newcomer": "newcomer",
    "drift": "changes group",
    "followed": "found again",
}
KINDS_OF_MARK = tuple(MARK_NAMES)


def marks(run: Run) -> list[Mark]:
    """What happened to clusters and clients: one mark for each kind, round and hypothesis, in the order of rounds.

    Clusters are born, merged and given up where the method says so. What clients do is told of the heaviest hypothesis:
    a newcomer is first associated after round 1, a client drifts when its true group changes, and is followed when it
    is found with its new group.
    """
    told: dict[tuple[int, int, int], list[str]] = {}

    def tell(kind: str, round_index: int, rank: int, text: str) -> None:
        told.setdefault((round_index, rank, KINDS_OF_MARK.index(kind)), []).append(text)

    for index, one in enumerate(run.associations, 1):
        for event in one.events:
            tell(event["kind"], index, event["hypothesis"], _event_text(event))
        if index > 1:
            first = (one.assignment[0] >= 0) & (run.associations[index - 2].assignment[one.parent[0]] < 0)
            for client in np.flatnonzero(first).tolist():
                tell("newcomer", index, 0, f"client {client} joins cluster {one.assignment[0, client]}")
    if run.drift is not None:
        groups = run.groups
        assert groups is not None
        for client, waited in rounds_until_associated(run.placed, torch.from_numpy(groups)).items():
            change = int(np.flatnonzero(groups[:, client] != groups[0, client])[0]) + 1
            before, after = groups[change - 2, client], groups[change - 1, client]
            tell("drift", change, 0, f"client {client} changes from group {before} to group {after}")
            if waited is not None:
                when = "at once" if waited == 1 else f"in its round {waited}"
                tell("followed", change + waited - 1, 0, f"client {client} is found with group {after}, {when}")
    return [
        Mark(KINDS_OF_MARK[kind], round_index, rank, "; ".join(texts))
        for (round_index, rank, kind), texts in sorted(told.items())
    ]


def mark_places(happened: Sequence[Mark]) -> list[float]:
    """Above its hypothesis' dot, and above one another where several things happened at once."""  # (mark,)
    seen: dict[tuple[int, int], int] = {}
    places = []
    for mark in happened:
        above = seen.setdefault((mark.round, mark.rank), 0)
        seen[mark.round, mark.rank] += 1
        places.append(mark.rank + 1 - 0.3 - 0.22 * above)
    return places


def _event_text(event: Mapping[str, Any]) -> str:
    """A birth, merge or death in words."""
    cluster, others = event["cluster"], ", ".join(str(one) for one in event.get("from") or ())
    return {
        "birth": f"cluster {cluster} is born" + (f" from cluster {others}" if others else ""),
        "merge": f"clusters {others} become cluster {cluster}",
        "death": f"cluster {cluster} is given up",
    }[event["kind"]]


@dataclass(frozen=True)
class ClientGraph:
    """Who shared a cluster with whom over the run; of many clients an even sample, of many edges the strongest."""

    client: Ints  # (node,) -> client
    colour_of: Ints  # (node,)
    place: Floats  # (node, 2) within the unit disc: near means often together
    edges: Ints  # (edge, 2) -> node, node; weakest first
    strength: Floats  # (edge,) accumulated co-association
    dropped: int  # edges that were too many to draw


FAINTEST = 0.01  # an edge of one hundredth of the full width cannot be seen


def client_graph(run: Run, most_nodes: int = 200, most_edges: int = 2500) -> ClientGraph:
    """The graph of the accumulated co-association, laid out so that distance tells how seldom two were together."""
    client = run.order[spread(run.num_clients, most_nodes)]
    shared = accumulated_co_association(run, client)
    first, second = np.triu_indices(len(client), 1)
    visible = shared[first, second] >= FAINTEST
    first, second = first[visible], second[visible]
    strength = shared[first, second]
    kept = np.argsort(strength, kind="stable")
    if len(strength) > most_edges:
        # Equal edges are many in a well-clustered run: drawn by lot, all clients keep some of theirs.
        lot = np.random.default_rng(0).permutation(len(strength))
        kept = np.lexsort((lot, strength))[-most_edges:]
    return ClientGraph(
        client=client,
        colour_of=run.colour_of[client],
        place=_place(shared),
        edges=np.stack([first, second], 1)[kept],
        strength=strength[kept],
        dropped=int(len(strength) - len(kept)),
    )


def _place(shared: Floats, steps: int = 300) -> Floats:
    """Points whose distances follow 1 − co-association: stress majorisation (SMACOF) from a circle."""
    count = len(shared)
    angle = 2 * np.pi * np.arange(count) / max(count, 1)
    place = np.stack([np.cos(angle), np.sin(angle)], 1)
    if count > 2:
        target = 0.7 + 1.1 * (1 - shared)  # a little room between clients that are always together
        for _ in range(steps):
            distance = np.sqrt(((place[:, None] - place) ** 2).sum(-1)) + np.eye(count)
            ratio = np.where(np.eye(count, dtype=bool), 0, target / np.maximum(distance, 1e-9))
            place = (ratio.sum(1)[:, None] * place - ratio @ place) / count
    place = place - place.mean(0)
    radius = np.sqrt((place**2).sum(1)).max() if count > 1 else 1.0
    placed: Floats = place / max(radius, 1e-9)
    return placed
