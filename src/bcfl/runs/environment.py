"""What a run was made with."""

import functools
import hashlib
import platform
from pathlib import Path

import numpy as np
import torch

from bcfl import __version__


def environment(device: str = "cpu", at_a_time: int = 1) -> dict[str, str]:
    """Versions, machine and how many clients were trained at a time, for whoever wants to repeat a run."""
    return {
        "bcfl": __version__,
        "source": source_digest(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "processor": platform.machine(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        "together": str(at_a_time),
    }


@functools.cache
def source_digest(package: Path = Path(__file__).parent.parent) -> str:
    """What tells this code from any other: between two releases the version stays the same."""
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
