"""Bayesian clustered federated learning: which client belongs to which cluster, and how sure are we.

    result = bcfl.train(make_model, clients, method="bcfl-mh-3", num_clusters=4)

`python -m pydoc bcfl.train` tells more; the command line is `bcfl --help`.
"""

TYPE_CHECKING = False  # not from typing, whose import takes longer than all that `bcfl --help` does
if TYPE_CHECKING:
    from typing import Any

    from bcfl.door import load, train
    from bcfl.experiment.result import Result

__version__ = "0.1.0"
__all__ = ["Result", "__version__", "load", "train"]

_HOME = {"train": "bcfl.door", "load": "bcfl.door", "Result": "bcfl.experiment.result"}


def __getattr__(name: str) -> "Any":
    # Importing torch takes seconds: `bcfl --help` and shell completion must not wait for it.
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'bcfl' has no attribute {name!r}")
