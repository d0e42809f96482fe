"""`python -m weft` runs the `weft` command."""

import sys

from weft.commands.cli import main

sys.exit(main())
