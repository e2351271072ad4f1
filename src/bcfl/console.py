"""The console that every command prints to."""

import os

from rich.console import Console


def console_for(stderr: bool = False) -> Console:
    """A console that takes text as it is, and is wide enough for tables where there is no terminal."""
    # Names of data sets and folders may hold brackets: they are text, not markup.
    console = Console(stderr=stderr, markup=False, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 160  # a file has no width: tables need not be folded
    return console
