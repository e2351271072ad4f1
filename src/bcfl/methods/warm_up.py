"""Clients grouped by the models that they train alone: a mean for each group, and a start by warm-up."""

import torch
from torch import Tensor

from bcfl.association.k_means import k_means
from bcfl.belief.gaussian import flat
from bcfl.belief.robust import Robust, all_bounded, middle, no_farther, weight_of
from bcfl.federation import Clients, Jobs
from bcfl.methods.steps import draw_starts
from bcfl.randomness import stream_seed


def cluster_means(vectors: Tensor, weight: Tensor, labels: Tensor, old: Tensor, robust: Robust) -> Tensor:
    """Each cluster's weighted mean, or its middle; an empty cluster keeps what it has."""  # (cluster, vector)
    means = old.clone()
    for cluster in labels.unique().tolist():
        if robust in ("median", "trimmed"):
            means[cluster] = middle(list(vectors[labels == cluster]), robust)
            continue
        share = torch.where(labels == cluster, weight, 0.0)
        means[cluster] = (share / share.sum()).to(vectors.dtype) @ vectors
    return means


def warm_up(clients: Clients, num_clusters: int, num_rounds: int, robust: Robust = "none") -> Tensor:
    """K starting models: clients train alone from one common model, then weighted k-means and a mean per cluster."""
    start = clients.draw_model(0, 0)
    present = clients.present.nonzero()[:, 0]
    # Without an exchange in between, `num_rounds` rounds of local training are one longer training, with its momentum.
    jobs = Jobs(torch.zeros_like(present), present, num_steps=num_rounds * clients.local_steps)
    answers = zip(present.tolist(), clients.fit(flat(start[None]), jobs), strict=True)
    arrived = [(client, posterior) for client, posterior in answers if posterior is not None]
    if not arrived:  # nobody came back in time: begin as without a warm-up
        return draw_starts(clients, num_clusters)
    posteriors = all_bounded([one for _, one in arrived], [start] * len(arrived), clients.num_parameters, robust)
    trained = torch.stack([posterior.mean for posterior in posteriors])
    weight = weight_of(clients.num_examples, robust)[[client for client, _ in arrived]]
    parameters = slice(clients.num_parameters)
    points = no_farther(trained[:, parameters], start[parameters][None], robust)
    labels = k_means(points, weight, num_clusters, stream_seed(clients.seed, "warm-up"))
    models = start.repeat(num_clusters, 1)
    for cluster in labels.unique().tolist():
        own = labels == cluster
        if robust in ("median", "trimmed"):
            models[cluster] = middle(list(trained[own]), robust)
            continue
        models[cluster] = (weight[own, None] * trained[own]).sum(0) / weight[own].sum()
    return models  # (cluster, vector)
