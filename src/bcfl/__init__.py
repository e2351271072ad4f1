"""Bayesian clustered federated learning: which client belongs to which cluster, and how sure are we.

    result = bcfl.train(make_model, clients, method="bcfl-mh-3", num_clusters=4)

`python -m pydoc bcfl.train` tells more; the command line is `bcfl --help`.
"""

__version__ = "0.1.0"

# The public names, and where they live; `__init__.pyi` tells the same to type checkers.
_HOME = {
    "train": "bcfl.api",
    "load": "bcfl.api",
    "table": "bcfl.data.tables",
    "Table": "bcfl.data.tables",
    "Result": "bcfl.runs.result",
}
__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> object:
    # Importing torch takes seconds: `bcfl --help` and shell completion must not wait for it.
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'bcfl' has no attribute {name!r}")
