"""K-means on vectors of any length, by their distances alone."""

from typing import TYPE_CHECKING

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

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
