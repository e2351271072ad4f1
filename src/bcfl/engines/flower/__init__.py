"""A real federation on Flower: the same two questions, asked across processes and machines. Only here are records read.

Whatever comes over the wire is checked before it is used: an unsound answer is left out, counted and logged in one
line, and the round goes on without it.
"""

from bcfl.engines.flower.client import Respondent
from bcfl.engines.flower.exchange import Terms
from bcfl.engines.flower.server import FlowerEngine

__all__ = ["FlowerEngine", "Respondent", "Terms"]
