from bcfl.api import load as load
from bcfl.api import train as train
from bcfl.runs.result import Result as Result

__version__: str
