from bcfl import likelihood as likelihood
from bcfl.api import load as load
from bcfl.api import train as train
from bcfl.data.hub import from_datasets as from_datasets
from bcfl.data.lazy import lazy as lazy
from bcfl.data.lazy import rows as rows
from bcfl.data.tables import Table as Table
from bcfl.data.tables import table as table
from bcfl.model.adapters import adapters as adapters
from bcfl.runs.result import Result as Result

__version__: str
