"""Engines answer the questions of a method: on this machine, or across a real federation."""
