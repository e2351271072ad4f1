"""Bayesian clustered federated learning: which client belongs to which cluster, and how sure are we.

    result = bcfl.train(make_model, clients, method="bcfl-mh-3", num_clusters=4)

`python -m pydoc bcfl.train` tells more; the command line is `bcfl --help`.
"""

__version__ = "0.1.0"

# The public names by topic, and where they live; `__init__.pyi` tells the same to type checkers.
_HOME = {
    # a federation and what it comes to
    "train": "bcfl.api",
    "load": "bcfl.api",
    "Result": "bcfl.runs.result",
    # models
    "adapters": "bcfl.model.adapters",
    # data
    "lazy": "bcfl.data.lazy",
    "rows": "bcfl.data.lazy",
    "from_datasets": "bcfl.data.hub",
    "table": "bcfl.data.tables",
    "Table": "bcfl.data.tables",
}
_ROOMS = ("likelihood",)  # whose own names are public: bcfl.likelihood.of("poisson")
__all__ = ["__version__", *_HOME, *_ROOMS]


def __getattr__(name: str) -> object:
    # Importing torch takes seconds: `bcfl --help` and shell completion must not wait for it.
    import importlib

    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _ROOMS:
        return importlib.import_module(f"bcfl.{name}")
    raise AttributeError(f"module 'bcfl' has no attribute {name!r}")
