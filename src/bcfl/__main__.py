"""`python -m bcfl` is the command line."""

import sys

from bcfl.cli import main

sys.exit(main())
