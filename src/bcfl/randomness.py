"""Random streams as functions of their path, so that a draw never depends on what was drawn before it.

A run is the same whatever the engine, the number of workers or a restart, because every draw names
what it is for: `generator(seed, "batches", round, client)`.
"""

import hashlib

import numpy as np
import torch

Path = int | str


def stream_seed(seed: int, *path: Path) -> int:
    """A 63-bit seed that is a fixed function of `seed` and `path`, the same on every platform."""
    parts = (f"str:{part}" if isinstance(part, str) else f"int:{int(part)}" for part in (seed, *path))
    text = "/".join(parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, *path: Path) -> torch.Generator:
    """A torch generator for the stream named by `path`; torch uses the lower 32 bits of its seed."""
    return torch.Generator().manual_seed(stream_seed(seed, *path))


def numpy_generator(seed: int, *path: Path) -> np.random.Generator:
    """A NumPy generator for the stream named by `path`."""
    return np.random.default_rng(stream_seed(seed, *path))
