"""A page of the documentation as a notebook of the same name.

`python docs/hooks/notebook.py docs/tutorials/your-table.md` writes it. The notebook holds nothing of its own: text
between the page's blocks of Python, and these blocks as cells.
"""

import re
import sys
from pathlib import Path
from typing import Any

import nbformat

BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.S | re.M)


def notebook_of(page: str) -> Any:
    """The page's cells; their names follow from their places, so that the same page gives the same file."""
    cells = []
    for place, text in enumerate(BLOCK.split(page)):
        if text := text.strip():
            make = nbformat.v4.new_code_cell if place % 2 else nbformat.v4.new_markdown_cell
            cells.append(make(text, id=f"cell-{len(cells)}"))
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return nbformat.v4.new_notebook(cells=cells, metadata=kernel)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        nbformat.write(notebook_of(path.read_text()), path.with_suffix(".ipynb"))
