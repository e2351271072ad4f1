"""The default method on a network: bodies for every number of clusters, then heads of the clients' own on the best."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bcfl.belief.heads import HeadLayout, Heads
from bcfl.federation import Clients, Hypotheses, num_held_out
from bcfl.methods.bcfl import BCFL
from bcfl.methods.bodies import FORGETTING, first_bodies, one_of, train_bodies
from bcfl.methods.candidates import ALONE, Candidate, Choice, choose
from bcfl.methods.lastlayers import ask_held_out
from bcfl.methods.mixedstate import MixedState

VARIANCES = (0.0, 1e-4, 1e-3, 1e-2, 1e-1)  # of a last layer's weights within a cluster, among which is chosen
MOST_FEATURES = 400  # of a last layer that clients solve by Newton's steps
NUM_FOLDS = 3  # of a client's examples, where none were held out from training


@dataclass(frozen=True)
class NetworkPlan:
    """What a network's clusters are chosen among, and how."""

    candidates: Sequence[Candidate]
    search: bool
    spread: bool
    search_rounds: int
    held_out: float  # 0: nothing is held out from training
    max_examples: int | None


def begin_network(plan: NetworkPlan, state: MixedState, clients: Clients) -> MixedState:
    """Clusters for every candidate, by grouping clients that have trained alone for a while."""
    bodies = first_bodies(clients, plan.candidates, plan.held_out)
    return replace(state, bodies=bodies, hypotheses=one_of(bodies, 0))


def network_round(plan: NetworkPlan, state: MixedState, clients: Clients) -> MixedState:
    """All candidates a round on, or the one that was chosen."""
    if state.choice is None and plan.search:
        return _trial(plan, state, clients)
    alone = state.choice is not None and plan.candidates[state.choice.chosen] == ALONE
    if alone:
        bodies, _ = train_bodies(state.hypotheses, [ALONE], clients, 0.0, plan.max_examples)
        new = one_of(bodies, 0)
    else:
        greedy = BCFL(
            state.hypotheses.num_clusters,
            "greedy",
            max_hypotheses=1,
            forgetting=FORGETTING,
            scoring_examples=plan.max_examples,
        )
        new = greedy.round(state.hypotheses, clients)[0].hypotheses
    width = None if state.heads is None else float(state.heads.variance.max())
    rounds = state.rounds + 1
    if not plan.search and plan.spread and rounds == plan.search_rounds and _has_heads(clients):
        width = _width(new, clients, 0.0)
    heads = None if not width or clients.head is None else heads_on(new, clients.head, width)
    return replace(state, hypotheses=new, heads=heads, rounds=rounds, bodies=None)


def _trial(plan: NetworkPlan, state: MixedState, clients: Clients) -> MixedState:
    """All candidates a round on; after the last such round one is chosen, and whether its members differ."""
    assert state.bodies is not None
    bodies, _ = train_bodies(state.bodies, plan.candidates, clients, plan.held_out, plan.max_examples)
    rounds = state.rounds + 1
    if rounds < plan.search_rounds:
        return replace(state, bodies=bodies, hypotheses=one_of(bodies, 0), rounds=rounds)
    choice = choose(plan.candidates, held_out_by(bodies, plan, clients))
    chosen = one_of(bodies, choice.chosen)
    heads = None
    if plan.candidates[choice.chosen] != ALONE and _has_heads(clients):
        assert clients.head is not None
        width = _width(chosen, clients, plan.held_out)
        heads = heads_on(chosen, clients.head, width) if width else None
    return replace(state, bodies=None, hypotheses=chosen, heads=heads, choice=choice, rounds=rounds)


def held_out_by(bodies: Hypotheses, plan: NetworkPlan, clients: Clients) -> Tensor:
    """Each client's mean log-likelihood, under each candidate, of the examples held out; NaN where nobody knows."""
    wanted = torch.zeros(len(clients.present), len(bodies.models), dtype=torch.bool)
    own = bodies.model_of.gather(1, bodies.assignment.clamp(min=0)).T  # (client, candidate) -> model
    wanted.scatter_(1, own, True)
    told = clients.score(bodies.models.mean, None, plan.held_out, wanted=wanted).gather(1, own)
    count = num_held_out(clients.num_examples, plan.held_out)
    return torch.where((count > 0)[:, None], told / count.clamp(min=1)[:, None], torch.nan)


def _has_heads(clients: Clients) -> bool:
    """Whether clients can solve last layers of their own."""
    return clients.head is not None and clients.head.num_inputs <= MOST_FEATURES


def _width(chosen: Hypotheses, clients: Clients, held_out: float) -> float:
    """The variance within clusters that predicts kept-aside examples best; 0: members share one last layer."""
    layout = clients.head
    assert layout is not None
    parts = [heads_on(chosen, layout, width) for width in VARIANCES]
    folds = range(1 if held_out else NUM_FOLDS)
    count, per = len(folds), len(parts[0])
    first = parts[0]
    places = torch.arange(len(VARIANCES) * count)
    heads = Heads(
        first.models,
        first.body_of.repeat(len(places)),
        first.mean.repeat(len(places), 1),
        torch.cat([part.variance.repeat(count, 1) for part in parts]),
        first.noise.repeat(len(places)),
        first.log_share.repeat(len(places)),
        (places // count).repeat_interleave(per),
        (places % count).repeat_interleave(per),
        count,
        held_out,
    )
    choice: Choice = choose([Candidate(per, width > 0) for width in VARIANCES], ask_held_out(clients, heads))
    return VARIANCES[choice.chosen]


def heads_on(chosen: Hypotheses, layout: HeadLayout, width: float) -> Heads:
    """The clusters' own last layers as priors of their members', each weight with that variance."""
    models = chosen.models.mean[chosen.model_of[0]]
    mean = layout.take(models)
    variance = torch.where(layout.shared, 0.0, torch.full_like(mean, width))
    count = torch.bincount(chosen.assignment[0][chosen.assignment[0] >= 0], minlength=len(models)).double() + 1
    return Heads(
        models,
        torch.arange(len(models)),
        mean,
        variance,
        layout.noise_of(models),
        (count / count.sum()).log(),
        torch.zeros(len(models), dtype=torch.int64),
        torch.full((len(models),), -1),
    )
