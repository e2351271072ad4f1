"""`python -m bcfl` is the command line, which looks for functions where `bcfl` does: see `problem.look_here`."""

import runpy
import sys

# Python put the working directory there, where a stranger's module may lie beside his run folder.
if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]
runpy.run_module("bcfl.cli", run_name="__main__")
