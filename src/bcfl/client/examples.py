"""A client's examples, and the order in which training goes through them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 64  # examples per forward pass where no gradient is needed: more would fall out of the cache


@dataclass(frozen=True)
class Examples:
    """A client's examples: its rows of a pool that all clients of this machine share."""

    x: Tensor  # (example, ...) pool; images lie as (example, height, width, channel), see `pool`
    y: Tensor  # (example,) int64 pool
    index: Tensor  # (own example,) -> row of the pool
    images: bool

    def __len__(self) -> int:
        return len(self.index)

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and labels of some of the client's examples."""
        places = self.index[rows]
        x = self.x.index_select(0, places)
        return (x.permute(0, 3, 1, 2) if self.images else x), self.y.index_select(0, places)

    def chunks(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.batch(part) for part in rows.split(CHUNK))


def pool(x: Tensor) -> tuple[Tensor, bool]:
    """The inputs laid out so that a gathered batch of images is in channels-last format; whether they are images."""
    images = x.dim() == 4
    return (x.permute(0, 2, 3, 1).contiguous() if images else x.contiguous()), images


def batches(num_examples: int, batch_size: int, num_steps: int, generator: torch.Generator) -> Tensor:
    """`num_steps` batches of row indices: pass after pass over all examples, each in a new random order."""
    # (step, example)
    size = min(batch_size, num_examples)
    passes = -(-num_steps * size // num_examples)
    order = torch.cat([torch.randperm(num_examples, generator=generator) for _ in range(passes)])
    return order[: num_steps * size].view(num_steps, size)
