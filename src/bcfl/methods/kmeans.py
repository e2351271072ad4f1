"""Clustering clients by their models: distances in parameter space, k-means, and warm-up."""

from typing import TYPE_CHECKING

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from bcfl.belief.gaussian import flat
from bcfl.belief.robust import Robust, all_bounded, middle, no_farther, weight_of
from bcfl.federation import Clients, Jobs
from bcfl.methods.steps import draw_starts
from bcfl.randomness import stream_seed

if TYPE_CHECKING:
    from sklearn.cluster import KMeans

BLOCK = 1 << 20  # parameters per block where the work is done in double precision


def gram(rows: Tensor) -> Tensor:
    """Inner products of the rows about their common centre, in double precision and little memory."""
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for block in rows.split(BLOCK, dim=1):
        centred = block.double() - block.double().mean(0)
        total += centred @ centred.T
    return total  # (row, row)


def squared_distances(rows: Tensor) -> Tensor:
    """‖row − row'‖² of every two rows."""
    inner = gram(rows)
    return (inner.diagonal()[:, None] + inner.diagonal() - 2 * inner).clamp(min=0)  # (row, row)


def k_means(
    points: Tensor,
    weight: Tensor,
    num_clusters: int,
    seed: int,
    centres: Tensor | None = None,
    held: Tensor | None = None,
) -> Tensor:
    """The cluster of each point by weighted k-means; from `centres` if given, else the best of ten k-means++ starts.

    Distances among n points need only n coordinates, however many parameters the points have: k-means runs on those.
    With fewer points than clusters each point goes to the nearest centre (or to a cluster of its own). A centre that is
    nearest to no point is moved to the farthest one, unless it is `held` (centre,) for points that are away.
    """  # (point, parameter), (point,) -> (point,)
    from sklearn.cluster import KMeans  # takes a second to import, and only a server needs it

    everything = points if centres is None else torch.cat([points, centres])
    values, vectors = torch.linalg.eigh(gram(everything))
    coordinates = vectors * values.clamp(min=0).sqrt()  # (point and centre, coordinate): the same distances
    own, start = coordinates[: len(points)], coordinates[len(points) :]
    if centres is None:
        if len(points) < num_clusters:
            return torch.arange(len(points))
        means = KMeans(num_clusters, init="k-means++", n_init=10, random_state=seed % 2**32)
        return _labels(means, own, weight)
    nearest = torch.cdist(own, start).argmin(1)
    if len(points) < num_clusters:
        return nearest
    taking_part = torch.arange(num_clusters)
    if held is not None:
        taking_part = (~held | (torch.bincount(nearest, minlength=num_clusters) > 0)).nonzero()[:, 0]
    means = KMeans(len(taking_part), init=start[taking_part].numpy(), n_init=1, random_state=seed % 2**32)
    return taking_part[_labels(means, own, weight)]


def _labels(means: "KMeans", points: Tensor, weight: Tensor) -> Tensor:
    with threadpool_limits(1):  # sums over several threads would depend on their number
        means.fit(points.numpy(), sample_weight=weight.numpy())
    return torch.from_numpy(means.labels_).long()


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
