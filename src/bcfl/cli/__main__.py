"""The command line as a program."""

import sys

from bcfl.cli import main

sys.exit(main())
