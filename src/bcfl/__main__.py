"""`python -m bcfl` is the command line."""

import runpy

runpy.run_module("bcfl.cli", run_name="__main__")
