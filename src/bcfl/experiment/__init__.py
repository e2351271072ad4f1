"""Experiments: a configuration, a run that survives anything, and what it measured."""
