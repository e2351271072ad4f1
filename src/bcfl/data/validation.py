"""Clients that are tested on a part of their own training data."""

from dataclasses import replace

import numpy as np

from bcfl.data.partition import FederatedData
from bcfl.randomness import numpy_generator


def with_validation(data: FederatedData, share: float, seed: int) -> FederatedData:
    """Each client's test data is a random `share` of its own training data; the real test data is gone.

    So that settings can be chosen without touching test data.
    """
    if not 0 < share < 1:
        raise ValueError(f"share = {share}: must be above 0 and below 1")
    train_of, test_of = [], []
    for client, held in enumerate(data.train_of):
        if len(held) < 2:
            raise ValueError(f"client {client}: one training example cannot be cut into training and validation data")
        shuffled = numpy_generator(seed, "validation", client).permutation(len(held))
        num_test = min(max(round(share * len(held)), 1), len(held) - 1)
        train_of.append(held[np.sort(shuffled[num_test:])])
        test_of.append(held[np.sort(shuffled[:num_test])])
    return replace(
        data,
        x_test=data.x_train,
        y_test=data.y_train,
        train_of=tuple(train_of),
        test_of=tuple(test_of),
        num_unused=len(data.y_train) - int(data.num_examples.sum()),
        description=f"{data.description} validation {share:g} seed {seed}",
    )
